"""A chunk: up to 32 entries of an inbox in one value, with bounds for searches in older chunks. Pure.

    1 … 32 │ 33 … 64 │ 65 … 96 │ 97 … last           chunks begin at fixed InboxSeqs
      gone │  ▲ base                                    entries up to the base are in none

    skipped u8 | n u8 | n × (Xiu partition u8 | before u64) | entries × (MsgID u64 | appended at u32)      little-endian

The first `skipped` InboxSeqs of a chunk are deleted. `before`: every MsgID of that partition in older chunks has a lower counter. A
search for a MsgID begins in the newest chunk and ends where `before` excludes older ones; without a bound for its partition it goes
on.

Source: docs/decisions/0283-inboxes-are-stored-in-chunks.md.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, cast
from zlib import crc32

from pi.keys import CHUNK_ENTRIES, CRC, CRC_BYTES, ValueDamaged, name_of, seal, unseal
from pixiu.errors import StateDamaged

ENTRY: Final = struct.Struct("<QI")
ENTRY_BYTES: Final = ENTRY.size
_HEAD: Final = struct.Struct("<BB")
_BEFORE: Final = struct.Struct("<BQ")
_MSG_ID: Final = struct.Struct("<Q")
_NO_CRC: Final = 0xFFFF_FFFF
"""Turns a correct CRC into a wrong one."""


class Chunk:
    """Entries of an inbox from `first` on. A chunk whose value is broken or missing accepts further entries, so that appends to its
    inbox go on, but returns none. It stays broken wherever it is written."""

    __slots__ = ("before", "changed", "damage", "entries", "first", "key")

    def __init__(self, first: int) -> None:
        self.first = first
        """InboxSeq of the first entry in it."""
        self.entries = bytearray()
        self.before: dict[int, int] = {}
        """Xiu partition → lower bound; see the module."""
        self.changed = False
        """True if it must be stored again."""
        self.damage = ""
        """Why the chunk cannot be read; empty: it can."""
        self.key = b""
        """Key of a chunk whose value is broken or missing."""

    @property
    def number(self) -> int:
        """Number of the chunk in its inbox."""
        return (self.first - 1) // CHUNK_ENTRIES

    @property
    def last(self) -> int:
        """InboxSeq of its last entry."""
        return self.first + len(self.entries) // ENTRY_BYTES - 1

    def encode(self, key: bytes) -> bytes:
        """Encode as stored, with the CRC; a broken chunk gets a wrong one."""
        if self.damage:
            return bytes(self.entries) + CRC.pack(crc32(key + self.entries) ^ _NO_CRC)
        skipped = (self.first - 1) % CHUNK_ENTRIES
        before = [_BEFORE.pack(*item) for item in sorted(self.before.items())]
        return seal(key, _HEAD.pack(skipped, len(before)) + b"".join(before) + self.entries)

    @classmethod
    def decode(cls, seq: int, key: bytes, value: bytes | None) -> Chunk:
        """Decode the chunk to which an InboxSeq belongs from the value stored under its key."""
        begin = (seq - 1) // CHUNK_ENTRIES * CHUNK_ENTRIES + 1
        chunk = cls(begin)
        if value is None:
            chunk.key = key
            chunk.damage = f"{name_of(key)} are missing; repair this replica from a peer"
            return chunk
        try:
            body = unseal(key, value)
        except StateDamaged as damage:
            chunk.damage, chunk.entries, chunk.key = str(damage), bytearray(value[:-CRC_BYTES]), key
            return chunk
        skipped, count = _HEAD.unpack_from(body)
        at = _HEAD.size + count * _BEFORE.size
        chunk.first = begin + skipped
        chunk.before = dict(_BEFORE.iter_unpack(body[_HEAD.size : at]))
        chunk.entries = bytearray(body[at:])
        return chunk

    def append(self, msg_id: int, at_s: int) -> None:
        """Append an entry."""
        self.entries += ENTRY.pack(msg_id, at_s)

    def at(self, seq: int) -> tuple[int, int]:
        """(MsgID, append time) of an entry. Raises StateDamaged; IndexError if the entry is not in this chunk."""
        place = (seq - self.first) * ENTRY_BYTES
        if self.damage:
            raise ValueDamaged(self.damage, self.key)
        if not 0 <= place < len(self.entries):
            raise IndexError(seq)
        return cast(tuple[int, int], ENTRY.unpack_from(self.entries, place))

    def find(self, msg_id: int) -> int:
        """The InboxSeq of a MsgID, or 0. Raises StateDamaged."""
        if self.damage:
            raise ValueDamaged(self.damage, self.key)
        wanted = _MSG_ID.pack(msg_id)
        at = self.entries.find(wanted)
        while at >= 0:
            if not at % ENTRY_BYTES:
                return self.first + at // ENTRY_BYTES
            at = self.entries.find(wanted, at + 1)
        return 0

    def cut(self, up_to: int) -> None:
        """Remove entries up to an InboxSeq."""
        del self.entries[: (up_to + 1 - self.first) * ENTRY_BYTES]
        self.first = up_to + 1

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(MsgID, append time) of each entry. Raises StateDamaged."""
        if self.damage:
            raise ValueDamaged(self.damage, self.key)
        return cast(Iterator[tuple[int, int]], ENTRY.iter_unpack(bytes(self.entries)))


def content_of(value: bytes) -> bytes:
    """The part of a value that is equal in chunks with the same entries: `before` may differ between replicas."""
    return value[:1] + value[_HEAD.size + value[1] * _BEFORE.size : -CRC_BYTES] if len(value) > _HEAD.size else value
