"""The record: the one binary form of a message from the SDK to the gateway, and batches of records.

    offset  type  field                                  offset  type  field
    0       u32   size of what follows this field        10      u16   lifetime in minutes, 0 none
    4       u8    kind                                   12      u32   CRC-32 of extension and body
    5       u8    flags                                  16      u64   SnowflakeID
    6       u8    type, its top two bits the lane        24      u64   key: RoomID or UIN
    7       u8    origin, see below                      32      u64   sender's UIN, 0 for a service
    8       u16   extension length                       40            extension, body, trace trailer

The origin's low four bits are the extension's version: 0 none, 1 JSON. Bit 4 is RETAIN of an MQTT publisher. The top two bits are
its QoS plus one; 0: the publisher did not use MQTT.

Little-endian. The trace trailer (flag `TRACED`) is n stamps of 24 bytes and a count byte; the CRC does not cover it.
A batch is records end to end. A hop reads the header in place and copies the bytes on.

Any module may read a header by the names of this one: `record[KIND_AT]` and `record[KEY_AT:SENDER_AT]` of a record alone,
`data[start + FLAGS_AT]` or a struct (`ROUTE`, `WALK`) in a batch. No other module counts bytes; `tests/test_tidy.py` checks it.

Source: docs/protocol.md, "Record"; NSQ (the extension).
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple
from zlib import crc32

from pixiu.errors import InvalidArgument, MalformedData, RecordTooLarge
from pixiu.ids import MAX_ID, snowflake_time_ms

HEADER: Final = struct.Struct("<IBBBBHHIQQQ")
HEADER_SIZE: Final = 40
SIZE_FIELD: Final = 4
MIN_SIZE: Final = HEADER_SIZE - SIZE_FIELD
STAMP: Final = struct.Struct("<BBHIQQ")
STAMP_SIZE: Final = 24
MAX_STAMPS: Final = 16
MAX_RECORD_BYTES: Final = 1 << 20
"""Limit of a whole record, header included, bytes; the cluster may set less."""
ROUTE: Final = struct.Struct("<IBBB9xQQ")
"""size, kind, flags, type, SnowflakeID, key: the fields that a hop reads in place."""
ROUTE_SIZE: Final = 32

WALK: Final = struct.Struct("<IHB9xQQ")
"""`ROUTE` for a loop over a batch: kind and flags are one number, kind + 256 * flags, to find plain records by one comparison."""

KIND_AT: Final = 4
FLAGS_AT: Final = 5
TYPE_AT: Final = 6
ORIGIN_AT: Final = 7
EXTENSION_AT: Final = 8
"""Of the extension's length: the low byte, the high one after it."""
LIFETIME_AT: Final = 10
LIFETIME_HIGH_AT: Final = 11
CRC_AT: Final = 12
SNOWFLAKE_AT: Final = 16
KEY_AT: Final = 24
SENDER_AT: Final = 32
"""A field ends where the next begins: `record[KEY_AT:SENDER_AT]`. No slice objects: compiled code takes one for a number."""
TYPE_BITS: Final = 6
"""Bits of the application's type; those above them are the lane."""

assert HEADER.size == HEADER_SIZE
assert WALK.size == ROUTE_SIZE
assert STAMP.size == STAMP_SIZE
assert ROUTE.size == ROUTE_SIZE


class Kind(IntEnum):
    """Promise of a record (docs/promises.md)."""

    ROOM = 1
    SIGNAL = 2
    CHAT = 3
    MAIL = 4
    ADDRESSED = 5
    """Only inside a cluster: a record with the users that it is for (`pixiu.wire.uin_list`)."""


ROOM: Final = int(Kind.ROOM)
"""Kinds as plain integers, for loops over batches: comparing with a member of `Kind` costs more."""
SIGNAL: Final = int(Kind.SIGNAL)
CHAT: Final = int(Kind.CHAT)
MAIL: Final = int(Kind.MAIL)
ADDRESSED: Final = int(Kind.ADDRESSED)


