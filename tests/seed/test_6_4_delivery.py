"""Section 6.4: delivery pulls; five messages drive it (relays do it here, not brokers)."""

from __future__ import annotations

import pytest

from tests.seed.index import Sentences, missing

SENTENCES: Sentences = {
    "a login asks Pi for entries, then Xiu for messages, then sends": (
        "relay/delivery/sessions::a_login_opens_reads_every_lane_and_sends_lane_0_first",
        "relay/transcripts::a_transcript_is_what_happens",
    ),
    "a heartbeat is treated as a login": (
        "relay/delivery/failed_deliveries::a_fenced_session_ends_and_a_heartbeat_begins_again_later",
    ),
    "a logout says to Pi up to where the user has got messages (what was acknowledged, not what was sent)": (
        "relay/delivery/sessions::a_logout_saves_what_was_acknowledged_and_not_what_was_sent",
    ),
    "a notify of a user who is offline does nothing": ("relay/delivery/sessions::a_user_who_is_served_elsewhere_is_left_alone",),
    "a notify makes a session read what is new, unless it is sending already": (
        "relay/delivery/sessions::a_session_that_is_caught_up_sends_from_the_notify_alone",
        "relay/delivery/sessions::a_notify_during_a_fetch_makes_another_one_follow",
    ),
    "an acknowledgement lets the next messages go": ("relay/delivery/sessions::the_window_closes_and_an_acknowledgement_opens_it",),
    "every state that waits for an answer waits with a limit": (
        "relay/delivery/failed_deliveries::every_waiting_state_has_a_timeout_and_tries_again",
        "relay/delivery/sessions::every_state_can_end_and_every_waiting_state_can_fail",
    ),
    "what was not acknowledged is there at the next login": (
        "e2e/inbox::mail_sent_while_away_comes_at_the_login_once_and_in_order",
        "sim/delivery/delivery_under_faults::mail_arrives_under_faults",
    ),
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_the_sentence_has_its_tests(sentence: str) -> None:
    assert SENTENCES[sentence]
    assert not missing(SENTENCES[sentence])
