"""Every packet comes back as it was; the bytes are the ones of the specification."""

from __future__ import annotations

import pytest

from cluster.mqtt import codec
from cluster.mqtt.packets import (
    Connack,
    Connect,
    Disconnect,
    MalformedPacket,
    Packet,
    Pingreq,
    Pingresp,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Reason,
    Side,
    Suback,
    Subscribe,
    UnacceptableConnect,
    Unsuback,
    Unsubscribe,
    Will,
)
from pixiu.errors import InvalidArgument, MalformedData
from pixiu.wire.record import with_topic

TO_SERVER: list[Packet] = [
    Connect(""),
    Connect("device-1", False, 65535),
    Connect("設備", True, 60, "user", b"\x00\xff"),
    Connect("a", True, 1, "", b""),
    Connect("a", True, 1, "user", None),
    Connect("a", True, 1, "u", b"p", Will("gone/a", b"", 0, False)),
    Connect("a", True, 1, None, None, Will("gone/a", b"bye", 2, True)),
    Subscribe(1, (("room/1", 0),)),
    Subscribe(65535, (("a/+/b", 1), ("#", 2), ("+", 0), ("$SYS/#", 0))),
    Unsubscribe(2, ("room/1", "a/#")),
    Pingreq(),
    Disconnect(),
]
TO_CLIENT: list[Packet] = [
    *(Connack(False, code) for code in range(6)),
    Connack(True, 0),
    Suback(1, (0,)),
    Suback(513, (0, 1, 2, 0x80)),
    Unsuback(77),
    Pingresp(),
]
BOTH_WAYS: list[Packet] = [
    Publish("a", b""),
    Publish("room/1", b"x" * 200, 0, True),
    Publish("\ufeffé/\U0001f600", b"\x00\x01", 1, False, False, 1),
    Publish("a", b"payload", 1, True, True, 65535),
    Publish("a", b"payload", 2, False, True, 256),
    Publish("t" * 65535, b"y" * 70000),
    *(kind(number) for kind in (Puback, Pubrec, Pubrel, Pubcomp) for number in (1, 256, 65535)),
]


@pytest.mark.parametrize("packet", [*TO_SERVER, *BOTH_WAYS], ids=lambda packet: type(packet).__name__)
def test_round_trip_to_a_server(packet: Packet) -> None:
    decoded = codec.decode(codec.encode(packet), Side.SERVER)
    assert type(decoded) is type(packet)
    assert decoded == packet


@pytest.mark.parametrize("packet", [*TO_CLIENT, *BOTH_WAYS], ids=lambda packet: type(packet).__name__)
def test_round_trip_to_a_client(packet: Packet) -> None:
    decoded = codec.decode(codec.encode(packet), Side.CLIENT)
    assert type(decoded) is type(packet)
    assert decoded == packet


@pytest.mark.parametrize("packet", TO_CLIENT, ids=lambda packet: type(packet).__name__)
def test_what_a_server_sends_is_refused_by_a_server(packet: Packet) -> None:
    with pytest.raises(MalformedPacket) as caught:
        codec.decode(codec.encode(packet), Side.SERVER)
    assert caught.value.reason is Reason.WRONG_DIRECTION


@pytest.mark.parametrize("packet", TO_SERVER, ids=lambda packet: type(packet).__name__)
def test_what_a_client_sends_is_refused_by_a_client(packet: Packet) -> None:
    with pytest.raises(MalformedPacket) as caught:
        codec.decode(codec.encode(packet), Side.CLIENT)
    assert caught.value.reason is Reason.WRONG_DIRECTION


def test_bytes_of_the_example_connect_of_the_specification() -> None:
    # MQTT 3.1.1 figure 3.6: user name, password, will with QoS 1, clean session, keep-alive 10
    variable = bytes([0, 4, *b"MQTT", 4, 0b11001110, 0, 10])
    payload = b"\x00\x01c\x00\x01t\x00\x01w\x00\x01u\x00\x01p"
    data = bytes([0x10, len(variable + payload)]) + variable + payload
    packet = Connect("c", True, 10, "u", b"p", Will("t", b"w", 1, False))
    assert codec.encode(packet) == data
    assert codec.decode(data, Side.SERVER) == packet


def test_bytes_of_the_example_publish_of_the_specification() -> None:
    # MQTT 3.1.1 figure 3.11: topic a/b, packet identifier 10
    data = bytes([0x32, 7, 0, 3, *b"a/b", 0, 10])
    assert codec.encode(Publish("a/b", b"", 1, False, False, 10)) == data


