"""Statements about the form of packets that MQTT 3.1.1 and 5 share: each case is checked in both versions."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final

import pytest

from cluster.mqtt import codec
from cluster.mqtt.packets import (
    MQTT_3_1_1,
    MQTT_5,
    Auth,
    Connack,
    Connect,
    Dialect,
    Disconnect,
    Packet,
    PacketType,
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
    Unsuback,
    Unsubscribe,
    Will,
)
from cluster.mqtt.properties import Property
from pixiu.errors import InvalidArgument
from tests.cluster.mqtt.test_codec_malformed import later, packet


class Place(Enum):
    """Something that the versions have differently."""

    PROPERTIES = 1
    """The length of no properties; MQTT 3.1.1 has none."""


P: Final = Place.PROPERTIES
Fields = tuple[bytes | Place, ...]
BOTH: Final = pytest.mark.parametrize("dialect", [MQTT_3_1_1, MQTT_5])


def in_words_of(dialect: Dialect, fields: Fields) -> bytes:
    return b"".join(field if isinstance(field, bytes) else b"\0" * (dialect is MQTT_5) for field in fields)


def connect(dialect: Dialect, flags: int, payload: Fields, name: bytes = b"\0\4MQTT") -> bytes:
    return packet(0x10, name + bytes((dialect, flags, 0, 60)) + in_words_of(dialect, (P, *payload)))


CONNECTS: list[tuple[str, int, Fields, Reason]] = [
    ("MQTT-3.1.2-9 MQTT5-3.1.2-9 a will flag without a will", 6, (b"\0\1c",), Reason.TRUNCATED),
    ("MQTT-3.1.2-9 MQTT5-3.1.2-9 a will flag without the will's message", 6, (b"\0\1c", P, b"\0\1t"), Reason.TRUNCATED),
    ("MQTT5-3.1.2-11 the will's QoS without a will", 0x0A, (b"\0\1c",), Reason.WILL_FLAGS_WITHOUT_WILL),
    ("MQTT5-3.1.2-12 a will of QoS 3", 0x1E, (b"\0\1c", P, b"\0\1t\0\1w"), Reason.WILL_QOS_3),
    ("MQTT5-3.1.2-13 will retain without a will", 0x22, (b"\0\1c",), Reason.WILL_FLAGS_WITHOUT_WILL),
    ("MQTT-3.1.2-18 MQTT5-3.1.2-16 a user name without its flag", 2, (b"\0\1c\0\1u",), Reason.TRAILING_BYTES),
    ("MQTT-3.1.2-19 MQTT5-3.1.2-17 the flag without a user name", 0x82, (b"\0\1c",), Reason.TRUNCATED),
    ("MQTT-3.1.2-20 MQTT5-3.1.2-18 a password without its flag", 0x82, (b"\0\1c\0\1u\0\1p",), Reason.TRAILING_BYTES),
    ("MQTT-3.1.2-21 MQTT5-3.1.2-19 the flag without a password", 0xC2, (b"\0\1c\0\1u",), Reason.TRUNCATED),
    ("MQTT-3.1.3-3 MQTT5-3.1.3-3 no client identifier", 2, (), Reason.TRUNCATED),
    ("MQTT-3.1.3-4 MQTT5-3.1.3-4 a client identifier that is not UTF-8", 2, (b"\0\1\xff",), Reason.INVALID_UTF8),
    ("MQTT-3.1.3-10 MQTT5-3.1.3-11 a will's topic that is not UTF-8", 6, (b"\0\1c", P, b"\0\1\xff\0\1w"), Reason.INVALID_UTF8),
    ("MQTT-3.1.3-11 MQTT5-3.1.3-12 a user name that is not UTF-8", 0x82, (b"\0\1c\0\1\xff",), Reason.INVALID_UTF8),
]  # fmt: skip
PACKETS: list[tuple[str, int, Fields, Reason]] = [
    ("MQTT5-1.5.4-1 ill-formed UTF-8", 0x30, (b"\0\1\xff", P), Reason.INVALID_UTF8),
    ("MQTT5-1.5.4-1 a surrogate", 0x30, (b"\0\3\xed\xa0\x80", P), Reason.INVALID_UTF8),
    ("MQTT5-1.5.4-2 MQTT-4.7.3-2 MQTT5-4.7.3-2 U+0000 in a topic", 0x30, (b"\0\1\0", P), Reason.NUL_IN_STRING),
    ("MQTT5-1.5.4-2 MQTT-4.7.3-2 MQTT5-4.7.3-2 U+0000 in a filter", 0x82, (b"\0\1", P, b"\0\1\0\0"), Reason.NUL_IN_STRING),
    ("MQTT5-2.1.3-1 flags of PUBACK", 0x41, (b"\0\1",), Reason.RESERVED_FLAGS),
    ("MQTT5-2.1.3-1 flags of PUBREC", 0x52, (b"\0\1",), Reason.RESERVED_FLAGS),
    ("MQTT5-2.1.3-1 flags of PUBCOMP", 0x74, (b"\0\1",), Reason.RESERVED_FLAGS),
    ("MQTT5-2.1.3-1 flags of PINGREQ", 0xC8, (), Reason.RESERVED_FLAGS),
    ("MQTT5-3.3.1-2 DUP with QoS 0", 0x38, (b"\0\1a", P), Reason.DUP_WITH_QOS_0),
    ("MQTT5-3.3.1-4 QoS 3", 0x36, (b"\0\1a\0\1", P), Reason.PUBLISH_QOS_3),
    ("MQTT-3.3.2-1 MQTT5-3.3.2-1 no topic", 0x30, (), Reason.TRUNCATED),
    ("MQTT-3.3.2-1 MQTT5-3.3.2-1 a topic that is not UTF-8", 0x32, (b"\0\1\xff\0\1", P), Reason.INVALID_UTF8),
    ("MQTT5-3.6.1-1 flags of PUBREL", 0x60, (b"\0\1",), Reason.RESERVED_FLAGS),
    ("MQTT5-3.8.1-1 flags of SUBSCRIBE", 0x80, (b"\0\1", P, b"\0\1a\0"), Reason.RESERVED_FLAGS),
    ("MQTT-3.8.3-1 MQTT5-3.8.3-1 a filter that is not UTF-8", 0x82, (b"\0\1", P, b"\0\1\xff\0"), Reason.INVALID_UTF8),
    ("MQTT5-3.8.3-2 no filter in SUBSCRIBE", 0x82, (b"\0\1", P), Reason.EMPTY_FILTER_LIST),
    ("MQTT5-3.10.1-1 flags of UNSUBSCRIBE", 0xA0, (b"\0\1", P, b"\0\1a"), Reason.RESERVED_FLAGS),
    ("MQTT-3.10.3-1 MQTT5-3.10.3-1 a filter that is not UTF-8", 0xA2, (b"\0\1", P, b"\0\1\xff"), Reason.INVALID_UTF8),
    ("MQTT5-3.10.3-2 no filter in UNSUBSCRIBE", 0xA2, (b"\0\1", P), Reason.EMPTY_FILTER_LIST),
    ("MQTT5-3.14.1-1 flags of DISCONNECT", 0xE1, (), Reason.RESERVED_FLAGS),
    ("MQTT-4.7.1-1 MQTT5-4.7.0-1 # in a topic", 0x30, (b"\0\3a/#", P), Reason.WILDCARD_IN_TOPIC),
    ("MQTT-4.7.1-1 MQTT5-4.7.0-1 + in a topic", 0x32, (b"\0\3+/a\0\1", P), Reason.WILDCARD_IN_TOPIC),
    ("MQTT5-4.7.3-1 an empty topic", 0x30, (b"\0\0", P), Reason.EMPTY_TOPIC),
    ("MQTT5-4.7.3-1 an empty filter", 0x82, (b"\0\1", P, b"\0\0\0"), Reason.EMPTY_FILTER),
]  # fmt: skip
FIVE: list[tuple[str, bytes, Reason]] = [
    ("MQTT5-1.5.7-1 a pair's name that is not UTF-8", packet(0x30, b"\0\1a\7\x26\0\1\xff\0\1b"), Reason.INVALID_UTF8),
    ("MQTT5-1.5.7-1 a pair's value that is not UTF-8", packet(0x30, b"\0\1a\7\x26\0\1b\0\1\xff"), Reason.INVALID_UTF8),
    ("MQTT5-1.5.7-1 a pair's value with U+0000", packet(0x30, b"\0\1a\7\x26\0\1b\0\1\0"), Reason.NUL_IN_STRING),
    ("MQTT5-3.3.2-13 a response topic that is not UTF-8", packet(0x30, b"\0\1a\4\x08\0\1\xff"), Reason.INVALID_UTF8),
    ("MQTT5-3.3.2-19 a content type that is not UTF-8", packet(0x30, b"\0\1a\4\x03\0\1\xff"), Reason.INVALID_UTF8),
    ("MQTT5-3.15.1-1 flags of AUTH", packet(0xF1, b"\x18\3\x15\0\0"), Reason.RESERVED_FLAGS),
]  # fmt: skip


@BOTH
@pytest.mark.parametrize(("flags", "payload", "reason"), [pytest.param(*rest, id=name) for name, *rest in CONNECTS])
def test_a_connect_that_is_malformed_in_both_versions(dialect: Dialect, flags: int, payload: Fields, reason: Reason) -> None:
    decoder = codec.Decoder(Side.SERVER)
    assert decoder.feed(connect(dialect, flags, payload)) == []
    assert decoder.error is not None
    assert (decoder.error.reason, decoder.error.dialect) == (reason, dialect)


@BOTH
@pytest.mark.parametrize(("first", "fields", "reason"), [pytest.param(*rest, id=name) for name, *rest in PACKETS])
def test_a_packet_that_is_malformed_in_both_versions(dialect: Dialect, first: int, fields: Fields, reason: Reason) -> None:
    decoder = later(Side.SERVER, dialect)
    assert decoder.feed(packet(first, in_words_of(dialect, fields))) == []
    assert decoder.error is not None
    assert decoder.error.reason is reason


@pytest.mark.parametrize(("data", "reason"), [pytest.param(*rest, id=name) for name, *rest in FIVE])
def test_a_packet_that_is_malformed_in_mqtt_5(data: bytes, reason: Reason) -> None:
    decoder = later(Side.SERVER, MQTT_5)
    assert decoder.feed(data) == []
    assert decoder.error is not None
    assert decoder.error.reason is reason


def test_mqtt5_3_1_2_1_another_protocol_name_is_not_served() -> None:
    decoder = codec.Decoder(Side.SERVER)
    assert decoder.feed(connect(MQTT_5, 2, (b"\0\1c",), b"\0\4MQTS")) == []
    assert decoder.error is not None
    assert decoder.error.reason is Reason.PROTOCOL_NAME


@BOTH
def test_the_fields_of_a_connect_come_in_their_order(dialect: Dialect) -> None:
    """MQTT-3.1.3-1 MQTT5-3.1.3-1; the will's QoS and RETAIN are those of the flags: MQTT-3.1.2-9 MQTT5-3.1.2-9."""
    data = connect(dialect, 0xF6, (b"\0\1c", P, b"\0\1t\0\1w", b"\0\1u", b"\0\1p"))
    (found,) = codec.Decoder(Side.SERVER).feed(data)
    assert isinstance(found, Connect)
    assert found.will is not None
    assert (found.client_id, found.user_name, found.password) == ("c", "u", b"p")
    assert (found.will.topic, found.will.payload, found.will.qos, found.will.retain) == ("t", b"w", 2, True)
    assert not found.properties
    assert not found.will.properties


