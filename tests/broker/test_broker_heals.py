"""What the broker's core does against lost messages: compares itself with its routers, purges, takes feedback, restarts."""

from __future__ import annotations

from typing import TypeVar

from broker.core import Core, State
from cluster.core.contract import RecordsReceived, SendControl, SendRecords, Tick
from cluster.membership import events as ev
from cluster.membership.events import Effect
from cluster.membership.map.anti_entropy import Source, is_anti_entropy
from cluster.membership.map.digest import DigestRule
from cluster.membership.map.isolation import OUT_OF_CONTACT_S
from cluster.membership.map.lww_map import LwwMap
from cluster.membership.map.updates import Update
from cluster.wire.v1 import control_pb2
from pixiu.ids import EndpointID, gateway_msg_id
from pixiu.wire.record import Kind, encode
from tests.support.effects import of

ME, LOW, HIGH = EndpointID(20), EndpointID(15), EndpointID(25)
ROUTER, STRANGER, PROXY = EndpointID(11), EndpointID(12), EndpointID(9)
GATEWAY = EndpointID(31)
INSTANCE = 1
GONE_S = 3.0
E = TypeVar("E", bound=Effect)


def view(*brokers: EndpointID, gateways: bool = True, routers: tuple[EndpointID, ...] = (ROUTER,)) -> ev.ClusterChanged:
    known = (ev.Gateway(GATEWAY, INSTANCE, 1),) if gateways else ()
    others = tuple(ev.Replica(broker, 0) for broker in brokers)
    sources = ev.OtherRole(1, 1, tuple(ev.Replica(router, 0) for router in routers))
    return ev.ClusterChanged(1, 1, others, ev.NO_OTHER, known, sources)


def running(*brokers: EndpointID) -> Core:
    core = Core(endpoint=ME, partition=0, heartbeat_s=1.0, poll_interval_s=60.0, gone_gateway_s=GONE_S)
    core.step(view(*brokers), 0.0)
    assert of(ev.BecomeRunning, core.step(ev.SnapshotFinished(ROUTER, None), 0.1))
    return core


def login(counter: int, room: int, uin: int = 7) -> Update:
    return Update(gateway_msg_id(INSTANCE, 1, counter), room, uin, True)


def sent_to(core: Core, room: int, now: float = 5.0) -> list[EndpointID]:
    """Where a record of a room goes: what the fan-out's cache says."""
    record = encode(Kind.ROOM, room, b"hi", 1)
    return [effect.peer for effect in of(SendRecords, core.step(RecordsReceived(PROXY, record, 0, len(record), 1), now))]


def heartbeat(core: Core, router: LwwMap, as_of: int, now: float, peer: EndpointID = ROUTER) -> list[Effect]:
    """One answer of a router, and all that follows."""
    source = Source(router, lambda *_: as_of)
    effects = core.step(ev.SubscriptionReply(peer, True, source.digest(DigestRule(0, 1))), now)
    every = list(effects)
    while asked := [
        c for e in of(SendControl, effects) for c in map(control_pb2.Control.FromString, e.messages) if is_anti_entropy(c)
    ]:
        answers = [answer for control in asked for answer in source.answer(control)]
        effects = [e for a in answers for e in core.step(ev.AntiEntropyReceived(peer, control_pb2.Control.FromString(a)), now)]
        every += effects
    return every


def test_what_the_router_has_and_lacks_is_taken_over_at_the_second_heartbeat() -> None:
    core = running()
    core.step(ev.MessagesReceived(ROUTER, [login(1, 42), login(2, 43)]), 0.5)
    assert [sent_to(core, room) for room in (42, 44)] == [[GATEWAY], []]
    router = LwwMap()
    router.apply([login(2, 43), login(3, 44)], 0.0)
    as_of = gateway_msg_id(INSTANCE, 1, 9)
    heartbeat(core, router, as_of, 1.0)
    assert [sent_to(core, room) for room in (42, 44)] == [[GATEWAY], []]
    heartbeat(core, router, as_of, 2.0)
    assert [sent_to(core, room) for room in (42, 43, 44)] == [[], [GATEWAY], [GATEWAY]]
    assert heartbeat(core, router, as_of, 3.0) == []


