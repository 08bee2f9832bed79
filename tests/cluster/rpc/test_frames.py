"""Frames and hellos: whatever comes in whatever pieces, and what is no frame is refused before it is held."""

from __future__ import annotations

import random

import pytest

from cluster.rpc.frames import (
    HEAD,
    MAGIC,
    MAX_HELLO_BYTES,
    FrameKind,
    Hello,
    Splitter,
    StreamRefusal,
    frame,
    hello_payload,
    nonce_of,
    read_hello,
    read_refusal,
    refusal_payload,
)
from pixiu.errors import MalformedData
from tests.support.for_each import for_each

NONCE = bytes(range(16))
HELLO = Hello("/pixiu.v1.Xiu/Store", "proxy", 7)
KEY, OTHER = b"k" * 32, b"o" * 32


def pieces(data: bytes, rng: random.Random) -> list[bytes]:
    found = []
    while data:
        size = rng.choice((1, 2, 5, 100, 5000))
        found.append(data[:size])
        data = data[size:]
    return found


@for_each("seed", range(20))
def test_frames_come_out_as_they_went_in_however_they_are_cut(seed: int) -> None:
    rng = random.Random(seed)
    sent = [(rng.choice(list(FrameKind)), rng.randbytes(rng.choice((0, 1, 4, 5, 300, 9000)))) for _ in range(50)]
    splitter = Splitter(9000)
    got = [each for piece in pieces(b"".join(frame(*each) for each in sent), rng) for each in splitter.feed(piece)]
    assert got == sent


@for_each("seed", range(50))
def test_garbage_is_refused_or_waits_within_the_bound(seed: int) -> None:
    rng = random.Random(seed)
    splitter = Splitter(1000)
    held = 0
    for piece in pieces(rng.randbytes(20_000), rng):
        try:
            held += len(piece) - sum(HEAD.size + len(payload) for _, payload in splitter.feed(piece))
        except MalformedData:
            break
        assert held <= 1000 + HEAD.size
    else:
        pytest.fail("20,000 random bytes were taken for frames")


@pytest.mark.parametrize(
    "head", [HEAD.pack(0, FrameKind.MESSAGE), HEAD.pack(12, FrameKind.MESSAGE), HEAD.pack(5, 0), HEAD.pack(5, 99)]
)
def test_a_head_that_may_not_be_is_refused_before_its_payload_comes(head: bytes) -> None:
    with pytest.raises(MalformedData):
        Splitter(10).feed(head)


def test_the_longest_frame_is_taken_and_half_of_one_waits() -> None:
    splitter = Splitter(10)
    whole = frame(FrameKind.MESSAGE, bytes(10))
    assert splitter.feed(whole[:-1]) == []
    assert splitter.feed(whole[-1:]) == [(FrameKind.MESSAGE, bytes(10))]


def test_a_hello_is_proved_by_any_key_that_is_taken_and_for_one_challenge_only() -> None:
    said = hello_payload(HELLO, KEY, NONCE)
    assert read_hello(said, lambda _role: (OTHER, KEY), NONCE) == (HELLO, True)
    assert read_hello(said, lambda _role: (OTHER,), NONCE) == (HELLO, False)
    assert read_hello(said, lambda _role: (KEY,), NONCE[::-1]) == (HELLO, False)
    assert read_hello(said.replace(b"proxy", b"relay"), lambda _role: (KEY,), NONCE)[1] is False
    assert read_hello(hello_payload(HELLO, None, NONCE), lambda _role: (KEY,), NONCE)[1] is False
    assert read_hello(hello_payload(HELLO, None, NONCE), lambda _role: None, NONCE) == (HELLO, True)


@for_each("seed", range(100))
def test_damaged_hellos_challenges_and_refusals_are_refused_and_nothing_else(seed: int) -> None:
    rng = random.Random(seed)
    for whole, read in (
        (hello_payload(HELLO, KEY, NONCE), lambda data: read_hello(data, lambda _role: (KEY,), NONCE)[1]),
        (MAGIC + NONCE, nonce_of),
        (refusal_payload(StreamRefusal("OVERLOADED", "later", 200)), read_refusal),
    ):
        data = bytearray(whole[: rng.randrange(len(whole) + 1)] if rng.random() < 0.3 else whole)
        for _ in range(rng.randrange(4)):
            if data:
                data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            found = read(bytes(data))
        except MalformedData:
            continue
        assert found is not True or data == whole


def test_a_refusal_is_cut_to_what_a_stranger_may_be_sent() -> None:
    for text in ("x" * 5000, "貔" * 5000, '"' * 5000, "two\nlines\x00"):
        said = refusal_payload(StreamRefusal("OVERLOADED", text, 10**9))
        assert len(said) <= MAX_HELLO_BYTES
        found = read_refusal(said)
        assert (found.code, found.retry_after_ms) == ("OVERLOADED", 60_000)
        assert found.text[:3] == text[:3]
