"""Effects that the MQTT sessions request from their shells, in the order in which they must happen.

Source: docs/mqtt.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from cluster.mqtt.packets import Connect, Publish, Reason
from cluster.mqtt.reason_codes import ReasonCode
from cluster.mqtt.terms import Terms
from pixiu.ids import UIN, RoomID
from pixiu.placement.topics import TopicRefusal


class CloseReason(Enum):
    """The reason why a server's connection ends. The value is its name in metrics and logs."""

    CLIENT_DISCONNECTED = "client_disconnected"
    CONNECTION_LOST = "connection_lost"
    CONNECT_TIMEOUT = "connect_timeout"
    CONNECT_REFUSED = "connect_refused"
    KEEP_ALIVE = "keep_alive"
    MALFORMED = "malformed"
    PACKET_UNFINISHED = "packet_unfinished"
    SECOND_CONNECT = "second_connect"
    UNEXPECTED_PACKET = "unexpected_packet"
    PACKET_ID_IN_USE = "packet_id_in_use"
    UNRELEASED = "unreleased"
    PUBLISH_REFUSED = "publish_refused"
    """The cluster cannot take a message of QoS 1 of a client of MQTT 3, which has no other refusal: the client sends it again when
    it is back."""
    MAIL_UNACKNOWLEDGED = "mail_unacknowledged"
    """The client acknowledged no mail for too long."""
    UNACKNOWLEDGED = "unacknowledged"
    """The client acknowledged no message of a topic for too long."""
    QUEUE_FULL = "queue_full"
    """More bytes of QoS 1 and 2 wait for the client than may."""
    RECEIVE_MAXIMUM = "receive_maximum"
    """The client has more messages unacknowledged than it may."""
    TOPIC_ALIAS = "topic_alias"
    """The client used a topic alias above the maximum."""
    LARGE_ANSWER = "large_answer"
    """A SUBACK or UNSUBACK is above the client's maximum packet size."""
    UNANSWERED = "unanswered"
    """The cluster did not confirm a subscription or accept a message in time."""
    # Reasons that only the shell knows:
    RATE = "rate"
    """It publishes although its tenant is refused, and QoS 0 cannot be."""
    TAKEN_OVER = "taken_over"
    """The same client ID connected again [MQTT-3.1.4-2]."""
    REPLACED = "replaced"
    """Another device of the user connected, and the login policy allows only one."""
    DRAINING = "draining"
    SLOW_CONSUMER = "slow_consumer"
    STOPPED = "stopped"
    MAIL_OVERRUN = "mail_overrun"
    """More mail waits than a client may have unacknowledged."""
    MEMORY = "memory"
    """Its unprocessed input was the largest of all connections, and there was no space for all of it."""
    NOT_ALLOWED = "not_allowed"
    """It published at QoS 1 without permission, or the rules have changed for its subscriptions."""
    LOGIN_OVER = "login_over"
    """Its login has expired, or an operator ended it."""
    EVICTED = "evicted"
    """It had not sent its CONNECT when there were too many such connections."""


class Problem(NamedTuple):
    """The reason why a connection must end."""

    reason: CloseReason
    text: str
    server_reference: str = ""
    """Another server for a client of MQTT 5."""


