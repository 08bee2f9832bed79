"""Section 2.5: gateways have the clients."""

from __future__ import annotations

import pytest

from tests.seed.index import Sentences, missing

SENTENCES: Sentences = {
    "a join or leave is told to a router": (
        "gateway/gateway_core::a_first_join_is_told_to_the_router_and_answered_when_it_is_confirmed",
        "gateway/gateway_core::leaving_takes_effect_at_once_and_has_a_higher_id",
    ),
    "a message goes to all clients of its room that are connected here": (
        "gateway/gateway_core::a_message_is_one_packet_for_all_and_joined_once_a_turn",
    ),
    "a message that came before is dropped by its ID": ("gateway/gateway_core::a_message_is_delivered_once",),
    "the IDs are in shared memory, and outlive the process": (
        "gateway/signal_table::what_was_added_is_known_after_it_is_opened_again",
        "gateway/signals::after_a_restart_with_the_same_table_nothing_is_delivered_again",
        "e2e/signals::a_gateway_that_was_killed_delivers_nothing_twice",
    ),
    "what is remembered is bounded, the oldest goes first": (
        "gateway/gateway_core::the_dedupe_is_bounded_and_says_what_it_forgets_early",
    ),
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_the_sentence_has_its_tests(sentence: str) -> None:
    assert SENTENCES[sentence]
    assert not missing(SENTENCES[sentence])
