"""A gateway's reports to one role: to routers who is in which room, to relays which devices are here. Pure.

Every change of a pair (room and user, or user and device) has a GatewayMsgID and goes to one replica of each partition that serves
its room or user, until that confirms it. The same message is sent again if its datagram is lost, its replica dies, or no
confirmation comes; a newer change of the pair replaces it. For a room with few local members it is always sent twice, the second
time a little later: one lost datagram matters most there, and so nobody waits until the loss is noticed.

Each partition has a window, which bounds the messages in flight to it; the rest waits. Lost or unconfirmed messages are repeated at
growing intervals, until the partition confirms anything; while it has no replica nothing is tried. A login for which a replica has
no capacity is refused to the clients that wait for it.

`own` is the map of what is on this gateway as of its last GatewayMsgID. Replicas compare theirs with it by their heartbeats, and
ask for what they lack. A record for somebody who is not in it is answered with an absence. Where the replicas are relays, read
users for rooms, and devices for users.

Source: PiXiu §5.1 step 6, §5.1.1 and §5.3; docs/memberships.md, "Joins and leaves", and docs/memberships.md.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from cluster.core.contract import NEVER, SendControl
from cluster.membership.map.anti_entropy import Source, rule_of
from cluster.membership.map.lww_map import LwwMap
from cluster.membership.map.updates import MESSAGES_A_CONTROL, Update
from cluster.wire.v1 import control_pb2
from gateway import events as ev
from gateway.membership.feedback import Feedback, absences
from pixiu.ids import EndpointID
from pixiu.placement.partition import rendezvous, serves

CONFIRM_TIMEOUT_S = 1.0
"""A message that no replica confirmed within this time, seconds, is sent again; after twice, four times, … this time, while its
partition confirms nothing."""
LOSS_PAUSE_S = 0.1
"""Pause of a partition after a lost datagram, seconds; it doubles likewise."""
MAX_PAUSE_S = 16.0
"""Upper bound of both, seconds, before jitter of up to a half."""
WINDOW = 2_048
"""Unconfirmed messages in flight to one partition. Policy: further ones wait."""
MAX_A_TURN = 256
"""Messages to one partition in one turn of the event loop, about 6 µs each; the rest follows in later turns."""
REFUSED_PAUSE_S = 10.0
"""Seconds after which a refused login is tried again, if a client was already informed that it is in."""
ANSWER_TIMEOUT_S = 10.0
"""Seconds after which a client's request is answered even if no replica confirmed it; the message is still repeated."""
FEW_MEMBERS = 3
"""A change of a room with fewer local members is sent twice; changes of devices are not."""
REPEAT_S = 0.01
"""Delay of the second copy, seconds."""
CROWD_PAUSE_S = 0.01
"""Interval between reports to a partition in a crowd of joins, seconds: a datagram costs as much with one change as with dozens."""
MAX_REPEATS = 50_000
"""Changes that wait for their second copy. Policy: further ones are sent once, and again if they are lost."""
MAX_PRESENCES = 1 << 40
"""Entries in the map of what is here, which the limits of connections and subscriptions bound already."""


class Answered(NamedTuple):
    """Outcome of a client's request: known everywhere, late (`known` is False), or partly refused for lack of capacity."""

    connection: int
    request: int
    known: bool
    refused: frozenset[int] = frozenset()
    """Rooms, or users, whose login was refused."""


@dataclass(slots=True)
class _Change:
    """The newest change of a (room, user) pair, while some partition has not confirmed it."""

    message: Update
    waiting: set[int] = field(default_factory=set)
    """Partitions that have not confirmed it."""
    requests: dict[tuple[int, int], None] = field(default_factory=dict)
    """(connection, request) of the clients that wait for it."""
    twice: set[int] = field(default_factory=set)
    """Partitions that must get it twice and have not got it yet."""


