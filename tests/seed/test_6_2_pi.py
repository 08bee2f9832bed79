"""Section 6.2: Pi keeps of every user which messages wait."""

from __future__ import annotations

import pytest

from tests.seed.index import Sentences, missing

SENTENCES: Sentences = {
    "a user of another partition is refused": ("pi/core::a_user_of_another_partition_is_refused_with_the_one_that_serves_him",),
    "the list of a user is in order and has each message once": (
        "pi/against_the_model::the_state_does_what_the_model_does_and_every_replica_has_the_same_bytes",
        "pi/state::a_message_sent_again_within_the_window_has_its_number_though_it_was_acknowledged_and_trimmed",
    ),
    "an append is in the log before it is answered": (
        "pi/core::what_came_in_one_turn_is_one_entry_and_is_answered_when_it_is_applied",
    ),
    "a read says what lies behind a start, up to a number": (
        "pi/state::a_read_says_how_far_the_device_has_acknowledged",
        "pi/against_the_model::the_state_does_what_the_model_does_and_every_replica_has_the_same_bytes",
    ),
    "what was acknowledged can be deleted": (
        "pi/state::behind_the_window_what_was_acknowledged_goes_from_the_store",
        "pi/state::the_slowest_device_holds_entries_back",
    ),
    "followers store the log first and then replay it": (
        "pi/digest::a_replica_that_remembers_nothing_comes_to_the_same_state",
        "e2e/pi_replicas::a_leader_killed_again_and_again_loses_nothing_and_repeats_nothing",
    ),
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_the_sentence_has_its_tests(sentence: str) -> None:
    assert SENTENCES[sentence]
    assert not missing(SENTENCES[sentence])
