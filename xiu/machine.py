"""A Xiu as the state machine of its replica: what commits is written to RocksDB; snapshots are checkpoints of it.

    DATA_DIR/replica   log, snapshots on their way, audit (`pixiu.replication.folder`)
    DATA_DIR/store     RocksDB

Source: DESIGN sections 11 and 12.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from pixiu.errors import DiskFull, StorageError, StoreDamaged
from pixiu.replication.model import Entry
from xiu.store import Store

CHECKPOINT: Final = "store"
"""Its folder in a snapshot."""


class Machine:
    """See `pixiu.replication.machine`.

    Args:
        folder: of RocksDB.
        memtable_bytes, cache_bytes: see `Store`.
        on_committed: writes what is committed up to a counter; returns why it cannot now, or "".
        on_replaced: the store holds another state now.

    `open` first.
    """

    def __init__(
        self,
        folder: Path,
        memtable_bytes: int,
        cache_bytes: int,
        on_committed: Callable[[int], str],
        on_replaced: Callable[[], None],
    ) -> None:
        self._folder = folder
        self._memtable_bytes, self._cache_bytes = memtable_bytes, cache_bytes
        self._on_committed, self._on_replaced = on_committed, on_replaced
        self._store: Store | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="xiu-store")
        self.warning = ""
        """What was found at the start."""

    @property
    def store(self) -> Store:
        """RocksDB, open."""
        assert self._store is not None, "open was called"
        return self._store

    async def open(self) -> None:
        """Open RocksDB; one that is damaged as a whole is set aside, and filled again from the log or a replica. Raises
        StorageError."""
        await self._in_thread(self._open)

    def _open(self) -> None:
        try:
            self._store = self._make(self._folder)
        except StoreDamaged as damage:
            aside = self._folder.with_suffix(".damaged")
            shutil.rmtree(aside, ignore_errors=True)
            self._folder.rename(aside)
            self.warning = f"{damage}; it was set aside as {aside}, and is filled again from the log or from a replica"
            self._store = self._make(self._folder)

    def _make(self, folder: Path) -> Store:
        return Store(folder, memtable_bytes=self._memtable_bytes, cache_bytes=self._cache_bytes)

    async def _in_thread(self, work: Callable[[], None]) -> None:
        """One at a time: flushes, checkpoints, opening and closing."""
        await asyncio.get_running_loop().run_in_executor(self._thread, work)

    # --- what the replica calls

    @property
    def applied(self) -> int:
        """The counter of the last entry in the state."""
        return self.store.head.applied.counter

    @property
    def flushed(self) -> int:
        """The state is durable up to this counter."""
        return self.store.flushed

    def apply(self, entries: Sequence[Entry]) -> Sequence[object]:
        """Write what was decided for these entries. Raises DiskFull when the store takes nothing now."""
        before = self.applied
        why = self._on_committed(entries[-1].counter)
        if self.applied <= before:
            raise DiskFull(why)
        return (None,) * (self.applied - before)

    async def snapshot(self, folder: Path) -> int:
        """A checkpoint, in hard links; writes go on. Raises StorageError."""
        counter = 0

        def take() -> None:
            nonlocal counter
            self.store.checkpoint(folder / CHECKPOINT)
            copy = self._make(folder / CHECKPOINT)  # its head says what is in it
            counter = copy.head.applied.counter
            copy.close()

        await self._in_thread(take)
        return counter

    async def load(self, folder: Path) -> None:
        """Take a checkpoint's place. Raises StorageError."""

        def take() -> None:
            received = folder / CHECKPOINT
            if received.exists():
                self.store.replace(received)

        await self._in_thread(take)
        self._on_replaced()

    async def flush(self) -> None:
        """Make everything written durable. Raises DiskFull, DiskFailed."""

        def flush() -> None:
            self.store.flush()

        await self._in_thread(flush)

    def free_bytes(self) -> int:
        """Of the disk."""
        return shutil.disk_usage(self._folder).free

    async def close(self) -> None:
        """Close RocksDB."""
        if self._store is not None:
            with contextlib.suppress(StorageError):
                await self._in_thread(self._store.close)
        self._thread.shutdown(wait=False)
