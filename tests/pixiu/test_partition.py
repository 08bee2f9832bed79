"""The partition rule and the choice of a replica."""

from __future__ import annotations

import pytest

from pixiu.partition import is_partition_count, rendezvous, rendezvous_order, serves, share_rooms


def test_partition_counts_are_powers_of_two_up_to_128() -> None:
    assert [n for n in range(-1, 300) if is_partition_count(n)] == [1, 2, 4, 8, 16, 32, 64, 128]


def test_while_doubling_the_rule_names_the_old_and_the_new_partition() -> None:
    assert [p for p in range(8) if serves(p, key=6, count=4)] == [2, 6]
    assert [p for p in range(8) if serves(p, key=6, count=8)] == [6]


@pytest.mark.parametrize(("brokers", "routers"), [(4, 2), (2, 8), (4, 4), (1, 8), (8, 1)])
def test_every_room_of_a_broker_is_known_to_a_router_that_it_meets(brokers: int, routers: int) -> None:
    for room in range(64):
        assert share_rooms(room % brokers, brokers, room % routers, routers)
    for broker in range(brokers):
        assert any(share_rooms(broker, brokers, router, routers) for router in range(routers))


def test_a_death_moves_only_the_dead_replicas_keys() -> None:
    replicas = [11, 22, 33, 44]
    before = {key: rendezvous(key, replicas) for key in range(2000)}
    after = {key: rendezvous(key, [11, 22, 44]) for key in range(2000)}
    assert all(after[key] == before[key] for key in before if before[key] != 33)
    shares = [list(before.values()).count(replica) for replica in replicas]
    assert min(shares) > 400


def test_the_order_begins_with_the_choice_and_survives_shuffling() -> None:
    assert rendezvous_order(5, [1, 2, 3]) == rendezvous_order(5, [3, 1, 2])
    assert rendezvous_order(5, [1, 2, 3])[0] == rendezvous(5, [3, 2, 1])
    with pytest.raises(ValueError, match="no replica"):
        rendezvous(5, [])
