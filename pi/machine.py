"""The state over its store, as replication uses it: entries are applied at once, transactions are written by a thread.

Source: DESIGN section 11 (the applied position is in the same transaction; the log is kept until the state is flushed).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from pi.events import NO_DEVICE
from pi.state import Read, Results, State
from pi.store import FILE_NAME, LOCK_NAME, StateStore, install, mark, set_aside
from pixiu.errors import DiskFull, PixiuError, StateDamaged
from pixiu.replication.model import Entry

FLUSH_CHANGES: Final = 50_000
"""So many changes are written before the interval is over."""
MAX_CHANGES: Final = 400_000
"""Changes that wait. Policy: while there are more, writes are refused with OVERLOADED."""
RETRY_S: Final = 0.5
"""Between two tries while the disk is full."""
DAMAGED_S: Final = 10.0
"""The scrub finds a broken value again after so long: meanwhile there may be a replica to repair it from."""
SCRUB_KEYS: Final = 500
"""Checked at a time."""


class Machine:
    """One state.

    Args:
        folder: of the store.
        map_bytes: the most that it may grow to.
        heads: kept in memory.
        flush_interval_s: between two transactions.
        on_failed: called when nothing more can be written, and with the first StateDamaged of the scrub.

    `open` comes first. Raises StateDamaged, DiskFull, DiskFailed.
    """

    def __init__(
        self, folder: Path, map_bytes: int, heads: int, flush_interval_s: float, on_failed: Callable[[PixiuError], None],
    ) -> None:  # fmt: skip
        self._folder, self._map_bytes, self._heads = folder, map_bytes, heads
        self.full = ""
        """Why nothing can be written now; empty: it can."""
        self.damaged = ""
        """What the scrub found."""
        self.transactions = 0
        self.scrubbed = 0
        self._interval_s = flush_interval_s
        self._on_failed = on_failed
        self._writing = asyncio.Lock()
        self.opened = False
        self._half_applied = False
        """An entry broke off: what is in memory must never be written."""
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def open(self) -> bool:
        """Open the store. Whether a damaged one was set aside, and this one is empty."""
        aside = set_aside(self._folder)
        self._open()
        return aside

    def mark_damaged(self, reason: str) -> None:
        """At its next start this replica sets its store aside, and takes the state from the log or another replica."""
        mark(self._folder, reason)

    def _open(self) -> None:
        self.store = StateStore(self._folder, self._map_bytes)
        self.state = State(self.store, max_heads=self._heads)
        self.opened = True
        self.flushed = self.state.applied.counter
        """The state is durable up to this counter."""

    @property
    def applied(self) -> int:
        """The counter of the last entry in the state."""
        return self.state.applied.counter

    def start(self, scrub_keys_per_s: int) -> None:
        """Begin to write."""
        self._tasks.append(asyncio.create_task(self._run(), name="pi-flush"))
        if scrub_keys_per_s:
            self._tasks.append(asyncio.create_task(self._scrub(scrub_keys_per_s), name="pi-scrub"))

    def apply(self, entries: Sequence[Entry]) -> list[list[Results]]:
        """Committed entries. Raises StateDamaged: then this state must not be used any more."""
        try:
            found = self.state.apply(entries)
        except StateDamaged as damage:
            self.damaged, self._half_applied = str(damage), True
            self._on_failed(damage)
            raise
        if self.state.unwritten >= FLUSH_CHANGES:
            self._wake.set()
        return found

    @property
    def behind(self) -> bool:
        """More waits to be written than may."""
        return self.state.unwritten >= MAX_CHANGES

    def read(self, uin: int, number: int, lane: int, session: int, start: int | None, count: int) -> Read:
        """Entries of an inbox. Raises Refusal, StateDamaged."""
        if number == NO_DEVICE:
            return self.state.peek(uin, lane, start or 0, count)
        return self.state.read(uin, number, lane, session, start, count)

    async def flush(self) -> None:
        """One transaction, durable. Raises DiskFull, DiskFailed, StateDamaged."""
        async with self._writing:
            if self._half_applied:
                raise StateDamaged(self.damaged)
            counter = self.applied
            changes = self.state.freeze()
            written = asyncio.ensure_future(asyncio.to_thread(self._write, changes))
            try:
                await asyncio.shield(written)
            except asyncio.CancelledError:
                await asyncio.wait({written})  # the thread cannot be stopped, and its environment must stay open
                self.state.table.refused()
                raise
            except PixiuError:
                self.state.table.refused()
                raise
            self.store.renew()
            self.state.table.thawed()
            self.transactions += 1
            self.flushed = counter

    def _write(self, changes: dict[bytes, bytes | None]) -> None:
        self.store.write(changes)
        self.store.sync()

    async def snapshot(self, folder: Path) -> int:
        """Write the state as it is at one applied counter into an empty folder; returns that counter. `apply` goes on."""
        await self.flush()
        await asyncio.to_thread(self.store.copy, folder / FILE_NAME)
        return await asyncio.to_thread(self._position_of, folder)

    def _position_of(self, folder: Path) -> int:
        """What a snapshot holds: a transaction may have come between the flush and the copy."""
        store = StateStore(folder, self._map_bytes)
        try:
            return State(store, max_heads=2).applied.counter
        finally:
            store.close()
            (folder / LOCK_NAME).unlink(missing_ok=True)

    async def load(self, folder: Path) -> None:
        """Replace the state by a snapshot, durably. Nothing is applied meanwhile."""
        async with self._writing:
            await asyncio.to_thread(self._position_of, folder)  # what cannot be read is not taken
            self.store.close()
            try:
                await asyncio.to_thread(install, folder / FILE_NAME, self._folder)
            finally:
                self._open()

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S if self.full else self._interval_s):
                    await self._wake.wait()
            self._wake.clear()
            if self.applied == self.flushed:
                continue
            try:
                await self.flush()
            except DiskFull as full:
                self.full = str(full)
            except PixiuError as failed:
                self._on_failed(failed)
                return
            else:
                self.full = ""

    async def _scrub(self, keys_per_s: int) -> None:
        """Look through everything that is stored, again and again, for values that the disk changed."""
        after: bytes | None = b""
        while True:
            await asyncio.sleep(SCRUB_KEYS / keys_per_s)
            try:
                async with self._writing:  # not while a snapshot takes the store's place
                    after = await asyncio.to_thread(self.store.verify, after or b"", SCRUB_KEYS)
            except StateDamaged as damage:
                self.damaged = str(damage)
                self._on_failed(damage)
                await asyncio.sleep(DAMAGED_S)
                continue
            except PixiuError as failed:
                self._on_failed(failed)
                return
            self.scrubbed += SCRUB_KEYS

    async def verify(self) -> int:
        """Check every value that is stored; how many there are. Raises StateDamaged, DiskFailed."""
        values, after = 0, b""
        while True:
            async with self._writing:  # not while a snapshot takes the store's place
                following = await asyncio.to_thread(self.store.verify, after, SCRUB_KEYS)
            if following is None:
                return values + await asyncio.to_thread(self.store.count_from, after)
            values, after = values + SCRUB_KEYS, following

    async def close(self) -> None:
        """Write what is left, as far as the disk takes it; what it does not is in the log."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not self.opened:
            return
        with contextlib.suppress(PixiuError):
            await self.flush()
        self.store.close()
