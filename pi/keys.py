"""Keys and values of Pi's state. Pure.

    key (big-endian)                                     value (little-endian, then a CRC-32 of key and value)
    K | UIN u64 | lane u8 | InboxSeq u64                 a chunk, under the first InboxSeq that belongs into it: see
    `pi.inboxes.chunk`
    H | UIN u64 | lane u8                                head: last, floor, base, gap, dropped, hour, highest counters, D?
    C | UIN u64 | device u16 | lane u8                   cursor: UpTo u64 | map u64
    D | UIN u64 | lane u8                                deleted: n × (first InboxSeq u64 | last u64)
    U | UIN u64                                          the user's devices: number, session, seen at, client ID of each; notes
    N | UIN u64 | name u8                                a note: generation u64 | value
    T | hour u32 | UIN u64 | lane u8                     nothing: the inbox got entries in that hour; lane 4: a note was set
    G | worker u16                                       epoch u32 | generation u32
    P                                                    where the doubling of this partition stands: see `cluster.store.doubling`
    M                                                    applied position, clock, limits, where the sweeps are

Times are seconds since 2020, u32. LMDB does not detect a bit that flipped on the disk. The CRC covers the key too, so that a value
under a wrong key is detected.

Source: docs/pi.md.
"""

from __future__ import annotations

import struct
from typing import Final
from zlib import crc32

from pixiu.errors import StateDamaged
from pixiu.ids import SNOWFLAKE_EPOCH_MS

EPOCH_S: Final = SNOWFLAKE_EPOCH_MS // 1000
"""Unix seconds of time 0."""
CHUNK_KEY: Final = struct.Struct(">cQBQ")
INBOX_KEY: Final = struct.Struct(">cQB")
CURSOR_KEY: Final = struct.Struct(">cQHB")
USER_KEY: Final = struct.Struct(">cQ")
TIME_KEY: Final = struct.Struct(">cIQB")
WRITER_KEY: Final = struct.Struct(">cH")
META_KEY: Final = b"M"
META_VERSION: Final = 1
"""First byte of its value: version of the stored format."""
CRC: Final = struct.Struct("<I")
CRC_BYTES: Final = CRC.size
CHUNK_ENTRIES: Final = 32
"""InboxSeqs of one chunk. Part of the stored format."""
CURSOR_VALUE: Final = struct.Struct("<QQ")
WRITER_VALUE: Final = struct.Struct("<II")
NOTE_VALUE: Final = struct.Struct("<Q")
"""The generation, which precedes a note's value."""
NOTES_LANE: Final = 4
"""Stands for a lane in the keys of hours: a note was set, or removed."""


class ValueDamaged(StateDamaged):
    """A stored value is broken or missing.

    Args:
        text: the value, in words.
        key: its key.
    """

    def __init__(self, text: str, key: bytes) -> None:
        super().__init__(text)
        self.key = key


def seal(key: bytes, body: bytes) -> bytes:
    """A value with its CRC."""
    return body + CRC.pack(crc32(key + body))


def unseal(key: bytes, value: bytes) -> bytes:
    """Return a value's body. Raises StateDamaged."""
    if len(value) < CRC_BYTES or CRC.unpack_from(value, len(value) - CRC_BYTES)[0] != crc32(key + value[:-CRC_BYTES]):
        raise ValueDamaged(f"{name_of(key)} has a wrong CRC; repair this replica from a peer", key)
    return value[:-CRC_BYTES]


def name_of(key: bytes) -> str:
    """Describe the value of a key, for an operator."""
    if key == META_KEY:
        return "the applied position"
    space, size = key[:1], len(key)
    if space == b"K" and size == CHUNK_KEY.size:
        _, uin, lane, first = CHUNK_KEY.unpack(key)
        return f"entries {first} to {first + CHUNK_ENTRIES - 1} of lane {lane} of inbox {uin:016x}"
    if space in (b"H", b"D") and size == INBOX_KEY.size:
        _, uin, lane = INBOX_KEY.unpack(key)
        return f"{'the head' if space == b'H' else 'what was deleted'} of lane {lane} of inbox {uin:016x}"
    if space == b"C" and size == CURSOR_KEY.size:
        _, uin, device, lane = CURSOR_KEY.unpack(key)
        return f"the cursor of device {device} in lane {lane} of inbox {uin:016x}"
    if space == b"U" and size == USER_KEY.size:
        return f"the devices of user {USER_KEY.unpack(key)[1]:016x}"
    if space == b"N" and size == INBOX_KEY.size:
        _, uin, name = INBOX_KEY.unpack(key)
        return f"note {name} of user {uin:016x}"
    return f"the value of key {key.hex()}"


_UIN: Final = struct.Struct(">Q")
_UIN_AT: Final = {b"K": 1, b"H": 1, b"C": 1, b"D": 1, b"U": 1, b"N": 1, b"T": 5}
"""Offset of the UIN in a key, by the key's first byte."""


def uin_of(key: bytes) -> int | None:
    """The user to whom a key's value belongs; None: nobody, or this program does not write such keys."""
    at = _UIN_AT.get(key[:1])
    return None if at is None or len(key) < at + _UIN.size else int(_UIN.unpack_from(key, at)[0])


def chunk_key(uin: int, lane: int, seq: int) -> bytes:
    """Key of the chunk to which an InboxSeq belongs."""
    return CHUNK_KEY.pack(b"K", uin, lane, (seq - 1) // CHUNK_ENTRIES * CHUNK_ENTRIES + 1)


def head_key(uin: int, lane: int) -> bytes:
    """Key of an inbox's head."""
    return INBOX_KEY.pack(b"H", uin, lane)


def cursor_key(uin: int, device: int, lane: int) -> bytes:
    """Key of a device's cursor."""
    return CURSOR_KEY.pack(b"C", uin, device, lane)


def deleted_key(uin: int, lane: int) -> bytes:
    """Key of the deleted ranges of an inbox."""
    return INBOX_KEY.pack(b"D", uin, lane)


def user_key(uin: int) -> bytes:
    """Key of a user's devices."""
    return USER_KEY.pack(b"U", uin)


def note_key(uin: int, name: int) -> bytes:
    """Key of a note."""
    return INBOX_KEY.pack(b"N", uin, name)


def time_key(hour: int, uin: int, lane: int) -> bytes:
    """Key of an inbox that got entries in an hour."""
    return TIME_KEY.pack(b"T", hour, uin, lane)


def writer_key(worker: int) -> bytes:
    """Key of a writer's generation."""
    return WRITER_KEY.pack(b"G", worker)
