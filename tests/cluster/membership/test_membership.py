"""The last-writer-wins membership map."""

from __future__ import annotations

import gc
import random
import sys
from collections import deque
from types import FunctionType, ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.membership.map.devices import Devices
from cluster.membership.map.digest import ALL_GROUPS, BUCKETS
from cluster.membership.map.lww_map import CHUNK_ENTRIES, SNAPSHOT_CHUNK_BYTES, Key, LwwMap
from cluster.membership.map.updates import ENTRY_BYTES, MESSAGES_A_CONTROL, Chunk, Update, decode_messages, encode_messages
from cluster.wire.v1 import control_pb2
from pixiu.errors import MalformedData
from pixiu.ids import gateway_msg_id


def login(counter: int, room: int, uin: int, instance: int = 1, generation: int = 1) -> Update:
    return Update(gateway_msg_id(instance, generation, counter), room, uin, True)


def logout(counter: int, room: int, uin: int, instance: int = 1, generation: int = 1) -> Update:
    return Update(gateway_msg_id(instance, generation, counter), room, uin, False)


def contents(membership: LwwMap) -> tuple[bytes, ...]:
    """Everything, in an order that does not depend on history."""
    entries: list[bytes] = []
    for chunk in membership.snapshot():
        for mark, part in ((b"+", chunk.entries), (b"-", chunk.tombstones)):
            entries += [mark + part[at : at + ENTRY_BYTES] for at in range(0, len(part), ENTRY_BYTES)]
    return tuple(sorted(entries))


def test_a_login_makes_a_member_and_the_room_s_list_changes_once() -> None:
    membership = LwwMap()
    applied = membership.apply([login(1, 42, 7), login(2, 42, 8), login(3, 42, 7, instance=3)], 0.0)
    assert len(applied.changes) == 3
    assert applied.groups == [42]
    assert membership.gateways(42) == (1, 3)
    assert membership.members(42) == len(membership) == 3
    assert membership.apply([login(4, 42, 9)], 0.0).groups == []


def test_a_repeated_and_an_overtaken_message_change_nothing() -> None:
    membership = LwwMap()
    membership.apply([login(5, 42, 7)], 0.0)
    applied = membership.apply([login(5, 42, 7), logout(4, 42, 7)], 0.0)
    assert applied == ([], [])
    assert membership.counters.stale == 2
    assert membership.gateways(42) == (1,)


def test_a_login_of_another_room_with_a_lower_id_still_applies() -> None:
    # Seed 004 §5.2 step 12 drops what is below the gateway's highest GatewayMsgID; here IDs are compared per key.
    membership = LwwMap()
    membership.apply([login(9, 1, 7), login(3, 2, 7)], 0.0)
    assert membership.gateways(2) == (1,)


def test_a_login_overtaken_by_its_logout_does_not_revive_the_member() -> None:
    membership = LwwMap()
    membership.apply([logout(2, 42, 7)], 0.0)
    assert membership.apply([login(1, 42, 7)], 1.0).changes == []
    assert membership.gateways(42) == ()


def test_a_tombstone_is_forgotten_after_its_time_and_not_before() -> None:
    membership = LwwMap(tombstone_s=600.0)
    membership.apply([login(1, 42, 7), logout(2, 42, 7)], 10.0)
    assert membership.expire(609.9) == []
    assert membership.expire(610.0) == [Key(42, 7, 1)]
    assert membership.get(42, 7, 1) is None
    assert membership.expire(1e9) == []


def test_to_forget_tombstones_nothing_is_looked_at_that_has_none() -> None:
    membership = LwwMap(tombstone_s=5.0)
    for group, now in ((1, 0.0), (2, 0.0), (3, 4.0)):
        membership.apply([Update(group, group, 7, True), Update(10 + group, group, 7, False)], now)
    assert len(membership._burying) == 3
    assert len(membership.expire(6.0)) == 2
    assert len(membership._burying) == membership.tombstones == 1
    assert membership.expire(6.0) == []
    assert len(membership.expire(9.0)) == 1
    assert not membership._burying


