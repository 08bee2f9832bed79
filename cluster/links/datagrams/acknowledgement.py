"""The body of an acknowledgement.

    0   u64  next record expected            32  u32  window in bytes
    8   u64  known from (records)            36  u16  missing ranges of records, n
    16  u64  next control message expected   38  u16  missing ranges of control messages, m
    24  u64  known from (control)            40       n + m ranges: u64 first, u64 last

Items below "known from" are not reported: the receiver has forgotten which were missing, or had no space to list them.

Source: docs/links.md.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from cluster.links.datagrams.head import HEAD_SIZE, LAST_SEQUENCE
from cluster.links.datagrams.sequence import MAX_TOLD, Tracker

_BODY: Final = struct.Struct("<QQQQIHH")
_RANGE: Final = struct.Struct("<QQ")
MAX_WINDOW: Final = (1 << 32) - 1


class Told(NamedTuple):
    """Part of an acknowledgement about one sequence."""

    next: int
    known_from: int
    missing: list[tuple[int, int]]
    """Missing ranges as (first, last), oldest first."""


class Acknowledgement(NamedTuple):
    """A decoded acknowledgement."""

    records: Told
    control: Told
    window: int
    """Bytes that may be in flight; each datagram counts with its overhead."""


def encode(records: Tracker, control: Tracker, window: int) -> tuple[bytes, int, bool]:
    """Encode an acknowledgement: (body, number of ranges, True if a list was cut)."""
    known_records, missing_records, cut_records = records.tell()
    known_control, missing_control, cut_control = control.tell()
    body = _BODY.pack(
        records.next,
        known_records,
        control.next,
        known_control,
        min(window, MAX_WINDOW),
        len(missing_records),
        len(missing_control),
    )
    ranges = missing_records + missing_control
    return body + b"".join([_RANGE.pack(*found) for found in ranges]), len(ranges), cut_records or cut_control


def decode(data: bytes, end: int, count: int) -> Acknowledgement | None:
    """Decode the acknowledgement in data[HEAD_SIZE:end] whose head states `count` ranges; None if it is malformed. Never raises."""
    start = HEAD_SIZE + _BODY.size
    if end < start or end - start != _RANGE.size * count:
        return None
    next_record, known_record, next_control, known_control, window, records, control = _BODY.unpack_from(data, HEAD_SIZE)
    if records > MAX_TOLD or control > MAX_TOLD or records + control != count:
        return None
    ranges: list[tuple[int, int]] = [(first, last) for first, last in _RANGE.iter_unpack(memoryview(data)[start:end])]
    told = Told(next_record, known_record, ranges[:records]), Told(next_control, known_control, ranges[records:])
    for one in told:
        if one.next > LAST_SEQUENCE:
            return None
        previous = 0
        for first, last in one.missing:
            if not previous < first <= last < one.next:
                return None
            previous = last
    return Acknowledgement(*told, window)
