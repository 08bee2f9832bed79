"""A Xiu's records as Arrow record batches.

A block's records become columns without an object for each field: their heads are joined, and every field is then a strided slice
of these.

    records   head₀ ext₀ body₀ head₁ ext₁ body₁ …
    heads     head₀ head₁ …          as u64: head 5i+2 is the SnowflakeID of row i, 5i+3 its key, 5i+4 its sender

Source: docs/pipeline.md.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from cluster.store.export.arrow import schema_of
from pixiu.ids import SNOWFLAKE_EPOCH_MS
from pixiu.wire.export_tables import Columns
from pixiu.wire.record import (
    EXTENSION_AT,
    FLAGS_AT,
    HEADER_SIZE,
    KEY_AT,
    LIFETIME_AT,
    SENDER_AT,
    SIZE_FIELD,
    SNOWFLAKE_AT,
    STAMP_SIZE,
    TYPE_AT,
    Flag,
)
from xiu.records.block import MAX_BLOCK_RECORDS, Block

_SIZE: Final = struct.Struct("<I")
_COUNTING: Final = pa.array(range(MAX_BLOCK_RECORDS), pa.int64())
_FEW: Final = 32
"""Up to this number of rows Python counts as fast as Arrow."""
_SNOWFLAKE_TIME_BITS: Final = 22
_WORD, _SHORT = 8, 2
assert HEADER_SIZE % _WORD == 0
_TIMESTAMP: Final = pa.timestamp("us", tz="UTC")


class Rows:
    """Rows collected into one record batch.

    Args:
        partition: of the Xiu.
        columns: wanted.
        users: whose messages are wanted; none: everybody's.
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
        """Add rows of a block, from one sequence to another, both in it."""
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
        keys, users = memoryview(b"".join(heads)).cast("Q")[KEY_AT // _WORD :: HEADER_SIZE // _WORD].tolist(), self._users
        return [place for place, key in enumerate(keys) if key in users]

    def _note_numbers(self, begin: int, places: Sequence[int]) -> None:
        """Add the rows' sequences, which are dense if no row is left out."""
        count = len(places)
        if isinstance(places, range) and _FEW < count <= len(_COUNTING):
            numbers = pc.add(_COUNTING.slice(0, count), _long(begin))
            self._seqs.frombytes(memoryview(numbers.buffers()[1])[: count * _WORD])
        else:
            self._seqs.extend([begin + place for place in places])

    def _add_contents(self, data: bytes, heads: list[bytes], spans: list[tuple[int, int]]) -> None:
        """Add extensions, bodies and stamps; `spans`: begin and end of each record. Most records have only a body."""
        joined = b"".join(heads)
        traced = any(flag & Flag.TRACED for flag in set(joined[FLAGS_AT::HEADER_SIZE]))
        if not traced and not any(joined[EXTENSION_AT::HEADER_SIZE]) and not any(joined[EXTENSION_AT + 1 :: HEADER_SIZE]):
            if self._body:
                self._bodies += [data[start + HEADER_SIZE : after] for start, after in spans]
            self._exts += [b""] * len(spans)
            self._traces += [b""] * len(spans)
            return
        for (start, after), head in zip(spans, heads, strict=True):
            body = start + HEADER_SIZE + (head[EXTENSION_AT] | head[EXTENSION_AT + 1] << 8)
            last = after - 1 - STAMP_SIZE * data[after - 1] if head[FLAGS_AT] & Flag.TRACED else after
            self._exts.append(data[start + HEADER_SIZE : body])
            self._bodies.append(data[body:last])
            self._traces.append(data[last : after - 1] if head[FLAGS_AT] & Flag.TRACED else b"")

    def batch(self) -> pa.RecordBatch | None:
        """Build the record batch; None: there are no rows."""
        if not self._heads:
            return None
        heads = memoryview(b"".join(self._heads))
        return pa.RecordBatch.from_arrays([self._array(name, heads) for name, _ in self._columns], schema=self._schema)

    def _array(self, name: str, heads: memoryview) -> pa.Array:
        made: dict[str, Callable[[], pa.Array]] = {
            "xiu_partition": lambda: pa.repeat(pa.scalar(self._partition, pa.int32()), len(self._heads)),
            "type": lambda: _small(pa.uint8(), heads[TYPE_AT::HEADER_SIZE]),
            "seq": lambda: _longs(self._seqs.tobytes()),
            "msg_id": lambda: _longs(self._msg_ids(heads)),
            "snowflake_id": lambda: _word(heads, SNOWFLAKE_AT),
            "key": lambda: _word(heads, KEY_AT),
            "sender": lambda: _word(heads, SENDER_AT),
            "sent_at": lambda: _sent_at(heads),
            "stored_at": lambda: _longs(self._stored.tobytes()).cast(_TIMESTAMP),
            "flags": lambda: _small(pa.uint8(), heads[FLAGS_AT::HEADER_SIZE]),
            "lifetime_min": lambda: _small(pa.uint16(), heads.cast("H")[LIFETIME_AT // _SHORT :: HEADER_SIZE // _SHORT]),
            "ext": lambda: pa.array(self._exts, pa.binary()),
            "body": lambda: pa.array(self._bodies, pa.binary()),
            "trace": lambda: pa.array(self._traces, pa.binary()),
        }
        return made[name]()

    def _msg_ids(self, heads: memoryview) -> bytearray:
        """Put partition and type above the six bytes of the sequence."""
        made = bytearray(self._seqs.tobytes())
        made[6::_WORD] = heads[TYPE_AT::HEADER_SIZE]
        made[7::_WORD] = bytes([self._partition]) * len(self._heads)
        return made


def _long(value: int) -> pa.Scalar:
    """Make a scalar: for a plain number Arrow would look for NumPy at each call."""
    return pa.scalar(value, pa.int64())


def _longs(data: bytes | bytearray) -> pa.Array:
    return pa.Array.from_buffers(pa.int64(), len(data) // _WORD, [None, pa.py_buffer(data)])


def _word(heads: memoryview, at: int) -> pa.Array:
    return _longs(heads.cast("Q")[at // _WORD :: HEADER_SIZE // _WORD].tobytes())


def _small(kind: pa.DataType, field: memoryview) -> pa.Array:
    return pa.Array.from_buffers(kind, len(field), [None, pa.py_buffer(field.tobytes())]).cast(pa.int32())


def _sent_at(heads: memoryview) -> pa.Array:
    """Times from SnowflakeIDs; null for derived ones."""
    flags = heads[FLAGS_AT::HEADER_SIZE].tobytes()
    milliseconds = pc.add(pc.shift_right(_word(heads, SNOWFLAKE_AT), _long(_SNOWFLAKE_TIME_BITS)), _long(SNOWFLAKE_EPOCH_MS))
    found = pc.multiply(milliseconds, _long(1000)).cast(_TIMESTAMP)
    derived = Flag.DERIVED_ID
    if not any(flag & derived for flag in set(flags)):
        return found
    return pc.if_else(pa.array([not flag & derived for flag in flags]), found, pa.scalar(None, _TIMESTAMP))
