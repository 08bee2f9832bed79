"""What the router's core does against lost messages: compares itself with gateways and peers, purges, fences, feedback."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import pytest

from cluster.core.contract import SendControl, Tick
from cluster.membership import events as ev
from cluster.membership.events import Effect
from cluster.membership.map.anti_entropy import Source, encode_absence, is_anti_entropy
from cluster.membership.map.digest import DigestRule
from cluster.membership.map.isolation import OUT_OF_CONTACT_S
from cluster.membership.map.lww_map import Key, LwwMap
from cluster.membership.map.updates import Update, decode_messages
from cluster.membership.replica.state import State
from cluster.wire.v1 import control_pb2
from pixiu.ids import EndpointID, GatewayMsgID, gateway_msg_id
from router.core import Core
from tests.support.effects import of

ME, LOW, PEER = EndpointID(10), EndpointID(5), EndpointID(11)
BROKER = EndpointID(20)
BROKERS = ev.OtherRole(1, replicas=(ev.Replica(BROKER, 0),))
GATEWAY, OTHER_GATEWAY = EndpointID(30), EndpointID(31)
INSTANCE, OTHER = 3, 4
GONE_S = 3.0
RULE = DigestRule(0, 1)
E = TypeVar("E", bound=Effect)


def controls(effects: Iterable[Effect], peer: EndpointID) -> list[control_pb2.Control]:
    sent = [message for effect in of(SendControl, effects) if effect.peer == peer for message in effect.messages]
    return [control_pb2.Control.FromString(message) for message in sent]


def login(counter: int, room: int, uin: int = 7, generation: int = 1, instance: int = INSTANCE) -> Update:
    return Update(gateway_msg_id(instance, generation, counter), room, uin, True)


GATEWAYS = (ev.Gateway(GATEWAY, INSTANCE, 1), ev.Gateway(OTHER_GATEWAY, OTHER, 1))


def view(*replicas: ev.Replica, gateways: tuple[ev.Gateway, ...] = GATEWAYS) -> ev.ClusterChanged:
    return ev.ClusterChanged(1, 1, replicas, BROKERS, gateways)


def running(*replicas: ev.Replica) -> Core:
    core = Core(endpoint=ME, partition=0, heartbeat_s=1.0, dead_after=4, poll_interval_s=60.0, gone_gateway_s=GONE_S)
    core.step(ev.StoreOpened(None), 0.0)
    core.step(view(), 0.0)
    core.step(view(*replicas), 0.0)
    core.step(ev.SnapshotRequested(1, BROKER, "broker", 0, 1), 0.0)
    return core


class Gate:
    """The source in a gateway: what is on it, and its last ID."""

    def __init__(self, *changes: Update, instance: int = INSTANCE, generation: int = 1) -> None:
        self.own = LwwMap(tombstone_s=0.0)
        self.own.apply(changes, 0.0)
        self.as_of = gateway_msg_id(instance, generation, 100)
        self.source = Source(self.own, lambda asked, _: self.as_of if asked == instance else 0)

    def heartbeat(self, core: Core, now: float, peer: EndpointID = GATEWAY) -> list[Effect]:
        """One answer of the gateway, and all that follows."""
        effects = core.step(ev.SubscriptionReply(peer, True, self.source.digest(RULE, self.as_of)), now)
        every = list(effects)
        while asked := [c for c in controls(effects, peer) if is_anti_entropy(c)]:
            answers = [answer for control in asked for answer in self.source.answer(control)]
            effects = [e for a in answers for e in core.step(ev.AntiEntropyReceived(peer, control_pb2.Control.FromString(a)), now)]
            every += effects
        return every


def test_gateways_are_asked_with_every_heartbeat_what_is_on_them() -> None:
    core = Core(endpoint=ME, partition=0, heartbeat_s=1.0, dead_after=4, poll_interval_s=60.0, gone_gateway_s=GONE_S)
    asked = {effect.peer: effect.attachment for effect in of(ev.SetAttachment, core.step(view(), 0.0))}
    assert control_pb2.BrokerSubscription.FromString(asked[GATEWAY]).partitions == 1
    assert set(asked) == {GATEWAY, OTHER_GATEWAY}


def test_what_messages_lost_is_repaired_at_the_second_heartbeat_and_passed_on() -> None:
    core = running(ev.Replica(PEER, 0, True))
    core.step(ev.MessagesReceived(GATEWAY, [login(1, 42), login(2, 43)]), 0.5)
    gate = Gate(login(2, 43), login(3, 44))
    assert of(ev.Persist, gate.heartbeat(core, 1.0)) == []
    effects = gate.heartbeat(core, 2.0)
    gone = Update(gate.as_of, 42, 7, False)
    assert [key for room in (42, 43, 44) for key in core.membership.live_keys(room)] == [Key(43, 7, 3), Key(44, 7, 3)]
    assert {c for persist in of(ev.Persist, effects) for c in persist.puts} >= {gone, login(3, 44)}
    told = [c for control in controls(effects, BROKER) for c in decode_messages(control.gateway_messages)]
    assert {gone, login(3, 44)} <= set(told)
    assert controls(effects, PEER) == [], "peers compare with the gateway themselves"
    assert gate.heartbeat(core, 3.0) == []


def test_what_came_after_the_listing_stays() -> None:
    core = running()
    late = login(101, 50)
    core.step(ev.MessagesReceived(GATEWAY, [login(1, 42), late]), 0.5)
    gate = Gate()
    gate.heartbeat(core, 1.0)
    gate.heartbeat(core, 2.0)
    assert core.membership.get(50, 7, INSTANCE) == (late.id, True)
    assert core.membership.live_keys(42) == []


def test_a_gateway_speaks_for_its_own_instance_only() -> None:
    core = running()
    core.step(ev.MessagesReceived(OTHER_GATEWAY, [login(1, 42, instance=OTHER)]), 0.5)
    gate = Gate(instance=OTHER)
    for second in range(1, 4):
        assert gate.heartbeat(core, float(second), GATEWAY) == []
    page = control_pb2.ListingPage(partitions=1, instance=OTHER, bucket=0, as_of=gate.as_of, last=True)
    for bucket in range(64):
        page.bucket = bucket
        effects = core.step(ev.AntiEntropyReceived(GATEWAY, control_pb2.Control(listing_page=page)), 4.0)
        assert effects == [ev.SenderRefused(GATEWAY, True)]
    assert len(core.membership) == 1


def test_brokers_are_told_what_the_router_verified_and_may_remove_by_it() -> None:
    core = running()
    core.step(ev.MessagesReceived(GATEWAY, [login(1, 42)]), 0.5)
    state = core.heartbeat(BROKER, 0, 1, 0.6)
    assert state.subscribed
    assert (state.digest.root, state.digest.count) == core.membership.digest.first.total(RULE)

    def as_of() -> set[int]:
        asked = control_pb2.ListingRequest(partitions=1, instance=INSTANCE)
        for bucket in range(64):
            asked.buckets.add(bucket=bucket)
        answered = controls(core.step(ev.AntiEntropyReceived(BROKER, control_pb2.Control(listing_request=asked)), 1.0), BROKER)
        return {control.listing_page.as_of for control in answered}

    assert as_of() == {0}
    gate = Gate(login(1, 42))
    assert gate.heartbeat(core, 1.0) == []
    assert as_of() == {gate.as_of}


def test_a_router_that_is_not_running_neither_answers_nor_asks() -> None:
    core = Core(endpoint=ME, partition=0, heartbeat_s=1.0, dead_after=4, poll_interval_s=60.0, gone_gateway_s=GONE_S)
    core.step(view(ev.Replica(PEER, 0, True)), 0.0)
    core.step(ev.StoreOpened(None), 0.0)
    assert core.state is State.SYNCING
    assert Gate(login(1, 42)).heartbeat(core, 1.0) == []
    asked = control_pb2.Control(digest_request=control_pb2.DigestRequest(partitions=1))
    assert core.step(ev.AntiEntropyReceived(PEER, asked), 1.0) == []


def test_peers_make_up_for_what_one_of_them_missed() -> None:
    core = running(ev.Replica(PEER, 0, True))
    peer = Gate(login(1, 42))
    peer.as_of = GatewayMsgID(0)
    peer.heartbeat(core, 1.0, PEER)
    peer.heartbeat(core, 2.0, PEER)
    assert core.membership.gateways(42) == (INSTANCE,)


# --- gateways that are gone


def test_a_vanished_gateway_is_purged_and_what_it_said_is_not_taken_again() -> None:
    core = running(ev.Replica(PEER, 0, True))
    core.step(ev.MessagesReceived(GATEWAY, [login(1, 42), login(2, 43)]), 0.5)
    core.step(ev.MessagesReceived(OTHER_GATEWAY, [login(1, 42, instance=OTHER)]), 0.5)
    core.step(view(ev.Replica(PEER, 0, True), gateways=GATEWAYS[1:]), 1.0)
    core.step(Tick(), 1.0)
    core.step(Tick(), 1.0 + GONE_S - 0.5)
    assert core.membership.gateways(43) == (INSTANCE,)
    effects = core.step(Tick(), 1.0 + GONE_S + 0.6)
    assert core.membership.instances() == [OTHER]
    assert {key for persist in of(ev.Persist, effects) for key in persist.deletes} == {Key(42, 7, 3), Key(43, 7, 3)}
    core.step(ev.MessagesReceived(PEER, [login(3, 44)]), 6.0)
    assert core.membership.instances() == [OTHER]
    core.step(ev.MessagesReceived(PEER, [login(1, 44, generation=2)]), 6.0)
    assert core.membership.instances() == [INSTANCE, OTHER]


def test_a_successor_that_the_view_does_not_show_yet_is_not_purged() -> None:
    core = running(ev.Replica(PEER, 0, True))
    core.step(ev.MessagesReceived(GATEWAY, [login(1, 42)]), 0.5)
    core.step(view(ev.Replica(PEER, 0, True), gateways=()), 1.0)
    core.step(Tick(), 1.0)
    core.step(ev.MessagesReceived(PEER, [login(1, 43, generation=2)]), 2.0)
    core.step(Tick(), 1.0 + GONE_S + 0.1)
    assert core.membership.gateways(42) == ()
    assert core.membership.gateways(43) == (INSTANCE,)


def test_a_gateway_that_comes_back_in_time_keeps_its_members() -> None:
    core = running()
    core.step(ev.MessagesReceived(GATEWAY, [login(1, 42)]), 0.5)
    core.step(view(gateways=()), 1.0)
    core.step(Tick(), 1.0)
    core.step(view(), 2.0)
    core.step(Tick(), 3.0)
    core.step(view(gateways=()), 3.5)
    core.step(Tick(), 4.0)
    core.step(Tick(), 4.0 + GONE_S - 0.1)
    assert core.membership.gateways(42) == (INSTANCE,)


def test_a_gateway_that_was_purged_by_mistake_is_told() -> None:
    core = running()
    core.step(ev.MessagesReceived(GATEWAY, [login(1, 42)]), 0.5)
    core.step(view(gateways=()), 1.0)
    for now in (1.0, 1.0 + GONE_S + 0.1):
        core.step(Tick(), now)
    core.step(view(), 6.0)
    (told,) = controls(Gate(login(1, 42)).heartbeat(core, 7.0), GATEWAY)
    assert told.fenced.floor == gateway_msg_id(INSTANCE, 2, 0)
    assert core.anti_entropy.fenced == 1


def test_a_gateway_ends_what_earlier_runs_said_and_no_later_one() -> None:
    core = running()
    core.step(ev.MessagesReceived(GATEWAY, [login(1, 42)]), 0.5)
    Gate(login(1, 43, generation=2), generation=2).heartbeat(core, 1.0)
    assert core.membership.gateways(42) == (INSTANCE,)
    core.step(view(gateways=(ev.Gateway(EndpointID(40), INSTANCE, 2),)), 2.0)
    assert core.membership.gateways(42) == ()
    assert core.membership.floor(INSTANCE) == gateway_msg_id(INSTANCE, 2, 0)


def test_a_floor_travels_with_the_buckets() -> None:
    core = running(ev.Replica(PEER, 0, True))
    core.step(ev.MessagesReceived(GATEWAY, [login(1, 42)]), 0.5)
    peer = Gate()
    peer.as_of = GatewayMsgID(0)
    peer.own.raise_floor(INSTANCE, 2)
    peer.heartbeat(core, 1.0, PEER)
    assert core.membership.instances() == []


# --- negative feedback


def test_feedback_drops_what_is_not_newer_and_goes_on_to_peers_and_brokers() -> None:
    core = running(ev.Replica(PEER, 0, True))
    core.step(ev.MessagesReceived(GATEWAY, [login(5, 42, 7), login(9, 42, 8)]), 0.5)
    as_of = gateway_msg_id(INSTANCE, 1, 6)
    effects = core.step(ev.AbsenceReceived(GATEWAY, as_of, [42]), 1.0)
    assert core.membership.live_keys(42) == [Key(42, 8, INSTANCE)]
    assert [c.puts for c in of(ev.Persist, effects)] == [[Update(as_of, 42, 7, False)]]
    assert {e.peer: e.messages for e in of(SendControl, effects)} == {p: [encode_absence(as_of, [42])] for p in (PEER, BROKER)}


def test_feedback_of_a_peer_goes_to_the_brokers_only() -> None:
    core = running(ev.Replica(PEER, 0, True))
    effects = core.step(ev.AbsenceReceived(PEER, gateway_msg_id(INSTANCE, 1, 6), [42]), 1.0)
    assert [effect.peer for effect in of(SendControl, effects)] == [BROKER]


@pytest.mark.parametrize(("as_of", "rooms"), [(0, [1]), (1 << 63, [1]), (1, [1 << 63]), (1, list(range(2000)))])
def test_feedback_that_makes_no_sense_does_nothing(as_of: int, rooms: list[int]) -> None:
    core = running(ev.Replica(PEER, 0, True))
    assert core.step(ev.AbsenceReceived(GATEWAY, as_of, rooms), 1.0) == []


# --- out of contact


def alone(core: Core, peer: EndpointID, seconds: float) -> list[Effect]:
    """The peer is dead for so long, and comes back."""
    core.step(ev.PeerDead(peer), 10.0)
    core.step(Tick(), 11.0)
    core.step(Tick(), 10.0 + seconds - 1.0)
    return core.step(ev.PeerAlive(peer), 10.0 + seconds)


def test_a_replica_out_of_contact_for_five_minutes_starts_again_as_init() -> None:
    core = running(ev.Replica(LOW, 0, True))
    effects = alone(core, LOW, OUT_OF_CONTACT_S + 1)
    assert of(ev.BecomeInit, effects)
    assert of(ev.TakeSnapshot, effects) == [ev.TakeSnapshot(LOW, 0, 1)]
    assert core.state is State.SYNCING
    core.step(ev.MessagesReceived(GATEWAY, [login(1, 42)]), 320.0)
    assert core.queued == 1
    assert of(ev.BecomeRunning, core.step(ev.SnapshotFinished(LOW, None), 321.0))
    assert core.membership.gateways(42) == (INSTANCE,)


def test_the_lowest_replica_serves_on_so_that_the_others_can_load() -> None:
    core = running(ev.Replica(PEER, 0, True))
    assert of(ev.BecomeInit, alone(core, PEER, OUT_OF_CONTACT_S + 1)) == []
    assert core.state is State.RUNNING


def test_a_shorter_silence_changes_nothing() -> None:
    core = running(ev.Replica(LOW, 0, True))
    assert of(ev.BecomeInit, alone(core, LOW, OUT_OF_CONTACT_S - 1)) == []


def test_a_peer_that_was_not_there_is_no_lost_contact() -> None:
    core = running()
    core.step(Tick(), 1000.0)
    assert of(ev.BecomeInit, core.step(view(ev.Replica(LOW, 0, True)), 1001.0)) == []
