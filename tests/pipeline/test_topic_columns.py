"""Blocks as Arrow columns: the same as the messages that were written. No Java."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.topics.columns import TYPES, arrow_schema, columns_of, record_batch, spark_schema
from pixiu.errors import InvalidArgument, MalformedData
from pixiu.wire.block import STAMP_BYTES, Message, Stamp, encode, hole, stamped

U64 = st.integers(0, (1 << 64) - 1)
TIMES = st.none() | st.integers(0, 250_000_000_000_000_000)
NAMES = st.text(min_size=1, max_size=8)
messages = st.builds(
    Message,
    body=st.binary(max_size=40),
    slot=st.integers(0, 65535),
    key=st.none() | st.binary(max_size=300),
    headers=st.dictionaries(NAMES, st.binary(max_size=300), max_size=4).map(lambda found: list(found.items())),
    event_at_us=TIMES,
    deliver_at_us=TIMES,
    expires_in_s=st.none() | st.integers(0, (1 << 32) - 1),
    tag=st.none() | NAMES,
    load_test=st.booleans(),
)
plain = st.binary(max_size=40).map(lambda body: Message(body, len(body)))
holes = st.integers(1, 5)
"""Offsets whose messages compaction has removed."""
blocks = st.lists(st.tuples(st.lists(messages | plain, min_size=1, max_size=6), U64, U64) | holes, max_size=5)


def signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def moment(us: int | None) -> datetime.datetime | None:
    return None if us is None else datetime.datetime.fromtimestamp(0, datetime.UTC) + datetime.timedelta(microseconds=us)


@given(blocks=blocks, begin=st.integers(0, 20), count=st.integers(0, 30), at=st.integers(0, 4_000_000_000_000_000))
def test_every_field_is_in_its_column(blocks: list[tuple[list[Message], int, int] | int], begin: int, count: int, at: int) -> None:
    data, rows, base = b"", list[dict[str, Any]](), 3
    for each in blocks:
        if isinstance(each, int):
            data += stamped(hole(7, 5, each), Stamp(base, at, 0))
            base += each
            continue
        found, writer, sender = each
        block = encode(found, topic=7, part=5, writer=writer, first=1)
        data += stamped(block, Stamp(base, at, sender))
        for message in found:
            rows.append(
                {
                    "part": 5,
                    "offset": base,
                    "slot": message.slot,
                    "key": message.key,
                    "body": message.body,
                    "headers": list(message.headers),
                    "event_time": message.event_at_us and min(message.event_at_us, 250_000_000_000_000_000),
                    "append_time": at,
                    "sender": signed(sender),
                    "writer": signed(writer),
                    "tag": message.tag,
                    "load_test": message.load_test,
                }
            )
            base += 1
    batch = record_batch(data, 5, tuple(TYPES), begin, begin + count)
    batch.validate(full=True)
    wanted = [row for row in rows if begin <= row["offset"] < begin + count]
    for name in TYPES:
        column = batch.column(name)
        assert (column.cast("int64") if name.endswith("_time") else column).to_pylist() == [row[name] for row in wanted], name
    for name in TYPES:
        assert record_batch(data, 5, (name,), begin, begin + count).column(0).equals(batch.column(name)), name


def test_a_block_that_is_damaged_is_refused() -> None:
    block = stamped(encode([Message(b"body", 1, b"key")], topic=7, part=5, writer=9, first=1), Stamp(0, 1, 2))
    assert record_batch(block * 2, 5, ("key",), 0, 9).to_pylist() == [{"key": b"key"}] * 2
    for at in set(range(len(block))) - {STAMP_BYTES + 3}:  # the flags there are not needed, nor under the CRC
        wrong = bytearray(block)
        wrong[at] ^= 1
        with pytest.raises(MalformedData):
            record_batch(bytes(wrong), 5, ("key",), 0, 9)
    for size in range(1, len(block)):
        with pytest.raises(MalformedData):
            record_batch(block[:size], 5, ("body",), 0, 9)


@pytest.mark.parametrize("at", range(8))
def test_an_index_that_does_not_fit_is_refused(at: int) -> None:
    """A leader would not store it. It must not be read beyond the block all the same."""
    from zlib import crc32

    block = bytearray(encode([Message(b"b", 1, b"k", [("n", b"v")], 1, 2, 3, "t")] * 2, topic=7, part=5, writer=9, first=1))
    block[48 + at] = 0xFF
    block[8:12] = crc32(block[12:]).to_bytes(4, "little")
    data = stamped(bytes(block), Stamp(0, 1, 2))
    assert len(data) == STAMP_BYTES + len(block)
    try:
        record_batch(data, 5, tuple(TYPES), 0, 9).validate(full=True)
    except MalformedData:
        return
    assert at in (4, 5), "the slot"


def test_schemas_agree() -> None:
    from pyspark.sql.pandas.types import to_arrow_schema

    columns = columns_of(())
    assert to_arrow_schema(spark_schema(columns), timezone="UTC").names == list(columns)
    for name in columns:
        wanted = to_arrow_schema(spark_schema((name,)), timezone="UTC").field(0).type
        assert wanted == arrow_schema((name,)).field(0).type, name
    for names, said in ((("bodies",), "no column 'bodies'; it has part, offset"), (("body", "body"), "names a column twice")):
        with pytest.raises(InvalidArgument, match=said):
            columns_of(names)
