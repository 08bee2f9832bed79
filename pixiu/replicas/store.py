"""A replica's map in LMDB, written behind the live stream, read at a start without a live peer.

    key    RoomID u64 | UIN u64 | gateway instance u16        big-endian (Router DB)
           UIN u64 | DeviceID u64 | gateway instance u16      (Relay DB)
    value  as the role's codec writes it
    key    "alive"                                            Unix ms u64 little-endian: kept up to date until then

Called in one thread at a time, never in the event loop's.

Source: seed 004 §2.4 step 10 ("writes the data to the Database asynchronously"), §5.2 step 7; DESIGN section 10.
"""

from __future__ import annotations

import fcntl
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO

import lmdb

from pixiu.errors import PixiuError
from pixiu.replicas.registers import Codec
from pixiu.softstore import CHUNK_ENTRIES, Chunk, Key

KEY: Final = struct.Struct(">QQH")
ALIVE_KEY: Final = b"alive"
ALIVE: Final = struct.Struct("<Q")
READ_ENTRIES: Final = CHUNK_ENTRIES
"""Entries in a chunk that `load` yields."""


class StoreError(PixiuError):
    """The database cannot be opened, read or written. The text says why and what to do."""


class Write(NamedTuple):
    """One operation: changes to put, then keys to delete."""

    puts: Sequence[Any]
    deletes: Sequence[Key]


class ReplicaStore:
    """One database.

    Args:
        folder: made when it is missing.
        map_bytes: the most that the file may grow to.
        role: whose it is, for people.
        codec: how rows are written.

    Every method raises `StoreError`.
    """

    def __init__(self, folder: Path, map_bytes: int, role: str, codec: Codec[Any]) -> None:
        self._folder = folder
        self._role, self._codec = role, codec
        self._map_bytes = map_bytes
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = self._lock_folder()
            self._db = lmdb.open(str(folder), map_size=map_bytes, max_dbs=0, max_spare_txns=1)
        except (OSError, lmdb.Error) as error:
            raise self._error("opened", error) from error

    def _lock_folder(self) -> TextIO:
        """One process has a database; the lock goes with the process, however it ends."""
        lock = open(self._folder / "lock", "w")  # noqa: SIM115 (held until close)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise StoreError(f"the {self.name} in {self._folder} is in use: give every {self._role} its own data_dir") from None
        return lock

    @property
    def name(self) -> str:
        """As people say it."""
        return f"{self._role.capitalize()} DB"

    def age_s(self, now_ms: int) -> float | None:
        """Seconds since the map was last kept up to date, by Unix milliseconds; None when it never was."""
        try:
            with self._db.begin() as transaction:
                found = transaction.get(ALIVE_KEY)
        except lmdb.Error as error:
            raise self._error("read", error) from error
        if found is None or len(found) != ALIVE.size:
            return None
        alive_ms: int = ALIVE.unpack(found)[0]
        return max(0.0, (now_ms - alive_ms) / 1000)

    def write(self, operations: Iterable[Write], now_ms: int | None) -> None:
        """Carry out operations, in order, in one synced transaction: all of it or nothing.

        `now_ms`: Unix milliseconds until which the database is up to date with this; None: it lacks more.
        """
        try:
            with self._db.begin(write=True) as transaction:
                put, pack_key = transaction.put, KEY.pack
                for puts, deletes in operations:
                    for row, value in self._codec.rows(puts):
                        put(pack_key(*row), value)
                    for key in deletes:
                        transaction.delete(pack_key(*key))
                if now_ms is not None:
                    put(ALIVE_KEY, ALIVE.pack(now_ms))
        except (OSError, lmdb.Error) as error:
            raise self._error("written", error) from error

    def clear(self) -> None:
        """Remove everything, the mark of when it was up to date too."""
        try:
            with self._db.begin(write=True) as transaction:
                transaction.drop(self._db.open_db(txn=transaction), delete=False)
        except (OSError, lmdb.Error) as error:
            raise self._error("cleared", error) from error

    def load(self) -> Iterator[Chunk]:
        """Everything that the database holds. Entries of another size are left out."""
        live: list[bytes] = []
        dead: list[bytes] = []
        try:
            with self._db.begin() as transaction:
                for key, value in transaction.cursor():
                    found = self._codec.entry(Key(*KEY.unpack(key)), value) if len(key) == KEY.size else None
                    if found is None:
                        continue
                    (live if found[0] else dead).append(found[1])
                    if len(live) + len(dead) >= READ_ENTRIES:
                        yield Chunk(b"".join(live), b"".join(dead))
                        live.clear()
                        dead.clear()
        except (OSError, lmdb.Error) as error:
            raise self._error("read", error) from error
        if live or dead:
            yield Chunk(b"".join(live), b"".join(dead))

    def count(self) -> int:
        """Entries and tombstones."""
        try:
            with self._db.begin() as transaction:
                return int(self._db.stat()["entries"]) - (transaction.get(ALIVE_KEY) is not None)
        except lmdb.Error as error:
            raise self._error("read", error) from error

    def close(self) -> None:
        """Close the files."""
        self._db.close()
        self._lock.close()

    def _error(self, what: str, error: Exception) -> StoreError:
        if isinstance(error, lmdb.MapFullError):
            advice = f"it reached {self._map_bytes >> 20} MiB: raise {self._role}.store_mb and start again"
        elif isinstance(error, lmdb.InvalidError | lmdb.CorruptedError | lmdb.VersionMismatchError):
            advice = f"the file is damaged: move it away; the {self._role} fills a new one from its peers"
        else:
            advice = "check the disk's free space and the folder's owner"
        return StoreError(f"the {self.name} in {self._folder} cannot be {what}: {error}; {advice}")
