"""Pi's state over its store, as replication uses it: entries are applied at once, a thread writes transactions.

Source: docs/stores.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from cluster.core.cancellation import to_its_end
from cluster.replication.model import Entry, Position
from cluster.store.doubling.copying import Copying
from cluster.store.doubling.phases import Phase
from pi.early import Standstill
from pi.events import NO_DEVICE
from pi.inboxes.reading import Read
from pi.keys import EPOCH_S, ValueDamaged
from pi.state import Results, State
from pi.store.digest import Digest
from pi.store.store import FILE_NAME, LOCK_NAME, StateStore, early_in, install, mark, set_aside
from pi.store.view import MARK_KIND, View, Views
from pixiu.errors import DiskFailed, DiskFull, PixiuError, StateDamaged, StorageError, Unavailable

FLUSH_CHANGES: Final = 50_000
"""Number of changes that are written before the interval is over."""
ENCODED_HEADS: Final = 500
"""Inboxes that are encoded for a transaction in one turn of the event loop, about 2 ms."""
CLEAN_CHANGES: Final = 4_000
"""The same while moved values are deleted: each search for more of them looks through all changes."""
MAX_CHANGES: Final = 400_000
"""Limit of changes that wait. Policy: above it writes are refused with OVERLOADED, and nothing is applied."""
RETRY_S: Final = 0.5
"""Interval of retries while the disk is full, seconds."""
DAMAGED_S: Final = 10.0
"""Pause of the scrub after a broken value, seconds: meanwhile there may be a replica for a repair."""
MAX_BROKEN: Final = 10_000
"""Limit of values that are given up at a time. Policy: the rest is found the next time."""
RESERVE_BYTES: Final = 1 << 30
"""Space by which the store may grow beyond its bound: for entries that were in the log by then, acknowledgements, sweeps, and pages
that a transaction leaves. It is allocated when needed."""
SCRUB_KEYS: Final = 500
"""Keys checked at a time."""
CHECK_PAUSE_S: Final = 0.0005
"""Pause after `SCRUB_KEYS` of a snapshot, seconds: the event loop needs the interpreter, too."""

T = TypeVar("T")


class Machine:
    """Pi's state machine: the state of one partition, from the replicated log.

    Args:
        folder: of the store.
        store_bytes: its bound: no mail and no new device is accepted while it holds more.
        heads: kept in memory.
        flush_interval_s: interval of transactions.
        on_failed: called when nothing more can be written, and with damage found by the scrub, or repeatedly by an entry that
            cannot be applied.

    Call `open` first. Raises StateDamaged, DiskFull, DiskFailed.
    """

    def __init__(
        self, folder: Path, store_bytes: int, heads: int, flush_interval_s: float, on_failed: Callable[[PixiuError], None],
    ) -> None:  # fmt: skip
        self._folder, self._store_bytes, self._heads = folder, store_bytes, heads
        self.full = ""
        """Why the last write failed for lack of space; empty: it did not."""
        self.beyond = ""
        """Why no mail and no new device may be accepted, although entries in the log are applied; empty: they may. Each replica
        determines it by itself, and a leader checks it before it proposes, so that all apply the same."""
        self.damaged = ""
        """Damage found by the scrub, a read or an entry; empty: none."""
        self.transactions = 0
        self.scrubbed = 0
        self._interval_s = flush_interval_s
        self._on_failed = on_failed
        self._writing = asyncio.Lock()
        self._copying = asyncio.Lock()
        """Held while the store is copied, replaced or closed; taken before `writing`. Transactions are written during a copy."""
        self.opened = False
        self._flushing = False
        """True while a thread may be writing frozen changes."""
        self.half_applied = False
        """True from an entry that broke off until the transaction being written has ended: the state in memory must never be
        written."""
        self.stop = Standstill()
        """The entry that cannot be applied, if any."""
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.views = Views()
        self.cut: View | None = None
        """For a child: the state at the moment when it opened."""
        self.advanced = asyncio.Event()
        """Set when something was applied."""
        self.on_doubling: Callable[[], None] = lambda: None
        """Called when the record of the partition's doubling has changed."""

    def open(self) -> bool:
        """Open the store. Returns True if a damaged one was set aside, and this one is empty."""
        aside = set_aside(self._folder)
        try:
            self._open()
        except ValueDamaged as damage:  # the state's position in the log is unknown: it must be rebuilt
            mark(self._folder, str(damage))
            aside = set_aside(self._folder)
            self._open()
        return aside

    def mark_damaged(self, reason: str) -> None:
        """Have the next start set the store aside and take the state from the log or another replica. Raises DiskFull,
        DiskFailed."""
        mark(self._folder, reason, self.stop.kept())

    def _open(self) -> None:
        self._adopt(*self._opened())

    def _opened(self) -> tuple[StateStore, State]:
        """Open the store in the folder, and load the state from it."""
        store = self._store_in(self._folder)
        try:
            store.sync()  # the last transaction of a killed process may be only in the page cache
            return store, State(store, max_heads=self._heads)
        except StorageError:
            store.close()
            raise

    def _adopt(self, store: StateStore, state: State) -> None:
        self.store = store
        self._begin(state)
        self.stop = Standstill()
        self.stop.remember(early_in(self._folder))
        self.flushed = self.state.applied.counter
        """Counter up to which the state is durable."""
        self.full = ""  # also true of a snapshot that replaced what could not be written
        self._look_for_space()
        self.opened = True

    def _begin(self, state: State) -> None:
        """Begin with the state that is in the store."""
        self.state = state
        self.copying.on_open = self._keep_cut
        self.half_applied = False

    def _store_in(self, folder: Path) -> StateStore:
        return StateStore(folder, self._store_bytes + RESERVE_BYTES)

    @property
    def applied(self) -> int:
        """The counter of the last entry in the state."""
        return self.state.applied.counter

    @property
    def copying(self) -> Copying:
        """The doubling of the state."""
        return self.state.copying

    @property
    def position(self) -> Position:
        """Position of the last entry in the state."""
        return self.state.applied

    @property
    def given_up(self) -> int:
        """Counter of the last entry at which values were given up; above `flushed`, the store still holds the broken ones."""
        return self.state.given_up

    @property
    def unwritten(self) -> int:
        """Number of changes that wait to be written."""
        return self.state.unwritten

    @property
    def stored(self) -> tuple[int, int]:
        """Keys and bytes of the whole state."""
        return self.store.entries, self.store.bytes_used

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
        """Apply committed entries. Raises DiskFull if too many changes wait to be written: nothing was applied. Raises StateDamaged
        if an entry met a broken value: the state is the stored one again, and entries before that one must be applied again."""
        if self.half_applied:
            raise StateDamaged(self.stop.text)
        if self.stop.at:
            entries = [entry for entry in entries if entry.counter < self.stop.at]
            if not entries:
                self._say()
                raise StateDamaged(self.stop.text)
        if self.behind:
            raise DiskFull(self.full or "LMDB writes lag behind the log")
        record = self.copying.record
        try:
            found = self._apply_early(entries) if self.stop.early else self._apply(entries)
        except StateDamaged as damage:
            self.stop.stop(self.applied + 1, damage)
            self.damaged, self.half_applied = self.stop.text, True
            if not self._flushing:
                self._take_back()
            self._say()
            raise StateDamaged(self.stop.text) from damage
        many = FLUSH_CHANGES if self.copying.record.phase is not Phase.CLEANING else CLEAN_CHANGES
        if self.state.unwritten >= many:
            self._wake.set()
        self.advanced.set()
        if self.copying.record is not record:
            self.on_doubling()
        return found

    def look_ahead(self, entries: Sequence[Entry]) -> None:
        """Search committed entries after the one that cannot be applied for one that gives up values."""
        if self.stop.look_ahead(entries):
            self.damaged = ""  # the scrub reports remaining damage

    @property
    def stands(self) -> bool:
        """True if every entry before the one that cannot be applied is in the state."""
        return self.stop.at == self.applied + 1 and not self.half_applied

    @property
    def refuses(self) -> StateDamaged | DiskFull | None:
        """Reason for refusing writes that another replica may accept."""
        if self.stop.at:
            return StateDamaged(self.stop.text)
        return DiskFull(self.full) if self.full else None

    def _take_back(self) -> None:
        """Go back to the last transaction, before the entry that broke off; the log has the rest. Raises DiskFailed."""
        try:
            self._begin(State(self.store, max_heads=self._heads))
        except StateDamaged as damage:  # the next start sets the store aside
            raise DiskFailed(f"{damage}; it is rebuilt at the next start") from damage
        self.on_doubling()

    def _say(self) -> None:
        """Report the standstill at most every `DAMAGED_S`: another replica may be undamaged by now."""
        if self.stop.is_due(time.monotonic(), DAMAGED_S):
            self._on_failed(StateDamaged(self.stop.text))

    def _apply(self, entries: Sequence[Entry]) -> list[list[Results]]:
        return self._apply_to_marks(entries) if self.views else self.state.apply(entries)

    def _apply_early(self, entries: Sequence[Entry]) -> list[list[Results]]:
        """Apply entries, and give up values before some of them."""
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
        self.close_cut()
        with contextlib.suppress(StorageError):  # its digest stays unknown
            self.cut = self.view()

    def close_cut(self) -> None:
        """Close the view of the cut, if there is one."""
        if self.cut is not None:
            self.cut.close()
            self.cut = None

    def _apply_to_marks(self, entries: Sequence[Entry]) -> list[list[Results]]:
        """Apply entries, and create the views that callers wait for."""
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
        """Create a view of the current state; the caller closes it. Raises StorageError."""
        return View(self.store.reader(), self.state.unstored(), self.applied)

    async def read_view(self, view: View, take: Callable[[list[tuple[bytes, bytes]]], T]) -> T | None:
        """Process the next rows of a view with a function in a thread; None at the end. Raises Unavailable if the state was
        replaced meanwhile, StorageError."""

        def part() -> T | None:
            rows = view.part()
            return None if rows is None else take(rows)

        async with self._writing:  # not while a snapshot takes the store's place
            if view.reader.store is not self.store:
                raise Unavailable("a snapshot took this replica's state's place; ask it again")
            return await to_its_end(asyncio.to_thread(part))

    async def digest(self, view: View, moves: Callable[[bytes], bool] | None = None) -> Digest:
        """Digest a view to its end, or those of its rows whose keys are wanted. Raises as `read_view`."""
        digest = Digest()

        def take(rows: list[tuple[bytes, bytes]]) -> bool:
            digest.add(rows if moves is None else [row for row in rows if moves(row[0])])
            return True

        while await self.read_view(view, take):
            pass
        return digest

    @property
    def writing(self) -> asyncio.Lock:
        """Held while the store is written, replaced by a snapshot, or read in a thread."""
        return self._writing

    @property
    def behind(self) -> bool:
        """True if too many changes wait to be written."""
        return self.state.unwritten >= MAX_CHANGES

    def read(
        self, uin: int, number: int, lane: int, session: int, start: int | None, count: int, before: int = 0,
        devices: bool = False, notes: bool = False,
    ) -> Read:  # fmt: skip
        """Serve a `pi.events.ReadRequest`. Raises ReadRefusal, StateDamaged."""
        if number == NO_DEVICE:
            found = self.state.peek(uin, lane, start or 0, count, before, devices=devices)
        else:
            found = self.state.read(uin, number, lane, session, start, count, before, devices=devices)
        if notes:
            kept, generation = self.state.notes.of(uin)
            return found._replace(notes=kept, generation=generation)
        return found

    async def flush(self) -> None:
        """Write one transaction, durably. Raises DiskFull, DiskFailed, StateDamaged."""
        async with self._writing:
            try:
                await self._flush()
            finally:
                self._flushing = False
                if self.half_applied:
                    self._take_back()

    async def _flush(self) -> None:
        counter = self.applied
        changes = self.state.begin_freeze()
        self._flushing = True
        try:
            await to_its_end(self._write_frozen(changes))
        except asyncio.CancelledError:
            self.state.table.refused()
            raise
        except PixiuError as problem:
            self.state.table.refused()
            if isinstance(problem, DiskFull):
                self.full = str(problem)
            raise
        self.full = ""  # for every caller: a further try with nothing left to write would not clear it
        self.store.renew()
        self.state.table.thawed()
        self._look_for_space()
        record = self.copying.record
        if record.digest or record.phase is not Phase.OPEN:  # not needed any more; while open, LMDB cannot reuse pages
            self.close_cut()
        self.transactions += 1
        self.flushed = counter

    def _look_for_space(self) -> None:
        live, self.beyond = self.store.bytes_live, ""
        if live > self._store_bytes:
            self.beyond = (
                f"the inboxes in {self._folder} hold {live >> 20} MiB, pi.store_mb is {self._store_bytes >> 20}: "
                "acknowledged and deleted entries free space when pi.dedupe_s is over, or raise pi.store_mb and start again"
            )

    async def _write_frozen(self, changes: dict[bytes, bytes | None]) -> None:
        while self.state.inboxes.encode_frozen(ENCODED_HEADS):
            await asyncio.sleep(0)
        await asyncio.to_thread(self._write, changes)

    def _write(self, changes: dict[bytes, bytes | None]) -> None:
        self.store.write(changes)
        self.store.sync()

    async def snapshot(self, folder: Path) -> int:
        """Write the state at one applied counter into an empty folder; return that counter. `apply` goes on."""
        await self.flush()
        async with self._copying:
            await to_its_end(asyncio.to_thread(self.store.copy, folder / FILE_NAME))
        try:
            return await asyncio.to_thread(self._checked, folder)
        except StateDamaged:
            await self._look_for_damage()
            raise

    async def _look_for_damage(self) -> None:
        """Report damage of the state, if not only its copy is broken."""
        try:
            await self.verify()
        except StateDamaged as damage:
            self.damaged = str(damage)
            self._on_failed(damage)

    async def check(self, folder: Path) -> None:
        """Check every value of a snapshot. Raises StateDamaged, DiskFailed."""
        await asyncio.to_thread(self._checked, folder)

    def _checked(self, folder: Path) -> int:
        """Check every value of a snapshot; return its position."""
        return self._position_of(folder, check=True)

    def _position_of(self, folder: Path, *, check: bool = False) -> int:
        """Read the position from a snapshot: a transaction may have come between the flush and the copy."""
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
        """Replace the state by a snapshot, durably: it is opened beside the old store, which is read meanwhile, and takes its place
        in one turn of the event loop. Nothing is applied meanwhile."""
        await to_its_end(self._load(folder))

    async def _load(self, folder: Path) -> None:
        def opened() -> tuple[StateStore, State]:
            self._position_of(folder)  # unreadable snapshots are not taken
            install(folder / FILE_NAME, self._folder)
            return self._opened()

        async with self._copying, self._writing:
            store, state = await asyncio.to_thread(opened)
            self.close_cut()
            old = self.store
            self._adopt(store, state)
            old.close()
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
            except StateDamaged as damage:  # a page of the tree: the log has what waits, and another replica may be undamaged
                self.damaged = str(damage)
                self._on_failed(damage)
                await asyncio.sleep(DAMAGED_S)
            except PixiuError as failed:
                self._on_failed(failed)
                return

    async def _scrub(self, keys_per_s: int) -> None:
        """Check all stored values, again and again, for changes by the disk."""
        after: bytes | None = b""
        while True:
            await asyncio.sleep(SCRUB_KEYS / keys_per_s)
            try:
                async with self._writing:  # not while a snapshot takes the store's place
                    begin = after or b""
                    after = await to_its_end(asyncio.to_thread(self.store.verify, begin, SCRUB_KEYS))
            except StateDamaged as damage:
                self.damaged = str(damage)
                self._on_failed(damage)
                await asyncio.sleep(DAMAGED_S)
                continue
            except PixiuError as failed:
                self._on_failed(failed)
                return
            if after is None and not self.stop.at:
                self.damaged = ""  # everything was checked once more, from the beginning or from the broken value on
            self.scrubbed += SCRUB_KEYS

    async def verify(self) -> int:
        """Check every applied value; return the number of values. Changes that a full disk does not take are left out.

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
                following = await to_its_end(asyncio.to_thread(self.store.verify, after, SCRUB_KEYS))
            if following is None:
                async with self._writing:
                    return values + await to_its_end(asyncio.to_thread(self.store.count_from, after))
            values, after = values + SCRUB_KEYS, following

    async def broken(self) -> list[bytes]:
        """Return the keys of broken stored values, and of the one that an entry met; at most `MAX_BROKEN`. Raises DiskFull,
        DiskFailed."""
        if self.applied != self.flushed:
            await self.flush()
        keys: list[bytes] = []
        after: bytes | None = b""
        while after is not None and len(keys) < MAX_BROKEN:
            async with self._writing:  # not while a snapshot takes the store's place
                begin = after
                after = await to_its_end(asyncio.to_thread(self.store.verify, begin, SCRUB_KEYS, keys))
        met = [key for key in self.stop.keys if key not in keys]  # it may be missing
        return met + keys[: MAX_BROKEN - len(met)]

    async def close(self) -> None:
        """Write remaining changes, as far as the disk takes them; the log has the rest."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not self.opened:
            return
        with contextlib.suppress(PixiuError):
            await self.flush()
        async with self._copying, self._writing:
            self.opened = False
            self.close_cut()
            self.store.close()
