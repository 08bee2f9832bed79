"""Section 2.3: brokers know which gateways have members of a room."""

from __future__ import annotations

import pytest

from pixiu.placement.partition import serves
from tests.seed.index import Sentences, missing

SENTENCES: Sentences = {
    "a broker registers as Init and is Running when its data is loaded": (
        "broker/core::it_runs_when_the_snapshot_is_merged_and_what_came_meanwhile_is_replayed",
    ),
    "what comes while it loads is queued, and replayed afterwards": (
        "broker/core::it_runs_when_the_snapshot_is_merged_and_what_came_meanwhile_is_replayed",
        "broker/core::what_exceeds_the_queue_is_taken_at_once",
    ),
    "only rooms of its partition are kept": ("broker/core::messages_of_other_partitions_are_left_out",),
    "a message goes once to every gateway with members of its room": (
        "broker/fanout::a_record_goes_once_to_every_gateway_with_members",
    ),
    "partition counts are powers of two, and grow by doubling": (
        "pixiu/placement/partition::partition_counts_are_powers_of_two_up_to_128",
        "pixiu/placement/partition::while_doubling_the_rule_names_the_old_and_the_new_partition",
    ),
    "after a doubling rooms that moved are dropped": (
        "broker/fanout::two_poll_intervals_later_they_are_refused_and_the_membership_purged",
        "cluster/membership/membership::a_doubled_partition_keeps_only_its_rooms",
    ),
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_the_sentence_has_its_tests(sentence: str) -> None:
    assert SENTENCES[sentence]
    assert not missing(SENTENCES[sentence])


def test_while_partitions_double_a_room_is_served_by_the_old_and_by_the_new_one() -> None:
    """As two cells that divide: the layout still says 2 while partitions 2 and 3 fill."""
    for room in range(100):
        assert [partition for partition in range(4) if serves(partition, room, 2)] == [room % 2, room % 2 + 2]
        assert [partition for partition in range(4) if serves(partition, room, 4)] == [room % 4]
