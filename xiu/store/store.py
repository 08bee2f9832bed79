"""The state of a Xiu in RocksDB: decisions, written in batches together with their position in the log.

RocksDB's own log is off: entries after the flushed position are applied again from the replicated log. All keys are in one column
family, so that after a crash its files hold the state at one applied position.

Calls are short except `open`, `flush` and `close`; one thread writes, `flush` may run in another.

Source: docs/stores.md.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar
from weakref import WeakSet

from rocksdict import BlockBasedOptions, Cache, Checkpoint, Options, Rdict, WriteBatch, WriteOptions

from pixiu.durable import make_directory
from pixiu.errors import DiskFailed, DiskFull, StorageError, StoreDamaged, Unavailable
from xiu.records import block as blocks
from xiu.records.block import Block
from xiu.state.keys import BLOCKS, HEAD_KEY, HOLDS, KEY, MARK, MARKS
from xiu.state.readers import Held, of_row
from xiu.state.state import Blocked, Decision, Head
from xiu.store.manifest import cut_torn_tail

T = TypeVar("T")
BLOOM_BITS: Final = 10
MEMTABLES: Final = 4
FULL: Final = ("no space left", "disk quota exceeded", "space limit")
CORRUPT: Final = ("corruption", "checksum mismatch")
READING: Final = re.compile(r"while (?:pread|reading|open a file for random read|opening a file for sequentially reading)")
"""RocksDB's operation, in the words of its errors: unreadable data is repaired like wrong data."""
BUSY: Final = ("write stall", "incomplete")


class Cursor:
    """Rows in the order of their keys, as of one moment."""

    def __init__(self, rows: Any, error: Callable[[str, Exception], StorageError]) -> None:
        self._rows, self._error = rows, error
        self._moving = threading.Lock()
        """Held while RocksDB reads for it: the store may close it from another thread."""

    def seek(self, key: bytes) -> tuple[bytes, bytes] | None:
        """Return the first row at or after a key; None at the end. Raises StoreDamaged, DiskFailed, Unavailable."""
        return self._moved(lambda rows: rows.seek(key))

    def next(self) -> tuple[bytes, bytes] | None:
        """Return the row after the last one; None at the end. Raises StoreDamaged, DiskFailed, Unavailable."""
        return self._moved(lambda rows: rows.next())

    def close(self) -> None:
        """Release the store's files, which stay open until then, even if the store is closed."""
        with self._moving:
            self._rows = None

    def _moved(self, move: Callable[[Any], None]) -> tuple[bytes, bytes] | None:
        with self._moving:
            if self._rows is None:
                raise Unavailable("the store was opened again after its disk was full; read again")
            move(self._rows)
            if self._rows.valid():
                return self._rows.key(), self._rows.value()
            try:
                self._rows.status()
            except Exception as problem:
                raise self._error("read", problem) from problem
            return None


