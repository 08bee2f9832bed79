"""The database of a replicated table: LMDB, one value for each key, synced before an entry is confirmed.

    key    xxh3-128 of the entry's key, 16 bytes
    value  the entry as it is sent
    key    "alive"    Unix ms u64, little-endian: the database was up to date then

Called in one thread at a time, never in the event loop's.

Source: docs/subscriptions.md, "Retained messages"; `cluster.membership.replica.store`.
"""

from __future__ import annotations

import fcntl
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import lmdb
import xxhash

from cluster.membership.replica.store import StoreError
from pixiu.durable import make_directory, sync_directory

ALIVE_KEY: Final = b"alive"
ALIVE: Final = struct.Struct("<Q")


class TableStore:
    """One replica's database of a table.

    Args:
        folder: created if missing.
        map_bytes: largest size of the file.
        what: what is in it, for errors: "retained messages".
        option: the option that limits its size, for errors.

    Every method raises `StoreError`.
    """

    def __init__(self, folder: Path, map_bytes: int, what: str, option: str) -> None:
        self._folder, self._map_bytes, self._what, self._option = folder, map_bytes, what, option
        try:
            make_directory(folder)
            self._lock = open(folder / "lock", "w")  # noqa: SIM115 (held until close)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._db = lmdb.open(str(folder), map_size=map_bytes, max_dbs=0, max_spare_txns=1)
                sync_directory(folder)  # LMDB syncs its file, and not the name
            except BlockingIOError:
                self._lock.close()
                raise StoreError(f"the {what} in {folder} are in use: give every router its own data_dir") from None
        except (OSError, lmdb.Error) as error:
            raise self._error("opened", error) from error

    def write(self, puts: Iterable[tuple[bytes, bytes]], deletes: Iterable[bytes], now_ms: int) -> None:
        """Write keys with their values, then delete keys, in one synced transaction."""
        try:
            with self._db.begin(write=True) as transaction:
                for key, value in puts:
                    transaction.put(_hashed(key), value)
                for key in deletes:
                    transaction.delete(_hashed(key))
                transaction.put(ALIVE_KEY, ALIVE.pack(now_ms))
        except (OSError, lmdb.Error) as error:
            raise self._error("written", error) from error

    def clear(self) -> None:
        """Remove everything."""
        try:
            with self._db.begin(write=True) as transaction:
                transaction.drop(self._db.open_db(txn=transaction), delete=False)
        except (OSError, lmdb.Error) as error:
            raise self._error("cleared", error) from error

    def load(self) -> tuple[list[bytes], int]:
        """All values, and the Unix milliseconds at which they were up to date; 0: never."""
        found: list[bytes] = []
        alive_ms = 0
        try:
            with self._db.begin() as transaction:
                for key, value in transaction.cursor():
                    if key != ALIVE_KEY:
                        found.append(value)
                    elif len(value) == ALIVE.size:
                        (alive_ms,) = ALIVE.unpack(value)
        except (OSError, lmdb.Error) as error:
            raise self._error("read", error) from error
        return found, alive_ms

    def close(self) -> None:
        """Close the files."""
        self._db.close()
        self._lock.close()

    def _error(self, verb: str, error: Exception) -> StoreError:
        if isinstance(error, lmdb.MapFullError):
            text = f"it has reached {self._map_bytes >> 20} MiB: raise {self._option} on every replica"
        else:
            text = f"{error}; look at the disk and the folder's owner"
        return StoreError(f"the {self._what} in {self._folder} cannot be {verb}: {text}")


def _hashed(key: bytes) -> bytes:
    return xxhash.xxh3_128_digest(key)


def merged(puts: Sequence[Sequence[tuple[bytes, bytes]]]) -> list[tuple[bytes, bytes]]:
    """The newest value of each key, of writes that wait."""
    newest: dict[bytes, bytes] = {}
    for batch in puts:
        newest.update(batch)
    return list(newest.items())
