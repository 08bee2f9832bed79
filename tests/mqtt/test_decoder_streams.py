"""What a decoder yields does not depend on how the stream is cut, and it keeps no more than it must."""

from __future__ import annotations

import tracemalloc

import pytest

from pixiu.errors import InvalidArgument
from pixiu.mqtt import codec
from pixiu.mqtt.packets import Connect, Disconnect, Packet, Pingreq, Puback, Publish, Side, Subscribe, Unsubscribe

STREAM: list[Packet] = [
    Connect("client", True, 30, "user", b"pw"),
    Subscribe(1, (("room/1", 0), ("a/b", 1))),
    Publish("room/1", b"x" * 130),
    Publish("room/1", b"", 1, False, False, 9),
    Puback(3),
    Pingreq(),
    Unsubscribe(2, ("a/b",)),
    Disconnect(),
]
DATA = b"".join(codec.encode(packet) for packet in STREAM)


@pytest.mark.parametrize("position", range(len(DATA) + 1))
def test_a_stream_cut_at_every_byte(position: int) -> None:
    decoder = codec.Decoder(Side.SERVER)
    packets = decoder.feed(DATA[:position]) + decoder.feed(DATA[position:])
    assert packets == STREAM
    assert [type(packet) for packet in packets] == [type(packet) for packet in STREAM]
    assert decoder.error is None
    assert decoder.buffered_bytes == 0


def test_a_stream_byte_by_byte() -> None:
    decoder = codec.Decoder(Side.SERVER)
    assert [packet for byte in DATA for packet in decoder.feed(bytes([byte]))] == STREAM


def test_a_padded_remaining_length_is_accepted() -> None:
    assert codec.decode(b"\xc0\x80\x80\x00", Side.SERVER) == Pingreq()


def test_nothing_is_allocated_for_a_claimed_length() -> None:
    decoder = codec.Decoder(Side.SERVER, 200 << 20)
    decoder.feed(DATA[: len(codec.encode(STREAM[0]))])
    tracemalloc.start()
    try:
        assert decoder.feed(b"\x30\xff\xff\xff\x3f\x00\x01a") == []
        assert decoder.buffered_bytes == 8
        assert tracemalloc.get_traced_memory()[1] < 10_000
    finally:
        tracemalloc.stop()
    assert decoder.error is None


def test_a_large_packet_in_many_pieces_is_kept_once() -> None:
    decoder = codec.Decoder(Side.SERVER)
    decoder.feed(codec.encode(STREAM[0]))
    data = codec.encode(Publish("a", b"x" * 1_000_000))
    found: list[Packet] = []
    for start in range(0, len(data), 1000):
        assert decoder.buffered_bytes <= len(data)
        found += decoder.feed(data[start : start + 1000])
    assert found == [Publish("a", b"x" * 1_000_000)]
    assert decoder.buffered_bytes == 0


def test_more_different_topics_than_are_remembered_are_still_right() -> None:
    decoder = codec.Decoder(Side.SERVER)
    decoder.feed(codec.encode(STREAM[0]))
    messages = [Publish(f"{'long/' * (number % 60)}{number}", b"") for number in range(6000)]
    assert decoder.feed(b"".join(codec.encode(message) for message in messages)) == messages


def test_a_maximum_below_that_of_the_first_packet_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="4096"):
        codec.Decoder(Side.SERVER, 4095)
