"""Dead letters: what goes in comes out, and what anybody else sends there is refused before it is read."""

from __future__ import annotations

import random
import struct

import pytest

from pixiu.client.inbox.dead_letters import (
    DEAD_LETTER_HEADER_SIZE,
    HEADER,
    LEFT_OUT,
    MAX_REASON_BYTES,
    DeadLetter,
    dead_letter_uin,
    decode,
    encode,
)
from pixiu.errors import InvalidArgument, MalformedData
from pixiu.ids import MAX_ID, UIN, msg_id, snowflake, uin_of_name
from pixiu.wire.record import HEADER_SIZE, MAX_RECORD_BYTES, Kind
from pixiu.wire.record import encode as record_of

RECORD = record_of(Kind.MAIL, 7, b"hello", snowflake(1_700_000_000_000, 3, 1), sender=9, extension=b"{}")
MSG_ID = msg_id(3, 64, 5)


def letter(
    record: bytes = RECORD, reason: str = "no such account", attempts: int = 6, limit: int = MAX_RECORD_BYTES, device: str = ""
) -> bytes:
    return encode(7, MSG_ID, 42, 1, attempts, 1_700_000_000_123, reason, record, device, limit=limit)


def test_a_dead_letter_has_the_mail_and_why_it_was_given_up() -> None:
    assert decode(letter()) == DeadLetter(UIN(7), MSG_ID, 42, 1, 6, 1_700_000_000_123, "no such account", RECORD, len(RECORD))


def test_the_inbox_is_of_a_user_derived_from_the_receiver() -> None:
    assert dead_letter_uin(7) == uin_of_name("dead-letter/7")
    assert len({7, dead_letter_uin(7), dead_letter_uin(8), dead_letter_uin(dead_letter_uin(7))}) == 4


def test_the_layout_on_the_wire() -> None:
    found = struct.unpack_from("<BBHIQQQQIBBBB", letter())
    assert found == (1, 0, 15, 6, MSG_ID, 7, 42, 1_700_000_000_123, len(RECORD), 1, 0, 0, 0)
    assert letter()[48:] == b"no such account" + RECORD


def test_it_names_the_device_whose_handler_gave_it_up() -> None:
    assert decode(letter()).device == ""
    found = decode(letter(device="téléphone"))
    assert (found.device, found.reason, found.record) == ("téléphone", "no such account", RECORD)
    assert decode(letter(device="x" * 300)).device == "x" * 128
    room = HEADER_SIZE + len(letter(device="phone"))
    assert decode(letter(device="phone", limit=room)).record == RECORD
    assert decode(letter(device="phone", limit=room - 1)).record == b""


def test_a_long_reason_is_cut_between_characters_and_a_count_at_its_limit() -> None:
    found = decode(letter(reason="é" * MAX_REASON_BYTES + "\ud800", attempts=1 << 40))
    assert found.reason == "é" * (MAX_REASON_BYTES // 2)
    assert decode(letter(reason="x" + "é" * MAX_REASON_BYTES)).reason == "x" + "é" * (MAX_REASON_BYTES // 2 - 1)
    assert decode(letter(reason="a\ud800b")).reason == "a?b"
    assert found.attempts == (1 << 32) - 1


def test_a_record_that_does_not_fit_is_left_out_and_its_length_told() -> None:
    room = HEADER_SIZE + DEAD_LETTER_HEADER_SIZE + len("no such account") + len(RECORD)
    assert decode(letter(limit=room)).record == RECORD
    without = decode(letter(limit=room - 1))
    assert (without.record, without.record_size, without.msg_id) == (b"", len(RECORD), MSG_ID)
    largest = record_of(Kind.MAIL, 7, bytes(MAX_RECORD_BYTES - HEADER_SIZE), 1)
    body = letter(record=largest)
    assert decode(body).record_size == MAX_RECORD_BYTES
    assert len(record_of(Kind.MAIL, 7, body, 1)) <= MAX_RECORD_BYTES


@pytest.mark.parametrize(
    "change",
    [
        {"uin": 0}, {"uin": MAX_ID + 1}, {"msg": -1}, {"seq": MAX_ID + 1}, {"lane": 4}, {"lane": -1}, {"at": -1},
        {"record": b""}, {"record": RECORD[:39]}, {"record": bytes(MAX_RECORD_BYTES + 1)},
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(change: dict[str, object]) -> None:
    fields: dict[str, object] = {
        "uin": 7,
        "msg": MSG_ID,
        "seq": 1,
        "lane": 1,
        "attempts": 1,
        "at": 1,
        "reason": "",
        "record": RECORD,
    }
    with pytest.raises(InvalidArgument):
        encode(*(fields | change).values())  # type: ignore[arg-type]


def test_every_cut_and_every_byte_more_is_refused() -> None:
    whole = letter()
    for end in range(len(whole)):
        with pytest.raises(MalformedData):
            decode(whole[:end])
    with pytest.raises(MalformedData):
        decode(whole + b"\0")


@pytest.mark.parametrize(
    ("offset", "value", "text"),
    [
        (0, b"\2", "version 2"),
        (1, b"\2", "out of range"),
        (1, bytes([LEFT_OUT]), "do not fit"),
        (2, b"\xff\xff", "length out of range"),
        (8, b"\xff" * 8, "out of range"),
        (16, bytes(8), "out of range"),
        (24, b"\xff" * 8, "out of range"),
        (32, b"\xff" * 8, "out of range"),
        (40, b"\xff" * 4, "length out of range"),
        (40, bytes(4), "length out of range"),
        (44, b"\4", "out of range"),
        (48, b"\xff", "not UTF-8"),
        (48 + 15, b"\1", "another length"),
    ],
)
def test_a_wrong_field_is_refused(offset: int, value: bytes, text: str) -> None:
    whole = bytearray(letter())
    whole[offset : offset + len(value)] = value
    with pytest.raises(MalformedData, match=text):
        decode(bytes(whole))


def test_random_bytes_are_refused_or_read_and_nothing_else_happens() -> None:
    rng = random.Random(5)
    whole = letter()
    refused = 0
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(HEADER.size + 20)] = rng.randrange(256)
        try:
            decode(bytes(data))
        except MalformedData:
            refused += 1
    assert 300 < refused < 3000
