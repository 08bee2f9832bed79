"""A Xiu as the state machine of its replica: committed entries are written to RocksDB; snapshots are checkpoints of it.

    DATA_DIR/replica   log, snapshots on their way, audit (`cluster.replication.storage.folder`)
    DATA_DIR/store     RocksDB
    DATA_DIR/store.N   a store that took its place; the next start renames it

Source: docs/stores.md, docs/replication.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

from cluster.core.cancellation import to_its_end
from cluster.replication.model import Entry
from cluster.replication.storage.folder import free_bytes
from pixiu.durable import sync_directory
from pixiu.errors import DiskFailed, DiskFull, StorageError, StoreDamaged
from xiu.state.state import Blocked, Head
from xiu.store.repair import Row, rebuild, verify
from xiu.store.store import Cursor, Store

CHECKPOINT: Final = "store"
"""Its folder in a snapshot."""
BUILDING: Final = ".new"
"""Suffix of a store that is being built. A finished one has a number as suffix; the highest is the newest."""
ROWS_AT_ONCE: Final = 256
IN_LOOP_S: Final = 60.0
PUT_TRIES: Final = 1000
PUT_AGAIN_S: Final = 0.01
CATCH_UP_PAUSE_S: Final = 0.001
"""Pause between two turns that advance a new store, seconds: writes go on in between."""
T = TypeVar("T")


def _resolve(done: Future[T], call: Callable[[], T]) -> None:
    try:
        done.set_result(call())
    except BaseException as problem:
        done.set_exception(problem)


def _put_rows(store: Store, rows: Sequence[Row], head: Head | None = None) -> None:
    """Put rows; retry while the store is too busy."""
    for _ in range(PUT_TRIES):
        try:
            store.put_rows(rows, head)
        except Blocked as blocked:
            if blocked.full:
                raise DiskFull(str(blocked)) from blocked
            time.sleep(PUT_AGAIN_S)
        else:
            return
    raise DiskFailed(f"{store.folder} takes no writes")


def _rename(folder: Path, name: Path) -> None:
    """Rename a store's folder, durably: what is removed afterwards is gone at once."""
    folder.rename(name)
    sync_directory(name.parent)


def _remove(store: Store) -> None:
    """Close a store and remove its folder."""
    with contextlib.suppress(StorageError):  # its content is given up
        store.close()
    shutil.rmtree(store.folder, ignore_errors=True)


def settle(folder: Path) -> None:
    """Give the newest finished store its name, and remove those that it replaces, before anything is open. May be repeated after a
    crash."""
    shutil.rmtree(folder.with_suffix(BUILDING), ignore_errors=True)
    built = [path for path in folder.parent.glob(f"{folder.name}.*") if path.suffix[1:].isdigit()]
    if not built:
        return
    newest = max(built, key=lambda path: int(path.suffix[1:]))
    for old in [folder, *built]:
        if old != newest:
            shutil.rmtree(old, ignore_errors=True)
    newest.rename(folder)


