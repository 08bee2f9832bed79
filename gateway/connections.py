"""What a gateway's shell holds of each client connection, whatever its protocol, and the bounded buffer before it.

A connection that reads too slowly has its oldest waiting messages dropped and counted; one that stays over the bound
is disconnected. Others never wait for it.

Source: DESIGN section 14, rule 3.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol


class Connection(Protocol):
    """A client connection."""

    id: int

    def deliver(self, data: bytes, count: int) -> None:
        """Take `count` messages to write; they leave at `flush`, or wait in the connection's own buffer."""

    def flush(self) -> None:
        """Write what was delivered in this turn."""

    def answer(self, request: int, known: bool) -> None:
        """A join has taken effect; `known` is False when the routers did not confirm it in time."""

    def announce(self) -> None:
        """Tell the client, if its protocol can, that the gateway is going."""

    def close(self, reason: str) -> None:
        """End the connection."""


class Backlog:
    """Messages that wait for a slow connection: at most `limit_bytes`, the oldest go first.

    Args:
        limit_bytes: the bound.
        patience_s: how long a connection may stay over the bound before it is to be disconnected.
    """

    def __init__(self, limit_bytes: int, patience_s: float) -> None:
        self._limit = limit_bytes
        self._patience_s = patience_s
        self._chunks: deque[tuple[bytes, int]] = deque()
        self._bytes = 0
        self._over_since: float | None = None
        self.dropped = 0
        """Messages dropped so far."""

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def put(self, data: bytes, count: int, now: float) -> bool:
        """Add `count` messages. False when the connection has been over the bound for too long."""
        self._chunks.append((data, count))
        self._bytes += len(data)
        if self._bytes <= self._limit:
            return True
        while self._bytes > self._limit and self._chunks:
            old, messages = self._chunks.popleft()
            self._bytes -= len(old)
            self.dropped += messages
        if self._over_since is None:
            self._over_since = now
        return now - self._over_since < self._patience_s

    def take(self, most_bytes: int) -> tuple[list[bytes], int]:
        """Chunks of up to `most_bytes` (at least one), and how many messages they hold."""
        taken: list[bytes] = []
        size = messages = 0
        while self._chunks and (not taken or size + len(self._chunks[0][0]) <= most_bytes):
            data, count = self._chunks.popleft()
            taken.append(data)
            size += len(data)
            messages += count
        self._bytes -= size
        if not self._chunks:
            self._over_since = None
        return taken, messages
