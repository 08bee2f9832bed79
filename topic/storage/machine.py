"""The state of a group over its store, as replication uses it: entries are applied at once, a thread writes.

Source: docs/topics.md, "How it is stored", docs/replication.md, "Use by a role".
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

from cluster.core.cancellation import to_its_end
from cluster.replication.model import Entry
from cluster.topics.entries import number_of, topic_of
from pixiu.errors import DiskFailed, DiskFull, PixiuError, StateDamaged
from pixiu.wire.block import Flag
from topic.state.state import State
from topic.storage import folder as folders
from topic.storage.check import damaged_of
from topic.storage.compacting import Job, write_copy, write_spliced
from topic.storage.files import DiskFiles
from topic.storage.lmdb_table import LmdbTable
from topic.storage.part_log import PartLog, write_patch
from topic.storage.segment import Gap, Stored
from topic.storage.store import Store

FLUSH_BYTES: Final = 16 << 20
"""Bytes of blocks that are written before the interval is over."""
SLOW_BYTES: Final = 64 << 20
"""Bytes of blocks that wait to be written. Policy: above it a leader takes no more blocks."""
MAX_BYTES: Final = 128 << 20
"""The same. Policy: above it nothing is applied."""
RETRY_S: Final = 0.5
"""Interval of retries while the disk is full."""
T = TypeVar("T")
GAPS: Final = "gaps"
"""File of a snapshot: a line for each gap that its replica has itself."""


class Machine:
    """A group's state machine.

    Args:
        folder: of the state; see `topic.storage.folder`.
        cache_bytes: limit of the blocks that are kept in memory.
        flush_interval_s: interval of flushes.
        on_failed: called when nothing more can be written.
        on_replaced: called when a snapshot has taken the place of `store`.
        on_gap: called with a part and offsets that cannot be read, which a snapshot found.

    Call `open` first.
    """

    def __init__(
        self, folder: Path, cache_bytes: int, flush_interval_s: float, on_failed: Callable[[PixiuError], None],
        on_replaced: Callable[[], None] = lambda: None, on_gap: Callable[[int, Gap], None] = lambda _part, _gap: None,
    ) -> None:  # fmt: skip
        self._folder, self._cache_bytes, self._interval_s = folder, cache_bytes, flush_interval_s
        self._on_failed, self._on_replaced, self._on_gap = on_failed, on_replaced, on_gap
        self.full = ""
        """Why the last write failed for lack of space; empty: it did not."""
        self.flushes = 0
        self.compacted_bytes = 0
        """Bytes by which compaction has made files smaller."""
        self.opened = False
        self._writing = asyncio.Lock()
        """Held while the store is written, copied, replaced or closed."""
        self._thread = ThreadPoolExecutor(1, "topic-flush")
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def open(self) -> bool:
        """Open the store; may be called in a thread. Returns True if a damaged one was set aside, and this one is empty. Raises
        DiskFull, DiskFailed."""
        aside = folders.prepare(self._folder)
        try:
            self._adopt(*self._opened())
        except StateDamaged:  # its position in the log is unknown: it must be rebuilt
            folders.put_aside(self._folder)
            aside = True
            folders.prepare(self._folder)
            self._adopt(*self._opened())
        return aside

    def _opened(self) -> tuple[Store, LmdbTable]:
        table = LmdbTable(self._folder / folders.TABLE)
        store = Store(DiskFiles(self._folder), table, cache_bytes=self._cache_bytes)
        try:
            store.open()
        except BaseException:
            table.close()
            raise
        return store, table

    def _adopt(self, store: Store, table: LmdbTable) -> None:
        self.store, self._table = store, table
        self.full = ""
        self.opened = True

    def mark_damaged(self, reason: str) -> None:
        """Have the next start set the state aside, and take it from the log or another replica. Raises DiskFull, DiskFailed."""
        folders.mark(self._folder, reason)

    @property
    def state(self) -> State:
        """The state."""
        return self.store.state

    @property
    def applied(self) -> int:
        """See `StateMachine`."""
        return self.store.state.applied

    @property
    def flushed(self) -> int:
        """See `StateMachine`."""
        return self.store.flushed

    @property
    def clock_us(self) -> int:
        """See `StateMachine`."""
        return self.store.state.clock_us

    @property
    def behind(self) -> bool:
        """True if so much waits to be written that no more blocks are to be taken."""
        return self.store.tail_bytes >= SLOW_BYTES

    def start(self) -> None:
        """Start to flush."""
        self._task = asyncio.create_task(self._run(), name="topic-flush")

    def apply(self, entries: Sequence[Entry]) -> list[object]:
        """See `StateMachine`."""
        if self.store.tail_bytes >= MAX_BYTES:
            self._wake.set()
            raise DiskFull(self.full or "the segments of topics lag behind the log")
        answers = self.store.apply(entries)
        if self.store.tail_bytes >= FLUSH_BYTES:
            self._wake.set()
        return answers

    def look_ahead(self, entries: Sequence[Entry]) -> None:
        """See `StateMachine`: no entry is refused for damage."""

    async def flush(self) -> None:
        """Make everything applied durable. Raises DiskFull, DiskFailed."""
        async with self._writing:
            await self._flush()

    async def _flush(self) -> None:
        store = self.store
        flush = store.freeze()
        try:
            await self._in_thread(store.write, flush)
        except DiskFull as full:
            self.full = str(full)
            raise
        self.full = ""
        gone = store.finish(flush)
        self.flushes += 1
        if gone.files or gone.folders:
            await self._in_thread(store.remove, gone)

    async def _in_thread(self, work: Callable[[T], None], argument: T) -> None:
        """Work in a thread of its own: however much is read, flushes go on."""
        await to_its_end(asyncio.get_running_loop().run_in_executor(self._thread, work, argument))

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S if self.full else self._interval_s):
                    await self._wake.wait()
            self._wake.clear()
            try:
                if self.applied != self.flushed:
                    await self.flush()
                await self.compact()
            except DiskFull:
                continue
            except PixiuError as failed:
                self._on_failed(failed)
                return

    async def compact(self) -> None:
        """Remove from closed files what COMPACT entries have named, one file after the other: flushes go on between them. Raises
        DiskFull, DiskFailed."""
        while True:
            async with self._writing:
                store = self.store
                job = next(store.compacting.jobs(store.logs), None)
                if job is None:
                    return
                size = await to_its_end(asyncio.to_thread(write_copy, store.files, job))
                if size < 0:
                    store.compacting.unreadable(job)
                elif store.take_copy(job, size):
                    await to_its_end(asyncio.to_thread(store.files.sync_folder, job.log.folder))
                    store.compacting.forget(job.part, job.segment.base, job.segment.end)
                    self.compacted_bytes += job.segment.size - size

    async def mend(self, part: int, blocks: Sequence[Stored]) -> bool:
        """Write blocks of another replica in place of a gap. Returns False if they do not fit there. Raises DiskFull,
        DiskFailed."""
        async with self._writing:
            store = self.store
            log, state = store.logs.get(part), store.state.parts.get(part)
            if log is None or state is None:
                return False
            patch = log.patch(blocks, state.first)
            if await to_its_end(asyncio.to_thread(write_patch, store.files, patch)):
                log.patched(patch)
            elif not (state.flags & Flag.HOLE and await self._splice(part, log, blocks)):
                return False
            store.compacting.mended()
            return True

    async def _splice(self, part: int, log: PartLog, blocks: Sequence[Stored]) -> bool:
        """Mend a closed file with blocks of a replica that has compacted more, or less."""
        segment, store = log.segment_at(blocks[0].stamp.base), self.store
        if segment is None or segment is log.segments[-1]:
            return False
        job = Job(part, log, segment, [])
        size = await to_its_end(asyncio.to_thread(write_spliced, store.files, job, blocks))
        if size < 0 or not store.take_copy(job, size):
            return False
        await to_its_end(asyncio.to_thread(store.files.sync_folder, log.folder))
        high = blocks[-1].stamp.base + blocks[-1].block.count
        log.gaps = [gap for gap in log.gaps if not (blocks[0].stamp.base <= gap.low and gap.high <= high)]
        return True

    # --- snapshots

    async def snapshot(self, folder: Path) -> int:
        """See `StateMachine`. Segments are linked: those that were written last are closed first, so none of them changes any
        more. Those that the object store has are left out, and gaps are named. Raises DiskFull, DiskFailed."""
        async with self._writing:
            await self._flush()
            store, links = self.store, list[str]()
            for part, log in store.logs.items():
                log.roll()
                stored = store.stored.get(part, 0)
                links += [segment.path for segment in log.segments if segment.end > stored]
            await to_its_end(asyncio.to_thread(_link, self._folder, folder, links))
            applied, copy = store.flushed, self._table.copying()
        await to_its_end(asyncio.to_thread(copy, folder / folders.TABLE))
        gaps = await to_its_end(asyncio.to_thread(_damaged, folder))
        await asyncio.to_thread((folder / GAPS).write_text, "".join(f"{part} {gap.low} {gap.high}\n" for part, gap in gaps))
        for part, gap in gaps:
            self._on_gap(part, gap)
        return applied

    async def check(self, folder: Path) -> None:
        """See `StateMachine`: every block is checked. Raises StateDamaged, DiskFailed."""
        await asyncio.to_thread(_check, folder)

    async def load(self, folder: Path) -> None:
        """See `StateMachine`."""
        await to_its_end(self._load(folder))

    async def _load(self, folder: Path) -> None:
        async with self._writing:
            self.opened = False
            self._close()
            await asyncio.to_thread(folders.move_in, folder, self._folder)
            self._adopt(*await asyncio.to_thread(self._opened))
        self._on_replaced()

    async def close(self) -> None:
        """Write what is missing, as far as the disk takes it; the log has the rest."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if not self.opened:
            return
        with contextlib.suppress(PixiuError):
            await self.flush()
        async with self._writing:
            self.opened = False
            self._close()
        self._thread.shutdown(wait=False)

    def _close(self) -> None:
        self._table.close()
        files = self.store.files
        assert isinstance(files, DiskFiles)
        files.close()


