"""What a router or relay has passed on and what is not settled yet, so that it confirms only what everybody has. Pure.

One *group* is what came in one message from a gateway; it makes one *forward* for each destination. A forward that
was lost is sent again, at most `MAX_TRIES` times; a destination that dies ends its forwards. When the last forward
of a group has ended, the gateway is told; unless one that had to arrive did not: then the gateway sends it again.

Source: PiXiu §5 (peers first, then subscribers); docs/memberships.md, "Joins and leaves".
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Final

from cluster.runtime.contract import NEVER
from pixiu.ids import EndpointID

MAX_TRIES: Final = 8
"""Policy: then the destination is taken to have missed it, and must take a snapshot."""
FIRST_RETRY_S: Final = 0.05
LAST_RETRY_S: Final = 1.0
"""The pause before a forward is sent again doubles from the first to the last value."""
MAX_FORWARDS: Final = 200_000
"""Policy: beyond it messages are forwarded without being followed, and not confirmed: the gateway sends them again."""


@dataclass(slots=True, eq=False)
class Group:
    """Messages of one gateway that wait for their forwards."""

    gateway: EndpointID | None
    """Whom to tell; None when the messages came from another replica."""
    ids: list[int]
    waiting: int = 0


@dataclass(slots=True, eq=False)
class Forward:
    """A parcel for one destination."""

    peer: EndpointID
    messages: list[bytes]
    group: Group
    required: bool = False
    """Nobody else has it: the group is not confirmed without it."""
    tries: int = 1


@dataclass(slots=True)
class ForwardCounters:
    """Since the start."""

    sent: int = 0
    resent: int = 0
    given_up: int = 0
    unfollowed: int = 0


@dataclass(slots=True)
class Outcome:
    """What settling or a death brought."""

    confirmed: list[Group] = field(default_factory=list)
    """Groups whose every forward has ended."""
    missed: list[EndpointID] = field(default_factory=list)
    """Destinations that did not get something and live."""


class Forwards:
    """The forwards of one replica."""

    def __init__(self) -> None:
        self._by_token: dict[int, Forward] = {}
        self._by_peer: dict[EndpointID, dict[int, None]] = {}
        self._retries: list[tuple[float, int]] = []
        self._next_token = 1
        self.counters = ForwardCounters()

    def __len__(self) -> int:
        return len(self._by_token)

    def send(self, peer: EndpointID, messages: list[bytes], group: Group, *, required: bool = False) -> int:
        """A forward is sent; returns its token, 0 at the limit of forwards."""
        self.counters.sent += 1
        group.waiting += 1
        if len(self._by_token) >= MAX_FORWARDS:
            # `waiting` never comes back to 0, so the group is not confirmed.
            self.counters.unfollowed += 1
            return 0
        return self._follow(Forward(peer, messages, group, required))

    def settled(self, token: int, handled: bool, now: float, outcome: Outcome) -> None:
        """A parcel settled; one that was lost is due again later."""
        forward = self._by_token.get(token)
        if forward is None:
            return
        if handled:
            self._end(token, outcome, arrived=True)
        elif forward.tries >= MAX_TRIES:
            self.counters.given_up += 1
            outcome.missed.append(forward.peer)
            self._end(token, outcome, arrived=False)
        else:
            pause = min(FIRST_RETRY_S * 2 ** (forward.tries - 1), LAST_RETRY_S)
            heapq.heappush(self._retries, (now + pause, token))

    def gone(self, peer: EndpointID, outcome: Outcome) -> None:
        """A destination is dead or has vanished: its forwards count as done, but for those that had to arrive."""
        for token in self._by_peer.pop(peer, {}):
            self._finish(self._by_token.pop(token), outcome, arrived=False)

    def due(self, now: float) -> list[tuple[int, Forward]]:
        """Forwards to send again now, each with its new token."""
        found: list[tuple[int, Forward]] = []
        while self._retries and self._retries[0][0] <= now:
            _, token = heapq.heappop(self._retries)
            forward = self._by_token.pop(token, None)
            if forward is not None:
                del self._by_peer[forward.peer][token]
                forward.tries += 1
                self.counters.resent += 1
                found.append((self._follow(forward), forward))
        return found

    def next_retry(self) -> float:
        """When a forward is due again, monotonic seconds; `NEVER` without one."""
        return self._retries[0][0] if self._retries else NEVER

    def _follow(self, forward: Forward) -> int:
        token = self._next_token
        self._next_token += 1
        self._by_token[token] = forward
        self._by_peer.setdefault(forward.peer, {})[token] = None
        return token

    def _end(self, token: int, outcome: Outcome, *, arrived: bool) -> None:
        forward = self._by_token.pop(token)
        tokens = self._by_peer[forward.peer]
        del tokens[token]
        if not tokens:
            del self._by_peer[forward.peer]
        self._finish(forward, outcome, arrived=arrived)

    @staticmethod
    def _finish(forward: Forward, outcome: Outcome, *, arrived: bool) -> None:
        if forward.required and not arrived:
            return  # `waiting` never comes back to 0, so the group is not confirmed
        forward.group.waiting -= 1
        if not forward.group.waiting:
            outcome.confirmed.append(forward.group)
