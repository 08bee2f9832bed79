"""The blocks of one part: a tail in memory, and segments behind it.

    append ──▶ tail ──freeze──▶ Writing ──a thread: write, sync──▶ written: segments have it, and the tail no longer
    read   ◀── tail, or checked blocks of a segment, or a gap

Blocks come from committed entries and keep their offsets, so that a replay after a crash finds those that are there and adds the
rest. Everything here belongs to the event loop but `write_part` and `sync_part`, which change files alone.

Source: docs/topics.md, "How it is stored".
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from pixiu.wire.block import STAMP_BYTES, Block, Stamp, stamped
from topic.storage.files import Files
from topic.storage.segment import (
    READ_BYTES,
    Gap,
    Segment,
    Stored,
    base_of,
    block_at,
    heads_of,
    name_of,
    read_segment,
    whole_heads_of,
)

SEGMENT_BYTES: Final = 16 << 20


class Run(NamedTuple):
    """Blocks that are written to one file, one behind the other."""

    path: str
    new: bool
    place: int
    blocks: list[tuple[Stamp, bytes, int]]
    """(stamp, block, count)."""


class Last(NamedTuple):
    """The last file of a part after a flush."""

    base: int
    size: int


class Writing(NamedTuple):
    """Everything of a part that a flush writes and syncs."""

    folder: str
    new_folder: bool
    runs: Sequence[Run]
    paths: Sequence[str]
    """Files to be synced."""
    names: bool
    """True if the folder is to be synced."""
    end: int
    """Offset up to which everything is durable then."""
    last: Last


class Patch(NamedTuple):
    """Blocks that take the place of some that could not be read."""

    folder: str
    path: str
    base: int
    """Of the file; that of the first block: the file is new."""
    low: int
    high: int
    next_place: int
    """Place of what follows them in the file, by the index; -1: it does not know."""
    data: bytes


class PartLog:
    """The tail and the segments of a part.

    Args:
        files: where it lies.
        folder: of this part.
        segment_bytes: size at which a new segment begins.
    """

    def __init__(self, files: Files, folder: str, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._files, self.folder, self._segment_bytes = files, folder, segment_bytes
        self.segments: list[Segment] = []
        """Rising; only the last is written."""
        self.end = 0
        """Offset of the next block."""
        self.synced = 0
        """Offset up to which everything is durable."""
        self._tail: list[tuple[Stamp, bytes, int]] = []
        """(stamp, block, count) of what is not written yet."""
        self.tail_bytes = 0
        """Bytes of these blocks."""
        self.appended_bytes = 0
        """Bytes of all blocks that came since the part was opened here."""
        self.last_us = 0
        """Time of appending of the last of them; 0: none came."""
        self._dirty: dict[str, None] = {}
        self._new_folder = True
        self._new_names = self._rolled = False
        self.gaps: list[Gap] = []
        """Offsets that were missing when the part was opened."""

    def open(self, first: int, end: int, last: Last) -> None:
        """Find what is there, by names and sizes alone. The state says that [first, end) was synced, in files up to the last one:
        what is missing at the end is a gap. What lies beyond goes: the log's replay brings it again. A new file follows."""
        self._files.make_folder(self.folder)
        bases = [base for name in self._files.names(self.folder) if (base := base_of(name)) is not None]
        for base in bases:
            if base >= end:
                self._files.remove(self._path(base))
        bases = [base for base in bases if base < end]
        self.segments = [
            Segment(self._path(base), base, behind, self._files.size(self._path(base))) for base, behind in pairwise([*bases, end])
        ]
        found = self.segments[-1] if self.segments else None
        if found is not None and found.base == last.base and found.size > last.size:
            self._files.truncate(found.path, last.size)
            found.size = last.size
            self._dirty[found.path] = None
        self._new_folder, self._rolled = False, True
        self._new_names = True  # a killed process may have made some and synced none
        self.end = self.synced = end
        if first < end and (found is None or (found.base, found.size) != last):
            self.gaps.append(self._missing(first))

    def _missing(self, first: int) -> Gap:
        """The gap at the end, or the first part of it."""
        at = first
        if self.segments:
            last = self.segments[-1]
            at = max([first, last.base, *(stamp.base + count for stamp, count, _ in whole_heads_of(self._files, last))])
        return self.gap_at(at)

    def _path(self, base: int) -> str:
        return f"{self.folder}/{name_of(base)}"

    @property
    def first(self) -> int:
        """The lowest offset of which something is kept."""
        return self.segments[0].base if self.segments else self._tail[0][0].base if self._tail else self.end

    @property
    def stored_bytes(self) -> int:
        """Bytes of segments and of the tail."""
        return sum(segment.size for segment in self.segments) + self.tail_bytes

    def bytes_from(self, offset: int) -> int:
        """Bytes of segments from about an offset on."""
        segments = self.segments
        first = max(bisect_right(segments, offset, key=lambda segment: segment.base) - 1, 0)
        begin = segments[first].mark_before(offset).place if segments and segments[first].base < offset else 0
        return max(0, sum(segment.size for segment in segments[first:] if segment.end > offset) - begin) if segments else 0

    # --- writing

    def append(self, stamp: Stamp, block: bytes, count: int) -> bool:
        """Take the next block. Returns False for one that is there already."""
        if stamp.base < self.end:
            return False
        assert stamp.base == self.end, (self.folder, stamp.base, self.end)
        self._tail.append((stamp, block, count))
        self.tail_bytes += len(block)
        self.appended_bytes += len(block)
        self.last_us = stamp.at_us
        self.end += count
        return True

    def roll(self) -> None:
        """Begin a new segment with the next block: the last one stays as it is."""
        self._rolled = bool(self.segments and self.segments[-1].size)

    def patch(self, blocks: Sequence[Stored], first: int = 0) -> Patch:
        """Place of blocks that follow each other and fill a gap. first: retention has dropped what is below it."""
        low, high = blocks[0].stamp.base, blocks[-1].stamp.base + blocks[-1].block.count
        data, segment = b"".join(each.data for each in blocks), self.segment_at(low)
        # In front of the oldest ones may be a gap for ever, which a file of their own does not have.
        if segment is None or (segment.base < low <= first and high == segment.end):
            return Patch(self.folder, self._path(low), low, low, high, -1, data)
        mark = segment.next_mark(blocks[-1].stamp.base)
        next_place = mark.place if mark is not None and mark.base == high else -1
        return Patch(self.folder, segment.path, segment.base, low, high, next_place, data)

    def patched(self, patch: Patch) -> None:
        """Take over blocks that were written in place of a gap."""
        if patch.base == patch.low and all(segment.base != patch.base for segment in self.segments):
            before, made = self.segment_at(patch.low), Segment(patch.path, patch.base, patch.high, len(patch.data))
            if before is not None:
                before.close(before.size, patch.low)
            self.segments = sorted([*self.segments, made], key=lambda segment: segment.base)
            self._rolled = self._rolled or made is self.segments[-1]
        else:
            segment = self.segment_at(patch.low)
            if segment is not None and (segment is not self.segments[-1] or self._rolled):
                segment.close(max(segment.size, self._files.size(segment.path)), segment.end)
        self.gaps = [gap for gap in self.gaps if not (patch.low <= gap.low and gap.high <= patch.high)]

    def freeze(self) -> Writing | None:
        """Everything to be written and synced now; None: nothing. Changes nothing: `written` does when it has happened."""
        if not (self._tail or self._dirty or self._new_names):
            return None
        runs, last = list[Run](), self.segments[-1] if self.segments and not self._rolled else None
        path, base, size, end = (last.path, last.base, last.size, last.end) if last else ("", 0, 0, -1)
        for stamp, block, count in self._tail:
            if end != stamp.base or size >= self._segment_bytes:
                path, base, size = self._path(stamp.base), stamp.base, 0
                runs.append(Run(path, True, 0, []))
            elif not runs:
                runs.append(Run(path, False, size, []))
            runs[-1].blocks.append((stamp, block, count))
            size, end = size + STAMP_BYTES + len(block), stamp.base + count
        paths = list(dict.fromkeys((*self._dirty, *(run.path for run in runs))))
        names = self._new_names or any(run.new for run in runs)
        return Writing(self.folder, self._new_folder, runs, paths, names, self.end, Last(base, size))

    def written(self, writing: Writing) -> None:
        """Take over what a flush has written and synced."""
        for run in writing.runs:
            if run.new:
                base = run.blocks[0][0].base
                self.segments.append(Segment(run.path, base, base, scanned=True))
                self._rolled = False
            for stamp, block, count in run.blocks:
                self.segments[-1].note(stamp, STAMP_BYTES + len(block), count)
                self.tail_bytes -= len(block)
        self._tail = self._tail[sum(len(run.blocks) for run in writing.runs) :]  # a new list: a thread may read the other
        for path in writing.paths:
            self._dirty.pop(path, None)
        self._new_folder, self._new_names = False, self._new_names and not writing.names
        self.synced = writing.end

    def trim(self, first: int) -> list[str]:
        """Forget the segments that lie wholly below an offset; the last one stays. Returns their files, to be removed."""
        if len(self.segments) < 2 or self.segments[1].base > first:
            return []
        below = sum(behind.base <= first for behind in self.segments[1:])
        gone = [segment.path for segment in self.segments[:below]]
        if gone:
            self.segments = self.segments[below:]  # a new list: a thread may read the other
            self._new_names = True
        for path in gone:
            self._dirty.pop(path, None)
        self.gaps = [gap for gap in self.gaps if gap.high > first]
        return gone

    # --- reading

    def read(self, offset: int, max_bytes: int) -> list[Stored | Gap]:
        """Blocks from the one that holds an offset on, at least one if there is one, and what is missing between them. Ends where
        nothing more is known, or at a gap."""
        found, took = list[Stored | Gap](), 0
        while offset < self.end and took < max_bytes:
            segment = self.segment_at(offset)
            part: Sequence[Stored | Gap] = (
                read_segment(self._files, segment, offset, max_bytes - took)
                if segment
                else self.read_tail(offset, max_bytes - took)
            )
            if not part:
                part = [self.gap_at(offset)]
            found += part
            took += sum(len(each.data) for each in part if isinstance(each, Stored))
            last = part[-1]
            if isinstance(last, Gap):
                break
            offset = last.stamp.base + last.block.count
        return found

    def segment_at(self, offset: int) -> Segment | None:
        """The segment that has an offset, or should have it."""
        segments = self.segments
        number = bisect_right(segments, offset, key=lambda segment: segment.base) - 1
        return segments[number] if number >= 0 and offset < segments[number].end else None

    def read_tail(self, offset: int, max_bytes: int) -> list[Stored]:
        """Blocks that are not written yet, from the one that holds an offset on."""
        found, took, tail = list[Stored](), 0, self._tail
        begin = bisect_right(tail, offset, key=lambda each: each[0].base) - 1
        for stamp, block, count in tail[begin:] if begin >= 0 else ():
            if stamp.base + count > offset and took < max_bytes:
                data = stamped(block, stamp)
                found.append(Stored(stamp, Block.checked(block), data))
                took += len(data)
            else:
                break
        return found

    def gap_at(self, offset: int) -> Gap:
        """The gap that begins with an offset that cannot be read, up to where something may be readable again."""
        segment = self.segment_at(offset)
        if segment is not None:
            block = block_at(self._files, segment, offset)
            mark = segment.next_mark(offset)
            return Gap(offset, block.end if block else mark.base if mark else segment.end)
        later = [each.base for each in self.segments if each.base > offset]
        return Gap(offset, min([*later, *(stamp.base for stamp, _, _ in self._tail if stamp.base > offset), self.end]))

    def begin_of(self, offset: int) -> int:
        """The first offset of the block that has or had an offset, if that can be told. May be called in a thread."""
        segment = self.segment_at(offset)
        block = block_at(self._files, segment, offset) if segment is not None else None
        return block.base if block is not None else offset

    # --- by time and size

    def offset_at(self, at_us: int) -> int:
        """The first offset that was appended at a time or later; `end` if there is none. Times rise. May be called in a thread."""
        found, segments = self.first, self.segments
        earlier = self._earlier(segments, at_us)
        if earlier:
            segment = segments[earlier - 1]
            segment.survey(self._files)
            found = segment.offset_at(at_us - 1)
        while found < self.end:
            segments = self.segments
            for each in self.read(found, READ_BYTES):
                if isinstance(each, Stored):
                    if each.stamp.at_us >= at_us:
                        return each.stamp.base
                    found = each.stamp.base + each.block.count
                elif self.segments is segments:  # else compaction has put another file in the place of one: read again
                    found = each.high
        return self.end

    def _earlier(self, segments: Sequence[Segment], at_us: int) -> int:
        """Number of segments up to the last one that is known to begin before a time."""
        low, high = 0, len(segments)
        while low < high:
            middle = at = (low + high) // 2
            first_us = segments[at].first_us(self._files)
            while first_us is None and at + 1 < high:  # it is damaged: the next one knows
                at += 1
                first_us = segments[at].first_us(self._files)
            if first_us is not None and first_us < at_us:
                low = at + 1
            else:
                high = middle
        return low

    def first_of(self, offset: int) -> int:
        """The lowest offset of the segment that holds an offset, or of the last segment: those before it may go."""
        return max((segment.base for segment in self.segments if segment.base <= offset), default=0)

    def expired(self, before_us: int, max_bytes: int, *, sealed: bool = False) -> int:
        """The offset below which retention may drop everything: whole segments of which the last block is older than a time, and
        the oldest ones while there are more bytes than allowed. The last one stays, unless it is as old and the part is sealed.
        May be called in a thread."""
        left, keep, segments = self.stored_bytes, self.first, list(self.segments)
        for segment, behind in pairwise(segments):
            segment.survey(self._files)
            if segment.last_us >= before_us and left <= max_bytes:
                return keep
            left -= segment.size
            keep = behind.base
        if sealed and segments and not self._tail:
            segments[-1].survey(self._files)
            if segments[-1].last_us < before_us:
                return self.end
        return keep


