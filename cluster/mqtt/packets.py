"""The control packets of MQTT 3.1, 3.1.1 and 5 as types, and the errors their bodies can have.

One set of types serves the three dialects: what a dialect does not have keeps its default.

Only `Publish` is a tuple: it is made once per message, and making a tuple is three times as fast as making a frozen dataclass. Its
`repr`, like those of secrets, shows sizes and no contents, so that a log line cannot leak them.

Source: OASIS MQTT 3.1.1 and 5.0 section 3; docs/mqtt.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Final, NamedTuple

from pixiu.errors import MalformedData
from pixiu.wire.record import MAX_RECORD_BYTES

Properties = Mapping[int, object]
"""Properties of a packet of MQTT 5: identifier → int, str, bytes, or a tuple of those (`cluster.mqtt.properties`)."""


class Dialect(IntEnum):
    """A version of MQTT; the value is its protocol level."""

    MQTT_3_1 = 3
    MQTT_3_1_1 = 4
    MQTT_5 = 5


MQTT_3_1: Final = Dialect.MQTT_3_1
MQTT_3_1_1: Final = Dialect.MQTT_3_1_1
MQTT_5: Final = Dialect.MQTT_5
PROTOCOL_NAME: Final = "MQTT"
PROTOCOL_NAMES: Final = {MQTT_3_1: "MQIsdp", MQTT_3_1_1: PROTOCOL_NAME, MQTT_5: PROTOCOL_NAME}
MAX_STRING_BYTES: Final = 0xFFFF
MAX_PACKET_ID: Final = 0xFFFF
MAX_REMAINING_LENGTH: Final = 268_435_455
FIRST_PACKET_BYTES: Final = 64 << 10
"""Largest packet from an unknown peer, header included, bytes: a token of 8 KiB and a will."""
LEAST_PACKET_BYTES: Final = 4096
"""Least limit of later packets, header included, bytes."""
MAX_PACKET_BYTES: Final = MAX_RECORD_BYTES + (64 << 10)
"""Default limit of later packets, bytes: the largest record and the longest topic, header included."""
MAX_FILTERS: Final = 1000
"""Default limit of filters in one SUBSCRIBE or UNSUBSCRIBE."""


class PacketType(IntEnum):
    """The upper four bits of a packet's first byte. Source: MQTT 3.1.1 table 2.1."""

    CONNECT = 1
    CONNACK = 2
    PUBLISH = 3
    PUBACK = 4
    PUBREC = 5
    PUBREL = 6
    PUBCOMP = 7
    SUBSCRIBE = 8
    SUBACK = 9
    UNSUBSCRIBE = 10
    UNSUBACK = 11
    PINGREQ = 12
    PINGRESP = 13
    DISCONNECT = 14
    AUTH = 15
    """Of MQTT 5."""


FIXED_FLAGS: Final = {PacketType.PUBREL: 2, PacketType.SUBSCRIBE: 2, PacketType.UNSUBSCRIBE: 2}
"""The fixed lower four bits of packet types for which they are not 0 (PUBLISH has real flags). Source: MQTT 3.1.1 table 2.2."""


class Side(Enum):
    """The side that reads: a server accepts what clients send, and the reverse."""

    SERVER = "server"
    CLIENT = "client"


class ConnackCode(IntEnum):
    """The return codes of a CONNACK. Source: MQTT 3.1.1 table 3.1."""

    ACCEPTED = 0
    UNACCEPTABLE_PROTOCOL_LEVEL = 1
    IDENTIFIER_REJECTED = 2
    SERVER_UNAVAILABLE = 3
    BAD_USER_NAME_OR_PASSWORD = 4
    NOT_AUTHORISED = 5


SUBACK_FAILURE: Final = 0x80


