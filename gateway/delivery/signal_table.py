"""Table of delivered signals in shared memory: it survives the gateway, so that a restart delivers nothing twice.

    key    SnowflakeID u64 | RoomID u64          big-endian, in the database of a generation: b"0" or b"1"
    key    b"current" → b"0" or b"1"             in the main database

See `cluster.process.shared_memory`. When the current generation is full, the other one is emptied and becomes the current one.

Source: docs/architecture.md, "Delivered signals", docs/stores.md.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import lmdb

from cluster.process import shared_memory
from gateway.delivery.signals import Identity, MemoryTable

KEY: Final = struct.Struct(">QQ")
CURRENT: Final = b"current"
GENERATIONS: Final = (b"0", b"1")
BYTES_A_SIGNAL: Final = 128
"""Space that a generation is given per signal: measured 45, and as much again for pages that are copied or not yet free."""
MAX_A_TRANSACTION: Final = 1_000
"""Signals written in one transaction; more of one turn take several, each of which copies the pages that it touches."""
OPEN_TRIES: Final = 2
"""Tries to open it: a damaged table is removed, and a new one made."""


def folder_name(root: str, host: str, mqtt_port: int) -> str:
    """Name of the table's folder: the same for a gateway that starts again on its address."""
    return shared_memory.folder_name("signals", f"{root}-{host}-{mqtt_port}")


class SharedTable:
    """A `SignalTable` in shared memory.

    Args:
        folder: created if missing.
        size_bytes: of the whole table.
        generation: signals in a generation; 0: as many as fit.

    Raises `ConfigurationError` if another process has the table, and OSError or lmdb.Error if it cannot be opened.
    A later failure ends its use: signals are then remembered in the process's memory, and `problem` is the reason.
    """

    def __init__(self, folder: Path, size_bytes: int, generation: int = 0) -> None:
        self.folder = folder
        self.problem = ""
        self._size = size_bytes
        self._generation = generation or size_bytes // (len(GENERATIONS) * BYTES_A_SIGNAL)
        self._memory = MemoryTable()
        advice = "give every gateway its own gateway.signal_table_name"
        self._lock = shared_memory.lock_folder(folder, f"the signal table {folder} is in use; {advice}")
        try:
            self._db = self._open()
        except BaseException:
            self._lock.close()
            raise

    def _open(self) -> lmdb.Environment:
        db = shared_memory.open_environment(self.folder, self._size, max_dbs=len(GENERATIONS))
        try:
            with db.begin(write=True) as transaction:
                self._databases = [db.open_db(name, txn=transaction) for name in GENERATIONS]
                current = transaction.get(CURRENT, default=GENERATIONS[0])
                self._current = GENERATIONS.index(bytes(current)) if bytes(current) in GENERATIONS else 0
        except BaseException:
            db.close()
            raise
        return db

    def add(self, identities: Sequence[Identity]) -> list[bool]:
        """Add identities, as in `SignalTable`: one transaction for up to `MAX_A_TRANSACTION`."""
        if not self.problem:
            try:
                new: list[bool] = []
                for start in range(0, len(identities), MAX_A_TRANSACTION):
                    new += self._add(identities[start : start + MAX_A_TRANSACTION])
                return new
            except lmdb.Error as error:
                self.problem = f"the signal table {self.folder} cannot be written: {error}"
        return self._memory.add(identities)

    def _add(self, identities: Sequence[Identity]) -> list[bool]:
        current = self._current
        with self._db.begin(write=True) as transaction:
            new: list[bool] = []
            left = self._generation - int(transaction.stat(self._databases[current])["entries"])
            for identity in identities:
                key = KEY.pack(*identity)
                if transaction.get(key, db=self._databases[1 - current]) is not None:
                    new.append(False)
                    continue
                if left <= 0:
                    if transaction.get(key, db=self._databases[current]) is not None:
                        new.append(False)
                        continue
                    current = 1 - current
                    transaction.drop(self._databases[current], delete=False)
                    transaction.put(CURRENT, GENERATIONS[current])
                    left = self._generation
                is_new = transaction.put(key, b"", overwrite=False, db=self._databases[current])
                left -= is_new
                new.append(is_new)
        self._current = current
        return new

    def count(self) -> int:
        """Number of signals in the table."""
        if self.problem:
            return len(self._memory)
        with self._db.begin() as transaction:
            return sum(int(transaction.stat(database)["entries"]) for database in self._databases)

    def close(self, remove: bool) -> None:
        """Close the table; with `remove` delete it."""
        self._db.close()
        if remove:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()


def open_table(base: Path, name: str, size_bytes: int) -> tuple[SharedTable | MemoryTable, str]:
    """Open the gateway's table. If it must be in the process's memory, the text is the reason and the remedy.

    Raises `ConfigurationError` if another process has the table.
    """
    folder = base / name
    advice = "signals are delivered again after a restart; set gateway.signal_table_dir to a folder on a tmpfs"
    if not base.is_dir():
        return MemoryTable(), f"no signal table: there is no folder {base}; {advice}"
    why = ""
    for _ in range(OPEN_TRIES):
        try:
            return SharedTable(folder, size_bytes), ""
        except (OSError, lmdb.Error) as error:
            shutil.rmtree(folder, ignore_errors=True)
            why = str(error)
    return MemoryTable(), f"no signal table in {folder}: {why}; {advice}"
