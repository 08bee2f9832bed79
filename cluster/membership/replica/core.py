"""The core that routers and relays share: takes gateways' reports, passes them on, and confirms them.

    gateway ──▶ replica ──▶ every peer of the partition, Running and Init ──▶ the brokers subscribed to that peer
                   ├──────▶ every broker in the registry that serves the rooms, and all that subscribed here (routers only)
                   ├──────▶ its own database, asynchronously
                   └──────▶ gateway: confirmed, when all those links have settled

There is no record of what a peer or a broker has missed: its subscription ends, the answer to its next heartbeat reports that, and
it takes a snapshot. The map is last-writer-wins, so snapshots and messages merge in any order.

Source: PiXiu §2.4, §5 and §5.2; docs/architecture.md, docs/memberships.md, docs/routing.md, "Partitions".
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import ClassVar, Final

from cluster.core.contract import NEVER, NOT_TAKEN, SendControl, Settled, Tick
from cluster.membership import events as ev
from cluster.membership.events import Effect
from cluster.membership.map.anti_entropy import encode_absence
from cluster.membership.map.isolation import Isolation
from cluster.membership.map.lww_map import Applied, Key, LwwMap, Purged
from cluster.membership.map.updates import Update, encode_messages
from cluster.membership.member.core import MemberCore
from cluster.membership.member.state import ClusterView, Speaker, retry_pause_s
from cluster.membership.replica.anti_entropy import ReplicaAntiEntropy, speaks_for
from cluster.membership.replica.forwards import ForwardOutcome, Forwards, Group
from cluster.membership.replica.state import Counters, State
from cluster.membership.replica.subscribers import Subscribers, valid_filter
from cluster.wire.v1 import control_pb2
from pixiu.errors import MalformedData, Overloaded, Unavailable, WrongPartition
from pixiu.ids import MAX_ID, EndpointID, gateway_instance, gateway_run
from pixiu.placement.partition import rendezvous_order, serves

MAX_QUEUED_MESSAGES: Final = 200_000
"""Gateway messages that wait until the snapshot is merged. Policy: messages beyond this are taken at once."""
MAX_INTRODUCED: Final = 4
"""Gateways that are introduced with one message; messages of more gateways come from a replica that introduced them itself."""
STORE_FRESH_S: Final = 300.0
"""Greatest age of an own database that is merged with a peer's snapshot, seconds: an older one may revive users who left."""
STORE_RETRY_S: Final = 30.0
"""Time after which a failed database is written anew, seconds."""


