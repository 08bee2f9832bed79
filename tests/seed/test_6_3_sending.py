"""Section 6.3: mail goes to Xiu, then to Pi, then a notify tells who delivers."""

from __future__ import annotations

import pytest

from tests.seed.index import Sentences, missing

SENTENCES: Sentences = {
    "a client gives a mail its Snowflake ID and sends it to a proxy": (
        "proxy/mail_under_faults::confirmed_mail_is_in_every_inbox_once_and_each_senders_in_order",
    ),
    "a proxy stores it in Xiu, then its MsgID in Pi, then answers": (
        "proxy/mail::a_batch_goes_to_xiu_then_to_pi_then_the_sender_is_told",
    ),
    "a mail that was stored before has its old MsgID": ("proxy/mail::what_was_stored_before_has_its_old_msg_id",),
    "who delivers is notified of the newest message of a user": (
        "proxy/mail_notices::what_one_turn_brings_leaves_as_one_batch_a_relay_to_the_owner_of_each_user",
        "proxy/mail_notices::what_is_not_answered_is_told_again_after_pauses_and_then_given_up",
    ),
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_the_sentence_has_its_tests(sentence: str) -> None:
    assert SENTENCES[sentence]
    assert not missing(SENTENCES[sentence])
