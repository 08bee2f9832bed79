"""Stored blocks of a topic as Arrow columns, without an object for each message.

    blocks ──▶ index and bounds of all messages ──▶ for each field: where it begins and ends ──▶ one copy into its column

The leader checked every field before it stored a block, and the CRCs say that the block is the same: so bounds are checked by
Arrow's own kernels here, which end with an error rather than read beyond.

Source: docs/topics.md, "Blocks"; docs/pipeline.md, "Topics".
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import Final, NamedTuple
from zlib import crc32

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import BinaryType, BooleanType, DataType, IntegerType, LongType, MapType, StringType, StructField, StructType
from pyspark.sql.types import TimestampType as Time

from pixiu.errors import InvalidArgument, MalformedData
from pixiu.wire.block import (
    ALL_FLAGS,
    COVERED_FROM,
    HEAD,
    HEAD_BYTES,
    HOLE,
    INDEX_BYTES,
    MAGIC,
    STAMP,
    STAMP_BYTES,
    U32,
    VERSION,
    Flag,
    stored_size,
)

_TIME: Final = pa.timestamp("us", tz="UTC")
TYPES: Final[dict[str, tuple[DataType, pa.DataType]]] = {
    "part": (IntegerType(), pa.int32()),
    "offset": (LongType(), pa.int64()),
    "slot": (IntegerType(), pa.int32()),
    "key": (BinaryType(), pa.binary()),
    "body": (BinaryType(), pa.binary()),
    "headers": (MapType(StringType(), BinaryType()), pa.map_(pa.string(), pa.binary())),
    "event_time": (Time(), _TIME),
    "append_time": (Time(), _TIME),
    "sender": (LongType(), pa.int64()),
    "writer": (LongType(), pa.int64()),
    "tag": (StringType(), pa.string()),
    "load_test": (BooleanType(), pa.bool_()),
}
"""Column → its type in Spark and in Arrow."""
FIELDS: Final = frozenset({"key", "body", "headers", "event_time", "tag"})
"""Columns for which messages are looked into."""
WRONG: Final = "a stored block does not have the form that its head says"


def columns_of(names: Sequence[str], *, headers: bool = True) -> tuple[str, ...]:
    """The columns of these names; none: all, the headers only if they are wanted. Raises InvalidArgument."""
    for name in names:
        if name not in TYPES:
            raise InvalidArgument(f"a topic has no column {name!r}; it has {', '.join(TYPES)}")
    if len(set(names)) < len(names):
        raise InvalidArgument("option columns names a column twice")
    return tuple(names) or tuple(name for name in TYPES if headers or name != "headers")


def spark_schema(columns: Sequence[str]) -> StructType:
    """The schema of these columns for Spark."""
    return StructType([StructField(name, TYPES[name][0], nullable=True) for name in columns])


def arrow_schema(columns: Sequence[str]) -> pa.Schema:
    """The same for Arrow."""
    return pa.schema([pa.field(name, TYPES[name][1]) for name in columns])


class Found(NamedTuple):
    """A stored block in a reply."""

    at: int
    """Place of its head in the reply."""
    messages: int
    base: int
    """Offset of its first message."""
    time_us: int
    sender: int
    writer: int


def walk(data: bytes) -> Iterator[Found]:
    """The stored blocks of a reply that have messages, and whose CRCs and sizes are right. Raises MalformedData."""
    view, at = memoryview(data), 0
    while at < len(data):
        size = stored_size(data[at : at + STAMP_BYTES])
        if not size or at + size > len(data):
            raise MalformedData(WRONG)
        _, stamp_crc, base, time_us, sender = STAMP.unpack_from(data, at)
        head = at + STAMP_BYTES
        magic, version, _, length, crc, _, _, count, writer, _, _ = HEAD.unpack_from(data, head)
        if crc32(U32.pack(crc), crc32(view[at + 8 : head])) != stamp_crc or crc32(view[head + COVERED_FROM : at + size]) != crc:
            raise MalformedData("the CRC of a stored block is wrong: it was damaged on the way")
        if (magic, version) == (MAGIC, HOLE):  # compaction has removed what was there
            at += size
            continue
        if (magic, version, length) != (MAGIC, VERSION, size - STAMP_BYTES) or HEAD_BYTES + INDEX_BYTES * count > length:
            raise MalformedData(WRONG)
        yield Found(head, count, base, time_us, sender, writer)
        at += size


def record_batch(data: bytes, part: int, columns: Sequence[str], begin: int, end: int) -> pa.RecordBatch:
    """The messages with offsets [begin, end) of stored blocks. Raises MalformedData."""
    blocks = list(walk(data))
    low = sum(min(max(begin - block.base, 0), block.messages) for block in blocks)
    high = sum(min(max(end - block.base, 0), block.messages) for block in blocks)
    try:
        found = _Messages(data, part, blocks).columns(columns) if blocks else [pa.array([], TYPES[name][1]) for name in columns]
    except pa.ArrowException as wrong:
        raise MalformedData(WRONG) from wrong
    return pa.RecordBatch.from_arrays(found, schema=arrow_schema(columns)).slice(low, high - low)


_NULL: Final = pa.scalar(None, pa.int32())


@cache
def _n(number: int) -> pa.Scalar:
    """A number for Arrow's functions. One of Python's would make the result wider, and look for NumPy at each call."""
    return pa.scalar(number, pa.int32())


_NUMBERS: Final = [pa.array(range(1 << 12), pa.int32())]


def _range(count: int) -> pa.Array:
    """The numbers 0, 1, 2 …"""
    if count > len(_NUMBERS[0]):
        _NUMBERS[0] = pa.array(range(max(count, 2 * len(_NUMBERS[0]))), pa.int32())
    return _NUMBERS[0].slice(0, count)


def _array(values: Sequence[int], kind: pa.DataType) -> pa.Array:
    """Numbers as an array; `pa.array` takes much longer for a few of them."""
    data = array("i" if kind == pa.int32() else "q", values)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(data)])


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


class _Messages:
    """All messages of some blocks: an entry of each array is of one message."""

    def __init__(self, data: bytes, part: int, blocks: Sequence[Found]) -> None:
        self._buffer = pa.py_buffer(data)
        self._bytes = pa.Array.from_buffers(pa.uint8(), len(data), [None, self._buffer])
        self._part, self._blocks = part, blocks
        self._count = sum(block.messages for block in blocks)
        ends = list(accumulate(block.messages for block in blocks))
        self._run_ends = _array(ends, pa.int32())
        firsts = self._of_block([end - block.messages for end, block in zip(ends, blocks, strict=True)], pa.int32())
        self._ordinal = pc.subtract(_range(self._count), firsts)
        """Number of the message in its block."""
        index = b"".join(data[block.at + HEAD_BYTES : block.at + HEAD_BYTES + INDEX_BYTES * block.messages] for block in blocks)
        words = pa.Array.from_buffers(pa.int32(), 2 * self._count, [None, pa.py_buffer(index)])
        even = pc.multiply(_range(self._count), _n(2))
        ends_there = words.take(even)
        rest = words.take(pc.add(even, _n(1)))
        self._slots = pc.bit_wise_and(rest, _n(0xFFFF))
        self._flags = pc.shift_right(rest, _n(16))
        self._joined = 0
        for flags in pc.unique(self._flags).to_pylist():
            if not 0 <= flags <= ALL_FLAGS:
                raise MalformedData(WRONG)
            self._joined |= flags
        begins_there = pc.if_else(pc.equal(self._ordinal, _n(0)), _n(0), pa.concat_arrays([_range(1), ends_there[:-1]]))
        areas = self._of_block([block.at + HEAD_BYTES + INDEX_BYTES * block.messages for block in blocks], pa.int32())
        self._at: pa.Array = pc.add(areas, begins_there)
        """Place of the next field of each message."""
        self._ends = pc.add(areas, ends_there)

    def _of_block(self, values: Sequence[int], kind: pa.DataType) -> pa.Array:
        """An array with a block's value for each of its messages."""
        return pc.run_end_decode(pa.RunEndEncodedArray.from_arrays(self._run_ends, _array(values, kind)))

    def columns(self, names: Sequence[str]) -> list[pa.Array]:
        """The columns of these names."""
        if set(names) & FIELDS:
            fields = self._fields(frozenset(names))
        return [fields[name] if name in FIELDS else self._column(name) for name in names]

    def _column(self, name: str) -> pa.Array:
        blocks = self._blocks
        match name:
            case "part":
                return pa.repeat(pa.scalar(self._part, pa.int32()), self._count)
            case "offset":
                return pc.add(self._of_block([block.base for block in blocks], pa.int64()), self._ordinal)
            case "slot":
                return self._slots
            case "append_time":
                return self._of_block([_signed(block.time_us) for block in blocks], pa.int64()).cast(_TIME)
            case "load_test":
                return self._has(Flag.LOAD_TEST)
            case _:
                return self._of_block([_signed(getattr(block, name)) for block in blocks], pa.int64())

    def _has(self, flag: int) -> pa.Array:
        return pc.not_equal(pc.bit_wise_and(self._flags, _n(flag)), _n(0))

    def _fields(self, names: frozenset[str]) -> dict[str, pa.Array]:
        """Go through the fields in the order in which they stand."""
        found: dict[str, pa.Array] = {}
        nothing = self._count
        found["event_time"] = self._event_times() if self._joined & Flag.EVENT_TIME else pa.nulls(nothing, _TIME)
        for flag, size in ((Flag.DELIVER_AT, 8), (Flag.EXPIRES, 4)):
            if self._joined & flag:
                self._skip(pc.if_else(self._has(flag), _n(size), _n(0)))
        found["tag"] = self._sized(Flag.TAG, 1).cast(pa.string()) if self._joined & Flag.TAG else pa.nulls(nothing, pa.string())
        found["key"] = self._sized(Flag.KEY, 2) if self._joined & Flag.KEY else pa.nulls(nothing, pa.binary())
        if self._joined & Flag.HEADERS:
            found["headers"] = self._headers()
        elif "headers" in names:
            empty = pa.nulls(0, pa.string()), pa.nulls(0, pa.binary())
            found["headers"] = pa.MapArray.from_arrays(pa.repeat(pa.scalar(0, pa.int32()), nothing + 1), *empty)
        if "body" in names:
            found["body"] = self._cut(self._at, self._ends)
        return found

    def _skip(self, sizes: pa.Array) -> None:
        self._at = pc.add(self._at, sizes)

    def _byte(self, at: pa.Array) -> pa.Array:
        return self._bytes.take(at).cast(pa.int32())

    def _u16(self, at: pa.Array) -> pa.Array:
        return pc.add(self._byte(at), pc.multiply(self._byte(pc.add(at, _n(1))), _n(256)))

    def _cut(self, begins: pa.Array, ends: pa.Array, there: pa.Array | None = None) -> pa.Array:
        """The bytes between these places, which rise. `there`: null where it is false."""
        count = len(begins)
        if not count:
            return pa.array([], pa.binary())
        twice = _range(2 * count)
        order = pc.add(pc.shift_right(twice, _n(1)), pc.multiply(pc.bit_wise_and(twice, _n(1)), pa.scalar(count, pa.int32())))
        places = pa.concat_arrays([begins, ends]).take(order)
        pieces = pa.Array.from_buffers(pa.binary(), 2 * count - 1, [None, places.buffers()[1], self._buffer])
        pieces.validate(full=True)
        wanted = pc.multiply(_range(count), _n(2))
        return pieces.take(wanted if there is None else pc.if_else(there, wanted, _NULL))

    def _sized(self, flag: int, width: int) -> pa.Array:
        """A field behind its size, of messages with a flag."""
        has = self._has(flag)
        at = pc.if_else(has, self._at, _NULL)
        size = pc.fill_null(self._byte(at) if width == 1 else self._u16(at), _n(0))
        begins = pc.add(self._at, pc.if_else(has, _n(width), _n(0)))
        self._at = pc.add(begins, size)
        return self._cut(begins, self._at, has)

    def _spread(self, has: pa.Array, values: pa.Array) -> pa.Array:
        """Values of the messages that have one, for all; null for the others."""
        places = pc.subtract(pc.cumulative_sum(has.cast(pa.int32())), _n(1))
        return values.take(pc.if_else(has, places, _NULL))

    def _event_times(self) -> pa.Array:
        has = self._has(Flag.EVENT_TIME)
        begins = self._at.filter(has)
        self._skip(pc.if_else(has, _n(8), _n(0)))
        data = self._cut(begins, pc.add(begins, _n(8))).buffers()[2]
        return self._spread(has, pa.Array.from_buffers(pa.int64(), len(begins), [None, data]).cast(_TIME))

    def _headers(self) -> pa.Array:
        """All headers, one of each message at a time."""
        has = self._has(Flag.HEADERS)
        rows = _range(self._count).filter(has)
        at = self._at.filter(has)
        counts = self._byte(at)
        at, left = pc.add(at, _n(1)), counts
        found, over = list[list[pa.Array]](), list[tuple[pa.Array, pa.Array]]()
        while len(rows):
            names = pc.add(at, _n(3))
            values = pc.add(names, self._byte(at))
            at = pc.add(values, self._u16(pc.add(at, _n(1))))
            found.append([rows, names, values, at])
            left = pc.subtract(left, _n(1))
            more = pc.greater(left, _n(0))
            over.append((rows.filter(pc.invert(more)), at.filter(pc.invert(more))))
            rows, at, left = rows.filter(more), at.filter(more), left.filter(more)
        rows, names, values, ends = (pa.concat_arrays([each[column] for each in found]) for column in range(4))
        order = pc.sort_indices(names)
        keys = self._cut(names.take(order), values.take(order)).cast(pa.string())
        items = self._cut(values.take(order), ends.take(order))
        behind = pa.concat_arrays([each for _, each in over])
        behind = behind.take(pc.sort_indices(pa.concat_arrays([each for each, _ in over])))
        self._at = pc.coalesce(self._spread(has, behind), self._at)
        sums = pc.cumulative_sum(pc.coalesce(self._spread(has, counts), _n(0)))
        return pa.MapArray.from_arrays(pa.concat_arrays([_range(1), sums]), keys, items)