class ReplicaCore(MemberCore):
    """Decides what a router or relay does. `step` never raises because of input from the network.

    Args:
        endpoint, partition, heartbeat_s, poll_interval_s, gone_gateway_s: see `MemberCore`.
        dead_after: missed heartbeats after which a subscription ends.
        membership: the map, empty.
    """

    SNAPSHOT_ROLES: ClassVar[tuple[str, ...]] = ()
    """Roles that may take snapshots."""
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
        guests: bool = False,
    ) -> None:
        super().__init__(
            endpoint=endpoint,
            partition=partition,
            heartbeat_s=heartbeat_s,
            poll_interval_s=poll_interval_s,
            gone_gateway_s=gone_gateway_s,
            membership=membership if membership is not None else LwwMap(),
        )
        self._guests = guests
        self.state = State.STARTING
        self.subscribers = Subscribers(heartbeat_s * dead_after)
        self.anti_entropy = ReplicaAntiEntropy(self.membership, self.puller)
        self.forwards = Forwards()
        self._counters = Counters()
        self.store_error: str | None = None
        self._peers: list[EndpointID] = []
        self._store_age: float | None = None
        self._store_open = False
        self._store_stale = False
        """True if the database is not used and must be replaced by a peer's data."""
        self._store_garbage = False
        """True if the database holds entries that were not taken over when it was loaded."""
        self._store_retry_at = NEVER
        self._queue: deque[tuple[ev.MessagesReceived, ev.Replica | None]] = deque()
        """Waiting messages, each with the replica that sent it, even if that is gone by now; None: a gateway sent it."""
        self._queued = 0
        self._source: EndpointID | None = None
        self._attempts = 0
        self._retry_at = NEVER
        """Time at which a snapshot is tried again; `NEVER`: at once."""
        self._synced_at: dict[EndpointID, float] = {}
        self._unsynced: set[EndpointID] = set()
        """Peers whose snapshot failed: they count us as subscribed from its first part on, but we lack the rest."""
        self._isolation = Isolation()
        on = self.on
        on(Settled, self._on_settled)
        on(ev.SnapshotRequested, self._on_snapshot_requested)
        on(ev.StoreOpened, self._on_store_opened)
        on(ev.StoreChunk, self._on_store_chunk)
        on(ev.StoreLoaded, self._on_store_loaded)
        on(ev.StoreFailed, self._on_store_failed)
        self.register_own_events()

    def register_own_events(self) -> None:
        """Register the events that this role alone has."""

    def heartbeat(
        self, peer: EndpointID, partition: int, partitions: int, now: float, key: int = 0
    ) -> control_pb2.SubscriptionState:
        """Handle a subscriber's heartbeat with its partition rule and digest key; returns the content of the reply."""
        subscribed = self.subscribers.heartbeat(peer, partition, partitions, now)
        digest = self.anti_entropy.digest(partition, partitions, key) if subscribed and self.state is State.RUNNING else None
        return control_pb2.SubscriptionState(subscribed=subscribed, digest=digest)

    def next_deadline(self) -> float:
        """Time at which `Tick` is due, monotonic seconds."""
        return min(super().next_deadline(), self._retry_at, self._store_retry_at, self.forwards.next_retry())

    @property
    def counters(self) -> Counters:
        """Counters since the start."""
        return self._counters

    @property
    def queued(self) -> int:
        """Number of gateway messages that wait for the snapshot."""
        return self._queued

    @property
    def peers(self) -> tuple[EndpointID, ...]:
        """Live replicas of the partition to which messages are forwarded."""
        return tuple(self._peers)

    # --- the cluster

    def _cluster_changed(self, old: ClusterView, now: float, out: list[Effect]) -> None:
        assert self._view is not None
        view, outcome = self._view, ForwardOutcome()
        self.anti_entropy.set_rule(self.partition, view.partitions)
        gone_brokers = old.brokers.endpoints - view.brokers.endpoints
        for endpoint in [e for e in old.replicas if e not in view.replicas] + sorted(gone_brokers):
            self._lose(endpoint, outcome)
            self._synced_at.pop(endpoint, None)
            self._unsynced.discard(endpoint)
        for endpoint in sorted({gateway.endpoint for gateway in old.gateways} - {gateway.endpoint for gateway in view.gateways}):
            self.puller.forget(endpoint)
        self._confirm(outcome, out)
        self._reach_changed(now, out)

    def _on_dead(self, event: ev.PeerDead, now: float, out: list[Effect]) -> None:
        outcome = ForwardOutcome()
        self._lose(event.peer, outcome)
        self._confirm(outcome, out)
        super()._on_dead(event, now, out)

    def _reach_changed(self, now: float, out: list[Effect]) -> None:
        # A peer that returns gets what it missed by a snapshot: its subscription ended when it was dead.
        if self._view is None:
            return
        replicas = self._view.replicas.values()
        self._peers = sorted(r.endpoint for r in replicas if r.partition == self.partition and r.endpoint not in self._dead)
        self._set_attachments(self._view, out)
        self._check_isolation(now, out)
        self._go_on(now, out)

    def _lose(self, endpoint: EndpointID, outcome: ForwardOutcome) -> None:
        self.forwards.gone(endpoint, outcome)
        if self.subscribers.end(endpoint):
            self.counters.subscriptions_ended += 1

    def _set_attachments(self, view: ClusterView, out: list[Effect]) -> None:
        """Heartbeat as a subscriber to the peers, and, while the partition is being made, to one parent replica; ask gateways for
        their digests."""
        targets = [*self._peers, *(self._sources()[:1] if self._is_child() else ())]
        targets += [gateway.endpoint for gateway in view.gateways if gateway.endpoint not in self._dead]
        self._attach(dict.fromkeys(targets, self._rule()), out)

    def _is_child(self) -> bool:
        return self._view is not None and self.partition >= self._view.partitions

    def _running(self, partition: int) -> list[EndpointID]:
        """Running replicas of a partition that are not dead, in this process's order of preference."""
        assert self._view is not None
        return [EndpointID(e) for e in rendezvous_order(self.endpoint, self._view.running(partition, self._dead))]

    def _sources(self) -> list[EndpointID]:
        """Replicas from which a first snapshot can be taken: the partition's own, or the parent's during a doubling."""
        assert self._view is not None
        own = self._running(self.partition)
        return own or (self._running(self.partition % self._view.partitions) if self._is_child() else [])

    # --- start-up and snapshots

    def _on_store_opened(self, event: ev.StoreOpened, now: float, out: list[Effect]) -> None:
        self._store_open, self._store_age = True, event.age_s
        self._go_on(now, out)

    def _go_on(self, now: float, out: list[Effect]) -> None:
        """Continue start-up if something it waited for is available. Source: docs/memberships.md, "Start-up"."""
        if self.state is State.STARTING and self._view is not None and self._store_open:
            fresh = self._store_age is not None and self._store_age <= STORE_FRESH_S
            if self._store_age is not None and (fresh or not self._sources()):
                self.state = State.LOADING
                out.append(ev.LoadStore())
                return
            self._store_stale = self._store_age is not None
            self.state = State.SYNCING
        if self.state is State.SYNCING and self._source is None and not now < self._retry_at < NEVER:
            self._retry_at = NEVER
            sources = self._sources()
            if sources:
                # After a source fails, the next one is tried.
                self._take_snapshot(sources[self._attempts % len(sources)], out)
            elif self._store_stale:
                # The peers that made the own data unnecessary are gone; old data is better than none.
                self._store_stale = False
                self.state = State.LOADING
                out.append(ev.LoadStore())
            else:
                self._run(now, out)

    def _take_snapshot(self, source: EndpointID, out: list[Effect]) -> None:
        self._source = source
        self._ask_for_snapshot(source, out)

    def _is_taking(self, source: EndpointID) -> bool:
        return source == self._source

    def _on_store_chunk(self, event: ev.StoreChunk, now: float, out: list[Effect]) -> None:
        try:
            self.membership.merge(event.chunk, now)
        except MalformedData:
            self.counters.store_failures += 1

    def _on_store_loaded(self, event: ev.StoreLoaded, now: float, out: list[Effect]) -> None:
        if self.state is State.LOADING:
            self.state = State.SYNCING
            # Entries below the view's floors were not loaded; entries that belong to another partition by now were.
            self._store_garbage = self.membership.counters.stale > 0
            if self._view is not None:
                self.membership.purge_partition(self.partition, self._partitions)
                self._purge_some(now, out)
            self._go_on(now, out)

    def _on_snapshot_finished(self, event: ev.SnapshotFinished, now: float, out: list[Effect]) -> None:
        if event.source != self._source:
            return
        self._source = None
        if event.error is None:
            self.counters.snapshots_taken += 1
            self._attempts = 0
            self._synced_at[event.source] = now
            self._unsynced.discard(event.source)
            if self.state is State.SYNCING:
                self._run(now, out)
            return
        self.counters.snapshots_failed += 1
        self._attempts += 1
        self._unsynced.add(event.source)
        if self.state is State.SYNCING:
            self._retry_at = now + retry_pause_s(self.endpoint, self._attempts)

    def _run(self, now: float, out: list[Effect]) -> None:
        """Replay the queue, then serve: the membership is complete."""
        self.state = State.RUNNING
        self._attempts = 0
        queue, self._queue, self._queued = self._queue, deque(), 0
        for event, sender in queue:
            self._take(event, sender, now, out)
        if self._store_stale or self._store_garbage:
            self._store_stale = self._store_garbage = False
            out.append(ev.RewriteStore(self.membership.snapshot()))
        out.append(ev.BecomeRunning())

    def _on_subscription_reply(self, event: ev.SubscriptionReply, now: float, out: list[Effect]) -> None:
        """Take a snapshot from a peer (or the parent) that reports that we missed something, or that it never knew us."""
        if self.state is not State.RUNNING or self._view is None:
            return
        if event.digest is not None:
            self._repair(event.peer, self.anti_entropy.on_digest(event.peer, event.digest, self._view, now), out)
        if self._source is not None:
            return
        if event.subscribed and event.peer not in self._unsynced:
            return
        replica = self._view.replicas.get(event.peer)
        if replica is None or not replica.running or event.peer not in self._attachments or event.peer in self._dead:
            return
        # A reply that was under way while the snapshot was taken brings nothing new.
        if now - self._synced_at.get(event.peer, -1e9) > 2 * self._heartbeat_s:
            self._synced_at[event.peer] = now
            self._take_snapshot(event.peer, out)

    def _on_snapshot_requested(self, event: ev.SnapshotRequested, now: float, out: list[Effect]) -> None:
        """Note the current content and open the subscription in one turn, so that no message is missed in between.

        Source: PiXiu §5.2 steps 3 and 8; docs/memberships.md.
        """
        refusal: tuple[str, str] | None = None
        if self.state is not State.RUNNING:
            refusal = (Unavailable.code, f"this {self.ROLE} is {self.state.value}; ask a Running one")
        elif event.role not in self.SNAPSHOT_ROLES or not valid_filter(event.partition, event.partitions):
            text = f"a snapshot is for a {' or a '.join(self.SNAPSHOT_ROLES)} and a partition of a power of two"
            refusal = (WrongPartition.code, text)
        elif not self._is_registered(event.endpoint, event.role):
            refusal = (
                Unavailable.code,
                f"this {self.ROLE} knows of no {event.role} that is registered with this endpoint; ask again",
            )
        elif not self.subscribers.open(event.endpoint, event.role, event.partition, event.partitions, now):
            refusal = (Overloaded.code, f"this {self.ROLE} has {len(self.subscribers)} subscribers; use another replica")
        if refusal is not None:
            self.counters.snapshots_refused += 1
            out.append(ev.RefuseSnapshot(event.request, *refusal))
            return
        self.counters.snapshots_served += 1
        out.append(ev.ServeSnapshot(event.request, self.membership.snapshot(event.partition, event.partitions)))

    def _is_registered(self, endpoint: EndpointID, role: str) -> bool:
        """True if the registry has the asking process: otherwise invented endpoints would take all places of subscribers. Guests
        from other clusters are in other registries, so every process passes where guests may come."""
        if self._guests or self._view is None:
            return self._guests
        return endpoint in (self._view.replicas if role == self.ROLE else self._view.brokers.endpoints)

    # --- gateway messages

    def _on_messages(self, event: ev.MessagesReceived, now: float, out: list[Effect]) -> None:
        """Pass on gateways' reports; a gateway may report for its own run only. Source: docs/memberships.md."""
        view = self._view or ClusterView()
        sender = view.replicas.get(event.peer)
        if sender is None:
            run = view.runs.get(event.peer)
            if run is None:
                # Neither confirmed nor handled: the gateway sends them again until the view has it.
                self.counters.messages_of_strangers += len(event.messages)
                out += [ev.SenderRefused(event.peer, False), NOT_TAKEN]
                return
            own = [m for m in event.messages if gateway_run(m.id) == run or not 0 < m.id <= MAX_ID]
            if len(own) < len(event.messages):
                self._refuse_others(event.peer, len(event.messages) - len(own), out)
                event = replace(event, messages=own)
            event = replace(event, messages=self._proven(event.peer, run, event.messages, out))
        if self.state is not State.RUNNING:
            if self._queued + len(event.messages) <= MAX_QUEUED_MESSAGES:
                self._queue.append((event, sender))
                self._queued += len(event.messages)
                self.counters.messages_queued += len(event.messages)
                return
            # Last-writer-wins: taking them before the snapshot is merged gives the same membership.
            self.counters.queue_overflows += 1
        self._take(event, sender, now, out)

    def _proven(self, gateway: EndpointID, run: int, messages: list[Update], out: list[Effect]) -> list[Update]:
        """Messages of a gateway that are proven, where a role asks for proof."""
        return messages

    def _proven_page(self, gateway: EndpointID, run: int, control: control_pb2.Control, out: list[Effect]) -> control_pb2.Control:
        """An answer of a gateway with the entries that are proven, where a role asks for proof."""
        return control

    def _refuse_others(self, gateway: EndpointID, count: int, out: list[Effect]) -> None:
        """Refuse the messages of a gateway that reported for another one: it was broken into, or is not what its number claims."""
        self.counters.messages_of_others += count
        out.append(ev.SenderRefused(gateway, True))

    def _take(self, event: ev.MessagesReceived, sender: ev.Replica | None, now: float, out: list[Effect]) -> None:
        """Send messages to peers first, then to subscribers, then to the database; confirm when all of them have the messages.

        Source: PiXiu §5 and §5.2 step 8; docs/architecture.md.
        """
        view = self._view or ClusterView()
        valid = [m for m in event.messages if 0 < m.id <= MAX_ID and m.group <= MAX_ID and m.member <= MAX_ID]
        self.counters.messages_malformed += len(event.messages) - len(valid)
        own = [m for m in valid if serves(self.partition, m.group, view.partitions)]
        if sender is None and self.membership.is_nearly_full(len(own)):
            refused = self._refuse(event.peer, own, out)
            own = [m for m in own if m not in refused]
            valid = [m for m in valid if m not in refused]
        group = Group(None if sender is not None else event.peer, [m.id for m in valid])
        if sender is None:
            speaker = Speaker.GATEWAY
            self.counters.messages_from_gateways += len(valid)
        else:
            speaker = Speaker.PEER if sender.partition == self.partition else Speaker.OTHER_PARTITION
            self.counters.messages_from_replicas += len(valid)
        # Kept above 0 until every forward is made, so that none of them can finish the group early.
        group.waiting = 1
        if own:
            self._forward(event.peer, own, speaker, group, out)
            applied = self._apply(own, now, out)
            self._persist(applied, out)
            if sender is None and len(applied.changes) < len(own):
                self._tell_stale(own, applied, group, out)
        if len(own) < len(valid) and sender is None:  # once: otherwise a child would return its parent's messages for ever
            served = set(own)
            self._pass_on(event.peer, [m for m in valid if m not in served], view, group, now, out)
        group.waiting -= 1
        if not group.waiting:
            self._confirm(ForwardOutcome([group]), out)

    def _refuse(self, gateway: EndpointID, messages: list[Update], out: list[Effect]) -> set[Update]:
        """Inform a gateway of its logins that exceed the capacity: if confirmed, they would never get a message."""
        refused = self.membership.without_space(messages)
        self.counters.logins_refused += len(refused)
        for start in range(0, len(refused), self.MAX_CONFIRMS):
            ids = [message.id for message in refused[start : start + self.MAX_CONFIRMS]]
            confirm = control_pb2.GatewayConfirm(refused=ids)
            out.append(SendControl(gateway, [control_pb2.Control(gateway_confirm=confirm).SerializeToString()]))
        return set(refused)

    def _tell_stale(self, messages: list[Update], applied: Applied, group: Group, out: list[Effect]) -> list[int]:
        """Report to a gateway, instead of confirming, messages that cannot take effect because something newer was reported in its
        name: it knows if that was its own report. Repeated messages are confirmed. Returns the GatewayMsgIDs."""
        assert group.gateway is not None
        done = {change.id for change in applied.changes}
        stale = [m.id for m in messages if m.id not in done and self.membership.hides(m)]
        self.counters.stale_told += len(stale)
        told = set(stale)
        group.ids = [number for number in group.ids if number not in told]
        for start in range(0, len(stale), self.MAX_CONFIRMS):
            confirm = control_pb2.GatewayConfirm(stale=stale[start : start + self.MAX_CONFIRMS])
            out.append(SendControl(group.gateway, [control_pb2.Control(gateway_confirm=confirm).SerializeToString()]))
        return stale

    def _apply(self, messages: list[Update], now: float, out: list[Effect]) -> Applied:
        """Apply gateways' reports; a role may have more to do for it."""
        return self.membership.apply(messages, now)

    def _forward(self, origin: EndpointID, messages: list[Update], speaker: Speaker, group: Group, out: list[Effect]) -> None:
        """Forward to the peers (unless a peer sent the messages: it did that itself), then to brokers and other subscribers."""
        everything = encode_messages(messages)
        peers = [] if speaker is Speaker.PEER else [peer for peer in self._peers if peer != origin]
        for peer in peers:
            out.append(SendControl(peer, everything, self.forwards.send(peer, everything, group)))
        brokers = self._view.brokers.endpoints if self._view is not None else frozenset[EndpointID]()
        introductions: bytes | None = None
        encoded: dict[tuple[int, int], list[bytes]] = {}
        for taker, rule in self._takers(origin, messages, speaker).items():
            parts = encoded.get(rule)
            if parts is None:
                partition, partitions = rule
                wanted = [m for m in messages if m.group % partitions == partition]
                parts = encoded[rule] = everything if len(wanted) == len(messages) else encode_messages(wanted)
            if parts:
                if taker in brokers:
                    if introductions is None:
                        introductions = self._introductions(messages)
                    parts = [part + introductions for part in parts]
                out.append(SendControl(taker, parts, self.forwards.send(taker, parts, group)))

    def _takers(self, origin: EndpointID, messages: list[Update], speaker: Speaker) -> dict[EndpointID, tuple[int, int]]:
        """Destinations other than the peers, each with its (partition, partitions).

        A gateway's message is confirmed to it, and a client then relies on it: brokers that subscribed to a peer are therefore
        informed, and waited for, here as well. Source: docs/memberships.md, "Joins and leaves".
        """
        found = {s.endpoint: (s.partition % s.partitions, s.partitions) for s in self.subscribers.all()}
        if speaker is Speaker.PEER:
            found = {taker: rule for taker, rule in found.items() if not self._is_peer(taker)}
        if speaker is Speaker.GATEWAY and self._view is not None:
            brokers = self._view.brokers
            for partition in {m.group % brokers.partitions for m in messages}:
                for broker in brokers.by_partition.get(partition, ()):
                    if broker not in self._dead:
                        found.setdefault(broker, (partition, brokers.partitions))
        for endpoint in (*self._peers, origin):
            found.pop(endpoint, None)
        return found

    def _introductions(self, messages: list[Update]) -> bytes:
        """Addresses of the messages' gateways: a broker may not know them from the registry yet."""
        assert self._view is not None
        instances = {gateway_instance(message.id) for message in messages}
        if len(instances) > MAX_INTRODUCED:
            return b""
        return b"".join(self._view.introductions.get(instance, b"") for instance in sorted(instances))

    def _is_peer(self, endpoint: EndpointID) -> bool:
        replica = self._view.replicas.get(endpoint) if self._view is not None else None
        return replica is not None and replica.partition == self.partition

    def _pass_on(
        self, sender: EndpointID, messages: list[Update], view: ClusterView, group: Group, now: float, out: list[Effect]
    ) -> None:
        """Pass on the messages of a sender with an old layout, and notify it. Source: docs/routing.md."""
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
            out.append(SendControl(target, parts, self.forwards.send(target, parts, group, required=True)))
        self._notice(sender, now, out)

    # --- anti-entropy

    def _on_anti_entropy(self, event: ev.AntiEntropyReceived, now: float, out: list[Effect]) -> None:
        if self.state is State.RUNNING and self._view is not None:
            run = self._view.runs.get(event.peer)
            if run is not None and not speaks_for(run, event.control):
                self._refuse_others(event.peer, 1, out)
                return
            control = event.control if run is None else self._proven_page(event.peer, run, event.control, out)
            self._repair(event.peer, self.anti_entropy.take(event.peer, control, self._view, now), out)

    def _learned(self, source: EndpointID, applied: Applied, out: list[Effect]) -> None:
        self._persist(applied, out)
        if applied.changes and self.state is State.RUNNING:
            # Subscribers of this replica have missed whatever it had missed; peers compare for themselves.
            self._forward(source, applied.changes, Speaker.PEER, Group(None, []), out)

    def _on_absence(self, event: ev.AbsenceReceived, now: float, out: list[Effect]) -> None:
        """Handle negative feedback: drop entries that are not newer, here, at the peers, and at the brokers of each."""
        if self.state is not State.RUNNING or self._view is None or not self.anti_entropy.valid_absence(event):
            return
        from_peer = event.peer in self._view.replicas
        run = self._view.runs.get(event.peer)
        if not from_peer and run != gateway_run(event.as_of):
            if run is not None:
                self._refuse_others(event.peer, 1, out)
            return
        self._persist(self.membership.absent(event.as_of, event.rooms, now), out)
        targets = dict.fromkeys(() if from_peer else self._peers)
        for subscriber in self.subscribers.all():
            if subscriber.endpoint not in self._peers and any(subscriber.wants(room) for room in event.rooms):
                targets[subscriber.endpoint] = None
        message = encode_absence(event.as_of, event.rooms)
        out.extend(SendControl(target, [message]) for target in targets if target != event.peer)

    def _check_isolation(self, now: float, out: list[Effect]) -> None:
        """Start again as Init if out of contact for so long that tombstones may have expired. Source: docs/memberships.md."""
        if self._view is None:
            return
        running = [r.endpoint for r in self._view.replicas.values() if r.running and r.partition == self.partition]
        too_long = self._isolation.regained_late([e for e in running if e not in self._dead], running, now)
        # Of several replicas that were alone the lowest continues to serve, so that the others have a source.
        if too_long and self.state is State.RUNNING and self.endpoint > min(running):
            self.state = State.SYNCING
            self._start_again(out)

    def _on_settled(self, event: Settled, now: float, out: list[Effect]) -> None:
        outcome = ForwardOutcome()
        for token, handled in event.parcels:
            self.forwards.settled(token, handled, now, outcome)
        for endpoint in outcome.missed:
            if self.subscribers.end(endpoint):
                self.counters.subscriptions_ended += 1
        self._confirm(outcome, out)

    def _confirm(self, outcome: ForwardOutcome, out: list[Effect]) -> None:
        by_gateway: dict[EndpointID, list[int]] = {}
        for group in outcome.confirmed:
            if group.gateway is not None and group.ids:
                by_gateway.setdefault(group.gateway, []).extend(group.ids)
        for gateway, ids in by_gateway.items():
            self.counters.confirmed += len(ids)
            parts = [ids[start : start + self.MAX_CONFIRMS] for start in range(0, len(ids), self.MAX_CONFIRMS)]
            out.append(SendControl(gateway, [self._confirmation(part) for part in parts]))

    def _confirmation(self, ids: list[int]) -> bytes:
        return control_pb2.Control(gateway_confirm=control_pb2.GatewayConfirm(ids=ids)).SerializeToString()

    # --- the database

    def _persist(self, applied: Applied, out: list[Effect]) -> None:
        if not applied.changes:
            return
        if self.store_error is not None or self._store_stale:
            self.counters.store_skipped += len(applied.changes)
            return
        out.append(ev.Persist(puts=applied.changes))

    def _purged(self, purged: Purged, out: list[Effect]) -> None:
        self._expired(purged.keys, out)

    def _expired(self, keys: list[Key], out: list[Effect]) -> None:
        if keys and self._store_open and self.store_error is None and not self._store_stale:
            out.append(ev.Persist(deletes=keys))

    def _on_store_failed(self, event: ev.StoreFailed, now: float, out: list[Effect]) -> None:
        """Continue to serve from memory; write everything anew later, because the database is incomplete now."""
        self.counters.store_failures += 1
        self.store_error = event.text
        self._store_retry_at = now + STORE_RETRY_S

    # --- time

    def _on_tick(self, event: Tick, now: float, out: list[Effect]) -> None:
        for token, forward in self.forwards.due(now):
            out.append(SendControl(forward.peer, forward.messages, token))
        if self._store_retry_at <= now:
            self._store_retry_at = NEVER
            if self.state is State.RUNNING:
                self.store_error = None
                out.append(ev.RewriteStore(self.membership.snapshot()))
            else:
                self._store_retry_at = now + STORE_RETRY_S
        super()._on_tick(event, now, out)

    def _housekeep(self, now: float, out: list[Effect]) -> None:
        self.counters.subscriptions_ended += len(self.subscribers.expire(now))
        super()._housekeep(now, out)
        self._check_isolation(now, out)
