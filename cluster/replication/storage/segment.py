"""One file of a log: entries end to end, after the position in its name.

    00000000000000004096-00000003.log      begins after counter 4096 of epoch 3
    └─ sparse index: (counter, offset) every 64 KiB, and where each epoch begins; both made by reading the file once

Source: docs/protocol.md, "Record", docs/stores.md.
"""

from __future__ import annotations

import errno
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from cluster.replication.model import Entry, Position
from cluster.replication.storage.entry import HEAD_BYTES, Truncated, decode_one, encode
from cluster.replication.storage.label import UNREADABLE
from pixiu.errors import DiskFailed, DiskFull, LogDamaged, MalformedData

INDEX_EVERY_BYTES: Final = 65_536
READ_BYTES: Final = 1 << 20
SUFFIX: Final = ".log"


def read_at(fd: int, size: int, offset: int) -> bytes:
    """Read bytes of a file. Raises MalformedData if the disk cannot read them: unreadable data counts as wrong data."""
    try:
        return os.pread(fd, size, offset)
    except OSError as problem:
        if problem.errno not in UNREADABLE:
            raise
        raise MalformedData(f"the disk cannot read byte {offset}: {problem.strerror}") from problem


def name_of(base: Position) -> str:
    """Name of the segment that begins after a position."""
    return f"{base.counter:020d}-{base.epoch:010d}{SUFFIX}"


def base_of(name: str) -> Position | None:
    """The position in a segment's name; None for other names."""
    counter, dash, epoch = name.removesuffix(SUFFIX).partition("-")
    if not name.endswith(SUFFIX) or not dash or not (counter.isdigit() and epoch.isdigit()):
        return None
    return Position(int(epoch), int(counter))


def walk(fd: int, offset: int, end: int, chunk: int) -> Iterator[tuple[Entry, int]]:
    """Entries of a file between two offsets, each with its offset. Raises MalformedData at the first broken one."""
    buffer, at = b"", 0
    while offset + at < end:
        try:
            entry, behind = decode_one(buffer, at, len(buffer))
        except Truncated as short:
            offset, at = offset + at, 0
            if offset + short.needs > end:
                raise
            buffer = read_at(fd, min(max(short.needs, chunk), end - offset), offset)
            if len(buffer) < short.needs:
                raise
            continue
        yield entry, offset + at
        at = behind


