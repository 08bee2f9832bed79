"""Pi's state on a disk: an LMDB environment, written in few large transactions. Blocking.

A transaction syncs its pages before its root, and not the root: after a power cut the state is that of one of the last
transactions, whole. `sync` makes the newest one durable; only then may the log that it covers be deleted.

Source: docs/stores.md.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import lmdb

from pi.early import Early
from pi.keys import ValueDamaged, unseal
from pixiu.durable import make_directory, sync_directory
from pixiu.errors import DiskFailed, DiskFull, StateDamaged

COPY_SUFFIX: Final = ".copy"
FILE_NAME: Final = "data.mdb"
LOCK_NAME: Final = "lock.mdb"
DAMAGED_NAME: Final = "damaged"
"""File with the reason why this state must be set aside at the next start."""
EARLY_NAME: Final = "given-up"
"""File with the values that a rebuilt state gives up, and before which entries."""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
PART_BYTES: Final = 8 << 20
"""Values after which a reader returns what it has, bytes."""
_READING: Final = ("opened", "read", "verified")
SHORT_WRITE_BYTES: Final = 1 << 20
"""LMDB reports a partial write only as an I/O error. With less free space than this the reason is a full disk: LMDB writes at most
64 pages at a time."""


class StateReader:
    """Everything stored, as of one moment, for one thread at a time. `close` it before the store."""

    def __init__(self, store: StateStore, transaction: lmdb.Transaction) -> None:
        self.store = store
        self._transaction = transaction

    def rows(self, after: bytes, limit: int) -> tuple[list[tuple[bytes, bytes]], bytes | None]:
        """Return at most `limit` keys and values with CRCs, from a key on, and the key to go on from, None at the end. Raises
        DiskFailed, StateDamaged."""
        try:
            with self._transaction.cursor() as cursor:
                found = cursor.set_range(after) if after else cursor.first()
                rows, size = list[tuple[bytes, bytes]](), 0
                for key, value in cursor.iternext() if found else ():
                    rows.append((bytes(key), bytes(value)))
                    size += len(value)
                    if len(rows) == limit or size >= PART_BYTES:
                        break
                more = (len(rows) == limit or size >= PART_BYTES) and cursor.set_range(rows[-1][0] + b"\0")
                return rows, bytes(cursor.key()) if more else None
        except lmdb.Error as error:
            raise self.store.problem("read", error) from error

    def close(self) -> None:
        """Release the transaction."""
        self._transaction.abort()


class StateStore:
    """One environment; see `pi.inboxes.unwritten.Store` for the state's interface to it.

    `get` and `scan` are for one thread, `write`, `sync` and `copy` for another.

    Args:
        folder: created if missing. No other process may have it open: the log beside it is locked.
        map_bytes: size limit of the file.

    Every method raises DiskFull, DiskFailed or StateDamaged.
    """

    def __init__(self, folder: Path, map_bytes: int) -> None:
        self.folder = folder
        self._map_bytes = map_bytes
        try:
            make_directory(folder)
            if not (folder / FILE_NAME).exists():
                _make(folder, map_bytes)
            sync_directory(folder)  # the process that made the file may have been killed before that
            self._db = lmdb.open(
                str(folder), map_size=map_bytes, max_dbs=0, max_spare_txns=2, metasync=False, readahead=False, lock=True
            )
            self._reading = self._db.begin()
        except (OSError, lmdb.Error) as error:
            raise self.problem("opened", error) from error

    def get(self, key: bytes) -> bytes | None:
        """Return a value as of the last transaction before `renew`."""
        try:
            found: bytes | None = self._reading.get(key)
        except lmdb.Error as error:
            raise self.problem("read", error) from error
        return found

    def scan(self, low: bytes, high: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Keys from `low` to below `high`, in order."""
        try:
            with self._reading.cursor() as cursor:
                if not cursor.set_range(low):
                    return
                for key, value in cursor:
                    if key >= high:
                        return
                    yield key, value
        except lmdb.Error as error:
            raise self.problem("read", error) from error

    def write(self, changes: Mapping[bytes, bytes | None]) -> None:
        """Write all changes or none, in one transaction. Not sorted: that costs more than it saves."""
        free = self._free_bytes()  # the log may have freed space while it was written
        try:
            with self._db.begin(write=True) as transaction, transaction.cursor() as cursor:
                for key in [key for key, value in changes.items() if value is None]:
                    transaction.delete(key)
                cursor.putmulti([(key, value) for key, value in changes.items() if value is not None])
        except (OSError, lmdb.Error) as error:
            raise self.problem("written", error, free) from error

    def reader(self) -> StateReader:
        """Open a reader as of the newest transaction. Pages freed meanwhile are not reused until it is closed."""
        try:
            return StateReader(self, self._db.begin())
        except lmdb.Error as error:
            raise self.problem("read", error) from error

    def renew(self) -> None:
        """Let reads see the newest transaction from here on. Call it in the thread of `get`."""
        try:
            self._reading.abort()
            self._reading = self._db.begin()
        except lmdb.Error as error:
            raise self.problem("read", error) from error

    def sync(self) -> None:
        """Make the newest transaction durable."""
        try:
            self._db.sync(True)
        except (OSError, lmdb.Error) as error:
            raise self.problem("synced", error) from error

    def verify(self, after: bytes, limit: int, broken: list[bytes] | None = None) -> bytes | None:
        """Check CRCs of stored values from a key on; return the key to go on after, None at the end. Raises StateDamaged, unless
        keys of broken values are collected in `broken`."""
        try:
            with self._db.begin() as transaction, transaction.cursor() as cursor:
                found = cursor.set_range(after) if after else cursor.first()
                for _ in range(limit):
                    if not found:
                        return None
                    try:
                        unseal(cursor.key(), cursor.value())
                    except StateDamaged:
                        if broken is None:
                            raise
                        broken.append(bytes(cursor.key()))
                    found = cursor.next()
                return bytes(cursor.key()) if found else None
        except lmdb.Error as error:
            raise self.problem("verified", error) from error

    def count_from(self, key: bytes) -> int:
        """Count the values from a key on."""
        try:
            with self._db.begin() as transaction, transaction.cursor() as cursor:
                found = cursor.set_range(key) if key else cursor.first()
                return sum(1 for _ in cursor.iternext(keys=True, values=False)) if found else 0
        except lmdb.Error as error:
            raise self.problem("read", error) from error

    def copy(self, path: Path) -> None:
        """Write a compact copy of the newest transaction to a file, durable before it has its name: a snapshot."""
        begun = path.with_name(path.name + COPY_SUFFIX)
        try:
            with open(begun, "wb") as file:
                self._db.copyfd(file.fileno(), compact=True)
                os.fsync(file.fileno())
            begun.replace(path)
        except (OSError, lmdb.Error) as error:
            begun.unlink(missing_ok=True)
            raise self.problem("copied", error) from error

    @property
    def bytes_used(self) -> int:
        """Bytes in use in the LMDB file."""
        info = self._db.info()
        return int((info["last_pgno"] + 1) * self._db.stat()["psize"])

    @property
    def bytes_live(self) -> int:
        """Bytes of the pages in use: freed pages are reused, and the file does not shrink."""
        found = self._db.stat()
        return int((found["branch_pages"] + found["leaf_pages"] + found["overflow_pages"]) * found["psize"])

    @property
    def entries(self) -> int:
        """Number of stored values."""
        return int(self._db.stat()["entries"])

    def close(self) -> None:
        """Close the files."""
        self._reading.abort()
        self._db.close()

    def _free_bytes(self) -> int:
        """Free bytes on the disk; `SHORT_WRITE_BYTES` if unknown: then the disk is broken, and not full."""
        try:
            found = os.statvfs(self.folder)
        except OSError:
            return SHORT_WRITE_BYTES
        return found.f_bavail * found.f_frsize

    def problem(self, what: str, error: Exception, free_before: int = SHORT_WRITE_BYTES) -> DiskFull | DiskFailed | StateDamaged:
        """Translate an error of LMDB, given the free bytes on the disk before."""
        text = f"the inboxes in {self.folder} cannot be {what}: {error}"
        if isinstance(error, lmdb.MapFullError):
            return DiskFull(f"{text}; the file reached {self._map_bytes >> 20} MiB: raise pi.store_mb and start again")
        full = getattr(error, "errno", None) in _FULL or isinstance(error, lmdb.DiskError) or "No space left" in str(error)
        if full or (os.strerror(errno.EIO) in str(error) and min(free_before, self._free_bytes()) < SHORT_WRITE_BYTES):
            return DiskFull(f"{text}; free some space, writes go on by themselves")
        if isinstance(error, lmdb.VersionMismatchError):
            return StateDamaged(f"{text}; move the folder away, this replica takes the state from a peer")
        unreadable = what in _READING and os.strerror(errno.EIO) in str(error)
        if unreadable or isinstance(error, lmdb.InvalidError | lmdb.CorruptedError | lmdb.PageNotFoundError):
            return ValueDamaged(f"{text}; repair this replica from a peer", b"")
        return DiskFailed(text)


