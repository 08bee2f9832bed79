"""Writes the Router DB or Relay DB asynchronously: in batches, in one thread, without delaying messages.

    persist, persist, rewrite, persist … ──▶ a bounded queue ──▶ one transaction for all waiting changes ──▶ LMDB

Source: PiXiu §2.4 step 10, §5 ("asynchronously"); docs/promises.md, "Failure rules" 5 (a full disk is reported, serving continues).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from cluster.membership.map.lww_map import Key
from cluster.membership.map.updates import ENTRY, Chunk, Update, logins
from cluster.membership.replica.store import ReplicaStore, StoreError, Write

MAX_PENDING: Final = 1_000_000
"""Changes that wait to be written. Policy: all are dropped, and the database counts as failed until it is written anew."""
BATCH_DELAY_S: Final = 0.02
"""Shortest time whose changes are collected in one transaction, seconds."""
REWRITE_CHUNKS: Final = 64
"""Chunks in one transaction of a rewrite."""
ALIVE_INTERVAL_S: Final = 30.0
"""Interval at which a database without writes is marked as up to date, seconds."""


class StoreWriter:
    """Owns a `ReplicaStore` and its thread. Use it from the event loop.

    Args:
        role: "router" or "relay".
        folder: the database's folder.
        map_bytes: largest size of the database.
        on_failed: called in the event loop, once until the next `rewrite`, if a write failed.
    """

    def __init__(self, role: str, folder: Path, map_bytes: int, on_failed: Callable[[str], None]) -> None:
        self._role, self._folder, self._map_bytes, self._on_failed = role, folder, map_bytes, on_failed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"{role}-db")
        self._store: ReplicaStore | None = None
        self._queue: deque[Write | Iterator[Chunk]] = deque()
        self._pending = 0
        self._failed = False
        self._wake = asyncio.Event()
        self._closing = False
        self._task: asyncio.Task[None] | None = None
        self.transactions = 0
        self.written = 0

    @property
    def pending(self) -> int:
        """Number of changes that wait to be written."""
        return self._pending

    async def open(self) -> float | None:
        """Open the database; seconds since it was last up to date, None if it is empty. Raises `StoreError`."""
        loop = asyncio.get_running_loop()
        self._store = await loop.run_in_executor(self._thread, ReplicaStore, self._role, self._folder, self._map_bytes)
        return await loop.run_in_executor(self._thread, self._store.age_s, time.time_ns() // 1_000_000)

    async def load(self) -> list[Chunk]:
        """Read the whole content. Raises `StoreError`."""
        store = self._store
        if store is None:
            return []
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: list(store.load()))

    def start(self) -> asyncio.Task[None]:
        """Start writing queued operations; before that, the queue only fills. Only `close` ends the task."""
        self._task = asyncio.create_task(self._run())
        return self._task

    def persist(self, puts: list[Update], deletes: list[Key]) -> None:
        """Queue changes to write, then keys to delete."""
        if self._failed:
            return
        if self._pending + len(puts) + len(deletes) > MAX_PENDING:
            self._fail(f"more than {MAX_PENDING} changes wait for the database: its disk is too slow")
            return
        self._pending += len(puts) + len(deletes)
        self._queue.append(Write(puts, deletes))
        self._wake.set()

    def rewrite(self, chunks: Iterator[Chunk]) -> None:
        """Queue a replacement of everything; the chunks contain all waiting changes. Ends a failure."""
        self._failed = False
        self._queue.clear()
        self._pending = 0
        self._queue.append(chunks)
        self._wake.set()

    async def close(self) -> None:
        """Write pending changes, then close the database."""
        self._closing = True
        self._wake.set()
        if self._task is not None:
            await self._task
        if self._store is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._store.close)
            self._store = None
        self._thread.shutdown(wait=False)

    def _fail(self, text: str) -> None:
        self._queue.clear()
        self._pending = 0
        if not self._failed:
            self._failed = True
            self._on_failed(text)

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(ALIVE_INTERVAL_S):
                    await self._wake.wait()
            except TimeoutError:
                if not self._failed and self._store is not None:
                    await self._attempt(self._write([]))
                continue
            self._wake.clear()
            if not self._closing:
                await asyncio.sleep(BATCH_DELAY_S)
            while self._queue:
                if isinstance(self._queue[0], Write):
                    await self._attempt(self._write(self._take_writes()))
                else:
                    chunks = self._queue.popleft()
                    assert not isinstance(chunks, Write)
                    await self._attempt(self._rewrite(chunks))
            if self._closing:
                return

    def _take_writes(self) -> list[Write]:
        found: list[Write] = []
        while self._queue and isinstance(self._queue[0], Write):
            write = self._queue.popleft()
            assert isinstance(write, Write)
            found.append(write)
            self._pending -= len(write.puts) + len(write.deletes)
        return found

    async def _attempt(self, action: Coroutine[None, None, None]) -> None:
        """Do something that may fail because of the disk; pending changes are dropped then, because the database is incomplete."""
        try:
            await action
        except StoreError as error:
            self._fail(str(error))

    async def _write(self, writes: list[Write]) -> None:
        store = self._opened()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, store.write, writes, time.time_ns() // 1_000_000)
        self.transactions += 1
        self.written += sum(len(write.puts) + len(write.deletes) for write in writes)

    async def _rewrite(self, chunks: Iterator[Chunk]) -> None:
        """Write all chunks. They are made here, in the event loop, which owns the map; only the last write marks it as up to
        date."""
        loop = asyncio.get_running_loop()
        if self._store is None:
            self._store = await loop.run_in_executor(self._thread, ReplicaStore, self._role, self._folder, self._map_bytes)
        await loop.run_in_executor(self._thread, self._store.clear)
        writes: list[Write] = []
        for chunk in chunks:
            writes.append(Write(_changes(chunk), []))
            if len(writes) < REWRITE_CHUNKS:
                await asyncio.sleep(0)
                continue
            await self._rewrite_some(writes)
            writes = []
        await self._rewrite_some(writes)
        await loop.run_in_executor(self._thread, self._store.write, [], time.time_ns() // 1_000_000)

    async def _rewrite_some(self, writes: list[Write]) -> None:
        if writes:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._opened().write, writes, None)
            self.transactions += 1
            self.written += sum(len(write.puts) for write in writes)

    def _opened(self) -> ReplicaStore:
        if self._store is None:
            raise StoreError(f"the database in {self._folder} is not open")
        return self._store


def _changes(chunk: Chunk) -> list[Update]:
    dead = [Update(id_, room, uin, False) for room, uin, id_ in ENTRY.iter_unpack(chunk.tombstones)]
    return logins(chunk.entries, chunk.values) + dead