class Flag:
    """Bits of a record's flags. Plain integers: an operation of `enum.IntFlag` costs half a microsecond."""

    TRACED: Final = 1
    LOAD_TEST: Final = 2
    TO_ROOM: Final = 4
    COMPRESSED: Final = 8
    TOPIC: Final = 16
    """The body begins with a topic name: u16 big-endian length, UTF-8, as in MQTT's PUBLISH."""
    DERIVED_ID: Final = 32
    KEPT: Final = 64
    """Only inside a cluster: the message is stored for the sessions that are kept, so brokers deliver it at once."""


PLAIN_ROOM: Final = int(Kind.ROOM | Flag.TO_ROOM << 8)
"""Value that `WALK` reads in most messages: to a room, not traced."""
LANE_FIRST: Final = 0
LANE_NORMAL: Final = 1
FIRST_LANE_BELOW: Final = LANE_NORMAL << TYPE_BITS
"""Record types below this are in lane 0: the top two bits of a type are the lane."""
TYPE_NORMAL: Final = LANE_NORMAL << TYPE_BITS
"""The type of a message without a given type: type 0 in the normal lane."""
VERSION_BITS: Final = 15
"""Of the origin: the extension's version."""
RETAIN: Final = 16
"""Of the origin: the message was published with RETAIN."""
QOS_SHIFT: Final = 6
"""Of the origin: the published QoS plus one is above these bits."""
INBOX_LANES: Final = 4
"""Lanes of a type, and of a user's inboxes: one inbox a lane, 0 first."""
LINK_LANES: Final = 2
"""Lanes of a link: the first one, and one for all others."""


class Record(NamedTuple):
    """A decoded record."""

    kind: int
    flags: int
    type: int
    origin: int
    lifetime_min: int
    crc: int
    snowflake_id: int
    key: int
    sender: int
    extension: bytes
    body: bytes
    """The body, including the topic name if flag TOPIC is set."""
    stamps: tuple[tuple[int, int, int, int, int, int], ...] = ()

    @property
    def lane(self) -> int:
        """The priority lane, 0 first."""
        return self.type >> TYPE_BITS

    def topic_and_payload(self) -> tuple[str | None, bytes]:
        """The topic name (None if the record has none) and the application's payload."""
        if not self.flags & Flag.TOPIC:
            return None, self.body
        size = int.from_bytes(self.body[:2], "big")
        return self.body[2 : 2 + size].decode(), self.body[2 + size :]


def encode(
    kind: int,
    key: int,
    body: bytes,
    snowflake_id: int,
    *,
    sender: int = 0,
    flags: int = 0,
    type: int = TYPE_NORMAL,
    lifetime_min: int = 0,
    extension: bytes = b"",
    limit: int = MAX_RECORD_BYTES,
    origin: int = 0,
) -> bytes:
    """Encode a record. `origin`: its bits above the extension's version.

    Raises `RecordTooLarge` above `limit` bytes and `InvalidArgument` for a field out of range.
    """
    size = HEADER_SIZE + len(extension) + len(body) + bool(flags & Flag.TRACED)
    if size > limit:
        raise RecordTooLarge(f"a record of {size} bytes is above the limit of {limit}; send a reference to the content instead")
    if len(extension) > 0xFFFF:
        raise InvalidArgument(f"an extension has at most 65535 bytes, this one {len(extension)}")
    if not 0 <= key <= MAX_ID or not 0 <= sender <= MAX_ID:
        raise InvalidArgument("RoomID and UIN are from 0 to 2^63-1")
    crc = crc32(body, crc32(extension)) if extension else crc32(body)
    head = HEADER.pack(
        size - SIZE_FIELD, kind, flags, type, origin | 1 if extension else origin, len(extension), lifetime_min, crc, snowflake_id,
        key, sender,
    )  # fmt: skip
    return head + extension + body + (b"\0" if flags & Flag.TRACED else b"")


def with_topic(topic: str, payload: bytes) -> bytes:
    """Make a body that begins with a topic name, for flag TOPIC."""
    name = topic.encode()
    return len(name).to_bytes(2, "big") + name + payload


def with_key(record: bytes, key: int) -> bytes:
    """Copy a record for another room. The CRC does not cover the header, so it stays valid."""
    return record[:KEY_AT] + key.to_bytes(8, "little") + record[SENDER_AT:]


