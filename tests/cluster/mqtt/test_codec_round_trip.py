"""Every packet comes back as it was; the bytes are the ones of the specification."""

from __future__ import annotations

import pytest

from cluster.mqtt import codec
from cluster.mqtt.packets import (
    MQTT_3_1,
    MQTT_5,
    Auth,
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
from cluster.mqtt.properties import Property as P
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

KINDS: list[tuple[type[Puback | Pubrec | Pubrel | Pubcomp], list[int]]] = [
    (Puback, [0, 0x10, 0x97]), (Pubrec, [0, 0x91]), (Pubrel, [0, 0x92]), (Pubcomp, [0, 0x92]),
]  # fmt: skip
EXPLAINED: list[dict[int, object] | None] = [None, {P.REASON_STRING: "a reason"}]


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


FIVE: list[tuple[Side, Packet]] = [
    (Side.SERVER, Connect("c", True, 10, None, b"token", dialect=MQTT_5, properties={P.RECEIVE_MAXIMUM: 20, P.SESSION_EXPIRY: 9})),
    (Side.SERVER, Connect("", will=Will("t", b"w", 2, True, {P.WILL_DELAY: 5, P.CONTENT_TYPE: "x"}), dialect=MQTT_5)),
    (Side.SERVER, Publish("a", b"x", 2, True, True, 5, {P.TOPIC_ALIAS: 3, P.CORRELATION_DATA: b"\x00\xff"})),
    (Side.SERVER, Publish("", b"x", 0, False, False, 0, {P.TOPIC_ALIAS: 3})),
    (Side.SERVER, Publish("a", b"", 0, False, False, 0, {P.USER: (("n", "1"), ("n", "2"), ("", ""))})),
    (Side.SERVER, Publish("a", b"\x00")),
    (Side.SERVER, Subscribe(1, (("a/#", 0x2D), ("b", 0x0E)), False, {P.SUBSCRIPTION_IDENTIFIER: (268_435_455,)})),
    (Side.SERVER, Unsubscribe(2, ("a", "b"), False, {P.USER: (("why", "not"),)})),
    (Side.SERVER, Disconnect(4, {P.SESSION_EXPIRY: 0})),
    (Side.SERVER, Disconnect()),
    (Side.SERVER, Auth(0x18, {P.AUTHENTICATION_METHOD: "SCRAM", P.AUTHENTICATION_DATA: b"x"})),
    (Side.CLIENT, Connack(False, 0, {P.ASSIGNED_CLIENT_ID: "x", P.RETAIN_AVAILABLE: 0, P.SERVER_KEEP_ALIVE: 60})),
    (Side.CLIENT, Connack(False, 0x9C, {P.SERVER_REFERENCE: "other:1883"})),
    (Side.CLIENT, Suback(1, (0, 1, 2, 0x8F, 0x97))),
    (Side.CLIENT, Unsuback(1, (0, 0x11))),
    (Side.CLIENT, Disconnect(0x8E, {P.REASON_STRING: "the same client connected again"})),
    (Side.CLIENT, Publish("a", b"x", 0, False, False, 0, {P.SUBSCRIPTION_IDENTIFIER: (1, 300_000)})),
    *((side, kind(7, code, properties)) for side in Side for kind, codes in KINDS for code in codes for properties in EXPLAINED),
]


@pytest.mark.parametrize(("side", "packet"), FIVE, ids=lambda given: type(given).__name__)
def test_round_trip_in_mqtt_5(side: Side, packet: Packet) -> None:
    decoded = codec.decode(codec.encode(packet, MQTT_5), side, MQTT_5)
    assert type(decoded) is type(packet)
    assert decoded == packet


def test_acknowledgements_without_a_reason_are_the_short_ones_of_mqtt_3() -> None:
    for kind in (Puback, Pubrec, Pubrel, Pubcomp):
        assert codec.encode(kind(7), MQTT_5) == codec.encode(kind(7))
    assert codec.encode(Puback(7, 0x87), MQTT_5) == b"\x40\x03\x00\x07\x87"
    assert codec.encode(Disconnect(0x8E), MQTT_5) == b"\xe0\x01\x8e"


def test_mqtt_3_1_has_its_name_its_missing_fields_and_dup_in_requests() -> None:
    old = codec.encode(Connect("c", True, 10, "u", b"p", dialect=MQTT_3_1))
    assert old[2:11] == b"\x00\x06MQIsdp\x03"
    missing = b"\x10\x0f" + old[2:10] + b"\x03\xc2\x00\x0a\x00\x01c"
    decoder = codec.Decoder(Side.SERVER)
    assert decoder.feed(missing) == [Connect("c", True, 10, dialect=MQTT_3_1)]
    repeated = bytearray(codec.encode(Subscribe(1, (("a", 1),))))
    repeated[0] |= 8
    assert decoder.feed(bytes(repeated)) == [Subscribe(1, (("a", 1),))]


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
    ("name", "level"), [(b"\x00\x04MQTT", 6), (b"\x00\x04MQTT", 3), (b"\x00\x04MQTT", 0x84), (b"\x00\x06MQIsdp", 4)]
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
        Subscribe(1, (("a", 4),)),
        Puback(1, 0x97),
        Disconnect(4),
        Auth(0x18, {P.AUTHENTICATION_METHOD: "x"}),
        Publish("a", b"", properties={P.CONTENT_TYPE: "x"}),
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
