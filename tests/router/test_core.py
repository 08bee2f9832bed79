"""The router's core: forwarding, confirming, starting up, serving snapshots."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import pytest

from cluster.core.contract import SendControl, Settled, Tick
from cluster.membership import events as ev
from cluster.membership.events import Effect, Event
from cluster.membership.map.instance_purge import InstancePurge
from cluster.membership.map.lww_map import PURGE_SLICE, Key, LwwMap
from cluster.membership.map.updates import Chunk, Update, decode_messages
from cluster.membership.replica.core import MAX_QUEUED_MESSAGES, STORE_RETRY_S
from cluster.membership.replica.forwards import MAX_TRIES
from cluster.membership.replica.state import State
from cluster.membership.replica.subscribers import MAX_SUBSCRIBERS
from cluster.wire.v1 import control_pb2
from pixiu.errors import Unavailable
from pixiu.ids import EndpointID, gateway_msg_id
from router.core import Core
from tests.support.effects import of

ME, PEER, THIRD = EndpointID(10), EndpointID(11), EndpointID(12)
BROKER, OTHER_BROKER = EndpointID(20), EndpointID(21)
NO_BROKER = ev.NO_OTHER
ONE_BROKER = ev.OtherRole(1, replicas=(ev.Replica(BROKER, 0),))
TWO_PARTITIONS = ev.OtherRole(2, replicas=(ev.Replica(BROKER, 0), ev.Replica(OTHER_BROKER, 1)))
GATEWAY = EndpointID(30)
INSTANCE = 3
E = TypeVar("E", bound=Effect)


def login(counter: int, room: int, uin: int = 7, generation: int = 1) -> Update:
    return Update(gateway_msg_id(INSTANCE, generation, counter), room, uin, True)


def view(
    *replicas: ev.Replica,
    partitions: int = 1,
    version: int = 1,
    brokers: ev.OtherRole = NO_BROKER,
    gateways: tuple[ev.Gateway, ...] = (ev.Gateway(GATEWAY, INSTANCE, 1),),
) -> ev.ClusterChanged:
    return ev.ClusterChanged(version, partitions, replicas, brokers, gateways)


def make(partition: int = 0) -> Core:
    return Core(endpoint=ME, partition=partition, heartbeat_s=1.0, dead_after=4, poll_interval_s=60.0, gone_gateway_s=3600.0)


def running(*replicas: ev.Replica, partition: int = 0, partitions: int = 1, brokers: ev.OtherRole = NO_BROKER) -> Core:
    core = make(partition)
    core.step(ev.StoreOpened(None), 0.0)
    core.step(view(partitions=partitions), 0.0)
    assert core.state is State.RUNNING
    core.step(view(*replicas, partitions=partitions, brokers=brokers), 0.0)
    return core


def subscribe(core: Core, broker: EndpointID, partition: int = 0, partitions: int = 1, now: float = 0.0) -> None:
    effects = core.step(ev.SnapshotRequested(1, broker, "broker", partition, partitions), now)
    assert of(ev.ServeSnapshot, effects)


def body(effect: SendControl) -> list[Update]:
    found: list[Update] = []
    for data in effect.messages:
        found += decode_messages(control_pb2.Control.FromString(data).gateway_messages)
    return found


def confirmed(effects: Iterable[Effect]) -> list[int]:
    return [
        number
        for effect in of(SendControl, effects)
        for data in effect.messages
        for number in control_pb2.Control.FromString(data).gateway_confirm.ids
    ]


def notices(effects: Iterable[Effect]) -> list[tuple[EndpointID, int]]:
    return [
        (effect.peer, control_pb2.Control.FromString(data).layout_notice.version)
        for effect in of(SendControl, effects)
        for data in effect.messages
        if control_pb2.Control.FromString(data).WhichOneof("body") == "layout_notice"
    ]


def contents(chunks: Iterable[Chunk]) -> LwwMap:
    membership = LwwMap()
    for chunk in chunks:
        membership.merge(chunk, 0.0)
    return membership


# --- PiXiu §5: the replica forwards to its peers first, then to the subscribers, and writes its database behind


def test_peers_come_first_then_subscribers_then_the_database_then_the_confirmation() -> None:
    core = running(ev.Replica(PEER, 0, True), ev.Replica(THIRD, 0, False), brokers=ONE_BROKER)
    subscribe(core, BROKER)
    effects = core.step(ev.MessagesReceived(GATEWAY, [login(1, 42)]), 1.0)
    sends = of(SendControl, effects)
    assert [effect.peer for effect in sends] == [PEER, THIRD, BROKER]
    assert all(body(effect) == [login(1, 42)] for effect in sends)
    assert effects[-1] == ev.Persist(puts=[login(1, 42)])
    tokens = [effect.token for effect in sends]
    assert len(set(tokens)) == 3
    assert 0 not in tokens
    assert core.step(Settled([(tokens[0], True), (tokens[2], True)]), 1.1) == []
    assert confirmed(core.step(Settled([(tokens[1], True)]), 1.2)) == [login(1, 42).id]


def test_without_anybody_to_forward_to_the_confirmation_follows_the_database_at_once() -> None:
    effects = running().step(ev.MessagesReceived(GATEWAY, [login(1, 42), login(2, 43)]), 1.0)
    assert isinstance(effects[0], ev.Persist)
    assert confirmed(effects[1:]) == [login(1, 42).id, login(2, 43).id]


def test_what_a_peer_sent_goes_to_the_own_subscribers_only_and_is_not_confirmed() -> None:
    core = running(ev.Replica(PEER, 0, True), ev.Replica(THIRD, 0, True), brokers=ONE_BROKER)
    subscribe(core, BROKER)
    core.step(ev.SnapshotRequested(2, THIRD, "router", 0, 1), 0.0)
    effects = core.step(ev.MessagesReceived(PEER, [login(1, 42)]), 1.0)
    (send,) = of(SendControl, effects)
    assert send.peer == BROKER
    assert core.step(Settled([(send.token, True)]), 1.1) == []


def test_a_broker_gets_only_the_rooms_of_its_partition() -> None:
    core = running(brokers=TWO_PARTITIONS)
    subscribe(core, BROKER, 0, 2)
    subscribe(core, OTHER_BROKER, 1, 2)
    effects = core.step(ev.MessagesReceived(GATEWAY, [login(1, 4), login(2, 5), login(3, 7)]), 1.0)
    assert {effect.peer: [m.group for m in body(effect)] for effect in of(SendControl, effects)} == {
        BROKER: [4],
        OTHER_BROKER: [5, 7],
    }


@pytest.mark.parametrize("lost", [None, ev.PeerDead(BROKER), view()])
def test_a_broker_that_subscribed_to_a_peer_has_what_a_gateway_said_before_it_is_confirmed(lost: ev.Event | None) -> None:
    """The peer tells it too, and nobody would wait for that: what is published at once would go by a broker without the member."""
    core = running(ev.Replica(PEER, 0, True), brokers=ONE_BROKER)
    to_peer, to_broker = of(SendControl, core.step(ev.MessagesReceived(GATEWAY, [login(1, 42)]), 1.0))
    assert (to_broker.peer, body(to_broker)) == (BROKER, [login(1, 42)])
    assert core.step(Settled([(to_peer.token, True)]), 1.1) == []
    assert confirmed(core.step(lost or Settled([(to_broker.token, True)]), 1.2)) == [login(1, 42).id]


def test_brokers_that_did_not_subscribe_get_the_rooms_of_their_partition_while_it_is_being_made_too() -> None:
    third = EndpointID(22)
    brokers = ev.OtherRole(2, replicas=(*TWO_PARTITIONS.replicas, ev.Replica(third, 3)))
    core = running(ev.Replica(PEER, 0, True), brokers=brokers)
    core.step(ev.PeerDead(BROKER), 0.5)
    assert of(SendControl, core.step(ev.MessagesReceived(PEER, [login(4, 5, uin=8)]), 1.0)) == []
    effects = core.step(ev.MessagesReceived(GATEWAY, [login(1, 4), login(2, 5), login(3, 7)]), 1.0)
    assert {effect.peer: [m.group for m in body(effect)] for effect in of(SendControl, effects)} == {
        PEER: [4, 5, 7],
        OTHER_BROKER: [5, 7],
        third: [5, 7],
    }


def test_a_repeated_message_is_forwarded_and_confirmed_again() -> None:
    core = running(ev.Replica(PEER, 0, True))
    for _ in range(2):
        (send,) = of(SendControl, core.step(ev.MessagesReceived(GATEWAY, [login(1, 42)]), 1.0))
        assert confirmed(core.step(Settled([(send.token, True)]), 1.1)) == [login(1, 42).id]
    assert core.membership.counters.stale == 1


def test_a_lost_forward_is_sent_again_after_a_pause() -> None:
    core = running(ev.Replica(PEER, 0, True))
    (send,) = of(SendControl, core.step(ev.MessagesReceived(GATEWAY, [login(1, 42)]), 1.0))
    assert core.step(Settled([(send.token, False)]), 1.0) == []
    due = core.forwards.next_retry()
    assert due is not None
    assert due > 1.0
    (again,) = of(SendControl, core.step(Tick(), due))
    assert (again.peer, again.messages) == (PEER, send.messages)
    assert confirmed(core.step(Settled([(again.token, True)]), due)) == [login(1, 42).id]


@pytest.mark.parametrize("how", [ev.PeerDead(PEER), view()])
def test_a_peer_that_dies_or_vanishes_counts_as_done(how: ev.Event) -> None:
    core = running(ev.Replica(PEER, 0, True))
    core.step(ev.MessagesReceived(GATEWAY, [login(1, 42)]), 1.0)
    assert confirmed(core.step(how, 2.0)) == [login(1, 42).id]
    assert len(core.forwards) == 0
    assert confirmed(core.step(ev.MessagesReceived(GATEWAY, [login(2, 42)]), 2.0)) == [login(2, 42).id]


def test_a_forward_that_waits_to_be_sent_again_ends_with_its_peer() -> None:
    core = running(ev.Replica(PEER, 0, True))
    (send,) = of(SendControl, core.step(ev.MessagesReceived(GATEWAY, [login(1, 42)]), 1.0))
    core.step(Settled([(send.token, False)]), 1.0)
    assert confirmed(core.step(ev.PeerDead(PEER), 1.0)) == [login(1, 42).id]
    assert of(SendControl, core.step(Tick(), 9.0)) == []


def test_a_broker_that_cannot_be_reached_loses_its_subscription_and_the_gateway_its_wait() -> None:
    core = running(brokers=ONE_BROKER)
    subscribe(core, BROKER)
    (send,) = of(SendControl, core.step(ev.MessagesReceived(GATEWAY, [login(1, 42)]), 1.0))
    now = 1.0
    for _ in range(MAX_TRIES - 1):
        core.heartbeat(BROKER, 0, 1, now)
        assert core.step(Settled([(send.token, False)]), now) == []
        now = core.forwards.next_retry() or 0.0
        (send,) = of(SendControl, core.step(Tick(), now))
    assert core.heartbeat(BROKER, 0, 1, now).subscribed
    assert confirmed(core.step(Settled([(send.token, False)]), now)) == [login(1, 42).id]
    assert not core.heartbeat(BROKER, 0, 1, now).subscribed


def test_malformed_messages_are_counted_and_the_others_taken() -> None:
    core = running()
    effects = core.step(ev.MessagesReceived(GATEWAY, [Update(0, 1, 1, True), Update(1 << 63, 1, 1, True), login(1, 42)]), 1.0)
    assert confirmed(effects) == [login(1, 42).id]
    assert core.counters.messages_malformed == 2


# --- rooms of another partition


def test_a_stale_sender_s_message_is_passed_on_and_the_sender_told() -> None:
    child = EndpointID(15)
    core = running(ev.Replica(child, 1, True), partitions=2)
    effects = core.step(ev.MessagesReceived(GATEWAY, [login(1, 4), login(2, 5)]), 1.0)
    (passed,) = [effect for effect in of(SendControl, effects) if effect.peer == child]
    assert body(passed) == [login(2, 5)]
    assert notices(effects) == [(GATEWAY, 1)]
    assert core.membership.gateways(5) == ()
    assert confirmed(core.step(Settled([(passed.token, True)]), 1.1)) == [login(1, 4).id, login(2, 5).id]
    assert notices(core.step(ev.MessagesReceived(GATEWAY, [login(3, 5)]), 1.2)) == []
    assert notices(core.step(ev.MessagesReceived(GATEWAY, [login(4, 5)]), 2.5)) == [(GATEWAY, 1)]


@pytest.mark.parametrize("lost", [ev.PeerDead(EndpointID(15)), view(partitions=2)])
def test_a_message_whose_only_receiver_died_is_not_confirmed(lost: ev.Event) -> None:
    """The gateway sends it again, to whoever serves the room then."""
    child = EndpointID(15)
    core = running(ev.Replica(child, 1, True), partitions=2)
    (passed,) = [e for e in of(SendControl, core.step(ev.MessagesReceived(GATEWAY, [login(1, 5)]), 1.0)) if e.peer == child]
    core.step(Settled([(passed.token, False)]), 1.0)
    assert confirmed(core.step(lost, 1.1)) == []
    assert of(SendControl, core.step(Tick(), 9.0)) == []
    assert len(core.forwards) == 0


def test_what_another_partition_s_router_sends_is_not_passed_back() -> None:
    """A parent forwards to its child until the child's subscription ends, also what the child has ceased to serve at the flip.

    Passed on, it would come back to the child, in as many copies as the partition has replicas, again and again.
    """
    parent = EndpointID(15)
    child = running(ev.Replica(parent, 0, True), partition=1, partitions=2)
    assert child.step(ev.MessagesReceived(parent, [login(1, 4)]), 1.0) == []
    (kept,) = of(ev.Persist, child.step(ev.MessagesReceived(parent, [login(2, 5), login(3, 4)]), 1.1))
    assert kept.puts == [login(2, 5)]


def test_a_message_that_nobody_serves_is_not_confirmed() -> None:
    core = running(partitions=2)
    effects = core.step(ev.MessagesReceived(GATEWAY, [login(1, 5), login(2, 4)]), 1.0)
    assert confirmed(effects) == [login(2, 4).id]
    assert core.counters.messages_unroutable == 1


def test_two_poll_intervals_after_a_doubling_moved_rooms_are_dropped_from_memory_and_database() -> None:
    core = running()
    core.step(ev.MessagesReceived(GATEWAY, [login(1, 4), login(2, 5)]), 1.0)
    core.step(view(partitions=2, version=2), 10.0)
    assert core.membership.gateways(5)
    core.step(Tick(), 129.0)
    assert core.membership.gateways(5)
    effects = core.step(Tick(), 130.0)
    assert core.membership.gateways(5) == ()
    assert core.membership.gateways(4) == (INSTANCE,)
    assert ev.Persist(deletes=[Key(5, 7, INSTANCE)]) in effects


def test_a_new_partition_takes_its_snapshot_from_the_parent_and_heartbeats_it() -> None:
    core = make(partition=1)
    core.step(ev.StoreOpened(None), 0.0)
    effects = core.step(view(ev.Replica(PEER, 0, True)), 0.0)
    assert ev.TakeSnapshot(PEER, 1, 1) in effects
    rule = control_pb2.BrokerSubscription(partition=1, partitions=1).SerializeToString()
    assert ev.SetAttachment(PEER, rule) in effects
    core.step(ev.SnapshotFinished(PEER, None), 0.1)
    assert core.state is State.RUNNING
    assert ev.SetAttachment(PEER, b"") in core.step(view(ev.Replica(PEER, 0, True), partitions=2, version=2), 1.0)


def test_the_parent_forwards_to_a_new_partition_what_its_own_peer_sent() -> None:
    child = EndpointID(15)
    core = running(ev.Replica(PEER, 0, True), ev.Replica(child, 1, False))
    core.step(ev.SnapshotRequested(1, child, "router", 1, 1), 0.0)
    assert [effect.peer for effect in of(SendControl, core.step(ev.MessagesReceived(PEER, [login(1, 42)]), 1.0))] == [child]


# --- gateways


def test_a_new_generation_of_a_gateway_drops_what_the_old_one_wrote() -> None:
    core = running()
    core.step(ev.MessagesReceived(GATEWAY, [login(1, 42)]), 1.0)
    effects = core.step(view(gateways=(ev.Gateway(EndpointID(31), INSTANCE, 2),)), 2.0)
    assert ev.Persist(deletes=[Key(42, 7, INSTANCE)]) in effects
    assert len(core.membership) == 0


def test_a_gateway_that_is_gone_for_long_is_dropped_and_one_that_returns_is_not() -> None:
    core = running()
    core.step(ev.MessagesReceived(GATEWAY, [login(1, 42)]), 1.0)
    core.step(view(gateways=()), 2.0)
    core.step(Tick(), 3.0)
    core.step(Tick(), 3600.0)
    assert len(core.membership) == 1
    core.step(view(), 3600.5)
    core.step(Tick(), 3601.5)
    core.step(view(gateways=()), 3602.0)
    core.step(Tick(), 3603.0)
    core.step(Tick(), 7000.0)
    assert len(core.membership) == 1
    assert ev.Persist(deletes=[Key(42, 7, INSTANCE)]) in core.step(Tick(), 7203.5)


def test_an_expired_tombstone_leaves_the_database() -> None:
    core = running()
    core.step(ev.MessagesReceived(GATEWAY, [login(1, 42)._replace(login=False)]), 1.0)
    core.step(Tick(), 2.0)
    assert ev.Persist(deletes=[Key(42, 7, INSTANCE)]) in core.step(Tick(), 602.0)


# --- subscriptions (PiXiu §5: brokers register themselves by heartbeat)


def test_a_snapshot_and_the_live_messages_leave_no_gap() -> None:
    core = running(brokers=ONE_BROKER)
    core.step(ev.MessagesReceived(GATEWAY, [login(1, 42)]), 1.0)
    (served,) = of(ev.ServeSnapshot, core.step(ev.SnapshotRequested(9, BROKER, "broker", 0, 1), 1.0))
    assert served.request == 9
    effects = core.step(ev.MessagesReceived(GATEWAY, [login(2, 43)]), 1.0)
    assert [body(effect) for effect in of(SendControl, effects)] == [[login(2, 43)]]
    assert contents(served.chunks).gateways(42) == (INSTANCE,)


def test_a_heartbeat_alone_opens_no_subscription() -> None:
    core = running()
    assert not core.heartbeat(BROKER, 0, 1, 0.0).subscribed
    assert confirmed(core.step(ev.MessagesReceived(GATEWAY, [login(1, 42)]), 1.0))


def test_a_subscription_ends_after_four_missed_heartbeats() -> None:
    core = running(brokers=ONE_BROKER)
    subscribe(core, BROKER)
    assert core.heartbeat(BROKER, 0, 1, 3.0).subscribed
    core.step(Tick(), 6.9)
    assert BROKER in core.subscribers
    core.step(Tick(), 7.9)
    assert not core.heartbeat(BROKER, 0, 1, 8.0).subscribed


@pytest.mark.parametrize("lost", [ev.PeerDead(BROKER), view()])
def test_a_broker_that_was_dead_or_gone_must_take_a_snapshot_again(lost: ev.Event) -> None:
    core = running(brokers=ONE_BROKER)
    subscribe(core, BROKER)
    core.step(lost, 1.0)
    core.step(ev.PeerAlive(BROKER), 2.0)
    assert not core.heartbeat(BROKER, 0, 1, 2.0).subscribed


def test_a_rule_that_names_fewer_rooms_is_taken_over_and_another_ends_the_subscription() -> None:
    core = running(brokers=ev.OtherRole(2, replicas=(ev.Replica(BROKER, 1),)))
    subscribe(core, BROKER, 1, 2)
    assert core.heartbeat(BROKER, 1, 4, 1.0).subscribed
    effects = core.step(ev.MessagesReceived(GATEWAY, [login(1, 3), login(2, 5)]), 1.0)
    assert [m.group for effect in of(SendControl, effects) for m in body(effect)] == [5]
    assert not core.heartbeat(BROKER, 1, 2, 2.0).subscribed


def test_endpoints_that_nobody_registered_take_no_place_of_a_broker() -> None:
    """S10: 4,096 requests with invented endpoints shut every broker out."""
    core = running(brokers=ONE_BROKER)
    for role in ("broker", "router"):
        for number in range(MAX_SUBSCRIBERS):
            core.step(ev.SnapshotRequested(1, EndpointID(1_000_000 + number), role, 0, 1), 0.0)
    assert len(core.subscribers) == 0
    (refused,) = core.step(ev.SnapshotRequested(1, BROKER, "router", 0, 1), 0.0)
    assert isinstance(refused, ev.RefuseSnapshot)
    assert refused.code == Unavailable.code
    subscribe(core, BROKER)
    guests = Core(endpoint=ME, partition=0, heartbeat_s=1.0, dead_after=4, poll_interval_s=60.0, gone_gateway_s=3600.0, guests=True)
    guests.step(ev.StoreOpened(None), 0.0)
    guests.step(view(), 0.0)
    subscribe(guests, EndpointID(1_000_000))


@pytest.mark.parametrize(("role", "partition", "partitions"), [("proxy", 0, 1), ("broker", 0, 3), ("broker", 0, 0)])
def test_a_senseless_snapshot_request_is_refused(role: str, partition: int, partitions: int) -> None:
    core = running()
    (refused,) = core.step(ev.SnapshotRequested(1, BROKER, role, partition, partitions), 0.0)
    assert isinstance(refused, ev.RefuseSnapshot)
    assert BROKER not in core.subscribers


def test_a_peer_that_missed_something_is_told_so_and_takes_a_snapshot() -> None:
    core = running(ev.Replica(PEER, 0, True), brokers=ONE_BROKER)
    assert core.step(ev.SubscriptionReply(PEER, True), 1.0) == []
    assert core.step(ev.SubscriptionReply(PEER, False), 1.0) == [ev.TakeSnapshot(PEER, 0, 1)]
    assert core.step(ev.SubscriptionReply(PEER, False), 1.1) == []
    subscribe(core, BROKER, now=1.2)
    entry = LwwMap()
    entry.apply([login(8, 42)], 0.0)
    (chunk,) = entry.snapshot()
    effects = core.step(ev.SnapshotChunk(PEER, chunk), 1.5)
    # What this replica had missed, its own brokers had missed too.
    assert [(effect.peer, body(effect)) for effect in of(SendControl, effects)] == [(BROKER, [login(8, 42)])]
    core.step(ev.SnapshotFinished(PEER, None), 2.0)
    assert core.step(ev.SubscriptionReply(PEER, False), 3.0) == []
    assert core.step(ev.SubscriptionReply(PEER, False), 4.5) == [ev.TakeSnapshot(PEER, 0, 1)]


def test_a_snapshot_that_broke_off_is_taken_again_though_the_peer_counts_us_as_subscribed() -> None:
    core = running(ev.Replica(PEER, 0, True))
    core.step(ev.SubscriptionReply(PEER, False), 1.0)
    core.step(ev.SnapshotFinished(PEER, "broken"), 1.5)
    assert core.step(ev.SubscriptionReply(PEER, True), 3.5) == [ev.TakeSnapshot(PEER, 0, 1)]
    core.step(ev.SnapshotFinished(PEER, None), 4.0)
    assert core.step(ev.SubscriptionReply(PEER, True), 9.0) == []


# --- start-up (PiXiu §5.2 steps 2, 3, 7, 8, 9; docs/memberships.md)


def snapshot_of(*changes: Update) -> Chunk:
    membership = LwwMap()
    membership.apply(changes, 0.0)
    (chunk,) = membership.snapshot()
    return chunk


def test_messages_that_come_in_init_are_queued_and_replayed_after_the_snapshot() -> None:
    core = make()
    core.step(ev.StoreOpened(None), 0.0)
    assert ev.TakeSnapshot(PEER, 0, 1) in core.step(view(ev.Replica(PEER, 0, True)), 0.0)
    assert core.step(ev.MessagesReceived(PEER, [login(5, 42), login(6, 43)._replace(login=False)]), 0.1) == []
    assert core.queued == 2
    refused = core.step(ev.SnapshotRequested(1, BROKER, "broker", 0, 1), 0.2)
    assert of(ev.RefuseSnapshot, refused)
    core.step(ev.SnapshotChunk(PEER, snapshot_of(login(1, 42), login(2, 43), login(3, 44))), 0.3)
    effects = core.step(ev.SnapshotFinished(PEER, None), 0.4)
    assert isinstance(effects[-1], ev.BecomeRunning)
    assert core.state is State.RUNNING
    assert core.membership.get(42, 7, INSTANCE) == (login(5, 42).id, True)
    assert core.membership.gateways(43) == ()
    assert core.membership.gateways(44) == (INSTANCE,)


def test_a_gateway_s_message_that_came_in_init_is_forwarded_and_confirmed_at_the_replay() -> None:
    core = make()
    core.step(ev.StoreOpened(None), 0.0)
    core.step(view(ev.Replica(PEER, 0, True)), 0.0)
    core.step(ev.MessagesReceived(GATEWAY, [login(5, 42)]), 0.1)
    effects = core.step(ev.SnapshotFinished(PEER, None), 0.4)
    (send,) = of(SendControl, effects)
    assert send.peer == PEER
    assert confirmed(core.step(Settled([(send.token, True)]), 0.5)) == [login(5, 42).id]


def test_what_exceeds_the_queue_is_taken_at_once() -> None:
    core = make()
    core.step(ev.StoreOpened(None), 0.0)
    core.step(view(ev.Replica(PEER, 0, True)), 0.0)
    part = [login(i + 1, i % 50, i) for i in range(1000)]
    for _ in range(MAX_QUEUED_MESSAGES // 1000):
        core.step(ev.MessagesReceived(PEER, part), 0.1)
    core.step(ev.MessagesReceived(PEER, [login(9_999, 77)]), 0.1)
    assert core.queued == MAX_QUEUED_MESSAGES
    assert core.membership.gateways(77) == (INSTANCE,)
    assert core.counters.queue_overflows == 1


def test_without_a_running_peer_the_own_database_is_loaded() -> None:
    core = make()
    core.step(view(ev.Replica(PEER, 0, False)), 0.0)
    assert core.step(ev.StoreOpened(90_000.0), 0.0) == [ev.LoadStore()]
    core.step(ev.StoreChunk(snapshot_of(login(1, 42))), 0.1)
    effects = core.step(ev.StoreLoaded(), 0.2)
    assert of(ev.BecomeRunning, effects)
    assert core.membership.gateways(42) == (INSTANCE,)


def test_a_fresh_database_is_merged_with_the_peer_s_snapshot() -> None:
    core = make()
    core.step(view(ev.Replica(PEER, 0, True)), 0.0)
    assert core.step(ev.StoreOpened(10.0), 0.0) == [ev.LoadStore()]
    core.step(ev.StoreChunk(snapshot_of(login(1, 42))), 0.1)
    assert core.step(ev.StoreLoaded(), 0.2) == [ev.TakeSnapshot(PEER, 0, 1)]
    effects = core.step(ev.SnapshotChunk(PEER, snapshot_of(login(2, 43))), 0.3)
    assert effects == [ev.Persist(puts=[login(2, 43)])]
    core.step(ev.SnapshotFinished(PEER, None), 0.4)
    assert core.membership.gateways(42) == core.membership.gateways(43) == (INSTANCE,)


def test_an_old_database_is_replaced_by_what_the_peer_has() -> None:
    core = make()
    core.step(view(ev.Replica(PEER, 0, True)), 0.0)
    assert core.step(ev.StoreOpened(301.0), 0.0) == [ev.TakeSnapshot(PEER, 0, 1)]
    assert core.step(ev.SnapshotChunk(PEER, snapshot_of(login(2, 43))), 0.3) == []
    rewrite, become = core.step(ev.SnapshotFinished(PEER, None), 0.4)
    assert isinstance(rewrite, ev.RewriteStore)
    assert contents(rewrite.chunks).gateways(43) == (INSTANCE,)
    assert isinstance(become, ev.BecomeRunning)


def test_an_old_database_is_used_after_all_when_the_peer_dies_before_its_snapshot() -> None:
    core = make()
    core.step(view(ev.Replica(PEER, 0, True)), 0.0)
    core.step(ev.StoreOpened(301.0), 0.0)
    core.step(ev.PeerDead(PEER), 1.0)
    assert core.step(ev.SnapshotFinished(PEER, "gone"), 1.1) == []
    assert core.step(Tick(), 1.15) == []
    assert of(ev.LoadStore, core.step(Tick(), 2.0))
    core.step(ev.StoreChunk(snapshot_of(login(1, 42))), 2.1)
    assert of(ev.BecomeRunning, core.step(ev.StoreLoaded(), 2.2))


def test_a_failed_snapshot_is_tried_at_the_next_replica_after_a_pause() -> None:
    core = make()
    core.step(ev.StoreOpened(None), 0.0)
    (first,) = of(ev.TakeSnapshot, core.step(view(ev.Replica(PEER, 0, True), ev.Replica(THIRD, 0, True)), 0.0))
    assert of(ev.TakeSnapshot, core.step(ev.SnapshotFinished(first.source, "broken"), 1.0)) == []
    assert of(ev.TakeSnapshot, core.step(Tick(), 1.05)) == []
    (second,) = of(ev.TakeSnapshot, core.step(Tick(), 1.3))
    assert {first.source, second.source} == {PEER, THIRD}


def test_a_malformed_chunk_fails_the_snapshot() -> None:
    core = make()
    core.step(ev.StoreOpened(None), 0.0)
    core.step(view(ev.Replica(PEER, 0, True)), 0.0)
    core.step(ev.SnapshotChunk(PEER, Chunk(b"\1", b"")), 0.1)
    core.step(ev.SnapshotFinished(PEER, None), 0.2)
    assert core.state is State.SYNCING
    assert core.counters.snapshots_failed == 1


def test_the_order_of_the_first_view_and_the_database_does_not_matter() -> None:
    core = make()
    core.step(view(), 0.0)
    assert of(ev.BecomeRunning, core.step(ev.StoreOpened(None), 0.0))


# --- the Router DB


def test_a_failed_database_is_not_written_until_it_is_written_anew() -> None:
    core = running()
    core.step(ev.StoreFailed("disk full"), 1.0)
    effects = core.step(ev.MessagesReceived(GATEWAY, [login(1, 42)]), 1.1)
    assert of(ev.Persist, effects) == []
    assert confirmed(effects)
    assert core.store_error == "disk full"
    assert core.counters.store_skipped == 1
    (rewrite,) = of(ev.RewriteStore, core.step(Tick(), 1.0 + STORE_RETRY_S))
    assert contents(rewrite.chunks).gateways(42) == (INSTANCE,)
    assert core.store_error is None
    assert of(ev.Persist, core.step(ev.MessagesReceived(GATEWAY, [login(2, 42)]), 40.0))


@pytest.mark.parametrize("partition", [0, 1])
def test_the_deadline_is_always_ahead_after_a_tick(partition: int) -> None:
    core = make(partition)
    now = 0.0
    for event in (ev.StoreFailed("no"), view(ev.Replica(PEER, 0, True)), ev.StoreOpened(None), ev.SnapshotFinished(PEER, "x")):
        core.step(event, now)
        for _ in range(100):
            due = core.next_deadline()
            assert due is not None
            now = max(now, due)
            core.step(Tick(), now)
            after = core.next_deadline()
            assert after is not None
            assert after > now


# --- no step is long


def steps(core: Core, first: Iterable[tuple[Event, float]], count: int) -> list[int]:
    """How many entries each step drops, from the first event until nothing is left to do."""
    found: list[int] = []

    def step(event: Event, now: float) -> None:
        before = core.membership.counters.purged
        core.step(event, now)
        found.append(core.membership.counters.purged - before)

    now = 0.0
    for event, now in first:
        step(event, now)
    while core.membership.counters.purged < count:
        now = max(now, core.next_deadline())
        assert now < 1e6, "it stopped before everything was dropped"
        step(Tick(), now)
    return found


MANY = 2_000


@pytest.mark.parametrize("rooms", [1, MANY])
def test_no_step_drops_all_that_a_gateway_had(rooms: int) -> None:
    core = running()
    core.step(ev.MessagesReceived(GATEWAY, [login(n + 1, n % rooms, n) for n in range(MANY)]), 0.0)
    newer = (ev.Gateway(GATEWAY, INSTANCE, 2),)
    dropped = steps(core, [(view(version=2, gateways=newer), 1.0)], MANY)
    assert max(dropped) <= PURGE_SLICE
    assert core.membership.instances() == []


def test_no_step_drops_all_that_moved_at_a_doubling() -> None:
    core = running()
    core.step(ev.MessagesReceived(GATEWAY, [login(n + 1, n, n) for n in range(MANY)]), 0.0)
    dropped = steps(core, [(view(version=2, partitions=2), 1.0)], MANY // 2)
    assert max(dropped) <= PURGE_SLICE
    assert {key % 2 for key in range(MANY) if core.membership.gateways(key)} == {0}


def test_no_step_drops_all_that_gateways_had_who_are_gone() -> None:
    core = make()
    core.instance_purge = InstancePurge(core.membership, 5.0)
    core.step(ev.StoreOpened(None), 0.0)
    gateways = tuple(ev.Gateway(EndpointID(100 + n), n, 1) for n in range(50))
    core.step(view(gateways=gateways), 0.0)
    for gateway in gateways:
        messages = [Update(gateway_msg_id(gateway.instance, 1, n + 1), n, n, True) for n in range(MANY // 50)]
        core.step(ev.MessagesReceived(gateway.endpoint, messages), 0.0)
    dropped = steps(core, [(view(version=2, gateways=()), 1.0)], MANY)
    assert max(dropped) <= PURGE_SLICE
    assert core.instance_purge.purged_gateways == 50
