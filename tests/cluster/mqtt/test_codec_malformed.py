"""Every malformed packet is refused, and for its own reason. The names are the normative statements of MQTT 3.1.1 and 5."""

from __future__ import annotations

import pytest

from cluster.mqtt import codec
from cluster.mqtt.events import MALFORMED_CODES
from cluster.mqtt.packets import MQTT_3_1_1, MQTT_5, Connect, Dialect, MalformedPacket, Publish, Reason, Side
from cluster.mqtt.reason_codes import ReasonCode

CONNECT = codec.encode(Connect("c"))
CONNACK = b"\x20\x02\x00\x00"


def connect(flags: int, payload: bytes = b"\x00\x01c", *, name: bytes = b"\x00\x04MQTT", level: int = 4) -> bytes:
    body = name + bytes([level, flags, 0, 60]) + payload
    return bytes([0x10, len(body)]) + body


def packet(first: int, body: bytes) -> bytes:
    return codec._head(first, len(body)) + body


SERVER_CASES: list[tuple[str, bytes, Reason]] = [
    ("type 0 is reserved", b"\x00\x00", Reason.UNKNOWN_TYPE),
    ("type 15 is reserved", b"\xf0\x00", Reason.UNKNOWN_TYPE),
    ("MQTT-1.5.3-1 ill-formed UTF-8 in a topic", packet(0x30, b"\x00\x01\xff"), Reason.INVALID_UTF8),
    ("MQTT-1.5.3-1 a surrogate in a topic", packet(0x30, b"\x00\x03\xed\xa0\x80"), Reason.INVALID_UTF8),
    ("MQTT-1.5.3-1 an overlong form in a topic", packet(0x30, b"\x00\x02\xc0\x80"), Reason.INVALID_UTF8),
    ("MQTT-1.5.3-1 a surrogate in a client identifier", connect(2, b"\x00\x03\xed\xbf\xbf"), Reason.INVALID_UTF8),
    ("MQTT-1.5.3-1 ill-formed UTF-8 in a filter", packet(0x82, b"\x00\x01\x00\x01\xff\x00"), Reason.INVALID_UTF8),
    ("MQTT-1.5.3-2 U+0000 in a topic", packet(0x30, b"\x00\x01\x00"), Reason.NUL_IN_STRING),
    ("MQTT-1.5.3-2 U+0000 in a client identifier", connect(2, b"\x00\x01\x00"), Reason.NUL_IN_STRING),
    ("MQTT-1.5.3-2 U+0000 in a user name", connect(0x82, b"\x00\x01c\x00\x01\x00"), Reason.NUL_IN_STRING),
    ("MQTT-1.5.3-2 U+0000 in a filter", packet(0x82, b"\x00\x01\x00\x01\x00\x00"), Reason.NUL_IN_STRING),
    ("MQTT-2.2.2-2 reserved flags of CONNECT", b"\x11\x00", Reason.RESERVED_FLAGS),
    ("MQTT-2.2.2-2 reserved flags of PUBACK", b"\x41\x02\x00\x01", Reason.RESERVED_FLAGS),
    ("MQTT-2.2.2-2 reserved flags of PUBREC", b"\x52\x02\x00\x01", Reason.RESERVED_FLAGS),
    ("MQTT-2.2.2-2 reserved flags of PUBCOMP", b"\x78\x02\x00\x01", Reason.RESERVED_FLAGS),
    ("MQTT-2.2.2-2 reserved flags of PINGREQ", b"\xc1\x00", Reason.RESERVED_FLAGS),
    ("MQTT-3.6.1-1 flags of PUBREL", b"\x60\x02\x00\x01", Reason.RESERVED_FLAGS),
    ("MQTT-3.8.1-1 flags of SUBSCRIBE", b"\x80\x00", Reason.RESERVED_FLAGS),
    ("MQTT-3.10.1-1 flags of UNSUBSCRIBE", b"\xa0\x00", Reason.RESERVED_FLAGS),
    ("MQTT-3.14.1-1 flags of DISCONNECT", b"\xe1\x00", Reason.RESERVED_FLAGS),
    ("2.2.3 five bytes of remaining length", b"\x30\x80\x80\x80\x80\x01", Reason.REMAINING_LENGTH),
    ("2.2.3 four bytes that all say more follow", b"\x30\xff\xff\xff\xff", Reason.REMAINING_LENGTH),
    ("MQTT-2.3.1-1 SUBSCRIBE with identifier 0", packet(0x82, b"\x00\x00\x00\x01a\x00"), Reason.PACKET_ID_ZERO),
    ("MQTT-2.3.1-1 UNSUBSCRIBE with identifier 0", packet(0xA2, b"\x00\x00\x00\x01a"), Reason.PACKET_ID_ZERO),
    ("MQTT-2.3.1-1 PUBLISH of QoS 1 with identifier 0", packet(0x32, b"\x00\x01a\x00\x00"), Reason.PACKET_ID_ZERO),
    ("MQTT-2.3.1-1 PUBLISH of QoS 2 with identifier 0", packet(0x34, b"\x00\x01a\x00\x00"), Reason.PACKET_ID_ZERO),
    ("2.3.1 PUBACK with identifier 0", b"\x40\x02\x00\x00", Reason.PACKET_ID_ZERO),
    ("2.3.1 PUBREL with identifier 0", b"\x62\x02\x00\x00", Reason.PACKET_ID_ZERO),
    ("MQTT-3.1.2-1 another protocol name", connect(2, name=b"\x00\x04MQTS"), Reason.PROTOCOL_NAME),
    ("MQTT-3.1.2-1 the protocol name in lower case", connect(2, name=b"\x00\x04mqtt"), Reason.PROTOCOL_NAME),
    ("MQTT-3.1.2-3 the reserved connect flag", connect(3), Reason.CONNECT_RESERVED_FLAG),
    ("MQTT-3.1.2-11 will QoS without will", connect(0x0A), Reason.WILL_FLAGS_WITHOUT_WILL),
    ("MQTT-3.1.2-13 will QoS 1 without will", connect(0x08), Reason.WILL_FLAGS_WITHOUT_WILL),
    ("MQTT-3.1.2-14 will QoS 3", connect(0x1E, b"\x00\x01c\x00\x01t\x00\x01w"), Reason.WILL_QOS_3),
    ("MQTT-3.1.2-15 will retain without will", connect(0x22), Reason.WILL_FLAGS_WITHOUT_WILL),
    ("MQTT-3.1.2-22 password without user name", connect(0x42, b"\x00\x01c\x00\x01p"), Reason.PASSWORD_WITHOUT_USER_NAME),
    ("MQTT-3.1.3-1 no client identifier", connect(2, b""), Reason.TRUNCATED),
    ("MQTT-3.1.3-1 no user name though its flag is set", connect(0x82), Reason.TRUNCATED),
    ("MQTT-3.1.3-1 no will though its flag is set", connect(0x06), Reason.TRUNCATED),
    ("CONNECT ends in its protocol name", packet(0x10, b"\x00\x04MQ"), Reason.TRUNCATED),
    ("CONNECT ends after its protocol name", packet(0x10, b"\x00\x04MQTT"), Reason.TRUNCATED),
    ("CONNECT ends after its level", packet(0x10, b"\x00\x04MQTT\x04"), Reason.TRUNCATED),
    ("CONNECT ends in its keep-alive", packet(0x10, b"\x00\x04MQTT\x04\x02\x00"), Reason.TRUNCATED),
    ("CONNECT with bytes after its payload", connect(2, b"\x00\x01c\x00"), Reason.TRAILING_BYTES),
    ("an empty will topic", connect(6, b"\x00\x01c\x00\x00\x00\x00"), Reason.EMPTY_TOPIC),
    ("a will topic with a wildcard", connect(6, b"\x00\x01c\x00\x01#\x00\x00"), Reason.WILDCARD_IN_TOPIC),
    ("MQTT-3.3.1-2 DUP with QoS 0", packet(0x38, b"\x00\x01a"), Reason.DUP_WITH_QOS_0),
    ("MQTT-3.3.1-4 PUBLISH with both QoS bits", packet(0x36, b"\x00\x01a\x00\x01"), Reason.PUBLISH_QOS_3),
    ("MQTT-3.3.1-4 PUBLISH with both QoS bits, DUP and RETAIN", packet(0x3F, b"\x00\x01a\x00\x01"), Reason.PUBLISH_QOS_3),
    ("MQTT-3.3.2-2 # in a topic", packet(0x30, b"\x00\x03a/#"), Reason.WILDCARD_IN_TOPIC),
    ("MQTT-3.3.2-2 + in a topic", packet(0x32, b"\x00\x03a/+\x00\x01"), Reason.WILDCARD_IN_TOPIC),
    ("MQTT-4.7.3-1 an empty topic", packet(0x30, b"\x00\x00payload"), Reason.EMPTY_TOPIC),
    ("PUBLISH without a topic", packet(0x30, b""), Reason.TRUNCATED),
    ("PUBLISH with half a topic length", packet(0x30, b"\x00"), Reason.TRUNCATED),
    ("PUBLISH whose topic reaches beyond the packet", packet(0x30, b"\x00\x05a") + b"bcde", Reason.TRUNCATED),
    ("PUBLISH of QoS 1 without an identifier", packet(0x32, b"\x00\x01a"), Reason.TRUNCATED),
    ("PUBLISH of QoS 1 with half an identifier", packet(0x32, b"\x00\x01a\x01") + b"\x01", Reason.TRUNCATED),
    ("PUBACK without an identifier", b"\x40\x00", Reason.TRUNCATED),
    ("PUBACK with half an identifier", b"\x40\x01\x01", Reason.TRUNCATED),
    ("PUBACK with more than an identifier", b"\x40\x03\x00\x01\x00", Reason.TRAILING_BYTES),
    ("MQTT-3.8.3-3 SUBSCRIBE without filters", packet(0x82, b"\x00\x01"), Reason.EMPTY_FILTER_LIST),
    ("MQTT-3.8.3-4 SUBSCRIBE with QoS 3", packet(0x82, b"\x00\x01\x00\x01a\x03"), Reason.SUBSCRIBE_QOS),
    ("MQTT-3.8.3-4 SUBSCRIBE with reserved QoS bits", packet(0x82, b"\x00\x01\x00\x01a\x40"), Reason.SUBSCRIBE_QOS),
    ("SUBSCRIBE without its last QoS", packet(0x82, b"\x00\x01\x00\x01a"), Reason.TRUNCATED),
    ("SUBSCRIBE whose filter reaches beyond the packet", packet(0x82, b"\x00\x01\x00\x09a\x00"), Reason.TRUNCATED),
    ("SUBSCRIBE without an identifier", packet(0x82, b""), Reason.TRUNCATED),
    ("MQTT-4.7.3-1 an empty filter", packet(0x82, b"\x00\x01\x00\x00\x00"), Reason.EMPTY_FILTER),
    ("MQTT-4.7.1-2 # before the last level", packet(0x82, b"\x00\x01\x00\x05a/#/b\x00"), Reason.INVALID_FILTER),
    ("MQTT-4.7.1-2 # beside other characters", packet(0x82, b"\x00\x01\x00\x02a#\x00"), Reason.INVALID_FILTER),
    ("MQTT-4.7.1-3 + beside other characters", packet(0xA2, b"\x00\x01\x00\x04a/b+"), Reason.INVALID_FILTER),
    ("more filters than allowed in SUBSCRIBE", packet(0x82, b"\x00\x01" + b"\x00\x01a\x00" * 4), Reason.TOO_MANY_FILTERS),
    ("more filters than allowed in UNSUBSCRIBE", packet(0xA2, b"\x00\x01" + b"\x00\x01a" * 4), Reason.TOO_MANY_FILTERS),
    ("MQTT-3.10.3-2 UNSUBSCRIBE without filters", packet(0xA2, b"\x00\x01"), Reason.EMPTY_FILTER_LIST),
    ("an empty filter in UNSUBSCRIBE", packet(0xA2, b"\x00\x01\x00\x00"), Reason.EMPTY_FILTER),
    ("PINGREQ with a body", b"\xc0\x01\x00", Reason.TRAILING_BYTES),
    ("DISCONNECT with a body", b"\xe0\x01\x00", Reason.TRAILING_BYTES),
    ("CONNACK to a server", CONNACK, Reason.WRONG_DIRECTION),
    ("SUBACK to a server", b"\x90\x03\x00\x01\x00", Reason.WRONG_DIRECTION),
    ("UNSUBACK to a server", b"\xb0\x02\x00\x01", Reason.WRONG_DIRECTION),
    ("PINGRESP to a server", b"\xd0\x00", Reason.WRONG_DIRECTION),
    ("a packet above the maximum", b"\x30\xff\x7f", Reason.PACKET_TOO_LARGE),
]  # fmt: skip


