"""Retained messages of a router partition: a table from topic to record. Pure.

    topic → (version, SnowflakeID) and the record, or nothing: the topic was cleared

The version is the SnowflakeID, unless a gateway found a newer one there and put the message above it: then the clock of its
predecessor's gateway was ahead.

Source: MQTT 5.0 section 3.3.1.3; docs/subscriptions.md, "Retained messages".
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from typing import Final, NamedTuple

from pixiu.placement.filter_tree import ALL_BELOW, ANY_LEVEL, filter_matches
from pixiu.placement.partition import serves
from pixiu.placement.topics import ROOM_PREFIX
from pixiu.wire.record import HEADER_SIZE
from router.replicated.table import Table

MAX_SLICE: Final = 1_000
"""Topics in one slice of a listing."""
MAX_SLICE_BYTES: Final = 256 << 10
MAX_SCANNED: Final = 4_000
"""Topics that one slice of a listing looks at, about 1 µs each."""
ENTRY_BYTES: Final = 300
"""Bytes counted for an entry beyond its record and twice its topic."""
_ROOM: Final = ROOM_PREFIX.encode()
"""Rooms are topics that no wildcard matches."""


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
    def key(self) -> bytes:
        """Its topic."""
        return self.topic

    @property
    def stamp(self) -> tuple[int, int]:
        """The higher one wins."""
        return self.version, self.snowflake

    @property
    def live(self) -> bool:
        """False: the topic was cleared."""
        return bool(self.record)

    @property
    def size(self) -> int:
        """Bytes that are counted for it."""
        return ENTRY_BYTES + 2 * len(self.topic) + len(self.record)

    @property
    def is_whole(self) -> bool:
        """True if its parts make sense."""
        return bool(self.topic) and self.version > 0 and (not self.record or len(self.record) >= HEADER_SIZE)

    def removed(self, until_ms: int) -> Entry:
        """The mark that the topic was cleared."""
        return self._replace(record=b"", expires_at_ms=until_ms)


class Slice(NamedTuple):
    """A part of a listing."""

    entries: list[Entry]
    next: bytes
    """Topics after this one are in the next slice; empty: there is none."""


class RetainedMap(Table[Entry]):
    """Retained messages; takes the arguments of `Table`."""

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        super().__init__(max_messages, max_bytes)
        self._topics: list[bytes] = []
        """Topics that are not cleared, ascending."""

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

    def _added(self, entry: Entry) -> None:
        insort(self._topics, entry.topic)

    def _gone(self, entry: Entry) -> None:
        del self._topics[bisect_left(self._topics, entry.topic)]


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
