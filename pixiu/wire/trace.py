"""Traces: stamps that a traced record collects at every hop, in its trailer. Pure.

    record … body │ stamp │ stamp │ … │ count u8        each stamp 24 bytes, little-endian:
                                                        role u8, partition u8, spare u16, replica u32, in µs u64, out µs u64

A hop adds its stamp only to records with flag `TRACED`, so that tracing costs the others nothing. Times are Unix microseconds by
the clock of the hop's machine.

A role traces with two lines in its loop over a batch, and one where it sends:

    if flags & Flag.TRACED:
        in_us = in_us or tracer.now_us()
    …
    tracer.stamp_all(records, in_us)       # of each parcel, when in_us is not 0

Source: docs/protocol.md, "Record", docs/architecture.md, "Probes and traces"; PiXiu §3.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

import xxhash

from pixiu.wire.record import (
    FLAGS_AT,
    HEADER_SIZE,
    KEY_AT,
    KIND_AT,
    MAX_RECORD_BYTES,
    MAX_STAMPS,
    MIN_SIZE,
    SENDER_AT,
    SIZE_FIELD,
    SNOWFLAKE_AT,
    STAMP,
    STAMP_SIZE,
    Flag,
    Kind,
    body_bounds,
)

REAL_TIME: Final = frozenset({int(Kind.ROOM), int(Kind.SIGNAL), int(Kind.CHAT)})
HASHES: Final = 1 << 64


class Hop(IntEnum):
    """The role that stamped. A router sees no records and has no number."""

    PUBLISHER = 1
    PROXY = 2
    BROKER = 3
    RELAY = 4
    GATEWAY = 5
    SUBSCRIBER = 6
    XIU = 7
    PI = 8


class Stamp(NamedTuple):
    """One hop's stamp in a trace: process, time in, time out."""

    role: int
    """A `Hop`; other numbers are from newer versions."""
    partition: int
    """0 if the role has no partitions."""
    replica: int
    """The number that the registry assigned to the process; 0 for publishers and subscribers."""
    in_us: int
    """Time at which the hop took the record, Unix microseconds."""
    out_us: int
    """Time at which the hop handed the record to its link, or to its clients' connections, Unix microseconds."""


def is_traced(record: bytes) -> bool:
    """True if a whole record is traced."""
    return bool(record[FLAGS_AT] & Flag.TRACED)


def stamps_of(record: bytes) -> list[Stamp] | None:
    """Read the stamps of a whole traced record, oldest first; None when its trailer is malformed. Never raises."""
    if len(record) <= HEADER_SIZE or not is_traced(record) or record[-1] > MAX_STAMPS or body_bounds(record) is None:
        return None
    found = STAMP.iter_unpack(record[len(record) - 1 - STAMP_SIZE * record[-1] : -1])
    return [Stamp(role, partition, replica, in_us, out_us) for role, partition, _, replica, in_us, out_us in found]


def with_stamp(record: bytes, stamp: Stamp) -> bytes:
    """Add a stamp to a traced record. The caller has checked that its trailer is valid and not full."""
    packed = STAMP.pack(stamp.role, stamp.partition, 0, stamp.replica, stamp.in_us, stamp.out_us)
    size = len(record) + STAMP_SIZE - SIZE_FIELD
    return b"".join((size.to_bytes(4, "little"), record[SIZE_FIELD:-1], packed, bytes((record[-1] + 1,))))


def as_traced(record: bytes) -> bytes:
    """Make a traced record without stamps from an untraced one. The CRC does not cover flags and trailer, so it stays valid."""
    size = len(record) + 1 - SIZE_FIELD
    flags = record[FLAGS_AT] | Flag.TRACED
    return b"".join((size.to_bytes(4, "little"), record[SIZE_FIELD:FLAGS_AT], bytes((flags,)), record[FLAGS_AT + 1 :], b"\0"))


@dataclass(slots=True)
class TraceCounters:
    """Totals of one hop's tracer, since its start."""

    traces_stamped: int = 0
    traces_malformed: int = 0
    """Traced records with a malformed trailer; they are passed on unchanged."""
    traces_full: int = 0
    """Traced records without space for another stamp; they are passed on unchanged."""


