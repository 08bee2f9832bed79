"""Export of a Xiu: its messages as Arrow record batches, from any position to any other, on any replica.

A block's records become columns without an object for each field: their heads are laid end to end, and every field is then
a strided slice of these.

    records   head₀ ext₀ body₀ head₁ ext₁ body₁ …
    heads     head₀ head₁ …          as u64: head 5i+2 is the SnowflakeID of row i, 5i+3 its key, 5i+4 its sender

Source: DESIGN section 16.
"""

from __future__ import annotations

import struct
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Protocol

import grpc.aio
import pyarrow as pa
import pyarrow.compute as pc

from cluster.runtime.export import PART_BYTES, PART_ROWS, Breath, Exporter, Part, abort, closed, replicas_of, schema_of, users_of
from pixiu.discovery.view import View
from pixiu.errors import Gone, InvalidArgument, NotYet, PixiuError
from pixiu.ids import MSG_COUNTER_BITS, SNOWFLAKE_EPOCH_MS
from pixiu.wire.export_tables import MESSAGES, Columns, columns_of
from pixiu.wire.record import HEADER_SIZE, SIZE_FIELD, STAMP_SIZE, Flag
from pixiu.wire.v1 import export_pb2, export_pb2_grpc
from xiu.block import MAX_BLOCK_RECORDS, Block
from xiu.core import Core
from xiu.options import Options
from xiu.readers import Readers
from xiu.state import Head

_SIZE: Final = struct.Struct("<I")
_COUNTING: Final = pa.array(range(MAX_BLOCK_RECORDS), pa.int64())
_FEW: Final = 32
"""Numbers that Python counts as fast as Arrow."""
_SNOWFLAKE_TIME_BITS: Final = 22
_WORD, _SHORT = 8, 2
assert HEADER_SIZE % _WORD == 0
_TIMESTAMP: Final = pa.timestamp("us", tz="UTC")


class Messages(Protocol):
    """What an export needs of `xiu.reading.Reading`."""

    @property
    def head(self) -> Head:
        """Of what can be read."""

    def scan(self, begin: int, end: int, limit: int) -> Iterator[Block]:
        """Blocks with records from one sequence to another, both included."""

    def first_at_or_after(self, sequence: int) -> int | None:
        """The first sequence of a record at or behind one; None at the end."""

    def last_before(self, sequence: int) -> int:
        """The last sequence of a record before one; 0: there is none."""

    def stored_since(self, at_us: int) -> int | None:
        """The first sequence of a record that was stored at a time or later; None: none was."""


