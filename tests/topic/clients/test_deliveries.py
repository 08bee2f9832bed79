"""Deliveries are slices of blocks: what a member decodes is what the writer sent."""

from __future__ import annotations

from pixiu.wire.block import INDEX, Block, Message, Stamp, encode, parse
from topic.clients.deliveries import delivery

STAMP = Stamp(100, 77, 42)
MESSAGES = [
    Message(b"one", 5),
    Message(b"", 6, key=b"k"),
    Message(b"three", 7, headers=[("h", b"v")], tag="t", load_test=True),
    Message(b"four" * 100, 8),
]


def sent() -> Block:
    return parse(encode(MESSAGES, topic=1, part=3, writer=9, first=1))


def test_every_slice_has_its_messages() -> None:
    block = sent()
    for low in range(4):
        for high in range(low + 1, 5):
            found = delivery(3, STAMP, block, 100 + low, 100 + high)
            assert (found.part, found.base, found.time_us, found.sender, found.writer) == (3, 100 + low, 77, 42, 9)
            begin = 0
            for number, (end, slot, flags, _) in enumerate(INDEX.iter_unpack(found.index), low):
                at, behind = block.bounds(number)
                assert found.data[begin:end] == block.data[at:behind]
                assert (slot, flags) == (MESSAGES[number].slot, list(block.index())[number][2])
                begin = end
            assert begin == len(found.data)
            assert not found.attempts


def test_attempts_are_named_from_the_second_on() -> None:
    assert list(delivery(3, STAMP, sent(), 101, 104, attempts=2).attempts) == [2, 2, 2]
