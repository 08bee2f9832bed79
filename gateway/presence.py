"""Telling routers who is in which room, and relays which devices are here, until they confirm it. Pure.

Every change of a pair (room and user, or user and device) has a GatewayMsgID and goes to one replica of each partition
that serves its room or user. It is sent again, the same message, when its datagram is lost, its replica dies, or no
confirmation comes; a newer change of the pair replaces it.

Source: seed 004 §5.1 step 6 and §5.1.1; DESIGN section 9, "Join and leave".
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from gateway.events import Answer, Effect, Replica
from pixiu.ids import EndpointID
from pixiu.partition import rendezvous, serves

CONFIRM_TIMEOUT_S = 1.0
"""A message that no replica confirmed for so long is sent again."""
RETRY_TIMEOUT_S = 0.1
"""A message whose datagram was lost, or for which there was no replica, is sent again after so long."""
ANSWER_TIMEOUT_S = 10.0
"""A client's request is answered after so long even when no replica confirmed it; the message is still repeated."""
MESSAGES_A_PARCEL = 32
"""Gateway messages in one control message: 33 bytes each, so that they fit one datagram."""


class Message(Protocol):
    """What a gateway says: `MembershipMessage`, `DeviceChange`."""

    @property
    def id(self) -> int:
        """GatewayMsgID."""

    @property
    def partition_key(self) -> int:
        """What chooses the partition."""

    @property
    def pair(self) -> tuple[int, int]:
        """What it speaks of."""


MessageT = TypeVar("MessageT", bound=Message)


@dataclass(slots=True)
class _Change(Generic[MessageT]):
    """The newest change of a pair that is not confirmed by every partition."""

    message: MessageT
    waiting: dict[int, float]
    """Partition → when to send to it (again)."""
    requests: list[tuple[int, int]] = field(default_factory=list)


class Presence(Generic[MessageT]):
    """See the module.

    Args:
        next_token: gives a token for a parcel.
        send: makes the effect that sends a parcel: replica, messages, token.
        parcel: most messages in one.
    """

    def __init__(
        self, next_token: Callable[[], int], send: Callable[[EndpointID, list[MessageT], int], Effect], parcel: int
    ) -> None:
        self._next_token = next_token
        self._send = send
        self._parcel = parcel
        self._partitions = 1
        self._replicas: dict[int, list[Replica]] = {}
        self._changes: dict[tuple[int, int], _Change[MessageT]] = {}
        self._by_id: dict[int, _Change[MessageT]] = {}
        self._sent: dict[int, tuple[int, list[int]]] = {}
        self._requests: dict[int, dict[int, set[tuple[int, int]]]] = {}
        self._timers: list[tuple[float, int, int]] = []
        """A heap of (when, GatewayMsgID, partition); an entry whose time is not the change's own is stale."""
        self._answer_timers: list[tuple[float, int, int]] = []
        self.resent = 0

    @property
    def unconfirmed(self) -> int:
        """Changes that some partition has not confirmed."""
        return len(self._changes)

    def set_replicas(self, partitions: int, replicas: tuple[Replica, ...], now: float) -> None:
        """Use these replicas. What waits for one that is gone is sent to another at once."""
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

    def message(self, number: int) -> MessageT | None:
        """The message of a GatewayMsgID, while it is not confirmed."""
        change = self._by_id.get(number)
        return change.message if change is not None else None

    def announce(self, messages: Iterable[MessageT], now: float) -> None:
        """Say these, each in place of what was said of its pair before."""
        for message in messages:
            pair = message.pair
            old = self._changes.pop(pair, None)
            requests: list[tuple[int, int]] = []
            if old is not None:
                del self._by_id[old.message.id]
                requests = old.requests
            change = _Change(message, {}, requests)
            self._changes[pair] = change
            self._by_id[message.id] = change
            for partition in self._serving(message.partition_key):
                self._schedule(change, partition, now)

    def request(self, connection: int, number: int, wanted: Iterable[tuple[int, int]], now: float) -> list[Effect]:
        """A client asks to be answered when what was said of these pairs is known. Answers at once if it is."""
        pairs = {pair for pair in wanted if pair in self._changes}
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
        """Send what is due, a parcel for each replica."""
        parcels: dict[EndpointID, list[tuple[int, _Change[MessageT]]]] = {}
        while self._timers and self._timers[0][0] <= now:
            due, number, partition = heapq.heappop(self._timers)
            change = self._by_id.get(number)
            if change is None or change.waiting.get(partition) != due:
                continue
            replica = self._replica(partition, change.message.partition_key)
            self._schedule(change, partition, now + (RETRY_TIMEOUT_S if replica is None else CONFIRM_TIMEOUT_S))
            if replica is not None:
                parcels.setdefault(replica, []).append((partition, change))
        effects: list[Effect] = []
        for peer, found in parcels.items():
            for start in range(0, len(found), self._parcel):
                part = found[start : start + self._parcel]
                token = self._next_token()
                self._sent[token] = (part[0][0], [change.message.id for _, change in part])
                effects.append(self._send(peer, [change.message for _, change in part], token))
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
        """A replica of a partition confirmed messages. Returns the answers that this allows."""
        effects: list[Effect] = []
        for number in ids:
            change = self._by_id.get(number)
            if change is None:
                continue
            change.waiting.pop(partition, None)
            if change.waiting:
                continue
            pair = change.message.pair
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
        due = [timers[0][0] for timers in (self._timers, self._answer_timers) if timers]
        return min(due, default=None)

    def _schedule(self, change: _Change[MessageT], partition: int, when: float) -> None:
        change.waiting[partition] = when
        heapq.heappush(self._timers, (when, change.message.id, partition))

    def _answer(self, connection: int, request: int, known: bool) -> Answer:
        requests = self._requests[connection]
        del requests[request]
        if not requests:
            del self._requests[connection]
        return Answer(connection, request, known)

    def _serving(self, key: int) -> list[int]:
        """The partitions that serve a key; two while they double."""
        known = [p for p in self._replicas if serves(p, key, self._partitions)]
        return known or [key % self._partitions]

    def _replica(self, partition: int, key: int) -> EndpointID | None:
        replicas = self._replicas.get(partition, [])
        usable = [replica.endpoint for replica in replicas if replica.usable] or [replica.endpoint for replica in replicas]
        return EndpointID(rendezvous(key, usable)) if usable else None


def _still_usable(replica: Replica, replicas: tuple[Replica, ...]) -> bool:
    """Whether a replica that was usable still is."""
    return not replica.usable or any(other.endpoint == replica.endpoint and other.usable for other in replicas)
