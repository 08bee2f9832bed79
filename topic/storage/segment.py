"""One file of a part: stored blocks end to end, from the offset in its name on.

    000000000004096.seg      the block at its beginning has the base 4096
    └─ sparse index: (base, time of appending, place in the file) every 64 KiB, made by writing or by reading the file once

Source: docs/topics.md, "How it is stored".
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from pixiu.errors import MalformedData
from pixiu.wire.block import HEAD, HEAD_BYTES, MAGIC, STAMP, STAMP_BYTES, Block, Stamp, parse_stored, stored_size
from topic.storage.files import Files

SUFFIX: Final = ".seg"
INDEX_EVERY_BYTES: Final = 65_536
READ_BYTES: Final = 256 << 10


class Stored(NamedTuple):
    """A block as it is read from a part."""

    stamp: Stamp
    block: Block
    data: bytes
    """Stamp and block, as they are stored."""


class Gap(NamedTuple):
    """Offsets [low, high) that cannot be read here: their blocks are damaged or missing."""

    low: int
    high: int


class Mark(NamedTuple):
    """A block in the index."""

    base: int
    at_us: int
    place: int
    """Offset in the file."""


@dataclass(slots=True)
class Segment:
    """A file. `size` and `end` of the last one, which is written, are those of its valid blocks; of closed ones, those of the file,
    and where the next file begins."""

    path: str
    base: int
    end: int
    size: int = 0
    last_us: int = 0
    """Time of appending of its last block."""
    index: list[Mark] = field(default_factory=list)
    scanned: bool = False

    def note(self, stamp: Stamp, size: int, count: int) -> None:
        """A block was added at the end."""
        if not self.index or self.size - self.index[-1].place >= INDEX_EVERY_BYTES:
            self.index.append(Mark(stamp.base, stamp.at_us, self.size))
        self.size += size
        self.end = stamp.base + count
        self.last_us = stamp.at_us

    def scan(self, files: Files) -> None:
        """Check every block of the file, and index them; ends before the first that is damaged: `end` and `size` are its."""
        self.index, self.size, self.end, self.scanned = [], 0, self.base, True
        for stored in blocks_of(files, self.path, 0, self.base):
            self.note(stored.stamp, len(stored.data), stored.block.count)

    def close(self, size: int, end: int) -> None:
        """Treat it as a closed file, of which this is the size, and whose blocks should end with an offset."""
        self.size, self.end, self.index, self.scanned = size, end, [], False

    def survey(self, files: Files) -> None:
        """Index the blocks of a closed file by their heads, unless that is done. May be called in a thread."""
        if self.scanned:
            return
        found = Segment(self.path, self.base, self.base)
        for stamp, count, size in heads_of(files, self.path, self.base):
            found.note(stamp, size, count)
        self.index, self.last_us, self.scanned = found.index, found.last_us, True

    def first_us(self, files: Files) -> int | None:
        """Time of appending of its first block; None: that cannot be read. May be called in a thread."""
        if self.index:
            return self.index[0].at_us
        found = next(heads_of(files, self.path, self.base), None)
        return None if found is None else found[0].at_us

    def mark_before(self, offset: int) -> Mark:
        """The last indexed block that does not begin after an offset."""
        found = bisect_right(self.index, offset, key=lambda mark: mark.base) - 1
        return self.index[found] if found >= 0 else Mark(self.base, 0, 0)

    def next_mark(self, offset: int) -> Mark | None:
        """The first indexed block beyond an offset."""
        found = bisect_right(self.index, offset, key=lambda mark: mark.base)
        return self.index[found] if found < len(self.index) else None

    def offset_at(self, at_us: int) -> int:
        """The base of an indexed block that is not later than a time, as near to it as the index has one."""
        found = bisect_right(self.index, at_us, key=lambda mark: mark.at_us) - 1
        return self.index[found].base if found >= 0 else self.base


def name_of(base: int) -> str:
    """Name of the segment that begins with an offset."""
    return f"{base:015d}{SUFFIX}"


def base_of(name: str) -> int | None:
    """The offset in a segment's name; None for other names."""
    digits = name.removesuffix(SUFFIX)
    return int(digits) if name.endswith(SUFFIX) and digits.isdigit() else None


