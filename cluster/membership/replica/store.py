"""The Router DB and the Relay DB: soft state in LMDB, written asynchronously, read at a start without a live peer.

    key    RoomID u64 | UIN u64 | gateway instance u16                       big-endian; of a relay UIN and device
    value  GatewayMsgID u64 | u8: 1 login, 0 tombstone | value u64, if any    little-endian
    key    "alive"                                            Unix ms u64 little-endian: kept up to date until then

Called in one thread at a time, never in the event loop's.

Source: PiXiu §2.4 step 10 ("writes the data to the Database asynchronously"), §5.2 step 7; docs/memberships.md.
"""

from __future__ import annotations

import fcntl
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TextIO

import lmdb

from cluster.membership.map.lww_map import CHUNK_ENTRIES, INSTANCE_SHIFT, Key
from cluster.membership.map.updates import ENTRY, Chunk, Update
from cluster.membership.map.updates import VALUE as HELD
from pixiu.errors import PixiuError

KEY: Final = struct.Struct(">QQH")
VALUE: Final = struct.Struct("<QB")
VALUED: Final = struct.Struct("<QBQ")
ALIVE_KEY: Final = b"alive"
ALIVE: Final = struct.Struct("<Q")
READ_ENTRIES: Final = CHUNK_ENTRIES
"""Entries in a chunk that `load` yields."""


class StoreError(PixiuError):
    """The database cannot be opened, read or written. The text gives the reason and the remedy."""


class Write(NamedTuple):
    """One operation: changes to put, then keys to delete."""

    puts: Sequence[Update]
    deletes: Sequence[Key]


class ReplicaStore:
    """One replica's LMDB database of map entries.

    Args:
        role: "router" or "relay", for texts.
        folder: created if missing.
        map_bytes: largest size of the file.

    Every method raises `StoreError`.
    """

    def __init__(self, role: str, folder: Path, map_bytes: int) -> None:
        self._role = role
        self._folder = folder
        self._map_bytes = map_bytes
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = self._lock_folder()
            try:
                self._db = lmdb.open(str(folder), map_size=map_bytes, max_dbs=0, max_spare_txns=1)
            except lmdb.Error:
                self._lock.close()
                raise
        except (OSError, lmdb.Error) as error:
            raise self._error("opened", error) from error

    def _lock_folder(self) -> TextIO:
        """Lock the folder for this process; the lock ends with the process in any case."""
        lock = open(self._folder / "lock", "w")  # noqa: SIM115 (held until close)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise StoreError(f"the {self._name} in {self._folder} is in use: give every {self._role} its own data_dir") from None
        return lock

    def age_s(self, now_ms: int) -> float | None:
        """Seconds since the membership was last up to date, by Unix milliseconds; None if it never was."""
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
        """Perform operations, in order, in one synced transaction: all or nothing.

        `now_ms`: Unix milliseconds at which the database is up to date with them; None: more is missing.
        """
        try:
            with self._db.begin(write=True) as transaction:
                put, pack_key, pack_value = transaction.put, KEY.pack, VALUE.pack
                for puts, deletes in operations:
                    for id_, room, uin, login, _, held, _, _ in puts:
                        written = VALUED.pack(id_, login, held) if held else pack_value(id_, login)
                        put(pack_key(room, uin, id_ >> INSTANCE_SHIFT), written)
                    for key in deletes:
                        transaction.delete(pack_key(*key))
                if now_ms is not None:
                    put(ALIVE_KEY, ALIVE.pack(now_ms))
        except (OSError, lmdb.Error) as error:
            raise self._error("written", error) from error

    def clear(self) -> None:
        """Remove everything, including the mark that it was up to date."""
        try:
            with self._db.begin(write=True) as transaction:
                transaction.drop(self._db.open_db(txn=transaction), delete=False)
        except (OSError, lmdb.Error) as error:
            raise self._error("cleared", error) from error

    def load(self) -> Iterator[Chunk]:
        """Yield the whole content. Entries of another size are left out."""
        live: list[bytes] = []
        dead: list[bytes] = []
        values: list[int] = []

        def chunk() -> Chunk:
            found = Chunk(b"".join(live), b"".join(dead), b"".join(map(HELD.pack, values)) if any(values) else b"")
            for part in (live, dead, values):
                part.clear()
            return found

        try:
            with self._db.begin() as transaction:
                for key, value in transaction.cursor():
                    if len(key) != KEY.size or len(value) not in (VALUE.size, VALUED.size):
                        continue
                    room, uin, _ = KEY.unpack(key)
                    id_, login, *held = (VALUE if len(value) == VALUE.size else VALUED).unpack(value)
                    (live if login else dead).append(ENTRY.pack(room, uin, id_))
                    if login:
                        values.append(held[0] if held else 0)
                    if len(live) + len(dead) >= READ_ENTRIES:
                        yield chunk()
        except (OSError, lmdb.Error) as error:
            raise self._error("read", error) from error
        if live or dead:
            yield chunk()

    def count(self) -> int:
        """Number of stored entries and tombstones."""
        try:
            with self._db.begin() as transaction:
                return int(self._db.stat()["entries"]) - (transaction.get(ALIVE_KEY) is not None)
        except lmdb.Error as error:
            raise self._error("read", error) from error

    def close(self) -> None:
        """Close the files."""
        self._db.close()
        self._lock.close()

    @property
    def _name(self) -> str:
        return f"{self._role.capitalize()} DB"

    def _error(self, what: str, error: Exception) -> StoreError:
        if isinstance(error, lmdb.MapFullError):
            advice = f"it reached {self._map_bytes >> 20} MiB: raise {self._role}.store_mb and start again"
        elif isinstance(error, lmdb.InvalidError | lmdb.CorruptedError | lmdb.VersionMismatchError):
            advice = f"the file is damaged: move it away; the {self._role} fills a new one from its peers"
        else:
            advice = "check the disk's free space and the folder's owner"
        return StoreError(f"the {self._name} in {self._folder} cannot be {what}: {error}; {advice}")
