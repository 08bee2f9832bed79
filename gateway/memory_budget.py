"""The memory that what clients sent and the gateway has not taken yet may need: unfinished packets, and messages that wait. Pure.

        connection ── holds n bytes ──▶ its address: at most `per_address` ──▶ all: at most `total`
                                              └─ over: who holds the most of them goes, until it fits ─┘

What one connection may hold is bounded by the size of a packet, and because it is not read from while its messages wait. The bound
of an address keeps one machine from having others thrown out; machines behind one address share it. Who is thrown out may come back
and fill its place again: where there is little room left (`is_crowded`) packets are read slowly.

Source: docs/promises.md, "Failure rules" 4; docs/architecture.md, "The gateway's edge";
docs/decisions/0287-a-crowded-address-is-read-slowly.md.
"""

from __future__ import annotations

from typing import Final

SMALL_BYTES: Final = 4096
"""A connection that holds less is not counted: most hold nothing, and one more would not matter."""
CROWDED: Final = 0.75
"""An address, or all, that hold this part of what they may are about to have connections thrown out."""


class MemoryBudget:
    """Who holds how much.

    Args:
        per_address, total: bytes.
    """

    def __init__(self, per_address: int, total: int) -> None:
        self._per_address, self._total = per_address, total
        self._held: dict[int, int] = {}
        self._address_of: dict[int, str] = {}
        self._by_address: dict[str, dict[int, None]] = {}
        self._bytes_of: dict[str, int] = {}
        self.bytes = 0
        self.evicted = 0
        """Connections that had to go."""

    def hold(self, connection: int, address: str, held: int) -> list[int]:
        """A connection holds so many bytes now. Returns the connections that must go, this one perhaps among them."""
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
        gone: list[int] = []
        while self._bytes_of.get(address, 0) > self._per_address:
            gone.append(self._evict(max(self._by_address[address], key=self._held.__getitem__)))
        while self.bytes > self._total:
            gone.append(self._evict(max(self._held, key=self._held.__getitem__)))
        return gone

    def is_crowded(self, address: str) -> bool:
        """Whether there is little room left, at this address or at all."""
        return self._bytes_of.get(address, 0) > CROWDED * self._per_address or self.bytes > CROWDED * self._total

    def forget(self, connection: int) -> None:
        """A connection holds nothing any more, or is gone."""
        held = self._held.pop(connection, 0)
        if not held:
            return
        address = self._address_of.pop(connection)
        self.bytes -= held
        self._bytes_of[address] -= held
        del self._by_address[address][connection]
        if not self._by_address[address]:
            del self._by_address[address], self._bytes_of[address]

    def _evict(self, connection: int) -> int:
        self.forget(connection)
        self.evicted += 1
        return connection
