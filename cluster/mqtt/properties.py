"""The properties of MQTT 5: one table of their forms and packets, decoding and encoding. Pure.

    variable byte integer   length of what follows
    …                       identifier (one byte), value; again

Source: OASIS MQTT 5.0 section 2.2.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Final, NamedTuple

from cluster.mqtt.packets import MAX_STRING_BYTES, MalformedPacket, PacketType, Properties, Reason
from pixiu.errors import InvalidArgument

MAX_USER_PROPERTIES: Final = 64
"""Limit of the user properties of one packet, and of a will."""
MAX_SUBSCRIPTION_IDENTIFIERS: Final = 1024
"""Limit of the subscription identifiers of one PUBLISH to a client."""
MAX_VARIABLE: Final = 268_435_455
WILL: Final = 0
"""In place of a packet type: the properties of a will."""


class Property(IntEnum):
    """A property's identifier. Source: MQTT 5.0 table 2.4."""

    PAYLOAD_FORMAT = 0x01
    MESSAGE_EXPIRY = 0x02
    CONTENT_TYPE = 0x03
    RESPONSE_TOPIC = 0x08
    CORRELATION_DATA = 0x09
    SUBSCRIPTION_IDENTIFIER = 0x0B
    SESSION_EXPIRY = 0x11
    ASSIGNED_CLIENT_ID = 0x12
    SERVER_KEEP_ALIVE = 0x13
    AUTHENTICATION_METHOD = 0x15
    AUTHENTICATION_DATA = 0x16
    REQUEST_PROBLEM = 0x17
    WILL_DELAY = 0x18
    REQUEST_RESPONSE = 0x19
    RESPONSE_INFORMATION = 0x1A
    SERVER_REFERENCE = 0x1C
    REASON_STRING = 0x1F
    RECEIVE_MAXIMUM = 0x21
    TOPIC_ALIAS_MAXIMUM = 0x22
    TOPIC_ALIAS = 0x23
    MAXIMUM_QOS = 0x24
    RETAIN_AVAILABLE = 0x25
    USER = 0x26
    MAXIMUM_PACKET_SIZE = 0x27
    WILDCARDS_AVAILABLE = 0x28
    IDENTIFIERS_AVAILABLE = 0x29
    SHARED_AVAILABLE = 0x2A


class Form(IntEnum):
    """A form of values. Those of numbers without a variable length are their numbers of bytes."""

    VARIABLE = 0
    BYTE = 1
    U16 = 2
    U32 = 4
    BINARY = 5
    TEXT = 6
    PAIR = 7


class Rule(NamedTuple):
    """A property's form, the packets that may have it, and the values that a number may have."""

    form: Form
    packets: frozenset[int]
    least: int = 0
    most: int = 0xFFFF_FFFF
    times: int = 1
    """Times that it may appear. With more than one its value is a tuple."""


