"""MQTT 3.1.1 packets to bytes. `Decoder` and `decode`, for the other direction, can be imported from here too. No I/O.

Source: OASIS MQTT 3.1.1 sections 2 and 3.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, Final

from cluster.mqtt.decoder import Decoder, decode
from cluster.mqtt.packets import (
    FIXED_FLAGS,
    MAX_PACKET_ID,
    MAX_REMAINING_LENGTH,
    MAX_STRING_BYTES,
    PROTOCOL_LEVEL,
    PROTOCOL_NAME,
    SUBACK_FAILURE,
    Connack,
    ConnackCode,
    Connect,
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
    """Encode a PUBLISH of any QoS. Raises `InvalidArgument` for anything that a receiver would have to refuse.

    Source: OASIS MQTT 3.1.1 section 3.3.
    """
    return encode_publish_parts(topic_prefix(topic), payload, qos, packet_id, retain=retain, dup=dup)


def encode_publish_parts(
    prefix: bytes, payload: bytes, qos: int, packet_id: int, *, retain: bool = False, dup: bool = False
) -> bytes:
    """`encode_publish` from a cached `topic_prefix`."""
    if qos not in (0, 1, 2) or (qos == 0 and (dup or packet_id)):
        raise InvalidArgument("QoS is 0, 1 or 2; DUP and a packet identifier need QoS 1 or 2")
    identifier = _encode_packet_id(packet_id) if qos else b""
    first = 0x30 | dup << 3 | qos << 1 | retain
    return b"".join((_head(first, len(prefix) + len(identifier) + len(payload)), prefix, identifier, payload))


def encode_publishes(prefix: bytes, payloads: Sequence[bytes], packet_ids: Sequence[int], *, dup: bool) -> list[bytes]:
    """Encode a PUBLISH of QoS 1 for each payload, from a `topic_prefix` and unchecked identifiers. Raises `InvalidArgument`."""
    first = 0x32 | dup << 3
    head, size = b"", -1
    packets: list[bytes] = []
    for payload, packet_id in zip(payloads, packet_ids, strict=True):
        if len(payload) != size:
            size = len(payload)
            head = _head(first, len(prefix) + 2 + size) + prefix
        packets.append(head + packet_id.to_bytes(2, "big") + payload)
    return packets


def encode_pubacks(packet_ids: Iterable[int], exactly: Container[int] = ()) -> bytes:
    """Encode PUBACKs end to end, with PUBRECs for identifiers of QoS 2. The identifiers are not checked."""
    if not exactly:
        return b"".join([b"\x40\x02" + packet_id.to_bytes(2, "big") for packet_id in packet_ids])
    return b"".join([(b"\x50\x02" if one in exactly else b"\x40\x02") + one.to_bytes(2, "big") for one in packet_ids])


def encode(packet: Packet) -> bytes:
    """Encode one packet. Raises `InvalidArgument` for anything that a receiver would have to refuse.

    Source: OASIS MQTT 3.1.1 section 3.
    """
    return _ENCODERS[type(packet)](packet)


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


def _encode_connect(packet: Connect) -> bytes:
    if packet.password is not None and packet.user_name is None:
        raise InvalidArgument("a password needs a user name")
    if not 0 <= packet.keep_alive_s <= 0xFFFF:
        raise InvalidArgument(f"keep-alive is from 0 to 65535 seconds, not {packet.keep_alive_s}")
    flags, will = packet.clean_session << 1, packet.will
    fields = [_encode_string(packet.client_id)]
    if will is not None:
        if will.qos not in (0, 1, 2):
            raise InvalidArgument(f"a will's QoS is 0, 1 or 2, not {will.qos}")
        flags |= 4 | will.qos << 3 | will.retain << 5
        fields += [topic_prefix(will.topic), _encode_binary(will.payload)]
    if packet.user_name is not None:
        flags |= 0x80
        fields.append(_encode_string(packet.user_name))
    if packet.password is not None:
        flags |= 0x40
        fields.append(_encode_binary(packet.password))
    fixed = _encode_string(PROTOCOL_NAME) + bytes((PROTOCOL_LEVEL, flags)) + packet.keep_alive_s.to_bytes(2, "big")
    return _packet(PacketType.CONNECT, fixed + b"".join(fields))


def _encode_connack(packet: Connack) -> bytes:
    if not 0 <= packet.code <= ConnackCode.NOT_AUTHORISED or (packet.session_present and packet.code):
        raise InvalidArgument("a CONNACK's code is from 0 to 5, and a refusal has no session")
    return _packet(PacketType.CONNACK, bytes((packet.session_present, packet.code)))


def _encode_subscribe(packet: Subscribe) -> bytes:
    if not packet.filters or any(qos not in (0, 1, 2) for _, qos in packet.filters):
        raise InvalidArgument("a SUBSCRIBE has at least one filter, and its QoS are 0, 1 or 2")
    body = [_encode_filter(name) + bytes((qos,)) for name, qos in packet.filters]
    return _packet(PacketType.SUBSCRIBE, _encode_packet_id(packet.packet_id) + b"".join(body))


def _encode_unsubscribe(packet: Unsubscribe) -> bytes:
    if not packet.filters:
        raise InvalidArgument("an UNSUBSCRIBE has at least one filter")
    body = [_encode_filter(name) for name in packet.filters]
    return _packet(PacketType.UNSUBSCRIBE, _encode_packet_id(packet.packet_id) + b"".join(body))


def _encode_suback(packet: Suback) -> bytes:
    if not packet.codes or any(code not in (0, 1, 2, SUBACK_FAILURE) for code in packet.codes):
        raise InvalidArgument("a SUBACK has at least one code, each 0, 1, 2 or 0x80")
    return _packet(PacketType.SUBACK, _encode_packet_id(packet.packet_id) + bytes(packet.codes))


def _packet(kind: PacketType, body: bytes) -> bytes:
    return _head(kind << 4 | FIXED_FLAGS.get(kind, 0), len(body)) + body


def _identifier_only(kind: PacketType) -> Callable[[Any], bytes]:
    return lambda packet: _packet(kind, _encode_packet_id(packet.packet_id))


def _encode_unacceptable(packet: UnacceptableConnect) -> bytes:
    raise InvalidArgument("a CONNECT of another protocol level is only decoded")


_ENCODERS: Final[dict[type[Packet], Callable[[Any], bytes]]] = {
    Publish: lambda p: encode_publish(p.topic, p.payload, p.qos, p.packet_id, retain=p.retain, dup=p.dup),
    Connect: _encode_connect,
    UnacceptableConnect: _encode_unacceptable,
    Connack: _encode_connack,
    Puback: _identifier_only(PacketType.PUBACK),
    Pubrec: _identifier_only(PacketType.PUBREC),
    Pubrel: _identifier_only(PacketType.PUBREL),
    Pubcomp: _identifier_only(PacketType.PUBCOMP),
    Subscribe: _encode_subscribe,
    Suback: _encode_suback,
    Unsubscribe: _encode_unsubscribe,
    Unsuback: _identifier_only(PacketType.UNSUBACK),
    Pingreq: lambda _: PINGREQ,
    Pingresp: lambda _: PINGRESP,
    Disconnect: lambda _: DISCONNECT,
}
