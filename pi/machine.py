"""The state over its store, as replication uses it: entries are applied at once, transactions are written by a thread.

Source: docs/stores.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from cluster.replication.model import Entry
from pi.digest import Digest
from pi.doubling import Phase
from pi.early import Standstill
from pi.events import NO_DEVICE
from pi.keys import EPOCH_S, ValueDamaged
from pi.reading import Read
from pi.state import Results, State
from pi.store import FILE_NAME, LOCK_NAME, StateStore, early_in, install, mark, set_aside
from pi.view import MARK_KIND, View, Views
from pixiu.errors import DiskFailed, DiskFull, PixiuError, StateDamaged, StorageError, Unavailable

FLUSH_CHANGES: Final = 50_000
"""So many changes are written before the interval is over."""
CLEAN_CHANGES: Final = 4_000
"""The same while what moved is deleted: each search for more of it looks through all changes."""
MAX_CHANGES: Final = 400_000
"""Changes that wait. Policy: while there are more, writes are refused with OVERLOADED, and nothing is applied."""
RETRY_S: Final = 0.5
"""Between two tries while the disk is full."""
DAMAGED_S: Final = 10.0
"""The scrub finds a broken value again after so long: meanwhile there may be a replica to repair it from."""
MAX_BROKEN: Final = 10_000
"""Values that are given up at a time. Policy: the rest is found the next time."""
RESERVE_BYTES: Final = 1 << 30
"""By so much the store may grow beyond its bound: for what was in the log when it was reached, for acknowledgements and sweeps, and
for pages that a transaction leaves. It is taken when it is needed."""
SCRUB_KEYS: Final = 500
"""Checked at a time."""
CHECK_PAUSE_S: Final = 0.0005
"""After so many of a snapshot: the event loop needs the interpreter, too."""

T = TypeVar("T")


async def _to_its_end(work: Callable[[], T]) -> T:
    """In a thread. A caller that is cancelled still waits: the thread cannot be stopped, and its environment must stay open."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise


