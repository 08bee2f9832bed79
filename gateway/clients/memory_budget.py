"""Memory budget for client input that is not processed yet: unfinished packets, and messages that wait. Pure.

        connection ── holds n bytes ──▶ its address: at most `per_address` ──▶ all: at most `total`
                                              └─ over: the one that holds the most is closed, until it fits ─┘

The size of a packet bounds what one connection may hold, and it is not read from while its messages wait. The bound of an address
keeps one machine from having others disconnected; machines behind one address share it. A disconnected client may come back and
fill its place again, so packets are read slowly while little capacity is left (`is_crowded`).

Source: docs/promises.md, "Failure rules" 4; docs/architecture.md, "The gateway's edge";
docs/decisions/0287-partial-packets-are-read-slowly.md.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

ConnectionT = TypeVar("ConnectionT")
SMALL_BYTES: Final = 4096
"""A connection that holds less is not counted: most hold nothing, and one more does not matter."""
CROWDED: Final = 0.75
"""Share of its bound from which an address, or the total, counts as crowded: connections will soon be disconnected."""


class MemoryBudget(Generic[ConnectionT]):
    """Bytes held by each connection, by address and in total.

    Args:
        per_address, total: bytes.
    """

    def __init__(self, per_address: int, total: int) -> None:
        self._per_address, self._total = per_address, total
        self._held: dict[ConnectionT, int] = {}
        self._address_of: dict[ConnectionT, str] = {}
        self._by_address: dict[str, dict[ConnectionT, None]] = {}
        self._bytes_of: dict[str, int] = {}
        self.bytes = 0
        self.evicted = 0
        """Connections that had to be closed."""

    def hold(self, connection: ConnectionT, address: str, held: int) -> list[ConnectionT]:
        """Set the bytes that a connection holds. Returns the connections to close, which may include this one."""
        before = self._held.get(connection, 0)
        if held < SMALL_BYTES:
            if before:
                self.forget(connection)
            return []
        self._held[connection] = held
        self._address_of[connection] = address
        self._by_address.setdefault(address, {})[connection] = None
        self._bytes_of[address] = self._bytes_of.get(address, 0) + held - before
        self.bytes += held - before
        gone: list[ConnectionT] = []
        while self._bytes_of.get(address, 0) > self._per_address:
            gone.append(self._evict(max(self._by_address[address], key=self._held.__getitem__)))
        while self.bytes > self._total:
            gone.append(self._evict(max(self._held, key=self._held.__getitem__)))
        return gone

    def is_crowded(self, address: str) -> bool:
        """True if little capacity is left, at this address or in total."""
        return self._bytes_of.get(address, 0) > CROWDED * self._per_address or self.bytes > CROWDED * self._total

    def forget(self, connection: ConnectionT) -> None:
        """Forget a connection that holds nothing any more, or is gone."""
        held = self._held.pop(connection, 0)
        if not held:
            return
        address = self._address_of.pop(connection)
        self.bytes -= held
        self._bytes_of[address] -= held
        del self._by_address[address][connection]
        if not self._by_address[address]:
            del self._by_address[address], self._bytes_of[address]

    def _evict(self, connection: ConnectionT) -> ConnectionT:
        self.forget(connection)
        self.evicted += 1
        return connection
