"""The one decision whether a client is read from, whatever its protocol: named reasons against it, each with its time. Pure.

    reading ── hold: the first reason ──▶ not reading ── release, or its time is over: the last reason ──▶ reading

Source: docs/architecture.md, "A client connection".
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from cluster.core.contract import NEVER


class Hold(Enum):
    """The reason why a client is not read from. The value is its name in metrics and at `/connections`."""

    LOGIN = "login"
    """Its login is being checked, or its refusal waits."""
    TURN = "turn"
    """Its input waits for a turn of the event loop."""
    UNANSWERED = "unanswered"
    """The most of its messages and filters that may wait for the cluster do."""
    PUBLISHING = "publishing"
    """The cluster has no space for its messages of QoS 1, or some are sent again."""
    IN_FLIGHT = "in_flight"
    """Too much that it published at QoS 0 is on its way to the proxies."""
    RATE = "rate"
    """It published more than its rate, or that of a room."""
    QUOTA = "quota"
    """It owes more than the quota of its login allows."""
    UNROUTABLE = "unroutable"
    """It sends large messages to topics that no room carries."""
    JOINS = "joins"
    """It joined and left faster than it may, or its joins were refused."""
    JOIN_QUEUE = "join_queue"
    """Its joins wait in the queue of bulk joins."""
    ACCESS_CHECK = "access_check"
    """A callback is asked what it may do."""
    MEMORY = "memory"
    """It sends a large packet while little memory for unfinished ones is left."""
    ANSWERS = "answers"
    """It does not read its answers."""


def _ignore(_reads: bool) -> None:
    pass


class ReadingGate:
    """The reasons why one client is not read from; without any it is.

    turned: called with True when reading begins again, with False when it stops.
    """

    __slots__ = ("_held", "_since", "_turned", "held_s", "reads")

    def __init__(self, turned: Callable[[bool], None] = _ignore) -> None:
        self._turned = turned
        self._held: dict[Hold, tuple[float, float]] = {}
        """Reason → since when, and until when at the latest; monotonic seconds."""
        self._since = 0.0
        self.reads = True
        self.held_s = 0.0
        """Time for which nothing was read, without a present pause."""

    def hold(self, reason: Hold, now: float, until: float = NEVER) -> None:
        """Read nothing while this reason holds: until it is released, or the time is over. A longer time replaces a shorter one."""
        since, before = self._held.get(reason, (now, now))
        if until <= before:
            return
        self._held[reason] = since, until
        if self.reads:
            self.reads, self._since = False, now
            self._turned(False)

    def release(self, reason: Hold, now: float) -> None:
        """End a reason; without another one the client is read from."""
        if self._held.pop(reason, None) is None or self._held:
            return
        self._held = {}  # an emptied one keeps its table
        self.held_s += now - self._since
        self.reads = True
        self._turned(True)

    def expire(self, now: float) -> bool:
        """End the reasons whose time is over. Returns True if there were any."""
        over = [reason for reason, (_, until) in self._held.items() if until <= now]
        for reason in over:
            self.release(reason, now)
        return bool(over)

    def next_deadline(self) -> float:
        """Time at which to call `expire`; `NEVER`: every reason has to be released."""
        return min([until for _, until in self._held.values()], default=NEVER)

    def clock(self, now: float) -> float:
        """Monotonic seconds without those in which nothing was read. Time limits on what a client sends are measured by it."""
        return (now if self.reads else self._since) - self.held_s

    def holds(self, reason: Hold) -> bool:
        """True if this is one of the reasons."""
        return reason in self._held

    def holds_only(self, reason: Hold) -> bool:
        """True if this is the only reason."""
        return len(self._held) == 1 and reason in self._held

    @property
    def reasons(self) -> dict[Hold, float]:
        """Reasons, the oldest first, and since when each holds, monotonic seconds."""
        return {reason: since for reason, (since, _) in self._held.items()}
