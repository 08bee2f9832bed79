"""The relay's core: confirms what gateways say, keeps peers equal, carries messages to users, knows who is online."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import pytest

from cluster.core.contract import MALFORMED, NOT_TAKEN, RecordsReceived, SendControl, SendRecords, Settled, Tick
from cluster.membership import events as ev
from cluster.membership.events import Effect
from cluster.membership.map.devices import Devices, LoginPolicy, connected, device_key
from cluster.membership.map.updates import Update, decode_messages
from cluster.membership.replica.state import State
from cluster.wire.v1 import control_pb2
from pixiu.ids import EndpointID, gateway_msg_id
from pixiu.wire.record import Flag, Kind, encode
from pixiu.wire.trace import Hop, Tracer, as_traced, stamps_of
from pixiu.wire.uin_list import address, uin_list
from relay.core import Core
from relay.login_conflicts import Contests
from tests.support.effects import of

ME, PEER, OTHER = EndpointID(10), EndpointID(11), EndpointID(12)
PROXY, GATEWAY, SECOND = EndpointID(20), EndpointID(30), EndpointID(31)
GATEWAYS = (ev.Gateway(GATEWAY, 3, 1), ev.Gateway(SECOND, 4, 1))
E = TypeVar("E", bound=Effect)


def view(
    *replicas: ev.Replica, partitions: int = 1, gateways: tuple[ev.Gateway, ...] = GATEWAYS, version: int = 1
) -> ev.ClusterChanged:
    return ev.ClusterChanged(version, partitions, replicas, ev.NO_OTHER, gateways)


def make(partition: int = 0, policy: LoginPolicy = LoginPolicy.ALL) -> Core:
    return Core(
        endpoint=ME,
        partition=partition,
        heartbeat_s=1.0,
        dead_after=4,
        poll_interval_s=60.0,
        gone_gateway_s=10.0,
        devices=Devices(policy=policy),
    )


def running(*replicas: ev.Replica, partitions: int = 1, policy: LoginPolicy = LoginPolicy.ALL) -> Core:
    core = make(policy=policy)
    core.step(ev.StoreOpened(None), 0.0)
    core.step(view(partitions=partitions), 0.0)
    assert core.state is State.RUNNING
    core.step(view(*replicas, partitions=partitions), 0.0)
    return core


def connect(counter: int, uin: int = 7, instance: int = 3, device: int = 1, time: int = 100, chat: bool = True) -> Update:
    return connected(gateway_msg_id(instance, 1, counter), uin, device, time, chat=chat)


def tell(core: Core, *changes: Update, peer: EndpointID = GATEWAY, now: float = 1.0) -> list[Effect]:
    return core.step(ev.MessagesReceived(peer, list(changes)), now)


def controls(effects: Iterable[Effect]) -> list[tuple[EndpointID, control_pb2.Control]]:
    return [(e.peer, control_pb2.Control.FromString(m)) for e in of(SendControl, effects) for m in e.messages]


def confirms(effects: Iterable[Effect]) -> list[tuple[EndpointID, list[int], dict[int, int]]]:
    return [
        (peer, list(c.gateway_confirm.ids), {n.id: n.connect_time for n in c.gateway_confirm.newer})
        for peer, c in controls(effects)
        if c.HasField("gateway_confirm")
    ]


def chat(uin: int, number: int = 1, lane: int = 1, kind: Kind = Kind.CHAT, flags: int = 0) -> bytes:
    return encode(kind, uin, b"hello", number, type=lane << 6, flags=flags)


def arrive(core: Core, *records: bytes, now: float = 2.0) -> list[Effect]:
    data = b"".join(records)
    return core.step(RecordsReceived(PROXY, data, 0, len(data), len(records)), now)


def parcels(effects: Iterable[Effect]) -> list[SendRecords]:
    return of(SendRecords, effects)


def offline(effects: Iterable[Effect]) -> list[int]:
    return [number for _, control in controls(effects) for number in control.chat_offline.snowflake_ids]


def test_a_connect_is_kept_and_confirmed() -> None:
    core = running()
    effects = tell(core, connect(1))
    assert of(ev.Persist, effects)[0].puts == [connect(1)]
    assert confirms(effects) == [(GATEWAY, [connect(1).id], {})]
    assert [(u.uin, u.devices) for u in core.presence([7, 8])] == [(7, 1), (8, 0)]


def test_a_connect_is_confirmed_when_the_peers_have_it() -> None:
    core = running(ev.Replica(PEER, 0, True))
    effects = tell(core, connect(1))
    ((peer, control),) = [(p, c) for p, c in controls(effects) if c.HasField("gateway_messages")]
    assert (peer, decode_messages(control.gateway_messages)) == (PEER, [connect(1)])
    assert confirms(effects) == []
    (forward,) = of(SendControl, effects)
    assert confirms(core.step(Settled([(forward.token, True)]), 1.1)) == [(GATEWAY, [connect(1).id], {})]


def test_what_a_peer_forwards_is_kept_and_not_sent_back() -> None:
    core = running(ev.Replica(PEER, 0, True))
    assert of(SendControl, tell(core, connect(1), peer=PEER)) == []
    assert [u.devices for u in core.presence([7])] == [1]


def test_a_connect_below_another_gateways_is_told_the_highest_time() -> None:
    core = running()
    tell(core, connect(1, instance=4, time=500), peer=SECOND)
    late = connect(1, instance=3, time=100)
    assert confirms(tell(core, late)) == [(GATEWAY, [late.id], {late.id: 500})]
    once_more = connect(2, instance=3, time=501)
    assert confirms(tell(core, once_more)) == [(GATEWAY, [once_more.id], {})]
    (parcel,) = parcels(arrive(core, chat(7)))
    assert parcel.peer == GATEWAY


def test_a_message_goes_once_to_each_gateway_of_the_users_devices() -> None:
    core = running()
    tell(core, connect(1, device=1), connect(2, device=2), connect(3, uin=9))
    tell(core, connect(1, device=3, instance=4), peer=SECOND)
    relayed = arrive(core, chat(7, 1), chat(9, 2), chat(7, 3), chat(7, 4, lane=0))
    assert parcels(relayed) == [
        SendRecords(GATEWAY, [chat(7, 4, lane=0)], 0),
        SendRecords(GATEWAY, [chat(7, 1), chat(9, 2), chat(7, 3)], 1),
        SendRecords(SECOND, [chat(7, 4, lane=0)], 0),
        SendRecords(SECOND, [chat(7, 1), chat(7, 3)], 1),
    ]
    assert offline(relayed) == []


def test_the_sender_is_told_which_messages_nobody_took() -> None:
    core = running()
    tell(core, connect(1), connect(2, uin=9, chat=False))
    relayed = arrive(core, chat(7, 1), chat(8, 2), chat(9, 3))
    assert [record for parcel in parcels(relayed) for record in parcel.records] == [chat(7, 1)]
    assert offline(relayed) == [2, 3]
    assert {control.peer for control in of(SendControl, relayed)} == {PROXY}
    assert core.chat.counters.records_offline == 2


def test_users_on_a_gateway_that_vanished_or_is_silent_are_offline_and_back_with_it() -> None:
    core = running()
    tell(core, connect(1))
    core.step(ev.PeerDead(GATEWAY), 3.0)
    assert offline(arrive(core, chat(7, 1))) == [1]
    assert [u.devices for u in core.presence([7])] == [0]
    core.step(ev.PeerAlive(GATEWAY), 4.0)
    assert offline(arrive(core, chat(7, 2))) == []
    core.step(view(gateways=GATEWAYS[1:]), 5.0)
    assert offline(arrive(core, chat(7, 3))) == [3]
    core.step(view(), 6.0)
    assert offline(arrive(core, chat(7, 4))) == []


def test_a_gateway_that_starts_anew_has_none_of_its_users() -> None:
    core = running()
    tell(core, connect(1))
    core.step(view(gateways=(ev.Gateway(EndpointID(33), 3, 2),)), 5.0)
    assert len(core.devices) == 0
    assert offline(arrive(core, chat(7, 1))) == [1]


def test_a_gateway_that_is_gone_for_long_is_forgotten() -> None:
    core = running()
    tell(core, connect(1))
    core.step(view(gateways=()), 5.0)
    core.step(Tick(), 6.0)
    core.step(Tick(), 15.0)
    assert len(core.devices) == 1
    core.step(Tick(), 16.0)
    assert len(core.devices) == 0
    core.step(view(), 17.0)
    assert tell(core, connect(2)) is not None
    assert len(core.devices) == 0  # its generation is over


@pytest.mark.parametrize(
    ("record", "carried"),
    [
        (chat(7, kind=Kind.SIGNAL), True),
        (chat(7, kind=Kind.SIGNAL, flags=Flag.TO_ROOM), False),
        (chat(7, kind=Kind.ROOM, flags=Flag.TO_ROOM), False),
        (chat(7, kind=Kind.MAIL), False),
    ],
)
def test_only_what_is_for_users_is_carried(record: bytes, carried: bool) -> None:
    core = running()
    tell(core, connect(1))
    assert bool(parcels(arrive(core, record))) is carried
    assert core.chat.counters.records_wrong_kind == (not carried)


def test_nothing_of_a_malformed_batch_is_sent() -> None:
    core = running()
    tell(core, connect(1))
    good = chat(7, 1)
    for broken in (good + b"x", good + good[:20], b"\0" * 60):
        assert core.step(RecordsReceived(PROXY, broken, 0, len(broken), 2), 2.0) == [MALFORMED]
    assert core.chat.counters.batches_malformed == 3
    (parcel,) = parcels(arrive(core, good))
    assert parcel.records == [good]


def test_after_a_doubling_messages_of_moved_users_are_passed_on_for_a_while() -> None:
    core = running(ev.Replica(OTHER, 1, True))
    core.step(view(ev.Replica(OTHER, 1, True), partitions=2, version=2), 1_000.0)
    relayed = arrive(core, chat(7, 1), now=1_001.0)
    assert [(p.peer, p.records) for p in parcels(relayed)] == [(OTHER, [chat(7, 1)])]
    assert [c.layout_notice.version for _, c in controls(relayed)] == [2]
    assert NOT_TAKEN not in relayed
    late = arrive(core, chat(7, 2), now=1_000.0 + 121.0)
    assert parcels(late) == []
    assert late[-1] == NOT_TAKEN, "nobody got it, so its sender is not told that it is accepted"
    assert core.chat.counters.records_unroutable == 1


def test_a_new_replica_takes_what_a_running_one_has_before_it_runs() -> None:
    source = Devices()
    source.apply([connect(1)], 0.0)
    core = make()
    core.step(ev.StoreOpened(None), 0.0)
    (take,) = of(ev.TakeSnapshot, core.step(view(ev.Replica(PEER, 0, True)), 0.0))
    assert tell(core, connect(1, uin=8)) == []
    for chunk in source.snapshot():
        core.step(ev.SnapshotChunk(take.source, chunk), 0.5)
    effects = core.step(ev.SnapshotFinished(take.source, None), 0.6)
    assert of(ev.BecomeRunning, effects)
    assert [u.devices for u in core.presence([7, 8])] == [1, 1]


def test_snapshots_are_for_relays() -> None:
    core = running(ev.Replica(PEER, 0, True))
    assert of(ev.ServeSnapshot, core.step(ev.SnapshotRequested(1, PEER, "relay", 0, 1), 1.0))
    assert of(ev.RefuseSnapshot, core.step(ev.SnapshotRequested(2, PEER, "broker", 0, 1), 1.0))


def replaced(effects: Iterable[Effect]) -> list[tuple[EndpointID, int, int, int]]:
    found = [(peer, c.device_replaced) for peer, c in controls(effects) if c.HasField("device_replaced")]
    return [(peer, r.device, r.connect_time, r.reason) for peer, r in found]


def test_one_device_on_two_gateways_keeps_the_newer_connection() -> None:
    core = running()
    tell(core, connect(1, time=100))
    assert replaced(tell(core, connect(1, instance=4, time=101), peer=SECOND)) == [(GATEWAY, 1, 100, control_pb2.REASON_MOVED)]
    assert replaced(tell(core, connect(1, uin=8), connect(2, uin=8, device=2))) == []


def test_a_connect_that_is_not_the_newest_replaces_nobody() -> None:
    core = running()
    tell(core, connect(1, instance=4, time=500), peer=SECOND)
    assert replaced(tell(core, connect(1, time=100))) == []
    assert replaced(tell(core, connect(2, time=501))) == [(SECOND, 1, 500, control_pb2.REASON_MOVED)]


def test_the_newest_login_replaces_all_others_where_the_policy_says_so() -> None:
    core = running(policy=LoginPolicy.NEWEST)
    tell(core, connect(1, device=1, time=100))
    found = replaced(tell(core, connect(2, device=2, time=101)))
    assert found == [(GATEWAY, 1, 100, control_pb2.REASON_KICKED)]
    assert replaced(tell(core, connect(1, uin=8, instance=4, device=1, time=200), peer=SECOND)) == []


def test_the_newest_of_a_class_replaces_its_class_alone() -> None:
    core = running(policy=LoginPolicy.NEWEST_OF_CLASS)
    phone, other_phone, desk = device_key(1, 7), device_key(2, 7), device_key(3, 8)
    tell(core, connect(1, device=phone, time=100), connect(2, device=desk, time=101))
    found = replaced(tell(core, connect(3, device=other_phone, time=102)))
    assert found == [(GATEWAY, phone, 100, control_pb2.REASON_KICKED)]
    # The same device in another class is the same device.
    again = replaced(tell(core, connect(1, instance=4, device=device_key(3, 9), time=103), peer=SECOND))
    assert again == [(GATEWAY, desk, 101, control_pb2.REASON_MOVED)]


def test_a_peer_that_learns_of_the_newer_login_says_so_too() -> None:
    core = running(ev.Replica(PEER, 0, True), policy=LoginPolicy.NEWEST)
    tell(core, connect(1, device=1, time=100))
    effects = tell(core, connect(2, device=2, time=101), peer=PEER)
    (sent,) = [e for e in of(SendControl, effects) if e.peer == GATEWAY]
    assert replaced(effects) == [(GATEWAY, 1, 100, control_pb2.REASON_KICKED)]
    core.step(Settled([(sent.token, False)]), 2.0)
    assert replaced(core.step(Tick(), 3.0)) == [(GATEWAY, 1, 100, control_pb2.REASON_KICKED)]


def test_a_rooms_message_goes_once_to_each_gateway_of_its_users() -> None:
    core = running()
    reader = connected(gateway_msg_id(4, 1, 1), 9, 5, 100, chat=False, login=False)
    tell(core, connect(1), connect(2, uin=8, chat=False))
    tell(core, reader, peer=SECOND)
    record = encode(Kind.ROOM, 42, b"hello", 1, flags=Flag.TO_ROOM, type=64)
    relayed = arrive(core, address(record, uin_list([7, 8, 9, 10])), address(record, uin_list([])))
    assert parcels(relayed) == [SendRecords(GATEWAY, [record], 1), SendRecords(SECOND, [record], 1)]
    assert (core.chat.counters.addressed_in, core.chat.counters.records_wrong_kind) == (1, 1)
    assert offline(relayed) == []
    # Who only reads rooms is not online, and replaces nobody.
    assert [u.devices for u in core.presence([9])] == [0]


def test_every_gateways_copy_of_a_traced_message_is_stamped() -> None:
    times = iter(range(100, 200))
    core = Core(
        endpoint=ME,
        partition=0,
        heartbeat_s=1.0,
        dead_after=4,
        poll_interval_s=60.0,
        gone_gateway_s=10.0,
        devices=Devices(),
        tracer=Tracer(Hop.RELAY, lambda: next(times), replica=lambda: 6),
    )
    core.step(ev.StoreOpened(None), 0.0)
    core.step(view(), 0.0)
    tell(core, connect(1))
    tell(core, connect(2, instance=4, device=2), peer=SECOND)
    signal = as_traced(chat(7, 4, kind=Kind.SIGNAL))
    relayed = arrive(
        core, chat(7, 1), as_traced(chat(7, 2)), as_traced(chat(7, 3, lane=0)), signal, chat(7, 5, flags=Flag.LOAD_TEST)
    )
    assert {parcel.peer for parcel in parcels(relayed)} == {GATEWAY, SECOND}
    for parcel in parcels(relayed):
        for record in parcel.records:
            number, stamps = record[16], stamps_of(record)
            assert (stamps is None) == (number in (1, 5))
            assert [(s.role, s.replica, s.in_us) for s in stamps or ()] == [(Hop.RELAY, 6, 100)] * (number not in (1, 5))
    assert sorted(record[16] for parcel in parcels(relayed) for record in parcel.records) == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def settled(core: Core, now: float) -> list[tuple[EndpointID, int, int, int]]:
    """Whom a relay replaces when some heartbeats have passed: `now` is before, the result is of the look after them."""
    first = core.step(Tick(), now)
    return [] if replaced(first) else replaced(core.step(Tick(), now + 100.0))


def test_a_login_that_came_in_a_snapshot_replaces_the_others_some_heartbeats_later() -> None:
    source = Devices()
    source.apply([connect(1, device=1, time=100), connect(2, instance=4, device=2, time=101)], 0.0)
    core = make(policy=LoginPolicy.NEWEST)
    core.step(ev.StoreOpened(None), 0.0)
    (take,) = of(ev.TakeSnapshot, core.step(view(ev.Replica(PEER, 0, True)), 0.0))
    for chunk in source.snapshot():
        assert replaced(core.step(ev.SnapshotChunk(take.source, chunk), 0.5)) == []
    core.step(ev.SnapshotFinished(take.source, None), 0.6)
    assert settled(core, 2.0) == [(GATEWAY, 1, 100, control_pb2.REASON_KICKED)]


def test_a_word_that_was_lost_is_said_again_until_the_login_is_gone() -> None:
    core = running()
    tell(core, connect(1, time=100))
    tell(core, connect(1, instance=4, time=101), peer=SECOND)
    word = [(GATEWAY, 1, 100, control_pb2.REASON_MOVED)]
    assert settled(core, 10.0) == word
    assert replaced(core.step(Tick(), 200.0)) == word
    tell(core, Update(gateway_msg_id(3, 1, 9), 7, 1, False), now=201.0)
    assert replaced(core.step(Tick(), 300.0)) == []
    assert len(core.contests) == 0


def test_a_gateway_that_was_out_of_reach_hears_of_the_newer_login_when_it_is_back() -> None:
    core = running(policy=LoginPolicy.NEWEST)
    tell(core, connect(1, device=1, time=100))
    core.step(ev.PeerDead(GATEWAY), 2.0)
    assert replaced(tell(core, connect(2, instance=4, device=2, time=101), peer=SECOND)) == []
    core.step(ev.PeerAlive(GATEWAY), 3.0)
    assert settled(core, 10.0) == [(GATEWAY, 1, 100, control_pb2.REASON_KICKED)]


def test_nobody_makes_place_for_a_login_on_a_gateway_that_is_out_of_reach() -> None:
    core = running(policy=LoginPolicy.NEWEST)
    core.step(ev.PeerDead(SECOND), 1.0)
    tell(core, connect(1, instance=4, device=2, time=101), peer=SECOND)
    tell(core, connect(1, device=1, time=100))
    assert settled(core, 10.0) == []
    core.step(ev.PeerAlive(SECOND), 111.0)
    assert replaced(core.step(Tick(), 300.0)) == [(GATEWAY, 1, 100, control_pb2.REASON_KICKED)]


def test_what_may_stay_together_is_looked_at_once() -> None:
    core = running(policy=LoginPolicy.NEWEST_OF_CLASS)
    tell(core, connect(1, device=device_key(1, 7), time=100), connect(2, device=device_key(2, 8), time=101))
    assert settled(core, 10.0) == []
    assert len(core.contests) == 0


def test_the_users_that_are_looked_at_again_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relay.login_conflicts.MAX_CONTESTED", 2)
    contests = Contests(Devices(), 1.0)
    contests.note([1, 2, 3], 0.0)
    assert len(contests) == 2
    monkeypatch.setattr("cluster.membership.map.devices.MAX_TOGETHER", 1)
    devices = Devices()
    devices.apply([connect(1, uin=8), connect(2, uin=8, device=2), connect(3, uin=9), connect(4, uin=9, device=2)], 0.0)
    assert devices.take_together() == [8]
    assert devices.take_together() == []
