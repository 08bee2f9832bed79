"""The blocks of one part: a tail in memory, and segments behind it.

    append ──▶ tail ──write──▶ page cache ──sync──▶ disk         `synced` says up to which offset a power cut leaves everything
    read   ◀── tail, or checked blocks of a segment, or a gap

Blocks come from committed entries and keep their offsets, so that a replay after a crash finds those that are there and adds the
rest.

Source: docs/topics.md, "How it is stored".
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Final

from pixiu.wire.block import Block, Stamp, stamped
from topic.storage.files import Files
from topic.storage.segment import Gap, Segment, Stored, base_of, blocks_of, name_of

SEGMENT_BYTES: Final = 16 << 20


class PartLog:
    """The tail and the segments of a part.

    Args:
        files: where it lies.
        folder: of this part.
        segment_bytes: size at which a new segment begins.
    """

    def __init__(self, files: Files, folder: str, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._files, self._folder, self._segment_bytes = files, folder, segment_bytes
        self.segments: list[Segment] = []
        """Rising; only the last is written."""
        self.end = 0
        """Offset of the next block."""
        self.synced = 0
        """Offset up to which everything is durable."""
        self._tail: deque[tuple[Stamp, bytes, int]] = deque()
        """(stamp, block, count) of what is not written yet."""
        self._dirty: dict[str, None] = {}
        self._new_names = False
        self.gaps: list[Gap] = []
        """Offsets that were missing when the part was opened."""

    def open(self, first: int, end: int) -> None:
        """Find what is there. The state says that [first, end) was synced: what is missing of it is a gap. What is whole beyond
        `end` is kept: the log's replay brings it again. What is torn is cut."""
        self._files.make_folder(self._folder)
        bases = [base for name in self._files.names(self._folder) if (base := base_of(name)) is not None]
        self.segments = [Segment(self._path(base), base, behind) for base, behind in pairwise([*bases, end])]
        at = first
        while self.segments and self.segments[-1].base > end:
            self._files.remove(self.segments.pop().path)  # the replay brings it again
        if self.segments:
            last = self.segments[-1]
            last.scan(self._files)
            at = last.end
            if at >= end:  # else it is damaged, and is left for a repair; a new segment follows
                self._files.truncate(last.path, last.size)
            self._dirty[last.path] = None
        self._new_names = True  # a killed process may have made some and synced none
        self.end = max(at, end)
        if at < end:
            self.gaps.append(Gap(max(at, first), end))
        self.synced = min(self.end, end)

    def _path(self, base: int) -> str:
        return f"{self._folder}/{name_of(base)}"

    @property
    def first(self) -> int:
        """The lowest offset of which something is kept."""
        return self.segments[0].base if self.segments else self._tail[0][0].base if self._tail else self.end

    @property
    def stored_bytes(self) -> int:
        """Bytes of segments that were written or scanned, and of the tail."""
        return sum(segment.size for segment in self.segments) + self.tail_bytes

    @property
    def tail_bytes(self) -> int:
        """Bytes that are not written yet."""
        return sum(len(block) for _, block, _ in self._tail)

    # --- writing

    def append(self, stamp: Stamp, block: bytes, count: int) -> None:
        """Take the next block, or one that is there already."""
        if stamp.base < self.end:
            return
        assert stamp.base == self.end, (self._folder, stamp.base, self.end)
        self._tail.append((stamp, block, count))
        self.end += count

    def write(self) -> None:
        """Hand the tail to the system. Raises DiskFull, DiskFailed: what was not written stays in the tail."""
        while self._tail:
            stamp, block, count = self._tail[0]
            data = stamped(block, stamp)
            segment = self._segment_for(stamp.base)
            self._files.write(segment.path, segment.size, data)
            segment.note(stamp, len(data), count)
            self._dirty[segment.path] = None
            self._tail.popleft()

    def _segment_for(self, base: int) -> Segment:
        last = self.segments[-1] if self.segments else None
        if last is None or last.size >= self._segment_bytes or last.end != base:
            path = self._path(base)
            self._files.create(path)
            last = Segment(path, base, base, scanned=True)
            self.segments.append(last)
            self._new_names = True
        return last

    def sync(self) -> None:
        """Make everything that was written durable. Raises DiskFailed."""
        up_to = self._tail[0][0].base if self._tail else self.end
        for path in list(self._dirty):
            self._files.sync(path)
            del self._dirty[path]
        if self._new_names:
            self._files.sync_folder(self._folder)
            self._new_names = False
        self.synced = up_to

    def trim(self, first: int) -> None:
        """Remove the segments that lie wholly below an offset; the last one stays."""
        while len(self.segments) > 1 and self.segments[1].base <= first:
            gone = self.segments.pop(0)
            self._files.remove(gone.path)
            self._dirty.pop(gone.path, None)
            self._new_names = True
        self.gaps = [gap for gap in self.gaps if gap.high > first]

    # --- reading

    def read(self, offset: int, max_bytes: int) -> list[Stored | Gap]:
        """Blocks from the one that holds an offset on, at least one if there is one, and what is missing between them. Ends where
        nothing more is known, or at a gap."""
        found, took = list[Stored | Gap](), 0
        while offset < self.end and took < max_bytes:
            part = self._read_segment(offset, max_bytes - took) or self._read_tail(offset, max_bytes - took)
            if not part:
                part = [Gap(offset, self._behind(offset))]
            found += part
            took += sum(len(each.data) for each in part if isinstance(each, Stored))
            last = part[-1]
            if isinstance(last, Gap):
                break
            offset = last.stamp.base + last.block.count
        return found

    def _segment_at(self, offset: int) -> Segment | None:
        for number in range(len(self.segments) - 1, -1, -1):
            segment = self.segments[number]
            if segment.base <= offset:
                if not segment.scanned:
                    segment.scan(self._files, segment.end)
                return segment if offset < segment.end else None
        return None

    def _read_segment(self, offset: int, max_bytes: int) -> list[Stored | Gap]:
        segment, found, took = self._segment_at(offset), list[Stored | Gap](), 0
        if segment is None:
            return found
        for stored in blocks_of(self._files, segment.path, segment.place_of(offset), None):
            if stored.stamp.base >= segment.end or (not found and stored.stamp.base > offset):
                break
            if stored.stamp.base + stored.block.count > offset:
                found.append(stored)
                took += len(stored.data)
                if took >= max_bytes:
                    break
        return found

    def _read_tail(self, offset: int, max_bytes: int) -> list[Stored | Gap]:
        found, took = list[Stored | Gap](), 0
        for stamp, block, count in self._tail:
            if stamp.base + count > offset and took < max_bytes:
                if not found and stamp.base > offset:
                    break
                data = stamped(block, stamp)
                found.append(Stored(stamp, Block.checked(block), data))
                took += len(data)
        return found

    def _behind(self, offset: int) -> int:
        """The offset from which on something may be readable again, after a block that is not."""
        segment = self._segment_at(offset)
        if segment is not None:
            mark = segment.next_mark(offset)
            return mark.base if mark else segment.end
        later = [each.base for each in self.segments if each.base > offset]
        return min([*later, *(stamp.base for stamp, _, _ in self._tail if stamp.base > offset), self.end])

    # --- by time and size

    def offset_at(self, at_us: int) -> int:
        """The first offset that was appended at a time or later; `end` if there is none."""
        found = self.first
        for segment in self.segments:
            if not segment.scanned:
                segment.scan(self._files, segment.end)
            if segment.last_us >= at_us:
                found = segment.offset_at(at_us - 1)
                break
        while found < self.end:
            for each in self.read(found, 1 << 20):
                if isinstance(each, Stored):
                    if each.stamp.at_us >= at_us:
                        return each.stamp.base
                    found = each.stamp.base + each.block.count
                else:
                    found = each.high
        return self.end

    def expired(self, before_us: int, max_bytes: int) -> int:
        """The offset below which retention may drop everything: whole segments of which the last block is older than a time, and
        the oldest ones while there are more bytes than allowed."""
        left, keep = self.stored_bytes, self.first
        for segment, behind in pairwise(self.segments):
            if not segment.scanned:
                segment.scan(self._files, segment.end)
            if segment.last_us >= before_us and left <= max_bytes:
                break
            left -= segment.size
            keep = behind.base
        return keep
