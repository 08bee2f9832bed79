"""The delivery envelope: what stands before a mail's record between a relay and a gateway. Pure.

    offset  type  field                                  offset  type  field
    0       u64   MsgID, 0 in a gap marker               24      u32   session
    8       u64   InboxSeq                               28      u16   device
    16      u64   UIN                                    30      u8    lane
                                                         31      u8    flags: 1 gap, 2 redelivered

Little-endian. A record follows, or none where the flag `GAP` is set. A batch is envelopes with their records end to end.

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
"""No record: what the device has not got of this lane, up to this InboxSeq, is gone. It is acknowledged as mail is."""
REDELIVERED: Final = 2
"""It was sent to the device before, and may have arrived. In a gap marker it says nothing."""
FLAGS_AT: Final = 31

assert ENVELOPE.size == ENVELOPE_SIZE


class Delivery(NamedTuple):
    """An envelope taken apart, with its record."""

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
    """An envelope and its record."""
    return ENVELOPE.pack(msg_id, seq, uin, session, device, lane, flags) + record


def split(data: bytes, count: int) -> list[Delivery]:
    """A batch's deliveries. Raises `MalformedData`: then nothing of it is to be believed."""
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