@dataclass(slots=True)
class _Window:
    """Reports to one partition, by GatewayMsgID, each in one of the maps."""

    new: dict[int, None] = field(default_factory=dict)
    again: dict[int, None] = field(default_factory=dict)
    """Messages to repeat, before new ones."""
    under_way: dict[int, float] = field(default_factory=dict)
    """GatewayMsgID → time of sending, oldest first."""
    refused: deque[tuple[float, int]] = field(default_factory=deque)
    """(time to send it again, GatewayMsgID), in order."""
    failures: int = 0
    """Losses and time-outs in a row."""
    not_before: float = 0.0
    told_at: float = -math.inf
    """Time of the last report to it."""

    def forget(self, number: int) -> None:
        """Drop a message that need not be sent any more."""
        self.new.pop(number, None)
        self.again.pop(number, None)
        self.under_way.pop(number, None)

    def start_again(self) -> None:
        """Repeat everything in flight, at once, because another replica must be informed."""
        self.again.update(dict.fromkeys(self.under_way))
        self.under_way.clear()
        self.failures, self.not_before, self.told_at = 0, 0.0, -math.inf

    def timeout_s(self) -> float:
        """Time limit of a confirmation, seconds, before jitter."""
        return float(min(CONFIRM_TIMEOUT_S * 2 ** min(self.failures, 10), MAX_PAUSE_S))

    def pause_s(self) -> float:
        """Pause after a loss, seconds, before jitter."""
        return float(min(LOSS_PAUSE_S * 2 ** min(self.failures, 10), MAX_PAUSE_S))


