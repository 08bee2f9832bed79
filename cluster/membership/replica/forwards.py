"""Messages that a router or relay has forwarded and that are not settled yet; it confirms only what all destinations have. Pure.

One *group* is the content of one message from a gateway; it causes one *forward* for each destination. A lost forward is sent
again, at most `MAX_TRIES` times; a destination that dies ends its forwards. When the last forward of a group has ended, the gateway
gets a confirmation, unless a required forward did not arrive: then the gateway sends the message again.

Source: PiXiu §5 (peers first, then subscribers); docs/memberships.md, "Joins and leaves".
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Final

from cluster.core.contract import NEVER
from pixiu.ids import EndpointID

MAX_TRIES: Final = 8
"""Attempts to send a forward. Policy: after that the destination is assumed to have missed it, and must take a snapshot."""
FIRST_RETRY_S: Final = 0.05
LAST_RETRY_S: Final = 1.0
"""Last pause before a forward is sent again; the pause doubles from the first value to this one, seconds."""
MAX_FORWARDS: Final = 200_000
"""Forwards under way. Policy: beyond that messages are forwarded but not tracked or confirmed: the gateway sends them again."""


@dataclass(slots=True, eq=False)
class Group:
    """Messages of one gateway that wait for their forwards."""

    gateway: EndpointID | None
    """Gateway to inform; None if the messages came from another replica."""
    ids: list[int]
    waiting: int = 0


@dataclass(slots=True, eq=False)
class Forward:
    """A parcel for one destination."""

    peer: EndpointID
    messages: list[bytes]
    group: Group
    required: bool = False
    """True if no other process has it: the group is not confirmed without it."""
    tries: int = 1


@dataclass(slots=True)
class ForwardCounters:
    """Outcomes of forwarded messages since the start."""

    sent: int = 0
    resent: int = 0
    given_up: int = 0
    unfollowed: int = 0


@dataclass(slots=True)
class ForwardOutcome:
    """Result of settled parcels or of a death."""

    confirmed: list[Group] = field(default_factory=list)
    """Groups whose forwards have all ended."""
    missed: list[EndpointID] = field(default_factory=list)
    """Live destinations that missed something."""


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
        """Register a forward that is being sent; returns its token, 0 at the limit of forwards."""
        self.counters.sent += 1
        group.waiting += 1
        if len(self._by_token) >= MAX_FORWARDS:
            # `waiting` never returns to 0, so the group is not confirmed.
            self.counters.unfollowed += 1
            return 0
        return self._follow(Forward(peer, messages, group, required))

    def settled(self, token: int, handled: bool, now: float, outcome: ForwardOutcome) -> None:
        """Note that a parcel settled; a lost one is due again later."""
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

    def gone(self, peer: EndpointID, outcome: ForwardOutcome) -> None:
        """Note that a destination is dead or has vanished: its forwards count as done, except required ones."""
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
        """Time at which the next forward is due again, monotonic seconds; `NEVER` if there is none."""
        return self._retries[0][0] if self._retries else NEVER

    def _follow(self, forward: Forward) -> int:
        token = self._next_token
        self._next_token += 1
        self._by_token[token] = forward
        self._by_peer.setdefault(forward.peer, {})[token] = None
        return token

    def _end(self, token: int, outcome: ForwardOutcome, *, arrived: bool) -> None:
        forward = self._by_token.pop(token)
        tokens = self._by_peer[forward.peer]
        del tokens[token]
        if not tokens:
            del self._by_peer[forward.peer]
        self._finish(forward, outcome, arrived=arrived)

    @staticmethod
    def _finish(forward: Forward, outcome: ForwardOutcome, *, arrived: bool) -> None:
        if forward.required and not arrived:
            return  # `waiting` never returns to 0, so the group is not confirmed
        forward.group.waiting -= 1
        if not forward.group.waiting:
            outcome.confirmed.append(forward.group)