def test_a_login_after_a_logout_removes_the_tombstone() -> None:
    membership = LwwMap()
    membership.apply([logout(2, 42, 7), login(3, 42, 7)], 0.0)
    assert membership.tombstones == 0
    assert membership.get(42, 7, 1) == (gateway_msg_id(1, 1, 3), True)


def test_at_the_limit_new_keys_are_refused_and_known_ones_still_move() -> None:
    membership = LwwMap(max_entries=2)
    membership.apply([login(1, 1, 1), login(2, 2, 2), login(3, 3, 3)], 0.0)
    assert (len(membership), membership.counters.refused) == (2, 1)
    assert len(membership.apply([login(4, 1, 1), logout(5, 2, 2), login(6, 3, 3)], 0.0).changes) == 3
    assert membership.gateways(3) == (1,)


def test_at_the_limit_of_tombstones_the_oldest_is_forgotten_and_counted() -> None:
    membership = LwwMap(max_tombstones=2)
    membership.apply([logout(1, 1, 1), logout(2, 2, 2), logout(3, 3, 3)], 0.0)
    assert membership.tombstones == 2
    assert membership.counters.tombstones_forgotten == 1
    assert membership.get(1, 1, 1) is None


def test_ids_out_of_range_are_counted() -> None:
    membership = LwwMap()
    wrong = [Update(0, 1, 1, True), Update(1 << 63, 1, 1, True), Update(1, 1 << 63, 1, True), Update(1, 1, 1 << 63, True)]
    assert membership.apply(wrong, 0.0) == ([], [])
    assert membership.counters.malformed == 4


def test_a_floor_drops_lower_generations_and_refuses_them_from_then_on() -> None:
    membership = LwwMap()
    membership.apply([login(1, 1, 7, 1, 1), login(2, 2, 8, 1, 1), login(1, 2, 9, 1, 2), login(1, 1, 7, 2, 1)], 0.0)
    membership.raise_floor(1, 2)
    purged = membership.purge_some()
    assert sorted(purged.keys) == [Key(1, 7, 1), Key(2, 8, 1)]
    assert purged.groups == [1]
    assert membership.gateways(1) == (2,)
    assert membership.gateways(2) == (1,)
    assert membership.apply([login(99, 5, 5, 1, 1)], 0.0).changes == []
    membership.raise_floor(1, 1)
    assert not membership.purging
    assert membership.floor(1) == gateway_msg_id(1, 2, 0)


def test_a_doubled_partition_keeps_only_its_rooms() -> None:
    membership = LwwMap()
    membership.apply([login(room + 1, room, 7) for room in range(8)] + [logout(20, 3, 9)], 0.0)
    membership.purge_partition(2, 4)
    purged = membership.purge_some()
    assert [room for room in range(8) if membership.gateways(room)] == [2, 6]
    assert len(purged.keys) == 6
    assert membership.tombstones == 1, "they go when their time is over"


@given(st.lists(st.integers(0, 200), unique=True, max_size=60), st.integers(1, 7))
def test_a_purge_in_slices_ends_as_in_one_whatever_comes_between(rooms: list[int], limit: int) -> None:
    membership = LwwMap()
    membership.apply([login(number + 1, room % 8, room) for number, room in enumerate(rooms)], 0.0)
    membership.raise_floor(1, 2)
    membership.purge_partition(1, 2)
    between: list[Update] = []
    while membership.purging:
        assert len(membership.purge_some(limit).keys) <= limit
        between.append(login(len(between) + 1, 9, 500 + len(between), 1, 2))
        membership.apply(between[-1:], 0.0)
        listed = [entry for bucket in range(BUCKETS) for entry in membership.bucket_entries(ALL_GROUPS, 1, bucket)]
        for seen in (listed, [tuple(key[:2]) for key in membership.live_keys(9)]):
            assert {entry[:2] for entry in seen} == {(9, change.member) for change in between}, "nothing below the floor is told"
    assert len(membership) == len(between)
    assert membership.generation(1) == (2 if between else 0)


