"""The state over its store: entries are applied at once, transactions are written by a thread, the log may go behind them.

Source: DESIGN section 11 (the applied position is in the same transaction; the log is kept until the state is flushed).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from pi.state import Results, State
from pi.store import StateStore
from pixiu.errors import DiskFull, PixiuError, StateDamaged
from pixiu.replication.model import Entry

FLUSH_CHANGES: Final = 50_000
"""So many changes are written before the interval is over."""
MAX_CHANGES: Final = 400_000
"""Changes that wait. Policy: while there are more, writes are refused with OVERLOADED."""
RETRY_S: Final = 0.5
"""Between two tries while the disk is full."""
SCRUB_KEYS: Final = 500
"""Checked at a time."""


class Applier:
    """One state.

    Args:
        folder: of the store.
        map_bytes: the most that it may grow to.
        heads: kept in memory.
        flush_interval_s: between two transactions.
        on_flushed: called with the counter up to which the state is durable.
        on_failed: called when nothing more can be applied or written.

    Raises StateDamaged, DiskFull, DiskFailed.
    """

    def __init__(
        self, folder: Path, map_bytes: int, heads: int, flush_interval_s: float,
        on_flushed: Callable[[int], None], on_failed: Callable[[PixiuError], None],
    ) -> None:  # fmt: skip
        self.store = StateStore(folder, map_bytes)
        self.state = State(self.store, max_heads=heads)
        self.full = ""
        """Why nothing can be written now; empty: it can."""
        self.damaged = ""
        """What the scrub found."""
        self.transactions = 0
        self.scrubbed = 0
        self._interval_s = flush_interval_s
        self._on_flushed, self._on_failed = on_flushed, on_failed
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, scrub_keys_per_s: int) -> None:
        """Begin to write."""
        self._tasks.append(asyncio.create_task(self._run(), name="pi-flush"))
        if scrub_keys_per_s:
            self._tasks.append(asyncio.create_task(self._scrub(scrub_keys_per_s), name="pi-scrub"))

    def apply(self, entries: Sequence[Entry]) -> list[list[Results]]:
        """Committed entries. Raises StateDamaged: then this state must not be used any more."""
        found = self.state.apply(entries)
        if self.state.unwritten >= FLUSH_CHANGES:
            self._wake.set()
        return found

    @property
    def behind(self) -> bool:
        """More waits to be written than may."""
        return self.state.unwritten >= MAX_CHANGES

    async def flush(self) -> None:
        """One transaction, durable. Raises DiskFull, DiskFailed, StateDamaged."""
        counter = self.state.applied.counter
        changes = self.state.freeze()
        try:
            await asyncio.shield(asyncio.to_thread(self._write, changes))
        except PixiuError:
            self.state.table.refused()
            raise
        self.store.renew()
        self.state.table.thawed()
        self.transactions += 1
        self._on_flushed(counter)

    def _write(self, changes: dict[bytes, bytes | None]) -> None:
        self.store.write(changes)
        self.store.sync()

    async def _run(self) -> None:
        written = self.state.applied
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S if self.full else self._interval_s):
                    await self._wake.wait()
            self._wake.clear()
            if self.state.applied == written:
                continue
            applied = self.state.applied
            try:
                await self.flush()
            except DiskFull as full:
                self.full = str(full)
            except PixiuError as failed:
                self._on_failed(failed)
                return
            else:
                self.full, written = "", applied

    async def _scrub(self, keys_per_s: int) -> None:
        """Look through everything that is stored, again and again, for values that the disk changed."""
        after: bytes | None = b""
        while True:
            await asyncio.sleep(SCRUB_KEYS / keys_per_s)
            try:
                after = await asyncio.to_thread(self.store.verify, after or b"", SCRUB_KEYS)
            except StateDamaged as damage:
                self.damaged = str(damage)
                return
            except PixiuError as failed:
                self._on_failed(failed)
                return
            self.scrubbed += SCRUB_KEYS

    async def close(self) -> None:
        """Write what is left, as far as the disk takes it; what it does not is in the log."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(PixiuError):
            if not self.state.table.frozen:
                await self.flush()
        self.store.close()
