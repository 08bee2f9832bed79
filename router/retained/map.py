"""Retained messages of a router partition: a last-writer-wins map from topic to record. Pure.

    topic → (version, SnowflakeID) and the record, or nothing: the topic was cleared

The version is the SnowflakeID, unless a gateway found a newer one there and put the message above it: then the clock of its
predecessor's gateway was ahead. A cleared topic is remembered for a day, so that no replica revives it. Digests of buckets show two
replicas where they differ.

Source: MQTT 5.0 section 3.3.1.3; docs/subscriptions.md, "Retained messages".
"""

from __future__ import annotations

import heapq
import struct
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

import xxhash

from pixiu.placement.filter_tree import ALL_BELOW, ANY_LEVEL, filter_matches
from pixiu.placement.partition import serves
from pixiu.placement.topics import ROOM_PREFIX
from pixiu.wire.record import HEADER_SIZE

BUCKETS: Final = 256
DIGESTS: Final = struct.Struct(f"<{BUCKETS}Q")
CLEARED_MS: Final = 86_400_000
"""Time for which a cleared topic is remembered, ms: a replica that was away for longer takes everything from its peers."""
MAX_SLICE: Final = 1_000
"""Topics in one slice of a listing."""
MAX_SLICE_BYTES: Final = 256 << 10
MAX_SCANNED: Final = 4_000
"""Topics that one slice of a listing looks at, about 1 µs each."""
ENTRY_BYTES: Final = 300
"""Bytes counted for an entry beyond its record and twice its topic."""
MAX_EXPIRED: Final = 1_000
"""Entries that one call of `expire` removes."""
_ROOM: Final = ROOM_PREFIX.encode()
"""Rooms are topics that no wildcard matches."""
_HEAD: Final = struct.Struct("<QQ")


class Entry(NamedTuple):
    """The message that is retained for a topic, or the mark that it was cleared."""

    topic: bytes
    """UTF-8."""
    version: int
    snowflake: int
    record: bytes
    """The whole record; empty: the topic was cleared."""
    expires_at_ms: int
    """Unix milliseconds; 0: never."""
    room: int

    @property
    def size(self) -> int:
        """Bytes that are counted for it."""
        return ENTRY_BYTES + 2 * len(self.topic) + len(self.record)

    @property
    def is_whole(self) -> bool:
        """True if its parts make sense."""
        return bool(self.topic) and self.version > 0 and (not self.record or len(self.record) >= HEADER_SIZE)


class Stored(Enum):
    """Outcome of putting an entry."""

    NEW = "new"
    SAME = "same"
    """It is there already."""
    SUPERSEDED = "superseded"
    """A newer one is there."""
    FULL = "full"


@dataclass(slots=True)
class RetainedCounters:
    """Since the start."""

    retained_stored: int = 0
    retained_superseded: int = 0
    retained_refused: int = 0
    """Messages refused because there is no space."""
    retained_expired: int = 0
    retained_cleared_forgotten: int = 0
    """Cleared topics forgotten before their day is over."""


class Slice(NamedTuple):
    """A part of a listing."""

    entries: list[Entry]
    next: bytes
    """Topics after this one are in the next slice; empty: there is none."""


