"""The broker's core: knows which gateways have members of its partition's rooms, and sends them the rooms' records.

    proxy ──▶ broker ──▶ every gateway with members, one copy each
                ▲
    router ─────┘ a snapshot, then live logins and logouts, for each router partition that shares rooms

Source: seed 004 §2.3 and §5.3; DESIGN sections 9, 10 and 13.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from broker.events import (
    AbsenceReceived,
    AntiEntropyReceived,
    BecomeInit,
    BecomeRunning,
    ClusterChanged,
    Effect,
    Event,
    MalformedBatch,
    MessagesReceived,
    NotTaken,
    PeerAlive,
    PeerDead,
    RecordsReceived,
    SendControl,
    SetAttachment,
    SnapshotChunk,
    SnapshotFinished,
    SubscriptionReply,
    TakeSnapshot,
    Tick,
    WaitingForRouters,
)
from broker.fanout import Fanout, Target
from broker.feeds import Feed, FeedState
from broker.multicast import AddressedFanout, Relays, Way
from cluster.membership.anti_entropy import Outcome as Repair
from cluster.membership.anti_entropy import Puller
from cluster.membership.instance_purge import InstancePurge
from cluster.membership.lww_map import ENTRY, Applied, Key, LwwMap, Purged, Update
from cluster.runtime.layout_notices import LayoutNotices
from pixiu.errors import MalformedData
from pixiu.ids import MAX_ID, EndpointID, gateway_instance
from pixiu.placement.partition import rendezvous, rendezvous_order, serves, share_rooms
from pixiu.wire.trace import UNTRACED, Tracer
from pixiu.wire.v1 import control_pb2

WAITING_LOG_S: Final = 10.0
"""A broker that waits for routers says so this often."""
HOUSEKEEPING_S: Final = 1.0


class State(Enum):
    """Of a broker replica; Draining is the shell's matter, the core works on."""

    INIT = "Init"
    """The first snapshots are not all merged yet."""
    RUNNING = "Running"


@dataclass(slots=True)
class Counters:
    """What the broker has done since its start; records are counted by `broker.fanout`."""

    messages_in: int = 0
    messages_foreign: int = 0
    """For rooms of another partition."""
    messages_queued: int = 0
    queue_overflows: int = 0
    snapshots_taken: int = 0
    snapshots_failed: int = 0
    snapshots_malformed: int = 0
    started_again: int = 0
    """Times it was out of contact with a router partition for too long and became Init again."""
    subscriptions_lost: int = 0
    """A router died, vanished, or said that it does not know us."""
    gateways_unknown: int = 0
    """Look-ups of a room's gateway whose instance is not in the registry; it gets nothing."""
    layout_notices: int = 0