_P = PacketType
_PUBLISHED: Final = frozenset({_P.PUBLISH, WILL})
_ANSWERED: Final = frozenset(
    {_P.CONNACK, _P.PUBACK, _P.PUBREC, _P.PUBREL, _P.PUBCOMP, _P.SUBACK, _P.UNSUBACK, _P.DISCONNECT, _P.AUTH}
)
_CONNECT: Final = frozenset({_P.CONNECT})
_CONNACK: Final = frozenset({_P.CONNACK})
_BOTH: Final = frozenset({_P.CONNECT, _P.CONNACK})
RULES: Final[dict[int, Rule]] = {
    Property.PAYLOAD_FORMAT: Rule(Form.BYTE, _PUBLISHED, most=1),
    Property.MESSAGE_EXPIRY: Rule(Form.U32, _PUBLISHED),
    Property.CONTENT_TYPE: Rule(Form.TEXT, _PUBLISHED),
    Property.RESPONSE_TOPIC: Rule(Form.TEXT, _PUBLISHED),
    Property.CORRELATION_DATA: Rule(Form.BINARY, _PUBLISHED),
    Property.SUBSCRIPTION_IDENTIFIER: Rule(
        Form.VARIABLE, frozenset({_P.PUBLISH, _P.SUBSCRIBE}), 1, MAX_VARIABLE, MAX_SUBSCRIPTION_IDENTIFIERS
    ),
    Property.SESSION_EXPIRY: Rule(Form.U32, _BOTH | {_P.DISCONNECT}),
    Property.ASSIGNED_CLIENT_ID: Rule(Form.TEXT, _CONNACK),
    Property.SERVER_KEEP_ALIVE: Rule(Form.U16, _CONNACK),
    Property.AUTHENTICATION_METHOD: Rule(Form.TEXT, _BOTH | {_P.AUTH}),
    Property.AUTHENTICATION_DATA: Rule(Form.BINARY, _BOTH | {_P.AUTH}),
    Property.REQUEST_PROBLEM: Rule(Form.BYTE, _CONNECT, most=1),
    Property.WILL_DELAY: Rule(Form.U32, frozenset({WILL})),
    Property.REQUEST_RESPONSE: Rule(Form.BYTE, _CONNECT, most=1),
    Property.RESPONSE_INFORMATION: Rule(Form.TEXT, _CONNACK),
    Property.SERVER_REFERENCE: Rule(Form.TEXT, _CONNACK | {_P.DISCONNECT}),
    Property.REASON_STRING: Rule(Form.TEXT, _ANSWERED),
    Property.RECEIVE_MAXIMUM: Rule(Form.U16, _BOTH, least=1),
    Property.TOPIC_ALIAS_MAXIMUM: Rule(Form.U16, _BOTH),
    Property.TOPIC_ALIAS: Rule(Form.U16, frozenset({_P.PUBLISH}), least=1),
    Property.MAXIMUM_QOS: Rule(Form.BYTE, _CONNACK, most=1),
    Property.RETAIN_AVAILABLE: Rule(Form.BYTE, _CONNACK, most=1),
    Property.USER: Rule(
        Form.PAIR, _PUBLISHED | _ANSWERED | _CONNECT | {_P.SUBSCRIBE, _P.UNSUBSCRIBE}, times=MAX_USER_PROPERTIES
    ),
    Property.MAXIMUM_PACKET_SIZE: Rule(Form.U32, _BOTH, least=1),
    Property.WILDCARDS_AVAILABLE: Rule(Form.BYTE, _CONNACK, most=1),
    Property.IDENTIFIERS_AVAILABLE: Rule(Form.BYTE, _CONNACK, most=1),
    Property.SHARED_AVAILABLE: Rule(Form.BYTE, _CONNACK, most=1),
}  # fmt: skip
"""Every property of MQTT 5. A client's own rules are in the decoder: no subscription identifiers in a PUBLISH to a server."""
_ERRORS: Final = {Property.TOPIC_ALIAS: Reason.TOPIC_ALIAS_ZERO}


def number(properties: Properties | None, which: Property, otherwise: int) -> int:
    """A property that is a number; `otherwise` if it is missing."""
    value = properties.get(which) if properties else None
    return value if isinstance(value, int) else otherwise


def text(properties: Properties | None, which: Property) -> str | None:
    """A property that is a text; None if it is missing."""
    value = properties.get(which) if properties else None
    return value if isinstance(value, str) else None


def variable_integer(body: bytes, at: int) -> tuple[int, int]:
    """Read a variable byte integer; returns it and the position of what follows. Raises `MalformedPacket`."""
    value = 0
    for index in range(4):
        if at + index >= len(body):
            raise MalformedPacket(Reason.TRUNCATED)
        byte = body[at + index]
        value |= (byte & 127) << 7 * index
        if byte < 128:
            return value, at + index + 1
    raise MalformedPacket(Reason.VARIABLE_INTEGER)


def decode_properties(body: bytes, at: int, packet: int) -> tuple[Properties | None, int]:
    """Read the properties of a packet (or of a `WILL`); None if there are none. Returns them and the position of what follows.
    Raises `MalformedPacket`, and `UnicodeDecodeError` for a text that is not UTF-8."""
    if at < len(body) and not body[at]:
        return None, at + 1
    size, at = variable_integer(body, at)
    end = at + size
    if end > len(body):
        raise MalformedPacket(Reason.TRUNCATED)
    found: dict[int, object] = {}
    times: dict[int, int] = {}
    while at < end:
        rule = RULES.get(body[at])
        if rule is None or packet not in rule.packets:
            raise MalformedPacket(Reason.PROPERTY_NOT_ALLOWED)
        which = body[at]
        count = times[which] = times.get(which, 0) + 1
        once = rule.times == 1 or (which == Property.SUBSCRIPTION_IDENTIFIER and packet == PacketType.SUBSCRIBE)
        if count > (1 if once else rule.times):
            raise MalformedPacket(Reason.PROPERTY_TWICE if once else Reason.TOO_MANY_PROPERTIES)
        value, at = _value(body, at + 1, end, rule.form)
        if isinstance(value, int) and not rule.least <= value <= rule.most:
            raise MalformedPacket(_ERRORS.get(Property(which), Reason.PROPERTY_VALUE))
        if rule.times == 1:
            found[which] = value
        elif count == 1:
            found[which] = [value]
        else:
            found[which].append(value)  # type: ignore[attr-defined]
    for which in (Property.USER, Property.SUBSCRIPTION_IDENTIFIER):
        if which in found:
            found[which] = tuple(found[which])  # type: ignore[arg-type]
    return found or None, at