@BOTH
def test_a_byte_order_mark_is_a_character_of_its_string(dialect: Dialect) -> None:
    """MQTT-1.5.3-3 MQTT5-1.5.4-3: nothing is stripped."""
    mark = "\ufeffa"
    for sent in (
        Connect(mark, True, 0, mark, b"", Will(mark, b""), dialect),
        Publish(mark, b""),
        Subscribe(1, ((mark, 0),)),
        Unsubscribe(1, (mark,)),
    ):
        data = codec.encode(sent, dialect)
        assert data.count(b"\xef\xbb\xbfa") == (3 if isinstance(sent, Connect) else 1)
        assert codec.decode(data, Side.SERVER, dialect) == sent


@BOTH
def test_what_is_sent_has_the_flags_of_its_type(dialect: Dialect) -> None:
    """MQTT-2.2.2-1 MQTT5-2.1.3-1."""
    answer = (0,) if dialect is MQTT_5 else ()
    sent: list[tuple[Packet, int]] = [
        (Connect("c", dialect=dialect), 0x10), (Connack(True, 0), 0x20), (Publish("a", b""), 0x30), (Puback(1), 0x40),
        (Pubrec(1), 0x50), (Pubrel(1), 0x62), (Pubcomp(1), 0x70), (Subscribe(1, (("a", 0),)), 0x82), (Suback(1, (0,)), 0x90),
        (Unsubscribe(1, ("a",)), 0xA2), (Unsuback(1, answer), 0xB0), (Pingreq(), 0xC0), (Pingresp(), 0xD0), (Disconnect(), 0xE0),
    ]  # fmt: skip
    for found, first in sent:
        assert codec.encode(found, dialect)[0] == first
    assert codec.PINGRESP[0] == 0xD0
    assert {data[0] for data in (codec.encode_pubacks([1]), codec.encode_pubacks([1], {1}))} == {0x40, 0x50}
    if dialect is MQTT_5:
        assert codec.encode(Auth(0x18, {Property.AUTHENTICATION_METHOD: "x"}), MQTT_5)[0] == 0xF0


