"""The table of a group in LMDB: every transaction is synced, the position is in it.

Source: docs/topics.md, "How it is stored".
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import lmdb

from pixiu.errors import DiskFailed, DiskFull

MAP_BYTES: Final = 16 << 30
"""Address space that is reserved; the file is as large as its rows."""
_POSITION: Final = struct.Struct("<QQ")
_POSITION_KEY: Final = b"\0position"


class LmdbTable:
    """See `topic.storage.store.Table`.

    Args:
        folder: of the environment; made if it is not there.
        map_bytes: limit of its size.
    """

    def __init__(self, folder: Path, map_bytes: int = MAP_BYTES) -> None:
        self._folder = folder
        self._env: Any = lmdb.open(str(folder), map_size=map_bytes, max_dbs=0, writemap=False)

    def read(self) -> tuple[Mapping[bytes, bytes], int, int]:
        """See `Table`."""
        with self._env.begin() as transaction:
            rows = {bytes(key): bytes(value) for key, value in transaction.cursor()}
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
                        transaction.put(key, value)
                transaction.put(_POSITION_KEY, _POSITION.pack(applied, clock_us))
        except (lmdb.MapFullError, lmdb.DiskError) as problem:
            raise DiskFull(f"{self._folder}: no space left for the state of topics; free some, then writes continue") from problem
        except lmdb.Error as problem:
            raise DiskFailed(f"{self._folder}: {problem}") from problem

    def close(self) -> None:
        """Close the environment."""
        self._env.close()
