"""The database of retained messages: LMDB, one value for each topic, synced before a message is confirmed.

    key    xxh3-128 of the topic, 16 bytes
    value  version u64 | SnowflakeID u64 | expiry u64 | room u64 | length of the topic u16 | topic | record     little-endian
    key    "alive"                                   Unix ms u64: the database was up to date then

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
from router.retained.map import Entry

VALUE: Final = struct.Struct("<QQQQH")
ALIVE_KEY: Final = b"alive"
ALIVE: Final = struct.Struct("<Q")


class RetainedStore:
    """One replica's database of retained messages.

    Args:
        folder: created if missing.
        map_bytes: largest size of the file.

    Every method raises `StoreError`.
    """

    def __init__(self, folder: Path, map_bytes: int) -> None:
        self._folder, self._map_bytes = folder, map_bytes
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = open(folder / "lock", "w")  # noqa: SIM115 (held until close)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._db = lmdb.open(str(folder), map_size=map_bytes, max_dbs=0, max_spare_txns=1)
            except BlockingIOError:
                self._lock.close()
                text = f"the retained messages in {folder} are in use: give every router its own data_dir"
                raise StoreError(text) from None
        except (OSError, lmdb.Error) as error:
            raise self._error("opened", error) from error

    def write(self, puts: Iterable[Entry], deletes: Iterable[bytes], now_ms: int) -> None:
        """Write entries, then delete topics, in one synced transaction."""
        try:
            with self._db.begin(write=True) as transaction:
                for entry in puts:
                    head = VALUE.pack(entry.version, entry.snowflake, entry.expires_at_ms, entry.room, len(entry.topic))
                    transaction.put(_key(entry.topic), head + entry.topic + entry.record)
                for topic in deletes:
                    transaction.delete(_key(topic))
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

    def load(self) -> tuple[list[Entry], int]:
        """The whole content, and the Unix milliseconds at which it was up to date; 0: never."""
        found: list[Entry] = []
        alive_ms = 0
        try:
            with self._db.begin() as transaction:
                for key, value in transaction.cursor():
                    if key == ALIVE_KEY and len(value) == ALIVE.size:
                        (alive_ms,) = ALIVE.unpack(value)
                    elif len(value) >= VALUE.size:
                        version, snowflake, expires_at_ms, room, size = VALUE.unpack_from(value)
                        topic, record = value[VALUE.size : VALUE.size + size], value[VALUE.size + size :]
                        found.append(Entry(topic, version, snowflake, record, expires_at_ms, room))
        except (OSError, lmdb.Error) as error:
            raise self._error("read", error) from error
        return found, alive_ms

    def close(self) -> None:
        """Close the files."""
        self._db.close()
        self._lock.close()

    def _error(self, verb: str, error: Exception) -> StoreError:
        if isinstance(error, lmdb.MapFullError):
            text = f"it has reached {self._map_bytes >> 20} MiB: raise router.retained_mb on every replica"
        else:
            text = f"{error}; look at the disk and the folder's owner"
        return StoreError(f"the retained messages in {self._folder} cannot be {verb}: {text}")


def _key(topic: bytes) -> bytes:
    return xxhash.xxh3_128_digest(topic)


def merged(puts: Sequence[Sequence[Entry]]) -> list[Entry]:
    """The newest entry of each topic, of writes that wait."""
    newest: dict[bytes, Entry] = {}
    for batch in puts:
        for entry in batch:
            newest[entry.topic] = entry
    return list(newest.values())
