"""A record together with the users that it is for: a broker sends a room's message through relays in this form. Pure.

    header of 40 bytes: kind ADDRESSED, lane and IDs as the record has them | u32 count | UIN u64, … | the record

It travels like a record (lanes, counted gaps, a stream if it is too large for a datagram), and only from brokers to relays.

Source: PiXiu §7.3 ("Room UIN List") and §7.4; docs/architecture.md, "A message to a room".
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from pixiu.wire.record import HEADER_SIZE, KIND_AT, MIN_SIZE, SIZE_FIELD, TYPE_AT, Kind

COUNT: Final = struct.Struct("<I")
MAX_UINS: Final = 64
"""Limit of users in one addressed record, so that it fits a datagram with a short record. A room with more takes several."""
OVERHEAD: Final = HEADER_SIZE + COUNT.size + 8 * MAX_UINS
"""Largest number of bytes that an addressed record adds to its record."""


def uin_list(uins: Sequence[int]) -> bytes:
    """Encode the list of at most `MAX_UINS` users that precedes the record. Kept for a room while its members stay."""
    return COUNT.pack(len(uins)) + struct.pack(f"<{len(uins)}Q", *uins)


def address(record: bytes, listed: bytes) -> bytes:
    """Put a list of users before a record."""
    size = HEADER_SIZE - SIZE_FIELD + len(listed) + len(record)
    # No flags: those of the inner record apply.
    return b"".join((size.to_bytes(4, "little"), bytes((Kind.ADDRESSED, 0)), record[TYPE_AT:HEADER_SIZE], listed, record))


def take_apart(data: bytes, start: int, end: int) -> tuple[tuple[int, ...], bytes] | None:
    """Extract the users and the record from an addressed record at data[start:end]; None when it is malformed."""
    listed = start + HEADER_SIZE
    if listed + COUNT.size > end:
        return None
    (count,) = COUNT.unpack_from(data, listed)
    inner = listed + COUNT.size + 8 * count
    if not 0 < count <= MAX_UINS or inner + HEADER_SIZE > end:
        return None
    size = int.from_bytes(data[inner : inner + SIZE_FIELD], "little")
    if size < MIN_SIZE or inner + SIZE_FIELD + size != end or data[inner + KIND_AT] not in (Kind.ROOM, Kind.SIGNAL):
        return None
    return struct.unpack_from(f"<{count}Q", data, listed + COUNT.size), data[inner:end]