def connect5(properties: bytes, payload: bytes = b"\x00\x01c", flags: int = 2) -> bytes:
    body = b"\x00\x04MQTT\x05" + bytes([flags, 0, 60]) + properties + payload
    return bytes([0x10, len(body)]) + body


FIVE_CASES: list[tuple[str, bytes, Reason]] = [
    ("2.1.3 flags of AUTH", b"\xf1\x00", Reason.RESERVED_FLAGS),
    ("1.5.5 a length of properties of five bytes", packet(0x30, b"\x00\x01a\xff\xff\xff\xff\x01"), Reason.VARIABLE_INTEGER),
    ("2.2.2.2 a property that does not exist", packet(0x30, b"\x00\x01a\x02\x7f\x00"), Reason.PROPERTY_NOT_ALLOWED),
    ("2.2.2.2 a property of another packet", packet(0x30, b"\x00\x01a\x02\x17\x00"), Reason.PROPERTY_NOT_ALLOWED),
    ("3.3.2.3 a property twice", packet(0x30, b"\x00\x01a\x04\x01\x00\x01\x00"), Reason.PROPERTY_TWICE),
    ("3.3.2.3.2 payload format 2", packet(0x30, b"\x00\x01a\x02\x01\x02"), Reason.PROPERTY_VALUE),
    ("MQTT5-3.3.2-8 topic alias 0", packet(0x30, b"\x00\x01a\x03\x23\x00\x00"), Reason.TOPIC_ALIAS_ZERO),
    ("MQTT5-3.3.2-14 a response topic with a wildcard", packet(0x30, b"\x00\x01a\x05\x08\x00\x02a#"), Reason.RESPONSE_TOPIC),
    ("MQTT5-3.3.4-6 a client's subscription identifier", packet(0x30, b"\x00\x01a\x02\x0b\x01"), Reason.IDENTIFIER_FROM_CLIENT),
    ("3.8.2.1.2 subscription identifier 0", packet(0x82, b"\x00\x01\x02\x0b\x00\x00\x01a\x00"), Reason.PROPERTY_VALUE),
    ("3.8.2.1.2 two identifiers", packet(0x82, b"\x00\x01\x04\x0b\x01\x0b\x02\x00\x01a\x00"), Reason.PROPERTY_TWICE),
    ("MQTT5-3.8.3-5 reserved options", packet(0x82, b"\x00\x01\x00\x00\x01a\x40"), Reason.SUBSCRIBE_OPTIONS),
    ("3.8.3.1 retain handling 3", packet(0x82, b"\x00\x01\x00\x00\x01a\x30"), Reason.SUBSCRIBE_OPTIONS),
    ("3.8.3.1 QoS 3", packet(0x82, b"\x00\x01\x00\x00\x01a\x03"), Reason.SUBSCRIBE_QOS),
    ("MQTT5-3.8.3-4 no local and shared", packet(0x82, b"\x00\x01\x00\x00\x0a$share/g/a\x04"), Reason.SHARED_NO_LOCAL),
    ("3.4.2.1 a reason code of another packet", b"\x40\x03\x00\x01\x18", Reason.REASON_CODE),
    ("3.14.2.1 a reason code that only servers send", b"\xe0\x01\x8d", Reason.REASON_CODE),
    ("3.15.2.2.2 AUTH without a method", b"\xf0\x02\x18\x00", Reason.AUTHENTICATION_METHOD),
    ("a user property with U+0000", packet(0x30, b"\x00\x01a\x07\x26\x00\x01\x00\x00\x01b"), Reason.NUL_IN_STRING),
    ("a user property that is not UTF-8", packet(0x30, b"\x00\x01a\x07\x26\x00\x01\xff\x00\x01b"), Reason.INVALID_UTF8),
    ("properties that reach beyond the packet", packet(0x30, b"\x00\x01a\x20\x01\x01"), Reason.TRUNCATED),
    ("a value that reaches beyond the properties", packet(0x30, b"\x00\x01a\x03\x26\x00\x09abcdefghi"), Reason.TRUNCATED),
    ("PUBLISH without properties", packet(0x30, b"\x00\x01a"), Reason.TRUNCATED),
    ("an empty topic without an alias", packet(0x30, b"\x00\x00\x00"), Reason.EMPTY_TOPIC),
    ("65 user properties", packet(0x30, b"\x00\x01a\xc5\x02" + b"\x26\x00\x00\x00\x00" * 65), Reason.TOO_MANY_PROPERTIES),
    ("AUTH before MQTT 5 is type 15", b"\x00\x00", Reason.UNKNOWN_TYPE),
]  # fmt: skip
CONNECT_5_CASES: list[tuple[str, bytes, Reason]] = [
    ("3.1.2.11.3 receive maximum 0", connect5(b"\x03\x21\x00\x00"), Reason.PROPERTY_VALUE),
    ("3.1.2.11.4 maximum packet size 0", connect5(b"\x05\x27\x00\x00\x00\x00"), Reason.PROPERTY_VALUE),
    ("3.1.2.11.6 request response information 2", connect5(b"\x02\x19\x02"), Reason.PROPERTY_VALUE),
    ("3.1.2.11.10 data without a method", connect5(b"\x04\x16\x00\x01a"), Reason.AUTHENTICATION_DATA),
    ("3.1.2.11.2 session expiry twice", connect5(b"\x0a" + b"\x11\x00\x00\x00\x01" * 2), Reason.PROPERTY_TWICE),
    ("3.1.3.2.2 will delay outside the will", connect5(b"\x05\x18\x00\x00\x00\x01"), Reason.PROPERTY_NOT_ALLOWED),
    ("MQTT5-3.1.2-3 the reserved connect flag", connect5(b"\x00", flags=3), Reason.CONNECT_RESERVED_FLAG),
]

