"""The core that all members of the shared map have in common: brokers, which read it, and `replica_core`, which replicates it.

    registry ─▶ ClusterChanged ┐                 ┌ who serves what, floors of gateways, groups that move at a doubling
    heartbeats ─▶ PeerDead, …  ├─ MemberCore ────┤ attachments: subscriptions of this process
    sources ─▶ SnapshotChunk … ┤   the map       ├ merging snapshots and results of anti-entropy
    timer ─▶ Tick              ┘                 └ tombstones, gateways that are gone

The subclasses define where snapshots come from, what follows a change (a broker forgets cached routes, a replica writes its
database and passes the change on), and how the process treats records. Pure.

Source: PiXiu §2.3, §2.4, §5; docs/routing.md, docs/memberships.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Final

from cluster.core.contract import NEVER, EventTable, SendControl, Tick
from cluster.core.layout_notices import LayoutNotices
from cluster.core.parcels import Target
from cluster.membership.events import (
    AbsenceReceived,
    AntiEntropyReceived,
    BecomeInit,
    ClusterChanged,
    DigestKeysChanged,
    Effect,
    MessagesReceived,
    PeerAlive,
    PeerDead,
    SetAttachment,
    SnapshotChunk,
    SnapshotFinished,
    SubscriptionReply,
    TakeSnapshot,
)
from cluster.membership.map.anti_entropy import Puller, PullOutcome
from cluster.membership.map.instance_purge import InstancePurge
from cluster.membership.map.lww_map import Applied, Key, LwwMap, Purged
from cluster.membership.member.state import ClusterView, MemberCounters
from cluster.wire.v1 import control_pb2
from pixiu.errors import MalformedData
from pixiu.ids import EndpointID
from pixiu.placement.partition import rendezvous, serves

HOUSEKEEPING_S: Final = 1.0
PURGE_PAUSE_S: Final = 0.001
"""Pause between two slices of a purge, for all other work, seconds."""


class MemberCore(EventTable[Effect], ABC):
    """The core of a member of the shared map. `step` never raises because of input from the network.

    Args:
        endpoint: this process.
        partition: the partition it serves.
        heartbeat_s: seconds between heartbeats.
        poll_interval_s: greatest age of a sender's view of the registry, seconds.
        gone_gateway_s: time after which the entries of a gateway that left the registry are dropped, seconds.
        membership: the map, empty.
    """

    ROLE: ClassVar[str] = ""

    def __init__(
        self,
        *,
        endpoint: EndpointID,
        partition: int,
        heartbeat_s: float,
        poll_interval_s: float,
        gone_gateway_s: float,
        membership: LwwMap,
    ) -> None:
        super().__init__()
        self.endpoint = endpoint
        self.partition = partition
        self.membership = membership
        self.puller = Puller(membership, heartbeat_s)
        self.instance_purge = InstancePurge(membership, gone_gateway_s)
        self._heartbeat_s = heartbeat_s
        self._grace_s = 2 * poll_interval_s
        self._view: ClusterView | None = None
        self._partitions = 1
        self._dead: set[EndpointID] = set()
        self._gateways: dict[int, Target] = {}
        """Instance → gateway."""
        self._others: dict[EndpointID, Target] = {}
        """Replicas of this process's role to which records were passed on."""
        self._attachments: dict[EndpointID, bytes] = {}
        self._purge_at = NEVER
        self._slice_at = 0.0
        """Time at which the current purge continues."""
        self._pass_on_until = self._batch_at = 0.0
        self._notices = LayoutNotices()
        self._housekeeping_at = 0.0
        on = self.on
        on(ClusterChanged, self._on_cluster)
        on(DigestKeysChanged, self._on_digest_keys)
        on(PeerDead, self._on_dead)
        on(PeerAlive, self._on_alive)
        on(MessagesReceived, self._on_messages)
        on(SubscriptionReply, self._on_subscription_reply)
        on(AntiEntropyReceived, self._on_anti_entropy)
        on(AbsenceReceived, self._on_absence)
        on(SnapshotChunk, self._on_snapshot_chunk)
        on(SnapshotFinished, self._on_snapshot_finished)
        on(Tick, self._on_tick)

    def next_deadline(self) -> float:
        """Time at which `Tick` is due, monotonic seconds."""
        return min(self._housekeeping_at, self._purge_at, self._next_slice())

    # --- decisions of a role

    @property
    @abstractmethod
    def counters(self) -> MemberCounters:
        """Counters since the start; a role has more of them."""

    @abstractmethod
    def _cluster_changed(self, old: ClusterView, now: float, out: list[Effect]) -> None:
        """Handle a changed view."""

    @abstractmethod
    def _reach_changed(self, now: float, out: list[Effect]) -> None:
        """Handle the death or the return of a peer."""

    @abstractmethod
    def _go_on(self, now: float, out: list[Effect]) -> None:
        """Continue start-up and snapshots if what they waited for is available."""

    @abstractmethod
    def _purged(self, purged: Purged, out: list[Effect]) -> None:
        """Handle dropped registers."""

    @abstractmethod
    def _expired(self, keys: list[Key], out: list[Effect]) -> None:
        """Handle expired tombstones."""

    @abstractmethod
    def _learned(self, source: EndpointID, applied: Applied, out: list[Effect]) -> None:
        """Handle changes that a snapshot or anti-entropy brought and messages had not."""

    @abstractmethod
    def _is_taking(self, source: EndpointID) -> bool:
        """True if a snapshot from this source is under way."""

    @abstractmethod
    def _on_messages(self, event: MessagesReceived, now: float, out: list[Effect]) -> None: ...

    @abstractmethod
    def _on_subscription_reply(self, event: SubscriptionReply, now: float, out: list[Effect]) -> None: ...

    @abstractmethod
    def _on_anti_entropy(self, event: AntiEntropyReceived, now: float, out: list[Effect]) -> None: ...

    @abstractmethod
    def _on_absence(self, event: AbsenceReceived, now: float, out: list[Effect]) -> None: ...

    @abstractmethod
    def _on_snapshot_finished(self, event: SnapshotFinished, now: float, out: list[Effect]) -> None: ...

    # --- the cluster

    def _on_cluster(self, event: ClusterChanged, now: float, out: list[Effect]) -> None:
        old, self._view = self._view, ClusterView.of(event, self.endpoint)
        if old is None or event.partitions != self._partitions:
            # Senders may use an older view for this time, also when this process is new.
            self._pass_on_until = now + self._grace_s
        if old is not None and event.partitions > self._partitions:
            self._purge_at = now + self._grace_s
        self._partitions = event.partitions
        self._dead &= self._view.endpoints()
        self._others = {endpoint: target for endpoint, target in self._others.items() if endpoint in self._view.replicas}
        known = {target.endpoint: target for target in self._gateways.values()}
        self._gateways = {
            gateway.instance: known.get(gateway.endpoint) or Target(gateway.endpoint)
            for gateway in sorted(event.gateways, key=lambda g: (g.generation, g.endpoint))
        }
        for gateway in event.gateways:
            self.membership.raise_floor(gateway.instance, gateway.generation)
        self._purge_some(now, out)
        self._cluster_changed(old or ClusterView(), now, out)

    def _on_digest_keys(self, event: DigestKeysChanged, now: float, out: list[Effect]) -> None:
        before = self.membership.digest.first.key
        self.membership.set_digest_keys(event.keys)
        if self.membership.digest.first.key != before:
            self._name_digest_key(out)

    def _name_digest_key(self, out: list[Effect]) -> None:
        """Ask sources to answer with digests by the key that is first now."""
        self._attach(dict.fromkeys(self._attachments, self._rule()), out)

    def _on_dead(self, event: PeerDead, now: float, out: list[Effect]) -> None:
        self._dead.add(event.peer)
        self._reach_changed(now, out)

    def _on_alive(self, event: PeerAlive, now: float, out: list[Effect]) -> None:
        self._dead.discard(event.peer)
        self._reach_changed(now, out)

    def _serves(self, group: int) -> bool:
        return serves(self.partition, group, self._partitions)

    def _elsewhere(self, group: int) -> Target | None:
        """The replica that serves a group which moved, for two poll intervals after the doubling. Source: docs/routing.md."""
        if self._view is None or self._batch_at >= self._pass_on_until:
            return None
        replicas = self._view.running(group % self._partitions, self._dead)
        if not replicas:
            return None
        endpoint = EndpointID(rendezvous(group, replicas))
        return self._others.setdefault(endpoint, Target(endpoint))

    def _notice(self, sender: EndpointID, now: float, out: list[Effect]) -> None:
        """Notify a sender that uses an old layout."""
        notice = self._notices.due(sender, self._view.version, now) if self._view is not None else None
        if notice is not None:
            self.counters.layout_notices += 1
            out.append(SendControl(sender, [notice]))

    # --- subscriptions and snapshots

    def _rule(self) -> bytes:
        """Attachment of heartbeats to a source: the groups that this process keeps, and the key for their digest."""
        key = self.membership.digest.first.key.number
        return control_pb2.BrokerSubscription(partition=self.partition, partitions=self._partitions, key=key).SerializeToString()

    def _attach(self, wanted: dict[EndpointID, bytes], out: list[Effect]) -> None:
        """Set the attachments of heartbeats to exactly these."""
        for endpoint in [e for e in self._attachments if e not in wanted]:
            del self._attachments[endpoint]
            out.append(SetAttachment(endpoint, b""))
        for endpoint, attachment in wanted.items():
            if self._attachments.get(endpoint) != attachment:
                self._attachments[endpoint] = attachment
                out.append(SetAttachment(endpoint, attachment))

    def _ask_for_snapshot(self, source: EndpointID, out: list[Effect]) -> None:
        out.append(TakeSnapshot(source, self.partition, self._partitions))

    def _start_again(self, out: list[Effect]) -> None:
        """Become Init until a snapshot is there: out of contact for so long that tombstones may have expired. Source:
        docs/memberships.md."""
        self.counters.started_again += 1
        out.append(BecomeInit())

    def _on_snapshot_chunk(self, event: SnapshotChunk, now: float, out: list[Effect]) -> None:
        if not self._is_taking(event.source):
            return
        try:
            applied = self.membership.merge(event.chunk, now)
        except MalformedData:
            self.counters.snapshots_malformed += 1
            self._on_snapshot_finished(SnapshotFinished(event.source, "a chunk is malformed"), now, out)
        else:
            self._merged(event, applied, out)

    def _merged(self, event: SnapshotChunk, applied: Applied, out: list[Effect]) -> None:
        self._learned(event.source, applied, out)

    def _repair(self, peer: EndpointID, outcome: PullOutcome, out: list[Effect]) -> None:
        """Perform a step of anti-entropy."""
        if outcome.messages:
            out.append(SendControl(peer, outcome.messages))
        self._purged(outcome.purged, out)
        self._learned(peer, outcome.applied, out)

    # --- time

    def _on_tick(self, event: Tick, now: float, out: list[Effect]) -> None:
        if self._purge_at <= now:
            self._purge_at = NEVER
            self.membership.purge_partition(self.partition, self._partitions)
        if self._housekeeping_at <= now:
            self._housekeeping_at = now + HOUSEKEEPING_S
            self._housekeep(now, out)
        if self._next_slice() <= now:
            self._purge_some(now, out)
        self._go_on(now, out)

    def _housekeep(self, now: float, out: list[Effect]) -> None:
        """Perform the tasks that are due once a second."""
        self._expired(self.membership.expire(now), out)
        if self._view is not None:
            self.instance_purge.purge(self._gateways, now)

    def _next_slice(self) -> float:
        return self._slice_at if self.membership.purging or self.membership.digest.building else NEVER

    def _purge_some(self, now: float, out: list[Effect]) -> None:
        """Perform a slice of the current purges, or of a digest, so that the event loop never stops for long. Source:
        docs/memberships.md."""
        if self.membership.purging:
            self._purged(self.membership.purge_some(), out)
            self._slice_at = now + PURGE_PAUSE_S
        elif self.membership.digest.building:
            if self.membership.build_digest():
                self._name_digest_key(out)
            self._slice_at = now + PURGE_PAUSE_S
