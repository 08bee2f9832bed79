"""Compaction: which messages of which parts are superseded, and the entries that let them go.

    closed segments ──a thread──▶ messages that are not the last of their key ──COMPACT──▶ every replica removes them

Only the leader looks; what it proposes names offsets, so replicas need not agree on files or on the moment. A part is read again
when so much has come that it is worth it.

Source: docs/topics.md, "Compaction".
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final, NamedTuple

from cluster.topics import entries as en
from pixiu.errors import PixiuError, StorageError
from pixiu.wire.block import Flag
from topic.clients.group import Group
from topic.state.parts import Part
from topic.storage.cutting import joined
from topic.storage.files import Files
from topic.storage.keys import KeyIndex, digest_of
from topic.storage.part_log import PartLog
from topic.storage.segment import Segment, blocks_of

ROLL_BYTES: Final = 1 << 20
"""Size from which on the segment that is written is closed, so that it can be compacted."""
ROLL_S: Final = 3600.0
"""Age from which on a smaller one is closed."""
DIRTY_SHARE: Final = 0.2
"""Bytes that have to come, as a share of what is stored, before a part is looked at again."""
MAX_RANGES: Final = 4096
"""Ranges, and deleted keys, that one entry names. Policy: others are in the next one."""
MICRO: Final = 1_000_000


class Found(NamedTuple):
    """Messages of a segment that are superseded."""

    ranges: list[tuple[int, int]]
    digests: list[bytes]
    """Keys whose tombstones are among them."""


class Compaction:
    """Compaction on a leader.

    Args:
        group: the replica.
        roll_bytes, roll_s: see `ROLL_BYTES`, `ROLL_S`.
    """

    def __init__(self, group: Group, roll_bytes: int = ROLL_BYTES, roll_s: float = ROLL_S) -> None:
        self._group, self._roll_bytes, self._roll_us = group, roll_bytes, int(roll_s * MICRO)
        self._seen: dict[int, tuple[int, int, int]] = {}
        """Part → bytes that had come when it was looked at, time of that, number of closed segments."""
        self.removed = 0
        """Messages that entries of this leader have removed."""

    async def look(self) -> None:
        """Look at all parts of topics that are compacted, and propose what is due. What is refused is found again."""
        store = self._group.store
        for part in list(store.state.parts.values()):
            topic, log = store.state.topics.get(en.topic_of(part.part)), store.logs.get(part.part)
            if topic is not None and topic.compact and not topic.deleted and log is not None:
                await self._look_at(part, log, topic.compact * MICRO)
            if not self._group.core.epoch:
                return
        for gone in self._seen.keys() - store.state.parts.keys():
            del self._seen[gone]

    async def _look_at(self, part: Part, log: PartLog, kept_us: int) -> None:
        now_us = self._group.store.state.clock_us
        self._close_last(part, log, now_us)
        closed = len(log.segments) - 1
        seen = self._seen.get(part.part)
        if seen is not None:
            bytes_, at_us, before = seen
            grew = log.appended_bytes - bytes_ >= DIRTY_SHARE * log.stored_bytes and closed != before
            if not grew and now_us < at_us + kept_us:
                return
        self._seen[part.part] = log.appended_bytes, now_us, closed
        for segment in log.segments[:-1]:
            before_us = 0 if part.parents else now_us - kept_us  # a parent may have what the tombstone deletes
            try:
                found = await asyncio.to_thread(
                    superseded, self._group.store.files, segment, self._group.store.keys, part, before_us
                )
            except StorageError:  # a row of the index is damaged, or the table was closed meanwhile
                self._seen.pop(part.part, None)
                return
            if self._group.store.logs.get(part.part) is not log or not self._group.core.epoch:
                return
            if not await self._propose(part, found):
                self._seen.pop(part.part, None)
                return

    def _close_last(self, part: Part, log: PartLog, now_us: int) -> None:
        last = log.segments[-1] if log.segments else None
        if last is not None and (
            last.size >= self._roll_bytes or part.sealed or (last.last_us and last.last_us < now_us - self._roll_us)
        ):
            log.roll()

    async def _propose(self, part: Part, found: Found) -> bool:
        """Append what is superseded. Returns False if the log does not take it."""
        already = self._group.store.compacting.of(part.part)
        if all(any(low <= begin and end <= high for low, high in already) for begin, end in found.ranges):
            return True
        ranges, digests = list(found.ranges), list(found.digests)
        while ranges:
            some, ranges = ranges[:MAX_RANGES], ranges[MAX_RANGES:]
            forgotten, digests = (digests[:MAX_RANGES], digests[MAX_RANGES:]) if not ranges else ([], digests)
            try:
                await self._group.request(en.COMPACT, en.Compaction(part.part, some, forgotten).encode())
            except PixiuError:
                return False
            self.removed += sum(high - low for low, high in some)
        return True


def superseded(files: Files, segment: Segment, keys: KeyIndex, part: Part, before_us: int) -> Found:
    """Find the messages of a closed segment that are not the last of their key, and tombstones that were appended before a time. To
    be called in a thread."""
    ranges, digests = list[tuple[int, int]](), list[bytes]()
    for offset, digest, tombstone in _gone(files, segment, keys, part, before_us):
        ranges.append((offset, offset + 1))
        if tombstone:
            digests.append(digest)
    return Found(joined(ranges), digests)


def _gone(
    files: Files, segment: Segment, keys: KeyIndex, part: Part, before_us: int
) -> Iterator[tuple[int, bytes, bool]]:  # fmt: skip
    for stamp, block, _ in blocks_of(files, segment.path, 0, segment.base):
        if stamp.base >= segment.end:
            return
        if not block.flags & Flag.KEY:
            continue
        for number, key, size in block.keyed():
            offset, digest = stamp.base + number, digest_of(key)
            last = keys.last(part.part, digest)
            if last is None:
                continue
            tombstone = last.offset == offset and not size and stamp.at_us < before_us
            if last.offset > offset or tombstone:
                yield offset, digest, tombstone