DISCONNECT_CODES: Final[dict[CloseReason, ReasonCode]] = {
    CloseReason.KEEP_ALIVE: ReasonCode.KEEP_ALIVE_TIMEOUT,
    CloseReason.PACKET_UNFINISHED: ReasonCode.KEEP_ALIVE_TIMEOUT,
    CloseReason.SECOND_CONNECT: ReasonCode.PROTOCOL_ERROR,
    CloseReason.UNEXPECTED_PACKET: ReasonCode.PROTOCOL_ERROR,
    CloseReason.PACKET_ID_IN_USE: ReasonCode.PROTOCOL_ERROR,
    CloseReason.UNRELEASED: ReasonCode.RECEIVE_MAXIMUM_EXCEEDED,
    CloseReason.PUBLISH_REFUSED: ReasonCode.IMPLEMENTATION_SPECIFIC,
    CloseReason.MAIL_UNACKNOWLEDGED: ReasonCode.IMPLEMENTATION_SPECIFIC,
    CloseReason.UNACKNOWLEDGED: ReasonCode.IMPLEMENTATION_SPECIFIC,
    CloseReason.QUEUE_FULL: ReasonCode.QUOTA_EXCEEDED,
    CloseReason.RECEIVE_MAXIMUM: ReasonCode.RECEIVE_MAXIMUM_EXCEEDED,
    CloseReason.TOPIC_ALIAS: ReasonCode.TOPIC_ALIAS_INVALID,
    CloseReason.LARGE_ANSWER: ReasonCode.PACKET_TOO_LARGE,
    CloseReason.UNANSWERED: ReasonCode.SERVER_BUSY,
    CloseReason.RATE: ReasonCode.MESSAGE_RATE_TOO_HIGH,
    CloseReason.TAKEN_OVER: ReasonCode.SESSION_TAKEN_OVER,
    CloseReason.REPLACED: ReasonCode.SESSION_TAKEN_OVER,
    CloseReason.DRAINING: ReasonCode.USE_ANOTHER_SERVER,
    CloseReason.SLOW_CONSUMER: ReasonCode.QUOTA_EXCEEDED,
    CloseReason.STOPPED: ReasonCode.SERVER_SHUTTING_DOWN,
    CloseReason.MAIL_OVERRUN: ReasonCode.QUOTA_EXCEEDED,
    CloseReason.MEMORY: ReasonCode.QUOTA_EXCEEDED,
    CloseReason.NOT_ALLOWED: ReasonCode.NOT_AUTHORISED,
    CloseReason.LOGIN_OVER: ReasonCode.ADMINISTRATIVE_ACTION,
}
"""Reason code of the DISCONNECT that a client of MQTT 5 gets before its connection is closed. Others are closed without one."""
MALFORMED_CODES: Final[dict[Reason, ReasonCode]] = {
    **dict.fromkeys(
        (
            Reason.WRONG_DIRECTION, Reason.FIRST_PACKET, Reason.PACKET_ID_ZERO, Reason.DUP_WITH_QOS_0, Reason.EMPTY_TOPIC,
            Reason.EMPTY_FILTER_LIST, Reason.SUBSCRIBE_QOS, Reason.SHARED_NO_LOCAL, Reason.PROPERTY_TWICE, Reason.PROPERTY_VALUE,
            Reason.IDENTIFIER_FROM_CLIENT, Reason.RESPONSE_TOPIC, Reason.AUTHENTICATION_DATA, Reason.AUTHENTICATION_METHOD,
        ),
        ReasonCode.PROTOCOL_ERROR,
    ),
    Reason.FIRST_PACKET_TOO_LARGE: ReasonCode.PACKET_TOO_LARGE,
    Reason.PACKET_TOO_LARGE: ReasonCode.PACKET_TOO_LARGE,
    Reason.WILDCARD_IN_TOPIC: ReasonCode.TOPIC_NAME_INVALID,
    Reason.TOO_MANY_FILTERS: ReasonCode.QUOTA_EXCEEDED,
    Reason.TOO_MANY_PROPERTIES: ReasonCode.QUOTA_EXCEEDED,
    Reason.EMPTY_FILTER: ReasonCode.TOPIC_FILTER_INVALID,
    Reason.INVALID_FILTER: ReasonCode.TOPIC_FILTER_INVALID,
    Reason.TOPIC_ALIAS_ZERO: ReasonCode.TOPIC_ALIAS_INVALID,
}  # fmt: skip
"""Reason code for each error of a packet; those not listed are 0x81, malformed packet."""


class Wanted(NamedTuple):
    """A filter that a client subscribes to, and its options."""

    filter: str
    qos: int = 0
    no_local: bool = False
    retain_as_published: bool = False
    retain_handling: int = 0
    """0: send retained messages; 1: only if the client does not have the filter yet; 2: never."""
    identifier: int = 0
    """Subscription identifier; 0: none."""
    kept: bool = False
    """True if the client's session outlives its connection and gets messages of QoS 1 and 2 for this filter by its inbox."""