class Segment:
    """An open segment. One thread writes; others may read data that was there before they began."""

    def __init__(self, path: Path, base: Position, create: bool = False) -> None:
        self.path = path
        self.base = base
        self.fd = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0), 0o644)
        self.size = os.fstat(self.fd).st_size
        """Offset at which valid entries end, after a scan."""
        self.last = base
        self.scanned = create
        self.dirty = create
        """True if written and not synced."""
        self._index: list[tuple[int, int]] = [(base.counter + 1, 0)]
        self._epochs: list[tuple[int, int]] = []
        """(first counter, epoch) of each epoch that begins here."""

    def scan(self) -> str | None:
        """Read and check every entry. Returns the problem of the first bad one; `size` and `last` are before it."""
        end = os.fstat(self.fd).st_size
        self.size, self.last = 0, self.base
        self._index, self._epochs = [(self.base.counter + 1, 0)], []
        self.scanned = True
        try:
            for entry, offset in walk(self.fd, 0, end, READ_BYTES):
                if entry.counter != self.last.counter + 1 or entry.epoch < self.last.epoch:
                    return f"{self.path.name}, byte {offset}: {entry.position} follows {self.last}"
                self._note(entry, offset)
                self.size = offset + HEAD_BYTES + len(entry.payload)
        except MalformedData as problem:
            return f"{self.path.name}, byte {self.size}: {problem}"
        return None

    def adopt(self, other: Segment) -> None:
        """Take over the results of another scan of the same file."""
        self.size, self.last, self.scanned = other.size, other.last, True
        self._index, self._epochs = other._index, other._epochs

    def _note(self, entry: Entry, offset: int) -> None:
        if not self._epochs or self._epochs[-1][1] != entry.epoch:
            self._epochs.append((entry.counter, entry.epoch))
        if offset - self._index[-1][1] >= INDEX_EVERY_BYTES:
            self._index.append((entry.counter, offset))
        self.last = entry.position

    def append(self, entries: Sequence[Entry]) -> None:
        """Write entries that follow the end. Raises DiskFull (nothing was written) or DiskFailed."""
        data = encode(entries)
        try:
            written = os.pwrite(self.fd, data, self.size)
            while written < len(data):
                written += os.pwrite(self.fd, memoryview(data)[written:], self.size + written)
        except OSError as problem:
            self._undo(problem)
        offset = self.size
        for entry in entries:
            self._note(entry, offset)
            offset += HEAD_BYTES + len(entry.payload)
        self.size = offset
        self.dirty = True

    def _undo(self, problem: OSError) -> None:
        try:
            os.ftruncate(self.fd, self.size)
        except OSError as worse:
            raise DiskFailed(f"{self.path}: {worse.strerror}") from worse
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"{self.path.parent}: no space left for the log; free some, then writes continue") from problem
        raise DiskFailed(f"{self.path}: {problem.strerror}") from problem

    def sync(self) -> None:
        """Make written entries durable. Raises DiskFailed."""
        try:
            os.fdatasync(self.fd)
        except OSError as problem:
            raise DiskFailed(f"{self.path}: {problem.strerror}") from problem

    def cut(self, after: int) -> None:
        """Drop the entries beyond a counter, durably. Raises DiskFailed, LogDamaged."""
        if after < self.last.counter:
            epoch = self.epoch_at(after)
            self.size = self._offset_of(after + 1)
            self.last = Position(epoch, after)
            self._index = [(c, o) for c, o in self._index if c <= after + 1]
            self._epochs = [(c, e) for c, e in self._epochs if c <= after]
        try:
            os.ftruncate(self.fd, self.size)
        except OSError as problem:
            raise DiskFailed(f"{self.path}: {problem.strerror}") from problem
        self.sync()

    def write_again(self, after: int) -> None:
        """Rewrite the entries beyond a counter in place and make them durable; an interruption loses none of them. Raises DiskFull,
        DiskFailed."""
        offset, end = self._offset_of(after + 1), self.size
        try:
            while offset < end:
                data = os.pread(self.fd, min(READ_BYTES, end - offset), offset)
                if not data:
                    raise DiskFailed(f"{self.path}: it ends before byte {end}")
                offset += os.pwrite(self.fd, data, offset)
        except OSError as problem:
            if problem.errno in (errno.ENOSPC, errno.EDQUOT):  # on a file system that never writes in place
                raise DiskFull(f"{self.path.parent}: no space to write the log again; free some, then start again") from problem
            raise DiskFailed(f"{self.path}: {problem.strerror}") from problem
        self.sync()
        self.dirty = False

    def epoch_at(self, counter: int) -> int:
        """Epoch of an entry between the base and the end."""
        found = bisect_right(self._epochs, (counter, 1 << 62)) - 1
        return self._epochs[found][1] if found >= 0 else self.base.epoch

    def start_of_epoch(self, counter: int) -> int:
        """The first counter in this segment that has this entry's epoch."""
        found = bisect_right(self._epochs, (counter, 1 << 62)) - 1
        return self._epochs[found][0] if found >= 0 else counter

    def _offset_of(self, counter: int) -> int:
        """Offset of an entry. Raises LogDamaged."""
        at, offset = self._index[bisect_right(self._index, (counter, 1 << 62)) - 1]
        while at < counter:
            try:
                head = read_at(self.fd, 4, offset)
            except MalformedData as problem:
                raise LogDamaged(f"{self.path.name}: the entry {at} is broken: {problem}", self.last.counter) from problem
            size = int.from_bytes(head, "little")
            if len(head) < 4 or size < HEAD_BYTES - 4 or offset + 4 + size > self.size:
                raise LogDamaged(f"{self.path.name}: the entry {at} is broken", self.last.counter)
            offset += 4 + size
            at += 1
        return offset

    def read(self, after: int, max_entries: int, max_bytes: int) -> list[Entry]:
        """Checked entries from `after` + 1 on; at least one if there is one. Raises LogDamaged."""
        found: list[Entry] = []
        if after >= self.last.counter:
            return found
        took = 0
        try:
            for entry, _ in walk(self.fd, self._offset_of(after + 1), self.size, min(max_bytes + HEAD_BYTES, READ_BYTES)):
                if entry.counter != after + 1 + len(found):
                    raise MalformedData(f"it is {entry.position}")
                found.append(entry)
                took += HEAD_BYTES + len(entry.payload)
                if len(found) >= max_entries or took >= max_bytes:
                    break
        except MalformedData as problem:
            raise LogDamaged(
                f"{self.path.name}: the entry {after + 1 + len(found)} is broken: {problem}", self.last.counter
            ) from problem
        return found

    def close(self) -> None:
        """Close the file."""
        os.close(self.fd)
