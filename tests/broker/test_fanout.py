"""The broker's core on records: to whom, in what order, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from broker.core import Core
from cluster.core.contract import MALFORMED, NOT_TAKEN, RecordsReceived, SendControl, SendRecords, Tick
from cluster.membership import events as ev
from cluster.membership.events import Effect
from cluster.membership.map.updates import Update
from cluster.wire.v1 import control_pb2
from pixiu.ids import EndpointID, gateway_msg_id
from pixiu.wire.record import Flag, Kind, encode
from pixiu.wire.trace import Hop, Tracer, as_traced, stamps_of

ME, ROUTER, PROXY = EndpointID(20), EndpointID(10), EndpointID(40)
G1, G2, G3 = EndpointID(31), EndpointID(32), EndpointID(33)
GATEWAYS = (ev.Gateway(G1, 1, 1), ev.Gateway(G2, 2, 1), ev.Gateway(G3, 3, 1))


def login(instance: int, room: int, uin: int = 7, counter: int = 1, generation: int = 1) -> Update:
    return Update(gateway_msg_id(instance, generation, counter), room, uin, True)


def view(
    partitions: int = 1, brokers: Iterable[ev.Replica] = (), gateways: tuple[ev.Gateway, ...] = GATEWAYS, version: int = 5
) -> ev.ClusterChanged:
    routers = ev.OtherRole(1, 1, (ev.Replica(ROUTER, 0),))
    return ev.ClusterChanged(version, partitions, tuple(brokers), ev.NO_OTHER, gateways, routers)


def make(*members: Update, partition: int = 0) -> Core:
    core = Core(endpoint=ME, partition=partition, heartbeat_s=1.0, poll_interval_s=60.0, gone_gateway_s=3600.0)
    core.step(view(), 0.0)
    core.step(ev.SnapshotFinished(ROUTER, None), 0.0)
    core.step(ev.MessagesReceived(ROUTER, list(members)), 0.0)
    return core


def room_record(room: int, number: int, type: int = 64) -> bytes:
    return encode(Kind.ROOM, room, b"body %d" % number, number, flags=Flag.TO_ROOM, type=type)


def send(core: Core, *records: bytes, now: float = 1.0) -> list[Effect]:
    data = b"head" + b"".join(records) + b"tail"
    return core.step(RecordsReceived(PROXY, data, 4, len(data) - 4, len(records)), now)


def test_a_record_goes_once_to_every_gateway_with_members() -> None:
    core = make(login(1, 42), login(1, 42, uin=8, counter=2), login(2, 42))
    record = room_record(42, 1)
    assert send(core, record) == [SendRecords(G1, [record], 1), SendRecords(G2, [record], 1)]


def test_a_batch_makes_one_parcel_for_each_gateway_and_a_room_keeps_its_order() -> None:
    core = make(login(1, 42), login(2, 42), login(2, 43))
    records = [room_record(42 + i % 2, i) for i in range(6)]
    assert send(core, *records) == [SendRecords(G1, records[::2], 1), SendRecords(G2, records, 1)]


def test_lane_0_leaves_before_lane_1() -> None:
    core = make(login(1, 42))
    normal, first = room_record(42, 1), room_record(42, 2, type=3)
    assert send(core, normal, first) == [SendRecords(G1, [first], 0), SendRecords(G1, [normal], 1)]


def test_two_batches_do_not_mix() -> None:
    core = make(login(1, 42))
    assert send(core, room_record(42, 1)) == [SendRecords(G1, [room_record(42, 1)], 1)]
    assert send(core, room_record(42, 2)) == [SendRecords(G1, [room_record(42, 2)], 1)]


def test_a_room_without_members_gets_nothing_and_is_counted() -> None:
    core = make(login(1, 42))
    assert send(core, room_record(43, 1), room_record(43, 2)) == []
    assert core.fanout.counters.records_without_members == 2


def test_only_room_records_and_signals_to_rooms_pass() -> None:
    core = make(login(1, 42))
    signal = encode(Kind.SIGNAL, 42, b"s", 1, flags=Flag.TO_ROOM)
    others = [encode(Kind.SIGNAL, 42, b"s", 2), encode(Kind.CHAT, 42, b"c", 3), encode(Kind.MAIL, 42, b"m", 4)]
    assert send(core, signal, *others) == [SendRecords(G1, [signal], 1)]
    assert core.fanout.counters.records_wrong_kind == 3


@pytest.mark.parametrize("cut", [1, 39, 45])
def test_a_malformed_batch_is_dropped_whole(cut: int) -> None:
    core = make(login(1, 42))
    data = room_record(42, 1) + room_record(42, 2)[:cut]
    assert core.step(RecordsReceived(PROXY, data, 0, len(data), 2), 1.0) == [MALFORMED]
    assert core.fanout.counters.batches_malformed == 1
    assert send(core, room_record(42, 3)) == [SendRecords(G1, [room_record(42, 3)], 1)]


@pytest.mark.parametrize("count", [1, 3])
def test_a_batch_with_another_count_is_malformed(count: int) -> None:
    core = make(login(1, 42))
    data = room_record(42, 1) + room_record(42, 2)
    assert core.step(RecordsReceived(PROXY, data, 0, len(data), count), 1.0) == [MALFORMED]


def test_joins_and_leaves_take_effect_on_rooms_that_were_used_before() -> None:
    core = make(login(1, 42))
    record = room_record(42, 1)
    send(core, record)
    core.step(ev.MessagesReceived(ROUTER, [login(2, 42)]), 1.0)
    assert [effect.peer for effect in send(core, record) if isinstance(effect, SendRecords)] == [G1, G2]
    core.step(ev.MessagesReceived(ROUTER, [login(1, 42, counter=2)._replace(login=False)]), 1.0)
    assert send(core, record) == [SendRecords(G2, [record], 1)]


def test_an_instance_that_is_not_in_the_registry_gets_nothing_until_it_is() -> None:
    core = make(login(9, 42))
    assert send(core, room_record(42, 1)) == []
    assert core.counters.gateways_unknown == 1
    core.step(view(gateways=(*GATEWAYS, ev.Gateway(EndpointID(39), 9, 1))), 2.0)
    assert send(core, room_record(42, 2)) == [SendRecords(EndpointID(39), [room_record(42, 2)], 1)]


def test_entries_of_a_lower_generation_are_ignored() -> None:
    core = make(login(1, 42), login(2, 42))
    core.step(view(gateways=(ev.Gateway(EndpointID(39), 1, 2), *GATEWAYS)), 2.0)
    assert send(core, room_record(42, 1)) == [SendRecords(G2, [room_record(42, 1)], 1)]
    core.step(ev.MessagesReceived(ROUTER, [login(1, 42, uin=9, counter=50)]), 2.0)
    assert send(core, room_record(42, 1)) == [SendRecords(G2, [room_record(42, 1)], 1)]
    core.step(ev.MessagesReceived(ROUTER, [login(1, 42, generation=2)]), 2.0)
    assert {e.peer for e in send(core, room_record(42, 1)) if isinstance(e, SendRecords)} == {EndpointID(39), G2}


# --- rooms of another partition (docs/routing.md: a stale sender is answered, not ignored)


def notices(effects: Iterable[Effect]) -> list[EndpointID]:
    found = [e for e in effects if isinstance(e, SendControl)]
    assert all(control_pb2.Control.FromString(data).layout_notice.version == 6 for e in found for data in e.messages)
    return [effect.peer for effect in found]


def test_after_a_doubling_moved_rooms_are_passed_on_and_the_sender_told_once_a_second() -> None:
    new, other = EndpointID(21), EndpointID(22)
    core = make(login(1, 42), login(1, 43))
    send(core, room_record(43, 1))
    core.step(view(2, (ev.Replica(new, 1), ev.Replica(other, 0)), version=6), 10.0)
    effects = send(core, room_record(42, 2), room_record(43, 3), now=11.0)
    assert effects[:2] == [SendRecords(G1, [room_record(42, 2)], 1), SendRecords(new, [room_record(43, 3)], 1)]
    assert notices(effects) == [PROXY]
    assert notices(send(core, room_record(43, 4), now=11.5)) == []
    assert notices(send(core, room_record(43, 5), now=12.1)) == [PROXY]
    assert core.fanout.counters.records_passed_on == 3


def test_two_poll_intervals_later_they_are_refused_and_the_membership_purged() -> None:
    core = make(login(1, 42), login(1, 43))
    core.step(view(2, (ev.Replica(EndpointID(21), 1),), version=6), 10.0)
    core.step(Tick(), 129.0)
    assert core.membership.gateways(43)
    core.step(Tick(), 130.0)
    assert core.membership.gateways(43) == ()
    effects = send(core, room_record(43, 1), now=131.0)
    assert [e for e in effects if isinstance(e, SendRecords)] == []
    assert core.fanout.counters.records_unroutable == 1
    assert notices(effects) == [PROXY]
    assert effects[-1] == NOT_TAKEN, "the sender must not take it as accepted"


def test_a_moved_room_whose_new_brokers_are_all_dead_is_counted() -> None:
    core = make()
    core.step(view(2, (ev.Replica(EndpointID(21), 1),), version=6), 10.0)
    core.step(ev.PeerDead(EndpointID(21)), 10.5)
    effects = send(core, room_record(43, 1), now=11.0)
    assert [e for e in effects if isinstance(e, SendRecords)] == []
    assert effects[-1] == NOT_TAKEN
    assert core.fanout.counters.records_unroutable == 1


def test_what_can_be_delivered_or_passed_on_is_although_the_rest_of_its_batch_is_refused() -> None:
    core = make(login(1, 42))
    core.step(view(2, (), version=6), 10.0)
    effects = send(core, room_record(42, 1), room_record(43, 2), now=11.0)
    assert [e for e in effects if isinstance(e, SendRecords)] == [SendRecords(G1, [room_record(42, 1)], 1)]
    assert effects[-1] == NOT_TAKEN
    assert NOT_TAKEN not in send(core, room_record(42, 3), now=11.0)


@pytest.mark.slow
def test_while_brokers_learn_of_a_doubling_one_after_the_other_a_record_goes_round_in_no_circle() -> None:
    """Whoever passes on has the newer layout of the two; it goes to a partition that every older layout agrees with."""
    for room in range(16):
        for known in (1, 2, 4):
            seen = [room % known]
            for layout in (4, 1, 2, 4):
                core = make(partition=seen[-1])
                replicas = tuple(ev.Replica(EndpointID(100 + p), p) for p in range(4) if p != seen[-1])
                core.step(view(layout, replicas), 10.0)
                for effect in send(core, room_record(room, 1), now=11.0):
                    if isinstance(effect, SendRecords):
                        seen.append(effect.peer - 100)
            assert len(seen) == len(set(seen))


def test_every_gateways_copy_of_a_traced_record_is_stamped_once() -> None:
    times = iter(range(100, 200))
    core = Core(
        endpoint=ME,
        partition=0,
        heartbeat_s=1.0,
        poll_interval_s=60.0,
        gone_gateway_s=3600.0,
        tracer=Tracer(Hop.BROKER, lambda: next(times), partition=0, replica=lambda: 6),
    )
    core.step(view(), 0.0)
    core.step(ev.SnapshotFinished(ROUTER, None), 0.0)
    core.step(ev.MessagesReceived(ROUTER, [login(1, 42), login(2, 42)]), 0.0)
    signal = as_traced(encode(Kind.SIGNAL, 42, b"go", 4, flags=Flag.TO_ROOM))
    effects = send(core, room_record(42, 1), as_traced(room_record(42, 2)), as_traced(room_record(42, 3, type=0)), signal)
    parcels = [effect for effect in effects if isinstance(effect, SendRecords)]
    assert {parcel.peer for parcel in parcels} == {G1, G2}
    for parcel in parcels:
        for record in parcel.records:
            stamps = stamps_of(record)
            if record == room_record(42, 1):
                assert stamps is None
            else:
                assert stamps is not None
                assert [(s.role, s.partition, s.replica, s.in_us) for s in stamps] == [(Hop.BROKER, 0, 6, 100)]
                assert stamps[0].out_us > 100
    assert sum(len(parcel.records) for parcel in parcels) == 8
