"""The replicated log of a partition on a disk: segments, a seal, and the checks when it is opened. Blocking.

    ├── member                              identity
    ├── label                               incarnation, promise, seal: one sector
    ├── 00000000000000000000-0000000000.log ┐
    ├── 00000000000000131072-0000000002.log ├ entries; trimmed from the front, cut at the end, by whole files where possible
    └── 00000000000000262144-0000000002.log ┘
                                  ▲       ▲
                                seal     end       bad data beyond the seal is a torn write and is cut;
                                                   bad data before it is damage, and is reported

A power cut may leave a seal that is a tenth of a second old, or slightly more (`LabelFile`). Entries after it may have been
acknowledged, so opening keeps all good ones.

One thread changes the log. `sync`, `finish_sync` and `sync_seal` may run in another thread, one at a time, and so may `read`.

Source: docs/protocol.md, "Record", docs/stores.md, docs/replication.md; PiXiu §6.2.1.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from cluster.replication.model import START, Damage, Entry, Position
from cluster.replication.storage.label import UNREADABLE, Label, LabelFile, load_member
from cluster.replication.storage.segment import Segment, base_of, name_of
from pixiu.durable import make_directory, sync_directory
from pixiu.errors import DiskFailed, DiskFull, LogDamaged

DAMAGED_SUFFIX: Final = ".damaged"
MAX_TAIL_ENTRIES: Final = 8192
MAX_TAIL_BYTES: Final = 8 << 20
"""Limits of the newest entries, which are kept in memory for followers. Policy: beyond either, the older half is read from the
file."""


class SegmentedLog:
    """The log in one directory; `cluster.replication.model.Log` is the part that the core uses.

    Args:
        directory: created if missing. Nobody else may have it open.
        segment_bytes: size beyond which another segment is started.
        verify_from: entries up to this counter are in the state and were verified before: their files are checked
            when they are read, or by `verify`.
        clock: returns monotonic seconds.

    Raises DiskFailed, DiskFull. `damage` describes what is wrong with the contents.
    """

    def __init__(
        self,
        directory: Path,
        *,
        segment_bytes: int = 64 << 20,
        verify_from: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.directory = directory
        make_directory(directory)
        self.segment_bytes = segment_bytes
        self.torn_bytes = 0
        """Bytes of a torn write beyond the seal that were cut when the log was opened."""
        self.damage: Damage | None = None
        self._failed = ""
        self._closed = False
        self._lock = threading.RLock()
        self._label_lock = threading.Lock()
        self._sealing: Label | None = None
        """While the kernel syncs the seal: the label then."""
        self._limit: int | None = None
        """While a sync runs: the counter up to which the entries being synced have not been cut off."""
        self._retired: list[Segment] = []
        self._tail: list[Entry] = []
        self._tail_bytes = 0
        self._label = LabelFile(directory, clock)  # before `member`: a directory with a member and no label has lost something
        self.member, new = load_member(directory)
        self._wanted = self._label.now
        self._segments = self._find()
        if self._wanted.resetting != START:
            self._finish_reset(self._wanted.resetting)
        self._check_identity(new)
        if not self._segments:
            self._segments = [self._create(START)]
        self._verify(verify_from)
        self._make_durable()
        if self._wanted.unclean and self.damage is None:
            self.damage = Damage(self.last, self._wanted.seal, "the log was damaged before and is not repaired yet")

    # --- opening

    def _find(self) -> list[Segment]:
        found = [(base, path) for path in self.directory.iterdir() if (base := base_of(path.name)) is not None]
        return [Segment(path, base) for base, path in sorted(found, key=lambda each: each[0].counter)]

    def _create(self, base: Position) -> Segment:
        segment = Segment(self.directory / name_of(base), base, create=True)
        sync_directory(self.directory)
        return segment

    def _check_identity(self, new: bool) -> None:
        """Check that the member file, the label and the acknowledged segments are present, unless the directory is new."""
        reason = ""
        if self._label.missing and (self._segments or not new):
            reason = "the label is missing or broken"
        elif new and (self._segments or self._wanted.seal != START):
            reason = "the member file is missing or broken"
        elif not self._segments and self._wanted.seal != START:
            reason = "every segment is missing"
        if reason:
            self._mark_unclean()
            last = self._segments[0].base if self._segments else START
            self.damage = Damage(last, self._wanted.seal, reason)

    def _verify(self, verify_from: int) -> None:
        """Check the entries after `verify_from`: cut a torn write, report damage."""
        seal = self._wanted.seal
        for index, segment in enumerate(self._segments):
            following = self._segments[index + 1] if index + 1 < len(self._segments) else None
            if following is not None and following.base.counter <= min(verify_from, seal.counter):
                continue
            problem = segment.scan()
            if problem is None and following is not None and following.base != segment.last:
                problem = f"{following.path.name} follows {segment.last}"
            if problem is None and following is None and segment.last.counter < seal.counter:
                problem = f"the log ends at {segment.last}"
            if problem is None:
                continue
            if segment.last.counter < seal.counter:
                self._damaged(index, problem)
            else:
                self._cut_torn(index)
            return

    def _make_durable(self) -> None:
        """Write entries after the seal again, in place. The process that wrote them is gone, and they may be in the page cache
        alone. After a failed sync the system even marks those pages clean; rewriting makes them dirty in any case. If the seal is
        old they may have been acknowledged, and rewriting in place means that neither a crash nor a power cut loses them."""
        seal = self._wanted.seal.counter
        sync_directory(self.directory)  # a segment whose creation was interrupted may have no durable name
        for segment in self._segments:
            if segment.last.counter > seal:
                segment.write_again(max(seal, segment.base.counter))
        if self.last.counter > max(seal, self.first.counter):
            self._wanted = self._wanted._replace(seal=self.last)
            self._write_label()

    def _cut_torn(self, index: int) -> None:
        """Cut bad entries beyond the seal: a power cut tore them before they were acknowledged."""
        for segment in reversed(self._segments[index + 1 :]):
            self.torn_bytes += segment.path.stat().st_size
            self._remove(segment)
        del self._segments[index + 1 :]
        last = self._segments[index]
        self.torn_bytes += last.path.stat().st_size - last.size
        last.cut(last.last.counter)

    def _damaged(self, index: int, problem: str) -> None:
        """Handle missing acknowledged entries: mark the log durably, set the bad files aside and keep what is before them."""
        kept, aside = self._segments[index], self._segments[index + 1 :]
        if self.damage is None:
            self.damage = Damage(kept.last, self._wanted.seal, problem)
        self._mark_unclean()
        for old in self.directory.glob(f"*{DAMAGED_SUFFIX}"):
            old.unlink()
        try:
            shutil.copyfile(kept.path, f"{kept.path}{DAMAGED_SUFFIX}")
        except OSError as full:
            if full.errno not in UNREADABLE:  # otherwise the part before that place is copied
                raise DiskFull(f"{self.directory}: no space to set a damaged segment aside; free some, then start again") from full
        for segment in reversed(aside):
            segment.path.rename(f"{segment.path}{DAMAGED_SUFFIX}")
            segment.close()
        del self._segments[index + 1 :]
        sync_directory(self.directory)
        kept.cut(kept.last.counter)
        self._wanted = self._wanted._replace(seal=kept.last)
        self._write_label()

    def _mark_unclean(self) -> None:
        self._wanted = self._wanted._replace(unclean=True)
        self._write_label()

    def _write_label(self) -> None:
        """Write the newest label, and make it durable unless only its seal rose. Never called with the lock held, so that nobody
        waits for the disk."""
        with self._label_lock:
            with self._lock:
                label = self._wanted
            if label != self._label.now:
                try:
                    self._label.write(label)
                except DiskFailed as problem:
                    raise self._fail(str(problem)) from problem

    # --- interface of the core

    @property
    def first(self) -> Position:
        """Position before the first kept entry."""
        return self._segments[0].base

    @property
    def last(self) -> Position:
        """Position of the last entry."""
        return self._segments[-1].last

    @property
    def promised(self) -> int:
        """The highest promised epoch."""
        return self._wanted.promised

    @property
    def unclean(self) -> bool:
        """True if acknowledged entries may be missing."""
        return self._wanted.unclean

    @property
    def seal(self) -> Position:
        """Position up to which entries were synced and may have been acknowledged."""
        return self._wanted.seal

    @property
    def seal_lags(self) -> bool:
        """True if a power cut may leave an older seal. The thread that syncs the log calls `sync_seal` within `SEAL_LAG_S`."""
        return self._label.lags

    @property
    def seal_overdue(self) -> bool:
        """True if the seal has lagged for `SEAL_LAG_S`: it is synced before the next group."""
        return self._label.overdue

    @property
    def incarnation(self) -> int:
        """The incarnation of the last session."""
        return self._wanted.incarnation

    def next_incarnation(self) -> int:
        """Incarnation for a new session, durable when this returns."""
        with self._lock:
            self._wanted = self._wanted._replace(incarnation=self._wanted.incarnation + 1)
            incarnation = self._wanted.incarnation
        self._write_label()
        return incarnation

    def epoch_at(self, counter: int) -> int | None:
        """The epoch of an entry; None outside the log. Raises LogDamaged."""
        if not self.first.counter <= counter <= self.last.counter:
            return None
        return self.last.epoch if counter == self.last.counter else self._segment_of(counter).epoch_at(counter)

    def start_of_epoch(self, counter: int) -> int:
        """The first counter of this entry's epoch, as far as its segment shows. Raises LogDamaged."""
        return self._segment_of(counter).start_of_epoch(counter)

    def _segment_of(self, counter: int) -> Segment:
        """The segment with an entry, scanned. A segment's base belongs to the segment before it, if there is one."""
        with self._guard():
            index = self._index_of(counter)
            if not self._segments[index].scanned:
                self._scan_late(index)
            return self._segments[index]

    def _index_of(self, counter: int) -> int:
        return max(0, bisect_right(self._segments, counter - 1, key=lambda segment: segment.base.counter) - 1)

    def is_ready(self, counter: int) -> bool:
        """True if an entry and the next one can be read without reading a whole segment; otherwise call `scan`."""
        with self._lock:
            newest = self._segments[-1]
            if counter > newest.base.counter:
                return newest.scanned
            return all(self._segments[self._index_of(each)].scanned for each in (counter, counter + 1))

    def scan(self, counter: int) -> int | None:
        """Read the segments with an entry and the next one; call it in a thread, the log stays usable. Returns the last counter of
        a broken segment, if there is one. Raises DiskFailed."""
        for each in (counter, counter + 1):
            with self._lock:
                segment = self._segments[self._index_of(each)]
            if segment.scanned:
                continue
            try:
                fresh = Segment(segment.path, segment.base)
                try:
                    problem = fresh.scan()
                finally:
                    fresh.close()
            except FileNotFoundError:  # trimmed meanwhile
                continue
            except OSError as error:
                if error.errno not in UNREADABLE:
                    raise DiskFailed(f"{segment.path}: {error.strerror}") from error
                fresh, problem = segment, f"{segment.path.name} cannot be opened: {error.strerror}"
            with self._lock:
                index = self._index_of(each)
                if self._segments[index] is not segment or segment.scanned or index + 1 == len(self._segments):
                    continue
                following = self._segments[index + 1].base
                if problem is not None or following != fresh.last:
                    return following.counter
                segment.adopt(fresh)
        return None

    def _scan_late(self, index: int) -> None:
        segment = self._segments[index]
        problem = segment.scan()
        following = self._segments[index + 1].base if index + 1 < len(self._segments) else segment.last
        if problem is None and following != segment.last:
            problem = f"{segment.path.name} ends at {segment.last}, the next begins after {following}"
        if problem is not None:
            segment.scanned = False
            raise LogDamaged(problem, following.counter if index + 1 < len(self._segments) else 0)

    def read(self, after: int, max_entries: int, max_bytes: int) -> Sequence[Entry]:
        """Entries from `after` + 1 on, at least one if there is one. Raises LogDamaged, DiskFailed."""
        with self._lock:
            if self._tail and after + 1 >= self._tail[0].counter:
                return self._read_tail(after, max_entries, max_bytes)
        with self._guard():
            if after >= self.last.counter:
                return ()
            return self._segment_of(after + 1).read(after, max_entries, max_bytes)

    def _read_tail(self, after: int, max_entries: int, max_bytes: int) -> Sequence[Entry]:
        begin = after + 1 - self._tail[0].counter
        found = self._tail[begin : begin + max_entries]
        took = 0
        for index, entry in enumerate(found):
            took += len(entry.payload)
            if took >= max_bytes:
                return found[: index + 1]
        return found

    def verify(self, after: int, up_to: int) -> None:
        """Read entries from the disk again, for the scrub. Raises LogDamaged."""
        while after < min(up_to, self.last.counter):
            with self._guard():
                after += len(self._segment_of(after + 1).read(after, 4096, 1 << 20))

    def kept_within(self, max_bytes: int) -> int:
        """Last counter before the newest segments that have this many bytes together, or before the newest one alone."""
        with self._lock:
            after, size = self.last.counter, 0
            for segment in reversed(self._segments):
                size += segment.size
                if size > max_bytes and after != self.last.counter:
                    break
                after = segment.base.counter
            return after

    def sealed_segments(self) -> list[tuple[Path, Position, int]]:
        """File, base and last counter of every segment that is no longer written."""
        with self._lock:
            pairs = zip(self._segments, self._segments[1:], strict=False)
            return [(one.path, one.base, two.base.counter) for one, two in pairs]

    # --- changes

    def append(self, entries: Sequence[Entry]) -> None:
        """Write entries that follow the end to the operating system. Raises DiskFull (nothing was written) or DiskFailed."""
        with self._lock:
            self._check()
            segment = self._segments[-1]
            if entries[0].counter != segment.last.counter + 1:
                raise ValueError(f"{entries[0].position} does not follow {segment.last}")
            try:
                if segment.size >= self.segment_bytes:
                    segment = self._create(segment.last)
                    self._segments.append(segment)
                segment.append(entries)
            except OSError as problem:  # from creating a segment
                if problem.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise DiskFull(
                        f"{self.directory}: no space left for the log; free some, writes then continue without a restart"
                    ) from problem
                raise self._fail(f"{self.directory}: {problem.strerror}") from problem
            except DiskFailed as problem:
                raise self._fail(str(problem)) from problem
            self._tail += entries
            for entry in entries:
                self._tail_bytes += len(entry.payload)
            if len(self._tail) > MAX_TAIL_ENTRIES or self._tail_bytes > MAX_TAIL_BYTES:
                del self._tail[: len(self._tail) // 2 + 1]
                self._tail_bytes = sum(len(entry.payload) for entry in self._tail)

    def sync(self) -> Position:
        """Make every change so far durable, then the promise. The seal is written, and is durable within `SEAL_LAG_S`. Returns the
        sealed position. Raises DiskFailed."""
        return self.finish_sync(self.begin_sync())

    def begin_sync(self) -> list[Segment]:
        """Begin a sync of every change so far: the caller makes these segments durable, then calls `end_sync`, or leaves some of
        them to `finish_sync`. Raises DiskFailed."""
        with self._lock:
            self._check()
            self._limit = self.last.counter
            dirty = [segment for segment in self._segments if segment.dirty]
            for segment in dirty:
                segment.dirty = False
        return dirty

    def finish_sync(self, dirty: Sequence[Segment]) -> Position:
        """Make these segments durable, then the rest of a sync that has begun. Returns the sealed position. Raises DiskFailed."""
        try:
            for segment in dirty:
                segment.sync()
        except DiskFailed as problem:
            raise self._fail(str(problem)) from problem
        self._raise_seal()
        self._write_label()
        self._close_retired()
        return self.seal

    def end_sync(self) -> bool:
        """End a sync whose segments are durable, if that needs no wait: only the seal is written, and nobody else writes the label.
        Returns False if `finish_sync` has to. Raises DiskFailed."""
        self._raise_seal()
        if not self._label_lock.acquire(blocking=False):
            return False
        try:
            label = self._wanted
            if label != self._label.now:
                if not self._label.may_lag(label):
                    return False
                self._label.write_page(label)
        except DiskFailed as problem:
            raise self._fail(str(problem)) from problem
        finally:
            self._label_lock.release()
        self._close_retired()
        return True

    def sync_failed(self, path: Path, number: int) -> DiskFailed:
        """Note that a file was not made durable, with the number of the error; returns what to report."""
        return self._fail(f"{path}: {os.strerror(number)}")

    def _raise_seal(self) -> None:
        """Seal what was there when the sync began, except what was cut off since."""
        with self._lock:
            counter, self._limit = self._limit, None
            if counter is not None and counter > max(self._wanted.seal.counter, self.first.counter):
                self._wanted = self._wanted._replace(seal=Position(self.epoch_at(counter) or 0, counter))

    def _close_retired(self) -> None:
        with self._lock:
            for segment in self._retired:
                segment.close()
            self._retired.clear()

    def begin_seal(self) -> int:
        """Begin to sync the seal; returns the file that the caller makes durable before it calls `end_seal`. `sync_seal` may be
        called instead of both."""
        self._sealing = self._label.now
        return self._label.fd

    def end_seal(self) -> None:
        """Note that the file is durable as it was at `begin_seal`."""
        label, self._sealing = self._sealing, None
        if label is not None:
            self._label.synced(label)

    def seal_failed(self, number: int) -> DiskFailed:
        """Note that the seal was not made durable, like `sync_failed`."""
        return self.sync_failed(self._label.path, number)

    def sync_seal(self) -> None:
        """Make the seal durable if it lags. Raises DiskFailed."""
        with self._lock:
            self._check()
        with self._label_lock:
            self._sealing = None
            if self._label.lags:
                try:
                    self._label.sync()
                except DiskFailed as problem:
                    raise self._fail(str(problem)) from problem

    def cut(self, after: int) -> None:
        """Drop every entry beyond a counter, durably; the seal is lowered first. Raises DiskFailed, LogDamaged."""
        with self._lock:
            self._check()
            if not self.first.counter <= after <= self.last.counter:
                raise ValueError(f"{after} is not between {self.first} and {self.last}")
            if self._wanted.seal.counter > after:
                self._wanted = self._wanted._replace(seal=Position(self.epoch_at(after) or 0, after))
            if self._limit is not None:
                self._limit = min(self._limit, after)
        self._write_label()
        with self._guard():
            while len(self._segments) > 1 and self._segments[-1].base.counter >= after:
                self._remove(self._segments.pop())
            self._segments[-1].cut(after)
            self._tail = [entry for entry in self._tail if entry.counter <= after]

    def reset(self, position: Position) -> None:
        """Drop everything and continue after a position. Atomic, even with a power cut."""
        with self._lock:
            self._check()
            self._wanted = self._wanted._replace(resetting=position, seal=position)
            if self._limit is not None:
                self._limit = 0
        self._write_label()
        self._finish_reset(position)

    def _finish_reset(self, position: Position) -> None:
        with self._guard():
            for segment in self._segments:
                self._remove(segment)
            self._tail, self._tail_bytes = [], 0
            self._segments = [self._create(position)]
            self._wanted = self._wanted._replace(resetting=START, seal=position)
        self._write_label()

    def trim(self, up_to: int) -> None:
        """Remove the segments that end at or before a counter; the newest one always stays. Raises DiskFailed."""
        with self._guard():
            while len(self._segments) > 1 and self._segments[1].base.counter <= up_to:
                self._remove(self._segments.pop(0))

    def promise(self, epoch: int) -> None:
        """Raise the promise; durable with the next sync."""
        with self._lock:
            self._wanted = self._wanted._replace(promised=max(self._wanted.promised, epoch))

    def set_unclean(self, unclean: bool) -> None:
        """Set or clear the mark; durable with the next sync."""
        with self._lock:
            self._wanted = self._wanted._replace(unclean=unclean)

    def close(self) -> None:
        """Close the files. Entries that were not synced may be lost; the seal is synced unless a sync hangs."""
        if self._limit is None and self._sealing is None and self._label_lock.acquire(blocking=False):
            self._label_lock.release()
            with suppress(DiskFailed):  # the sealed entries are durable, and an earlier failure was reported
                self.sync_seal()
        with self._lock:
            if self._closed:
                return
            self._closed, self._failed = True, "the log is closed"
            for segment in [*self._segments, *self._retired]:
                segment.close()
            self._label.close()

    # --- failures

    def _remove(self, segment: Segment) -> None:
        """Remove a file; it is closed when no sync can be using it."""
        segment.path.unlink()
        segment.dirty = False
        self._retired.append(segment)
        sync_directory(self.directory)

    def _check(self) -> None:
        if self._failed:
            raise DiskFailed(self._failed)

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Hold the lock; an operating system error within it ends all promises of this process."""
        with self._lock:
            try:
                yield
            except OSError as problem:
                raise self._fail(f"{self.directory}: {problem.strerror}") from problem
            except DiskFailed as problem:
                raise self._fail(str(problem)) from problem

    def _fail(self, reason: str) -> DiskFailed:
        """Note a failed write or sync: the state of the disk is unknown, so no later call may report success."""
        self._failed = reason
        return DiskFailed(reason)
