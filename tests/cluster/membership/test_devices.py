"""Relay data: last writer wins by key, the current connection of a device, snapshots; and the hybrid clock."""

from __future__ import annotations

import random

import pytest

from cluster.membership.map.devices import Devices, LoginPolicy, connected, device_key
from cluster.membership.map.lww_map import Key
from cluster.membership.map.updates import Chunk, Update, decode_messages, encode_messages
from cluster.wire.v1 import control_pb2
from gateway.membership.hybrid_clock import COUNT_BITS, HybridClock
from pixiu.errors import MalformedData
from pixiu.ids import MAX_ID, gateway_msg_id

A, B = 3, 4
"""Gateway instances."""
TOMBSTONE_S = 100.0


def on(counter: int, instance: int = A, device: int = 1, time: int = 0, uin: int = 7, chat: bool = True) -> Update:
    return connected(gateway_msg_id(instance, 1, counter), uin, device, time or counter, chat=chat)


def off(counter: int, instance: int = A, device: int = 1, uin: int = 7) -> Update:
    return Update(gateway_msg_id(instance, 1, counter), uin, device, False, 2)


def devices(*changes: Update) -> Devices:
    made = Devices(tombstone_s=TOMBSTONE_S)
    made.apply(changes, 0.0)
    return made


def content(made: Devices) -> dict[Key, object]:
    keys = [Key(uin, device, instance) for uin in range(20) for device in range(4) for instance in (A, B)]
    return {key: found for key in keys if (found := (made.get(*key), made.value(*key)))[0] is not None}


def test_a_device_that_connects_is_online_and_offline_when_it_went() -> None:
    made = devices(on(1))
    assert [c.device for c in made.connections(7)] == [1]
    assert (len(made), made.users, made.chat_gateways(7)) == (1, 1, (A,))
    made.apply([off(2)], 1.0)
    assert (made.connections(7), made.chat_gateways(7), len(made), made.tombstones) == ([], (), 0, 1)


def test_a_message_that_was_overtaken_changes_nothing() -> None:
    made = devices(off(2))
    assert made.apply([on(1)], 0.0).changes == []
    assert made.connections(7) == []
    assert made.apply([on(3), on(3)], 0.0).changes == [on(3)]
    assert made.counters.stale == 2


def test_each_device_counts_and_each_gateway_gets_one_copy() -> None:
    made = devices(on(1, device=1), on(2, device=2), on(1, B, device=3))
    assert len(made.connections(7)) == 3
    assert made.chat_gateways(7) == (A, B)


def test_the_highest_connect_time_is_current_and_ties_go_by_instance() -> None:
    made = devices(on(1, A, time=50), on(1, B, time=40))
    assert [c.instance for c in made.connections(7)] == [A]
    assert [c.instance for c in devices(on(1, A, time=50), on(1, B, time=50)).connections(7)] == [B]
    made.apply([off(2, A)], 1.0)
    assert [c.instance for c in made.connections(7)] == [B]


def test_only_devices_that_take_messages_get_them() -> None:
    made = devices(on(1, A, device=1, chat=False), on(1, B, device=2))
    assert made.chat_gateways(7) == (B,)
    made.apply([on(2, A, device=1, time=1)], 1.0)
    assert made.chat_gateways(7) == (A, B)


def test_devices_on_an_unreachable_gateway_are_offline_until_it_is_back() -> None:
    made = devices(on(1, A, time=50), on(1, B, time=40))
    made.set_reachable(frozenset({B}))
    assert [c.instance for c in made.connections(7)] == [B]
    assert made.chat_gateways(7) == (B,)
    made.set_reachable(frozenset())
    assert made.chat_gateways(7) == ()
    made.set_reachable(frozenset({A, B}))
    assert made.chat_gateways(7) == (A,)


def test_what_is_newer_elsewhere_is_known_to_a_connect() -> None:
    made = devices(on(1, A, time=50))
    assert made.newer(on(1, B, time=40)) == 50
    assert made.newer(on(1, B, time=50)) == 0  # the tie goes to the higher instance
    assert made.newer(on(1, B, time=60)) == 0
    assert made.newer(on(1, B, device=2, time=40)) == 0
    assert made.newer(on(2, A, time=40)) == 0  # its own gateway orders by GatewayMsgID


def test_any_order_loss_of_none_and_repetition_give_the_same_map() -> None:
    chance = random.Random(5)
    counters = {A: 0, B: 0}
    said: list[Update] = []
    for _ in range(300):
        instance = chance.choice((A, B))
        counters[instance] += 1
        make = chance.choice((on, off))
        said.append(make(counters[instance], instance, chance.randrange(4), uin=chance.randrange(20)))
    expected = content(devices(*said))
    assert expected
    for _ in range(5):
        shuffled = said * 2
        chance.shuffle(shuffled)
        assert content(devices(*shuffled)) == expected


