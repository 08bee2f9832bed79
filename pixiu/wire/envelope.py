"""The delivery envelope, which precedes a mail's record between a relay and a gateway. Pure.

    offset  type  field                                  offset  type  field
    0       u64   MsgID, 0 in a gap marker               24      u32   session
    8       u64   InboxSeq                               28      u16   device
    16      u64   UIN                                    30      u8    lane
                                                         31      u8    flags: 1 gap, 2 redelivered

Little-endian. A record follows, unless the flag `GAP` is set. A batch is envelopes with their records, end to end.

Source: docs/protocol.md, "Record".
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from pixiu.errors import MalformedData
from pixiu.wire.record import HEADER_SIZE, MIN_SIZE, SIZE_FIELD

ENVELOPE: Final = struct.Struct("<QQQIHBB")
ENVELOPE_SIZE: Final = 32
GAP: Final = 1
"""No record: everything in this lane up to this InboxSeq that the device has not received is gone. It is acknowledged like mail."""
REDELIVERED: Final = 2
"""The record was sent to the device before, and may have arrived. Without meaning in a gap marker."""
FLAGS_AT: Final = 31

assert ENVELOPE.size == ENVELOPE_SIZE


class Delivery(NamedTuple):
    """A decoded envelope with its record."""

    msg_id: int
    seq: int
    """InboxSeq."""
    uin: int
    session: int
    device: int
    lane: int
    flags: int
    record: bytes
    """Empty in a gap marker."""


def encode(msg_id: int, seq: int, uin: int, session: int, device: int, lane: int, flags: int, record: bytes) -> bytes:
    """Encode an envelope and its record."""
    return ENVELOPE.pack(msg_id, seq, uin, session, device, lane, flags) + record


def split(data: bytes, count: int) -> list[Delivery]:
    """Decode a batch's deliveries. Raises `MalformedData`: then none of it can be trusted."""
    found: list[Delivery] = []
    position, end = 0, len(data)
    for _ in range(count):
        record = after = position + ENVELOPE_SIZE
        if after > end:
            raise MalformedData("a batch of deliveries ends within an envelope")
        msg_id, seq, uin, session, device, lane, flags = ENVELOPE.unpack_from(data, position)
        if not flags & GAP:
            size = int.from_bytes(data[after : after + SIZE_FIELD], "little")
            if size < MIN_SIZE or after + SIZE_FIELD + size > end or after + HEADER_SIZE > end:
                raise MalformedData("a batch of deliveries ends within a record")
            after += SIZE_FIELD + size
        found.append(Delivery(msg_id, seq, uin, session, device, lane, flags, data[record:after]))
        position = after
    if position != end:
        raise MalformedData(f"a batch of deliveries has {end - position} bytes after its last one")
    return found