def test_bytes_of_the_example_subscribe_of_the_specification() -> None:
    # MQTT 3.1.1 figure 3.23: a/b with QoS 1, c/d with QoS 2
    data = bytes([0x82, 14, 0, 10, 0, 3, *b"a/b", 1, 0, 3, *b"c/d", 2])
    assert codec.encode(Subscribe(10, (("a/b", 1), ("c/d", 2)))) == data


@pytest.mark.parametrize(
    ("size", "length"),
    [
        (0, b"\x00"),
        (127, b"\x7f"),
        (128, b"\x80\x01"),
        (16383, b"\xff\x7f"),
        (16384, b"\x80\x80\x01"),
        (2097151, b"\xff\xff\x7f"),
        (2097152, b"\x80\x80\x80\x01"),
        (268435455, b"\xff\xff\xff\x7f"),
    ],
)
def test_remaining_lengths_of_table_2_4(size: int, length: bytes) -> None:
    assert codec._head(0x30, size) == b"\x30" + length


def test_a_longer_packet_than_mqtt_allows_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="268435455"):
        codec._head(0x30, 268435456)


@pytest.mark.parametrize("size", [0, 1, 120, 121, 122, 16000, 20000, 3_000_00])
def test_publish_helpers_agree_with_encode(size: int) -> None:
    payload = b"z" * size
    expected = codec.encode(Publish("room/7", payload))
    assert codec.publish_qos0(with_topic("room/7", payload)) == expected
    assert codec.publish_qos0_parts(codec.topic_prefix("room/7"), payload) == expected
    assert codec.encode_publish("room/7", payload) == expected


def test_pubacks_end_to_end() -> None:
    assert codec.encode_pubacks([1, 65535]) == codec.encode(Puback(1)) + codec.encode(Puback(65535))


@pytest.mark.parametrize(
    ("name", "level"), [(b"\x00\x04MQTT", 5), (b"\x00\x04MQTT", 3), (b"\x00\x04MQTT", 0x84), (b"\x00\x06MQIsdp", 3)]
)
def test_another_protocol_level_is_recognised_whatever_follows(name: bytes, level: int) -> None:
    body = name + bytes([level]) + b"\xff\xff\xff"
    decoded = codec.decode(bytes([0x10, len(body)]) + body, Side.SERVER)
    assert decoded == UnacceptableConnect(name[2:].decode(), level)


@pytest.mark.parametrize(
    "packet",
    [
        Publish("", b""),
        Publish("a/+", b""),
        Publish("#", b""),
        Publish("a\0", b""),
        Publish("\ud800", b""),
        Publish("x" * 65536, b""),
        Publish("a", b"", 3, False, False, 1),
        Publish("a", b"", 1),
        Publish("a", b"", 1, False, False, 65536),
        Publish("a", b"", 0, False, True),
        Publish("a", b"", 0, False, False, 1),
        Connect("a", True, 65536),
        Connect("a", True, -1),
        Connect("a", True, 0, None, b"secret"),
        Connect("a", True, 0, "u", b"s" * 65536),
        Connect("a", True, 0, None, None, Will("a/#", b"")),
        Connect("a", True, 0, None, None, Will("a", b"", 3)),
        Connack(True, 1),
        Connack(False, 6),
        Puback(0),
        Pubrel(65536),
        Subscribe(1, ()),
        Subscribe(0, (("a", 0),)),
        Subscribe(1, (("a", 3),)),
        Subscribe(1, (("", 0),)),
        Subscribe(1, (("a#", 0),)),
        Unsubscribe(1, ()),
        Unsubscribe(1, ("a/#/b",)),
        Suback(1, ()),
        Suback(1, (3,)),
        UnacceptableConnect("MQTT", 5),
    ],
    ids=repr,
)
def test_what_a_receiver_would_refuse_is_not_encoded(packet: Packet) -> None:
    with pytest.raises(InvalidArgument):
        codec.encode(packet)


def test_secrets_and_payloads_are_not_in_what_a_log_would_show() -> None:
    shown = repr(Connect("a", True, 0, "user", b"hidden", Will("t", b"hidden"))) + repr(Publish("t", b"hidden"))
    assert "hidden" not in shown


def test_malformed_packets_are_malformed_data() -> None:
    error = MalformedPacket(Reason.PACKET_ID_ZERO)
    assert isinstance(error, MalformedData)
    assert error.code == "MALFORMED"
    assert Reason.PACKET_ID_ZERO.value in str(error)
