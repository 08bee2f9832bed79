"""The record and batches: layout, limits, damage."""

from __future__ import annotations

import struct

import pytest

from pixiu.errors import InvalidArgument, MalformedData, RecordTooLarge
from pixiu.wire import record
from pixiu.wire.record import Flag, Kind


def test_the_header_has_the_fixed_layout() -> None:
    made = record.encode(Kind.ROOM, 42, b"hello", 99, sender=7, flags=Flag.TO_ROOM, type=65, lifetime_min=3, extension=b"{}")
    assert struct.unpack_from("<IBBBBHH", made) == (len(made) - 4, 1, 4, 65, 1, 2, 3)
    assert struct.unpack_from("<QQQ", made, 16) == (99, 42, 7)
    assert made[40:] == b"{}hello"


def test_decode_gives_back_what_was_encoded() -> None:
    made = record.decode(record.encode(Kind.ROOM, 42, b"hello", 99, sender=7, extension=b'{"a":1}'))
    assert (made.key, made.snowflake_id, made.sender, made.extension, made.body, made.lane) == (42, 99, 7, b'{"a":1}', b"hello", 1)


def test_a_topic_travels_in_the_body_as_mqtt_has_it() -> None:
    made = record.decode(record.encode(Kind.ROOM, 42, record.with_topic("a/ü", b"x"), 1, flags=Flag.TOPIC))
    assert made.body[:2] == b"\0\x04"
    assert made.topic_and_payload() == ("a/ü", b"x")


def test_the_crc_leaves_the_trace_trailer_out() -> None:
    plain = record.encode(Kind.ROOM, 42, b"hello", 99, flags=Flag.TRACED)
    stamp = record.STAMP.pack(1, 0, 0, 5, 10, 20)
    stamped = plain[:-1] + stamp + b"\x01"
    stamped = (len(stamped) - 4).to_bytes(4, "little") + stamped[4:]
    assert record.decode(stamped).body == b"hello"
    assert record.decode(stamped).stamps == ((1, 0, 0, 5, 10, 20),)


@pytest.mark.parametrize("position", [8, 12, 16 + 0, 40, 44])
def test_damage_is_found(position: int) -> None:
    made = bytearray(record.encode(Kind.ROOM, 42, b"hello", 99))
    made[position] ^= 0x40
    if position == 16:  # the header's IDs are not covered: a hop must be able to rewrite the key of a copy
        assert record.decode(bytes(made)).snowflake_id != 99
    else:
        with pytest.raises(MalformedData):
            record.decode(bytes(made))


@pytest.mark.parametrize("cut", [0, 4, 39, 41])
def test_a_truncated_record_is_refused(cut: int) -> None:
    with pytest.raises(MalformedData):
        record.decode(record.encode(Kind.ROOM, 42, b"hello", 99)[:cut])


def test_too_large_and_out_of_range_say_what_is_allowed() -> None:
    with pytest.raises(RecordTooLarge, match="above the limit of 100"):
        record.encode(Kind.ROOM, 1, b"x" * 61, 1, limit=100)
    assert len(record.encode(Kind.ROOM, 1, b"x" * 60, 1, limit=100)) == 100
    with pytest.raises(InvalidArgument, match=r"2\^63-1"):
        record.encode(Kind.ROOM, 1 << 63, b"", 1)
    with pytest.raises(InvalidArgument, match="65535"):
        record.encode(Kind.ROOM, 1, b"", 1, extension=b"x" * 65536)


def test_a_batch_is_split_or_refused_whole() -> None:
    records = [record.encode(Kind.ROOM, n, b"x" * n, n) for n in range(1, 5)]
    batch = b"".join(records)
    assert record.split(batch, 4) == records
    for wrong in (batch[:-1], batch + b"x", batch + bytes(4)):
        with pytest.raises(MalformedData):
            record.split(wrong, 4)
    for count in (0, 3, 5):
        with pytest.raises(MalformedData):
            record.split(batch, count)


@pytest.mark.parametrize("extension", [b"", b"{}"])
def test_the_intact_body_of_a_record_and_none_of_a_damaged_one(extension: bytes) -> None:
    made = record.encode(Kind.ROOM, 42, b"hello", 99, extension=extension)
    assert record.intact_body(made) == b"hello"
    assert struct.unpack("<QQ", made[record.SNOWFLAKE_AT : record.SENDER_AT]) == (99, 42)
    for at in range(record.HEADER_SIZE, len(made)):
        damaged = bytearray(made)
        damaged[at] ^= 1
        assert record.intact_body(bytes(damaged)) is None
    assert record.intact_body(made[: record.HEADER_SIZE]) is None
