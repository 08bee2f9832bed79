"""The broker's core: knows which gateways have members of its partition's rooms, and sends them the rooms' records.

    proxy ──▶ broker ──▶ every gateway with members, one copy each
                ▲
    router ─────┘ a snapshot, then live logins and logouts, for each router partition that shares rooms

Source: PiXiu §2.3 and §5.3; docs/architecture.md, docs/memberships.md, docs/routing.md, "Partitions".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Final

from broker.fanout import Fanout, Routed
from broker.feeds import Feed, FeedState
from broker.groups import MEMBERS_ACKNOWLEDGE, Group, Route
from broker.multicast import AddressedFanout, Relays, Way
from cluster.core.contract import MALFORMED, NEVER, NOT_TAKEN, RecordsReceived, Settled
from cluster.core.parcels import Target
from cluster.membership import events as ev
from cluster.membership.events import Effect
from cluster.membership.map.anti_entropy import PullOutcome
from cluster.membership.map.lww_map import Applied, Key, LwwMap, Purged
from cluster.membership.map.updates import ENTRY, Update
from cluster.membership.member.core import MemberCore
from cluster.membership.member.state import ClusterView, MemberCounters
from pixiu.ids import ALL_TOPICS, KEPT_INSTANCE, MAX_ID, EndpointID, gateway_instance
from pixiu.placement.partition import rendezvous_order, share_rooms
from pixiu.placement.topic_rooms import all_topics
from pixiu.wire.trace import UNTRACED, Tracer

WAITING_LOG_S: Final = 10.0
"""Interval between two logs of a broker that waits for routers, seconds."""


class State(Enum):
    """State of a broker replica. Draining is the shell's matter: the core keeps working."""

    INIT = "Init"
    """The first snapshots are not all merged yet."""
    RUNNING = "Running"


@dataclass(slots=True)
class Counters(MemberCounters):
    """Counts since the start of the broker; records are counted by `broker.fanout`."""

    messages_in: int = 0
    messages_foreign: int = 0
    """Messages for rooms of another partition."""
    subscriptions_lost: int = 0
    """Subscriptions whose router died, vanished, or replied that it does not know us."""
    gateways_unknown: int = 0
    """Look-ups of a gateway whose instance is not in the registry; it gets nothing."""