@BOTH
def test_a_topic_has_at_most_65535_bytes(dialect: Dialect) -> None:
    """MQTT-4.7.3-3 MQTT5-4.7.3-3: the longest arrives, and none is longer."""
    longest = "é" * 32767 + "e"
    for sent in (Publish(longest, b""), Subscribe(1, ((longest, 0),))):
        assert codec.decode(codec.encode(sent, dialect), Side.SERVER, dialect) == sent
    for refused in (Publish(longest + "e", b""), Subscribe(1, ((longest + "e", 0),))):
        with pytest.raises(InvalidArgument):
            codec.encode(refused, dialect)


def test_no_properties_are_a_length_of_0_and_lengths_have_no_byte_too_many() -> None:
    """MQTT5-2.2.2-1, MQTT5-1.5.5-1, and MQTT5-2.2.1-2: a PUBLISH of QoS 0 has no packet identifier."""
    assert codec.encode(Publish("a", b"x"), MQTT_5) == b"\x30\x05\x00\x01a\x00x"
    assert codec.encode(Connack(False, 0), MQTT_5) == b"\x20\x03\x00\x00\x00"
    assert codec.encode(Suback(1, (0,)), MQTT_5) == b"\x90\x04\x00\x01\x00\x00"
    assert codec.encode(Unsuback(1, (0,)), MQTT_5) == b"\xb0\x04\x00\x01\x00\x00"
    for size, length in ((127, b"\x7f"), (128, b"\x80\x01"), (16383, b"\xff\x7f"), (16384, b"\x80\x80\x01")):
        data = codec.encode(Publish("a", b"", properties={Property.CONTENT_TYPE: "x" * (size - 3)}), MQTT_5)
        begin = data.index(b"\0\1a") + 3
        assert data[begin : begin + len(length) + 1] == length + b"\x03"


