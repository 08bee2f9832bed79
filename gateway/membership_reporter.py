"""What a gateway reports to one role: to routers who is in which room, to relays which devices are here. Pure.

Every change of a pair (room and user, or user and device) has a GatewayMsgID and goes to one replica of each partition
that serves its room or user, until that confirms it. The same message is sent again when its datagram is lost, its replica
dies, or no confirmation comes; a newer change of the pair replaces it. For a room with few local members it goes twice in any
case, a little later: where one lost datagram would matter most, nobody waits for the loss to be noticed.

`own` is the map of what is on this gateway as of its last GatewayMsgID. Replicas compare theirs with it by their heartbeats, and
ask for what they lack; what is sent here for somebody who is not in it is answered with an absence. What is said here of rooms
holds for users, and of users for devices, where the replicas are relays.

Source: PiXiu §5.1 step 6, §5.1.1 and §5.3; docs/memberships.md, "Joins and leaves", and docs/memberships.md.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from cluster.membership.anti_entropy import Source, rule_of
from cluster.membership.lww_map import MESSAGES_A_CONTROL, LwwMap, Update
from cluster.runtime.contract import NEVER, SendControl
from gateway import events as ev
from gateway.feedback import Feedback, absences
from pixiu.ids import EndpointID
from pixiu.placement.partition import rendezvous, serves
from pixiu.wire.v1 import control_pb2

CONFIRM_TIMEOUT_S = 1.0
"""A message that no replica confirmed for so long is sent again."""
RETRY_TIMEOUT_S = 0.1
"""A message whose datagram was lost, or for which there was no replica, is sent again after so long."""
ANSWER_TIMEOUT_S = 10.0
"""A client's request is answered after so long even when no replica confirmed it; the message is still repeated."""
FEW_MEMBERS = 3
"""A change of a room with fewer local members is sent twice; of devices none is."""
REPEAT_S = 0.01
"""How long after the first time."""
MAX_REPEATS = 50_000
"""Changes that wait to be sent a second time. Policy: further ones are sent once, and again when they are lost."""
MAX_PRESENCES = 1 << 40
"""Of the map of what is here, which connections and their subscriptions bound already."""


@dataclass(slots=True)
class _Change:
    """The newest change of a (room, user) pair that is not confirmed by every partition."""

    message: Update
    waiting: dict[int, float]
    """Partition → when to send to it (again)."""
    requests: list[tuple[int, int]] = field(default_factory=list)
    twice: set[int] = field(default_factory=set)
    """Partitions that get it twice and have not got it yet."""


