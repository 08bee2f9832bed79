"""Who may connect: the limits that keep a storm of connections, or a crowd of half-open ones, from hurting the others. Pure.

        accept ──▶ pending ──(says who it is)──▶ connected
                     │  too many: the oldest goes      └─ too many, or too fast: refused, and told when to come again

A pending connection costs a socket and nothing else. The oldest goes first, because an honest client says who it is within
a round trip, and whoever only holds connections open has the oldest ones. New connections beyond a rate are refused:
what costs is the joining of rooms that follows.

Source: docs/promises.md, "Failure rules" 2 and 4; PiXiu §2.5.
"""

from __future__ import annotations

from typing import Final

from cluster.runtime.token_bucket import TokenBucket

FULL_RETRY_S: Final = 1.0
"""When a client may come again that met a full gateway."""


class Admission:
    """The connections of a gateway, by number.

    Args:
        rate_per_s, burst: new connections; a rate of 0 is no limit.
        max_pending: connections that have not said who they are.
        max_connections: those that have.
        now: monotonic seconds.
    """

    def __init__(self, *, rate_per_s: float, burst: float, max_pending: int, max_connections: int, now: float) -> None:
        self._bucket = TokenBucket(rate_per_s, burst, now) if rate_per_s else None
        self._max_pending = max_pending
        self._max_connections = max_connections
        self._pending: dict[int, None] = {}
        self._connected: set[int] = set()
        self.evicted = 0
        self.refused = 0

    def set_limits(self, *, rate_per_s: float, burst: float, max_connections: int, now: float) -> None:
        """Admit by these from now on; who is connected stays."""
        self._bucket = TokenBucket(rate_per_s, burst, now) if rate_per_s else None
        self._max_connections = max_connections

    @property
    def pending(self) -> int:
        """Connections that have not said who they are."""
        return len(self._pending)

    @property
    def connected(self) -> int:
        """Connections that have identified themselves."""
        return len(self._connected)

    def arrived(self, number: int) -> int | None:
        """A connection was accepted. Returns the pending one that must go for it."""
        self._pending[number] = None
        if len(self._pending) <= self._max_pending:
            return None
        self.evicted += 1
        oldest = next(iter(self._pending))
        del self._pending[oldest]
        return oldest

    def connect(self, number: int, now: float) -> float:
        """A pending connection said who it is. 0 when it may stay; else the seconds after which it may come again."""
        wait_s = 0.0
        if len(self._connected) >= self._max_connections:
            wait_s = FULL_RETRY_S
        elif self._bucket is not None:
            wait_s = self._bucket.take(1, now)
        if wait_s:
            self.refused += 1
            return wait_s
        self._pending.pop(number, None)
        self._connected.add(number)
        return 0.0

    def gone(self, number: int) -> None:
        """Count a connection that ended."""
        self._pending.pop(number, None)
        self._connected.discard(number)
