"""Packets of MQTT 3.1, 3.1.1 and 5 to bytes. `Decoder` and `decode`, for the other direction, can be imported from here. No I/O.

Source: OASIS MQTT 3.1.1 and 5.0, sections 2 and 3.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, Final

from cluster.mqtt.decoder import Decoder, decode
from cluster.mqtt.fields import LAYOUTS, Field
from cluster.mqtt.packets import (
    FIXED_FLAGS,
    MAX_PACKET_ID,
    MAX_REMAINING_LENGTH,
    MAX_STRING_BYTES,
    MQTT_3_1_1,
    MQTT_5,
    PROTOCOL_NAMES,
    SUBACK_FAILURE,
    Auth,
    Connack,
    ConnackCode,
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
    Suback,
    Subscribe,
    UnacceptableConnect,
    Unsuback,
    Unsubscribe,
)
from cluster.mqtt.properties import WILL, Property, encode_properties
from cluster.mqtt.reason_codes import ALLOWED, DISCONNECTS
from pixiu.errors import InvalidArgument
from pixiu.placement.topics import has_wildcard, is_filter

__all__ = [
    "DISCONNECT",
    "PINGREQ",
    "PINGRESP",
    "Decoder",
    "decode",
    "encode",
    "encode_pubacks",
    "encode_publish",
    "encode_publish_parts",
    "encode_publishes",
    "publish_qos0",
    "publish_qos0_parts",
    "topic_prefix",
]

_SHORT_HEADS: Final = tuple(bytes((PacketType.PUBLISH << 4, size)) for size in range(128))
PINGREQ: Final = bytes((PacketType.PINGREQ << 4, 0))
PINGRESP: Final = bytes((PacketType.PINGRESP << 4, 0))
DISCONNECT: Final = bytes((PacketType.DISCONNECT << 4, 0))


def _head(first: int, size: int) -> bytes:
    """Encode the fixed header. Raises `InvalidArgument` when the packet is longer than MQTT allows."""
    if size < 0x80:
        return bytes((first, size))
    if size < 0x4000:
        return bytes((first, size & 127 | 128, size >> 7))
    if size < 0x200000:
        return bytes((first, size & 127 | 128, size >> 7 & 127 | 128, size >> 14))
    if size > MAX_REMAINING_LENGTH:
        raise InvalidArgument(f"an MQTT packet has at most {MAX_REMAINING_LENGTH} bytes, this one {size}")
    return bytes((first, size & 127 | 128, size >> 7 & 127 | 128, size >> 14 & 127 | 128, size >> 21))


def publish_qos0(topic_and_payload: bytes) -> bytes:
    """Encode a PUBLISH of QoS 0 from a ready body: u16 big-endian topic length, topic, payload. The body is not checked.

    The body of a record with flag TOPIC has this form, so a gateway only copies it.

    Source: docs/protocol.md, "Record", flag 16.
    """
    size = len(topic_and_payload)
    return (_SHORT_HEADS[size] if size < 128 else _head(0x30, size)) + topic_and_payload


def publish_qos0_parts(prefix: bytes, payload: bytes) -> bytes:
    """Encode a PUBLISH of QoS 0 from a cached `topic_prefix` and a payload. Neither is checked.

    Source: benchmarks/README.md: encode a PUBLISH once per message.
    """
    size = len(prefix) + len(payload)
    return b"".join((_SHORT_HEADS[size] if size < 128 else _head(0x30, size), prefix, payload))


def topic_prefix(topic: str) -> bytes:
    """Encode a topic as at the head of a PUBLISH: u16 big-endian length, UTF-8.

    Raises `InvalidArgument` for an empty one, one with wildcards or U+0000, and one above 65535 bytes.

    Source: OASIS MQTT 3.1.1 section 3.3.2.
    """
    if not topic or has_wildcard(topic):
        raise InvalidArgument(f"a topic to publish to has at least one character and no wildcard, this one is {topic[:80]!r}")
    return _encode_string(topic)


def encode_publish(
    topic: str, payload: bytes, qos: int = 0, packet_id: int = 0, *, retain: bool = False, dup: bool = False
) -> bytes:
    """Encode a PUBLISH of MQTT 3 of any QoS. Raises `InvalidArgument` for anything that a receiver would have to refuse.

    Source: OASIS MQTT 3.1.1 section 3.3.
    """
    return encode_publish_parts(topic_prefix(topic), payload, qos, packet_id, retain=retain, dup=dup)


def encode_publish_parts(
    prefix: bytes,
    payload: bytes,
    qos: int,
    packet_id: int,
    *,
    retain: bool = False,
    dup: bool = False,
    properties: bytes = b"",
) -> bytes:
    """`encode_publish` from a cached `topic_prefix`. `properties`: encoded with their length, for MQTT 5."""
    if qos not in (0, 1, 2) or (qos == 0 and (dup or packet_id)):
        raise InvalidArgument("QoS is 0, 1 or 2; DUP and a packet identifier need QoS 1 or 2")
    identifier = _encode_packet_id(packet_id) if qos else b""
    first = 0x30 | dup << 3 | qos << 1 | retain
    size = len(prefix) + len(identifier) + len(properties) + len(payload)
    return b"".join((_head(first, size), prefix, identifier, properties, payload))


def encode_publishes(
    prefix: bytes, payloads: Sequence[bytes], packet_ids: Sequence[int], *, dup: bool, properties: bytes = b""
) -> list[bytes]:
    """Encode a PUBLISH of QoS 1 for each payload, from a `topic_prefix` and unchecked identifiers. `properties`: as in
    `encode_publish_parts`. Raises `InvalidArgument`."""
    first = 0x32 | dup << 3
    head, size = b"", -1
    packets: list[bytes] = []
    for payload, packet_id in zip(payloads, packet_ids, strict=True):
        if len(payload) != size:
            size = len(payload)
            head = _head(first, len(prefix) + 2 + len(properties) + size) + prefix
        packets.append(head + packet_id.to_bytes(2, "big") + properties + payload)
    return packets


def encode_pubacks(packet_ids: Iterable[int], exactly: Container[int] = ()) -> bytes:
    """Encode PUBACKs end to end, with PUBRECs for identifiers of QoS 2. The identifiers are not checked."""
    if not exactly:
        return b"".join([b"\x40\x02" + packet_id.to_bytes(2, "big") for packet_id in packet_ids])
    return b"".join([(b"\x50\x02" if one in exactly else b"\x40\x02") + one.to_bytes(2, "big") for one in packet_ids])


def encode(packet: Packet, dialect: Dialect = MQTT_3_1_1) -> bytes:
    """Encode one packet; a CONNECT is of its own dialect. Raises `InvalidArgument` for what a receiver would have to refuse.

    Source: OASIS MQTT 3.1.1 and 5.0 section 3.
    """
    kind = _KINDS.get(type(packet))
    if kind is None:
        return _ENCODERS[type(packet)](packet, dialect)
    layout = LAYOUTS[dialect].get(kind)
    if layout is None:
        raise InvalidArgument(f"{kind.name} does not exist in {dialect.name}")
    values: dict[str, Any] = {name.value: getattr(packet, name.value) for name in _FIELDS[kind]}
    fields = layout.fields
    _check(kind, values, fields, dialect)
    size = len(fields)
    while size > layout.required and not values[fields[size - 1].value]:
        size -= 1
    return _packet(kind, b"".join([_encode_field(kind, field, values[field.value]) for field in fields[:size]]))


def _check(kind: PacketType, values: Mapping[str, Any], fields: tuple[Field, ...], dialect: Dialect) -> None:
    """Check what a field alone does not show. Raises `InvalidArgument`."""
    for name, value in values.items():
        if value and not any(field.value == name for field in fields):
            raise InvalidArgument(f"a {kind.name} of {dialect.name} has no {name}")
    if Field.CODES in fields:
        codes = values["codes"]
        allowed: Container[int] = ALLOWED[kind] if dialect is MQTT_5 else (0, 1, 2, SUBACK_FAILURE)
        if not codes or any(code not in allowed for code in codes):
            raise InvalidArgument(f"a {kind.name} has at least one code, each one of those allowed")
    if Field.CODE not in fields:
        return
    code = values["code"]
    if dialect is not MQTT_5:
        known = 0 <= code <= ConnackCode.NOT_AUTHORISED
    elif kind is PacketType.DISCONNECT:
        known = any(code in codes for codes in DISCONNECTS.values())
    else:
        known = code in ALLOWED[kind]
    if not known or (code and values.get("session_present")):
        raise InvalidArgument(f"{code} is not a code of {kind.name}, or it is a refusal with a session")
    if kind is PacketType.AUTH and Property.AUTHENTICATION_METHOD not in (values["properties"] or {}):
        raise InvalidArgument("an AUTH has an authentication method")


def _encode_field(kind: PacketType, field: Field, value: Any) -> bytes:
    if field is Field.PACKET_ID:
        return _encode_packet_id(value)
    if field is Field.PROPERTIES:
        return encode_properties(value, kind)
    return bytes(value) if field is Field.CODES else bytes((value,))


def _encode_string(text: str) -> bytes:
    try:
        raw = text.encode()
    except UnicodeEncodeError:
        raise InvalidArgument("a string with lone surrogates cannot be sent") from None
    if b"\0" in raw:
        raise InvalidArgument("a string with the character U+0000 cannot be sent")
    return _encode_binary(raw)


def _encode_binary(raw: bytes) -> bytes:
    if len(raw) > MAX_STRING_BYTES:
        raise InvalidArgument(f"an MQTT field has at most {MAX_STRING_BYTES} bytes, this one {len(raw)}")
    return len(raw).to_bytes(2, "big") + raw


def _encode_packet_id(packet_id: int) -> bytes:
    if not 0 < packet_id <= MAX_PACKET_ID:
        raise InvalidArgument(f"a packet identifier is from 1 to {MAX_PACKET_ID}, not {packet_id}")
    return packet_id.to_bytes(2, "big")


def _encode_filter(name: str) -> bytes:
    if not name or not is_filter(name):
        raise InvalidArgument(f"{name[:80]!r} is not a topic filter: wildcards stand alone in their level, # in the last")
    return _encode_string(name)


def _encode_connect(packet: Connect, _: Dialect) -> bytes:
    dialect = packet.dialect
    if packet.password is not None and packet.user_name is None and dialect is not MQTT_5:
        raise InvalidArgument("a password needs a user name")
    if not 0 <= packet.keep_alive_s <= 0xFFFF:
        raise InvalidArgument(f"keep-alive is from 0 to 65535 seconds, not {packet.keep_alive_s}")
    flags, will = packet.clean_session << 1, packet.will
    fields = [_properties(packet.properties, PacketType.CONNECT, dialect), _encode_string(packet.client_id)]
    if will is not None:
        if will.qos not in (0, 1, 2):
            raise InvalidArgument(f"a will's QoS is 0, 1 or 2, not {will.qos}")
        flags |= 4 | will.qos << 3 | will.retain << 5
        fields += [_properties(will.properties, WILL, dialect), topic_prefix(will.topic), _encode_binary(will.payload)]
    if packet.user_name is not None:
        flags |= 0x80
        fields.append(_encode_string(packet.user_name))
    if packet.password is not None:
        flags |= 0x40
        fields.append(_encode_binary(packet.password))
    fixed = _encode_string(PROTOCOL_NAMES[dialect]) + bytes((dialect, flags)) + packet.keep_alive_s.to_bytes(2, "big")
    return _packet(PacketType.CONNECT, fixed + b"".join(fields))


def _encode_publish(packet: Publish, dialect: Dialect) -> bytes:
    properties = packet.properties
    by_alias = not packet.topic and properties and Property.TOPIC_ALIAS in properties
    return encode_publish_parts(
        b"\0\0" if by_alias else topic_prefix(packet.topic),
        packet.payload,
        packet.qos,
        packet.packet_id,
        retain=packet.retain,
        dup=packet.dup,
        properties=_properties(properties, PacketType.PUBLISH, dialect),
    )


def _encode_subscribe(packet: Subscribe, dialect: Dialect) -> bytes:
    most = 0x2E if dialect is MQTT_5 else 2
    if not packet.filters or any(not 0 <= options <= most or options & 3 == 3 for _, options in packet.filters):
        raise InvalidArgument("a SUBSCRIBE has at least one filter, and its QoS are 0, 1 or 2")
    body = [_encode_filter(name) + bytes((options,)) for name, options in packet.filters]
    return _filters_packet(PacketType.SUBSCRIBE, packet, dialect, body)


def _encode_unsubscribe(packet: Unsubscribe, dialect: Dialect) -> bytes:
    if not packet.filters:
        raise InvalidArgument("an UNSUBSCRIBE has at least one filter")
    return _filters_packet(PacketType.UNSUBSCRIBE, packet, dialect, [_encode_filter(name) for name in packet.filters])


def _filters_packet(kind: PacketType, packet: Subscribe | Unsubscribe, dialect: Dialect, body: list[bytes]) -> bytes:
    properties = _properties(packet.properties, kind, dialect)
    return _packet(kind, _encode_packet_id(packet.packet_id) + properties + b"".join(body))


def _properties(properties: Mapping[int, object] | None, packet: int, dialect: Dialect) -> bytes:
    if dialect is MQTT_5:
        return encode_properties(properties, packet)
    if properties:
        raise InvalidArgument(f"{dialect.name} has no properties")
    return b""


def _packet(kind: PacketType, body: bytes) -> bytes:
    return _head(kind << 4 | FIXED_FLAGS.get(kind, 0), len(body)) + body


def _encode_unacceptable(packet: UnacceptableConnect, _: Dialect) -> bytes:
    raise InvalidArgument("a CONNECT of another protocol level is only decoded")


_ENCODERS: Final[dict[type[Packet], Callable[[Any, Dialect], bytes]]] = {
    Publish: _encode_publish,
    Connect: _encode_connect,
    UnacceptableConnect: _encode_unacceptable,
    Subscribe: _encode_subscribe,
    Unsubscribe: _encode_unsubscribe,
}
_KINDS: Final[dict[type[Packet], PacketType]] = {
    Connack: PacketType.CONNACK,
    Puback: PacketType.PUBACK,
    Pubrec: PacketType.PUBREC,
    Pubrel: PacketType.PUBREL,
    Pubcomp: PacketType.PUBCOMP,
    Suback: PacketType.SUBACK,
    Unsuback: PacketType.UNSUBACK,
    Pingreq: PacketType.PINGREQ,
    Pingresp: PacketType.PINGRESP,
    Disconnect: PacketType.DISCONNECT,
    Auth: PacketType.AUTH,
}
_FIELDS: Final = {kind: layout.fields for kind, layout in LAYOUTS[MQTT_5].items()}
"""Fields of the packet types, as far as they have a layout: MQTT 5 has all that the others have."""