CLIENT_CASES: list[tuple[str, bytes, Reason]] = [
    ("MQTT-3.2.2-4 a refusal with session present", b"\x20\x02\x01\x01", Reason.CONNACK_FLAGS),
    ("reserved CONNACK flags", b"\x20\x02\x02\x00", Reason.CONNACK_FLAGS),
    ("a reserved CONNACK code", b"\x20\x02\x00\x06", Reason.CONNACK_CODE),
    ("a short CONNACK", b"\x20\x01\x00", Reason.TRUNCATED),
    ("a long CONNACK", b"\x20\x03\x00\x00\x00", Reason.TRAILING_BYTES),
    ("MQTT-3.9.3-2 a reserved SUBACK code", b"\x90\x03\x00\x01\x03", Reason.SUBACK_CODE),
    ("a SUBACK without codes", b"\x90\x02\x00\x01", Reason.EMPTY_SUBACK),
    ("a SUBACK with identifier 0", b"\x90\x03\x00\x00\x00", Reason.PACKET_ID_ZERO),
    ("CONNECT to a client", CONNECT, Reason.WRONG_DIRECTION),
    ("PINGREQ to a client", b"\xc0\x00", Reason.WRONG_DIRECTION),
]


def later(side: Side, dialect: Dialect = MQTT_3_1_1) -> codec.Decoder:
    """A decoder that has its first packet behind it."""
    decoder = codec.Decoder(side, 8192, 3)
    assert len(decoder.feed(codec.encode(Connect("c", dialect=dialect)) if side is Side.SERVER else CONNACK)) == 1
    return decoder