def test_a_router_that_verified_nothing_removes_nothing() -> None:
    core = running()
    core.step(ev.MessagesReceived(ROUTER, [login(1, 42)]), 0.5)
    for second in range(1, 5):
        heartbeat(core, LwwMap(), 0, float(second))
    assert sent_to(core, 42) == [GATEWAY]


def test_only_the_router_that_feeds_it_is_compared_with() -> None:
    core = running()
    core.step(ev.MessagesReceived(ROUTER, [login(1, 42)]), 0.5)
    as_of = gateway_msg_id(INSTANCE, 1, 9)
    page = control_pb2.ListingPage(partitions=1, instance=INSTANCE, as_of=as_of, last=True)
    for bucket in range(64):
        page.bucket = bucket
        core.step(ev.AntiEntropyReceived(STRANGER, control_pb2.Control(listing_page=page)), 1.0)
    assert heartbeat(core, LwwMap(), as_of, 2.0, STRANGER) == []
    assert sent_to(core, 42) == [GATEWAY]


def test_feedback_takes_effect_on_the_next_record() -> None:
    core = running()
    core.step(ev.MessagesReceived(ROUTER, [login(5, 42)]), 0.5)
    assert sent_to(core, 42) == [GATEWAY]
    core.step(ev.AbsenceReceived(ROUTER, gateway_msg_id(INSTANCE, 1, 4), [42]), 1.0)
    assert sent_to(core, 42) == [GATEWAY]
    core.step(ev.AbsenceReceived(ROUTER, gateway_msg_id(INSTANCE, 1, 6), [42]), 1.0)
    core.step(ev.AbsenceReceived(ROUTER, 1 << 63, [42]), 1.0)
    assert sent_to(core, 42) == []


def test_a_vanished_gateway_is_purged() -> None:
    core = running()
    core.step(ev.MessagesReceived(ROUTER, [login(1, 42)]), 0.5)
    core.step(view(gateways=False), 1.0)
    core.step(Tick(), 1.0)
    core.step(Tick(), GONE_S)
    assert len(core.membership) == 1
    core.step(Tick(), 1.1 + GONE_S)
    assert len(core.membership) == 0
    core.step(ev.MessagesReceived(ROUTER, [login(2, 42)]), 6.0)
    assert len(core.membership) == 0


def out_of_contact(core: Core, seconds: float, *brokers: EndpointID) -> list[Effect]:
    core.step(ev.PeerDead(ROUTER), 10.0)
    return core.step(view(*brokers, routers=(STRANGER,)), 10.0 + seconds)


def test_a_replica_out_of_contact_for_five_minutes_starts_again_as_init() -> None:
    core = running(LOW)
    effects = out_of_contact(core, OUT_OF_CONTACT_S + 1, LOW)
    assert of(ev.BecomeInit, effects)
    assert [effect.source for effect in of(ev.TakeSnapshot, effects)] == [STRANGER]
    assert of(ev.BecomeRunning, core.step(ev.SnapshotFinished(STRANGER, None), 312.0))
    assert core.counters.started_again == 1


def test_what_another_router_had_said_before_is_not_dropped_after_the_snapshot() -> None:
    """A router tells all brokers what gateways say, and a broker may have it before it asks its own router for a snapshot."""
    core = running(LOW)
    core.step(ev.PeerDead(ROUTER), 10.0)
    core.step(ev.MessagesReceived(ROUTER, [login(1, 42), login(2, 43)]), 310.0)
    assert of(ev.TakeSnapshot, core.step(view(LOW, routers=(STRANGER,)), 11.0 + OUT_OF_CONTACT_S))
    core.step(ev.MessagesReceived(STRANGER, [login(1, 42)]), 311.5)
    core.step(ev.SnapshotFinished(STRANGER, None), 312.0)
    assert [sent_to(core, room, 313.0) for room in (42, 43)] == [[GATEWAY], []]


def test_a_shorter_silence_changes_nothing() -> None:
    core = running(LOW)
    assert of(ev.BecomeInit, out_of_contact(core, OUT_OF_CONTACT_S - 1, LOW)) == []


def test_the_lowest_replica_and_the_only_one_serve_on() -> None:
    for others in ((HIGH,), ()):
        core = running(*others)
        assert of(ev.BecomeInit, out_of_contact(core, OUT_OF_CONTACT_S + 1, *others)) == []
        assert core.state is State.RUNNING
