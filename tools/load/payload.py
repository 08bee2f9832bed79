"""The payload of a load's message: its number, time of sending, and text.

    offset  type  field
    0       u64   the message's number in the load, from 0
    8       u64   time of sending: microseconds of the sending process's monotonic clock
    16            the text, UTF-8

Little-endian, like all our formats on the wire.
"""

from __future__ import annotations

import struct
import time
from typing import Final

HEAD: Final = struct.Struct("<QQ")
HEAD_BYTES: Final = 16

assert HEAD.size == HEAD_BYTES


def monotonic_us() -> int:
    """Microseconds of this process's monotonic clock."""
    return time.monotonic_ns() // 1000


def encode_payload(number: int, sent_us: int, text: bytes) -> bytes:
    """Encode the payload of one message; `sent_us` in microseconds."""
    return HEAD.pack(number, sent_us) + text