class Reason(Enum):
    """The error of a packet, one for each rule. The value is the text for people."""

    UNKNOWN_TYPE = "the packet type 0, and 15 before MQTT 5, is reserved"
    RESERVED_FLAGS = "the lower four bits of the first byte are not the ones of this packet type"
    WRONG_DIRECTION = "this packet type never goes in this direction"
    FIRST_PACKET = "the first packet must be CONNECT from a client and CONNACK from a server"
    FIRST_PACKET_TOO_LARGE = "the first packet is above 65536 bytes"
    PACKET_TOO_LARGE = "the packet is above the configured maximum"
    REMAINING_LENGTH = "the remaining length has more than 4 bytes"
    TRUNCATED = "a field reaches beyond the end of the packet"
    TRAILING_BYTES = "bytes are left after the last field"
    INVALID_UTF8 = "a string is not UTF-8"
    NUL_IN_STRING = "a string contains the character U+0000"
    PACKET_ID_ZERO = "the packet identifier is 0"
    PUBLISH_QOS_3 = "both QoS bits of a PUBLISH are set"
    DUP_WITH_QOS_0 = "DUP is set in a PUBLISH of QoS 0"
    EMPTY_TOPIC = "a topic name is empty"
    WILDCARD_IN_TOPIC = "a topic name contains a wildcard"
    EMPTY_FILTER_LIST = "a SUBSCRIBE or UNSUBSCRIBE has no topic filter"
    TOO_MANY_FILTERS = "a SUBSCRIBE or UNSUBSCRIBE has more topic filters than allowed"
    EMPTY_FILTER = "a topic filter is empty"
    INVALID_FILTER = "a wildcard of a topic filter does not stand alone in its level, or # is not last"
    SUBSCRIBE_QOS = "the requested QoS is not 0, 1 or 2, or its reserved bits are set"
    PROTOCOL_NAME = "the protocol name is not MQTT"
    CONNECT_RESERVED_FLAG = "the reserved bit of the connect flags is set"
    WILL_QOS_3 = "the will's QoS is 3"
    WILL_FLAGS_WITHOUT_WILL = "will QoS or will retain is set without a will"
    PASSWORD_WITHOUT_USER_NAME = "a password is given without a user name"  # noqa: S105 (a text about passwords)
    CONNACK_FLAGS = "reserved bits of the CONNACK flags are set, or a refusal says session present"
    CONNACK_CODE = "the return code of the CONNACK is reserved"
    SUBACK_CODE = "a return code of the SUBACK is reserved"
    EMPTY_SUBACK = "the SUBACK or UNSUBACK has no return code"
    REASON_CODE = "the reason code is not one of this packet type"
    SUBSCRIBE_OPTIONS = "reserved bits of the subscription options are set, or retain handling is 3"
    SHARED_NO_LOCAL = "a shared subscription has the option no local"
    VARIABLE_INTEGER = "a variable byte integer has more than 4 bytes"
    PROPERTY_NOT_ALLOWED = "a property does not exist, or not in this packet type"
    PROPERTY_TWICE = "a property appears more than once"
    PROPERTY_VALUE = "a property's value is not one of those allowed"
    TOO_MANY_PROPERTIES = "the packet has more than 64 user properties"
    TOPIC_ALIAS_ZERO = "the topic alias is 0"
    IDENTIFIER_FROM_CLIENT = "a client sent a subscription identifier in a PUBLISH"
    RESPONSE_TOPIC = "the response topic is empty or contains a wildcard"
    AUTHENTICATION_DATA = "authentication data is given without an authentication method"
    AUTHENTICATION_METHOD = "an AUTH has no authentication method"


class MalformedPacket(MalformedData):
    """Bytes that are no MQTT packet of the connection's dialect, or a packet that is not allowed. `reason`: the broken rule."""

    def __init__(self, reason: Reason, dialect: Dialect | None = None) -> None:
        super().__init__(f"{reason.value} ({reason.name})")
        self.reason = reason
        self.dialect = dialect
        """Of the CONNECT in which it is; None: the connection's."""


class Publish(NamedTuple):
    """A message. `packet_id` is 0 for QoS 0; `topic` is empty where a topic alias stands for it."""

    topic: str
    payload: bytes
    qos: int = 0
    retain: bool = False
    dup: bool = False
    packet_id: int = 0
    properties: Properties | None = None

    def __repr__(self) -> str:
        return (
            f"Publish(topic of {len(self.topic)} characters, {len(self.payload)} bytes, qos={self.qos}, "
            f"retain={self.retain}, dup={self.dup}, packet_id={self.packet_id})"
        )


