"""What loads write is what the protocols say."""

from __future__ import annotations

from comparison.wires import ID_COUNT, Mqtt, Resp, packet_head, packet_id


def test_mqtt_publications_carry_their_size_and_arrive_as_they_were_sent() -> None:
    wire = Mqtt()
    assert wire.published("a/b", 4, 0) == (b"\x30\x09\x00\x03a/b", b"")
    assert wire.delivered("a/b", 4) == wire.published("a/b", 4, 0)
    assert wire.published("a/b", 4, 1) == (b"\x32\x0b\x00\x03a/b", b"")
    assert packet_head(0x30, 321) == b"\x30\xc1\x02"


def test_mqtt_connects_with_and_without_a_session_of_before() -> None:
    (clean, answer), (kept, _) = Mqtt().connect("x"), Mqtt().connect("x", clean=False)
    assert clean == b"\x10\x0d\x00\x04MQTT\x04\x02\x02\x58\x00\x01x"
    assert (clean[9], kept[9], answer) == (2, 0, b"\x20\x02\x00\x00")
    assert Mqtt().subscribe("t", 1) == (b"\x82\x06\x00\x01\x00\x01t\x01", b"\x90\x03\x00\x01\x01")


def test_packet_numbers_are_never_zero_and_begin_anew() -> None:
    assert packet_id(0) == b"\x00\x01"
    assert packet_id(ID_COUNT - 1) == b"\xff\xff"
    assert packet_id(ID_COUNT) == b"\x00\x01"


def test_confirmations_are_counted_in_parts() -> None:
    assert Mqtt().confirmed(b"\x40\x02\x00") + Mqtt().confirmed(b"\x01\x40\x02\x00\x02") == 2
    assert Resp().confirmed(b":1\r\n:10") + Resp().confirmed(b"0\r\n") == 2


def test_redis_has_the_body_between_head_and_tail() -> None:
    wire = Resp()
    head, tail = wire.published("room/1", 3, 0)
    assert head + b"abc" + tail == b"*3\r\n$7\r\nPUBLISH\r\n$6\r\nroom/1\r\n$3\r\nabc\r\n"
    head, tail = wire.delivered("room/1", 3)
    assert head + b"abc" + tail == b"*3\r\n$7\r\nmessage\r\n$6\r\nroom/1\r\n$3\r\nabc\r\n"
    assert wire.subscribe("r") == (b"*2\r\n$9\r\nSUBSCRIBE\r\n$1\r\nr\r\n", b"*3\r\n$9\r\nsubscribe\r\n$1\r\nr\r\n:1\r\n")
