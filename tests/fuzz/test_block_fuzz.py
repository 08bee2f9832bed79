"""Random and damaged blocks of topics: a checked block can be read to its last byte, and nothing else is raised."""

from __future__ import annotations

import struct
from zlib import crc32

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pixiu.errors import MalformedData
from pixiu.wire.block import Message, encode, parse
from tests.support.effort import runs

EXAMPLES = runs("PIXIU_FUZZ_EXAMPLES", local=100, ci=300)
pytestmark = pytest.mark.fuzz

messages = st.builds(
    Message,
    body=st.binary(max_size=60),
    slot=st.integers(0, 65_535),
    key=st.none() | st.binary(max_size=20),
    headers=st.lists(st.tuples(st.text(st.characters(codec="utf-8"), min_size=1, max_size=5), st.binary(max_size=9)), max_size=3),
    event_at_us=st.none() | st.integers(0, (1 << 64) - 1),
    deliver_at_us=st.none() | st.integers(0, (1 << 64) - 1),
    expires_in_s=st.none() | st.integers(0, (1 << 32) - 1),
    tag=st.none() | st.text(st.characters(codec="utf-8"), min_size=1, max_size=9),
    load_test=st.booleans(),
)
blocks = st.builds(
    lambda found, first, progress: (found, encode(found, topic=1, part=2, writer=3, first=first, progress=progress)),
    st.lists(messages, min_size=1, max_size=6), st.integers(1, 1 << 62), st.integers(0, (1 << 64) - 1),
)  # fmt: skip


@given(blocks)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_was_written_is_read(made: tuple[list[Message], bytes]) -> None:
    found, data = made
    read = parse(data)
    assert [read.message(number) for number in range(read.count)] == found


@given(blocks, st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=6), st.booleans(), st.integers(0, 3))
@settings(max_examples=2 * EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_damaged_block_is_refused_or_read_whole(
    made: tuple[list[Message], bytes], changes: list[tuple[int, int]], crc: bool, cut: int
) -> None:
    """Also with a CRC that fits: a writer may send anything."""
    data = bytearray(made[1])
    for at, value in changes:
        data[at % len(data)] = value
    data = data[: len(data) - cut]
    if crc:
        data[4:8] = struct.pack("<I", len(data))
        data[8:12] = struct.pack("<I", crc32(data[12:]))
    try:
        read = parse(bytes(data))
    except MalformedData:
        return
    whole = [read.message(number) for number in range(read.count)]
    assert len(read.slots()) == len(whole)
    again = encode(whole, topic=read.topic, part=read.part, writer=read.writer, first=read.first, progress=read.progress)
    assert again == bytes(data)


@given(st.binary(max_size=300))
@settings(max_examples=EXAMPLES, deadline=None)
def test_noise_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedData):
        parse(data)