def _value(body: bytes, at: int, end: int, form: Form) -> tuple[object, int]:
    if form is Form.VARIABLE:
        value, after = variable_integer(body, at)
        if after > end:
            raise MalformedPacket(Reason.TRUNCATED)
        return value, after
    if form <= Form.U32:
        after = at + form
        if after > end:
            raise MalformedPacket(Reason.TRUNCATED)
        return int.from_bytes(body[at:after], "big"), after
    raw, at = _binary(body, at, end)
    if form is Form.BINARY:
        return raw, at
    if form is Form.TEXT:
        return _text(raw), at
    second, at = _binary(body, at, end)
    return (_text(raw), _text(second)), at


def _binary(body: bytes, at: int, end: int) -> tuple[bytes, int]:
    begin = at + 2
    after = begin + int.from_bytes(body[at:begin], "big")
    if begin > end or after > end:
        raise MalformedPacket(Reason.TRUNCATED)
    return body[begin:after], after


def _text(raw: bytes) -> str:
    if b"\0" in raw:
        raise MalformedPacket(Reason.NUL_IN_STRING)
    return raw.decode()


def encode_variable(value: int) -> bytes:
    """Encode a variable byte integer. Raises `InvalidArgument`."""
    if not 0 <= value <= MAX_VARIABLE:
        raise InvalidArgument(f"a variable byte integer is from 0 to {MAX_VARIABLE}, not {value}")
    if value < 0x80:
        return bytes((value,))
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def encode_property(which: int, value: object) -> bytes:
    """Encode one property, with all its values if it may appear more than once. Raises `InvalidArgument`."""
    rule = RULES[which]
    if rule.times > 1:
        if not isinstance(value, tuple) or len(value) > rule.times:
            raise InvalidArgument(f"{Property(which).name} is a tuple of at most {rule.times} values")
        return b"".join([bytes((which,)) + _encode_value(which, rule, one) for one in value])
    return bytes((which,)) + _encode_value(which, rule, value)


def encode_properties(properties: Mapping[int, object] | None, packet: int) -> bytes:
    """Encode the properties of a packet (or of a `WILL`), with their length. Raises `InvalidArgument`."""
    if not properties:
        return b"\0"
    for which in properties:
        if which not in RULES or packet not in RULES[which].packets:
            raise InvalidArgument(f"property {which:#x} does not belong to packet type {packet}")
    body = b"".join([encode_property(which, value) for which, value in properties.items()])
    return encode_variable(len(body)) + body


def _encode_value(which: int, rule: Rule, value: object) -> bytes:
    form = rule.form
    if form <= Form.U32:
        if not isinstance(value, int) or not rule.least <= value <= min(rule.most, (1 << 8 * form) - 1 if form else MAX_VARIABLE):
            raise InvalidArgument(f"{value!r} is out of range for {Property(which).name}")
        return value.to_bytes(form, "big") if form else encode_variable(value)
    if form is Form.PAIR:
        if not isinstance(value, tuple) or len(value) != 2:
            raise InvalidArgument(f"{Property(which).name} has pairs of texts")
        return _encode_text(value[0]) + _encode_text(value[1])
    return _encode_text(value) if form is Form.TEXT else _encode_binary(value)


def _encode_text(value: object) -> bytes:
    if not isinstance(value, str) or "\0" in value:
        raise InvalidArgument("this property is a text without the character U+0000")
    try:
        return _encode_binary(value.encode())
    except UnicodeEncodeError:
        raise InvalidArgument("a string with lone surrogates cannot be sent") from None


def _encode_binary(value: object) -> bytes:
    if not isinstance(value, bytes) or len(value) > MAX_STRING_BYTES:
        raise InvalidArgument(f"this property has at most {MAX_STRING_BYTES} bytes")
    return len(value).to_bytes(2, "big") + value
