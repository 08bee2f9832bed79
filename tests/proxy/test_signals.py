"""Signals in the proxy: copies to different replicas, no waiting for routes, receipts to the publisher that asked."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from cluster.core.contract import SendRecords, Tick
from pixiu.errors import InvalidArgument
from pixiu.ids import EndpointID
from pixiu.placement.big_rooms import VRooms, vrooms_of
from pixiu.placement.partition import rendezvous, rendezvous_order
from pixiu.wire.record import Flag, Kind, encode
from proxy import events as ev
from proxy.core import Core
from proxy.records.signals import AwaitedSignals, replica_of_copy
from tests.proxy.driver import forward, sends, settle

A, B, C, D = EndpointID(1001), EndpointID(1002), EndpointID(1003), EndpointID(1004)
G, H = EndpointID(1010), EndpointID(1011)
THREE = ev.BrokersChanged(1, (ev.Replica(A, 0), ev.Replica(B, 0), ev.Replica(C, 0)))


def signal(key: int, number: int) -> bytes:
    return encode(Kind.SIGNAL, key, b"go", number, flags=Flag.TO_ROOM)


def core_with(brokers: ev.BrokersChanged = THREE) -> Core:
    core = Core(max_record_bytes=1000)
    core.step(brokers, 0.0)
    for stream in (1, 2):
        core.step(ev.PublisherOpened(stream), 0.0)
    return core


def publish(core: Core, record: bytes, position: int, copy: int, receipt: bool = False, stream: int = 1) -> list[ev.Effect]:
    return core.step(ev.BatchPublished(stream, record, 1, position, copy, receipt), 0.0)


def peers(effects: list[ev.Effect]) -> list[EndpointID]:
    return [send.peer for send in sends(effects)]


def test_copy_i_goes_to_the_ith_replica_in_the_order_of_the_snowflake_id() -> None:
    core = core_with()
    firsts: Counter[int] = Counter()
    for number in range(1, 300):
        sent = [peers(publish(core, signal(42, number), 3 * number - 2 + copy, copy))[0] for copy in range(3)]
        assert sent == rendezvous_order(number, [A, B, C])
        firsts[sent[0]] += 1
    assert min(firsts.values()) > 60, "one room's signals spread over the replicas"


def test_the_partition_is_that_of_the_room() -> None:
    core = core_with(ev.BrokersChanged(2, (ev.Replica(A, 0), ev.Replica(B, 1), ev.Replica(C, 1))))
    assert peers(publish(core, signal(42, 7), 1, 1)) == [A]
    assert peers(publish(core, signal(43, 7), 2, 0) + publish(core, signal(43, 7), 3, 1)) == rendezvous_order(7, [B, C])


def test_with_fewer_replicas_some_get_several_copies() -> None:
    core = core_with(ev.BrokersChanged(1, (ev.Replica(A, 0), ev.Replica(B, 0))))
    sent = [peers(publish(core, signal(42, 9), 1 + copy, copy))[0] for copy in range(3)]
    assert sent == [*rendezvous_order(9, [A, B]), sent[0]]


def test_usable_replicas_come_before_doubted_ones() -> None:
    replicas = (ev.Replica(A, 0, usable=False), ev.Replica(B, 0), ev.Replica(C, 0), ev.Replica(D, 0))
    for number in range(1, 50):
        order = [replica_of_copy(replicas, number, copy) for copy in range(4)]
        assert order == [*rendezvous_order(number, [B, C, D]), A]


def test_a_copy_stays_in_the_node_of_its_proxy_while_the_replica_there_is_usable() -> None:
    replicas = (ev.Replica(A, 0), ev.Replica(B, 0, place=ev.Place.HERE), ev.Replica(C, 0, place=ev.Place.BESIDE))
    assert {replica_of_copy(replicas, number, copy) for number in range(1, 50) for copy in range(3)} == {B}
    doubted = (replicas[0], replace(replicas[1], usable=False), replicas[2])
    assert {replica_of_copy(doubted, number, copy) for number in range(1, 50) for copy in range(3)} == {A}


def test_a_proxy_without_a_replica_leaves_those_of_other_proxies_to_them() -> None:
    beside = (ev.Replica(A, 0, place=ev.Place.BESIDE), ev.Replica(B, 0, place=ev.Place.BESIDE))
    for number in range(1, 50):
        assert replica_of_copy((*beside, ev.Replica(C, 0)), number, 1) == C
        assert replica_of_copy((*beside, ev.Replica(C, 0, usable=False)), number, 1) == rendezvous_order(number, [A, B])[1]


def test_signals_of_gateways_are_copy_0() -> None:
    record = signal(42, 11)
    effects = forward(core_with(), record)
    assert peers(effects) == rendezvous_order(11, [A, B, C])[:1]


def test_any_copy_number_is_taken() -> None:
    assert peers(publish(core_with(), signal(42, 11), 1, 2**32 - 1))[0] in (A, B, C)


@pytest.mark.parametrize("kind", [Kind.SIGNAL, Kind.CHAT])
def test_what_is_for_users_needs_relays(kind: Kind) -> None:
    (reply,) = publish(core_with(), encode(kind, 42, b"", 5), 1, 0)
    assert isinstance(reply, ev.Reply)
    assert [failure.code for failure in reply.failures] == ["UNAVAILABLE"]


def test_without_a_replica_a_signal_is_refused() -> None:
    (reply,) = publish(core_with(ev.BrokersChanged(2, (ev.Replica(A, 0),))), signal(43, 5), 1, 0)
    assert isinstance(reply, ev.Reply)
    assert [(failure.code, "partition 1" in failure.text) for failure in reply.failures] == [("UNAVAILABLE", True)]


def test_a_change_of_routes_holds_room_messages_and_no_signals() -> None:
    core = core_with()
    after = (*THREE.replicas, ev.Replica(D, 0))
    key = next(key for key in range(1, 1000) if rendezvous(key, [replica.endpoint for replica in after]) == D)
    message = encode(Kind.ROOM, key, b"hi", 1)
    (sent,) = (effect for effect in publish(core, message, 1, 0) if isinstance(effect, SendRecords))
    core.step(ev.BrokersChanged(1, after), 0.1)
    assert peers(publish(core, message, 2, 0)) == []
    assert peers(publish(core, signal(key, 2), 1, 0, stream=2)) != []
    effects = publish(core, signal(key, 3), 3, 0)
    assert peers(effects) != []
    released = settle(core, [sent], 0.15)
    assert peers(released) == [D]
    assert not any(isinstance(effect, ev.Reply) and effect.up_to > 1 for effect in released), "replies are in order"


def test_a_change_of_routes_does_not_wait_for_signals() -> None:
    core = core_with()
    publish(core, signal(42, 1), 1, 0)
    core.step(ev.BrokersChanged(1, (*THREE.replicas, ev.Replica(D, 0))), 0.1)
    assert len(peers(publish(core, encode(Kind.ROOM, 42, b"hi", 2), 2, 0))) == 1


def test_a_signal_is_resolved_as_every_record() -> None:
    core = core_with()
    (send,) = (effect for effect in publish(core, signal(42, 1), 1, 0) if isinstance(effect, SendRecords))
    assert settle(core, [send], 0.1) == [ev.Reply(1, 1, [])]


def test_only_who_asked_hears_of_the_delivery_and_once_of_each_gateway() -> None:
    core = core_with()
    publish(core, signal(42, 1), 1, 0, receipt=True)
    publish(core, signal(42, 2), 1, 0, stream=2)
    publish(core, signal(42, 3), 2, 0, receipt=True, stream=2)
    assert core.step(ev.SignalsDelivered([1, 2, 3, 3, 4], G), 0.1) == [ev.Delivered(1, [1], G), ev.Delivered(2, [3], G)]
    assert core.step(ev.SignalsDelivered([1, 2, 3], G), 0.2) == []
    assert core.step(ev.SignalsDelivered([1], H), 0.2) == [ev.Delivered(1, [1], H)], "another gateway's word is another one"
    publish(core, signal(42, 1), 2, 0, receipt=True)
    assert core.step(ev.SignalsDelivered([1], G), 0.3) == [ev.Delivered(1, [1], G)], "a repeat is answered again"


def test_a_publisher_that_is_gone_hears_nothing() -> None:
    core = core_with()
    publish(core, signal(42, 1), 1, 0, receipt=True)
    core.step(ev.PublisherClosed(1), 0.1)
    assert core.step(ev.SignalsDelivered([1], G), 0.2) == []


def test_what_is_awaited_is_bounded_and_the_oldest_go_first() -> None:
    awaited = AwaitedSignals(generation=10)
    for number in range(1, 26):
        awaited.wait(number, stream=number)
        assert len(awaited) <= 20
    assert list(awaited.delivered(range(1, 26), G)) == list(range(11, 26))
    awaited.wait(11, stream=99)
    assert awaited.delivered(range(1, 26), H)[99] == [11], "who asks again is answered on the newest stream"
    assert len(awaited) <= 20


def test_copies_of_a_signal_to_a_big_room_reach_each_vroom_by_different_replicas() -> None:
    """PiXiu §2.2.2 and §4: copy i to the i-th replica in the order of the SnowflakeID, paced as messages are."""
    by_copy: dict[int, dict[int, EndpointID]] = {}
    for copy in range(3):
        core = Core(max_record_bytes=1000, vrooms=VRooms(100, 200))
        core.step(THREE, 0.0)
        core.step(ev.PublisherOpened(1), 0.0)
        ordinary = encode(Kind.ROOM, 150, b"", 8, type=0)
        effects = core.step(ev.BatchPublished(1, signal(150, 7) + ordinary, 2, 1, copy, receipt=True), 0.0)
        found, now, told = by_copy.setdefault(copy, {}), 0.0, []
        while core.under_way:
            for send in sends(effects):
                for record in send.records:
                    if record[4] == Kind.SIGNAL:
                        found[int.from_bytes(record[24:32], "little")] = send.peer
            told += [effect for effect in effects if isinstance(effect, ev.Reply)]
            effects = settle(core, sends(effects), now) if sends(effects) else core.step(Tick(), now := core.next_deadline())
        told += [effect for effect in effects if isinstance(effect, ev.Reply)]
        assert told == [ev.Reply(1, 2, [])], "when all its copies are settled"
        assert now > 0.5, "at the pace of big rooms"
        assert core.step(ev.SignalsDelivered([7], G), now) == [ev.Delivered(1, [7], G)]
    for vroom in vrooms_of(150):
        assert [by_copy[copy][vroom] for copy in range(3)] == rendezvous_order(7, [A, B, C])


def test_a_receipt_that_nobody_would_bring_is_refused_at_once() -> None:
    core = Core(max_record_bytes=1000, receipts=False)
    core.step(THREE, 0.0)
    core.step(ev.PublisherOpened(1), 0.0)
    (reply,) = publish(core, signal(42, 7), 1, 0, receipt=True)
    assert isinstance(reply, ev.Reply)
    assert [(failure.first, failure.last, failure.code) for failure in reply.failures] == [(1, 1, InvalidArgument.code)]
    assert peers(publish(core, signal(42, 7), 2, 0)), "without one it is sent"