class MembershipReporter:
    """See the module.

    Args:
        instance: this gateway's leased number.
        as_of: gives the last GatewayMsgID that the gateway made: `own` is complete up to it.
        next_token: gives a token for a parcel.
        few_members: a change of a key with fewer local entries is sent twice.
        parcel: most messages in one, so that it fits a datagram.
    """

    def __init__(
        self,
        instance: int,
        as_of: Callable[[], int],
        next_token: Callable[[], int],
        *,
        few_members: int = FEW_MEMBERS,
        parcel: int = MESSAGES_A_CONTROL,
    ) -> None:
        self._as_of = as_of
        self._next_token = next_token
        self._few_members = few_members
        self._parcel = parcel
        self._has_replicas = False
        """The cluster has this role."""
        self._partitions = 1
        self._partition_of: dict[EndpointID, int] = {}
        self._replicas: dict[int, list[ev.Replica]] = {}
        self._changes: dict[tuple[int, int], _Change] = {}
        self._by_id: dict[int, _Change] = {}
        self._sent: dict[int, tuple[int, list[int]]] = {}
        self._requests: dict[int, dict[int, set[tuple[int, int]]]] = {}
        self._timers: list[tuple[float, int, int]] = []
        """A heap of (when, GatewayMsgID, partition); an entry whose time is not the change's own is stale."""
        self._answer_timers: list[tuple[float, int, int]] = []
        self._repeats: deque[tuple[float, int, Update]] = deque()
        """(when, partition, message), in order."""
        self.own = LwwMap(max_entries=MAX_PRESENCES, tombstone_s=0.0)
        self.feedback = Feedback()
        self.source = Source(self.own, lambda asked, _: as_of() if asked == instance else 0)
        self.resent = 0
        self.sent_twice = 0

    @property
    def unconfirmed(self) -> int:
        """Changes that some partition has not confirmed."""
        return len(self._changes)

    def set_replicas(self, partitions: int, replicas: tuple[ev.Replica, ...], now: float) -> None:
        """Report to these replicas. What waits for one that is gone is sent to another at once.

        partitions: 0 where the cluster has none; what is here is noted, and reported when they come.
        """
        known = self._partition_of = {replica.endpoint: replica.partition for replica in replicas}
        self._has_replicas = partitions > 0
        if not partitions:
            return
        self._partitions = partitions
        old = self._replicas
        self._replicas = {}
        for replica in replicas:
            self._replicas.setdefault(replica.partition, []).append(replica)
        lost = {p for p, group in old.items() if any(r.endpoint not in known or not _still_usable(r, replicas) for r in group)}
        for change in self._changes.values():
            for partition in change.waiting:
                if partition not in old or partition in lost:
                    self._schedule(change, partition, now)

    def message(self, number: int) -> Update | None:
        """The message of a GatewayMsgID, while it is not confirmed."""
        change = self._by_id.get(number)
        return change.message if change is not None else None

    def announce(self, messages: Iterable[Update], now: float) -> None:
        """Report these, each in place of what was reported of its pair before. Their IDs are new, and rise."""
        for message in messages:
            room, uin = message.group, message.member
            # Its own map needs no memory of who left.
            self.own.apply([message], now)
            self.own.expire(now)
            if not self._has_replicas:
                # Replicas that come find by their first heartbeats what they lack.
                continue
            old = self._changes.pop((room, uin), None)
            requests: list[tuple[int, int]] = []
            if old is not None:
                del self._by_id[old.message.id]
                requests = old.requests
            change = _Change(message, {}, requests)
            self._changes[room, uin] = change
            self._by_id[message.id] = change
            serving = self._serving(room)
            if self.own.members(room) < self._few_members:
                change.twice.update(serving)
            for partition in serving:
                self._schedule(change, partition, now)

    def reports_to(self, peer: EndpointID) -> bool:
        """Whether a process is one of the replicas."""
        return peer in self._partition_of

    def digest(self, partition: int, partitions: int) -> control_pb2.Digest | None:
        """For the answer to a heartbeat: what is here of what the replica keeps; None when its rule makes no sense."""
        rule = rule_of(partition, partitions)
        return self.source.digest(rule, self._as_of()) if rule is not None else None

    def answer(self, peer: EndpointID, control: control_pb2.Control) -> list[SendControl]:
        """A replica asks what is here."""
        messages = self.source.answer(control)
        return [SendControl(peer, messages)] if messages else []

    def missing(self, key: int) -> None:
        """A record came for a room or user that nobody here is in, or is. Without an entry its sender is told."""
        if not self.own.gateways(key):
            self.feedback.note(key)

    def request(self, connection: int, number: int, wanted: Iterable[tuple[int, int]], now: float) -> list[ev.Answer]:
        """A client asks to be answered when what was said of these pairs is known. Answers at once if it is."""
        pairs = {pair for pair in wanted if pair in self._changes}
        if not pairs:
            return [ev.Answer(connection, number, True)]
        self._requests.setdefault(connection, {})[number] = pairs
        heapq.heappush(self._answer_timers, (now + ANSWER_TIMEOUT_S, connection, number))
        for pair in pairs:
            self._changes[pair].requests.append((connection, number))
        return []

    def forget(self, connection: int) -> None:
        """A client is gone; nobody waits for its answers."""
        self._requests.pop(connection, None)

    def flush(self, now: float) -> list[ev.Effect]:
        """Send what is due."""
        effects: list[ev.Effect] = []
        if self._timers or self._repeats:
            effects += self._changes_due(now)
        if self.feedback:
            effects += self._absences_due(now)
        return effects

    def _changes_due(self, now: float) -> list[ev.SendMembership]:
        """A parcel for each replica."""
        parcels: dict[EndpointID, list[tuple[int, _Change]]] = {}
        while self._timers and self._timers[0][0] <= now:
            due, number, partition = heapq.heappop(self._timers)
            change = self._by_id.get(number)
            if change is None or change.waiting.get(partition) != due:
                continue
            replica = self._replica(partition, change.message.group)
            self._schedule(change, partition, now + (RETRY_TIMEOUT_S if replica is None else CONFIRM_TIMEOUT_S))
            if replica is not None:
                parcels.setdefault(replica, []).append((partition, change))
                if partition in change.twice:
                    change.twice.discard(partition)
                    if len(self._repeats) < MAX_REPEATS:
                        self._repeats.append((now + REPEAT_S, partition, change.message))
        effects = self._second_times(now)
        for peer, found in parcels.items():
            for start in range(0, len(found), self._parcel):
                part = found[start : start + self._parcel]
                token = self._next_token()
                self._sent[token] = (part[0][0], [change.message.id for _, change in part])
                effects.append(ev.SendMembership(peer, [change.message for _, change in part], token))
        return effects

    def settled(self, token: int, handled: bool, now: float) -> bool:
        """What became of a parcel. Returns whether it was one of these."""
        found = self._sent.pop(token, None)
        if found is None:
            return False
        partition, ids = found
        if not handled:
            for number in ids:
                change = self._by_id.get(number)
                if change is not None and partition in change.waiting:
                    self._schedule(change, partition, now + RETRY_TIMEOUT_S)
                    self.resent += 1
        return True

    def confirmed(self, peer: EndpointID, ids: list[int]) -> list[ev.Answer]:
        """A replica confirmed messages. Returns the answers that this allows."""
        partition = self._partition_of.get(peer)
        if partition is None:
            return []
        effects: list[ev.Answer] = []
        for number in ids:
            change = self._by_id.get(number)
            if change is None:
                continue
            change.waiting.pop(partition, None)
            if change.waiting:
                continue
            pair = (change.message.group, change.message.member)
            del self._by_id[number]
            del self._changes[pair]
            for connection, request in change.requests:
                pairs = self._requests.get(connection, {}).get(request)
                if pairs is not None:
                    pairs.discard(pair)
                    if not pairs:
                        effects.append(self._answer(connection, request, True))
        return effects

    def expire(self, now: float) -> list[ev.Answer]:
        """Answer the requests that waited too long."""
        effects: list[ev.Answer] = []
        while self._answer_timers and self._answer_timers[0][0] <= now:
            _, connection, request = heapq.heappop(self._answer_timers)
            if request in self._requests.get(connection, {}):
                effects.append(self._answer(connection, request, False))
        return effects

    def next_deadline(self) -> float:
        """When something is due again, monotonic seconds; `NEVER` when nothing waits."""
        due = [timers[0][0] for timers in (self._timers, self._answer_timers, self._repeats) if timers]
        return min(due, default=NEVER)

    def samples(self, prefix: str) -> dict[str, object]:
        """For metrics, each name behind `prefix`."""
        return {
            f"{prefix}gateway_messages_resent_total": self.resent,
            f"{prefix}gateway_messages_sent_twice_total": self.sent_twice,
            f"{prefix}listing_pages_sent_total": self.source.pages_sent,
            f"{prefix}feedback_said_total": self.feedback.said,
            f"{prefix}feedback_left_out_total": self.feedback.left_out,
        }

    def _absences_due(self, now: float) -> list[SendControl]:
        by_replica: dict[EndpointID, list[int]] = {}
        for key in self.feedback.due(now):
            # Who came since the record did has a GatewayMsgID that is higher than what would be said to be absent.
            if self.own.gateways(key):
                continue
            for partition in self._serving(key):
                replica = self._replica(partition, key)
                if replica is not None:
                    by_replica.setdefault(replica, []).append(key)
        return [SendControl(replica, messages) for replica, messages in absences(by_replica, self._as_of())]

    def _second_times(self, now: float) -> list[ev.SendMembership]:
        """Without a token: whether these arrive is not waited for."""
        parcels: dict[EndpointID, list[Update]] = {}
        while self._repeats and self._repeats[0][0] <= now:
            _, partition, message = self._repeats.popleft()
            replica = self._replica(partition, message.group)
            if replica is not None:
                parcels.setdefault(replica, []).append(message)
                self.sent_twice += 1
        return [
            ev.SendMembership(peer, messages[start : start + self._parcel], 0)
            for peer, messages in parcels.items()
            for start in range(0, len(messages), self._parcel)
        ]

    def _schedule(self, change: _Change, partition: int, when: float) -> None:
        change.waiting[partition] = when
        heapq.heappush(self._timers, (when, change.message.id, partition))

    def _answer(self, connection: int, request: int, known: bool) -> ev.Answer:
        requests = self._requests[connection]
        del requests[request]
        if not requests:
            del self._requests[connection]
        return ev.Answer(connection, request, known)

    def _serving(self, room: int) -> list[int]:
        """The partitions that serve a room; two while they double."""
        known = [p for p in self._replicas if serves(p, room, self._partitions)]
        return known or [room % self._partitions]

    def _replica(self, partition: int, room: int) -> EndpointID | None:
        replicas = self._replicas.get(partition, [])
        usable = [replica.endpoint for replica in replicas if replica.usable] or [replica.endpoint for replica in replicas]
        return EndpointID(rendezvous(room, usable)) if usable else None


def _still_usable(replica: ev.Replica, replicas: tuple[ev.Replica, ...]) -> bool:
    """Whether a replica that was usable still is."""
    return not replica.usable or any(other.endpoint == replica.endpoint and other.usable for other in replicas)
