"""What stands before a mail's record."""

from __future__ import annotations

import random

import pytest

from pixiu.errors import MalformedData
from pixiu.wire.envelope import ENVELOPE_SIZE, GAP, REDELIVERED, Delivery, encode, split
from pixiu.wire.record import Kind
from pixiu.wire.record import encode as record_of

RECORD = record_of(Kind.MAIL, 7, b"hello", 99)
MAIL = Delivery(1 << 62, 2, 3, 4, 5, 1, REDELIVERED, RECORD)
MARKER = Delivery(0, 9, 3, 4, 5, 1, GAP, b"")


def test_the_bytes_are_those_of_the_design() -> None:
    data = encode(*MAIL)
    assert data[:ENVELOPE_SIZE].hex() == "0000000000000040020000000000000003000000000000000400000005000102"
    assert data[ENVELOPE_SIZE:] == RECORD


def test_a_batch_comes_apart_as_it_was() -> None:
    mails = [MAIL, MARKER, MAIL._replace(seq=10), MARKER]
    assert split(b"".join(encode(*mail) for mail in mails), len(mails)) == mails
    assert split(b"", 0) == []


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_wrong_count_is_malformed(count: int) -> None:
    with pytest.raises(MalformedData):
        split(encode(*MAIL) + encode(*MARKER), count)


def test_every_cut_is_malformed() -> None:
    data = encode(*MAIL)
    for end in range(len(data)):
        with pytest.raises(MalformedData):
            split(data[:end], 1)


def test_random_bytes_are_refused_or_taken_and_nothing_else() -> None:
    rng = random.Random(3)
    good = encode(*MAIL) + encode(*MARKER)
    for _ in range(2000):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            found = split(bytes(data), 2)
        except MalformedData:
            continue
        assert b"".join(encode(*mail) for mail in found) == bytes(data)
