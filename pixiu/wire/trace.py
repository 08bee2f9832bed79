"""Traces: stamps that a traced record collects at every hop, in its trailer. Pure.

    record … body │ stamp │ stamp │ … │ count u8        each stamp 24 bytes, little-endian:
                                                        role u8, partition u8, spare u16, replica u32, in µs u64, out µs u64

A hop adds its stamp to records that have flag `TRACED`, and to no other: what is not traced pays nothing for it. Times are
Unix microseconds by the clock of the machine that the hop runs on.

How a role traces, in two lines of its walk over a batch, and one where it sends:

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
    HEADER_SIZE,
    MAX_RECORD_BYTES,
    MAX_STAMPS,
    MIN_SIZE,
    SIZE_FIELD,
    STAMP,
    STAMP_SIZE,
    Flag,
    Kind,
    body_bounds,
)

FLAGS_AT: Final = 5
"""Where a record has its flags (`pixiu.wire.record`)."""
REAL_TIME: Final = frozenset({int(Kind.ROOM), int(Kind.SIGNAL), int(Kind.CHAT)})
HASHES: Final = 1 << 64


class Hop(IntEnum):
    """Who stamped. A router sees no records and has no number."""

    PUBLISHER = 1
    PROXY = 2
    BROKER = 3
    RELAY = 4
    GATEWAY = 5
    SUBSCRIBER = 6
    XIU = 7
    PI = 8


class Stamp(NamedTuple):
    """One hop's stamp in a trace: who, when in, when out."""

    role: int
    """A `Hop`; another number is of a newer version."""
    partition: int
    """0 where the role has no partitions."""
    replica: int
    """The number that the registry gave the process; 0 of publishers and subscribers."""
    in_us: int
    """When the hop took the record up, Unix microseconds."""
    out_us: int
    """When it handed the record to its link, or to its clients' connections."""


def is_traced(record: bytes) -> bool:
    """Whether a whole record is traced."""
    return bool(record[FLAGS_AT] & Flag.TRACED)


def stamps_of(record: bytes) -> list[Stamp] | None:
    """The stamps of a whole traced record, oldest first; None when its trailer is malformed. Never raises."""
    if len(record) <= HEADER_SIZE or not is_traced(record) or record[-1] > MAX_STAMPS or body_bounds(record) is None:
        return None
    found = STAMP.iter_unpack(record[len(record) - 1 - STAMP_SIZE * record[-1] : -1])
    return [Stamp(role, partition, replica, in_us, out_us) for role, partition, _, replica, in_us, out_us in found]


def with_stamp(record: bytes, stamp: Stamp) -> bytes:
    """A traced record with one stamp more. The caller knows that its trailer is whole and not full."""
    packed = STAMP.pack(stamp.role, stamp.partition, 0, stamp.replica, stamp.in_us, stamp.out_us)
    size = len(record) + STAMP_SIZE - SIZE_FIELD
    return b"".join((size.to_bytes(4, "little"), record[SIZE_FIELD:-1], packed, bytes((record[-1] + 1,))))


def as_traced(record: bytes) -> bytes:
    """An untraced record as a traced one without stamps. The CRC leaves flags and trailer out, so it stays right."""
    size = len(record) + 1 - SIZE_FIELD
    flags = record[FLAGS_AT] | Flag.TRACED
    return b"".join((size.to_bytes(4, "little"), record[SIZE_FIELD:FLAGS_AT], bytes((flags,)), record[FLAGS_AT + 1 :], b"\0"))


@dataclass(slots=True)
class TraceCounters:
    """Totals of one hop's tracer, since its start."""

    traces_stamped: int = 0
    traces_malformed: int = 0
    """Traced records whose trailer is no trailer; they go on as they came."""
    traces_full: int = 0
    """Traced records without room for a stamp more; likewise."""


class Tracer:
    """Stamps the records of one hop.

    Args:
        role: what this process is.
        clock_us: Unix microseconds.
        partition: the one that it serves, 0 for none.
        replica: asks for the number that the registry gave it.
        limit: bytes of the largest record that the cluster takes.
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
        """A traced record with this hop's stamp; the record itself when that cannot be, which is counted."""
        if record[-1] > MAX_STAMPS or body_bounds(record) is None:
            self.counters.traces_malformed += 1
            return record
        if record[-1] == MAX_STAMPS or len(record) > self._limit:
            self.counters.traces_full += 1
            return record
        self.counters.traces_stamped += 1
        return with_stamp(record, Stamp(self._role, self._partition, max(self._replica(), 0), in_us, out_us))

    def stamp_all(self, records: list[bytes], in_us: int) -> None:
        """Stamp those of a parcel that are traced; it leaves now."""
        if not records:
            return
        out_us = self.now_us()
        for index, record in enumerate(records):
            if record[FLAGS_AT] & Flag.TRACED:
                records[index] = self.stamp(record, in_us, out_us)


UNTRACED: Final = Tracer(Hop.PUBLISHER, lambda: 0)
"""For a core that is made without a tracer, in tests and benchmarks: its stamps say nothing."""


class Sampler:
    """Chooses which messages are traced: a fraction of them, by SnowflakeID, so that every copy of one agrees.

    Args:
        fraction: 0 to 1.
        limit: bytes of the largest record that the cluster takes; one that a trailer could make larger is not chosen.
    """

    def __init__(self, fraction: float, limit: int = MAX_RECORD_BYTES) -> None:
        self._below = int(fraction * HASHES)
        self._limit = limit - 1 - MAX_STAMPS * STAMP_SIZE
        self.marked = 0

    def chooses(self, snowflake_id: int) -> bool:
        """Whether a message is traced."""
        return xxhash.xxh3_64_intdigest(snowflake_id.to_bytes(8, "little")) < self._below

    def mark(self, data: bytes, start: int, end: int, count: int) -> tuple[bytes, int, int]:
        """A batch with the chosen records traced: data, start and end of it. One that is malformed is given back as it is."""
        digest, below = xxhash.xxh3_64_intdigest, self._below
        parts: list[bytes] = []
        position, copied, marked = start, start, 0
        for _ in range(count):
            after = position + SIZE_FIELD + int.from_bytes(data[position : position + 4], "little")
            if after < position + SIZE_FIELD + MIN_SIZE or after > end:
                return data, start, end
            if digest(data[position + 16 : position + 24]) < below and self._may_mark(data, position, after):
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
        return untraced and data[position + 4] in REAL_TIME and after - position <= self._limit


def trace_json(record: bytes) -> dict[str, object] | None:
    """A traced record as one line of a trace file; None when its trailer is malformed.

    The schema is in docs/operations.md; nothing of the record's content is in it.
    """
    stamps = stamps_of(record)
    if stamps is None:
        return None
    return {
        "snowflake_id": int.from_bytes(record[16:24], "little"),
        "kind": name_of_kind(record[4]),
        "key": int.from_bytes(record[24:32], "little"),
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
    """A role as files and tables name it; a number that is not known as itself."""
    return _HOP_NAMES.get(number, str(number))


def name_of_kind(number: int) -> str:
    """A kind as files name it; a number that is not known as itself."""
    return _KIND_NAMES.get(number, str(number))


def _names(values: Iterable[IntEnum]) -> dict[int, str]:
    return {int(value): value.name.lower() for value in values}


_HOP_NAMES: Final = _names(Hop)
_KIND_NAMES: Final = _names(Kind)