class Machine:
    """Xiu's state machine: RocksDB over the replicated log.

    Args:
        folder: of RocksDB.
        memtable_bytes, cache_bytes: see `Store`.
        apply: writes committed entries that follow what is in the store, all or none; returns why it cannot now, or "".
        on_replaced: called when the store holds another state.
        on_damaged: called when a snapshot found damage; returns True if another replica can repair it.

    Call `open` first.
    """

    def __init__(
        self,
        folder: Path,
        memtable_bytes: int,
        cache_bytes: int,
        apply: Callable[[Sequence[Entry]], str],
        on_replaced: Callable[[], None],
        on_damaged: Callable[[str], bool] = lambda _text: False,
    ) -> None:
        self._folder = folder
        self._memtable_bytes, self._cache_bytes = memtable_bytes, cache_bytes
        self._apply, self._on_replaced, self._on_damaged = apply, on_replaced, on_damaged
        self._store: Store | None = None
        self.opened = False
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="xiu-store")
        self._replacing = asyncio.Lock()
        """Held while another store is made to take the store's place."""
        self.warning = ""
        """A problem found at the start."""
        self.notice = ""
        """A problem that was found at the start and mended."""

    @property
    def store(self) -> Store:
        """The open RocksDB store."""
        assert self._store is not None, "open was called"
        return self._store

    async def open(self) -> None:
        """Open RocksDB. A store damaged as a whole is set aside, and filled again from the log or a replica. Raises
        StorageError."""
        await self._in_thread(self._open)
        self.opened = True

    def _open(self) -> None:
        settle(self._folder)
        try:
            self._store = self._make(self._folder)
            self.notice = self._store.notice
        except StoreDamaged as damage:
            aside = self._folder.with_suffix(".damaged")
            shutil.rmtree(aside, ignore_errors=True)
            self._folder.rename(aside)
            self.warning = f"{damage}; it was set aside as {aside}, and is filled again from the log or from a replica"
            self._store = self._make(self._folder)

    def _make(self, folder: Path) -> Store:
        return Store(folder, memtable_bytes=self._memtable_bytes, cache_bytes=self._cache_bytes)

    def _beside(self) -> Path:
        """The folder of a store that is to take the store's place: the next start takes it for the newest."""
        folder = self.store.folder
        number = int(folder.suffix[1:]) if folder != self._folder else 0
        return self._folder.with_suffix(f".{number + 1}")

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run work in the thread of flushes, checkpoints, opening and closing, one at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    # --- what the replica calls

    @property
    def applied(self) -> int:
        """The counter of the last entry in the state."""
        return self.store.head.applied.counter

    @property
    def flushed(self) -> int:
        """Counter up to which the state is durable."""
        return self.store.flushed

    @property
    def clock_us(self) -> int:
        """The time of the state, Unix µs."""
        return self.store.head.clock_us

    def apply(self, entries: Sequence[Entry]) -> Sequence[object]:
        """Write these entries. Raises DiskFull if the store cannot write now."""
        if why := self._apply(entries):
            raise DiskFull(why)
        return (None,) * len(entries)

    def look_ahead(self, entries: Sequence[Entry]) -> None:
        """Do nothing: no log entry repairs a store; another replica does."""

    async def snapshot(self, folder: Path) -> int:
        """Make a checkpoint, in hard links; writes go on. Damage is repaired first if another replica has the missing rows; a
        single replica's damage is passed on as it is. Raises StorageError."""
        await self._in_thread(lambda: self.store.checkpoint(folder / CHECKPOINT))
        counter, damaged = await asyncio.to_thread(self._checked, folder)
        if damaged:
            text = f"{damaged} damaged place(s) were found when a snapshot was made"
            if self._on_damaged(text):
                raise StoreDamaged(f"{text}; they are repaired first")
        return counter

    def _checked(self, folder: Path) -> tuple[int, int]:
        """Check a checkpoint: (its position, number of damaged places)."""
        copy = self._make(folder / CHECKPOINT)
        try:
            with contextlib.closing(copy.cursor()) as cursor:
                damaged = verify(cursor).damaged
            return copy.head.applied.counter, damaged
        finally:
            copy.close()

    async def check(self, folder: Path) -> None:
        """Check that a checkpoint can be opened. Damaged places may be in that of a single replica: they are never served. Raises
        StorageError."""
        if not (folder / CHECKPOINT).is_dir():
            raise StoreDamaged("the snapshot holds no store")
        await asyncio.to_thread(self._checked, folder)

    async def load(self, folder: Path) -> None:
        """Replace the state by a checkpoint: it is opened beside the old store, which is read meanwhile, and takes its place in one
        turn of the event loop. Raises StorageError."""
        received = folder / CHECKPOINT
        if received.exists():
            await to_its_end(self._load(received))

    async def _load(self, received: Path) -> None:
        def opened() -> Store:
            beside = self._beside()
            _rename(received, beside)
            try:
                return self._make(beside)
            except StorageError:
                _rename(beside, received)  # the next start would take it for the newest
                raise

        async with self._replacing:
            new = await self._in_thread(opened)
            self.store.adopt(new)
            self._on_replaced()
            await self._in_thread(lambda: _remove(new))

    async def rebuild(
        self,
        peer: Callable[[int], Callable[[bytes], Iterator[Row]]],
        catch_up: Callable[[Store], bool],
        on_adopted: Callable[[], None],
    ) -> int:
        """Build a new store beside the old one, with damaged places from another replica, and adopt it. Returns the number of rows
        from there. Reads and writes go on meanwhile.

        Args:
            peer: returns another replica's rows from a key on, of a state with at least this entry.
            catch_up: applies some of the following log entries to the new store, in one turn of the event loop; returns True if it
                has reached the old one.
            on_adopted: called when the store holds the new state, which may be a little older: the rest is applied again.

        Raises StoreDamaged, DiskFull, DiskFailed, errors of `peer`: then nothing has changed.
        """
        loop = asyncio.get_running_loop()

        def in_loop(call: Callable[[], T]) -> T:
            """Call a function in the event loop: the state changes there, so the call sees it as of one moment."""
            done: Future[T] = Future()
            loop.call_soon_threadsafe(_resolve, done, call)
            return done.result(IN_LOOP_S)

        # In the thread that flushes: meanwhile no entry that the new state needs leaves the log.
        async with self._replacing:
            return await self._in_thread(lambda: self._rebuild(in_loop, peer, catch_up, on_adopted))

    def _rebuild(
        self,
        in_loop: Callable[[Callable[[], Any]], Any],
        peer: Callable[[int], Callable[[bytes], Iterator[Row]]],
        catch_up: Callable[[Store], bool],
        on_adopted: Callable[[], None],
    ) -> int:
        store = self.store
        cursor, head = in_loop(lambda: (store.cursor(), store.head))
        self.require_space()
        building, beside = self._folder.with_suffix(BUILDING), self._beside()
        shutil.rmtree(building, ignore_errors=True)
        try:
            taken = self._build(building, cursor, head, peer(head.applied.counter))
            _rename(building, beside)
            new = self._make(beside)
            try:
                while not in_loop(lambda: catch_up(new)):
                    time.sleep(CATCH_UP_PAUSE_S)
            except BaseException:
                new.close()
                raise
        except BaseException:
            if beside.exists():  # the next start would take it, or what is left of it, for the newer one
                _rename(beside, building)
            shutil.rmtree(building, ignore_errors=True)
            raise
        finally:
            cursor.close()

        def adopt() -> None:
            store.adopt(new)
            on_adopted()

        in_loop(adopt)
        _remove(new)  # here, beside the event loop: it may be large
        return taken

    def _build(self, folder: Path, cursor: Cursor, head: Head, peer: Callable[[bytes], Iterator[Row]]) -> int:
        new = self._make(folder)
        rows: list[Row] = []

        def put(row: Row) -> None:
            rows.append(row)
            if len(rows) >= ROWS_AT_ONCE:
                _put_rows(new, rows)
                rows.clear()

        try:
            taken = rebuild(cursor, head, put, peer)
            _put_rows(new, rows, head)
            new.flush()
        finally:
            new.close()
        return taken

    async def flush(self) -> None:
        """Make all writes durable. Raises DiskFull, DiskFailed."""

        def flush() -> None:
            self.store.flush()

        await self._in_thread(flush)

    def require_space(self) -> None:
        """Check that the disk has space for another store of this size. Raises DiskFull."""
        folder = self.store.folder
        needed = sum(file.stat().st_size for file in folder.glob("*.sst"))
        if self.free_bytes() < needed:
            raise DiskFull(f"a repair needs {needed >> 20} MiB on the disk of {folder}")

    def free_bytes(self) -> int:
        """Free bytes of the disk. Raises DiskFailed.

        Measured at the folder around the store: the store's own goes when another one replaces it.
        """
        return free_bytes(self._folder.parent)

    async def close(self) -> None:
        """Close the RocksDB store."""
        self.opened = False
        if self._store is not None:
            with contextlib.suppress(StorageError):
                await self._in_thread(self._store.close)
        self._executor.shutdown(wait=False)
