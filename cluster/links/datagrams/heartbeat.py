"""The body of a heartbeat.

Source: docs/links.md; proto/cluster/wire/v1/control.proto.
"""

from __future__ import annotations

import struct
from typing import Final

from google.protobuf.message import DecodeError

from cluster.wire.v1.control_pb2 import Heartbeat

MAX_ATTACHMENT_BYTES: Final = 512
_REST: Final = struct.Struct("<BQBQBQ")
"""next_record, next_control and target, each after its tag, as protobuf writes them without an attachment."""
_RECORD_TAG: Final = 3 << 3 | 1
_CONTROL_TAG: Final = 4 << 3 | 1
_TARGET_TAG: Final = 6 << 3 | 1
_REQUEST: Final = Heartbeat()
_REPLY: Final = Heartbeat(reply=True)
"""Message that is reused, because making one takes longer than serializing it."""


def encode(*, reply: bool, sent_us: int, next_record: int, next_control: int, attachment: bytes, target: int) -> bytes:
    """Encode the body of a heartbeat. `sent_us` is the sender's monotonic clock; a reply echoes it."""
    return start(reply, sent_us) + rest(next_record, next_control, attachment, target)


def start(reply: bool, sent_us: int) -> bytes:
    """Encode the first fields, which heartbeats that leave together share."""
    message = _REPLY if reply else _REQUEST
    message.sent_us = sent_us
    return message.SerializeToString()


def rest(next_record: int, next_control: int, attachment: bytes, target: int) -> bytes:
    """Encode the other fields."""
    if not attachment and next_record and next_control and target:
        return _REST.pack(_RECORD_TAG, next_record, _CONTROL_TAG, next_control, _TARGET_TAG, target)
    return Heartbeat(next_record=next_record, next_control=next_control, attachment=attachment, target=target).SerializeToString()


def decode(data: bytes, start: int, end: int) -> Heartbeat | None:
    """Decode the heartbeat in data[start:end]; None if it is malformed or its attachment is too long. Never raises."""
    try:
        heartbeat = Heartbeat.FromString(data[start:end])
    except DecodeError:
        return None
    return heartbeat if end - start <= MAX_ATTACHMENT_BYTES or len(heartbeat.attachment) <= MAX_ATTACHMENT_BYTES else None
