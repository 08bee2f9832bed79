"""The broker's core on routers: subscriptions, snapshots, when it runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import pytest

from broker.core import Core, State
from broker.feeds import MAX_QUEUED_MESSAGES, FeedState
from cluster.core.contract import Tick
from cluster.membership import events as ev
from cluster.membership.events import Effect
from cluster.membership.map.lww_map import LwwMap
from cluster.membership.map.updates import Chunk, Update
from cluster.wire.v1 import control_pb2
from pixiu.ids import EndpointID, gateway_msg_id
from pixiu.placement.partition import rendezvous
from tests.support.effects import of

ME = EndpointID(20)
R1, R2 = EndpointID(11), EndpointID(12)
E = TypeVar("E", bound=Effect)


def view(*routers: ev.Replica, partitions: int = 1, router_partitions: int = 1, router_next: int = 0) -> ev.ClusterChanged:
    gateways = (ev.Gateway(EndpointID(31), 1, 1),)
    there = ev.OtherRole(router_partitions, router_next or router_partitions, routers)
    return ev.ClusterChanged(1, partitions, (), ev.NO_OTHER, gateways, there)


def make(partition: int = 0) -> Core:
    return Core(endpoint=ME, partition=partition, heartbeat_s=1.0, poll_interval_s=60.0, gone_gateway_s=3600.0)


def login(counter: int, room: int, uin: int = 7) -> Update:
    return Update(gateway_msg_id(1, 1, counter), room, uin, True)


def logout(counter: int, room: int, uin: int = 7) -> Update:
    return login(counter, room, uin)._replace(login=False)


def chunk(*changes: Update) -> Chunk:
    membership = LwwMap()
    membership.apply(changes, 0.0)
    (found,) = membership.snapshot()
    return found


def taken(effects: Iterable[Effect]) -> list[EndpointID]:
    return [effect.source for effect in of(ev.TakeSnapshot, effects)]


def live(*routers: ev.Replica) -> Core:
    """A Running broker, subscribed to the first choice of these."""
    core = make()
    (source,) = taken(core.step(view(*routers), 0.0))
    core.step(ev.SnapshotFinished(source, None), 0.0)
    assert core.state is State.RUNNING
    return core


def test_it_runs_when_the_snapshot_is_merged_and_what_came_meanwhile_is_replayed() -> None:
    core = make()
    effects = core.step(view(ev.Replica(R1, 0)), 0.0)
    rule = control_pb2.BrokerSubscription(partition=0, partitions=1).SerializeToString()
    assert effects == [ev.TakeSnapshot(R1, 0, 1), ev.SetAttachment(R1, rule)]
    core.step(ev.MessagesReceived(R1, [logout(5, 42), login(6, 44)]), 0.1)
    assert len(core.membership) == 0
    assert core.step(ev.SnapshotChunk(R1, chunk(login(1, 42), login(2, 43))), 0.2) == []
    assert core.membership.gateways(42) == (1,)
    assert core.step(ev.SnapshotFinished(R1, None), 0.3) == [ev.BecomeRunning()]
    assert [room for room in (42, 43, 44) if core.membership.gateways(room)] == [43, 44]


def test_the_router_is_chosen_by_rendezvous_of_the_own_endpoint() -> None:
    core = make()
    assert taken(core.step(view(ev.Replica(R1, 0), ev.Replica(R2, 0)), 0.0)) == [rendezvous(ME, [R1, R2])]


def test_without_a_router_it_waits_and_says_so_every_ten_seconds() -> None:
    core = make()
    said = []
    for second in range(26):
        said += [(second, effect) for effect in of(ev.WaitingForRouters, core.step(Tick() if second else view(), float(second)))]
    assert said == [(10, ev.WaitingForRouters((0,), 10.0)), (20, ev.WaitingForRouters((0,), 20.0))]
    assert core.state is State.INIT
    assert taken(core.step(view(ev.Replica(R1, 0)), 30.0)) == [R1]


@pytest.mark.parametrize(
    ("partition", "brokers", "routers", "expected"),
    [(3, 4, 2, [1]), (3, 4, 8, [3, 7]), (0, 1, 4, [0, 1, 2, 3]), (1, 2, 1, [0])],
)
def test_it_feeds_from_every_router_partition_that_shares_rooms(
    partition: int, brokers: int, routers: int, expected: list[int]
) -> None:
    # The first two are the examples of PiXiu §5.3.
    core = make(partition)
    replicas = [ev.Replica(EndpointID(100 + p), p) for p in range(routers)]
    effects = core.step(view(*replicas, partitions=brokers, router_partitions=routers), 0.0)
    assert taken(effects) == [100 + p for p in expected]
    for p in expected[:-1]:
        assert of(ev.BecomeRunning, core.step(ev.SnapshotFinished(EndpointID(100 + p), None), 0.1)) == []
    assert of(ev.BecomeRunning, core.step(ev.SnapshotFinished(EndpointID(100 + expected[-1]), None), 0.2))


def test_a_router_partition_that_is_being_made_is_fed_from_but_not_waited_for() -> None:
    core = make()
    effects = core.step(view(ev.Replica(R1, 0), ev.Replica(R2, 1), router_partitions=1, router_next=2), 0.0)
    assert taken(effects) == [R1, R2]
    assert of(ev.BecomeRunning, core.step(ev.SnapshotFinished(R1, None), 0.1))
    core.step(ev.SnapshotFinished(R2, None), 0.2)
    effects = core.step(view(ev.Replica(R1, 0), ev.Replica(R2, 1), router_partitions=2), 0.3)
    assert taken(effects) == []
    assert core.feeds[1].state is FeedState.LIVE


@pytest.mark.parametrize("how", ["dead", "gone"])
def test_when_its_router_dies_it_moves_to_another_and_keeps_serving(how: str) -> None:
    core = live(ev.Replica(R1, 0), ev.Replica(R2, 0))
    source = core.feeds[0].source
    assert source is not None
    other = R2 if source == R1 else R1
    core.step(ev.MessagesReceived(source, [login(1, 42)]), 1.0)
    lost: ev.Event = ev.PeerDead(source) if how == "dead" else view(ev.Replica(other, 0))
    effects = core.step(lost, 2.0)
    assert taken(effects) == [other]
    assert ev.SetAttachment(source, b"") in effects
    assert core.membership.gateways(42) == (1,)
    core.step(ev.MessagesReceived(other, [login(3, 44)]), 2.1)
    core.step(ev.SnapshotChunk(other, chunk(login(2, 43))), 2.2)
    assert of(ev.BecomeRunning, core.step(ev.SnapshotFinished(other, None), 2.3)) == []
    assert [room for room in (42, 43, 44) if core.membership.gateways(room)] == [42, 43, 44]


def test_a_router_that_comes_back_to_life_is_asked_for_a_snapshot() -> None:
    core = live(ev.Replica(R1, 0))
    assert taken(core.step(ev.PeerDead(R1), 1.0)) == []
    assert taken(core.step(ev.PeerAlive(R1), 2.0)) == [R1]


def test_a_router_that_does_not_know_us_is_asked_for_a_snapshot_again() -> None:
    core = live(ev.Replica(R1, 0))
    assert core.step(ev.SubscriptionReply(R1, True), 5.0) == []
    assert taken(core.step(ev.SubscriptionReply(R1, False), 5.0)) == [R1]
    assert core.step(ev.SubscriptionReply(R1, False), 5.1) == []
    core.step(ev.SnapshotFinished(R1, None), 6.0)
    # This reply was under way while the snapshot was taken.
    assert core.step(ev.SubscriptionReply(R1, False), 6.5) == []
    assert taken(core.step(ev.SubscriptionReply(R1, False), 8.5)) == [R1]
    assert core.step(ev.SubscriptionReply(R2, False), 20.0) == []


def test_a_failed_snapshot_is_tried_at_the_next_replica_after_a_pause() -> None:
    core = make()
    (first,) = taken(core.step(view(ev.Replica(R1, 0), ev.Replica(R2, 0)), 0.0))
    core.step(ev.MessagesReceived(first, [login(1, 42)]), 0.1)
    assert taken(core.step(ev.SnapshotFinished(first, "broken"), 0.2)) == []
    assert core.membership.gateways(42) == (1,)
    due = core.feeds[0].retry_at
    assert due > 0.2
    assert taken(core.step(Tick(), due - 0.01)) == []
    (second,) = taken(core.step(Tick(), due))
    assert {first, second} == {R1, R2}


def test_a_malformed_chunk_fails_the_snapshot() -> None:
    core = make()
    core.step(view(ev.Replica(R1, 0)), 0.0)
    core.step(ev.SnapshotChunk(R1, Chunk(b"\1", b"")), 0.1)
    assert core.step(ev.SnapshotFinished(R1, None), 0.2) == []
    assert core.state is State.INIT
    assert core.counters.snapshots_malformed == 1


def test_what_exceeds_the_queue_is_taken_at_once() -> None:
    core = make()
    core.step(view(ev.Replica(R1, 0)), 0.0)
    part = [login(i + 1, i % 50, i) for i in range(1000)]
    for _ in range(MAX_QUEUED_MESSAGES // 1000):
        core.step(ev.MessagesReceived(R1, part), 0.1)
    assert len(core.membership) == 0
    core.step(ev.MessagesReceived(R1, [login(9999, 77)]), 0.1)
    assert core.membership.gateways(77) == (1,)
    assert core.counters.queue_overflows == 1


def test_messages_of_other_partitions_are_left_out() -> None:
    core = make(partition=1)
    core.step(view(ev.Replica(R1, 0), partitions=2), 0.0)
    core.step(ev.SnapshotFinished(R1, None), 0.0)
    core.step(ev.MessagesReceived(R1, [login(1, 4), login(2, 5)]), 0.1)
    assert (core.membership.gateways(4), core.membership.gateways(5)) == ((), (1,))
    assert core.counters.messages_foreign == 1


def test_after_long_without_a_router_the_next_snapshot_also_removes() -> None:
    core = live(ev.Replica(R1, 0))
    core.step(ev.MessagesReceived(R1, [login(1, 42), login(2, 43)]), 1.0)
    core.step(ev.PeerDead(R1), 2.0)
    core.step(ev.PeerAlive(R1), 303.0)
    core.step(ev.MessagesReceived(R1, [login(9, 45)]), 303.1)
    core.step(ev.SnapshotChunk(R1, chunk(login(2, 43), login(3, 44))), 303.2)
    core.step(ev.SnapshotFinished(R1, None), 303.3)
    assert [room for room in (42, 43, 44, 45) if core.membership.gateways(room)] == [43, 44, 45]


def test_after_a_short_time_without_a_router_nothing_is_removed() -> None:
    core = live(ev.Replica(R1, 0))
    core.step(ev.MessagesReceived(R1, [login(1, 42)]), 1.0)
    core.step(ev.PeerDead(R1), 2.0)
    core.step(ev.PeerAlive(R1), 12.0)
    core.step(ev.SnapshotFinished(R1, None), 12.3)
    assert core.membership.gateways(42) == (1,)


def test_a_gateway_that_is_gone_for_long_is_dropped() -> None:
    core = live(ev.Replica(R1, 0))
    core.step(ev.MessagesReceived(R1, [login(1, 42)]), 1.0)
    gone = view(ev.Replica(R1, 0))
    core.step(ev.ClusterChanged(1, 1, (), ev.NO_OTHER, (), gone.routers), 2.0)
    core.step(Tick(), 3.0)
    core.step(Tick(), 3602.0)
    assert core.membership.groups == 1
    core.step(Tick(), 3603.5)
    assert core.membership.groups == 0


def test_the_deadline_is_always_ahead_after_a_tick() -> None:
    core = make()
    now = 0.0
    for event in (
        view(ev.Replica(R1, 0)),
        ev.SnapshotFinished(R1, "broken"),
        ev.PeerDead(R1),
        ev.PeerAlive(R1),
        ev.SnapshotFinished(R1, None),
    ):
        core.step(event, now)
        for _ in range(50):
            due = core.next_deadline()
            assert due is not None
            now = max(now, due)
            core.step(Tick(), now)
            after = core.next_deadline()
            assert after is not None
            assert after > now