class Core:
    """Decides; see the module. `step` never raises on what comes from the network.

    Args:
        endpoint: this process.
        partition: the one it serves.
        heartbeat_s: seconds between heartbeats.
        poll_interval_s: how long a sender's view of the registry may be old, seconds.
        gone_gateway_s: entries of a gateway that is out of the registry for so long are dropped, seconds.
        membership: the map, empty.
        through_relays: send records through relays with the lists of their users, and not to gateways.
        tracer: stamps traced records.
    """

    def __init__(
        self,
        *,
        endpoint: EndpointID,
        partition: int,
        heartbeat_s: float,
        poll_interval_s: float,
        gone_gateway_s: float,
        membership: LwwMap | None = None,
        through_relays: bool = False,
        tracer: Tracer = UNTRACED,
    ) -> None:
        self.endpoint = endpoint
        self.partition = partition
        self.state = State.INIT
        self.membership = membership if membership is not None else LwwMap()
        self.relays = Relays() if through_relays else None
        self.fanout: Fanout | AddressedFanout = Fanout(self._gateway_targets, self._serves, self._elsewhere, tracer)
        if through_relays:
            self.fanout = AddressedFanout(self._ways, self._serves, self._elsewhere, tracer)
        self.feeds: dict[int, Feed] = {}
        self.puller = Puller(self.membership, heartbeat_s)
        self.instance_purge = InstancePurge(self.membership, gone_gateway_s)
        self.counters = Counters()
        self._heartbeat_s = heartbeat_s
        self._grace_s = 2 * poll_interval_s
        self._view: ClusterChanged | None = None
        self._partitions = 1
        self._gateways: dict[int, tuple[Target, int]] = {}
        """Instance → gateway and the generation that holds it."""
        self._brokers: dict[EndpointID, Target] = {}
        self._dead: set[EndpointID] = set()
        self._attachments: dict[EndpointID, bytes] = {}
        self._purge_at: float | None = None
        self._pass_on_until: float | None = None
        self._notices = LayoutNotices()
        self._housekeeping_at = 0.0
        self._waiting_since: float | None = None
        self._said_waiting_at = 0.0
        self._handlers: dict[type[Any], Callable[[Any, float, list[Effect]], None]] = {
            RecordsReceived: self._on_records,
            MessagesReceived: self._on_messages,
            ClusterChanged: self._on_cluster,
            PeerDead: self._on_dead,
            PeerAlive: self._on_alive,
            SubscriptionReply: self._on_subscription_reply,
            AntiEntropyReceived: self._on_anti_entropy,
            AbsenceReceived: self._on_absence,
            SnapshotChunk: self._on_snapshot_chunk,
            SnapshotFinished: self._on_snapshot_finished,
            Tick: self._on_tick,
        }

    def step(self, event: Event, now: float) -> list[Effect]:
        """Take one event; `now` is monotonic seconds. Returns what to do, in order."""
        effects: list[Effect] = []
        self._handlers[type(event)](event, now, effects)
        return effects

    def next_deadline(self) -> float | None:
        """When `Tick` is due, monotonic seconds."""
        retries = [feed.retry_at for feed in self.feeds.values() if feed.state is FeedState.SEEKING and feed.retry_at]
        due = [self._housekeeping_at, *retries]
        due.extend(when for when in (self._purge_at, self._pass_on_until) if when is not None)
        return min(due)

    # --- records

    def _on_records(self, event: RecordsReceived, now: float, effects: list[Effect]) -> None:
        lost = self.fanout.counters.records_unroutable
        found = self.fanout.route(event.data, event.start, event.end, event.count)
        if found is None:
            effects.append(MalformedBatch(event.peer))
            return
        parcels, stale = found
        effects.extend(parcels)
        if stale:
            self._notice(event.peer, now, effects)
            if self.fanout.counters.records_unroutable != lost:
                effects.append(NotTaken(event.peer))

    def _serves(self, room: int) -> bool:
        return serves(self.partition, room, self._partitions)

    def _gateway_targets(self, room: int) -> tuple[Target, ...]:
        found: list[Target] = []
        for instance in self.membership.gateways(room):
            gateway = self._gateways.get(instance)
            # A generation below the registry's was purged by its floor; one above is a gateway that the view
            # does not show yet. What is sent to the one before it does no harm: it is gone.
            if gateway is None:
                self.counters.gateways_unknown += 1
            else:
                found.append(gateway[0])
        return tuple(found)

    def _ways(self, room: int) -> tuple[Way, ...]:
        assert self.relays is not None
        return self.relays.ways(room, (key.member for key in self.membership.live_keys(room)))

    def _use_relays(self) -> None:
        if self.relays is not None and self._view is not None:
            live = [(relay.endpoint, relay.partition) for relay in self._view.relays if relay.endpoint not in self._dead]
            self.relays.change(self._view.relay_partitions, live)
            self.fanout.forget_all()

    def _elsewhere(self, room: int) -> Target | None:
        """The broker that serves a room which moved; for two poll intervals after the doubling. Source: DESIGN section 8."""
        if self._view is None or self._pass_on_until is None:
            return None
        partition = room % self._partitions
        replicas = [b.endpoint for b in self._view.brokers if b.partition == partition and b.endpoint not in self._dead]
        return self._brokers[EndpointID(rendezvous(room, replicas))] if replicas else None

    def _notice(self, sender: EndpointID, now: float, effects: list[Effect]) -> None:
        notice = self._notices.due(sender, self._view.version, now) if self._view is not None else None
        if notice is not None:
            self.counters.layout_notices += 1
            effects.append(SendControl(sender, [notice]))

    # --- the cluster

    def _on_cluster(self, event: ClusterChanged, now: float, effects: list[Effect]) -> None:
        first, self._view = self._view is None, event
        if first or event.partitions > self._partitions:
            # Senders may go by an older view for so long, also when this process is new.
            self._pass_on_until = now + self._grace_s
        if not first and event.partitions > self._partitions:
            self._purge_at = now + self._grace_s
        self._partitions = event.partitions
        self._brokers = {b.endpoint: self._brokers.get(b.endpoint) or Target(b.endpoint) for b in event.brokers}
        targets = {target.endpoint: target for target, _ in self._gateways.values()}
        self._gateways = {}
        for gateway in sorted(event.gateways, key=lambda g: (g.generation, g.endpoint)):
            target = targets.get(gateway.endpoint) or Target(gateway.endpoint)
            self._gateways[gateway.instance] = (target, gateway.generation)
            self.membership.raise_floor(gateway.instance, gateway.generation)
        self.fanout.forget_all()
        known = {replica.endpoint for replica in (*event.routers, *event.brokers, *event.relays)}
        self._dead &= known | {g.endpoint for g in event.gateways}
        self._use_relays()
        self._update_feeds(now, effects)

    def _on_dead(self, event: PeerDead, now: float, effects: list[Effect]) -> None:
        self._dead.add(event.peer)
        self._use_relays()
        self._update_feeds(now, effects)

    def _on_alive(self, event: PeerAlive, now: float, effects: list[Effect]) -> None:
        self._dead.discard(event.peer)
        self._use_relays()
        self._update_feeds(now, effects)

    # --- feeds

    def _update_feeds(self, now: float, effects: list[Effect]) -> None:
        """Have a feed from every router partition that shares rooms; leave routers that are gone; seek others.

        The partitions that a doubling is making are fed from as soon as they run, so that nothing is missed when the
        number changes; only the present ones are needed to run.
        """
        view = self._view
        if view is None:
            return
        by_partition: dict[int, list[EndpointID]] = {}
        for router in view.routers:
            if router.endpoint not in self._dead:
                by_partition.setdefault(router.partition, []).append(router.endpoint)
        wanted = self._needed(view)
        wanted += [p for p in range(view.router_partitions, view.router_next) if p in by_partition and self._shares(p, view)]
        for partition in [p for p in self.feeds if p not in wanted]:
            self._apply(self.feeds.pop(partition).replay(), now)
        for partition in wanted:
            feed = self.feeds.setdefault(partition, Feed(partition))
            usable = by_partition.get(partition, [])
            if feed.source is not None and feed.source not in usable:
                self._apply(feed.replay(), now)
                feed.lose(now)
                self.counters.subscriptions_lost += 1
            if feed.state is FeedState.SEEKING and feed.retry_at <= now:
                feed.retry_at = 0.0
                if usable:
                    order = rendezvous_order(self.endpoint, usable)
                    # A router whose snapshot failed is followed by the next one.
                    self._take(feed, EndpointID(order[feed.attempts % len(order)]), now, effects)
        self._set_attachments(view, effects)
        self._maybe_run(now, effects)

    def _shares(self, router_partition: int, view: ClusterChanged) -> bool:
        return share_rooms(self.partition, view.partitions, router_partition, view.router_partitions)

    def _needed(self, view: ClusterChanged) -> list[int]:
        return [p for p in range(view.router_partitions) if self._shares(p, view)]

    def _take(self, feed: Feed, source: EndpointID, now: float, effects: list[Effect]) -> None:
        feed.begin(source, now)
        if feed.seen is not None and self.state is State.RUNNING and self._can_pause():
            # Out of contact for so long that tombstones may be over: start again. Source: DESIGN section 10.
            self.state = State.INIT
            feed.complete = False
            self.counters.started_again += 1
            effects.append(BecomeInit())
        effects.append(TakeSnapshot(source, self.partition, self._partitions))

    def _can_pause(self) -> bool:
        """Of the partition's replicas the lowest serves on, since all may have been out of contact together."""
        view = self._view
        others = [] if view is None else [b.endpoint for b in view.brokers if b.partition == self.partition]
        return bool(others) and self.endpoint > min(others)

    def _set_attachments(self, view: ClusterChanged, effects: list[Effect]) -> None:
        rule = control_pb2.BrokerSubscription(partition=self.partition, partitions=view.partitions).SerializeToString()
        wanted = {feed.source: rule for feed in self.feeds.values() if feed.source is not None}
        for endpoint in [e for e in self._attachments if e not in wanted]:
            del self._attachments[endpoint]
            effects.append(SetAttachment(endpoint, b""))
        for endpoint, attachment in wanted.items():
            if self._attachments.get(endpoint) != attachment:
                self._attachments[endpoint] = attachment
                effects.append(SetAttachment(endpoint, attachment))

    def _of_source(self, source: EndpointID) -> Feed | None:
        return next((feed for feed in self.feeds.values() if feed.source == source), None)

    def _on_subscription_reply(self, event: SubscriptionReply, now: float, effects: list[Effect]) -> None:
        feed = self._of_source(event.peer)
        if feed is None or feed.state is not FeedState.LIVE:
            return
        if event.subscribed:
            if event.digest is not None and not event.digest.as_of:
                self._repair(event.peer, Repair(self.puller.on_digest(event.peer, event.digest, now)), effects)
            return
        # A reply that was under way while the snapshot was taken is no news.
        if now - feed.finished_at > 2 * self._heartbeat_s:
            self.counters.subscriptions_lost += 1
            feed.lose(now)
            self._take(feed, event.peer, now, effects)

    def _on_snapshot_chunk(self, event: SnapshotChunk, now: float, effects: list[Effect]) -> None:
        feed = self._of_source(event.source)
        if feed is None or feed.state is not FeedState.SNAPSHOT:
            return
        try:
            applied = self.membership.merge(event.chunk, now)
        except MalformedData:
            self.counters.snapshots_malformed += 1
            self._on_snapshot_finished(SnapshotFinished(event.source, "a chunk is malformed"), now, effects)
            return
        if feed.seen is not None:
            feed.seen.update(_keys_of(event.chunk.entries))
        self._changed(applied)

    def _on_snapshot_finished(self, event: SnapshotFinished, now: float, effects: list[Effect]) -> None:
        feed = self._of_source(event.source)
        if feed is None or feed.state is not FeedState.SNAPSHOT:
            return
        self._apply(feed.replay(), now)
        if event.error is None:
            self.counters.snapshots_taken += 1
            if feed.seen is not None and self._view is not None:
                swept = self.membership.sweep(feed.partition, self._view.router_partitions, feed.seen)
                self._changed(swept)
            feed.succeed(now)
        else:
            self.counters.snapshots_failed += 1
            feed.fail(self.endpoint, now)
        self._update_feeds(now, effects)

    def _maybe_run(self, now: float, effects: list[Effect]) -> None:
        """Run when every needed feed was merged once. Source: seed 004 §5.3 step 9."""
        if self.state is State.RUNNING or self._view is None:
            return
        missing = [p for p in self._needed(self._view) if not self.feeds[p].complete]
        if not missing:
            self.state = State.RUNNING
            effects.append(BecomeRunning())
            return
        if self._waiting_since is None:
            self._waiting_since = self._said_waiting_at = now
        if now - self._said_waiting_at >= WAITING_LOG_S:
            self._said_waiting_at = now
            effects.append(WaitingForRouters(tuple(missing), now - self._waiting_since))

    # --- what messages lost

    def _on_anti_entropy(self, event: AntiEntropyReceived, now: float, effects: list[Effect]) -> None:
        if self._of_source(event.peer) is not None:
            self._repair(event.peer, self.puller.take(event.peer, event.control, now), effects)

    def _repair(self, peer: EndpointID, outcome: Repair, effects: list[Effect]) -> None:
        if outcome.messages:
            effects.append(SendControl(peer, outcome.messages))
        self._note_seen(outcome.applied.changes)
        self._changed(outcome.purged)
        self._changed(outcome.applied)

    def _on_absence(self, event: AbsenceReceived, now: float, effects: list[Effect]) -> None:
        """Negative feedback: drop what is not newer."""
        if 0 < event.as_of <= MAX_ID:
            self._changed(self.membership.absent(event.as_of, event.rooms, now))

    # --- logins and logouts

    def _on_messages(self, event: MessagesReceived, now: float, effects: list[Effect]) -> None:
        self.counters.messages_in += len(event.messages)
        feed = self._of_source(event.peer)
        if feed is not None and feed.state is FeedState.SNAPSHOT:
            if feed.enqueue(event.messages):
                self.counters.messages_queued += len(event.messages)
                return
            # Last-writer-wins: taking them before the snapshot is merged gives the same membership.
            self.counters.queue_overflows += 1
        self._apply(event.messages, now)

    def _apply(self, messages: list[Update], now: float) -> None:
        own = [message for message in messages if self._serves(message.group)]
        self.counters.messages_foreign += len(messages) - len(own)
        applied = self.membership.apply(own, now)
        self._note_seen(applied.changes)
        self._changed(applied)

    def _changed(self, outcome: Applied | Purged) -> None:
        """What is cached for rooms is over: where gateways are sent to, when those changed; else when any member did."""
        if self.relays is None:
            self.fanout.forget(outcome.groups)
        else:
            self.fanout.forget({c.group for c in (outcome.changes if isinstance(outcome, Applied) else outcome.keys)})

    def _note_seen(self, changes: list[Update]) -> None:
        for feed in self.feeds.values():
            if feed.seen is not None:
                feed.seen.update(Key(c.group, c.member, gateway_instance(c.id)) for c in changes if c.login)

    # --- time

    def _on_tick(self, event: Tick, now: float, effects: list[Effect]) -> None:
        if self._purge_at is not None and self._purge_at <= now:
            self._purge_at = None
            self.membership.purge_partition(self.partition, self._partitions)
            self.fanout.forget_all()
        if self._pass_on_until is not None and self._pass_on_until <= now:
            self._pass_on_until = None
        if self._housekeeping_at <= now:
            self._housekeeping_at = now + HOUSEKEEPING_S
            self.membership.expire(now)
            for purged in self.instance_purge.purge(self._gateways, now) if self._view is not None else ():
                self._changed(purged)
        self._update_feeds(now, effects)


def _keys_of(entries: bytes) -> list[Key]:
    return [Key(room, uin, gateway_instance(id_)) for room, uin, id_ in ENTRY.iter_unpack(entries)]
