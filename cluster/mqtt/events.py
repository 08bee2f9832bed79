"""Effects that the MQTT sessions request from their shells, in the order in which they must happen.

Source: docs/operations.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from cluster.mqtt.packets import Publish
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
    """The cluster cannot take a message of QoS 1: the client sends it again when it is back; MQTT 3.1.1 has no other refusal."""
    MAIL_UNACKNOWLEDGED = "mail_unacknowledged"
    """The client acknowledged no mail for too long."""
    UNANSWERED = "unanswered"
    """The cluster did not confirm a subscription or accept a message in time."""
    # Reasons that only the shell knows:
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


class Send(NamedTuple):
    """Write these bytes to the connection."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Connected:
    """Begin the session. Its CONNACK is the next effect."""

    client_id: str
    user_name: str | None
    clean_session: bool
    keep_alive_s: int


class PublishMessages(NamedTuple):
    """Publish these in order, to the room that carries the topic, or to the user that `user/…` names. The shell answers each
    message of QoS 1 by `publish_accepted` or `close`.

    DUP is as the client set it: a shell that knows the packet identifier from an earlier connection of the client assigns the same
    SnowflakeID to the message.
    """

    messages: list[tuple[RoomID | UIN, Publish]]


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
    """Join the rooms of these filters, then answer with `subscription_confirmed(packet_id)`.

    The shell grants the client's own `user/{UIN}`, and refuses other users by a code. `mail` lists the user filters for which the
    client requests QoS 1 in a session that is to be kept.

    Filters that the client already has are included again: joining is idempotent.
    """

    packet_id: int
    filters: list[tuple[str, RoomID | UIN]]
    mail: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class UnsubscribeFilters:
    """Deliver nothing more for these filters. The UNSUBACK is the next effect."""

    filters: list[tuple[str, RoomID | UIN]]


@dataclass(frozen=True, slots=True)
class SendMail:
    """Write these PUBLISH packets as fast as the client takes them; none is dropped. `anew`: discard those that still wait."""

    packets: list[bytes]
    anew: bool


class PacketsAcknowledged(NamedTuple):
    """Report that the client has acknowledged the mail of these packet identifiers."""

    packet_ids: list[int]


@dataclass(frozen=True, slots=True)
class Close:
    """Write everything queued, then close and forget the session. The last effect of a session; there is exactly one."""

    reason: CloseReason
    text: str


Effect = (
    Send
    | Connected
    | PublishMessages
    | DropMessages
    | SubscribeFilters
    | FiltersInVain
    | UnsubscribeFilters
    | SendMail
    | PacketsAcknowledged
    | Close
)