class Store:
    """The RocksDB store of one partition.

    Args:
        folder: created if missing. No other process may have it open: the replicated log beside it ensures that.
        memtable_bytes: collected in memory before they become a file.
        cache_bytes: for blocks that were read.

    Raises DiskFull, DiskFailed, StoreDamaged.
    """

    def __init__(self, folder: Path, *, memtable_bytes: int = 32 << 20, cache_bytes: int = 32 << 20) -> None:
        self.folder = folder
        self._memtable_bytes, self._cache_bytes = memtable_bytes, cache_bytes
        make_directory(folder)
        self._swapping = threading.RLock()
        """Held while the database, its head and its flushed position are replaced."""
        self._busy = threading.RLock()
        """Held while another thread flushes or copies the database, which cannot be closed meanwhile."""
        self._cursors: WeakSet[Cursor] = WeakSet()
        """Over the database, which cannot be opened again before they are closed."""
        self.notice = ""
        """A problem that was mended when the store was opened."""
        self._db = self._open()
        self.head = self._read_head()
        self.flushed = self.head.applied.counter
        """Counter up to which a crash loses nothing."""

    def _open(self) -> Rdict:
        options = Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_write_buffer_size(self._memtable_bytes)
        options.set_max_write_buffer_number(MEMTABLES)
        options.set_max_log_file_size(4 << 20)
        options.set_keep_log_file_num(4)
        tables = BlockBasedOptions()
        tables.set_bloom_filter(BLOOM_BITS, False)
        tables.set_block_cache(Cache(self._cache_bytes))
        options.set_block_based_table_factory(tables)
        try:
            db = self._rocksdb(options)
        except StoreDamaged:
            if not self._cut_torn_tail():
                raise
            db = self._rocksdb(options)
        writes = WriteOptions()
        writes.disable_wal = True  # type: ignore[method-assign, assignment]  # a property, whatever its stub says
        writes.no_slowdown = True
        db.set_write_options(writes)
        return db

    def _rocksdb(self, options: Options) -> Rdict:
        try:
            return Rdict(str(self.folder), options)
        except Exception as problem:
            raise self._error("opened", problem) from problem

    def _cut_torn_tail(self) -> bool:
        try:
            aside = cut_torn_tail(self.folder)
        except OSError as problem:
            raise self._error("opened", problem) from problem
        if aside is not None:
            self.notice = (
                f"the store in {self.folder} was torn by a power cut; what was not synced is cut, and comes again from the log; "
                f"as it was it is kept as {aside}, which may be removed"
            )
        return aside is not None

    def _read_head(self) -> Head:
        value = self._get(HEAD_KEY)
        head = Head() if value is None else Head.decode(value)
        if head is None:
            raise StoreDamaged(f"{self.folder}: the head is broken; move the folder away, it is filled again from a replica")
        return head

    def _get(self, key: bytes) -> bytes | None:
        return self.get_many([key])[0]

    def get_many(self, keys: list[bytes]) -> Sequence[bytes | None]:
        """Return the values of keys. Raises StoreDamaged, DiskFailed."""
        found: Any = self._read(lambda db: db.get(keys))  # type: ignore[arg-type]  # a list of any keys
        return list(found)

    def _read(self, read: Callable[[Rdict], T]) -> T:
        """Read; once more if another database took this one's place, which another thread may see closed."""
        while True:
            db = self._db
            try:
                return read(db)
            except Exception as problem:
                with self._swapping:
                    if self._db is db:
                        raise self._error("read", problem) from problem

    def write(self, decisions: Iterable[Decision]) -> None:
        """Write decisions, in order, in one batch with the last head. Raises Blocked, DiskFailed: then nothing was written."""
        batch = WriteBatch(raw_mode=True)
        put = batch.put
        head: Head | None = None
        for decision in decisions:
            for key, value in decision.puts:
                put(key, value)
            for begin, end in decision.deletes:
                batch.delete_range(begin, end)
            head = decision.head
        if head is None:
            return
        put(HEAD_KEY, head.encode())
        self._write(batch)
        self.head = head

    def _write(self, batch: WriteBatch) -> None:
        try:
            self._db.write(batch)
        except Exception as problem:
            error = self._error("written", problem)
            if isinstance(error, DiskFull) or any(mark in str(problem).lower() for mark in BUSY):
                raise Blocked(str(error), full=isinstance(error, DiskFull)) from problem
            raise error from problem

    def flush(self) -> int:
        """Make everything written so far durable; return the counter up to which it is. Blocking; for a thread of its own. If the
        store was opened again or replaced meanwhile, that one's counter is returned. Raises DiskFull, DiskFailed."""
        with self._swapping:
            db, counter = self._db, self.head.applied.counter
        try:
            with self._busy:
                db.flush()
        except Exception as problem:
            if self._db is db:
                raise self._error("flushed", problem) from problem
        with self._swapping:
            if self._db is db:
                self.flushed = max(self.flushed, counter)
            return self.flushed

    def checkpoint(self, folder: Path) -> None:
        """Copy the state as a store of its own, in hard links. Blocking. Raises DiskFull, DiskFailed."""
        try:
            with self._busy:
                Checkpoint(self._db).create_checkpoint(str(folder))
        except Exception as problem:
            raise self._error("copied", problem) from problem

    def block_of(self, sequence: int) -> Block | None:
        """Return the block that contains a sequence; None if there is none. Raises StoreDamaged, DiskFailed."""
        found = self._value_of(sequence)
        if found is None:
            return None
        first, value = found
        block = blocks.decode(first, value)
        if block is None:
            raise StoreDamaged(f"{self.folder}: the block of sequence {first:012x} has a wrong CRC")
        return block if sequence <= block.last else None

    def row_before(self, key: bytes) -> tuple[bytes, bytes] | None:
        """Return the last row at or before a key; None: there is none. Raises StoreDamaged, DiskFailed."""

        def read(db: Rdict) -> tuple[bytes, bytes] | None:
            rows = db.iter()
            rows.seek_for_prev(key)
            if rows.valid():
                return rows.key(), rows.value()
            rows.status()
            return None

        return self._read(read)

    def _value_of(self, sequence: int) -> tuple[int, bytes] | None:
        found = self.row_before(KEY.pack(BLOCKS, sequence))
        return (KEY.unpack(found[0])[1], found[1]) if found is not None and found[0][:1] == BLOCKS else None

    def next_first(self, sequence: int) -> int | None:
        """Return the first sequence of the first block at or after one; None at the end. Raises StoreDamaged, DiskFailed."""
        for first, _ in self._rows(BLOCKS, sequence):
            return first
        return None

    def last_before(self, sequence: int) -> int:
        """Return the last sequence of the last block that begins before one; 0: there is none. Raises StoreDamaged, DiskFailed."""
        found = self._value_of(sequence - 1) if sequence > 0 else None
        if found is None:
            return 0
        block = blocks.decode(*found)
        if block is None:
            raise StoreDamaged(f"{self.folder}: the block of sequence {found[0]:012x} has a wrong CRC")
        return block.last

    def scan(self, sequence: int) -> Iterator[Block]:
        """Yield blocks in order, from the one that contains a sequence, as of the call. Raises StoreDamaged, DiskFailed,
        Unavailable."""
        found = self._value_of(sequence)
        begin = sequence
        if found is not None:
            block = blocks.decode(*found)
            begin = found[0] if block is None or block.last >= sequence else sequence
        for first, value in self._rows(BLOCKS, begin):
            block = blocks.decode(first, value)
            if block is None:
                raise StoreDamaged(f"{self.folder}: the block of sequence {first:012x} has a wrong CRC")
            yield block

    def readers(self) -> dict[str, Held]:
        """The readers for which retention waits. Raises StoreDamaged, DiskFailed."""
        found: dict[str, Held] = {}
        with contextlib.closing(self.cursor()) as rows:
            row = rows.seek(HOLDS)
            while row is not None and row[0][:1] == HOLDS:
                name, held = of_row(*row)
                found[name] = held
                row = rows.next()
        return found

    def marks(self, begin: int = 0) -> Iterator[tuple[int, int, int]]:
        """Yield (sequence, clock µs, bytes stored before it) of every mark from a sequence on, in order. Raises StoreDamaged,
        DiskFailed."""
        for sequence, value in self._rows(MARKS, begin):
            at_us, stored = MARK.unpack(value)
            yield sequence, at_us, stored

    def _rows(self, space: bytes, begin: int) -> Iterator[tuple[int, bytes]]:
        with contextlib.closing(self.cursor()) as rows:
            row = rows.seek(KEY.pack(space, begin))
            while row is not None and row[0][:1] == space:
                yield KEY.unpack(row[0])[1], row[1]
                row = rows.next()

    def cursor(self) -> Cursor:
        """Return a cursor over all rows as of now, for one thread at a time. Raises DiskFailed, StoreDamaged."""
        with self._swapping:
            cursor = Cursor(self._read(lambda db: db.iter()), self._error)
            self._cursors.add(cursor)
        return cursor

    def put_rows(self, rows: Iterable[tuple[bytes, bytes]], head: Head | None = None) -> None:
        """Write rows as they are, then the head. Raises Blocked, DiskFailed: then nothing was written."""
        batch = WriteBatch(raw_mode=True)
        for key, value in rows:
            batch.put(key, value)
        if head is not None:
            batch.put(HEAD_KEY, head.encode())
        self._write(batch)
        self.head = head or self.head

    def adopt(self, other: Store) -> None:
        """Take over another store's database, which is open and durable, and give it this one's, to be closed and removed. Readers
        of the old database end undisturbed."""
        with self._swapping:
            self._db, other._db = other._db, self._db
            self._cursors, other._cursors = other._cursors, self._cursors
            self.folder, other.folder = other.folder, self.folder
            self.head, self.flushed = other.head, other.flushed

    def reopen(self) -> None:
        """Open again after a failed write: changes that were not flushed come again from the log. Reads of other threads wait;
        cursors end with Unavailable. Raises Blocked while the database is flushed or copied; DiskFull, DiskFailed, StoreDamaged."""
        if not self._busy.acquire(blocking=False):
            raise Blocked(f"the store in {self.folder} is being flushed or copied", full=False)
        try:
            self._reopen()
        finally:
            self._busy.release()

    def _reopen(self) -> None:
        with self._swapping:
            for cursor in tuple(self._cursors):
                cursor.close()
            with contextlib.suppress(Exception):  # it failed before: the log has everything that could be lost
                self._db.close()
            self._db = self._open()
            self.head = self._read_head()
            self.flushed = self.head.applied.counter

    def close(self) -> None:
        """Close the files. Changes that were not flushed come again from the log."""
        try:
            self._db.close()
        except Exception as problem:
            raise self._error("closed", problem) from problem

    def _error(self, what: str, problem: Exception) -> StorageError:
        text = str(problem)
        lower = text.lower()
        where = f"the store in {self.folder} cannot be {what}: {text}"
        if any(mark in lower for mark in FULL):
            return DiskFull(f"{where}; free some space, writes go on by themselves")
        if any(mark in lower for mark in CORRUPT) or ("input/output error" in lower and READING.search(lower)):
            return StoreDamaged(where)
        return DiskFailed(where)
