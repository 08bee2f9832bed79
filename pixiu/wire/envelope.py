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
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, TypeVar

from pixiu.errors import MalformedData
from pixiu.wire.record import HEADER_SIZE, MIN_SIZE, SIZE_FIELD

ENVELOPE: Final = struct.Struct("<QQQIHBB")
ENVELOPE_SIZE: Final = 32
GAP: Final = 1
"""No record: what the device has not got of this lane, up to this InboxSeq, is gone. It is acknowledged as mail is."""
REDELIVERED: Final = 2
"""It was sent to the device before, and may have arrived. In a gap marker it says nothing."""
FLAGS_AT: Final = 31

ItemT = TypeVar("ItemT")

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


class Envelope(NamedTuple):
    """An envelope read in place: its fields, and it and its record as they came, to be passed on."""

    msg_id: int
    seq: int
    """InboxSeq."""
    uin: int
    session: int
    device: int
    lane: int
    flags: int
    data: bytes
    """Envelope and record; of a gap marker the envelope alone."""

    def redelivered(self) -> Envelope:
        """The same, marked as sent before."""
        flags = self.flags | REDELIVERED
        return self._replace(flags=flags, data=self.data[:FLAGS_AT] + bytes((flags,)) + self.data[FLAGS_AT + 1 :])


def split(data: bytes, count: int) -> list[Delivery]:
    """A batch's deliveries. Raises `MalformedData`: then nothing of it is to be believed."""
    return _walk(data, count, Delivery._make, ENVELOPE_SIZE)


def envelopes(data: bytes, count: int) -> list[Envelope]:
    """The same for a hop, which passes them on. Raises `MalformedData`."""
    return _walk(data, count, Envelope._make, 0)


def _walk(data: bytes, count: int, make: Callable[[Iterable[Any]], ItemT], skip: int) -> list[ItemT]:
    """What is made of the fields of each envelope and its bytes, from `skip` on."""
    found: list[ItemT] = []
    position, end = 0, len(data)
    for _ in range(count):
        after = position + ENVELOPE_SIZE
        if after > end:
            raise MalformedData("a batch of deliveries ends within an envelope")
        fields = ENVELOPE.unpack_from(data, position)
        if not fields[6] & GAP:
            size = int.from_bytes(data[after : after + SIZE_FIELD], "little")
            if size < MIN_SIZE or after + SIZE_FIELD + size > end or after + HEADER_SIZE > end:
                raise MalformedData("a batch of deliveries ends within a record")
            after += SIZE_FIELD + size
        found.append(make((*fields, data[position + skip : after])))
        position = after
    if position != end:
        raise MalformedData(f"a batch of deliveries has {end - position} bytes behind its last one")
    return found
