"""Blocks of a topic: layout, limits, damage, and reading in place."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import pytest

from pixiu.errors import InvalidArgument, MalformedData, RecordTooLarge
from pixiu.wire import block
from pixiu.wire.block import Flag, Message, Stamp, encode, parse, parse_stored, stamped

FULL = Message(b"body", 7, b"key", [("trace", b"\x01"), ("ü", b"")], 1_750_000_000_000_000, 1_750_000_000_500_000, 60, "blue", True)
PLAIN = Message(b"hello", 65_535)


def made(*messages: Message, **fields: int) -> bytes:
    return encode(messages, **({"topic": 3, "part": 2, "writer": 9, "first": 1} | fields))


def with_crc(data: bytes) -> bytes:
    return data[:8] + struct.pack("<I", crc32(data[12:])) + data[12:]


def changed(data: bytes, at: int, new: bytes) -> bytes:
    """The block with other bytes in a place, and a CRC that fits them."""
    return with_crc(data[:at] + new + data[at + len(new) :])


def test_the_layout_is_fixed() -> None:
    data = made(Message(b"hi", 5, b"k"), PLAIN, first=11, progress=77)
    assert struct.unpack_from("<2sBBI", data) == (b"PB", 1, Flag.KEY, len(data))
    assert struct.unpack_from("<IIIQQQ", data, 12) == (3, 2, 2, 9, 11, 77)
    assert struct.unpack_from("<IHBBIHBB", data, 48) == (5, 5, Flag.KEY, 0, 10, 65_535, 0, 0)
    assert data[64:] == b"\x01\0khihello"


def test_what_was_encoded_is_read_in_place() -> None:
    found = parse(made(PLAIN, FULL, PLAIN._replace(body=b""), first=5))
    assert (found.topic, found.part, found.writer, found.first, found.last, found.count) == (3, 2, 9, 5, 7, 3)
    assert found.flags == block.ALL_FLAGS
    assert found.slots() == [65_535, 7, 65_535]
    assert [found.message(number) for number in range(3)] == [PLAIN._replace(headers=[]), FULL, Message(b"", 65_535, headers=[])]
    assert found.data[slice(*found.bounds(0))] == b"hello"


def test_a_stamp_says_where_when_and_who() -> None:
    data = stamped(made(PLAIN), Stamp(1 << 40, 99, 42))
    stamp, found = parse_stored(data)
    assert (stamp, found.message(0).body) == (Stamp(1 << 40, 99, 42), b"hello")
    assert block.stored_size(data[: block.STAMP_BYTES]) == len(data)
    assert block.stored_size(bytes(40)) == block.stored_size(b"") == 0


@pytest.mark.parametrize("at", range(0, 120, 3))
def test_any_changed_byte_is_found(at: int) -> None:
    data = bytearray(stamped(made(PLAIN, FULL), Stamp(5, 6, 7)))
    data[at] ^= 0x10
    for fields in (True, False):
        with pytest.raises(MalformedData):
            parse_stored(bytes(data), fields=fields)


@pytest.mark.parametrize("cut", [0, 1, 47, 55, 60, -1])
def test_half_a_block_is_refused(cut: int) -> None:
    with pytest.raises(MalformedData):
        parse(made(PLAIN, FULL)[:cut])


@dataclass(frozen=True)
class Lie:
    """What a writer claims with a CRC that fits."""

    at: int
    new: bytes
    of: tuple[Message, ...] = (PLAIN, PLAIN)


LIES = {
    "another magic": Lie(0, b"XX"), "another version": Lie(2, b"\2"), "flags that no message has": Lie(3, b"\x10"),
    "no messages": Lie(20, bytes(4)), "more messages than bytes": Lie(20, b"\xff\xff\xff\xff"), "position 0": Lie(32, bytes(8)),
    "positions without end": Lie(32, b"\xff" * 8), "an end before the one before": Lie(56, b"\4\0\0\0"),
    "an end beyond the block": Lie(56, b"\xff\xff\xff\xff"), "an end before the block's": Lie(56, b"\x09\0\0\0"),
    "unknown flags": Lie(54, b"\x80"), "a spare byte": Lie(55, b"\1"), "a key that is not there": Lie(54, b"\x10"),
    "a key beyond its message": Lie(56, b"\xff\x0f", (Message(b"abc", 1, b"k"),)),
    "a key above the limit": Lie(56, b"\x01\x10", (Message(b"a" * 9999, 1, b"k"),)),
    "a tag beyond its message": Lie(56, b"\x09", (Message(b"a", 1, tag="t"),)),
    "an empty tag": Lie(56, b"\0", (Message(b"a", 1, tag="t"),)),
    "a tag that is no text": Lie(57, b"\xff", (Message(b"a", 1, tag="t"),)),
    "a header's value beyond its message": Lie(58, b"\xff\xff", (Message(b"a", 1, headers=[("n", b"v")]),)),
    "a header without a name": Lie(57, b"\0", (Message(b"a", 1, headers=[("n", b"v")]),)),
    "a header that is no text": Lie(60, b"\xff", (Message(b"a", 1, headers=[("n", b"v")]),)),
    "more headers than there are": Lie(56, b"\2", (Message(b"", 1, headers=[("n", b"v")]),)),
    "more headers than allowed": Lie(56, b"\x41", (Message(bytes(900), 1, headers=[("n", b"v")]),)),
    "no headers": Lie(56, b"\0", (Message(b"", 1, headers=[("n", b"v")]),)),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_a_writer_cannot_lie(name: str) -> None:
    lie = LIES[name]
    data = made(*lie.of)
    assert parse(data).count == len(lie.of)
    with pytest.raises(MalformedData):
        parse(changed(data, lie.at, lie.new))


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ((), "at least one message"),
        ((Message(b"", 65_536),), "slot"),
        ((Message(b"", 0, bytes(4097)),), "key"),
        ((Message(b"", 0, tag=""),), "tag"),
        ((Message(b"", 0, tag="ü" * 51),), "tag"),
        ((Message(b"", 0, headers=[("a", b"")] * 65),), "64 headers"),
        ((Message(b"", 0, headers=[("", b"")]),), "name"),
        ((Message(b"", 0, headers=[("a", bytes(65_536))]),), "value"),
        ((Message(b"", 0, event_at_us=-1),), "times"),
        ((Message(b"", 0, expires_in_s=1 << 32),), "times"),
    ],
)
def test_bad_arguments_say_what_is_allowed(messages: tuple[Message, ...], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        made(*messages)


@pytest.mark.parametrize("fields", [{"first": 0}, {"first": 1 << 63}, {"topic": 1 << 32}, {"writer": -1}, {"progress": 1 << 64}])
def test_numbers_out_of_range_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        made(PLAIN, **fields)


def test_a_block_of_a_mebibyte_is_the_most() -> None:
    most = block.MAX_BLOCK_BYTES - block.HEAD_BYTES - block.INDEX_BYTES
    assert parse(made(Message(bytes(most), 0))).bounds(0)[1] == block.MAX_BLOCK_BYTES
    with pytest.raises(RecordTooLarge, match="above the limit"):
        made(Message(bytes(most + 1), 0))
    with pytest.raises(MalformedData):
        parse(made(Message(bytes(most), 0)) + b"x")
