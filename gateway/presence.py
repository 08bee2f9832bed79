"""Telling the routers who is in which room, until they confirm it. Pure.

Every change of a (room, user) pair gets a GatewayMsgID and goes to one replica of each router partition that serves
the room. It is sent again, the same message, when its datagram is lost, its router dies, or no confirmation comes;
a newer change of the pair replaces it. For a room with few local members it goes twice in any case, a little later:
where one lost datagram would matter most, nobody waits for the loss to be noticed.

`own` is the map of what is on this gateway as of its last GatewayMsgID; routers compare theirs with it.

Source: seed 004 §5.1 step 6, §5.1.1 and §5.3; DESIGN section 9, "Join and leave", and section 10.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.events import Answer, Effect, MembershipMessage, Replica, SendMembership
from pixiu.ids import EndpointID
from pixiu.partition import rendezvous, serves
from pixiu.softstore import Change, Membership

CONFIRM_TIMEOUT_S = 1.0
"""A message that no router confirmed for so long is sent again."""
RETRY_TIMEOUT_S = 0.1
"""A message whose datagram was lost, or for which there was no router, is sent again after so long."""
ANSWER_TIMEOUT_S = 10.0
"""A client's request is answered after so long even when no router confirmed it; the message is still repeated."""
FEW_MEMBERS = 3
"""A change of a room with fewer local members is sent twice."""
REPEAT_S = 0.01
"""How long after the first time."""
MAX_REPEATS = 50_000
"""Changes that wait to be sent a second time. Policy: further ones are sent once, and again when they are lost."""
MAX_PRESENCES = 1 << 40
"""Of the map of what is here, which connections and their subscriptions bound already."""
MESSAGES_A_PARCEL = 32
"""Gateway messages in one control message: 33 bytes each, so that they fit one datagram."""


@dataclass(slots=True)
class _Change:
    """The newest change of a (room, user) pair that is not confirmed by every partition."""

    message: MembershipMessage
    waiting: dict[int, float]
    """Router partition → when to send to it (again)."""
    requests: list[tuple[int, int]] = field(default_factory=list)
    twice: set[int] = field(default_factory=set)
    """Router partitions that get it twice and have not got it yet."""