class Tracer:
    """Stamps the records of one hop.

    Args:
        role: role of this process.
        clock_us: returns Unix microseconds.
        partition: its partition, 0 for none.
        replica: returns the number that the registry assigned to it.
        limit: largest record that the cluster takes, bytes.
    """

    def __init__(
        self,
        role: Hop,
        clock_us: Callable[[], int],
        *,
        partition: int = 0,
        replica: Callable[[], int] = lambda: 0,
        limit: int = MAX_RECORD_BYTES,
    ) -> None:
        self.now_us = clock_us
        self.counters = TraceCounters()
        self._role = int(role)
        self._partition = partition
        self._replica = replica
        self._limit = limit - STAMP_SIZE

    def stamp(self, record: bytes, in_us: int, out_us: int) -> bytes:
        """Add this hop's stamp to a traced record; if that is impossible, the record is returned unchanged and counted."""
        if record[-1] > MAX_STAMPS or body_bounds(record) is None:
            self.counters.traces_malformed += 1
            return record
        if record[-1] == MAX_STAMPS or len(record) > self._limit:
            self.counters.traces_full += 1
            return record
        self.counters.traces_stamped += 1
        return with_stamp(record, Stamp(self._role, self._partition, max(self._replica(), 0), in_us, out_us))

    def stamp_all(self, records: list[bytes], in_us: int) -> None:
        """Stamp the traced records of a parcel that leaves now."""
        if not records:
            return
        out_us = self.now_us()
        for index, record in enumerate(records):
            if record[FLAGS_AT] & Flag.TRACED:
                records[index] = self.stamp(record, in_us, out_us)


UNTRACED: Final = Tracer(Hop.PUBLISHER, lambda: 0)
"""For a core that is made without a tracer, in tests and benchmarks: its stamps have no meaning."""


class Sampler:
    """Chooses the messages to trace: a fraction of them, by SnowflakeID, so that the choice is the same for all copies.

    Args:
        fraction: 0 to 1.
        limit: largest record that the cluster takes, bytes; a record that a trailer could make larger is not chosen.
    """

    def __init__(self, fraction: float, limit: int = MAX_RECORD_BYTES) -> None:
        self._below = int(fraction * HASHES)
        self._limit = limit - 1 - MAX_STAMPS * STAMP_SIZE
        self.marked = 0

    def mark(self, data: bytes, start: int, end: int, count: int) -> tuple[bytes, int, int]:
        """Mark the chosen records of a batch as traced; returns data, start and end. A malformed batch is returned unchanged."""
        digest, below = xxhash.xxh3_64_intdigest, self._below
        parts: list[bytes] = []
        position, copied, marked = start, start, 0
        for _ in range(count):
            after = position + SIZE_FIELD + int.from_bytes(data[position : position + 4], "little")
            if after < position + SIZE_FIELD + MIN_SIZE or after > end:
                return data, start, end
            if digest(data[position + SNOWFLAKE_AT : position + KEY_AT]) < below and self._may_mark(data, position, after):
                parts += (data[copied:position], as_traced(data[position:after]))
                copied, marked = after, marked + 1
            position = after
        if not marked or position != end:
            return data, start, end
        self.marked += marked
        parts.append(data[copied:end])
        made = b"".join(parts)
        return made, 0, len(made)

    def _may_mark(self, data: bytes, position: int, after: int) -> bool:
        untraced = not data[position + FLAGS_AT] & Flag.TRACED
        return untraced and data[position + KIND_AT] in REAL_TIME and after - position <= self._limit


def trace_json(record: bytes) -> dict[str, object] | None:
    """Format a traced record as one line of a trace file; None when its trailer is malformed.

    The schema is in docs/operations.md; it has nothing of the record's content.
    """
    stamps = stamps_of(record)
    if stamps is None:
        return None
    return {
        "snowflake_id": int.from_bytes(record[SNOWFLAKE_AT:KEY_AT], "little"),
        "kind": name_of_kind(record[KIND_AT]),
        "key": int.from_bytes(record[KEY_AT:SENDER_AT], "little"),
        "stamps": [
            {
                "role": name_of_hop(stamp.role),
                "partition": stamp.partition,
                "replica": stamp.replica,
                "in_us": stamp.in_us,
                "out_us": stamp.out_us,
            }
            for stamp in stamps
        ],
    }


def name_of_hop(number: int) -> str:
    """Name of a role in files and tables; an unknown number stands for itself."""
    return _HOP_NAMES.get(number, str(number))


def name_of_kind(number: int) -> str:
    """Name of a kind in files; an unknown number stands for itself."""
    return _KIND_NAMES.get(number, str(number))


def _names(values: Iterable[IntEnum]) -> dict[int, str]:
    return {int(value): value.name.lower() for value in values}


_HOP_NAMES: Final = _names(Hop)
_KIND_NAMES: Final = _names(Kind)
