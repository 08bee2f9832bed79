"""The core that routers and relays share: takes what gateways say, passes it on, and confirms it.

    gateway ──▶ replica ──▶ every peer of the partition, Running and Init ──▶ the brokers subscribed to that peer
                   ├──────▶ the brokers subscribed to this replica (routers only)
                   ├──────▶ its own database, behind
                   └──────▶ gateway: confirmed, when all those links have settled

Nothing about a peer or a broker that missed something is kept: its subscription ends, the answer to its next
heartbeat says so, and it takes a snapshot. The map is last-writer-wins, so snapshots and messages merge in any order.

Source: seed 004 §2.4, §5 and §5.2; DESIGN sections 9, 10 and 13.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar, Final

from cluster.membership.anti_entropy import Outcome as Repair
from cluster.membership.anti_entropy import encode_absence
from cluster.membership.forwards import Forwards, Group, Outcome
from cluster.membership.isolation import Isolation
from cluster.membership.lww_map import Applied, LwwMap, Update, encode_messages
from cluster.membership.replica_anti_entropy import ReplicaAntiEntropy
from cluster.membership.replica_events import (
    AbsenceReceived,
    AntiEntropyReceived,
    BecomeInit,
    BecomeRunning,
    ClusterChanged,
    Effect,
    Event,
    LoadStore,
    MessagesReceived,
    PeerAlive,
    PeerDead,
    Persist,
    RefuseSnapshot,
    RewriteStore,
    SendControl,
    ServeSnapshot,
    SetAttachment,
    Settled,
    SnapshotChunk,
    SnapshotFinished,
    SnapshotRequested,
    StoreChunk,
    StoreFailed,
    StoreLoaded,
    StoreOpened,
    SubscriptionReply,
    TakeSnapshot,
    Tick,
)
from cluster.membership.replica_state import ClusterView, Counters, State, retry_pause_s
from cluster.membership.subscribers import Subscribers, valid_filter
from cluster.runtime.layout_notices import LayoutNotices
from pixiu.errors import MalformedData, Overloaded, Unavailable, WrongPartition
from pixiu.ids import MAX_ID, EndpointID
from pixiu.placement.partition import rendezvous_order, serves
from pixiu.wire.v1 import control_pb2

MAX_QUEUED_MESSAGES: Final = 200_000
"""Gateway messages that wait until the snapshot is merged. Policy: what exceeds it is taken at once."""
STORE_FRESH_S: Final = 300.0
"""An own database that is older than this is not merged with a peer's snapshot: it may revive users who left."""
STORE_RETRY_S: Final = 30.0
"""A database that failed is written anew after so long."""
HOUSEKEEPING_S: Final = 1.0