def _make(folder: Path, map_bytes: int) -> None:
    """Make an empty file, durable before it has its name: LMDB cannot open a torn one."""
    begun = folder / f"{FILE_NAME}{COPY_SUFFIX}"
    begun.unlink(missing_ok=True)
    with lmdb.open(str(begun), map_size=map_bytes, subdir=False, lock=False) as made:
        made.sync(True)
    begun.replace(folder / FILE_NAME)


def mark(folder: Path, reason: str, early: Sequence[Early] = ()) -> None:
    """Mark a state for `set_aside`, durably, with values that the rebuilt one gives up. Raises DiskFull, DiskFailed: then nothing
    is set aside."""
    try:
        if early:
            rows = [[each.before, each.at, [key.hex() for key in each.keys]] for each in early]
            with open(folder / EARLY_NAME, "w", encoding="ascii") as file:
                json.dump(rows, file)
                file.flush()
                os.fsync(file.fileno())
        with open(folder / DAMAGED_NAME, "w", encoding="utf-8") as file:
            file.write(reason)
            file.flush()
            os.fsync(file.fileno())
        sync_directory(folder)
    except OSError as error:
        (folder / DAMAGED_NAME).unlink(missing_ok=True)
        kind = DiskFull if error.errno in _FULL else DiskFailed
        raise kind(f"the damaged inboxes in {folder} cannot be marked for a repair: {error.strerror}; free some space") from error