def blocks_of(files: Files, path: str, place: int, base: int | None) -> Iterator[Stored]:
    """Checked blocks of a file from a place on; ends at the first that is damaged, torn, or does not follow. `base`: offset of the
    first one; None: any."""
    buffer, at = b"", 0
    while True:
        head = buffer[at : at + STAMP_BYTES]
        size = stored_size(head)
        if not size or at + size > len(buffer):
            place, at = place + at, 0
            try:
                buffer = files.read(path, place, max(READ_BYTES, size))
                size = stored_size(buffer)
                if size > len(buffer) >= READ_BYTES:  # a block of which only the head was expected
                    buffer = files.read(path, place, size)
            except MalformedData:
                return
            if not size or size > len(buffer):
                return
        data = buffer[at : at + size]
        try:
            stamp, block = parse_stored(data, fields=False)
        except MalformedData:
            return
        if base is not None and stamp.base != base:
            return
        yield Stored(stamp, block, data)
        base, at = stamp.base + block.count, at + size


def heads_of(files: Files, path: str, base: int, place: int = 0) -> Iterator[tuple[Stamp, int, int]]:
    """(stamp, count, size with the stamp) of the blocks of a file, by their heads alone; ends where one does not follow. `base`:
    offset of the first one, which is at `place`."""
    buffer, at = b"", 0
    while True:
        if at + STAMP_BYTES + HEAD_BYTES > len(buffer):
            place, at = place + at, 0
            try:
                buffer = files.read(path, place, READ_BYTES)
            except MalformedData:
                return
            if len(buffer) < STAMP_BYTES + HEAD_BYTES:
                return
        _, _, *stamp = STAMP.unpack_from(buffer, at)
        size = stored_size(buffer[at : at + STAMP_BYTES])
        magic, _, _, _, _, _, _, count, _, _, _ = HEAD.unpack_from(buffer, at + STAMP_BYTES)
        if not size or magic != MAGIC or stamp[0] != base:
            return
        yield Stamp(*stamp), count, size
        base, at = base + count, at + size


class Found(NamedTuple):
    """A block by its head, which the next one confirms."""

    place: int
    base: int
    end: int


def block_at(files: Files, segment: Segment, offset: int) -> Found | None:
    """The block with an offset, whether its messages can be read or not; None: its head cannot. May be called in a thread."""
    segment.survey(files)
    mark, found = segment.mark_before(offset), None
    place = mark.place
    for stamp, count, size in heads_of(files, segment.path, mark.base, mark.place):
        if found is not None and found.base <= offset < found.end:
            return found
        found = Found(place, stamp.base, stamp.base + count)
        place += size
    return found if found is not None and found.base <= offset < found.end == segment.end else None


def whole_heads_of(files: Files, segment: Segment) -> Iterator[tuple[Stamp, int, int]]:
    """The same of those blocks that lie in the file as a whole."""
    place = 0
    for stamp, count, size in heads_of(files, segment.path, segment.base):
        place += size
        if place > segment.size:
            return
        yield stamp, count, size


def read_segment(files: Files, segment: Segment, offset: int, max_bytes: int) -> list[Stored]:
    """Checked blocks of a segment from the one that holds an offset on, at least one if that can be read. May be called in a
    thread."""
    segment.survey(files)
    found = _read_from(files, segment, segment.mark_before(offset).place, offset, max_bytes)
    if not found:  # one between the mark and the offset may be damaged
        block = block_at(files, segment, offset)
        found = _read_from(files, segment, block.place, offset, max_bytes) if block is not None else found
    return found


def _read_from(files: Files, segment: Segment, place: int, offset: int, max_bytes: int) -> list[Stored]:
    end, found, took = segment.end, list[Stored](), 0
    for stored in blocks_of(files, segment.path, place, None):
        if stored.stamp.base >= end or (not found and stored.stamp.base > offset):
            break
        if stored.stamp.base + stored.block.count > offset:
            found.append(stored)
            took += len(stored.data)
            if took >= max_bytes:
                break
    return found