class Machine:
    """Pi's state machine: the state of one partition behind the replicated log.

    Args:
        folder: of the store.
        store_bytes: its bound: no mail is taken while it holds more.
        heads: kept in memory.
        flush_interval_s: between two transactions.
        on_failed: called when nothing more can be written, and with damage that was found: by the scrub, or by an entry that cannot
            be applied, again and again.

    `open` comes first. Raises StateDamaged, DiskFull, DiskFailed.
    """

    def __init__(
        self, folder: Path, store_bytes: int, heads: int, flush_interval_s: float, on_failed: Callable[[PixiuError], None],
    ) -> None:  # fmt: skip
        self._folder, self._store_bytes, self._heads = folder, store_bytes, heads
        self.full = ""
        """Why the newest try to write failed for want of space; empty: it did not."""
        self.beyond = ""
        """Why no mail may be taken, although what is in the log is applied; empty: it may. Each replica finds it out by itself,
        and a leader asks before it proposes, so that all apply the same."""
        self.damaged = ""
        """What the scrub found."""
        self.transactions = 0
        self.scrubbed = 0
        self._interval_s = flush_interval_s
        self._on_failed = on_failed
        self._writing = asyncio.Lock()
        self.opened = False
        self._flushing = False
        """A thread may be writing what is frozen."""
        self.half_applied = False
        """An entry broke off: what is in memory must never be written. Until the transaction that is being written has ended."""
        self.stop = Standstill()
        """The entry that cannot be applied, if there is one."""
        self._said_at = 0.0
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.views = Views()
        self.cut: View | None = None
        """Of a child: the state as it was when it opened; closed by whoever has read it."""
        self.advanced = asyncio.Event()
        """Something was applied."""
        self.on_doubling: Callable[[], None] = lambda: None
        """Called when the record of the partition's doubling has changed."""

    def open(self) -> bool:
        """Open the store. Whether a damaged one was set aside, and this one is empty."""
        aside = set_aside(self._folder)
        try:
            self._open()
        except ValueDamaged as damage:  # where the state stands in the log is not known: it can only be made anew
            mark(self._folder, str(damage))
            aside = set_aside(self._folder)
            self._open()
        return aside

    def mark_damaged(self, reason: str) -> None:
        """Have the next start set the store aside and take the state from the log or another replica. Raises
        DiskFull, DiskFailed."""
        mark(self._folder, reason, self.stop.kept())

    def _open(self) -> None:
        self.store = self._store_in(self._folder)
        try:
            self.store.sync()  # the last transaction of a process that was killed may be in the page cache alone
            self._begin()
        except StorageError:
            self.store.close()
            raise
        self.stop = Standstill()
        self.stop.remember(early_in(self._folder))
        self.opened = True
        self.flushed = self.state.applied.counter
        """The state is durable up to this counter."""
        self.full = ""  # also of a snapshot that took the place of what could not be written
        self._look_for_space()

    def _begin(self) -> None:
        """The state as it is stored."""
        self.state = State(self.store, max_heads=self._heads)
        self.state.doubled.on_open = self._keep_cut
        self.half_applied = False

    def _store_in(self, folder: Path) -> StateStore:
        return StateStore(folder, self._store_bytes + RESERVE_BYTES)

    @property
    def applied(self) -> int:
        """The counter of the last entry in the state."""
        return self.state.applied.counter

    @property
    def clock_us(self) -> int:
        """The time of the state, Unix µs."""
        now_s = self.state.inboxes.now_s
        return (now_s + EPOCH_S) * 1_000_000 if now_s else 0

    def start(self, scrub_keys_per_s: int) -> None:
        """Start the tasks that write and scrub."""
        self._tasks.append(asyncio.create_task(self._run(), name="pi-flush"))
        if scrub_keys_per_s:
            self._tasks.append(asyncio.create_task(self._scrub(scrub_keys_per_s), name="pi-scrub"))

    def apply(self, entries: Sequence[Entry]) -> list[list[Results]]:
        """Committed entries. Raises DiskFull: too much waits to be written, and nothing was applied; StateDamaged: an entry met a
        broken value, and the state is the stored one again, from which the entries before that one are to be applied once more."""
        if self.half_applied:
            raise StateDamaged(self.stop.text)
        if self.stop.at:
            entries = [entry for entry in entries if entry.counter < self.stop.at]
            if not entries:
                self._say()
                raise StateDamaged(self.stop.text)
        if self.behind:
            raise DiskFull(self.full or "LMDB writes lag behind the log")
        record = self.state.doubled.record
        try:
            found = self._apply_early(entries) if self.stop.early else self._apply(entries)
        except StateDamaged as damage:
            self.stop.stop(self.applied + 1, damage)
            self.damaged, self.half_applied = self.stop.text, True
            if not self._flushing:
                self._take_back()
            self._say()
            raise StateDamaged(self.stop.text) from damage
        many = FLUSH_CHANGES if self.state.doubled.record.phase is not Phase.CLEANING else CLEAN_CHANGES
        if self.state.unwritten >= many:
            self._wake.set()
        self.advanced.set()
        if self.state.doubled.record is not record:
            self.on_doubling()
        return found

    def look_ahead(self, entries: Sequence[Entry]) -> None:
        """Committed entries behind the one that cannot be applied: one of them may be an operator's word."""
        if self.stop.look_ahead(entries):
            self.damaged = ""  # the scrub says what is left of it

    @property
    def stands(self) -> bool:
        """Whether everything before the entry that cannot be applied is in the state."""
        return self.stop.at == self.applied + 1 and not self.half_applied

    @property
    def refuses(self) -> StateDamaged | DiskFull | None:
        """Why no write is taken, where another replica may take it."""
        if self.stop.at:
            return StateDamaged(self.stop.text)
        return DiskFull(self.full) if self.full else None

    def _take_back(self) -> None:
        """Forget what was applied since the last transaction, with the entry that broke off: the log has it. Raises DiskFailed."""
        try:
            self._begin()
        except StateDamaged as damage:  # then the next start sets the store aside
            raise DiskFailed(f"{damage}; it is rebuilt at the next start") from damage
        self.on_doubling()

    def _say(self) -> None:
        """Report why the state stands still, now and then: another replica may be whole by now."""
        now = time.monotonic()
        if now >= self._said_at + DAMAGED_S:
            self._said_at = now
            self._on_failed(StateDamaged(self.stop.text))

    def _apply(self, entries: Sequence[Entry]) -> list[list[Results]]:
        return self._apply_to_marks(entries) if self.views else self.state.apply(entries)

    def _apply_early(self, entries: Sequence[Entry]) -> list[list[Results]]:
        """The same, and what is given up before some of them."""
        found: list[list[Results]] = []
        begin = 0
        for index, entry in enumerate(entries):
            early = self.stop.early.get(entry.counter)
            if early is not None and early.at > self.state.early:
                found += self._apply(entries[begin:index])
                begin = index
                self.state.take_early(early)
        return found + self._apply(entries[begin:])

    def _keep_cut(self) -> None:
        self._close_cut()
        with contextlib.suppress(StorageError):  # then its digest is not known
            self.cut = self.view()

    def _close_cut(self) -> None:
        if self.cut is not None:
            self.cut.close()
            self.cut = None

    def _apply_to_marks(self, entries: Sequence[Entry]) -> list[list[Results]]:
        """The same, and the views that somebody waits for."""
        found: list[list[Results]] = []
        begin = 0
        for index, entry in enumerate(entries, 1):
            if entry.kind == MARK_KIND and self.views.wants(entry.payload):
                found += self.state.apply(entries[begin:index])
                begin = index
                try:
                    self.views.answer(entry.payload, self.view())
                except StorageError as problem:
                    self.views.answer(entry.payload, problem)
        return found + self.state.apply(entries[begin:])

    def view(self) -> View:
        """The state as it is now; whoever takes it closes it. Raises StorageError."""
        return View(self.store.reader(), self.state.unstored(), self.applied)

    async def read_view(self, view: View, take: Callable[[list[tuple[bytes, bytes]]], T]) -> T | None:
        """Some more rows of a view, as a function makes something of them in a thread; None at the end. Raises Unavailable when
        the state was replaced meanwhile, StorageError."""

        def part() -> T | None:
            rows = view.part()
            return None if rows is None else take(rows)

        async with self._writing:  # not while a snapshot takes the store's place
            if view.reader.store is not self.store:
                raise Unavailable("a snapshot took this replica's state's place; ask it again")
            return await _to_its_end(part)

    async def digest(self, view: View, moves: Callable[[bytes], bool] | None = None) -> Digest:
        """Read a view to its end, or those of its rows whose keys are wanted. Raises as `read_view`."""
        digest = Digest()

        def take(rows: list[tuple[bytes, bytes]]) -> bool:
            digest.add(rows if moves is None else [row for row in rows if moves(row[0])])
            return True

        while await self.read_view(view, take):
            pass
        return digest

    @property
    def writing(self) -> asyncio.Lock:
        """Held while the store is written, or replaced by a snapshot; whoever reads it in a thread holds it, too."""
        return self._writing

    @property
    def behind(self) -> bool:
        """More waits to be written than may."""
        return self.state.unwritten >= MAX_CHANGES

    def read(
        self, uin: int, number: int, lane: int, session: int, start: int | None, count: int, before: int = 0,
        devices: bool = False,
    ) -> Read:  # fmt: skip
        """What `pi.events.ReadRequest` asks for. Raises Refusal, StateDamaged."""
        if number == NO_DEVICE:
            return self.state.peek(uin, lane, start or 0, count, before, devices=devices)
        return self.state.read(uin, number, lane, session, start, count, before, devices=devices)

    async def flush(self) -> None:
        """One transaction, durable. Raises DiskFull, DiskFailed, StateDamaged."""
        async with self._writing:
            try:
                await self._flush()
            finally:
                self._flushing = False
                if self.half_applied:
                    self._take_back()

    async def _flush(self) -> None:
        counter = self.applied
        changes = self.state.freeze()
        self._flushing = True
        written = asyncio.ensure_future(asyncio.to_thread(self._write, changes))
        try:
            await asyncio.shield(written)
        except asyncio.CancelledError:
            await asyncio.wait({written})  # the thread cannot be stopped, and its environment must stay open
            self.state.table.refused()
            raise
        except PixiuError as problem:
            self.state.table.refused()
            if isinstance(problem, DiskFull):
                self.full = str(problem)
            raise
        self.full = ""  # whoever asked for it: a try that finds nothing left to write would not say so
        self.store.renew()
        self.state.table.thawed()
        self._look_for_space()
        record = self.state.doubled.record
        if record.digest or record.phase is not Phase.OPEN:  # nobody asks for it any more, and LMDB keeps what it frees
            self._close_cut()
        self.transactions += 1
        self.flushed = counter

    def _look_for_space(self) -> None:
        live, self.beyond = self.store.bytes_live, ""
        if live > self._store_bytes:
            self.beyond = (
                f"the inboxes in {self._folder} hold {live >> 20} MiB, pi.store_mb is {self._store_bytes >> 20}: "
                "acknowledged and deleted entries free space when pi.dedupe_s is over, or raise pi.store_mb and start again"
            )

    def _write(self, changes: dict[bytes, bytes | None]) -> None:
        self.store.write(changes)
        self.store.sync()

    async def snapshot(self, folder: Path) -> int:
        """Write the state as it is at one applied counter into an empty folder; returns that counter. `apply` goes on."""
        await self.flush()
        await asyncio.to_thread(self.store.copy, folder / FILE_NAME)
        try:
            return await asyncio.to_thread(self._checked, folder)
        except StateDamaged:
            await self._look_for_damage()
            raise

    async def _look_for_damage(self) -> None:
        """Say what is broken in the state; nothing, where only a copy of it is."""
        try:
            await self.verify()
        except StateDamaged as damage:
            self.damaged = str(damage)
            self._on_failed(damage)

    async def check(self, folder: Path) -> None:
        """Check every value of a snapshot. Raises StateDamaged, DiskFailed."""
        await asyncio.to_thread(self._checked, folder)

    def _checked(self, folder: Path) -> int:
        """The position of a snapshot whose every value is whole."""
        return self._position_of(folder, check=True)

    def _position_of(self, folder: Path, *, check: bool = False) -> int:
        """What a snapshot holds: a transaction may have come between the flush and the copy."""
        store = self._store_in(folder)
        try:
            after: bytes | None = b"" if check else None
            while after is not None:
                after = store.verify(after, SCRUB_KEYS)
                time.sleep(CHECK_PAUSE_S)
            return State(store, max_heads=2).applied.counter
        finally:
            store.close()
            (folder / LOCK_NAME).unlink(missing_ok=True)

    async def load(self, folder: Path) -> None:
        """Replace the state by a snapshot, durably. Nothing is applied meanwhile."""
        async with self._writing:
            await asyncio.to_thread(self._position_of, folder)  # what cannot be read is not taken
            self._close_cut()
            self.store.close()
            try:
                await asyncio.to_thread(install, folder / FILE_NAME, self._folder)
            finally:
                self._open()
        self.on_doubling()

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
            except DiskFull:
                continue
            except PixiuError as failed:
                self._on_failed(failed)
                return

    async def _scrub(self, keys_per_s: int) -> None:
        """Look through everything that is stored, again and again, for values that the disk changed."""
        after: bytes | None = b""
        while True:
            await asyncio.sleep(SCRUB_KEYS / keys_per_s)
            try:
                async with self._writing:  # not while a snapshot takes the store's place
                    begin = after or b""
                    after = await _to_its_end(lambda begin=begin: self.store.verify(begin, SCRUB_KEYS))  # type: ignore[misc]
            except StateDamaged as damage:
                self.damaged = str(damage)
                self._on_failed(damage)
                await asyncio.sleep(DAMAGED_S)
                continue
            except PixiuError as failed:
                self._on_failed(failed)
                return
            if after is None and not self.stop.at:
                self.damaged = ""  # all of it was looked at once more, from its beginning or from what was broken
            self.scrubbed += SCRUB_KEYS

    async def verify(self) -> int:
        """Check every value of what is applied; how many there are. What a full disk does not take is left out.

        Raises StateDamaged, DiskFailed.
        """
        if self.stop.at:
            raise StateDamaged(self.stop.text)
        if self.applied != self.flushed:
            with contextlib.suppress(DiskFull):
                await self.flush()
        values, after = 0, b""
        while True:
            async with self._writing:  # not while a snapshot takes the store's place
                following = await _to_its_end(lambda after=after: self.store.verify(after, SCRUB_KEYS))  # type: ignore[misc]
            if following is None:
                async with self._writing:
                    return values + await _to_its_end(lambda after=after: self.store.count_from(after))  # type: ignore[misc]
            values, after = values + SCRUB_KEYS, following

    async def broken(self) -> list[bytes]:
        """The keys of stored values that are not whole, and of the one that an entry met; at most `MAX_BROKEN`. Raises DiskFull,
        DiskFailed."""
        if self.applied != self.flushed:
            await self.flush()
        keys: list[bytes] = []
        after: bytes | None = b""
        while after is not None and len(keys) < MAX_BROKEN:
            async with self._writing:  # not while a snapshot takes the store's place
                begin = after
                after = await _to_its_end(lambda begin=begin: self.store.verify(begin, SCRUB_KEYS, keys))  # type: ignore[misc]
        met = [key for key in self.stop.keys if key not in keys]  # it may be missing
        return met + keys[: MAX_BROKEN - len(met)]

    async def close(self) -> None:
        """Write what is left, as far as the disk takes it; what it does not is in the log."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not self.opened:
            return
        with contextlib.suppress(PixiuError):
            await self.flush()
        async with self._writing:
            self._close_cut()
            self.store.close()