@pytest.mark.parametrize(("data", "reason"), [pytest.param(data, reason, id=name) for name, data, reason in FIVE_CASES])
def test_malformed_in_mqtt_5(data: bytes, reason: Reason) -> None:
    for parts in ([data], [data[index : index + 1] for index in range(len(data))]):
        decoder = later(Side.SERVER, MQTT_5)
        assert [packet for part in parts for packet in decoder.feed(part)] == []
        assert decoder.error is not None
        assert decoder.error.reason is reason


@pytest.mark.parametrize(("data", "reason"), [pytest.param(data, reason, id=name) for name, data, reason in CONNECT_5_CASES])
def test_a_malformed_connect_of_mqtt_5_says_that_it_is_one(data: bytes, reason: Reason) -> None:
    decoder = codec.Decoder(Side.SERVER)
    assert decoder.feed(data) == []
    assert decoder.error is not None
    assert (decoder.error.reason, decoder.error.dialect) == (reason, MQTT_5)
    assert reason not in (Reason.PROPERTY_VALUE, Reason.PROPERTY_TWICE) or MALFORMED_CODES[reason] is ReasonCode.PROTOCOL_ERROR


@pytest.mark.parametrize(
    ("side", "data", "reason"),
    [pytest.param(Side.SERVER, data, reason, id=name) for name, data, reason in SERVER_CASES]
    + [pytest.param(Side.CLIENT, data, reason, id=f"client: {name}") for name, data, reason in CLIENT_CASES],
)
def test_malformed(side: Side, data: bytes, reason: Reason) -> None:
    decoder = later(side)
    assert decoder.feed(data) == []
    assert decoder.error is not None
    assert decoder.error.reason is reason
    assert decoder.buffered_bytes == 0

    by_bytes = later(side)
    found = [packet for index in range(len(data)) for packet in by_bytes.feed(data[index : index + 1])]
    assert found == []
    assert by_bytes.error is not None
    assert by_bytes.error.reason is reason


