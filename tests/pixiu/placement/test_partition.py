"""The partition rule and the choice of a replica."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pixiu.placement.partition import is_partition_count, rendezvous, rendezvous_order, serves, share_rooms, weighted_rendezvous


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


# --- weights

REPLICAS = [101, 202, 303, 404]
KEYS = range(20_000)
weights = st.dictionaries(st.integers(1, (1 << 63) - 1), st.sampled_from([1.0, 0.5, 0.25]), min_size=1, max_size=6)
keys = st.integers(0, (1 << 63) - 1)


@given(keys, weights)
def test_equal_weights_choose_as_no_weights(key: int, found: dict[int, float]) -> None:
    for weight in (1.0, 0.5, 0.25):
        assert weighted_rendezvous(key, [(replica, weight) for replica in found]) == rendezvous(key, found)


@given(keys, weights, st.randoms(use_true_random=False))
def test_the_order_in_which_replicas_are_named_does_not_matter(key: int, found: dict[int, float], rng: random.Random) -> None:
    shuffled = list(found.items())
    rng.shuffle(shuffled)
    assert weighted_rendezvous(key, shuffled) == weighted_rendezvous(key, found.items())


@given(keys, weights, st.sampled_from([1.0, 0.5, 0.25]), st.data())
def test_a_changed_weight_moves_keys_only_to_that_replica_or_away_from_it(
    key: int, found: dict[int, float], weight: float, data: st.DataObject
) -> None:
    replica = data.draw(st.sampled_from(sorted(found)))
    before = weighted_rendezvous(key, found.items())
    after = weighted_rendezvous(key, (found | {replica: weight}).items())
    if after != before:
        assert (after if weight > found[replica] else before) == replica


@given(keys, weights, st.data())
def test_a_death_moves_only_the_dead_ones_keys(key: int, found: dict[int, float], data: st.DataObject) -> None:
    dead = data.draw(st.sampled_from(sorted(found)))
    before = weighted_rendezvous(key, found.items())
    left = {replica: weight for replica, weight in found.items() if replica != dead}
    if left and before != dead:
        assert weighted_rendezvous(key, left.items()) == before


@pytest.mark.parametrize("given_weights", [(1.0, 1.0, 1.0, 1.0), (1.0, 0.5, 1.0, 0.25), (0.5, 0.25, 0.25, 0.25)])
def test_shares_are_in_proportion_to_the_weights(given_weights: tuple[float, ...]) -> None:
    pairs = list(zip(REPLICAS, given_weights, strict=True))
    counts = Counter(weighted_rendezvous(key, pairs) for key in KEYS)
    for replica, weight in pairs:
        assert counts[replica] / len(KEYS) == pytest.approx(weight / sum(given_weights), rel=0.06)


def test_a_halved_weight_moves_no_more_than_it_must() -> None:
    before = [weighted_rendezvous(key, [(replica, 1.0) for replica in REPLICAS]) for key in KEYS]
    after = [weighted_rendezvous(key, [(replica, 0.5 if replica == 101 else 1.0) for replica in REPLICAS]) for key in KEYS]
    moved = sum(one != other for one, other in zip(before, after, strict=True))
    assert moved / len(KEYS) == pytest.approx(1 / 4 - 0.5 / 3.5, rel=0.06)


def test_nobody_to_choose_from_is_a_bug_with_weights_too() -> None:
    with pytest.raises(ValueError, match="no replica"):
        weighted_rendezvous(1, [])