class Kept(NamedTuple):
    """A session that outlives its connection, as the shell found it or began it."""

    present: bool
    """True if there was one: CONNACK says so."""
    expiry_s: int
    """Time for which it outlives the connection, seconds."""
    filters: tuple[Wanted, ...] = ()
    """Its filters. They are joined, and not answered."""


class Send(NamedTuple):
    """Write these bytes to the connection."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Connected:
    """Begin the session. Its CONNACK is the next effect."""

    client_id: str
    connect: Connect
    terms: Terms


class PublishMessages(NamedTuple):
    """Publish these in order, to the room that carries the topic, or to the user that `user/…` names. The shell answers each
    message of QoS 1 by `publish_accepted` or `close`.

    DUP is as the client set it: a shell that knows the packet identifier from an earlier connection of the client assigns the same
    SnowflakeID to the message.
    """

    messages: list[tuple[RoomID | UIN, Publish]]
    """Topic aliases are replaced by their topics."""


@dataclass(frozen=True, slots=True)
class DropMessages:
    """Count `number` messages that no room carries. `size`: characters of their topics plus bytes of their payloads."""

    reason: TopicRefusal
    number: int
    size: int


@dataclass(frozen=True, slots=True)
class FiltersInVain:
    """Count `number` filters of one SUBSCRIBE that were refused unread, because the shell reported too many of them."""

    number: int


@dataclass(frozen=True, slots=True)
class SubscribeFilters:
    """Join these filters, then answer with `subscription_confirmed(packet_id)`.

    The shell grants the client's own `user/{UIN}`, and refuses other users by a code. `mail` lists the user filters for which the
    client requests QoS 1 in a session that is to be kept.

    Filters that the client already has are included again: joining is idempotent.
    """

    packet_id: int
    """0: these are a session's filters of an earlier connection, and no SUBACK follows."""
    filters: list[Wanted]
    mail: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class UnsubscribeFilters:
    """Deliver nothing more for these filters. The UNSUBACK is the next effect."""

    filters: list[str]
    answer: bytes = b""
    """The UNSUBACK in a session that outlives its connection: to be written when the session is stored without the filters."""


class SendMessages(NamedTuple):
    """Write these `number` PUBLISH packets of QoS 0 in the order of those that several clients share; they may be dropped."""

    data: bytes
    number: int


@dataclass(frozen=True, slots=True)
class SendMail:
    """Write these PUBLISH packets as fast as the client takes them; none is dropped. `anew`: discard those that still wait."""

    packets: list[bytes]
    anew: bool


class SharedAcknowledged(NamedTuple):
    """Report that the client has acknowledged these messages of shared subscriptions."""

    numbers: list[int]


class PacketsAcknowledged(NamedTuple):
    """Report that the client has acknowledged the mail of these packet identifiers."""

    packet_ids: list[int]


class KeptAcknowledged(NamedTuple):
    """Report that the client is done with the messages of these identifiers from its session's inbox."""

    packet_ids: list[int]


class KeptReceived(NamedTuple):
    """Store that the client has this message of QoS 2 from its session's inbox, then call `kept_released`."""

    packet_id: int


class ForgetMessage(NamedTuple):
    """Store that the client has released its message of QoS 2, then write the answer, a PUBCOMP: in a session that outlives its
    connection."""

    packet_id: int
    answer: bytes


@dataclass(frozen=True, slots=True)
class Close:
    """Write everything queued, then close and forget the session. The last effect of a session; there is exactly one."""

    reason: CloseReason
    text: str
    malformed: Reason | None = None
    """The error of the packet, if the reason is MALFORMED."""
    publish_will: bool = True
    """False: the client disconnected in order, so that its will is not published."""
    expiry_s: int = -1
    """Session expiry that the client set at its end, seconds; -1: none."""


Effect = (
    Send
    | Connected
    | PublishMessages
    | DropMessages
    | SubscribeFilters
    | FiltersInVain
    | UnsubscribeFilters
    | SendMessages
    | SendMail
    | PacketsAcknowledged
    | SharedAcknowledged
    | KeptAcknowledged
    | KeptReceived
    | ForgetMessage
    | Close
)