def early_in(folder: Path) -> list[Early]:
    """Read what `mark` wrote; empty if it cannot be read: the state finds it out again."""
    try:
        rows = json.loads((folder / EARLY_NAME).read_text("ascii"))
        return [Early(int(before), int(at), tuple(bytes.fromhex(key) for key in keys)) for before, at, keys in rows]
    except (OSError, ValueError, TypeError):
        return []


def set_aside(folder: Path) -> bool:
    """Set a marked state aside; only the newest such file is kept. Returns True if there was one."""
    if not (folder / DAMAGED_NAME).exists():
        return False
    if (folder / FILE_NAME).exists():
        (folder / FILE_NAME).replace(folder / f"{FILE_NAME}.damaged")
        sync_directory(folder)
    (folder / DAMAGED_NAME).unlink()
    sync_directory(folder)
    return True


def install(snapshot: Path, folder: Path) -> None:
    """Put a snapshot in the place of a state, whole or not at all. One that is open is read on, and never found again."""
    make_directory(folder)
    begun = folder / f"{FILE_NAME}{COPY_SUFFIX}"
    try:
        shutil.copyfile(snapshot, begun)
        with open(begun, "rb+") as file:
            os.fsync(file.fileno())
        begun.replace(folder / FILE_NAME)
        (folder / LOCK_NAME).unlink(missing_ok=True)  # the open state goes on to use its own
        sync_directory(folder)
    except OSError as error:
        begun.unlink(missing_ok=True)
        kind = DiskFull if error.errno in _FULL else DiskFailed
        raise kind(f"a snapshot cannot be put into {folder}: {error.strerror}") from error