def test_every_reason_has_a_case() -> None:
    tested = {reason for _, _, reason in SERVER_CASES + CLIENT_CASES + FIVE_CASES + CONNECT_5_CASES}
    assert set(Reason) - tested == {Reason.FIRST_PACKET, Reason.FIRST_PACKET_TOO_LARGE}


@pytest.mark.parametrize("first", [0x30, 0x32, 0x40, 0x62, 0x82, 0xA2, 0xC0, 0xE0, 0x20, 0x90])
def test_mqtt_3_1_0_1_the_first_packet_from_a_client_must_be_connect(first: int) -> None:
    """Before CONNECT no version is known: MQTT5-3.1.0-1."""
    decoder = codec.Decoder(Side.SERVER)
    assert decoder.feed(bytes([first])) == []
    assert decoder.error is not None
    assert decoder.error.reason is Reason.FIRST_PACKET


@pytest.mark.parametrize("first", [0x30, 0x40, 0x90, 0xB0, 0xD0, 0x10])
def test_mqtt_3_2_0_1_the_first_packet_from_a_server_must_be_connack(first: int) -> None:
    decoder = codec.Decoder(Side.CLIENT)
    assert decoder.feed(bytes([first])) == []
    assert decoder.error is not None
    assert decoder.error.reason is Reason.FIRST_PACKET


