"""Keys and values of Pi's state. Pure.

    key (big-endian)                                     value (little-endian, then a CRC-32 of key and value)
    E | UIN u64 | lane u8 | InboxSeq u64                 MsgID u64 | appended at u32
    I | UIN u64 | lane u8 | MsgID u64                    InboxSeq u64
    H | UIN u64 | lane u8                                head: last, floor, base, gap, dropped, hour, highest counters, D?
    C | UIN u64 | device u16 | lane u8                   cursor: UpTo u64 | map u64
    D | UIN u64 | lane u8                                deleted: n × (first InboxSeq u64 | last u64)
    U | UIN u64                                          the user's devices: number, session, seen at, client ID of each
    T | hour u32 | UIN u64 | lane u8                     nothing: the inbox got entries in that hour
    G | worker u16                                       epoch u32 | generation u32
    M                                                    applied position, clock, limits, where the sweeps are

Times are seconds since 2020, u32. LMDB returns a byte that flipped on the disk as it is; the CRC covers the key too, so
that a value that is found under a wrong key is found out.

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
ENTRY_KEY: Final = struct.Struct(">cQBQ")
INBOX_KEY: Final = struct.Struct(">cQB")
CURSOR_KEY: Final = struct.Struct(">cQHB")
USER_KEY: Final = struct.Struct(">cQ")
TIME_KEY: Final = struct.Struct(">cIQB")
WRITER_KEY: Final = struct.Struct(">cH")
META_KEY: Final = b"M"
CRC: Final = struct.Struct("<I")
CRC_BYTES: Final = CRC.size
ENTRY_VALUE: Final = struct.Struct("<QI")
INDEX_VALUE: Final = struct.Struct("<Q")
CURSOR_VALUE: Final = struct.Struct("<QQ")
WRITER_VALUE: Final = struct.Struct("<II")


def seal(key: bytes, body: bytes) -> bytes:
    """A value with its CRC."""
    return body + CRC.pack(crc32(key + body))


def unseal(key: bytes, value: bytes) -> bytes:
    """A value's body. Raises StateDamaged."""
    if len(value) < CRC_BYTES or CRC.unpack_from(value, len(value) - CRC_BYTES)[0] != crc32(key + value[:-CRC_BYTES]):
        raise StateDamaged(f"the value of key {key.hex()} has a wrong CRC; repair this replica from a peer")
    return value[:-CRC_BYTES]


def entry_key(uin: int, lane: int, seq: int) -> bytes:
    """Of an entry."""
    return ENTRY_KEY.pack(b"E", uin, lane, seq)


def index_key(uin: int, lane: int, msg_id: int) -> bytes:
    """Of the number of a MsgID."""
    return ENTRY_KEY.pack(b"I", uin, lane, msg_id)


def head_key(uin: int, lane: int) -> bytes:
    """Of an inbox."""
    return INBOX_KEY.pack(b"H", uin, lane)


def cursor_key(uin: int, device: int, lane: int) -> bytes:
    """Of a device's cursor."""
    return CURSOR_KEY.pack(b"C", uin, device, lane)


def deleted_key(uin: int, lane: int) -> bytes:
    """Of what was deleted in an inbox."""
    return INBOX_KEY.pack(b"D", uin, lane)


def user_key(uin: int) -> bytes:
    """Of a user's devices."""
    return USER_KEY.pack(b"U", uin)


def time_key(hour: int, uin: int, lane: int) -> bytes:
    """Of an inbox that got entries in an hour."""
    return TIME_KEY.pack(b"T", hour, uin, lane)


def writer_key(worker: int) -> bytes:
    """Of a writer's generation."""
    return WRITER_KEY.pack(b"G", worker)
