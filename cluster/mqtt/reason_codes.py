"""The reason codes of MQTT 5, the packets that may carry each, and the return codes of MQTT 3 that stand for them. Pure.

Source: OASIS MQTT 5.0 section 2.4 and the tables of section 3; OASIS MQTT 3.1.1 table 3.1.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from cluster.mqtt.packets import PacketType, Side


class ReasonCode(IntEnum):
    """The outcome of an operation; 0x80 and above: it failed. Source: MQTT 5.0 table 2.6."""

    SUCCESS = 0x00
    """Also: granted QoS 0, normal disconnection."""
    GRANTED_QOS_1 = 0x01
    GRANTED_QOS_2 = 0x02
    DISCONNECT_WITH_WILL = 0x04
    NO_MATCHING_SUBSCRIBERS = 0x10
    NO_SUBSCRIPTION_EXISTED = 0x11
    CONTINUE_AUTHENTICATION = 0x18
    REAUTHENTICATE = 0x19
    UNSPECIFIED = 0x80
    MALFORMED_PACKET = 0x81
    PROTOCOL_ERROR = 0x82
    IMPLEMENTATION_SPECIFIC = 0x83
    UNSUPPORTED_PROTOCOL_VERSION = 0x84
    CLIENT_ID_NOT_VALID = 0x85
    BAD_USER_NAME_OR_PASSWORD = 0x86
    NOT_AUTHORISED = 0x87
    SERVER_UNAVAILABLE = 0x88
    SERVER_BUSY = 0x89
    BANNED = 0x8A
    SERVER_SHUTTING_DOWN = 0x8B
    BAD_AUTHENTICATION_METHOD = 0x8C
    KEEP_ALIVE_TIMEOUT = 0x8D
    SESSION_TAKEN_OVER = 0x8E
    TOPIC_FILTER_INVALID = 0x8F
    TOPIC_NAME_INVALID = 0x90
    PACKET_ID_IN_USE = 0x91
    PACKET_ID_NOT_FOUND = 0x92
    RECEIVE_MAXIMUM_EXCEEDED = 0x93
    TOPIC_ALIAS_INVALID = 0x94
    PACKET_TOO_LARGE = 0x95
    MESSAGE_RATE_TOO_HIGH = 0x96
    QUOTA_EXCEEDED = 0x97
    ADMINISTRATIVE_ACTION = 0x98
    PAYLOAD_FORMAT_INVALID = 0x99
    RETAIN_NOT_SUPPORTED = 0x9A
    QOS_NOT_SUPPORTED = 0x9B
    USE_ANOTHER_SERVER = 0x9C
    SERVER_MOVED = 0x9D
    SHARED_SUBSCRIPTIONS_NOT_SUPPORTED = 0x9E
    CONNECTION_RATE_EXCEEDED = 0x9F
    MAXIMUM_CONNECT_TIME = 0xA0
    SUBSCRIPTION_IDENTIFIERS_NOT_SUPPORTED = 0xA1
    WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED = 0xA2


_PUBLISHED: Final = frozenset({0x00, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99})
_RELEASED: Final = frozenset({0x00, 0x92})
ALLOWED: Final[dict[PacketType, frozenset[int]]] = {
    PacketType.CONNACK: frozenset(
        {0x00, 0x95, 0x97, 0x99, 0x9A, 0x9B, 0x9C, 0x9D, 0x9F, 0x90, 0x8C, *range(0x80, 0x8B)}
    ),
    PacketType.PUBACK: _PUBLISHED,
    PacketType.PUBREC: _PUBLISHED,
    PacketType.PUBREL: _RELEASED,
    PacketType.PUBCOMP: _RELEASED,
    PacketType.SUBACK: frozenset({0x00, 0x01, 0x02, 0x80, 0x83, 0x87, 0x8F, 0x91, 0x97, 0x9E, 0xA1, 0xA2}),
    PacketType.UNSUBACK: frozenset({0x00, 0x11, 0x80, 0x83, 0x87, 0x8F, 0x91}),
    PacketType.AUTH: frozenset({0x00, 0x18, 0x19}),
}  # fmt: skip
"""Reason codes by packet type; DISCONNECT's are `DISCONNECTS`."""
_DISCONNECTS: Final = frozenset({0x00, *range(0x80, 0x84), 0x90, *range(0x93, 0x9A)})
DISCONNECTS: Final[dict[Side, frozenset[int]]] = {
    Side.SERVER: _DISCONNECTS | {0x04},
    Side.CLIENT: _DISCONNECTS | {0x87, 0x89, 0x8B, 0x8D, 0x8E, 0x8F, *range(0x9A, 0xA3)},
}
"""Reason codes of DISCONNECT, by the side that reads it."""
_RETURN_CODES: Final = {
    ReasonCode.SUCCESS: 0,
    ReasonCode.UNSUPPORTED_PROTOCOL_VERSION: 1,
    ReasonCode.CLIENT_ID_NOT_VALID: 2,
    ReasonCode.BAD_USER_NAME_OR_PASSWORD: 4,
    ReasonCode.BAD_AUTHENTICATION_METHOD: 4,
    ReasonCode.NOT_AUTHORISED: 5,
    ReasonCode.BANNED: 5,
    ReasonCode.TOPIC_NAME_INVALID: 5,
}


def return_code(code: ReasonCode) -> int:
    """Return code of MQTT 3 for a CONNACK; what has no counterpart is 3, server unavailable."""
    return _RETURN_CODES.get(code, 3)


def name_of(code: int) -> str:
    """Name of a reason code for people, as in `not authorised`."""
    return ReasonCode(code).name.lower().replace("_", " ")