class ReplicaCore:
    """Decides; see the module. `step` never raises on what comes from the network.

    Args:
        endpoint: this process.
        partition: the one it serves.
        heartbeat_s: seconds between heartbeats.
        dead_after: missed heartbeats after which a subscription ends.
        poll_interval_s: how long a view of the registry may be old, seconds.
        gone_gateway_s: entries of a gateway that is out of the registry for so long are dropped, seconds.
        membership: the map, empty.
    """

    ROLE: ClassVar[str] = ""
    SNAPSHOT_ROLES: ClassVar[tuple[str, ...]] = ()
    """Who may take snapshots."""
    MAX_CONFIRMS: ClassVar[int] = 128
    """GatewayMsgIDs in one confirmation: 8 bytes each, so that they fit one datagram."""

    def __init__(
        self,
        *,
        endpoint: EndpointID,
        partition: int,
        heartbeat_s: float,
        dead_after: int,
        poll_interval_s: float,
        gone_gateway_s: float,
        membership: LwwMap | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.partition = partition
        self.state = State.STARTING
        self.membership = membership if membership is not None else LwwMap()
        self.subscribers = Subscribers(heartbeat_s * dead_after)
        self.anti_entropy = ReplicaAntiEntropy(self.membership, heartbeat_s, gone_gateway_s)
        self.forwards = Forwards()
        self.counters = Counters()
        self.store_error: str | None = None
        self._heartbeat_s = heartbeat_s
        self._grace_s = 2 * poll_interval_s
        self._view: ClusterView | None = None
        self._dead: set[EndpointID] = set()
        self._peers: list[EndpointID] = []
        self._store_age: float | None = None
        self._store_open = False
        self._store_stale = False
        """The database is not in use: it is to be replaced by what a peer has."""
        self._store_garbage = False
        """The database holds what was not taken over at loading."""
        self._store_retry_at: float | None = None
        self._queue: deque[MessagesReceived] = deque()
        self._queued = 0
        self._source: EndpointID | None = None
        self._attempts = 0
        self._retry_at: float | None = None
        self._synced_at: dict[EndpointID, float] = {}
        self._unsynced: set[EndpointID] = set()
        """Whose snapshot broke off: they count us as subscribed from its first part on, but we lack the rest."""
        self._attachments: dict[EndpointID, bytes] = {}
        self._isolation = Isolation()
        self._purge_at: float | None = None
        self._notices = LayoutNotices()
        self._housekeeping_at = 0.0
        self._handlers: dict[type[Any], Callable[[Any, float, list[Effect]], None]] = {
            ClusterChanged: self._on_cluster,
            PeerDead: self._on_dead,
            PeerAlive: self._on_alive,
            MessagesReceived: self._on_messages,
            Settled: self._on_settled,
            SubscriptionReply: self._on_subscription_reply,
            AntiEntropyReceived: self._on_anti_entropy,
            AbsenceReceived: self._on_absence,
            SnapshotRequested: self._on_snapshot_requested,
            StoreOpened: self._on_store_opened,
            StoreChunk: self._on_store_chunk,
            StoreLoaded: self._on_store_loaded,
            StoreFailed: self._on_store_failed,
            SnapshotChunk: self._on_snapshot_chunk,
            SnapshotFinished: self._on_snapshot_finished,
            Tick: self._on_tick,
        }

    def step(self, event: Event, now: float) -> list[Effect]:
        """Take one event; `now` is monotonic seconds. Returns what to do, in order."""
        effects: list[Effect] = []
        self._handlers[type(event)](event, now, effects)
        return effects

    def heartbeat(self, peer: EndpointID, partition: int, partitions: int, now: float) -> control_pb2.SubscriptionState:
        """A subscriber's heartbeat with its partition rule; returns what the reply says."""
        subscribed = self.subscribers.heartbeat(peer, partition, partitions, now)
        digest = self.anti_entropy.digest(partition, partitions) if subscribed and self.state is State.RUNNING else None
        return control_pb2.SubscriptionState(subscribed=subscribed, digest=digest)

    def next_deadline(self) -> float | None:
        """When `Tick` is due, monotonic seconds."""
        due = (self._housekeeping_at, self.forwards.next_retry(), self._retry_at, self._purge_at, self._store_retry_at)
        return min(when for when in due if when is not None)

    @property
    def queued(self) -> int:
        """Gateway messages that wait for the snapshot."""
        return self._queued

    @property
    def peers(self) -> tuple[EndpointID, ...]:
        """The live replicas of the partition that messages are forwarded to."""
        return tuple(self._peers)

    def in_sync_with(self, peer: EndpointID) -> bool:
        """Whether the last snapshot from a peer was merged whole; its live messages come since."""
        return peer in self._synced_at and peer not in self._unsynced and self._source != peer

    # --- the cluster

    def _on_cluster(self, event: ClusterChanged, now: float, effects: list[Effect]) -> None:
        old, first = self._view or ClusterView(), self._view is None
        replicas = {replica.endpoint: replica for replica in event.replicas if replica.endpoint != self.endpoint}
        self._view = ClusterView(event.version, event.partitions, replicas, event.brokers, event.gateways)
        if not first and event.partitions > old.partitions:
            self._purge_at = now + self._grace_s
        outcome = Outcome()
        self.anti_entropy.set_rule(self.partition, event.partitions)
        for endpoint in [e for e in old.replicas if e not in replicas] + sorted(old.brokers - event.brokers):
            self._lose(endpoint, outcome)
            self._synced_at.pop(endpoint, None)
            self._unsynced.discard(endpoint)
        gateways = {gateway.endpoint for gateway in event.gateways}
        self._dead &= replicas.keys() | event.brokers | gateways
        for endpoint in sorted({gateway.endpoint for gateway in old.gateways} - gateways):
            self.anti_entropy.puller.forget(endpoint)
        self._choose_peers()
        for gateway in event.gateways:
            self._persist_purge(self.membership.raise_floor(gateway.instance, gateway.generation).keys, effects)
        self._confirm(outcome, effects)
        self._set_attachments(effects)
        self._check_isolation(now, effects)
        self._go_on(now, effects)

    def _on_dead(self, event: PeerDead, now: float, effects: list[Effect]) -> None:
        self._dead.add(event.peer)
        self._check_isolation(now, effects)
        outcome = Outcome()
        self._lose(event.peer, outcome)
        self._choose_peers()
        self._confirm(outcome, effects)
        self._set_attachments(effects)
        self._go_on(now, effects)

    def _on_alive(self, event: PeerAlive, now: float, effects: list[Effect]) -> None:
        # What it missed it gets by a snapshot: its subscription ended when it was dead.
        self._dead.discard(event.peer)
        self._choose_peers()
        self._set_attachments(effects)
        self._check_isolation(now, effects)
        self._go_on(now, effects)

    def _lose(self, endpoint: EndpointID, outcome: Outcome) -> None:
        self.forwards.gone(endpoint, outcome)
        if self.subscribers.end(endpoint):
            self.counters.subscriptions_ended += 1

    def _choose_peers(self) -> None:
        assert self._view is not None or not self._peers
        if self._view is not None:
            self._peers = sorted(
                r.endpoint for r in self._view.replicas.values() if r.partition == self.partition and r.endpoint not in self._dead
            )

    def _set_attachments(self, effects: list[Effect]) -> None:
        """Heartbeat as a subscriber to the peers, and while the partition is being made to one parent replica; ask
        gateways what they hold."""
        if self._view is None:
            return
        rule = control_pb2.BrokerSubscription(partition=self.partition, partitions=self._view.partitions).SerializeToString()
        wanted = dict.fromkeys(self._peers, rule)
        if self._is_child():
            wanted.update(dict.fromkeys(self._sources()[:1], rule))
        wanted.update(dict.fromkeys((g.endpoint for g in self._view.gateways if g.endpoint not in self._dead), rule))
        for endpoint in [e for e in self._attachments if e not in wanted]:
            del self._attachments[endpoint]
            effects.append(SetAttachment(endpoint, b""))
        for endpoint, attachment in wanted.items():
            if self._attachments.get(endpoint) != attachment:
                self._attachments[endpoint] = attachment
                effects.append(SetAttachment(endpoint, attachment))

    def _is_child(self) -> bool:
        return self._view is not None and self.partition >= self._view.partitions

    def _running(self, partition: int) -> list[EndpointID]:
        """Running replicas of a partition that are not dead, the one that this process prefers first."""
        assert self._view is not None
        return [EndpointID(e) for e in rendezvous_order(self.endpoint, self._view.running(partition, self._dead))]

    def _sources(self) -> list[EndpointID]:
        """Where a first snapshot can be taken: the partition's own replicas, while doubling the parent's."""
        assert self._view is not None
        own = self._running(self.partition)
        return own or (self._running(self.partition % self._view.partitions) if self._is_child() else [])

    # --- start-up and snapshots

    def _on_store_opened(self, event: StoreOpened, now: float, effects: list[Effect]) -> None:
        self._store_open, self._store_age = True, event.age_s
        self._go_on(now, effects)

    def _go_on(self, now: float, effects: list[Effect]) -> None:
        """Start-up goes on when something it waited for is there. Source: DESIGN section 10, "Start-up"."""
        if self.state is State.STARTING and self._view is not None and self._store_open:
            fresh = self._store_age is not None and self._store_age <= STORE_FRESH_S
            if self._store_age is not None and (fresh or not self._sources()):
                self.state = State.LOADING
                effects.append(LoadStore())
                return
            self._store_stale = self._store_age is not None
            self.state = State.SYNCING
        if self.state is State.SYNCING and self._source is None and (self._retry_at is None or self._retry_at <= now):
            self._retry_at = None
            sources = self._sources()
            if sources:
                # A source that fails is followed by the next one.
                self._take_snapshot(sources[self._attempts % len(sources)], effects)
            elif self._store_stale:
                # The peers that made the own data needless are gone; old data is better than none.
                self._store_stale = False
                self.state = State.LOADING
                effects.append(LoadStore())
            else:
                self._run(now, effects)

    def _take_snapshot(self, source: EndpointID, effects: list[Effect]) -> None:
        assert self._view is not None
        self._source = source
        effects.append(TakeSnapshot(source, self.partition, self._view.partitions))

    def _on_store_chunk(self, event: StoreChunk, now: float, effects: list[Effect]) -> None:
        try:
            self.membership.merge(event.chunk, now)
        except MalformedData:
            self.counters.store_failures += 1

    def _on_store_loaded(self, event: StoreLoaded, now: float, effects: list[Effect]) -> None:
        if self.state is State.LOADING:
            self.state = State.SYNCING
            # What is below the view's floors was not loaded; what belongs to another partition by now was.
            self._store_garbage = self.membership.counters.stale > 0
            if self._view is not None:
                self._persist_purge(self.membership.purge_partition(self.partition, self._view.partitions).keys, effects)
            self._go_on(now, effects)

    def _on_snapshot_chunk(self, event: SnapshotChunk, now: float, effects: list[Effect]) -> None:
        if event.source != self._source:
            return
        try:
            applied = self.membership.merge(event.chunk, now)
        except MalformedData:
            self._on_snapshot_finished(SnapshotFinished(event.source, "a chunk is malformed"), now, effects)
            return
        self._persist(applied, effects)
        if applied.changes and self.state is State.RUNNING:
            # What this replica had missed, those who subscribed to it have missed as well.
            self._forward(event.source, applied.changes, True, Group(None, []), effects)

    def _on_snapshot_finished(self, event: SnapshotFinished, now: float, effects: list[Effect]) -> None:
        if event.source != self._source:
            return
        self._source = None
        if event.error is None:
            self.counters.snapshots_taken += 1
            self._attempts = 0
            self._synced_at[event.source] = now
            self._unsynced.discard(event.source)
            if self.state is State.SYNCING:
                self._run(now, effects)
            return
        self.counters.snapshots_failed += 1
        self._attempts += 1
        self._unsynced.add(event.source)
        if self.state is State.SYNCING:
            self._retry_at = now + retry_pause_s(self.endpoint, self._attempts)

    def _run(self, now: float, effects: list[Effect]) -> None:
        """The membership is complete: replay what was queued, then serve."""
        self.state = State.RUNNING
        self._attempts = 0
        queue, self._queue, self._queued = self._queue, deque(), 0
        for event in queue:
            self._take(event, now, effects)
        if self._store_stale or self._store_garbage:
            self._store_stale = self._store_garbage = False
            effects.append(RewriteStore(self.membership.snapshot()))
        effects.append(BecomeRunning())

    def _on_subscription_reply(self, event: SubscriptionReply, now: float, effects: list[Effect]) -> None:
        """A peer (or the parent) says that we missed something, or that it never knew us: take what it has."""
        if self.state is not State.RUNNING or self._view is None:
            return
        if event.digest is not None:
            self._repair(event.peer, self.anti_entropy.on_digest(event.peer, event.digest, self._view, now), effects)
        if self._source is not None:
            return
        if event.subscribed and event.peer not in self._unsynced:
            return
        replica = self._view.replicas.get(event.peer)
        if replica is None or not replica.running or event.peer not in self._attachments or event.peer in self._dead:
            return
        # A reply that was under way while the snapshot was taken is no news.
        if now - self._synced_at.get(event.peer, -1e9) > 2 * self._heartbeat_s:
            self._synced_at[event.peer] = now
            self._take_snapshot(event.peer, effects)

    def _on_snapshot_requested(self, event: SnapshotRequested, now: float, effects: list[Effect]) -> None:
        """Note what there is and open the subscription in one turn, so that nothing falls between.

        Source: seed 004 §5.2 steps 3 and 8; DESIGN section 10.
        """
        refusal: tuple[str, str] | None = None
        if self.state is not State.RUNNING:
            refusal = (Unavailable.code, f"this {self.ROLE} is {self.state.value}; ask a Running one")
        elif event.role not in self.SNAPSHOT_ROLES or not valid_filter(event.partition, event.partitions):
            text = f"a snapshot is for a {' or a '.join(self.SNAPSHOT_ROLES)} and a partition of a power of two"
            refusal = (WrongPartition.code, text)
        elif not self.subscribers.open(event.endpoint, event.role, event.partition, event.partitions, now):
            refusal = (Overloaded.code, f"this {self.ROLE} has {len(self.subscribers)} subscribers; use another replica")
        if refusal is not None:
            self.counters.snapshots_refused += 1
            effects.append(RefuseSnapshot(event.request, *refusal))
            return
        self.counters.snapshots_served += 1
        effects.append(ServeSnapshot(event.request, self.membership.snapshot(event.partition, event.partitions)))

    # --- gateway messages

    def _on_messages(self, event: MessagesReceived, now: float, effects: list[Effect]) -> None:
        if self.state is not State.RUNNING:
            if self._queued + len(event.messages) <= MAX_QUEUED_MESSAGES:
                self._queue.append(event)
                self._queued += len(event.messages)
                self.counters.messages_queued += len(event.messages)
                return
            # Last-writer-wins: taking them before the snapshot is merged gives the same membership.
            self.counters.queue_overflows += 1
        self._take(event, now, effects)

    def _take(self, event: MessagesReceived, now: float, effects: list[Effect]) -> None:
        """Peers first, then subscribers, then the database; the confirmation when all of them have it.

        Source: seed 004 §5 and §5.2 step 8; DESIGN section 9.
        """
        view = self._view or ClusterView()
        valid = [m for m in event.messages if 0 < m.id <= MAX_ID and m.group <= MAX_ID and m.member <= MAX_ID]
        self.counters.messages_malformed += len(event.messages) - len(valid)
        own = [m for m in valid if serves(self.partition, m.group, view.partitions)]
        sender = view.replicas.get(event.peer)
        group = Group(None if sender is not None else event.peer, [m.id for m in valid])
        if sender is None:
            self.counters.messages_from_gateways += len(valid)
        else:
            self.counters.messages_from_replicas += len(valid)
        # Held above 0 until every forward is made, so that none of them can finish the group early.
        group.waiting = 1
        if own:
            self._forward(event.peer, own, sender is not None and sender.partition == self.partition, group, effects)
            self._persist(self._apply(own, now, effects), effects)
        if len(own) < len(valid) and sender is None:  # once: a child would give back what it gets from its parent, for ever
            served = set(own)
            self._pass_on(event.peer, [m for m in valid if m not in served], view, group, now, effects)
        group.waiting -= 1
        if not group.waiting:
            self._confirm(Outcome([group]), effects)

    def _apply(self, messages: list[Update], now: float, effects: list[Effect]) -> Applied:
        """Take over what gateways said; a role may have more to do for it."""
        return self.membership.apply(messages, now)

    def _forward(self, origin: EndpointID, messages: list[Update], from_peer: bool, group: Group, effects: list[Effect]) -> None:
        """To the peers (not when a peer sent it: it did that itself), then to those who subscribed here."""
        everything = encode_messages(messages)
        peers = [] if from_peer else [peer for peer in self._peers if peer != origin]
        for peer in peers:
            effects.append(SendControl(peer, everything, self.forwards.send(peer, everything, group)))
        encoded: dict[tuple[int, int], list[bytes]] = {}
        direct = set(self._peers)
        for subscriber in self.subscribers.all():
            if subscriber.endpoint in direct or subscriber.endpoint == origin or (from_peer and self._is_peer(subscriber.endpoint)):
                continue
            rule = (subscriber.partition % subscriber.partitions, subscriber.partitions)
            parts = encoded.get(rule)
            if parts is None:
                wanted = [m for m in messages if subscriber.wants(m.group)]
                parts = encoded[rule] = everything if len(wanted) == len(messages) else encode_messages(wanted)
            if parts:
                effects.append(SendControl(subscriber.endpoint, parts, self.forwards.send(subscriber.endpoint, parts, group)))

    def _is_peer(self, endpoint: EndpointID) -> bool:
        replica = self._view.replicas.get(endpoint) if self._view is not None else None
        return replica is not None and replica.partition == self.partition

    def _pass_on(
        self, sender: EndpointID, messages: list[Update], view: ClusterView, group: Group, now: float, effects: list[Effect]
    ) -> None:
        """The sender used an old layout: pass its messages on, and tell it. Source: DESIGN section 8."""
        self.counters.messages_stale_sender += len(messages)
        by_target: dict[EndpointID, list[Update]] = {}
        for message in messages:
            replicas = self._running(message.group % view.partitions)
            if replicas:
                by_target.setdefault(EndpointID(rendezvous_order(message.group, replicas)[0]), []).append(message)
            else:
                self.counters.messages_unroutable += 1
                group.ids.remove(message.id)
        for target, found in by_target.items():
            parts = encode_messages(found)
            effects.append(SendControl(target, parts, self.forwards.send(target, parts, group, required=True)))
        notice = self._notices.due(sender, view.version, now)
        if notice is not None:
            effects.append(SendControl(sender, [notice]))

    # --- what messages lost

    def _on_anti_entropy(self, event: AntiEntropyReceived, now: float, effects: list[Effect]) -> None:
        if self.state is State.RUNNING and self._view is not None:
            self._repair(event.peer, self.anti_entropy.take(event.peer, event.control, self._view, now), effects)

    def _repair(self, peer: EndpointID, outcome: Repair, effects: list[Effect]) -> None:
        if outcome.messages:
            effects.append(SendControl(peer, outcome.messages))
        self._persist_purge(outcome.purged.keys, effects)
        self._persist(outcome.applied, effects)
        if outcome.applied.changes:
            # Peers compare with the gateway themselves.
            self._forward(peer, outcome.applied.changes, True, Group(None, []), effects)

    def _on_absence(self, event: AbsenceReceived, now: float, effects: list[Effect]) -> None:
        """Negative feedback: drop what is not newer, here, at the peers, and at the brokers of each."""
        if self.state is not State.RUNNING or self._view is None or not self.anti_entropy.valid_absence(event):
            return
        self._persist(self.membership.absent(event.as_of, event.rooms, now), effects)
        from_peer = event.peer in self._view.replicas
        targets = dict.fromkeys(() if from_peer else self._peers)
        for subscriber in self.subscribers.all():
            if subscriber.endpoint not in self._peers and any(subscriber.wants(room) for room in event.rooms):
                targets[subscriber.endpoint] = None
        message = encode_absence(event.as_of, event.rooms)
        effects.extend(SendControl(target, [message]) for target in targets if target != event.peer)

    def _check_isolation(self, now: float, effects: list[Effect]) -> None:
        """Out of contact for so long that tombstones may be over: start again as Init. Source: DESIGN section 10."""
        if self._view is None:
            return
        running = [r.endpoint for r in self._view.replicas.values() if r.running and r.partition == self.partition]
        too_long = self._isolation.regained_late([e for e in running if e not in self._dead], running, now)
        # Of several that were alone the lowest serves on, so that the others have somebody to load from.
        if too_long and self.state is State.RUNNING and self.endpoint > min(running):
            self.state = State.SYNCING
            self.counters.started_again += 1
            effects.append(BecomeInit())

    def _on_settled(self, event: Settled, now: float, effects: list[Effect]) -> None:
        outcome = Outcome()
        for token, handled in event.parcels:
            self.forwards.settled(token, handled, now, outcome)
        for endpoint in outcome.missed:
            if self.subscribers.end(endpoint):
                self.counters.subscriptions_ended += 1
        self._confirm(outcome, effects)

    def _confirm(self, outcome: Outcome, effects: list[Effect]) -> None:
        by_gateway: dict[EndpointID, list[int]] = {}
        for group in outcome.confirmed:
            if group.gateway is not None and group.ids:
                by_gateway.setdefault(group.gateway, []).extend(group.ids)
        for gateway, ids in by_gateway.items():
            self.counters.confirmed += len(ids)
            parts = [ids[start : start + self.MAX_CONFIRMS] for start in range(0, len(ids), self.MAX_CONFIRMS)]
            effects.append(SendControl(gateway, [self._confirmation(part) for part in parts]))

    def _confirmation(self, ids: list[int]) -> bytes:
        return control_pb2.Control(gateway_confirm=control_pb2.GatewayConfirm(ids=ids)).SerializeToString()

    # --- the database

    def _persist(self, applied: Applied, effects: list[Effect]) -> None:
        if not applied.changes:
            return
        if self.store_error is not None or self._store_stale:
            self.counters.store_skipped += len(applied.changes)
            return
        effects.append(Persist(puts=applied.changes))

    def _persist_purge(self, keys: list[Any], effects: list[Effect]) -> None:
        if keys and self._store_open and self.store_error is None and not self._store_stale:
            effects.append(Persist(deletes=keys))

    def _on_store_failed(self, event: StoreFailed, now: float, effects: list[Effect]) -> None:
        """Serve on from memory; write everything anew later, since the database lacks something now."""
        self.counters.store_failures += 1
        self.store_error = event.text
        self._store_retry_at = now + STORE_RETRY_S

    # --- time

    def _on_tick(self, event: Tick, now: float, effects: list[Effect]) -> None:
        for token, forward in self.forwards.due(now):
            effects.append(SendControl(forward.peer, forward.messages, token))
        if self._store_retry_at is not None and self._store_retry_at <= now:
            self._store_retry_at = None
            if self.state is State.RUNNING:
                self.store_error = None
                effects.append(RewriteStore(self.membership.snapshot()))
            else:
                self._store_retry_at = now + STORE_RETRY_S
        if self._purge_at is not None and self._purge_at <= now and self._view is not None:
            self._purge_at = None
            self._persist_purge(self.membership.purge_partition(self.partition, self._view.partitions).keys, effects)
        if self._housekeeping_at <= now:
            self._housekeeping_at = now + HOUSEKEEPING_S
            self.counters.subscriptions_ended += len(self.subscribers.expire(now))
            self._persist_purge(self.membership.expire(now), effects)
            self._check_isolation(now, effects)
            if self._view is not None:
                for purged in self.anti_entropy.instance_purge.purge({gateway.instance for gateway in self._view.gateways}, now):
                    self._persist_purge(purged.keys, effects)
        self._go_on(now, effects)