class RetainedMap:
    """Retained messages.

    Args:
        max_messages: of topics that are not cleared, and of cleared ones.
        max_bytes: of all together.
    """

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self._max_messages, self._max_bytes = max_messages, max_bytes
        self._entries: dict[bytes, Entry] = {}
        self._topics: list[bytes] = []
        """Topics that are not cleared, ascending."""
        self._cleared: dict[bytes, None] = {}
        self._timers: list[tuple[int, bytes, int]] = []
        self._digests = [0] * BUCKETS
        self._members: list[dict[bytes, None]] = [{} for _ in range(BUCKETS)]
        self.bytes = 0
        self.counters = RetainedCounters()

    def __len__(self) -> int:
        """Number of retained messages."""
        return len(self._topics)

    @property
    def cleared(self) -> int:
        """Number of cleared topics that are remembered."""
        return len(self._cleared)

    def get(self, topic: bytes) -> Entry | None:
        """The entry of a topic, cleared or not."""
        return self._entries.get(topic)

    def put(self, entry: Entry, now_ms: int, *, limited: bool = True) -> Stored:
        """Take an entry if it is newer. `limited`: refuse one that has no space; what a peer has is taken in any case."""
        old = self._entries.get(entry.topic)
        if old is not None:
            if (old.version, old.snowflake) == (entry.version, entry.snowflake):
                return Stored.SAME
            if (old.version, old.snowflake) > (entry.version, entry.snowflake):
                self.counters.retained_superseded += 1
                return Stored.SUPERSEDED
        if entry.expires_at_ms and entry.expires_at_ms <= now_ms:
            # It is over already, and so is what it replaces.
            if old is None:
                return Stored.NEW
            entry = entry._replace(record=b"", expires_at_ms=now_ms + CLEARED_MS)
        size, new = entry.size - (old.size if old is not None else 0), old is None or not old.record
        if entry.record and limited and ((new and len(self) >= self._max_messages) or self.bytes + size > self._max_bytes):
            self.counters.retained_refused += 1
            return Stored.FULL
        if old is not None:
            self._remove(old)
        self._add(entry)
        self.counters.retained_stored += 1
        while len(self._cleared) > self._max_messages:
            self.counters.retained_cleared_forgotten += 1
            self._remove(self._entries[next(iter(self._cleared))])
        return Stored.NEW

    def expire(self, now_ms: int) -> list[bytes]:
        """Remove what is over, as far as one call should. Returns the topics."""
        gone: list[bytes] = []
        while self._timers and self._timers[0][0] <= now_ms and len(gone) < MAX_EXPIRED:
            _, topic, version = heapq.heappop(self._timers)
            entry = self._entries.get(topic)
            if entry is not None and entry.version == version and entry.expires_at_ms <= now_ms:
                self._remove(entry)
                self.counters.retained_expired += bool(entry.record)
                gone.append(topic)
        return gone

    def purge(self, partition: int, partitions: int) -> list[bytes]:
        """Remove what another partition serves. Returns the topics."""
        foreign = [entry for entry in self._entries.values() if not serves(partition, entry.room, partitions)]
        for entry in foreign:
            self._remove(entry)
        return [entry.topic for entry in foreign]

    def clear(self) -> None:
        """Forget everything."""
        for entry in list(self._entries.values()):
            self._remove(entry)

    def listing(
        self, filters: Sequence[bytes], after: bytes, limit: int, now_ms: int, partition: int = 0, partitions: int = 1
    ) -> Slice:
        """A slice of what matches any of the filters and is in the rooms of a partition, in the order of topics."""
        exact = {name for name in filters if not _is_wild(name)}
        wild = [name for name in filters if _is_wild(name)]
        most = min(limit or MAX_SLICE, MAX_SLICE)
        source: Sequence[bytes] = self._topics
        if wild:
            low = min(_fixed(name) for name in (*wild, *exact))
            begin = max(bisect_right(source, after) if after else 0, bisect_left(source, low))
            high = b"" if exact else _above(wild)
            end = bisect_left(source, high) if high else len(source)
        else:
            source = sorted(name for name in exact if name > after)
            begin, end = 0, len(source)
        found: list[Entry] = []
        size = looked = 0
        for index in range(begin, end):
            topic = source[index]
            if len(found) >= most or size >= MAX_SLICE_BYTES or looked >= MAX_SCANNED:
                return Slice(found, source[index - 1])
            looked += 1
            entry = self._entries.get(topic)
            if entry is None or not entry.record or (entry.expires_at_ms and entry.expires_at_ms <= now_ms):
                continue
            if topic not in exact and (topic.startswith(_ROOM) or not any(filter_matches(name, topic) for name in wild)):
                continue
            if serves(partition, entry.room, partitions):
                found.append(entry)
                size += len(entry.record) + len(topic)
        return Slice(found, b"")

    def digests(self) -> bytes:
        """Digests of all buckets."""
        return DIGESTS.pack(*self._digests)

    def differing(self, digests: bytes, partition: int, partitions: int) -> Iterator[Entry]:
        """Entries of the buckets whose digests differ from a caller's, in the rooms of a partition."""
        for bucket, digest in enumerate(DIGESTS.unpack(digests)):
            if digest != self._digests[bucket]:
                for topic in list(self._members[bucket]):
                    entry = self._entries.get(topic)
                    if entry is not None and serves(partition, entry.room, partitions):
                        yield entry

    def _add(self, entry: Entry) -> None:
        self._entries[entry.topic] = entry
        self.bytes += entry.size
        if entry.record:
            insort(self._topics, entry.topic)
        else:
            self._cleared[entry.topic] = None
        if entry.expires_at_ms:
            heapq.heappush(self._timers, (entry.expires_at_ms, entry.topic, entry.version))
        bucket, digest = _digest(entry)
        self._digests[bucket] ^= digest
        self._members[bucket][entry.topic] = None

    def _remove(self, entry: Entry) -> None:
        del self._entries[entry.topic]
        self.bytes -= entry.size
        if entry.record:
            del self._topics[bisect_left(self._topics, entry.topic)]
        else:
            del self._cleared[entry.topic]
        bucket, digest = _digest(entry)
        self._digests[bucket] ^= digest
        del self._members[bucket][entry.topic]


def _digest(entry: Entry) -> tuple[int, int]:
    """Bucket of an entry, and its digest."""
    where = xxhash.xxh3_64_intdigest(entry.topic)
    return where % BUCKETS, xxhash.xxh3_64_intdigest(_HEAD.pack(entry.version, entry.snowflake), seed=where)


def _is_wild(name: bytes) -> bool:
    return ANY_LEVEL in name or ALL_BELOW in name


def _fixed(name: bytes) -> bytes:
    """The lowest topic that a filter with a wildcard can match: its levels before that; `a/#` matches `a`, too."""
    fixed: list[bytes] = []
    for level in name.split(b"/"):
        if level in (ANY_LEVEL, ALL_BELOW):
            break
        fixed.append(level)
    return b"/".join(fixed)


def _above(wild: Sequence[bytes]) -> bytes:
    """A name above all topics that filters can match; empty: there is none."""
    fixed = [_fixed(name) for name in wild]
    return max(name + b"/\xff" for name in fixed) if all(fixed) else b""
