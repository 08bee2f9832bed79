"""The last message of each key, in parts of topics that are compacted: an index in the table, behind the log as all of it.

    block ──note──▶ changes in memory ──a flush──▶ rows of the table, in the transaction with the position of the log
    key   ──last──▶ changes, else the table: 20 bytes of memory are enough for a key that was not written lately: none

Keys are known by 128 bits of XXH3, so a row has one size however long its key is.

Source: docs/topics.md, "Compaction".
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final, NamedTuple, Protocol

import xxhash

from pixiu.errors import StateDamaged
from pixiu.wire.block import Block

KEY: Final = b"\3"
"""First byte of the keys of these rows: u64 part, 16 bytes of the key's digest → u64, twice the offset, and 1 for a tombstone."""
DIGEST_BYTES: Final = 16
_PART: Final = struct.Struct(">Q")
_VALUE: Final = struct.Struct("<Q")


class Rows(Protocol):
    """The table, as the index asks for it."""

    def get(self, key: bytes) -> bytes | None:
        """A row that is not among those which `read` returns. May be called in any thread."""

    def sweep(self, prefix: bytes, goes: Sweep) -> None:
        """Delete rows whose keys begin with `prefix`, durably; may be called in a thread. Raises DiskFull, DiskFailed."""


class Sweep(Protocol):
    """Chooses rows."""

    def __call__(self, value: bytes, /) -> bool:
        """True if the row with this value goes."""


class Last(NamedTuple):
    """The last message of a key."""

    offset: int
    tombstone: bool
    """True if it has no body: the key is deleted."""


def digest_of(key: bytes) -> bytes:
    """The digest of a key."""
    return xxhash.xxh3_128_digest(key)


class KeyIndex:
    """The index of a store.

    Args:
        table: of the store.
    """

    def __init__(self, table: Rows) -> None:
        self._table = table
        self._new: dict[bytes, bytes | None] = {}
        """Rows that no flush has taken. None: the row goes."""
        self._frozen: dict[bytes, bytes | None] = {}
        """Rows that a flush writes."""
        self._dropped: set[int] = set()
        """Parts that are no more, of which the table may still have rows."""

    def note(self, part: int, base: int, block: Block) -> None:
        """A part has another block."""
        prefix, new = prefix_of(part), self._new
        for number, key, size in block.keyed():
            new[prefix + digest_of(key)] = _VALUE.pack((base + number) << 1 | (not size))

    def last(self, part: int, digest: bytes) -> Last | None:
        """The last message of a key in a part; None: it has none. May be called in any thread; an answer that is old by a moment
        names an earlier message."""
        row = prefix_of(part) + digest
        for rows in (self._new, self._frozen):
            if row in rows:
                return _last(rows[row])
        return None if part in self._dropped else _last(self._table.get(row))

    def forget(self, part: int, digests: Iterable[bytes], removed: Iterable[tuple[int, int]]) -> None:
        """Forget deleted keys, if their tombstones are still the last, and among the messages that are removed."""
        gone = list(removed)
        for digest in digests:
            try:
                found = self.last(part, digest)
            except StateDamaged:
                continue  # the row stays: a deleted key has no message in either case
            if found is not None and found.tombstone and any(low <= found.offset < high for low, high in gone):
                self._new[prefix_of(part) + digest] = None

    def drop(self, part: int) -> None:
        """A part is no more."""
        prefix = prefix_of(part)
        self._dropped.add(part)
        for rows in (self._new, self._frozen):
            for row in [row for row in rows if row.startswith(prefix)]:
                rows[row] = None

    def freeze(self) -> list[tuple[bytes, bytes | None]]:
        """The rows to be written now."""
        self._frozen = {**self._frozen, **self._new}
        self._new = {}
        return list(self._frozen.items())

    def written(self, dropped: Iterable[int]) -> None:
        """They are in the table, which has none of the parts any more that were dropped."""
        self._frozen = {}
        self._dropped.difference_update(dropped)

    def sweep(self, part: int, first: int) -> None:
        """Delete the rows of messages below an offset; may be called in a thread. Raises DiskFull, DiskFailed."""
        self._table.sweep(prefix_of(part), lambda value: int(_VALUE.unpack(value)[0]) >> 1 < first)


def prefix_of(part: int) -> bytes:
    """The beginning of the keys of a part's rows."""
    return KEY + _PART.pack(part)


def _last(value: bytes | None) -> Last | None:
    if value is None:
        return None
    (number,) = _VALUE.unpack(value)
    return Last(number >> 1, bool(number & 1))
