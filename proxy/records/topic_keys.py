"""Rooms of free topics: records get the room that the cluster's rules name; publishers know the first level alone. Pure.

The key is in the header, outside of a record's CRC.

Source: docs/routing.md, "Topics".
"""

from __future__ import annotations

import struct
from typing import Final

from pixiu.ids import MAX_ROOM
from pixiu.placement.topic_rooms import TopicRooms
from pixiu.wire.record import HEADER_SIZE, KEY_AT, MIN_SIZE, ROOM, SIGNAL, SIZE_FIELD, Flag

HEAD: Final = struct.Struct("<IBB2xH14xQ")
"""size, kind, flags, extension length, key. Source: docs/protocol.md, "Record"."""
_KEY: Final = struct.Struct("<Q")

assert HEAD.size == KEY_AT + _KEY.size


def with_rooms(data: bytes, start: int, end: int, count: int, rooms: TopicRooms) -> bytes:
    """Set the rooms of records of free topics in a batch; a malformed rest is left to the core that routes it.

    Args:
        data: `count` records end to end, from `start` to `end`; the result has them at the same places.
    """
    changed: bytearray | None = None
    unpack, at = HEAD.unpack_from, start
    for _ in range(count):
        if at + HEADER_SIZE > end:
            break
        size, kind, flags, extension, key = unpack(data, at)
        after = at + SIZE_FIELD + size
        if size < MIN_SIZE or after > end:
            break
        if flags & Flag.TOPIC and key > MAX_ROOM and (kind == ROOM or (kind == SIGNAL and flags & Flag.TO_ROOM)):
            name = at + HEADER_SIZE + extension + 2
            length = int.from_bytes(data[name - 2 : name], "big")
            if name + length <= after:
                room = rooms.room(data[name : name + length].decode(errors="replace"))
                if room != key:
                    changed = bytearray(data) if changed is None else changed
                    _KEY.pack_into(changed, at + KEY_AT, room)
        at = after
    return data if changed is None else bytes(changed)