def test_a_sweep_drops_what_a_snapshot_did_not_have() -> None:
    membership = LwwMap()
    membership.apply([login(1, 0, 1), login(2, 0, 2), login(3, 1, 3), login(4, 2, 4)], 0.0)
    swept = membership.sweep(0, 2, {Key(0, 1, 1)})
    assert sorted(swept.keys) == [Key(0, 2, 1), Key(2, 4, 1)]
    assert swept.groups == [2]
    assert membership.gateways(1) == (1,)


def test_a_snapshot_is_filtered_by_the_partition_rule() -> None:
    membership = LwwMap()
    membership.apply([login(room + 1, room, 7) for room in range(10)] + [logout(50, 13, 1), logout(51, 14, 1)], 0.0)
    copy = LwwMap()
    for chunk in membership.snapshot(1, 2):
        copy.merge(chunk, 0.0)
    assert [room for room in range(10) if copy.gateways(room)] == [1, 3, 5, 7, 9]
    assert copy.get(13, 1, 1) is not None
    assert copy.get(14, 1, 1) is None


@pytest.mark.slow
def test_snapshot_chunks_stay_within_their_size_and_lose_nothing() -> None:
    membership = LwwMap()
    count = CHUNK_ENTRIES + 500
    membership.apply([login(i + 1, i % 700, i) for i in range(count)], 0.0)
    membership.apply([logout(i + 1, 900, i) for i in range(CHUNK_ENTRIES)], 0.0)
    chunks = list(membership.snapshot())
    assert max(len(chunk.entries) + len(chunk.tombstones) for chunk in chunks) <= SNAPSHOT_CHUNK_BYTES
    assert len(chunks) == -(-(count + CHUNK_ENTRIES) // CHUNK_ENTRIES)
    copy = LwwMap()
    for chunk in chunks:
        copy.merge(chunk, 0.0)
    assert contents(copy) == contents(membership)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_chunks_of_any_size_carry_the_same(size: int) -> None:
    membership = LwwMap()
    membership.apply([login(i + 1, i % 3, i) for i in range(10)] + [logout(i + 1, 5, i) for i in range(5)], 0.0)
    copy = LwwMap()
    for chunk in membership.snapshot(chunk_entries=size):
        assert (len(chunk.entries) + len(chunk.tombstones)) // ENTRY_BYTES <= size
        copy.merge(chunk, 0.0)
    assert contents(copy) == contents(membership)


def test_what_changes_while_a_snapshot_is_read_reaches_the_receiver_with_the_live_messages() -> None:
    membership = LwwMap()
    membership.apply([login(i + 1, i, i) for i in range(50)], 0.0)
    chunks = membership.snapshot(chunk_entries=4)
    copy = LwwMap()
    live: list[Update] = []
    for step, chunk in enumerate(chunks):
        copy.merge(chunk, 0.0)
        changes = [logout(1000 + 2 * step, step * 3 % 50, step * 3 % 50), login(1001 + 2 * step, 100 + step, 1)]
        membership.apply(changes, 0.0)
        live += changes
    copy.apply(live, 0.0)
    assert contents(copy) == contents(membership)


@pytest.mark.parametrize("chunk", [Chunk(b"\0" * 23, b""), Chunk(b"", b"\0" * 25)])
def test_a_chunk_of_a_wrong_size_is_refused_whole(chunk: Chunk) -> None:
    with pytest.raises(MalformedData):
        LwwMap().merge(chunk, 0.0)


changes = st.builds(
    lambda instance, counter, room, uin, is_login: Update(gateway_msg_id(instance, 1, counter), room, uin, is_login),
    st.integers(0, 2),
    st.integers(1, 12),
    st.integers(0, 2),
    st.integers(0, 2),
    st.booleans(),
)


@given(st.lists(changes, max_size=40, unique_by=lambda change: change.id), st.randoms(use_true_random=False))
def test_any_order_any_repetition_and_any_split_by_snapshots_give_the_same_map(batch: list[Update], rng: random.Random) -> None:
    straight = LwwMap()
    straight.apply(batch, 0.0)
    shuffled = batch + rng.sample(batch, len(batch) // 2)
    rng.shuffle(shuffled)
    first, second = LwwMap(), LwwMap()
    cut = rng.randint(0, len(shuffled))
    first.apply(shuffled[:cut], 0.0)
    second.apply(shuffled[cut:], 0.0)
    for chunk in first.snapshot(chunk_entries=3):
        second.merge(chunk, 0.0)
    assert contents(second) == contents(straight)
    for room in range(3):
        assert second.gateways(room) == tuple(i for i in range(3) if any((second.get(room, u, i) or (0, 0))[1] for u in range(3)))


def test_messages_survive_the_wire_and_fit_a_datagram() -> None:
    batch = [Update(gateway_msg_id(32767, 1023, i + 1), (1 << 63) - 1 - i, (1 << 63) - 1, i % 2 == 0, 5) for i in range(70)]
    controls = encode_messages(batch)
    assert len(controls) == 3
    assert max(map(len, controls)) < 1300
    parsed = [control_pb2.Control.FromString(data).gateway_messages for data in controls]
    assert [len(part.messages) for part in parsed] == [MESSAGES_A_CONTROL, MESSAGES_A_CONTROL, 6]
    assert [change for part in parsed for change in decode_messages(part)] == batch


def test_a_message_with_an_unknown_action_is_malformed() -> None:
    messages = control_pb2.GatewayMessages(messages=[control_pb2.GatewayMessage(id=5, room=1, uin=1)])
    membership = LwwMap()
    membership.apply(decode_messages(messages), 0.0)
    assert (len(membership), membership.counters.malformed) == (0, 1)


def largest(found: object) -> int:
    """Bytes of the largest container that is reached from an object."""
    seen: set[int] = set()
    waiting, most = [found], 0
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | FunctionType):
            continue
        seen.add(id(one))
        if isinstance(one, dict | list | set | deque):
            most = max(most, sys.getsizeof(one))
        waiting += gc.get_referents(one)
    return most


@pytest.mark.slow
@pytest.mark.parametrize("kind", [LwwMap, Devices])
def test_no_container_of_a_map_is_so_large_that_its_growth_stops_a_loop(kind: type[LwwMap]) -> None:
    """A dict is copied in one go when it grows: with a million users in one that took tenths of a second."""
    users = 30_000
    membership = kind()
    for user in range(0, users, 1000):
        some = range(user, user + 1000)
        membership.apply([Update(gateway_msg_id(1, 1, 2 * n + 1), n, 1, True, 0, n) for n in some], 0.0)
        membership.apply([Update(gateway_msg_id(2, 1, 2 * n + 2), n, 1, False) for n in some], 0.0)
    assert (membership.groups, membership.tombstones) == (users, users)
    assert largest(membership) < 400_000, "bytes; a digest has at most 8,192 numbers of an instance"
    assert all(membership.gateways(user) == (1,) for user in range(users))


def test_the_oldest_tombstones_are_forgotten_at_the_limit_when_there_are_many() -> None:
    membership = LwwMap(max_tombstones=10_000)
    membership.apply([logout(n, n, n) for n in range(1, 20_001)], 0.0)
    assert (membership.tombstones, membership.counters.tombstones_forgotten) == (10_000, 10_000)
    kept = [n for n in range(1, 20_001) if membership.get(n, n, 1) is not None]
    assert len(kept) == 10_000
    assert kept[0] > 3_000, "each shard forgets its own oldest"
    assert len(membership.expire(700.0)) == 10_000
    assert membership.tombstones == 0
