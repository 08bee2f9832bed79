"""What a decoder yields does not depend on how the stream is cut, and it keeps no more than it must."""

from __future__ import annotations

import tracemalloc

import pytest

from cluster.mqtt import codec
from cluster.mqtt.packets import Connect, Disconnect, Packet, Pingreq, Puback, Publish, Reason, Side, Subscribe, Unsubscribe
from pixiu.errors import InvalidArgument
from tests.support.for_each import for_each

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


@for_each("position", range(len(DATA) + 1))
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


@pytest.mark.parametrize("subscribes", [True, False])
def test_many_filters_are_given_in_parts_that_make_the_whole(subscribes: bool) -> None:
    names = [f"room/{number}" for number in range(1, 1001)]
    whole = Subscribe(7, tuple((name, 1) for name in names)) if subscribes else Unsubscribe(7, tuple(names))
    decoder = codec.Decoder(Side.SERVER)
    decoder.feed(codec.encode(STREAM[0]))
    parts = decoder.feed(codec.encode(whole) + codec.encode(Pingreq()) * 3, 300)
    while decoder.has_more:
        parts += decoder.feed(b"", 300)
    filters = [part for part in parts if isinstance(part, Subscribe | Unsubscribe)]
    assert [(part.packet_id, len(part.filters), part.more) for part in filters] == [(7, 300, True)] * 3 + [(7, 100, False)]
    assert tuple(one for part in filters for one in part.filters) == whole.filters
    assert parts[len(filters) :] == [Pingreq()] * 3
    assert (decoder.error, decoder.buffered_bytes) == (None, 0)


def test_what_arrives_between_two_parts_comes_behind_them() -> None:
    whole = Subscribe(7, tuple((f"a/{number}", 0) for number in range(30)))
    decoder = codec.Decoder(Side.SERVER)
    decoder.feed(codec.encode(STREAM[0]))
    (first,) = decoder.feed(codec.encode(whole), 20)
    (second,) = decoder.feed(codec.encode(Publish("a", b"x")), 10)
    assert isinstance(first, Subscribe)
    assert isinstance(second, Subscribe)
    assert first.filters + second.filters == whole.filters
    assert decoder.feed(b"", 10) == [Publish("a", b"x")]


@pytest.mark.parametrize(
    ("tail", "reason"), [(b"\x00\x01b\x03", Reason.SUBSCRIBE_QOS), (b"\x00\x09b", Reason.TRUNCATED), (b"\x00", Reason.TRUNCATED)]
)
def test_a_part_that_is_malformed_ends_the_stream_behind_those_that_were_not(tail: bytes, reason: Reason) -> None:
    body = b"\x00\x07" + b"\x00\x01a\x00" * 20 + tail
    decoder = codec.Decoder(Side.SERVER)
    decoder.feed(codec.encode(STREAM[0]))
    assert decoder.feed(bytes((0x82, len(body))) + body, 15) == [Subscribe(7, (("a", 0),) * 15, True)]
    assert decoder.feed(b"", 15) == []
    assert decoder.error is not None
    assert decoder.error.reason is reason


def test_parts_do_not_get_around_the_number_of_filters_of_a_packet() -> None:
    decoder = codec.Decoder(Side.SERVER, max_filters=40)
    decoder.feed(codec.encode(STREAM[0]))
    decoder.feed(codec.encode(Subscribe(7, (("a", 0),) * 41)), 30)
    assert decoder.feed(b"", 30) == []
    assert decoder.error is not None
    assert decoder.error.reason is Reason.TOO_MANY_FILTERS
