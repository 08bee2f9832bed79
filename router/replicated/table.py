"""A last-writer-wins table that replicas of a router partition keep equal. Pure.

    key → the entry with the highest stamp; or its mark: it was removed

A mark is remembered for a day, so that no replica revives what was removed. Digests of buckets show two replicas where they differ.

Source: docs/subscriptions.md, "Retained messages" and "Kept filters".
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final, Generic, Protocol, Self, TypeVar

import xxhash

from pixiu.placement.partition import serves

BUCKETS: Final = 256
DIGESTS: Final = struct.Struct(f"<{BUCKETS}Q")
REMOVED_MS: Final = 86_400_000
"""Time for which a removed entry is remembered, ms: a replica that was away for longer takes everything from its peers."""
MAX_EXPIRED: Final = 1_000
"""Entries that one call of `expire` removes."""
SPARE_TIMERS: Final = 1_024
_STAMP: Final = struct.Struct("<QQ")


class Entry(Protocol):
    """An entry of a table; a value that does not change."""

    @property
    def key(self) -> bytes:
        """Its key."""

    @property
    def stamp(self) -> tuple[int, int]:
        """The higher one wins; two numbers of 64 bits."""

    @property
    def live(self) -> bool:
        """False: it is the mark of a removed one."""

    @property
    def expires_at_ms(self) -> int:
        """Unix milliseconds after which it is forgotten; 0: never."""

    @property
    def room(self) -> int:
        """The room whose partition keeps it."""

    @property
    def size(self) -> int:
        """Bytes that are counted for it."""

    @property
    def is_whole(self) -> bool:
        """True if its parts make sense."""

    def removed(self, until_ms: int) -> Self:
        """Its mark."""


E = TypeVar("E", bound=Entry)


class Stored(Enum):
    """Outcome of putting an entry."""

    NEW = "new"
    SAME = "same"
    """It is there already."""
    SUPERSEDED = "superseded"
    """A newer one is there."""
    FULL = "full"


@dataclass(slots=True)
class TableCounters:
    """Since the start."""

    stored: int = 0
    superseded: int = 0
    refused: int = 0
    """Entries refused because there is no space."""
    expired: int = 0
    removed_forgotten: int = 0
    """Marks forgotten before their day is over."""


class Table(Generic[E]):
    """The table.

    Args:
        max_entries: of live ones, and of marks.
        max_bytes: of all together.
    """

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._entries: dict[bytes, E] = {}
        self._marks: dict[bytes, None] = {}
        self._timers: list[tuple[int, bytes]] = []
        self._digests = [0] * BUCKETS
        self._members: list[dict[bytes, None]] = [{} for _ in range(BUCKETS)]
        self.bytes = 0
        self.counters = TableCounters()

    # --- what a kind of table adds

    def _bucket(self, key: bytes) -> int:
        """Bucket of a key, 0 to 255."""
        return xxhash.xxh3_64_intdigest(key) % BUCKETS

    def _has_space(self, entry: E) -> bool:
        """True if a new entry is within the limits that this kind of table has besides."""
        return True

    def _added(self, entry: E) -> None:
        """Note a live entry in further indexes."""

    def _gone(self, entry: E) -> None:
        """Remove a live entry from them."""

    # --- all tables

    def __len__(self) -> int:
        """Number of live entries."""
        return len(self._entries) - len(self._marks)

    @property
    def removed(self) -> int:
        """Number of removed entries that are remembered."""
        return len(self._marks)

    def get(self, key: bytes) -> E | None:
        """The entry of a key, or its mark."""
        return self._entries.get(key)

    def put(self, entry: E, now_ms: int, *, limited: bool = True) -> Stored:
        """Take an entry if it is newer. `limited`: refuse one that has no space; what a peer has is taken in any case."""
        old = self._entries.get(entry.key)
        if old is not None:
            if old.stamp == entry.stamp:
                return Stored.SAME
            if old.stamp > entry.stamp:
                self.counters.superseded += 1
                return Stored.SUPERSEDED
        if entry.expires_at_ms and entry.expires_at_ms <= now_ms:
            # It is over already, and so is what it replaces.
            if old is None:
                return Stored.NEW
            entry = entry.removed(now_ms + REMOVED_MS)
        if limited and entry.live and self._is_full(entry, old):
            self.counters.refused += 1
            return Stored.FULL
        if old is not None:
            self._remove(old)
        self._add(entry)
        self.counters.stored += 1
        while len(self._marks) > self._max_entries:
            self.counters.removed_forgotten += 1
            self._remove(self._entries[next(iter(self._marks))])
        return Stored.NEW

    def expire(self, now_ms: int) -> list[bytes]:
        """Remove what is over, as far as one call should. Returns the keys."""
        gone: list[bytes] = []
        while self._timers and self._timers[0][0] <= now_ms and len(gone) < MAX_EXPIRED:
            _, key = heapq.heappop(self._timers)
            entry = self._entries.get(key)
            if entry is not None and 0 < entry.expires_at_ms <= now_ms:
                self._remove(entry)
                self.counters.expired += entry.live
                gone.append(key)
        return gone

    def purge(self, partition: int, partitions: int) -> list[bytes]:
        """Remove what another partition serves. Returns the keys."""
        foreign = [entry for entry in self._entries.values() if not serves(partition, entry.room, partitions)]
        for entry in foreign:
            self._remove(entry)
        return [entry.key for entry in foreign]

    def digests(self) -> bytes:
        """Digests of all buckets."""
        return DIGESTS.pack(*self._digests)

    def differing(self, digests: bytes, partition: int, partitions: int) -> Iterator[E]:
        """Entries of the buckets whose digests differ from a caller's, in the rooms of a partition."""
        for bucket, digest in enumerate(DIGESTS.unpack(digests)):
            if digest != self._digests[bucket]:
                for key in list(self._members[bucket]):
                    entry = self._entries.get(key)
                    if entry is not None and serves(partition, entry.room, partitions):
                        yield entry

    def _is_full(self, entry: E, old: E | None) -> bool:
        more = entry.size - (old.size if old is not None else 0)
        if more > 0 and self.bytes + more > self._max_bytes:
            return True
        return (old is None or not old.live) and (len(self) >= self._max_entries or not self._has_space(entry))

    def _add(self, entry: E) -> None:
        key = entry.key
        self._entries[key] = entry
        self.bytes += entry.size
        if entry.live:
            self._added(entry)
        else:
            self._marks[key] = None
        if entry.expires_at_ms:
            if len(self._timers) >= 2 * len(self._entries) + SPARE_TIMERS:
                # Entries that are renewed leave their old timers behind.
                self._timers = [(each.expires_at_ms, key) for key, each in self._entries.items() if each.expires_at_ms]
                heapq.heapify(self._timers)
            else:
                heapq.heappush(self._timers, (entry.expires_at_ms, key))
        self._count(key, entry)
        self._members[self._bucket(key)][key] = None

    def _remove(self, entry: E) -> None:
        key = entry.key
        del self._entries[key]
        self.bytes -= entry.size
        if entry.live:
            self._gone(entry)
        else:
            del self._marks[key]
        self._count(key, entry)
        del self._members[self._bucket(key)][key]

    def _count(self, key: bytes, entry: E) -> None:
        """Add an entry to the digest of its bucket, or take it out."""
        where = xxhash.xxh3_64_intdigest(key)
        self._digests[self._bucket(key)] ^= xxhash.xxh3_64_intdigest(_STAMP.pack(*entry.stamp), seed=where)
