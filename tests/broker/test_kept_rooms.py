"""Rooms where sessions keep filters: the broker leaves out what has to be kept for these first, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from broker.core import Core
from cluster.core.contract import NOT_TAKEN, RecordsReceived, SendControl, SendRecords, Tick
from cluster.membership import events as ev
from cluster.membership.map.updates import Update
from pixiu.ids import ALL_TOPICS, KEPT_INSTANCE, EndpointID, gateway_msg_id, topic_room
from pixiu.wire.record import QOS_SHIFT, Flag, Kind, encode
from router.core import FIRST_MARK_ID, MARK
from tests.support.effects import of

ME, ROUTER, PROXY, CHILD = EndpointID(20), EndpointID(10), EndpointID(40), EndpointID(21)
G1, G2 = EndpointID(31), EndpointID(32)
GATEWAYS = (ev.Gateway(G1, 1, 1), ev.Gateway(G2, 2, 1))
KEPT = Flag.TO_ROOM | Flag.KEPT


def mark(room: int, counter: int = 1, *, marked: bool = True) -> Update:
    return Update(FIRST_MARK_ID + counter, room, MARK, marked)


def member(room: int, instance: int = 1, value: int = 0, uin: int = 7) -> Update:
    return Update(gateway_msg_id(instance, 1, 1), room, uin, True, 0, value)


def view(partitions: int = 1, *brokers: ev.Replica) -> ev.ClusterChanged:
    routers = ev.OtherRole(1, 1, (ev.Replica(ROUTER, 0),))
    return ev.ClusterChanged(partitions, partitions, brokers, ev.NO_OTHER, GATEWAYS, routers)


def make(*members: Update) -> Core:
    core = Core(endpoint=ME, partition=0, heartbeat_s=1.0, poll_interval_s=60.0, gone_gateway_s=1.0)
    core.step(view(), 0.0)
    core.step(ev.SnapshotFinished(ROUTER, None), 0.0)
    report(core, *members)
    return core


def report(core: Core, *members: Update) -> None:
    core.step(ev.MessagesReceived(ROUTER, list(members)), 0.0)


def record(room: int, number: int, *, kind: Kind = Kind.ROOM, flags: int = Flag.TO_ROOM, qos: int | None = None) -> bytes:
    return encode(kind, room, b"x", number, flags=flags, origin=0 if qos is None else qos + 1 << QOS_SHIFT)


def send(core: Core, *records: bytes, now: float = 1.0) -> tuple[dict[EndpointID, list[bytes]], bool]:
    """Returns who got what, and whether the batch was taken."""
    data = b"".join(records)
    effects: Sequence[object] = core.step(RecordsReceived(PROXY, data, 0, len(data), len(records)), now)
    return {parcel.peer: list(parcel.records) for parcel in of(SendRecords, effects)}, NOT_TAKEN not in effects


@pytest.mark.parametrize("qos", [None, 1, 2])
def test_what_must_be_kept_is_left_out_until_it_is(qos: int | None) -> None:
    core = make(member(42), mark(42))
    assert send(core, record(42, 1, qos=qos)) == ({}, False)
    kept = record(42, 1, qos=qos, flags=KEPT)
    assert send(core, kept) == ({G1: [kept]}, True)
    assert core.fanout.counters.records_not_kept == 1
    assert core.counters.gateways_unknown == 0, "the mark is no gateway"


def test_the_other_records_of_a_batch_are_delivered() -> None:
    core = make(member(42), member(43), mark(42))
    other, qos_0 = record(43, 1), record(42, 3, qos=0)
    signal = record(42, 4, kind=Kind.SIGNAL)
    assert send(core, other, record(42, 2), qos_0, signal) == ({G1: [other, qos_0, signal]}, False)
    assert send(core, other, qos_0, signal) == ({G1: [other, qos_0, signal]}, True)


def test_a_room_without_members_has_kept_filters_all_the_same() -> None:
    core = make(mark(42))
    assert send(core, record(42, 1)) == ({}, False)
    assert send(core, record(42, 1, flags=KEPT)) == ({}, True)


def test_the_room_of_all_topics_speaks_for_every_topic() -> None:
    topic = topic_room("jobs")
    core = make(member(topic), member(42))
    plain, numbered = record(topic, 1), record(42, 2)
    assert send(core, plain, numbered) == ({G1: [plain, numbered]}, True)
    report(core, mark(ALL_TOPICS))
    assert send(core, plain, numbered) == ({G1: [numbered]}, False)
    report(core, mark(ALL_TOPICS, 2, marked=False))
    assert send(core, plain) == ({G1: [plain]}, True)


def test_a_room_with_groups_of_shared_subscriptions_is_kept_too() -> None:
    core = make(member(42), member(42, 2, value=2, uin=77_001), mark(42))
    assert send(core, record(42, 1)) == ({}, False)
    got, taken = send(core, record(42, 1, flags=KEPT))
    assert (set(got), taken) == ({G1, G2}, True)


def test_a_mark_outlives_every_purge_and_ends_when_routers_say_so() -> None:
    core = make(member(42), mark(42))
    for second in range(2, 10):
        core.step(Tick(), float(second))
    assert core.membership.gateways(42) == (1, KEPT_INSTANCE)
    report(core, mark(42, 2, marked=False))
    plain = record(42, 1)
    assert send(core, plain, now=10.0) == ({G1: [plain]}, True)


def test_after_a_doubling_what_must_be_kept_goes_back_to_its_sender() -> None:
    core = make(member(42), mark(42), member(43))
    core.step(view(2, ev.Replica(CHILD, 1)), 1.0)
    data = record(43, 1)
    effects = core.step(RecordsReceived(PROXY, data, 0, len(data), 1), 2.0)
    assert NOT_TAKEN in effects
    assert [effect.peer for effect in of(SendControl, effects)] == [PROXY], "the sender learns of the new layout"
    kept, qos_0 = record(43, 2, flags=KEPT), record(43, 3, qos=0)
    assert send(core, kept, qos_0, now=3.0) == ({CHILD: [kept, qos_0]}, True)
