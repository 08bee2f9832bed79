"""The bounded buffer before a client connection, whatever its protocol. Pure.

A connection that reads too slowly has its oldest waiting messages dropped and counted; one that stays over the bound
is disconnected. Others never wait for it.

Source: docs/promises.md, "Failure rules" 3.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Final


class Grade(Enum):
    """Lag of a connection: the time for which its oldest message has waited."""

    PROMPT = "prompt"
    """Below 100 ms: what waits is written as soon as the client takes it."""
    BATCHED = "batched"
    """Below 1 s: what waits is written every 10 ms, so that many messages share a write."""
    STALLED = "stalled"
    """Beyond: likewise, and the connection ends when that lasts."""


BATCHED_FROM_S: Final = 0.1
STALLED_FROM_S: Final = 1.0
BATCH_S: Final = 0.01
CHUNK_BYTES: Final = 128
"""Bytes counted per chunk beyond its data, for the objects that hold it."""


class Backlog:
    """Messages that wait for a slow connection: at most `limit_bytes`; the oldest are dropped first.

    Args:
        limit_bytes: the bound. Times are those of `SlowConsumers.now`.
        patience_s: time for which a connection may be over the bound, or stalled, before it should be disconnected.

    Source: docs/promises.md, "Failure rules" 3; the grades follow the article's author (2022): the further behind, the rarer the
    writes.
    """

    __slots__ = ("_bytes", "_chunks", "_late_since", "_leaving_since", "_limit", "_over", "_patience_s", "dropped")

    def __init__(self, limit_bytes: int, patience_s: float) -> None:
        self._limit = limit_bytes
        self._patience_s = patience_s
        self._chunks: deque[tuple[bytes, int, float]] | None = None
        """Created when a message waits: an empty one takes 600 bytes, and most connections never need it."""
        self._bytes = 0
        self._leaving_since: float | None = None
        self._over = False
        self._late_since: float | None = None
        self.dropped = 0
        """Messages dropped so far."""

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait."""
        return self._bytes

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def put(self, data: bytes, count: int, now: float) -> bool:
        """Add `count` messages. False when the connection has been late for too long."""
        if self._chunks is None:
            self._chunks = deque()
        self._chunks.append((data, count, now))
        self._bytes += len(data) + CHUNK_BYTES
        while self._bytes > self._limit and self._chunks:
            old, messages, _ = self._chunks.popleft()
            self._bytes -= len(old) + CHUNK_BYTES
            self.dropped += messages
            self._over = True
        return self.patient(now)

    def take(self, max_bytes: int) -> tuple[list[bytes], int]:
        """Take chunks of up to `max_bytes`, at least one. Returns them and their number of messages. They count until `left`."""
        taken: list[bytes] = []
        size = messages = 0
        if self._chunks and self._leaving_since is None:
            self._leaving_since = self._chunks[0][2]
        while self._chunks and (not taken or size + len(self._chunks[0][0]) <= max_bytes):
            data, count, _ = self._chunks.popleft()
            taken.append(data)
            size += len(data)
            messages += count
            self._bytes -= len(data) + CHUNK_BYTES
        return taken, messages

    def leaving(self, now: float) -> None:
        """Note that data was written directly and has not left yet."""
        if self._leaving_since is None:
            self._leaving_since = now

    def left(self) -> None:
        """Note that everything taken has left."""
        self._leaving_since = None
        if not self._chunks:
            # It has caught up, which counts as a break, whatever its state at the next check.
            self._over = False
            self._late_since = None

    def behind_s(self, now: float) -> float:
        """Time that the oldest message has waited, seconds."""
        if self._leaving_since is not None:
            return now - self._leaving_since
        return now - self._chunks[0][2] if self._chunks else 0.0

    def grade(self, now: float) -> Grade:
        """Grade of the connection's present lag."""
        behind_s = self.behind_s(now)
        if behind_s < BATCHED_FROM_S:
            return Grade.PROMPT
        return Grade.BATCHED if behind_s < STALLED_FROM_S else Grade.STALLED

    def patient(self, now: float) -> bool:
        """False when the connection has been late, over the bound or stalled, for too long without a break."""
        if not self._over and self.behind_s(now) < STALLED_FROM_S:
            self._late_since = None
            return True
        if self._late_since is None:
            self._late_since = now
        return now - self._late_since < self._patience_s