class Core(MemberCore):
    """Decides; see the module. `step` never raises on what comes from the network.

    Args:
        endpoint, partition, heartbeat_s, poll_interval_s, gone_gateway_s: see `MemberCore`.
        membership: the map, empty.
        through_relays: send records through relays with the lists of their users, and not to gateways.
        tracer: stamps traced records.
    """

    ROLE: ClassVar[str] = "broker"

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
        super().__init__(
            endpoint=endpoint,
            partition=partition,
            heartbeat_s=heartbeat_s,
            poll_interval_s=poll_interval_s,
            gone_gateway_s=gone_gateway_s,
            membership=membership if membership is not None else LwwMap(),
        )
        self.state = State.INIT
        self._counters = Counters()
        self.relays = Relays() if through_relays else None
        self.fanout: Fanout | AddressedFanout = Fanout(
            self._gateway_targets, self._serves, self._elsewhere, tracer, self._route_of, self._any_kept
        )
        if through_relays:
            self.fanout = AddressedFanout(self._ways, self._serves, self._elsewhere, tracer)
            self.on(Settled, self._on_settled)
        self.feeds: dict[int, Feed] = {}
        self._retry_at = NEVER
        """Time at which a feed may look for a router again."""
        self._waiting_since: float | None = None
        self._said_waiting_at = 0.0
        self.on(RecordsReceived, self._on_records)
        self.on(ev.SharedOutcome, self._on_shared_outcome)

    @property
    def counters(self) -> Counters:
        """Counts since the start."""
        return self._counters

    def next_deadline(self) -> float:
        """Time at which `Tick` is due, monotonic seconds."""
        return min(super().next_deadline(), self._retry_at)

    # --- records

    def _on_records(self, event: RecordsReceived, now: float, out: list[Effect]) -> None:
        self._batch_at = now
        routed = self.fanout.route(event.data, event.start, event.end, event.count, out)
        if routed is Routed.TAKEN:
            return
        if routed is Routed.MALFORMED:
            out.append(MALFORMED)
            return
        if routed is not Routed.NOT_KEPT:
            self._notice(event.peer, now, out)
        if routed is not Routed.PASSED_ON:
            out.append(NOT_TAKEN)

    def _on_settled(self, event: Settled, now: float, out: list[Effect]) -> None:
        assert isinstance(self.fanout, AddressedFanout), "nothing else sends with tokens"
        self.fanout.settled(event.parcels, out)

    def _gateway_targets(self, room: int) -> tuple[Target, ...]:
        instances: tuple[int, ...] = self.membership.gateways(room)
        everything = all_topics(room, self.partition)
        if everything is not None and (others := self.membership.gateways(everything)):
            instances = tuple(sorted({*instances, *others}))
        return self._targets_of(instances)

    def _targets_of(self, instances: Iterable[int]) -> tuple[Target, ...]:
        found: list[Target] = []
        for instance in instances:
            gateway = self._gateways.get(instance)
            # A generation below the registry's was purged by its floor; one above is a gateway that the view does not show yet.
            # Records for the generation before it do no harm: it is gone.
            if gateway is not None:
                found.append(gateway)
            elif instance != KEPT_INSTANCE:
                self.counters.gateways_unknown += 1
        return tuple(found)

    def _any_kept(self) -> bool:
        return self.membership.has_instance(KEPT_INSTANCE)

    def _route_of(self, room: int) -> Route | None:
        """The route of a room with groups of shared subscriptions, or with kept filters; None: it has neither."""
        if self.membership.plain:
            return None
        everything = all_topics(room, self.partition)
        rooms = (room,) if everything is None else (room, everything)
        kept = any(self.membership.gateways(each)[-1:] == (KEPT_INSTANCE,) for each in rooms)
        found = self._groups_of(rooms) if self.membership.valued else None
        if found is not None:
            return found._replace(kept=kept)
        return Route(self._gateway_targets(room), (), kept) if kept else None

    def _groups_of(self, rooms: tuple[int, ...]) -> Route | None:
        """The route of a room, with the room that carries all topics, if they have groups."""
        groups: dict[int, tuple[bool, set[int]]] = {}
        for each in rooms:
            for key, value in self.membership.values_of(each):
                acknowledges, instances = groups.get(key.member, (False, set()))
                groups[key.member] = acknowledges or value == MEMBERS_ACKNOWLEDGE, instances | {key.instance}
        found: list[Group] = []
        for number, (acknowledges, instances) in sorted(groups.items()):
            live = {each.endpoint: each for each in self._targets_of(sorted(instances)) if each.endpoint not in self._dead}
            if live:
                found.append(Group(number, acknowledges, live))
        if not found:
            return None
        members = {key.instance for each in rooms for key in self.membership.live_keys(each) if key.member not in groups}
        return Route(self._targets_of(sorted(members)), tuple(found))

    def _ways(self, room: int) -> tuple[Way, ...]:
        assert self.relays is not None
        keys = self.membership.live_keys(room)
        everything = all_topics(room, self.partition)
        if everything is not None:
            keys = keys + self.membership.live_keys(everything)
        return self.relays.ways(room, (key.member for key in keys if key.instance != KEPT_INSTANCE))

    def _on_shared_outcome(self, event: ev.SharedOutcome, now: float, out: list[Effect]) -> None:
        if isinstance(self.fanout, Fanout):
            self.fanout.groups.outcome(event.peer, event.taken, event.returned, out)

    def _on_dead(self, event: ev.PeerDead, now: float, out: list[Effect]) -> None:
        super()._on_dead(event, now, out)
        if isinstance(self.fanout, Fanout) and self.membership.valued:
            self.fanout.forget_all()
            self.fanout.groups.gone([event.peer], out)

    def _on_alive(self, event: ev.PeerAlive, now: float, out: list[Effect]) -> None:
        super()._on_alive(event, now, out)
        if self.membership.valued:
            self.fanout.forget_all()

    # --- the cluster

    def _cluster_changed(self, old: ClusterView, now: float, out: list[Effect]) -> None:
        self.fanout.forget_all()
        self._reach_changed(now, out)
        if isinstance(self.fanout, Fanout) and len(self.fanout.groups) and self._view is not None:
            gone = self.fanout.groups.gateways() - {gateway.endpoint for gateway in self._view.gateways}
            self.fanout.groups.gone(gone, out)

    def _reach_changed(self, now: float, out: list[Effect]) -> None:
        if self.relays is not None and self._view is not None:
            relays = self._view.relays
            live = [(relay.endpoint, relay.partition) for relay in relays.replicas if relay.endpoint not in self._dead]
            self.relays.change(relays.partitions, live)
            self.fanout.forget_all()
        self._go_on(now, out)

    # --- feeds

    def _go_on(self, now: float, out: list[Effect]) -> None:
        """Keep a feed from every router partition that shares rooms; leave routers that are gone; look for others.

        The new partitions of a doubling feed the broker as soon as they run, so that nothing is missed when the number changes;
        only the present ones are needed to become Running.
        """
        view = self._view
        if view is None:
            return
        by_partition: dict[int, list[EndpointID]] = {}
        for router in view.routers.replicas:
            if router.endpoint not in self._dead:
                by_partition.setdefault(router.partition, []).append(router.endpoint)
        coming = range(view.routers.partitions, view.routers.next_partitions)
        wanted = self._needed(view) + [p for p in coming if p in by_partition and self._shares(p, view)]
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
                    self._take(feed, EndpointID(order[feed.attempts % len(order)]), now, out)
        self._attach({feed.source: self._rule() for feed in self.feeds.values() if feed.source is not None}, out)
        retries = [feed.retry_at for feed in self.feeds.values() if feed.state is FeedState.SEEKING and feed.retry_at]
        self._retry_at = min(retries, default=NEVER)
        self._maybe_run(now, out)

    def _shares(self, router_partition: int, view: ClusterView) -> bool:
        return share_rooms(self.partition, view.partitions, router_partition, view.routers.partitions)

    def _needed(self, view: ClusterView) -> list[int]:
        return [p for p in range(view.routers.partitions) if self._shares(p, view)]

    def _take(self, feed: Feed, source: EndpointID, now: float, out: list[Effect]) -> None:
        feed.begin(source, now)
        if feed.seen is not None and self.state is State.RUNNING and self._can_pause():
            self.state = State.INIT
            feed.complete = False
            self._start_again(out)
        self._ask_for_snapshot(source, out)

    def _can_pause(self) -> bool:
        """True unless this is its partition's lowest replica, which keeps serving because all may have lost contact together."""
        view = self._view
        others = [] if view is None else [b.endpoint for b in view.replicas.values() if b.partition == self.partition]
        return bool(others) and self.endpoint > min(others)

    def _of_source(self, source: EndpointID) -> Feed | None:
        return next((feed for feed in self.feeds.values() if feed.source == source), None)

    def _is_taking(self, source: EndpointID) -> bool:
        feed = self._of_source(source)
        return feed is not None and feed.state is FeedState.SNAPSHOT

    def _on_subscription_reply(self, event: ev.SubscriptionReply, now: float, out: list[Effect]) -> None:
        feed = self._of_source(event.peer)
        if feed is None or feed.state is not FeedState.LIVE:
            return
        if event.subscribed:
            if event.digest is not None and not event.digest.as_of:
                self._repair(event.peer, PullOutcome(self.puller.on_digest(event.peer, event.digest, now)), out)
            return
        # A reply that was in flight while the snapshot was taken is no news.
        if now - feed.finished_at > 2 * self._heartbeat_s:
            self.counters.subscriptions_lost += 1
            feed.lose(now)
            self._take(feed, event.peer, now, out)

    def _merged(self, event: ev.SnapshotChunk, applied: Applied, out: list[Effect]) -> None:
        feed = self._of_source(event.source)
        if feed is not None and feed.seen is not None:
            feed.seen.update(_keys_of(event.chunk.entries))
        self._changed(applied)

    def _on_snapshot_finished(self, event: ev.SnapshotFinished, now: float, out: list[Effect]) -> None:
        feed = self._of_source(event.source)
        if feed is None or feed.state is not FeedState.SNAPSHOT:
            return
        self._apply(feed.replay(), now)
        if event.error is None:
            self.counters.snapshots_taken += 1
            if feed.seen is not None and self._view is not None:
                swept = self.membership.sweep(feed.partition, self._view.routers.partitions, feed.seen)
                self._changed(swept)
            feed.succeed(now)
        else:
            self.counters.snapshots_failed += 1
            feed.fail(self.endpoint, now)
        self._go_on(now, out)

    def _maybe_run(self, now: float, out: list[Effect]) -> None:
        """Run when every needed feed was merged once. Source: PiXiu §5.3 step 9."""
        if self.state is State.RUNNING or self._view is None:
            return
        missing = [p for p in self._needed(self._view) if not self.feeds[p].complete]
        if not missing:
            self.state = State.RUNNING
            out.append(ev.BecomeRunning())
            return
        if self._waiting_since is None:
            self._waiting_since = self._said_waiting_at = now
        if now - self._said_waiting_at >= WAITING_LOG_S:
            self._said_waiting_at = now
            out.append(ev.WaitingForRouters(tuple(missing), now - self._waiting_since))

    # --- what messages lost

    def _on_anti_entropy(self, event: ev.AntiEntropyReceived, now: float, out: list[Effect]) -> None:
        if self._of_source(event.peer) is not None:
            self._repair(event.peer, self.puller.take(event.peer, event.control, now), out)

    def _learned(self, source: EndpointID, applied: Applied, out: list[Effect]) -> None:
        self._note_seen(applied.changes)
        self._changed(applied)

    def _purged(self, purged: Purged, out: list[Effect]) -> None:
        self._changed(purged)

    def _expired(self, keys: list[Key], out: list[Effect]) -> None:
        """Do nothing: nothing depends on tombstones."""

    def _on_absence(self, event: ev.AbsenceReceived, now: float, out: list[Effect]) -> None:
        """Drop entries that are not newer than a report of absence (negative feedback)."""
        if 0 < event.as_of <= MAX_ID:
            self._changed(self.membership.absent(event.as_of, event.rooms, now))

    # --- logins and logouts

    def _on_messages(self, event: ev.MessagesReceived, now: float, out: list[Effect]) -> None:
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
        # Including known ones: another router may have reported them before this one's snapshot was requested.
        self._note_seen(own)
        self._changed(applied)

    def _changed(self, outcome: Applied | Purged) -> None:
        """Drop the cached targets of rooms: with gateways as targets if those changed, with relays or groups if any member did; of
        all rooms if a gateway gets all free topics now, or no longer."""
        groups: Iterable[int] = outcome.groups
        if self.relays is not None or self.membership.valued:
            groups = {c.group for c in (outcome.changes if isinstance(outcome, Applied) else outcome.keys)}
        if ALL_TOPICS + self.partition in groups:
            self.fanout.forget_all()
        else:
            self.fanout.forget(groups)

    def _note_seen(self, changes: list[Update]) -> None:
        for feed in self.feeds.values():
            if feed.seen is not None:
                feed.seen.update(Key(c.group, c.member, gateway_instance(c.id)) for c in changes if c.login)


def _keys_of(entries: bytes) -> list[Key]:
    return [Key(room, uin, gateway_instance(id_)) for room, uin, id_ in ENTRY.iter_unpack(entries)]