def test_the_first_packet_has_at_most_64_kib() -> None:
    name, password = "c" * 60_000, b"p" * (65536 - 4 - 10 - 2 - 60_000 - 2 - 2)
    largest = codec.encode(Connect(name, True, 0, "", password))
    assert len(largest) == 65536
    decoder = codec.Decoder(Side.SERVER)
    assert len(decoder.feed(largest)) == 1
    decoder = codec.Decoder(Side.SERVER)
    assert decoder.feed(codec.encode(Connect(name, True, 0, "", password + b"p"))[:4]) == []
    assert decoder.error is not None
    assert decoder.error.reason is Reason.FIRST_PACKET_TOO_LARGE


def test_later_packets_have_at_most_the_configured_size() -> None:
    fits = codec.encode(Publish("a", b"x" * (8192 - 3 - 3)))
    assert len(fits) == 8192
    decoder = later(Side.SERVER)
    assert len(decoder.feed(fits)) == 1
    assert decoder.feed(codec.encode(Publish("a", b"x" * (8192 - 3 - 2)))) == []
    assert decoder.error is not None
    assert decoder.error.reason is Reason.PACKET_TOO_LARGE


def test_packets_before_a_malformed_one_are_yielded_and_none_after() -> None:
    good = codec.encode(Publish("a", b"1"))
    decoder = later(Side.SERVER)
    assert decoder.feed(good + good + b"\x00\x00" + good) == [Publish("a", b"1"), Publish("a", b"1")]
    assert decoder.error is not None
    assert decoder.feed(good) == []


@pytest.mark.parametrize("data", [b"", b"\x10", b"\xc0", b"\x30\x05\x00"])
def test_decode_refuses_an_incomplete_packet(data: bytes) -> None:
    with pytest.raises(MalformedPacket) as caught:
        codec.decode(data, Side.SERVER)
    assert caught.value.reason is Reason.TRUNCATED


@pytest.mark.parametrize("more", [b"\xc0\x00", b"\xc0", b"\x00"])
def test_decode_refuses_more_than_a_packet(more: bytes) -> None:
    with pytest.raises(MalformedPacket) as caught:
        codec.decode(b"\xc0\x00" + more, Side.SERVER)
    assert caught.value.reason is Reason.TRAILING_BYTES
