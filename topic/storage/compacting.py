"""Removing messages from the files of a part: those that an entry of the log has named, some time after it.

    COMPACT ──▶ offsets that are to go, in a row of the table with the next flush
            ──▶ a closed file that has some ──a thread: copy without them, sync──▶ the copy takes its name ──▶ they are done

The entry says which messages go, so it does not matter when a replica does it, or which messages it has in which file. A crash
leaves the file or its copy, and the row: it is done again, and removes nothing then. The file that is written is left alone until
another one follows.

Source: docs/topics.md, "Compaction".
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from topic.storage.cutting import cut, joined, within, without
from topic.storage.files import Files
from topic.storage.part_log import PartLog
from topic.storage.segment import Segment, Stored, blocks_of, heads_of

REMOVED_KEY: Final = b"\2"
"""First byte of the keys of rows that are this replica's own: u64 part → ranges of offsets that are to go from its files."""
COPY: Final = ".new"
WRITE_BYTES: Final = 1 << 20
_PART: Final = struct.Struct(">Q")
_RANGE: Final = struct.Struct("<QQ")


class Job(NamedTuple):
    """A file to be copied without some messages."""

    part: int
    log: PartLog
    segment: Segment
    removed: list[tuple[int, int]]

    @property
    def copy(self) -> str:
        """Path of the copy."""
        return self.segment.path + COPY


class Compacting:
    """Offsets whose messages are to go, by part."""

    def __init__(self) -> None:
        self._removed: dict[int, list[tuple[int, int]]] = {}
        self._changed: dict[int, None] = {}
        """Parts whose rows differ from the table's."""
        self._unreadable: set[str] = set()
        """Files with damaged blocks, which are left alone until they are mended, or the process starts again."""

    def add(self, part: int, ranges: list[tuple[int, int]]) -> None:
        """An entry has named messages."""
        self._removed[part] = joined([*self._removed.get(part, ()), *ranges])
        self._changed[part] = None

    def of(self, part: int) -> list[tuple[int, int]]:
        """Offsets that are to go from the files of a part."""
        return self._removed.get(part, [])

    def forget(self, part: int, low: int = 0, high: int = 1 << 62) -> None:
        """Nothing of [low, high) is to go any more: it is done, or the part is dropped."""
        left = without(self._removed.pop(part, []), low, high)
        if left:
            self._removed[part] = left
        self._changed[part] = None

    def rows(self) -> list[tuple[bytes, bytes | None]]:
        """Take the rows that have changed."""
        changed, self._changed = self._changed, {}
        return [(REMOVED_KEY + _PART.pack(part), _packed(self._removed.get(part))) for part in changed]

    def load(self, rows: Mapping[bytes, bytes]) -> None:
        """Become what rows say."""
        for key, value in rows.items():
            self._removed[_PART.unpack_from(key, 1)[0]] = list(_RANGE.iter_unpack(value))

    def mended(self) -> None:
        """Damaged files may be whole again."""
        self._unreadable.clear()

    def unreadable(self, job: Job) -> None:
        """A file cannot be read to its end."""
        self._unreadable.add(job.segment.path)

    def jobs(self, logs: Mapping[int, PartLog]) -> Iterator[Job]:
        """Files that can be copied now. A last file with something to go is to be closed: the next block begins another one."""
        for part, ranges in list(self._removed.items()):
            log = logs.get(part)
            if log is None or not log.segments:
                continue
            if within(ranges, log.segments[-1].base, log.segments[-1].end):
                log.roll()
            for segment in log.segments[:-1]:
                removed = within(ranges, segment.base, segment.end)
                if removed and segment.path not in self._unreadable:
                    yield Job(part, log, segment, removed)


def _packed(ranges: list[tuple[int, int]] | None) -> bytes | None:
    return b"".join(_RANGE.pack(*each) for each in ranges) if ranges else None


def write_copy(files: Files, job: Job) -> int:
    """Write and sync the copy of a file; to be called in a thread. Returns its size; -1: the file cannot be read to its end.
    Raises DiskFull, DiskFailed."""
    files.create(job.copy)
    size, reached, pieces, took = 0, job.segment.base, list[bytes](), 0

    def read() -> Iterator[Stored]:
        nonlocal reached
        for stored in blocks_of(files, job.segment.path, 0, job.segment.base):
            if stored.stamp.base >= job.segment.end:
                return
            reached = stored.stamp.base + stored.block.count
            yield stored

    for each in cut(read(), job.removed):
        pieces.append(each.data)
        took += len(each.data)
        if took >= WRITE_BYTES:
            files.write(job.copy, size, b"".join(pieces))
            size, pieces, took = size + took, [], 0
    files.write(job.copy, size, b"".join(pieces))
    if reached != job.segment.end:
        files.remove(job.copy)
        return -1
    files.sync(job.copy)
    return size + took


def write_spliced(files: Files, job: Job, blocks: Sequence[Stored]) -> int:
    """Write and sync a copy of a file in which these blocks, which follow each other, are in the place of what cannot be read
    there, however many bytes that has; to be called in a thread. Returns its size; -1: they do not fit.

    Raises DiskFull, DiskFailed.
    """
    segment, low, high = job.segment, blocks[0].stamp.base, blocks[-1].stamp.base + blocks[-1].block.count
    place, at, reached, behind = 0, 0, segment.base, segment.size if high == segment.end else -1
    for stamp, count, size in heads_of(files, segment.path, segment.base):
        if stamp.base >= high:
            behind = at if stamp.base == high else behind
            break
        at += size
        if stamp.base < low:
            place, reached = at, stamp.base + count
    mark = segment.next_mark(blocks[-1].stamp.base)
    if behind < 0 and mark is not None and mark.base == high:
        behind = mark.place
    if reached != low or behind < 0:
        return -1
    files.create(job.copy)
    written = _copy(files, segment.path, job.copy, (0, place), 0)
    data = b"".join(each.data for each in blocks)
    files.write(job.copy, written, data)
    written = _copy(files, segment.path, job.copy, (behind, segment.size), written + len(data))
    files.sync(job.copy)
    return written


def _copy(files: Files, path: str, to: str, span: tuple[int, int], place: int) -> int:
    """Copy some bytes of a file; returns the place behind them."""
    for at in range(*span, WRITE_BYTES):
        data = files.read(path, at, min(WRITE_BYTES, span[1] - at))
        files.write(to, place, data)
        place += len(data)
    return place


def take_copy(files: Files, job: Job, size: int) -> bool:
    """Put the copy in the place of its file, now. Returns False if the file is no more. The folder has to be synced."""
    log, old = job.log, job.segment
    if old not in log.segments:
        files.remove(job.copy)
        return False
    files.rename(job.copy, old.path)
    made = Segment(old.path, old.base, old.end, size)
    log.segments = [made if each is old else each for each in log.segments]  # new ones: a thread may read the others
    return True


def remove_copies(files: Files, folder: str) -> None:
    """Remove what a crash has left of copies."""
    for name in files.names(folder):
        if name.endswith(COPY):
            files.remove(f"{folder}/{name}")