def test_the_flags_of_connack_are_session_present_alone() -> None:
    """MQTT5-3.2.2-1, and MQTT5-3.2.2-6: no refusal has it."""
    assert codec.encode(Connack(True, 0), MQTT_5)[2] == 1
    for code in REASON_CODES[Connack]:
        assert codec.encode(Connack(False, code), MQTT_5)[2] == 0
        if code:
            with pytest.raises(InvalidArgument):
                codec.encode(Connack(True, code), MQTT_5)


REASON_CODES: dict[type[Packet], set[int]] = {
    Connack: {0, *range(0x80, 0x8B), 0x8C, 0x90, 0x95, 0x97, 0x99, 0x9A, 0x9B, 0x9C, 0x9D, 0x9F},
    Puback: {0, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99},
    Pubrec: {0, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99},
    Pubrel: {0, 0x92},
    Pubcomp: {0, 0x92},
    Suback: {0, 1, 2, 0x80, 0x83, 0x87, 0x8F, 0x91, 0x97, 0x9E, 0xA1, 0xA2},
    Unsuback: {0, 0x11, 0x80, 0x83, 0x87, 0x8F, 0x91},
    Disconnect: {
        0, 4, *range(0x80, 0x84), 0x87, 0x89, 0x8B, 0x8D, 0x8E, 0x8F, 0x90, *range(0x93, 0xA3),
    },
    Auth: {0, 0x18, 0x19},
}  # fmt: skip
"""The tables of MQTT 5. MQTT5-3.2.2-8 MQTT5-3.4.2-1 MQTT5-3.5.2-1 MQTT5-3.6.2-1 MQTT5-3.7.2-1 MQTT5-3.9.3-2 MQTT5-3.11.3-2
MQTT5-3.14.2-1 MQTT5-3.15.2-1."""


def with_code(kind: Callable[..., Packet], code: int) -> Packet:
    if kind is Connack:
        return Connack(False, code)
    if kind is Disconnect:
        return Disconnect(code)
    if kind is Auth:
        return Auth(code, {Property.AUTHENTICATION_METHOD: "x"})
    return kind(1, (code,) if kind in (Suback, Unsuback) else code)


@pytest.mark.parametrize("kind", REASON_CODES, ids=lambda kind: PacketType[kind.__name__.upper()].name)
def test_a_packet_has_the_reason_codes_of_its_table_alone(kind: type[Packet]) -> None:
    for code in range(256):
        if code in REASON_CODES[kind]:
            assert codec.encode(with_code(kind, code), MQTT_5)
        else:
            with pytest.raises(InvalidArgument):
                codec.encode(with_code(kind, code), MQTT_5)