def write_part(files: Files, writing: Writing) -> None:
    """Hand the blocks of a flush to the system. Raises DiskFull, DiskFailed: it can be done again."""
    if writing.new_folder:
        files.remove_folder(writing.folder)  # of a part with the same number that was dropped
        files.make_folder(writing.folder)
    for run in writing.runs:
        if run.new:
            files.create(run.path)
        files.write(run.path, run.place, b"".join(stamped(block, stamp) for stamp, block, _ in run.blocks))


def write_patch(files: Files, patch: Patch) -> bool:
    """Write blocks in place of a gap, durably; may be called in a thread. Returns False if they do not fit there. Raises DiskFull,
    DiskFailed."""
    place, at, reached, next_place = 0, 0, patch.base, patch.next_place
    if patch.path.rpartition("/")[2] in files.names(patch.folder):
        for stamp, count, size in heads_of(files, patch.path, patch.base):
            if stamp.base >= patch.high:
                next_place = at if stamp.base == patch.high else next_place
                break
            at += size
            if stamp.base < patch.low:
                place, reached = at, stamp.base + count
        end = place + len(patch.data)
        if reached != patch.low or (end != next_place if next_place >= 0 else end < files.size(patch.path)):
            return False
    elif patch.base != patch.low:
        return False
    else:
        files.create(patch.path)
    files.write(patch.path, place, patch.data)
    files.sync(patch.path)
    files.sync_folder(patch.folder)
    return True


def sync_part(files: Files, writing: Writing) -> None:
    """Make everything that was written durable. Raises DiskFailed."""
    for path in writing.paths:
        files.sync(path)
    if writing.names:
        files.sync_folder(writing.folder)
