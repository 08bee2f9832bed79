"""Messages to rooms that are kept for sessions: which ones, the question to the routers, and the mail that is stored. Pure.

Source: docs/architecture.md, "A message for sessions that are away".
"""

from __future__ import annotations

from typing import Final

from pixiu.placement.topics import ROOM_PREFIX
from pixiu.wire.record import (
    FLAGS_AT,
    HEADER_SIZE,
    KEY_AT,
    KIND_AT,
    MAIL,
    MIN_SIZE,
    ORIGIN_AT,
    QOS_SHIFT,
    ROOM,
    SENDER_AT,
    SIZE_FIELD,
    SNOWFLAKE_AT,
    VERSION_BITS,
    Flag,
    body_bounds,
    decode,
    encode,
    with_topic,
)

QOS_0: Final = 1
"""The published QoS plus one, as the origin has it."""
KEPT: Final = int(Flag.KEPT)
NOT_STORED: Final = Flag.TRACED | Flag.TO_ROOM | Flag.KEPT
"""Flags that a message has on its way alone."""


def to_be_kept(record: bytes) -> bool:
    """True if a message is kept where a filter is: it goes to a room, and was not published with QoS 0."""
    return record[KIND_AT] == ROOM and record[ORIGIN_AT] >> QOS_SHIFT != QOS_0


def room_of(record: bytes) -> int:
    """The room of a message."""
    return int.from_bytes(record[KEY_AT:SENDER_AT], "little")


def snowflake_of(record: bytes) -> int:
    """The SnowflakeID of a message."""
    return int.from_bytes(record[SNOWFLAKE_AT:KEY_AT], "little")


def sender_of(record: bytes) -> int:
    """The user whose client sent a message."""
    return int.from_bytes(record[SENDER_AT:HEADER_SIZE], "little")


def is_traced(record: bytes) -> bool:
    """True if a message is traced."""
    return bool(record[FLAGS_AT] & Flag.TRACED)


def with_kept(record: bytes) -> bytes:
    """Mark a message as stored, so that brokers deliver it. The CRC does not cover the header."""
    return b"%b%c%b" % (record[:FLAGS_AT], record[FLAGS_AT] | KEPT, record[FLAGS_AT + 1 :])


def without_kept(data: bytes, start: int, count: int) -> bytes:
    """Clear the flag of `count` records that begin at `start`: only proxies set it. A malformed rest is left as it is."""
    changed, end = bytearray(data), len(data)
    for _ in range(count):
        if start + HEADER_SIZE > end:
            break
        size = int.from_bytes(changed[start : start + SIZE_FIELD], "little")
        if size < MIN_SIZE:
            break
        changed[start + FLAGS_AT] &= ~KEPT & 0xFF
        start += SIZE_FIELD + size
    return bytes(changed)


def topic_of(record: bytes) -> bytes | None:
    """The name that filters match: a free topic's, or "room/42". None: the record is malformed."""
    if not record[FLAGS_AT] & Flag.TOPIC:
        return f"{ROOM_PREFIX}{room_of(record)}".encode()
    bounds = body_bounds(record)
    if bounds is None:
        return None
    body = record[bounds[0] : bounds[1]]
    return body[2 : 2 + int.from_bytes(body[:2], "big")]


def mail_of(record: bytes) -> bytes:
    """Make the mail of a message: it has the room as its key, the message's identity and terms, and always a topic's name.

    Raises `MalformedData` if the record is damaged.
    """
    found = decode(record)
    body = found.body if found.flags & Flag.TOPIC else with_topic(f"{ROOM_PREFIX}{found.key}", found.body)
    return encode(
        MAIL,
        found.key,
        body,
        found.snowflake_id,
        sender=found.sender,
        flags=found.flags & ~NOT_STORED | Flag.TOPIC,
        type=found.type,
        lifetime_min=found.lifetime_min,
        extension=found.extension,
        origin=found.origin & ~VERSION_BITS,
    )
