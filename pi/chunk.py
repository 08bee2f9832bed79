"""A chunk: up to 32 entries of an inbox in one value, and where a search through older ones may end. Pure.

    1 … 32 │ 33 … 64 │ 65 … 96 │ 97 … last           chunks begin at fixed InboxSeqs
      gone │  ▲ base                                    what is up to the base is in none

    skipped u8 | n u8 | n × (Xiu partition u8 | before u64) | entries × (MsgID u64 | appended at u32)      little-endian

`skipped` of its InboxSeqs are gone. `before`: every MsgID of that partition in older chunks has a counter below it. Who looks for
a MsgID begins with the newest chunk and ends where it cannot be in older ones; where nothing is said of a partition it goes on.

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
"""Makes a wrong CRC of a right one."""


class Chunk:
    """Entries of an inbox from `first` on. One whose value is broken, or missing, takes further ones and gives none: it stays
    broken wherever it is written, and appends to its inbox go on."""

    __slots__ = ("before", "changed", "damage", "entries", "first", "key")

    def __init__(self, first: int) -> None:
        self.first = first
        """InboxSeq of the first entry that is in it."""
        self.entries = bytearray()
        self.before: dict[int, int] = {}
        """By Xiu partition."""
        self.changed = False
        """It is to be stored again."""
        self.damage = ""
        """Why nothing can be read; empty: it can."""
        self.key = b""
        """Of one whose value is broken, or missing."""

    @property
    def number(self) -> int:
        """Which one of its inbox."""
        return (self.first - 1) // CHUNK_ENTRIES

    @property
    def last(self) -> int:
        """InboxSeq of its last entry."""
        return self.first + len(self.entries) // ENTRY_BYTES - 1

    def encode(self, key: bytes) -> bytes:
        """Encode as stored, with the CRC; what was broken with a wrong one."""
        if self.damage:
            return bytes(self.entries) + CRC.pack(crc32(key + self.entries) ^ _NO_CRC)
        skipped = (self.first - 1) % CHUNK_ENTRIES
        before = [_BEFORE.pack(*item) for item in sorted(self.before.items())]
        return seal(key, _HEAD.pack(skipped, len(before)) + b"".join(before) + self.entries)

    @classmethod
    def decode(cls, seq: int, key: bytes, value: bytes | None) -> Chunk:
        """The chunk that an InboxSeq belongs into, from what is stored under its key."""
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
        """One entry more."""
        self.entries += ENTRY.pack(msg_id, at_s)

    def at(self, seq: int) -> tuple[int, int]:
        """(MsgID, when it was appended) of an entry. Raises StateDamaged; IndexError: it is not in this chunk."""
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
        """Entries up to an InboxSeq go."""
        del self.entries[: (up_to + 1 - self.first) * ENTRY_BYTES]
        self.first = up_to + 1

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(MsgID, when it was appended) of each entry. Raises StateDamaged."""
        if self.damage:
            raise ValueDamaged(self.damage, self.key)
        return cast(Iterator[tuple[int, int]], ENTRY.iter_unpack(bytes(self.entries)))


def content_of(value: bytes) -> bytes:
    """What two chunks that hold the same entries have in common: `before` may be known on one replica and not on another."""
    return value[:1] + value[_HEAD.size + value[1] * _BEFORE.size : -CRC_BYTES] if len(value) > _HEAD.size else value
