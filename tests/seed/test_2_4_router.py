"""Section 2.4: routers tell brokers where members are."""

from __future__ import annotations

import pytest

from tests.seed.index import Sentences, missing

SENTENCES: Sentences = {
    "a change goes to all replicas of the broker partition of its room": (
        "router/core::a_broker_gets_only_the_rooms_of_its_partition",
        "router/core::peers_come_first_then_subscribers_then_the_database_then_the_confirmation",
    ),
    "all replicas of a partition have the same data": (
        "sim/converges_while_losing::ten_heartbeats_after_the_last_join_all_replicas_are_equal_although_the_loss_goes_on",
        "cluster/membership/membership::any_order_any_repetition_and_any_split_by_snapshots_give_the_same_map",
    ),
    "changes are written to the database asynchronously, and loaded from it at the start": (
        "router/writer::many_changes_share_a_transaction_and_all_are_there_after_closing",
        "router/core::without_a_running_peer_the_own_database_is_loaded",
    ),
    "a repeated change is not written again": (
        "cluster/membership/membership::a_repeated_and_an_overtaken_message_change_nothing",
    ),
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_the_sentence_has_its_tests(sentence: str) -> None:
    assert SENTENCES[sentence]
    assert not missing(SENTENCES[sentence])