class Rows:
    """Rows that are being collected into one record batch.

    Args:
        partition: of the Xiu.
        columns: that are wanted.
        users: whose messages; none: everybody's.
    """

    def __init__(self, partition: int, columns: Columns, users: frozenset[int]) -> None:
        self._partition, self._columns, self._users = partition, columns, users
        self._schema = schema_of(columns)
        self._body = any(name == "body" for name, _ in columns)
        self._heads: list[bytes] = []
        self._exts: list[bytes] = []
        self._bodies: list[bytes] = []
        self._traces: list[bytes] = []
        self._seqs = array("q")
        self._stored = array("q")

    def add(self, block: Block, begin: int, end: int) -> None:
        """Rows of a block, from one sequence to another, both in it."""
        data, (position, stop) = block.records, block.range_of(begin, end)
        unpack, starts = _SIZE.unpack_from, list[int]()
        while position < stop:
            starts.append(position)
            position += SIZE_FIELD + unpack(data, position)[0]
        starts.append(stop)
        heads = [data[start : start + HEADER_SIZE] for start in starts[:-1]]
        places = range(len(heads)) if not self._users else self._wanted(heads)
        if not places:
            return
        self._note_numbers(begin, places)
        self._stored.extend(array("q", (block.at_us,)) * len(places))
        if self._users:
            heads = [heads[place] for place in places]
        self._heads += heads
        spans = [(starts[place], starts[place + 1]) for place in places] if self._users else list(pairwise(starts))
        self._add_contents(data, heads, spans)

    def _wanted(self, heads: list[bytes]) -> list[int]:
        keys, users = memoryview(b"".join(heads)).cast("Q")[3 :: HEADER_SIZE // _WORD].tolist(), self._users
        return [place for place, key in enumerate(keys) if key in users]

    def _note_numbers(self, begin: int, places: Sequence[int]) -> None:
        """The sequences of rows, which are dense where nobody is left out."""
        count = len(places)
        if isinstance(places, range) and _FEW < count <= len(_COUNTING):
            numbers = pc.add(_COUNTING.slice(0, count), _long(begin))
            self._seqs.frombytes(memoryview(numbers.buffers()[1])[: count * _WORD])
        else:
            self._seqs.extend([begin + place for place in places])

    def _add_contents(self, data: bytes, heads: list[bytes], spans: list[tuple[int, int]]) -> None:
        """Extensions, bodies and stamps: from where a record begins to where it ends. Most have a body alone."""
        joined = b"".join(heads)
        traced = any(flag & Flag.TRACED for flag in set(joined[5::HEADER_SIZE]))
        if not traced and not any(joined[8::HEADER_SIZE]) and not any(joined[9::HEADER_SIZE]):
            if self._body:
                self._bodies += [data[start + HEADER_SIZE : after] for start, after in spans]
            self._exts += [b""] * len(spans)
            self._traces += [b""] * len(spans)
            return
        for (start, after), head in zip(spans, heads, strict=True):
            body = start + HEADER_SIZE + (head[8] | head[9] << 8)
            last = after - 1 - STAMP_SIZE * data[after - 1] if head[5] & Flag.TRACED else after
            self._exts.append(data[start + HEADER_SIZE : body])
            self._bodies.append(data[body:last])
            self._traces.append(data[last : after - 1] if head[5] & Flag.TRACED else b"")

    def batch(self) -> pa.RecordBatch | None:
        """All of them; None: there are none."""
        if not self._heads:
            return None
        heads = memoryview(b"".join(self._heads))
        return pa.RecordBatch.from_arrays([self._array(name, heads) for name, _ in self._columns], schema=self._schema)

    def _array(self, name: str, heads: memoryview) -> pa.Array:
        made: dict[str, Callable[[], pa.Array]] = {
            "xiu_partition": lambda: pa.repeat(pa.scalar(self._partition, pa.int32()), len(self._heads)),
            "type": lambda: _small(pa.uint8(), heads[6::HEADER_SIZE]),
            "seq": lambda: _longs(self._seqs.tobytes()),
            "msg_id": lambda: _longs(self._msg_ids(heads)),
            "snowflake_id": lambda: _word(heads, 2),
            "key": lambda: _word(heads, 3),
            "sender": lambda: _word(heads, 4),
            "sent_at": lambda: _sent_at(heads),
            "stored_at": lambda: _longs(self._stored.tobytes()).cast(_TIMESTAMP),
            "flags": lambda: _small(pa.uint8(), heads[5::HEADER_SIZE]),
            "lifetime_min": lambda: _small(pa.uint16(), heads.cast("H")[5 :: HEADER_SIZE // _SHORT]),
            "ext": lambda: pa.array(self._exts, pa.binary()),
            "body": lambda: pa.array(self._bodies, pa.binary()),
            "trace": lambda: pa.array(self._traces, pa.binary()),
        }
        return made[name]()

    def _msg_ids(self, heads: memoryview) -> bytearray:
        """Partition and type above the six bytes of the sequence."""
        made = bytearray(self._seqs.tobytes())
        made[6::_WORD] = heads[6::HEADER_SIZE]
        made[7::_WORD] = bytes([self._partition]) * len(self._heads)
        return made


def _long(value: int) -> pa.Scalar:
    """A plain number would make Arrow look for NumPy, at each call."""
    return pa.scalar(value, pa.int64())


def _longs(data: bytes | bytearray) -> pa.Array:
    return pa.Array.from_buffers(pa.int64(), len(data) // _WORD, [None, pa.py_buffer(data)])


def _word(heads: memoryview, place: int) -> pa.Array:
    return _longs(heads.cast("Q")[place :: HEADER_SIZE // _WORD].tobytes())


def _small(kind: pa.DataType, field: memoryview) -> pa.Array:
    return pa.Array.from_buffers(kind, len(field), [None, pa.py_buffer(field.tobytes())]).cast(pa.int32())


def _sent_at(heads: memoryview) -> pa.Array:
    """From the SnowflakeID; null where it was derived."""
    flags = heads[5::HEADER_SIZE].tobytes()
    milliseconds = pc.add(pc.shift_right(_word(heads, 2), _long(_SNOWFLAKE_TIME_BITS)), _long(SNOWFLAKE_EPOCH_MS))
    found = pc.multiply(milliseconds, _long(1000)).cast(_TIMESTAMP)
    derived = Flag.DERIVED_ID
    if not any(flag & derived for flag in set(flags)):
        return found
    return pc.if_else(pa.array([not flag & derived for flag in flags]), found, pa.scalar(None, _TIMESTAMP))


class Export:
    """Reads the rows of one request, a part at a time. Its methods are called in one thread.

    Args:
        partition: of the Xiu.
        messages: what is stored.
        columns, users: see `Rows`.
        begin: the first position.
        end: behind the last one.
    """

    def __init__(self, partition: int, messages: Messages, columns: Columns, users: frozenset[int], begin: int, end: int) -> None:
        self._partition, self._messages, self._columns, self._users = partition, messages, columns, users
        self._next, self._end = begin, end
        self._expected = 0

    def part(self) -> Part:
        """The next rows. Raises Gone when they were trimmed meanwhile, StoreDamaged, DiskFailed."""
        check_floor(self._next, self._messages.head)
        rows, breath = Rows(self._partition, self._columns, self._users), Breath()
        seen = size = 0
        for block in self._messages.scan(self._next, self._end - 1, self._end - self._next):
            begin, end = max(block.first, self._next), min(block.last, self._end - 1)
            rows.add(block, begin, end)
            self._next = end + 1
            seen += end - begin + 1
            size += len(block.records)
            if seen >= PART_ROWS or size >= PART_BYTES:
                return Part(rows.batch(), self._next, last=self._next >= self._end)
            breath.take()
        self._next = self._end
        return Part(rows.batch(), self._end, last=True)


def check_floor(position: int, head: Head) -> None:
    """Raises Gone when what lies at a position was trimmed."""
    if position < head.floor:
        raise Gone(f"position {position} was trimmed by retention; the first that is stored is {head.floor}")


def advance(messages: Messages, begin: int, end: int, limit: int) -> tuple[int, int]:
    """The position behind `limit` rows from `begin` on, at most `end`, and how many rows lie between `begin` and it.

    Sequences are dense within an epoch: a few look-ups, however many rows there are.
    """
    position, left = begin, limit
    while left > 0 and position < end:
        first = messages.first_at_or_after(position)
        if first is None or first >= end:
            return end, limit - left
        next_epoch = (first >> MSG_COUNTER_BITS) + 1 << MSG_COUNTER_BITS
        last = messages.last_before(min(next_epoch, end))
        take = min(left, last - first + 1)
        position, left = first + take, left - take
    return position, limit - left


def bounds(messages: Messages, request: export_pb2.BoundsRequest) -> export_pb2.BoundsReply:
    """Where positions lie. Raises StoreDamaged, DiskFailed."""
    head = messages.head
    end = head.last + 1
    begin, stop = max(request.begin, head.floor), min(request.end or end, end)
    reply = export_pb2.BoundsReply(role="xiu", first=head.floor, end=end, applied=head.applied.counter)
    reply.rows = advance(messages, begin, stop, end)[1]
    if request.limit:
        reply.advanced = advance(messages, begin, stop, request.limit)[0]
    if request.at_us:
        found = messages.stored_since(request.at_us)
        reply.at = end if found is None else found
    return reply


class Shell(Protocol):
    """What the service needs of its role."""

    @property
    def reading(self) -> Messages | None:
        """While the partition is open."""

    @property
    def core(self) -> Core | None:
        """The same."""


class XiuExport(export_pb2_grpc.ExportServicer):
    """Serves `pixiu.v1.Export`."""

    def __init__(self, shell: Shell, options: Options) -> None:
        self._shell = shell
        self._partition = options.partition
        self.exporter = Exporter(options.export_share)
        self.readers = Readers(Path(options.data_dir) / "readers.json", int(options.reader_hold_h * 3_600_000_000))
        """Whom retention waits for."""
        self.view: View | None = None
        """Of the cluster."""

    async def Bounds(
        self, request: export_pb2.BoundsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> export_pb2.BoundsReply:
        """Where positions lie, and who has them."""
        try:
            messages = self._messages()
            reply = await self.exporter.run(lambda: bounds(messages, request))
        except PixiuError as error:
            await abort(context, error)
        core = self._shell.core
        reply.leads = core is not None and core.epoch > 0
        reply.partition = self._partition
        reply.partitions = self.view.layout.partitions("xiu") if self.view is not None and self.view.layout.roles else 1
        reply.replicas.extend(replicas_of(self.view, "xiu"))
        return reply

    async def Rows(
        self, request: export_pb2.RowsOfRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[export_pb2.RowsOfReply]:
        """Messages in order."""
        try:
            messages = self._messages()
            if request.table != MESSAGES:
                raise InvalidArgument(f"a Xiu has the table {MESSAGES}, not {request.table!r}")
            columns, users = columns_of(request.table, request.columns), users_of(request)
            if request.end > messages.head.last + 1:
                raise NotYet(f"this replica has no position {request.end - 1} so far; its last is {messages.head.last}")
            export = Export(self._partition, messages, columns, users, request.begin, max(request.begin, request.end))
            async for reply in self.exporter.stream(columns, export.part):
                yield reply
        except PixiuError as error:
            await abort(context, error)

    async def Hold(self, request: export_pb2.HoldRequest, context: grpc.aio.ServicerContext[Any, Any]) -> export_pb2.HoldReply:
        """Note a reader."""
        now_us = time.time_ns() // 1000

        def note() -> None:
            if request.release:
                self.readers.release(request.reader, now_us)
            else:
                self.readers.hold(request.reader, request.position, now_us)

        try:
            self._messages()
            await self.exporter.run(note)
        except PixiuError as error:
            await abort(context, error)
        return export_pb2.HoldReply()

    def _messages(self) -> Messages:
        found = self._shell.reading
        if found is None:
            raise closed("Xiu")
        return found
