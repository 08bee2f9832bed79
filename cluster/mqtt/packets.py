"""The control packets of MQTT 3.1.1 as types, and the errors their bodies can have.

Only `Publish` is a tuple: it is made once per message, and making a tuple is three times as fast as making a frozen dataclass. Its
`repr`, like those of secrets, shows sizes and no contents, so that a log line cannot leak them.

Source: OASIS MQTT 3.1.1 section 3; docs/operations.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Final, NamedTuple

from pixiu.errors import MalformedData
from pixiu.wire.record import MAX_RECORD_BYTES

PROTOCOL_NAME: Final = "MQTT"
PROTOCOL_LEVEL: Final = 4
MAX_STRING_BYTES: Final = 0xFFFF
MAX_PACKET_ID: Final = 0xFFFF
MAX_REMAINING_LENGTH: Final = 268_435_455
FIRST_PACKET_BYTES: Final = 4096
"""Largest packet from an unknown peer, header included, bytes."""
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

    UNKNOWN_TYPE = "the packet types 0 and 15 are reserved"
    RESERVED_FLAGS = "the lower four bits of the first byte are not the ones of this packet type"
    WRONG_DIRECTION = "this packet type never goes in this direction"
    FIRST_PACKET = "the first packet must be CONNECT from a client and CONNACK from a server"
    FIRST_PACKET_TOO_LARGE = "the first packet is above 4096 bytes"
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
    EMPTY_SUBACK = "the SUBACK has no return code"


class MalformedPacket(MalformedData):
    """Bytes that are not an MQTT 3.1.1 packet, or a packet that is not allowed here. `reason` is the broken rule."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(f"{reason.value} ({reason.name})")
        self.reason = reason


class Publish(NamedTuple):
    """A message. `packet_id` is 0 for QoS 0."""

    topic: str
    payload: bytes
    qos: int = 0
    retain: bool = False
    dup: bool = False
    packet_id: int = 0

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


@dataclass(frozen=True, slots=True)
class Connect:
    """A client requests a session; `keep_alive_s` 0 means no keep-alive."""

    client_id: str
    clean_session: bool = True
    keep_alive_s: int = 0
    user_name: str | None = None
    password: bytes | None = field(default=None, repr=False)
    will: Will | None = None


@dataclass(frozen=True, slots=True)
class UnacceptableConnect:
    """A CONNECT of another protocol level; its remaining fields are not decoded, because their meaning is unknown."""

    protocol_name: str
    level: int


@dataclass(frozen=True, slots=True)
class Connack:
    """The answer to a CONNECT; `code` is a `ConnackCode`."""

    session_present: bool
    code: int


@dataclass(frozen=True, slots=True)
class Puback:
    """The receiver has taken a message of QoS 1."""

    packet_id: int


@dataclass(frozen=True, slots=True)
class Pubrec:
    """First answer to a message of QoS 2."""

    packet_id: int


@dataclass(frozen=True, slots=True)
class Pubrel:
    """Answer to a PUBREC."""

    packet_id: int


@dataclass(frozen=True, slots=True)
class Pubcomp:
    """Answer to a PUBREL."""

    packet_id: int


@dataclass(frozen=True, slots=True)
class Subscribe:
    """A client subscribes: pairs of a topic filter and the highest QoS that it wants."""

    packet_id: int
    filters: tuple[tuple[str, int], ...]
    more: bool = False
    """In a decoder's output: the next packet has more filters of the same SUBSCRIBE."""


@dataclass(frozen=True, slots=True)
class Suback:
    """One code per filter of the SUBSCRIBE: the granted QoS, or `SUBACK_FAILURE`."""

    packet_id: int
    codes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """A client unsubscribes from these topic filters."""

    packet_id: int
    filters: tuple[str, ...]
    more: bool = False
    """As in `Subscribe`."""


@dataclass(frozen=True, slots=True)
class Unsuback:
    """The answer to an UNSUBSCRIBE."""

    packet_id: int


@dataclass(frozen=True, slots=True)
class Pingreq:
    """A client shows that it is alive."""


@dataclass(frozen=True, slots=True)
class Pingresp:
    """The answer to a PINGREQ."""


@dataclass(frozen=True, slots=True)
class Disconnect:
    """A client ends its connection in order."""


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
)