class Presence:
    """See the module.

    Args:
        next_id: gives the next GatewayMsgID; strictly increasing.
        next_token: gives a token for a parcel.
    """

    def __init__(self, next_id: Callable[[], int], next_token: Callable[[], int]) -> None:
        self._next_id = next_id
        self._next_token = next_token
        self._partitions = 1
        self._replicas: dict[int, list[Replica]] = {}
        self._changes: dict[tuple[int, int], _Change] = {}
        self._by_id: dict[int, _Change] = {}
        self._sent: dict[int, tuple[int, list[int]]] = {}
        self._requests: dict[int, dict[int, set[tuple[int, int]]]] = {}
        self._timers: list[tuple[float, int, int]] = []
        """A heap of (when, GatewayMsgID, router partition); an entry whose time is not the change's own is stale."""
        self._answer_timers: list[tuple[float, int, int]] = []
        self._repeats: deque[tuple[float, int, MembershipMessage]] = deque()
        """(when, router partition, message), in order."""
        self.own = Membership(max_entries=MAX_PRESENCES, tombstone_s=0.0)
        self.resent = 0
        self.sent_twice = 0

    @property
    def unconfirmed(self) -> int:
        """Changes that some router has not confirmed."""
        return len(self._changes)

    def set_routers(self, partitions: int, replicas: tuple[Replica, ...], now: float) -> None:
        """Use these routers. What waits for a router that is gone is sent to another at once."""
        known = {replica.endpoint for replica in replicas}
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

    def change(self, rooms: list[int], uin: int, login: bool, reason: int, now: float) -> None:
        """A user came to these rooms, or left them."""
        for room in rooms:
            message = MembershipMessage(self._next_id(), room, uin, login, reason)
            self.own.apply([Change(message.id, room, uin, login)], now)
            # Its own map needs no memory of who left.
            self.own.expire(now)
            old = self._changes.pop((room, uin), None)
            requests: list[tuple[int, int]] = []
            if old is not None:
                del self._by_id[old.message.id]
                requests = old.requests
            change = _Change(message, {}, requests)
            self._changes[room, uin] = change
            self._by_id[message.id] = change
            serving = self._serving(room)
            if self.own.members(room) < FEW_MEMBERS:
                change.twice.update(serving)
            for partition in serving:
                self._schedule(change, partition, now)

    def routers(self, room: int) -> list[EndpointID]:
        """The router that is told about a room, in each partition that serves it and has one."""
        found = [self._replica(partition, room) for partition in self._serving(room)]
        return [router for router in found if router is not None]

    def request(self, connection: int, number: int, rooms: set[int], uin: int, now: float) -> list[Effect]:
        """A client asks to be answered when its user's presence in these rooms is known. Answers at once if it is."""
        pairs = {(room, uin) for room in rooms if (room, uin) in self._changes}
        if not pairs:
            return [Answer(connection, number, True)]
        self._requests.setdefault(connection, {})[number] = pairs
        heapq.heappush(self._answer_timers, (now + ANSWER_TIMEOUT_S, connection, number))
        for pair in pairs:
            self._changes[pair].requests.append((connection, number))
        return []

    def forget(self, connection: int) -> None:
        """A client is gone; nobody waits for its answers."""
        self._requests.pop(connection, None)

    def flush(self, now: float) -> list[Effect]:
        """Send what is due, a parcel for each router."""
        parcels: dict[EndpointID, list[tuple[int, _Change]]] = {}
        while self._timers and self._timers[0][0] <= now:
            due, number, partition = heapq.heappop(self._timers)
            change = self._by_id.get(number)
            if change is None or change.waiting.get(partition) != due:
                continue
            replica = self._replica(partition, change.message.room)
            self._schedule(change, partition, now + (RETRY_TIMEOUT_S if replica is None else CONFIRM_TIMEOUT_S))
            if replica is not None:
                parcels.setdefault(replica, []).append((partition, change))
                if partition in change.twice:
                    change.twice.discard(partition)
                    if len(self._repeats) < MAX_REPEATS:
                        self._repeats.append((now + REPEAT_S, partition, change.message))
        effects = self._second_times(now)
        for peer, found in parcels.items():
            for start in range(0, len(found), MESSAGES_A_PARCEL):
                part = found[start : start + MESSAGES_A_PARCEL]
                token = self._next_token()
                self._sent[token] = (part[0][0], [change.message.id for _, change in part])
                effects.append(SendMembership(peer, [change.message for _, change in part], token))
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

    def confirmed(self, partition: int, ids: list[int]) -> list[Effect]:
        """A router of a partition confirmed messages. Returns the answers that this allows."""
        effects: list[Effect] = []
        for number in ids:
            change = self._by_id.get(number)
            if change is None:
                continue
            change.waiting.pop(partition, None)
            if change.waiting:
                continue
            pair = (change.message.room, change.message.uin)
            del self._by_id[number]
            del self._changes[pair]
            for connection, request in change.requests:
                pairs = self._requests.get(connection, {}).get(request)
                if pairs is not None:
                    pairs.discard(pair)
                    if not pairs:
                        effects.append(self._answer(connection, request, True))
        return effects

    def expire(self, now: float) -> list[Effect]:
        """Answer the requests that waited too long."""
        effects: list[Effect] = []
        while self._answer_timers and self._answer_timers[0][0] <= now:
            _, connection, request = heapq.heappop(self._answer_timers)
            if request in self._requests.get(connection, {}):
                effects.append(self._answer(connection, request, False))
        return effects

    def next_deadline(self) -> float | None:
        """When something is due again, monotonic seconds."""
        due = [timers[0][0] for timers in (self._timers, self._answer_timers, self._repeats) if timers]
        return min(due, default=None)

    def _second_times(self, now: float) -> list[Effect]:
        """Without a token: whether these arrive is not waited for."""
        parcels: dict[EndpointID, list[MembershipMessage]] = {}
        while self._repeats and self._repeats[0][0] <= now:
            _, partition, message = self._repeats.popleft()
            replica = self._replica(partition, message.room)
            if replica is not None:
                parcels.setdefault(replica, []).append(message)
                self.sent_twice += 1
        return [
            SendMembership(peer, messages[start : start + MESSAGES_A_PARCEL], 0)
            for peer, messages in parcels.items()
            for start in range(0, len(messages), MESSAGES_A_PARCEL)
        ]

    def _schedule(self, change: _Change, partition: int, when: float) -> None:
        change.waiting[partition] = when
        heapq.heappush(self._timers, (when, change.message.id, partition))

    def _answer(self, connection: int, request: int, known: bool) -> Answer:
        requests = self._requests[connection]
        del requests[request]
        if not requests:
            del self._requests[connection]
        return Answer(connection, request, known)

    def _serving(self, room: int) -> list[int]:
        """The router partitions that serve a room; two while the routers double."""
        known = [p for p in self._replicas if serves(p, room, self._partitions)]
        return known or [room % self._partitions]

    def _replica(self, partition: int, room: int) -> EndpointID | None:
        replicas = self._replicas.get(partition, [])
        usable = [replica.endpoint for replica in replicas if replica.usable] or [replica.endpoint for replica in replicas]
        return EndpointID(rendezvous(room, usable)) if usable else None


def _still_usable(replica: Replica, replicas: tuple[Replica, ...]) -> bool:
    """Whether a replica that was usable still is."""
    return not replica.usable or any(other.endpoint == replica.endpoint and other.usable for other in replicas)
