"""The table of a group in LMDB: every transaction is synced, the position is in it, and each value ends with a CRC-32 of key and
value.

Source: docs/topics.md, "How it is stored".
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import lmdb

from pixiu.durable import make_directory, sync_directory
from pixiu.errors import DiskFailed, DiskFull, MalformedData, StateDamaged
from topic.storage.keys import KEY, Sweep

MAP_BYTES: Final = 16 << 30
"""Address space that is reserved; the file is as large as its rows."""
SWEPT_ROWS: Final = 10_000
"""Rows that one transaction of a sweep looks at."""
FILE_NAME: Final = "data.mdb"
_POSITION: Final = struct.Struct("<QQ")
_POSITION_KEY: Final = b"\0position"
_CRC: Final = struct.Struct("<I")


class LmdbTable:
    """The rows of a group, as `topic.storage.store.Table` asks for them.

    Args:
        folder: of the environment; made if it is not there.
        map_bytes: limit of its size.

    Raises DiskFailed.
    """

    def __init__(self, folder: Path, map_bytes: int = MAP_BYTES) -> None:
        self._folder = folder
        try:
            make_directory(folder)
            if not (folder / FILE_NAME).exists():
                _make(folder, map_bytes)
            sync_directory(folder)  # the process that made the file may have been killed before that
            self._env: Any = lmdb.open(str(folder), map_size=map_bytes, max_dbs=0)
        except (OSError, lmdb.Error) as problem:
            raise DiskFailed(f"{folder}: the state of topics cannot be opened: {problem}") from problem

    def read(self) -> tuple[Mapping[bytes, bytes], int, int]:
        """See `Table`. Raises StateDamaged."""
        try:
            with self._env.begin() as transaction:
                rows = {bytes(key): _opened(bytes(key), bytes(value)) for key, value in _rows(transaction.cursor())}
        except (lmdb.Error, MalformedData) as problem:
            raise StateDamaged(f"{self._folder}: the state of topics cannot be read: {problem}") from problem
        applied, clock_us = _POSITION.unpack(rows.pop(_POSITION_KEY, bytes(_POSITION.size)))
        return rows, applied, clock_us

    def write(self, changes: Sequence[tuple[bytes, bytes | None]], applied: int, clock_us: int) -> None:
        """See `Table`."""
        try:
            with self._env.begin(write=True) as transaction:
                for key, value in changes:
                    if value is None:
                        transaction.delete(key)
                    else:
                        transaction.put(key, _sealed(key, value))
                transaction.put(_POSITION_KEY, _sealed(_POSITION_KEY, _POSITION.pack(applied, clock_us)))
        except (lmdb.MapFullError, lmdb.DiskError) as problem:
            raise DiskFull(f"{self._folder}: no space left for the state of topics; free some, then writes continue") from problem
        except lmdb.Error as problem:
            raise DiskFailed(f"{self._folder}: {problem}") from problem

    def get(self, key: bytes) -> bytes | None:
        """See `topic.storage.keys.Rows`. Raises StateDamaged."""
        try:
            with self._env.begin() as transaction:
                found = transaction.get(key)
            return None if found is None else _opened(key, bytes(found))
        except (lmdb.Error, MalformedData) as problem:
            raise StateDamaged(f"{self._folder}: the index of keys cannot be read: {problem}") from problem

    def sweep(self, prefix: bytes, goes: Sweep) -> None:
        """See `topic.storage.keys.Rows`. Some rows in a transaction, so that the file does not grow by all of them."""
        at: bytes | None = prefix
        try:
            while at is not None:
                with self._env.begin(write=True) as transaction:
                    at = _swept(transaction.cursor(), at, prefix, goes)
        except (lmdb.MapFullError, lmdb.DiskError) as problem:
            raise DiskFull(f"{self._folder}: no space left for the state of topics; free some, then writes continue") from problem
        except (lmdb.Error, MalformedData) as problem:
            raise DiskFailed(f"{self._folder}: {problem}") from problem

    def copying(self) -> Callable[[Path], None]:
        """Hold the rows of this moment; returns what writes them into an empty folder, durably, in any thread, once. Raises
        DiskFull, DiskFailed."""
        transaction = self._env.begin()

        def copy(folder: Path) -> None:
            try:
                self._env.copy(str(folder), compact=True, txn=transaction)
            except lmdb.Error as problem:
                raise DiskFull(f"{folder}: the state of topics cannot be copied: {problem}") from problem
            finally:
                transaction.abort()

        return copy

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


def _rows(cursor: Any) -> Iterator[tuple[bytes, bytes]]:
    """All rows but those of the index of keys, which may be millions."""
    there = cursor.first()
    while there:
        key, value = cursor.item()
        if key[:1] == KEY:
            there = cursor.set_range(bytes((KEY[0] + 1,)))
            continue
        yield key, value
        there = cursor.next()


def _swept(cursor: Any, at: bytes, prefix: bytes, goes: Sweep) -> bytes | None:
    """Delete rows from a key on. Returns where to go on; None: that is all."""
    there, looked = cursor.set_range(at), 0
    while there and cursor.key()[: len(prefix)] == prefix:
        if looked >= SWEPT_ROWS:
            return bytes(cursor.key())
        looked += 1
        key = bytes(cursor.key())
        there = cursor.delete() and bool(cursor.key()) if goes(_opened(key, bytes(cursor.value()))) else cursor.next()
    return None


def _sealed(key: bytes, value: bytes) -> bytes:
    return value + _CRC.pack(crc32(value, crc32(key)))


def _opened(key: bytes, sealed: bytes) -> bytes:
    value = sealed[: -_CRC.size]
    if sealed != _sealed(key, value):
        raise MalformedData(f"the row {key.hex()} is broken")
    return value


def _make(folder: Path, map_bytes: int) -> None:
    """Make an empty file, durable before it has its name: LMDB cannot open a torn one."""
    begun = folder / f"{FILE_NAME}.new"
    begun.unlink(missing_ok=True)
    with lmdb.open(str(begun), map_size=map_bytes, subdir=False, lock=False) as made:
        made.sync(True)
    begun.replace(folder / FILE_NAME)
