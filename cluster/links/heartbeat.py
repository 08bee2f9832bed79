"""The body of a heartbeat.

Source: docs/links.md; proto/pixiu/wire/v1/control.proto.
"""

from __future__ import annotations

from typing import Final

from google.protobuf.message import DecodeError

from pixiu.wire.v1.control_pb2 import Heartbeat

MAX_ATTACHMENT_BYTES: Final = 512


def encode(*, reply: bool, sent_us: int, next_record: int, next_control: int, attachment: bytes, target: int) -> bytes:
    """A heartbeat's body. `sent_us` is the sender's monotonic clock; a reply echoes it."""
    return Heartbeat(
        reply=reply,
        sent_us=sent_us,
        next_record=next_record,
        next_control=next_control,
        attachment=attachment,
        target=target,
    ).SerializeToString()


def decode(data: bytes, start: int, end: int) -> Heartbeat | None:
    """The heartbeat in data[start:end]; None when it is malformed or its attachment is too long. Never raises."""
    try:
        heartbeat = Heartbeat.FromString(data[start:end])
    except DecodeError:
        return None
    return heartbeat if len(heartbeat.attachment) <= MAX_ATTACHMENT_BYTES else None