class MembershipReporter:
    """Reports joins and leaves to routers, or devices to relays, until they are confirmed.

    Args:
        instance: this gateway's leased number.
        as_of: gives the last GatewayMsgID that the gateway made: `own` is complete up to it.
        next_token: gives a token for a parcel.
        few_members: a change of a key with fewer local entries is sent twice.
        parcel: most messages in a parcel, so that it fits a datagram.
        jitter: gives a number from 0 to 1, so that gateways that lost the same replica do not retry together.
        is_crowd: True while many clients connect at once.
        ticket_of: user → the login ticket that goes with reports of the user's devices; None: there are none.
    """

    def __init__(
        self,
        instance: int,
        as_of: Callable[[], int],
        next_token: Callable[[], int],
        *,
        few_members: int = FEW_MEMBERS,
        parcel: int = MESSAGES_A_CONTROL,
        jitter: Callable[[], float] = lambda: 0.0,
        is_crowd: Callable[[], bool] = lambda: False,
        ticket_of: Callable[[int], bytes] | None = None,
    ) -> None:
        self._as_of = as_of
        self._next_token = next_token
        self._few_members = few_members
        self._parcel = parcel
        self._jitter = jitter
        self._is_crowd = is_crowd
        self._has_replicas = False
        """True if the cluster has this role."""
        self._partitions = 1
        self._partition_of: dict[EndpointID, int] = {}
        self._replicas: dict[int, list[ev.Replica]] = {}
        self._changes: dict[tuple[int, int], _Change] = {}
        self._by_id: dict[int, _Change] = {}
        self._sent: dict[int, tuple[int, list[int]]] = {}
        self._requests: dict[int, dict[int, set[tuple[int, int]]]] = {}
        self._refusals: dict[tuple[int, int], set[int]] = {}
        """(connection, request) → its rooms or users that were refused."""
        self._windows: dict[int, _Window] = {}
        self._answer_timers: list[tuple[float, int, int]] = []
        self._repeats: deque[tuple[float, int, Update]] = deque()
        """(time, partition, message), in order."""
        self.own = LwwMap(max_entries=MAX_PRESENCES, tombstone_s=0.0)
        self.feedback = Feedback()
        self.source = Source(self.own, lambda asked, _: as_of() if asked == instance else 0, ticket_of)
        self.waits = False
        """True if `flush` or `next_deadline` may have something to do."""
        self.resent = 0
        self.refusals = 0
        """Logins for which a replica had no capacity."""
        self.sent_twice = 0

    @property
    def unconfirmed(self) -> int:
        """Number of changes that some partition has not confirmed."""
        return len(self._changes)

    @property
    def stranded(self) -> list[int]:
        """Partitions with waiting changes but no known replica."""
        return [
            partition for partition, window in self._windows.items()
            if not self._replicas.get(partition) and (window.new or window.again or window.under_way)
        ]  # fmt: skip

    def set_replicas(self, partitions: int, replicas: tuple[ev.Replica, ...], now: float) -> None:
        """Report to these replicas. What was in flight to one that is gone is sent to another at once.

        partitions: 0 if the cluster has none; changes are noted, and reported when replicas come.
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
        for partition, window in self._windows.items():
            if partition not in old or partition in lost:
                window.start_again()

    def message(self, number: int) -> Update | None:
        """Message of a GatewayMsgID, while it is not confirmed."""
        change = self._by_id.get(number)
        return change.message if change is not None else None

    def announce(self, messages: Iterable[Update], now: float) -> None:
        """Report changes, each replacing the previous report of its pair. Their IDs are new, and ascend."""
        self.waits = True
        for message in messages:
            room, uin = message.group, message.member
            self.own.apply([message], now)
            if not self._has_replicas:
                # Replicas that come later find by their first heartbeats what they lack.
                continue
            old = self._changes.get((room, uin))
            if old is not None:
                self._drop(old)
            serving = self._serving(room)
            change = _Change(message, set(serving), old.requests if old is not None else {})
            self._changes[room, uin] = change
            self._by_id[message.id] = change
            if self.own.members(room) < self._few_members:
                change.twice.update(serving)
            for partition in serving:
                self._windows.setdefault(partition, _Window()).new[message.id] = None
        self.own.expire(now)  # its own map need not remember who left

    def reports_to(self, peer: EndpointID) -> bool:
        """True if a process is one of the replicas."""
        return peer in self._partition_of

    def digest(self, partition: int, partitions: int, key: int = 0) -> control_pb2.Digest | None:
        """Digest for the answer to a replica's heartbeat; None if its rule makes no sense, and for a key without sums.

        The sums of a new key are computed in slices, one at each heartbeat."""
        if self.own.digest.building:
            self.own.build_digest()
        rule = rule_of(partition, partitions)
        return self.source.digest(rule, self._as_of(), key) if rule is not None else None

    def answer(self, peer: EndpointID, control: control_pb2.Control) -> list[SendControl]:
        """Answer a replica that asks for the state of this gateway."""
        messages = self.source.answer(control)
        return [SendControl(peer, messages)] if messages else []

    def missing(self, key: int) -> None:
        """Note a record for a room or user that has nobody here. If `own` has no entry, the sender will be notified."""
        if not self.own.gateways(key):
            self.feedback.note(key)
            self.waits = True

    def request(self, connection: int, number: int, wanted: Iterable[tuple[int, int]], now: float) -> list[Answered]:
        """Answer a client once the changes of these pairs are known; at once if they are."""
        pairs = {pair for pair in wanted if pair in self._changes}
        if not pairs:
            return [Answered(connection, number, True)]
        self._requests.setdefault(connection, {})[number] = pairs
        self.waits = True
        heapq.heappush(self._answer_timers, (now + ANSWER_TIMEOUT_S, connection, number))
        for pair in pairs:
            self._changes[pair].requests[connection, number] = None
        return []

    def forget(self, connection: int) -> None:
        """Drop the requests of a client that is gone."""
        for number in list(self._requests.get(connection, ())):
            self._answer(connection, number, False)

    def flush(self, now: float) -> list[ev.Effect]:
        """Build everything that is due."""
        effects: list[ev.Effect] = []
        if self._changes or self._repeats or any(window.refused for window in self._windows.values()):
            effects += self._changes_due(now)
        if self.feedback:
            effects += self._absences_due(now)
        self.waits = bool(
            self._changes
            or self._repeats
            or self.feedback
            or self._answer_timers
            or any(window.refused for window in self._windows.values())
        )
        return effects

    def _changes_due(self, now: float) -> list[ev.SendMembership]:
        """Build parcels for each replica, as far as the windows of their partitions allow."""
        parcels: dict[EndpointID, list[tuple[int, _Change]]] = {}
        for partition, window in self._windows.items():
            if self._replicas.get(partition):
                self._expire_window(partition, window, now)
                if now >= self._told_next(window):
                    self._fill(partition, window, now, parcels)
        effects = self._second_times(now)
        for peer, found in parcels.items():
            for start in range(0, len(found), self._parcel):
                part = found[start : start + self._parcel]
                token = self._next_token()
                self._sent[token] = (part[0][0], [change.message.id for _, change in part])
                effects.append(ev.SendMembership(peer, self._proven([change.message for _, change in part]), token))
        return effects

    def _told_next(self, window: _Window) -> float:
        """Time of the next report to a partition. If a whole turn's worth waits, it is not delayed to collect more."""
        if len(window.new) < MAX_A_TURN and self._is_crowd():
            return max(window.not_before, window.told_at + CROWD_PAUSE_S)
        return window.not_before

    def _expire_window(self, partition: int, window: _Window, now: float) -> None:
        """Queue again what was not confirmed in time, and what was refused a while ago."""
        oldest = now - window.timeout_s()
        late: list[int] = []
        for number, sent_at in window.under_way.items():
            if sent_at > oldest:
                break
            late.append(number)
        if late:
            for number in late:
                del window.under_way[number]
                window.again[number] = None
            window.failures += 1
            window.not_before = now + window.timeout_s() * self._jitter() / 4
            self.resent += len(late)
        while window.refused and window.refused[0][0] <= now:
            _, number = window.refused.popleft()
            change = self._by_id.get(number)
            if change is not None and partition in change.waiting:
                window.again[number] = None

    def _fill(self, partition: int, window: _Window, now: float, parcels: dict[EndpointID, list[tuple[int, _Change]]]) -> None:
        # All at once: finding the first key of a dict takes as many steps as keys were deleted before it.
        room = max(0, min(MAX_A_TURN, WINDOW - len(window.under_way)))
        again = list(islice(window.again, room))
        new = list(islice(window.new, room - len(again)))
        if again or new:
            window.told_at = now
        for number in again:
            del window.again[number]
        for number in new:
            del window.new[number]
        for number in (*again, *new):
            change = self._by_id[number]
            window.under_way[number] = now
            replica = self._replica(partition, change.message.group)
            assert replica is not None, "the caller has seen that the partition has one"
            parcels.setdefault(replica, []).append((partition, change))
            if partition in change.twice:
                change.twice.discard(partition)
                if len(self._repeats) < MAX_REPEATS:
                    self._repeats.append((now + REPEAT_S, partition, change.message))

    def _proven(self, messages: list[Update]) -> list[Update]:
        """Messages with the present tickets of the users whose devices are here."""
        ticket_of = self.source.ticket_of
        if ticket_of is None:
            return messages
        return [m._replace(ticket=ticket_of(m.group)) if m.login else m for m in messages]

    def settled(self, token: int, handled: bool, now: float) -> bool:
        """Note the outcome of a parcel. Returns True if it was one of these."""
        found = self._sent.pop(token, None)
        if found is None:
            return False
        partition, ids = found
        window = self._windows.get(partition)
        if not handled and window is not None:
            lost = [number for number in ids if number in window.under_way]
            for number in lost:
                del window.under_way[number]
                window.again[number] = None
            self.resent += len(lost)
            if lost and now >= window.not_before:
                window.not_before = now + window.pause_s() * (1 + self._jitter() / 2)
                window.failures += 1
        return True

    def confirmed(self, peer: EndpointID, ids: list[int]) -> list[Answered]:
        """Note a replica's confirmations. Returns the answers that this allows."""
        partition = self._partition_of.get(peer)
        if partition is None:
            return []
        effects: list[Answered] = []
        window = self._windows.get(partition)
        for number in ids:
            change = self._by_id.get(number)
            if change is None:
                continue
            if window is not None:
                window.forget(number)
                window.failures = 0
            change.waiting.discard(partition)
            if change.waiting:
                continue
            self._drop(change)
            effects += self._decided(change, refused=False)
        return effects

    def refused(self, peer: EndpointID, ids: list[int], now: float) -> list[Answered]:
        """Note that a replica has no capacity for logins. Returns the answers that this allows.

        Waiting clients are refused, and must leave; a login already reported to a client is tried again after a while.
        """
        partition = self._partition_of.get(peer)
        effects: list[Answered] = []
        for number in ids:
            change = self._by_id.get(number)
            if change is None or partition is None:
                continue
            self.refusals += 1
            window = self._windows[partition]
            window.forget(number)
            window.failures = 0
            window.refused.append((now + REFUSED_PAUSE_S * (1 + self._jitter() / 2), number))
            effects += self._decided(change, refused=True)
        return effects

    def _decided(self, change: _Change, *, refused: bool) -> list[Answered]:
        """Decide a change: it is known everywhere, or refused. Returns the answers for which nothing else is missing."""
        answers: list[Answered] = []
        room = change.message.group
        requests, change.requests = change.requests, {}
        for connection, request in requests:
            pairs = self._requests.get(connection, {}).get(request)
            if pairs is None:
                continue
            pairs.discard((room, change.message.member))
            if refused:
                self._refusals.setdefault((connection, request), set()).add(room)
            if not pairs:
                answers.append(self._answer(connection, request, True))
        return answers

    def expire(self, now: float) -> list[Answered]:
        """Answer the requests that waited too long."""
        effects: list[Answered] = []
        while self._answer_timers and self._answer_timers[0][0] <= now:
            _, connection, request = heapq.heappop(self._answer_timers)
            if request in self._requests.get(connection, {}):
                effects.append(self._answer(connection, request, False))
        return effects

    def next_deadline(self) -> float:
        """Time at which something is due again, monotonic seconds; `NEVER` when nothing waits."""
        due = [timers[0][0] for timers in (self._answer_timers, self._repeats) if timers]
        for partition, window in self._windows.items():
            if self._replicas.get(partition):
                if (window.again or window.new) and len(window.under_way) < WINDOW:
                    due.append(self._told_next(window))
                if window.under_way:
                    due.append(next(iter(window.under_way.values())) + window.timeout_s())
                if window.refused:
                    due.append(window.refused[0][0])
        return min(due, default=NEVER)

    def samples(self, prefix: str) -> dict[str, object]:
        """Samples for metrics, each name with `prefix` before it."""
        return {
            f"{prefix}gateway_messages_resent_total": self.resent,
            f"{prefix}gateway_messages_sent_twice_total": self.sent_twice,
            f"{prefix}joins_refused_total": self.refusals,
            f"{prefix}listing_pages_sent_total": self.source.pages_sent,
            f"{prefix}feedback_said_total": self.feedback.said,
            f"{prefix}feedback_left_out_total": self.feedback.left_out,
        }

    def _absences_due(self, now: float) -> list[SendControl]:
        by_replica: dict[EndpointID, list[int]] = {}
        for key in self.feedback.due(now):
            # Anybody who came after the record has a higher GatewayMsgID than the absence that would be reported.
            if self.own.gateways(key):
                continue
            for partition in self._serving(key):
                replica = self._replica(partition, key)
                if replica is not None:
                    by_replica.setdefault(replica, []).append(key)
        return [SendControl(replica, messages) for replica, messages in absences(by_replica, self._as_of())]

    def _second_times(self, now: float) -> list[ev.SendMembership]:
        """Build the second copies that are due, without tokens, because nobody waits for their arrival."""
        parcels: dict[EndpointID, list[Update]] = {}
        while self._repeats and self._repeats[0][0] <= now:
            _, partition, message = self._repeats.popleft()
            replica = self._replica(partition, message.group)
            if replica is not None:
                parcels.setdefault(replica, []).append(message)
                self.sent_twice += 1
        return [
            ev.SendMembership(peer, self._proven(messages[start : start + self._parcel]), 0)
            for peer, messages in parcels.items()
            for start in range(0, len(messages), self._parcel)
        ]

    def _drop(self, change: _Change) -> None:
        """Remove a change that is confirmed everywhere, or replaced by another one."""
        del self._by_id[change.message.id]
        del self._changes[change.message.group, change.message.member]
        for partition in change.waiting:
            self._windows[partition].forget(change.message.id)

    def _answer(self, connection: int, request: int, known: bool) -> Answered:
        requests = self._requests[connection]
        for pair in requests.pop(request):
            self._changes[pair].requests.pop((connection, request), None)
        if not requests:
            del self._requests[connection]
            if not self._requests:
                self._answer_timers.clear()
        return Answered(connection, request, known, frozenset(self._refusals.pop((connection, request), ())))

    def _serving(self, room: int) -> list[int]:
        """Partitions that serve a room; two during a doubling."""
        known = [p for p in self._replicas if serves(p, room, self._partitions)]
        return known or [room % self._partitions]

    def _replica(self, partition: int, room: int) -> EndpointID | None:
        replicas = self._replicas.get(partition, [])
        usable = [replica.endpoint for replica in replicas if replica.usable] or [replica.endpoint for replica in replicas]
        return EndpointID(rendezvous(room, usable)) if usable else None


def _still_usable(replica: ev.Replica, replicas: tuple[ev.Replica, ...]) -> bool:
    """True unless the replica was usable and is not any more."""
    return not replica.usable or any(other.endpoint == replica.endpoint and other.usable for other in replicas)
