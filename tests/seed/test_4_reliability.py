"""Section 4: commands that must not be lost go by three ways."""

from __future__ import annotations

import pytest

from tests.seed.index import Sentences, missing

SENTENCES: Sentences = {
    "a command has one ID and goes as three copies by different proxies": (
        "sim/signal_loss::without_receipts_the_loss_is_that_of_three_independent_ways",
        "pixiu/client/signalling::three_copies_of_one_record_go_through_three_proxies",
    ),
    "each proxy passes it to another broker": ("proxy/signals::copy_i_goes_to_the_ith_replica_in_the_order_of_the_snowflake_id",),
    "a gateway delivers the first copy and drops the others": (
        "gateway/signals::a_later_copy_is_not_delivered_and_answered_again",
        "gateway/signals::the_first_copy_is_delivered_and_every_proxy_is_told_after_it",
    ),
    "ordinary messages of a room go to one broker, in order": (
        "proxy/proxy_core::records_go_to_the_partition_of_their_key_in_order",
    ),
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_the_sentence_has_its_tests(sentence: str) -> None:
    assert SENTENCES[sentence]
    assert not missing(SENTENCES[sentence])
