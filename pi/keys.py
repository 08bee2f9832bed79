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
    P                                                    where the doubling of this partition stands: see `pi.doubling`
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
        raise StateDamaged(f"{name_of(key)} has a wrong CRC; repair this replica from a peer")
    return value[:-CRC_BYTES]


def name_of(key: bytes) -> str:
    """What is stored under a key, in words, for an operator."""
    if key == META_KEY:
        return "the applied position"
    space, size = key[:1], len(key)
    if space in (b"E", b"I") and size == ENTRY_KEY.size:
        _, uin, lane, number = ENTRY_KEY.unpack(key)
        what = f"entry {number}" if space == b"E" else f"the index of message {number:016x}"
        return f"{what} of lane {lane} of inbox {uin:016x}"
    if space in (b"H", b"D") and size == INBOX_KEY.size:
        _, uin, lane = INBOX_KEY.unpack(key)
        return f"{'the head' if space == b'H' else 'what was deleted'} of lane {lane} of inbox {uin:016x}"
    if space == b"C" and size == CURSOR_KEY.size:
        _, uin, device, lane = CURSOR_KEY.unpack(key)
        return f"the cursor of device {device} in lane {lane} of inbox {uin:016x}"
    if space == b"U" and size == USER_KEY.size:
        return f"the devices of user {USER_KEY.unpack(key)[1]:016x}"
    return f"the value of key {key.hex()}"


_UIN: Final = struct.Struct(">Q")
_UIN_AT: Final = {b"E": 1, b"I": 1, b"H": 1, b"C": 1, b"D": 1, b"U": 1, b"T": 5}
"""Where a key has its UIN, by its first byte."""


def uin_of(key: bytes) -> int | None:
    """Whose a key's value is; None: nobody's, or of a key that no version of this program wrote."""
    at = _UIN_AT.get(key[:1])
    return None if at is None or len(key) < at + _UIN.size else int(_UIN.unpack_from(key, at)[0])


def entry_key(uin: int, lane: int, seq: int) -> bytes:
    """Key of an entry of an inbox."""
    return ENTRY_KEY.pack(b"E", uin, lane, seq)


def index_key(uin: int, lane: int, msg_id: int) -> bytes:
    """Key of the InboxSeq of a MsgID."""
    return ENTRY_KEY.pack(b"I", uin, lane, msg_id)


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


def time_key(hour: int, uin: int, lane: int) -> bytes:
    """Key of an inbox that got entries in an hour."""
    return TIME_KEY.pack(b"T", hour, uin, lane)


def writer_key(worker: int) -> bytes:
    """Key of a writer's generation."""
    return WRITER_KEY.pack(b"G", worker)