def test_a_snapshot_merged_into_another_map_carries_everything_in_parts() -> None:
    source = devices(*[on(i + 1, device=i % 3, uin=i) for i in range(20)], *[off(i + 100, uin=i, device=i % 3) for i in range(5)])
    copy = Devices()
    chunks = list(source.snapshot(chunk_entries=4))
    assert len(chunks) > 3
    for chunk in chunks:
        copy.merge(chunk, 0.0)
    assert content(copy) == content(source)
    half = Devices()
    for chunk in source.snapshot(1, 2):
        half.merge(chunk, 0.0)
    assert {key.group % 2 for key in content(half)} == {1}


def test_one_that_changes_between_two_chunks_is_right_after_its_live_message() -> None:
    source, copy = devices(*[on(i + 1, uin=i) for i in range(10)]), Devices()
    chunks = source.snapshot(chunk_entries=3)
    copy.merge(next(chunks), 0.0)
    live = [off(50, uin=9), on(51, uin=8, time=77)]
    source.apply(live, 0.0)
    copy.apply(live, 0.0)
    for chunk in chunks:
        copy.merge(chunk, 0.0)
    assert content(copy) == content(source)


def test_a_chunk_of_another_size_is_refused_whole() -> None:
    with pytest.raises(MalformedData):
        Devices().merge(Chunk(b"x" * 30, b""), 0.0)
    with pytest.raises(MalformedData):
        Devices().merge(Chunk(b"x" * 48, b"", b"x" * 8), 0.0)


def test_a_higher_generation_drops_what_the_lower_ones_said_and_refuses_it_for_ever() -> None:
    made = devices(on(1), on(1, B))
    made.raise_floor(A, 2)
    assert made.purge_some().keys == [Key(7, 1, A)]
    assert made.apply([on(5)], 0.0).changes == []
    assert made.chat_gateways(7) == (B,)
    made.raise_floor(B, 2)
    assert made.purge_some().keys == [Key(7, 1, B)]
    assert (len(made), made.connections(7), made.chat_gateways(7)) == (0, [], ())


def test_a_doubling_drops_the_users_who_moved() -> None:
    made = devices(*[on(i + 1, uin=i) for i in range(10)])
    made.purge_partition(0, 2)
    made.purge_some()
    assert {key.group for key in content(made)} == {0, 2, 4, 6, 8}


def test_tombstones_are_forgotten_after_their_time() -> None:
    made = devices(on(1), off(2))
    assert made.expire(TOMBSTONE_S - 1) == []
    assert made.expire(TOMBSTONE_S) == [Key(7, 1, A)]


def test_changes_survive_the_wire_in_messages_that_fit_a_datagram() -> None:
    changes = [on(MAX_ID >> 32, uin=MAX_ID - i, device=MAX_ID, time=MAX_ID >> 2) for i in range(60)] + [off(9)]
    parts = encode_messages(changes)
    assert max(map(len, parts)) < 1300
    decoded = [c for part in parts for c in decode_messages(control_pb2.Control.FromString(part).gateway_messages)]
    assert decoded == changes


PHONE, DESK = 7, 8


@pytest.mark.parametrize(
    ("policy", "rivals"),
    [(LoginPolicy.ALL, {(1, B)}), (LoginPolicy.NEWEST, {(1, B), (2, A), (3, A)}), (LoginPolicy.NEWEST_OF_CLASS, {(1, B), (2, A)})],
)
def test_a_policy_says_who_may_be_online_together(policy: LoginPolicy, rivals: set[tuple[int, int]]) -> None:
    made = Devices(policy=policy)
    phone = device_key(1, PHONE)
    made.apply([on(1, B, phone), on(1, A, device_key(2, PHONE)), on(2, A, device_key(3, DESK)), on(3, A, phone, uin=8)], 0.0)
    assert {(rival.device, rival.instance) for rival in made.rivals(on(4, A, phone))} == rivals


def test_a_hybrid_clock_never_stands_still_or_goes_back() -> None:
    clock = HybridClock()
    first = clock.next(1_000)
    assert first == 1_000 << COUNT_BITS
    assert clock.next(1_000) == first + 1
    assert clock.next(5) == first + 2
    clock.see(2_000 << COUNT_BITS)
    assert clock.next(1_001) == (2_000 << COUNT_BITS) + 1
    clock.see(3)
    assert clock.next(3_000) == 3_000 << COUNT_BITS
    clock.see(MAX_ID)  # nonsense from the network does not use the clock up
    assert clock.next(3_001) == 3_001 << COUNT_BITS
