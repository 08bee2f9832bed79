"""Admission of connections: limits that keep a storm of connections, or a crowd of half-open ones, from hurting the others. Pure.

        accept ──▶ pending ──(is identified)───▶ connected
                     │  too many: the oldest goes      └─ too many, or too fast: refused with a retry-after

A pending connection costs only a socket. When there are too many, the oldest one of the address that has the most is closed: an
honest client identifies itself within a round trip, so the oldest ones belong to clients that only hold connections open. One
address can take a share of the places, never all. New connections beyond a rate are refused, because the joining of rooms that
follows is what costs.

Source: docs/promises.md, "Failure rules" 2 and 4; PiXiu §2.5.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

from cluster.core.token_bucket import TokenBucket

ConnectionT = TypeVar("ConnectionT")
FULL_RETRY_S: Final = 1.0
"""Retry-after for a client that met a full gateway, seconds."""


class Admission(Generic[ConnectionT]):
    """The connections of a gateway.

    Args:
        rate_per_s, burst: new connections; a rate of 0 is no limit.
        max_pending: connections that are not identified yet.
        max_connections: identified connections.
        address_percent: per cent of these that one address may have.
        now: monotonic seconds.
    """

    def __init__(
        self, *, rate_per_s: float, burst: float, max_pending: int, max_connections: int, now: float, address_percent: int = 100
    ) -> None:
        self._bucket = TokenBucket(rate_per_s, burst, now) if rate_per_s else None
        self._max_pending = max_pending
        self._address_percent = address_percent
        self._max_connections = max_connections
        self._pending: dict[ConnectionT, str] = {}
        """Connection → its address."""
        self._pending_of: dict[str, dict[ConnectionT, None]] = {}
        """Address → its pending connections, the oldest first."""
        self._connected: dict[ConnectionT, str] = {}
        self._connected_of: dict[str, int] = {}
        self.evicted = 0
        self.refused = 0

    def set_limits(self, *, rate_per_s: float, burst: float, max_connections: int, now: float) -> None:
        """Use these limits from now on; connected clients stay."""
        self._bucket = TokenBucket(rate_per_s, burst, now) if rate_per_s else None
        self._max_connections = max_connections

    @property
    def pending(self) -> int:
        """Connections that are not identified yet."""
        return len(self._pending)

    @property
    def connected(self) -> int:
        """Connections that have identified themselves."""
        return len(self._connected)

    def arrived(self, connection: ConnectionT, address: str = "") -> ConnectionT | None:
        """Add an accepted connection. Returns the pending one to close in its place. `address`: empty if unknown."""
        self._pending[connection] = address
        self._pending_of.setdefault(address, {})[connection] = None
        if len(self._pending) <= self._max_pending:
            return None
        self.evicted += 1
        most = max(self._pending_of.values(), key=len)
        oldest = next(iter(most if len(most) > 1 else self._pending))
        self._forget_pending(oldest)
        return oldest

    def connect(self, connection: ConnectionT, now: float) -> float:
        """Identify a pending connection. Returns 0 if it may stay, else the seconds after which it may retry."""
        wait_s = 0.0
        address = self._pending.get(connection, "")
        if len(self._connected) >= self._max_connections or self._is_full(address):
            wait_s = FULL_RETRY_S
        elif self._bucket is not None:
            wait_s = self._bucket.take(1, now)
        if wait_s:
            self.refused += 1
            return wait_s
        self._forget_pending(connection)
        self._connected[connection] = address
        self._connected_of[address] = self._connected_of.get(address, 0) + 1
        return 0.0

    def gone(self, connection: ConnectionT) -> None:
        """Count a connection that ended."""
        self._forget_pending(connection)
        address = self._connected.pop(connection, None)
        if address is not None:
            self._connected_of[address] -= 1
            if not self._connected_of[address]:
                del self._connected_of[address]

    def _is_full(self, address: str) -> bool:
        most = max(self._max_connections * self._address_percent // 100, 1)
        return bool(address) and self._address_percent < 100 and self._connected_of.get(address, 0) >= most

    def _forget_pending(self, connection: ConnectionT) -> None:
        address = self._pending.pop(connection, None)
        if address is not None:
            of = self._pending_of[address]
            del of[connection]
            if not of:
                del self._pending_of[address]