@dataclass(frozen=True, slots=True)
class Will:
    """Message that the server shall publish when the client's connection is lost."""

    topic: str
    payload: bytes = field(repr=False)
    qos: int = 0
    retain: bool = False
    properties: Properties | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Connect:
    """A client requests a session; `keep_alive_s` 0 means no keep-alive. `clean_session` is MQTT 5's clean start."""

    client_id: str
    clean_session: bool = True
    keep_alive_s: int = 0
    user_name: str | None = None
    password: bytes | None = field(default=None, repr=False)
    will: Will | None = None
    dialect: Dialect = MQTT_3_1_1
    properties: Properties | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class UnacceptableConnect:
    """A CONNECT of another protocol level; its remaining fields are not decoded, because their meaning is unknown."""

    protocol_name: str
    level: int


@dataclass(frozen=True, slots=True)
class Connack:
    """The answer to a CONNECT; `code` is a `ConnackCode`, in MQTT 5 a `ReasonCode`."""

    session_present: bool
    code: int
    properties: Properties | None = None


@dataclass(frozen=True, slots=True)
class Puback:
    """The receiver has taken a message of QoS 1."""

    packet_id: int
    code: int = 0
    properties: Properties | None = None


@dataclass(frozen=True, slots=True)
class Pubrec:
    """First answer to a message of QoS 2."""

    packet_id: int
    code: int = 0
    properties: Properties | None = None


@dataclass(frozen=True, slots=True)
class Pubrel:
    """Answer to a PUBREC."""

    packet_id: int
    code: int = 0
    properties: Properties | None = None


@dataclass(frozen=True, slots=True)
class Pubcomp:
    """Answer to a PUBREL."""

    packet_id: int
    code: int = 0
    properties: Properties | None = None


@dataclass(frozen=True, slots=True)
class Subscribe:
    """A client subscribes: pairs of a topic filter and its options.

    Options are a byte, in MQTT 3 the highest QoS that the client wants: bits 0 and 1 QoS, 2 no local, 3 retain as published, 4 and
    5 retain handling.
    """

    packet_id: int
    filters: tuple[tuple[str, int], ...]
    more: bool = False
    """In a decoder's output: the next packet has more filters of the same SUBSCRIBE."""
    properties: Properties | None = None


@dataclass(frozen=True, slots=True)
class Suback:
    """One code per filter of the SUBSCRIBE: the granted QoS, or `SUBACK_FAILURE`, in MQTT 5 another `ReasonCode` of a failure."""

    packet_id: int
    codes: tuple[int, ...]
    properties: Properties | None = None


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """A client unsubscribes from these topic filters."""

    packet_id: int
    filters: tuple[str, ...]
    more: bool = False
    """As in `Subscribe`."""
    properties: Properties | None = None


@dataclass(frozen=True, slots=True)
class Unsuback:
    """The answer to an UNSUBSCRIBE. `codes`: one per filter, in MQTT 5 only."""

    packet_id: int
    codes: tuple[int, ...] = ()
    properties: Properties | None = None


@dataclass(frozen=True, slots=True)
class Pingreq:
    """A client shows that it is alive."""


@dataclass(frozen=True, slots=True)
class Pingresp:
    """The answer to a PINGREQ."""


@dataclass(frozen=True, slots=True)
class Disconnect:
    """A client ends its connection in order; in MQTT 5 either side ends it, with a `ReasonCode`."""

    code: int = 0
    properties: Properties | None = None


@dataclass(frozen=True, slots=True)
class Auth:
    """A step of enhanced authentication, in MQTT 5."""

    code: int = 0
    properties: Properties | None = field(default=None, repr=False)


Packet = (
    Publish
    | Connect
    | UnacceptableConnect
    | Connack
    | Puback
    | Pubrec
    | Pubrel
    | Pubcomp
    | Subscribe
    | Suback
    | Unsubscribe
    | Unsuback
    | Pingreq
    | Pingresp
    | Disconnect
    | Auth
)
