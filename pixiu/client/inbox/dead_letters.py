"""Dead letters: mail that its receiver's handler could not process, in the inbox of a user derived from the receiver. Pure.

    offset  type  field                                  offset  type  field
    0       u8    version, 1                             24      u64   InboxSeq there
    1       u8    flags: 1 the record is not in here     32      u64   when it was given up, Unix milliseconds
    2       u16   length of the reason                   40      u32   length of the record
    4       u32   how often it was tried                 44      u8    lane
    8       u64   MsgID of the mail                      45      u8    length of the device's name
    16      u64   UIN whose mail it was                  46      2 x   zero
                                                         48            reason, device's name (both UTF-8), record

Little-endian. This is the body of a mail to `dead_letter_uin(uin)`. A record that does not fit is left out; its length is still
given, and Xiu has the record under its MsgID for as long as it keeps mail.

Source: docs/architecture.md, "A mail is sent".
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from pixiu.errors import InvalidArgument, MalformedData
from pixiu.ids import MAX_ID, UIN, uin_of_name
from pixiu.wire.record import HEADER_SIZE, MAX_RECORD_BYTES, SIZE_FIELD

VERSION: Final = 1
LEFT_OUT: Final = 1
"""Flag: the record is not included."""
HEADER: Final = struct.Struct("<BBHIQQQQIBB2x")
DEAD_LETTER_HEADER_SIZE: Final = 48
MAX_REASON_BYTES: Final = 1024
"""Limit of the reason, bytes; a longer one is cut."""
MAX_DEVICE_BYTES: Final = 128
MAX_ATTEMPTS: Final = (1 << 32) - 1

assert HEADER.size == DEAD_LETTER_HEADER_SIZE


class DeadLetter(NamedTuple):
    """A mail that was given up."""

    uin: UIN
    """The user who was to receive the mail."""
    msg_id: int
    """MsgID of the mail."""
    seq: int
    """InboxSeq of the mail in that user's inbox."""
    lane: int
    attempts: int
    """Number of times the handler was called with the mail."""
    failed_at_ms: int
    """Time at which the mail was given up, Unix milliseconds."""
    reason: str
    """Failure of the last attempt."""
    record: bytes
    """The mail's record (`pixiu.wire.record`); empty if it was left out."""
    record_size: int
    """Bytes of the record, also if it was left out."""
    device: str = ""
    """Name of the device whose handler failed: each device files a letter of its own."""


def dead_letter_uin(uin: int) -> UIN:
    """The user whose inbox holds the dead letters of `uin`."""
    return uin_of_name(f"dead-letter/{uin}")


def encode(
    uin: int,
    msg_id: int,
    seq: int,
    lane: int,
    attempts: int,
    failed_at_ms: int,
    reason: str,
    record: bytes,
    device: str = "",
    *,
    limit: int = MAX_RECORD_BYTES,
) -> bytes:
    """Encode the body of a dead letter. The record is left out if the whole mail, with its header, would be above `limit` bytes.

    Raises `InvalidArgument` for a number out of range, and for a `record` that is not a record.
    """
    if not (0 < uin <= MAX_ID and 0 <= msg_id <= MAX_ID and 0 <= seq <= MAX_ID and 0 <= failed_at_ms <= MAX_ID):
        raise InvalidArgument("UIN, MsgID, InboxSeq and time of a dead letter are numbers below 2^63, the UIN above 0")
    if not 0 <= lane <= 3:
        raise InvalidArgument(f"a lane is from 0 to 3, not {lane}")
    if not HEADER_SIZE <= len(record) <= MAX_RECORD_BYTES:
        raise InvalidArgument(f"a record has {HEADER_SIZE} to {MAX_RECORD_BYTES} bytes, this one {len(record)}")
    text, name = _cut(reason, MAX_REASON_BYTES), _cut(device, MAX_DEVICE_BYTES)
    left_out = HEADER_SIZE + DEAD_LETTER_HEADER_SIZE + len(text) + len(name) + len(record) > limit
    head = HEADER.pack(
        VERSION,
        LEFT_OUT if left_out else 0,
        len(text),
        min(max(attempts, 0), MAX_ATTEMPTS),
        msg_id,
        uin,
        seq,
        failed_at_ms,
        len(record),
        lane,
        len(name),
    )
    return head + text + name + (b"" if left_out else record)


def _cut(text: str, most: int) -> bytes:
    """Cut a text to a number of bytes, without the character that the cut splits; a lone surrogate becomes a question mark."""
    return text.encode("utf-8", "replace")[:most].decode("utf-8", "ignore").encode()


def decode(body: bytes) -> DeadLetter:
    """Decode a dead letter from a mail's body. Raises `MalformedData`: anybody may send mail there."""
    if len(body) < DEAD_LETTER_HEADER_SIZE:
        raise MalformedData(f"a dead letter has at least {DEAD_LETTER_HEADER_SIZE} bytes, this one {len(body)}")
    version, flags, length, attempts, msg_id, uin, seq, failed_at_ms, size, lane, named = HEADER.unpack_from(body)
    if version != VERSION:
        raise MalformedData(f"a dead letter of version {version}; this is version {VERSION} of the format")
    if flags & ~LEFT_OUT or lane > 3 or not 0 < uin <= MAX_ID or max(msg_id, seq, failed_at_ms) > MAX_ID:
        raise MalformedData("a dead letter has a field out of range")
    if length > MAX_REASON_BYTES or not HEADER_SIZE <= size <= MAX_RECORD_BYTES:
        raise MalformedData("a dead letter has a length out of range")
    middle = DEAD_LETTER_HEADER_SIZE + length
    start = middle + named
    if start + (0 if flags & LEFT_OUT else size) != len(body):
        raise MalformedData(f"a dead letter's lengths do not fit its {len(body)} bytes")
    record = body[start:]
    if record and int.from_bytes(record[:SIZE_FIELD], "little") + SIZE_FIELD != size:
        raise MalformedData("a dead letter's record has another length than it says")
    try:
        reason, device = body[DEAD_LETTER_HEADER_SIZE:middle].decode(), body[middle:start].decode()
    except UnicodeDecodeError:
        raise MalformedData("a dead letter's reason or device is not UTF-8") from None
    return DeadLetter(UIN(uin), msg_id, seq, lane, attempts, failed_at_ms, reason, record, size, device)