def offsets(data: bytes | memoryview, start: int, end: int, count: int) -> list[int] | None:
    """Find the start of each of a batch's `count` records, and the end; None when the batch is malformed.

    Only sizes are read here. Never raises.
    """
    found = [start]
    position = start
    for _ in range(count):
        if position + HEADER_SIZE > end:
            return None
        size = int.from_bytes(data[position : position + 4], "little")
        if size < MIN_SIZE:
            return None
        position += SIZE_FIELD + size
        found.append(position)
    return found if position == end else None


def split(data: bytes, count: int) -> list[bytes]:
    """Split a batch into its records. Raises `MalformedData`."""
    found = offsets(data, 0, len(data), count)
    if found is None:
        raise MalformedData(f"a batch of {len(data)} bytes is not {count} records end to end")
    return [data[found[i] : found[i + 1]] for i in range(count)]


def body_bounds(record: bytes) -> tuple[int, int] | None:
    """Find the start and end of the body of one whole record; None when lengths are inconsistent. Never raises."""
    end = len(record)
    start = HEADER_SIZE + (record[EXTENSION_AT] | record[EXTENSION_AT + 1] << 8)
    if record[FLAGS_AT] & Flag.TRACED:
        end -= 1 + STAMP_SIZE * record[end - 1] if end > HEADER_SIZE else 1
    if start > end:
        return None
    if record[FLAGS_AT] & Flag.TOPIC and (start + 2 > end or start + 2 + (record[start] << 8 | record[start + 1]) > end):
        return None
    return start, end


def intact_body(record: bytes) -> bytes | None:
    """Extract the body of one whole record; None when its lengths or its CRC are wrong. Never raises."""
    bounds = body_bounds(record)
    if bounds is None:
        return None
    start, end = bounds
    body = record[start:end]
    checked = body if start == HEADER_SIZE else memoryview(record)[HEADER_SIZE:end]
    return body if crc32(checked) == int.from_bytes(record[CRC_AT:SNOWFLAKE_AT], "little") else None


def is_over(lifetime_min: int, sent_at_ms: int, now_ms: int) -> bool:
    """True if a lifetime is over, from its last millisecond on. 0 minutes never end, nor does a derived ID, which holds no time
    (0)."""
    return lifetime_min > 0 and sent_at_ms > 0 and now_ms >= sent_at_ms + lifetime_min * 60_000


def has_expired(data: bytes, start: int, now_ms: int) -> bool:
    """True if the lifetime of the record that begins at `start` is over. `now_ms`: Unix milliseconds."""
    lifetime_min = data[start + LIFETIME_AT] | data[start + LIFETIME_HIGH_AT] << 8
    if not lifetime_min or data[start + FLAGS_AT] & Flag.DERIVED_ID:
        return False
    number = int.from_bytes(data[start + SNOWFLAKE_AT : start + KEY_AT], "little")
    return is_over(lifetime_min, snowflake_time_ms(number), now_ms)


def crc_ok(record: bytes) -> bool:
    """True if a whole record's CRC matches its extension and body."""
    bounds = body_bounds(record)
    return bounds is not None and crc32(memoryview(record)[HEADER_SIZE : bounds[1]]) == int.from_bytes(
        record[CRC_AT:SNOWFLAKE_AT], "little"
    )


def decode(record: bytes) -> Record:
    """Decode one whole record. Raises `MalformedData` when lengths or the CRC are wrong."""
    if len(record) < HEADER_SIZE:
        raise MalformedData(f"a record has at least {HEADER_SIZE} bytes, this one {len(record)}")
    size, kind, flags, type_, origin, length, lifetime, crc, snowflake_id, key, sender = HEADER.unpack_from(record)
    if size + SIZE_FIELD != len(record):
        raise MalformedData(f"the record says {size + SIZE_FIELD} bytes and has {len(record)}")
    bounds = body_bounds(record)
    if bounds is None or not crc_ok(record):
        raise MalformedData("the record's lengths or its CRC are wrong: it was damaged on the way")
    start, end = bounds
    stamps = tuple(STAMP.iter_unpack(record[end:-1])) if flags & Flag.TRACED else ()
    return Record(
        kind,
        flags,
        type_,
        origin,
        lifetime,
        crc,
        snowflake_id,
        key,
        sender,
        record[HEADER_SIZE : HEADER_SIZE + length],
        record[start:end],
        stamps,
    )