def _link(state: Path, snapshot: Path, paths: Sequence[str]) -> None:
    """Link files of the state into a snapshot. Raises DiskFailed."""
    try:
        for name in folders.CONTENTS:
            (snapshot / name).mkdir(exist_ok=True)
        for path in paths:
            target = snapshot / path
            target.parent.mkdir(exist_ok=True)
            os.link(state / path, target)
    except OSError as problem:
        raise DiskFailed(f"{snapshot}: the segments cannot be linked: {problem.strerror}") from problem


def _check(folder: Path) -> None:
    """Check a snapshot. Raises StateDamaged, DiskFailed."""
    known = _gaps_of(folder)
    for part, gap in _damaged(folder):
        if not any(low <= gap.low and gap.high <= high for low, high in known.get(part, ())):
            name = f"part {number_of(part)} of topic {topic_of(part)}"
            raise StateDamaged(f"{name}: offsets {gap.low} to {gap.high - 1} of the snapshot are missing or damaged")


def _damaged(folder: Path) -> list[tuple[int, Gap]]:
    """Check every block of a snapshot; returns the gaps, by part. Raises StateDamaged, DiskFailed."""
    files, table = DiskFiles(folder), LmdbTable(folder / folders.TABLE)
    store = Store(files, table)
    try:
        store.load()
    finally:
        table.close()
        (folder / folders.TABLE / "lock.mdb").unlink(missing_ok=True)
    try:
        return [
            (part.part, gap)
            for part in store.state.parts.values()
            for gap in damaged_of(files, store.log_of(part.part).folder, max(part.first, part.stored), part.end)
        ]
    finally:
        files.close()


def _gaps_of(folder: Path) -> dict[int, list[Gap]]:
    found: dict[int, list[Gap]] = {}
    with contextlib.suppress(OSError, ValueError):
        for line in (folder / GAPS).read_text("ascii").splitlines():
            part, low, high = map(int, line.split())
            found.setdefault(part, []).append(Gap(low, high))
    return found
