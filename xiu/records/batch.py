"""Checks of a writer's batch before it reaches the log: refuses single records, and cuts the rest into entries. Pure.

Source: PiXiu §6.1.1 step 2; docs/protocol.md, "Record", docs/routing.md, docs/promises.md, "Failure rules" 1.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final
from zlib import crc32

from pixiu.errors import ChecksumWrong, InvalidArgument, RecordTooLarge, Refusal, WrongPartition
from pixiu.wire.record import HEADER_SIZE, KIND_AT, MIN_SIZE, SIZE_FIELD, Flag, Kind, crc_ok
from xiu.records.block import MAX_BLOCK_BYTES, MAX_BLOCK_RECORDS

_FIELDS: Final = struct.Struct("<IBB6xI8xQ")
"""size, kind, flags, CRC, key."""
assert _FIELDS.size == 32
MAX_LOOKED_AT: Final = 64
"""Number of records of a batch among which `drawn_user` chooses."""


@dataclass(slots=True)
class RecordRun:
    """Records of one entry."""

    index: int
    """Index of the first one in the batch."""
    count: int
    records: bytes


@dataclass(slots=True)
class Checked:
    """A checked batch."""

    runs: list[RecordRun] = field(default_factory=list)
    refused: list[tuple[int, Refusal]] = field(default_factory=list)
    """(index, why) of refused records."""


def check(data: bytes, count: int, partition: int, partitions: int, limit: int, addresses: Sequence[str] = ()) -> Checked | None:
    """Check every record. None: the bytes are not `count` records end to end.

    Args:
        data: the batch.
        count: records in it.
        partition: of this Xiu.
        partitions: of all Xius.
        limit: size limit of a record, bytes.
        addresses: of each partition's server, for texts.
    """
    checked = Checked()
    unpack, mail, least, traced, rest = _FIELDS.unpack_from, int(Kind.MAIL), MIN_SIZE, Flag.TRACED, partition % partitions
    view, position, end = memoryview(data), 0, len(data)
    begin, first = 0, 0
    for index in range(count):
        if position + HEADER_SIZE > end:
            return None
        size, kind, flags, crc, key = unpack(data, position)
        after = position + SIZE_FIELD + size
        if size < least or after > end:
            return None
        if (
            kind != mail
            or key % partitions != rest
            or size + SIZE_FIELD > limit
            or flags & traced
            or crc32(view[position + HEADER_SIZE : after]) != crc
        ):
            refusal = _refusal(data[position:after], key, partition, partitions, limit, addresses)
            if refusal is not None:
                if index > first:
                    checked.runs.append(RecordRun(first, index - first, data[begin:position]))
                checked.refused.append((index, refusal))
                begin, first = after, index + 1
                position = after
                continue
        if index - first >= MAX_BLOCK_RECORDS or (after - begin > MAX_BLOCK_BYTES and index > first):
            checked.runs.append(RecordRun(first, index - first, data[begin:position]))
            begin, first = position, index
        position = after
    if position != end:
        return None
    if count > first:
        checked.runs.append(RecordRun(first, count - first, data[begin:]))
    return checked


def drawn_user(data: bytes, count: int, lot: float) -> int:
    """UIN of a random record among the first 64, used to sample hot users. 0: the bytes are no records. lot: 0 to below 1."""
    position = 0
    for _ in range(int(lot * min(count, MAX_LOOKED_AT))):
        position += SIZE_FIELD + int.from_bytes(data[position : position + SIZE_FIELD], "little")
        if position >= len(data):
            return 0
    return int(_FIELDS.unpack_from(data, position)[4]) if position + _FIELDS.size <= len(data) else 0


def _refusal(record: bytes, key: int, partition: int, partitions: int, limit: int, addresses: Sequence[str]) -> Refusal | None:
    """Return the refusal of a record; None: it is valid."""
    if record[KIND_AT] != Kind.MAIL:
        text = f"a record of kind {record[KIND_AT]}; a Xiu stores mail, kind {int(Kind.MAIL)}"
        return Refusal(InvalidArgument.code, text)
    if key % partitions != partition % partitions:
        right = key % partitions
        where = addresses[right] if right < len(addresses) and addresses[right] else "nobody now"
        text = f"user {key} belongs to partition {right} of {partitions}, served by {where}; this is {partition}"
        return Refusal(WrongPartition.code, text)
    if len(record) > limit:
        return Refusal(RecordTooLarge.code, f"a record of {len(record)} bytes is above the limit of {limit}")
    if not crc_ok(record):
        return Refusal(ChecksumWrong.code, "the record's CRC does not fit: it was damaged on the way; send it again")
    return None
