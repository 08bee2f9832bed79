"""The states and events of the server's side of a connection. Pure.

Source: docs/mqtt_states.md.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from cluster.mqtt.packets import (
    Auth,
    Disconnect,
    Packet,
    Pingreq,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Subscribe,
    Unsubscribe,
)


class State(Enum):
    """State of a connection."""

    CONNECTING = "Connecting"
    CONNECTED = "Connected"
    DISCONNECTED = "Disconnected"


class Event(Enum):
    """Events of a connection. Packets with different consequences are different events."""

    CONNECT = "CONNECT"
    CONNECT_REFUSED = "CONNECT that is refused"
    PUBLISH = "PUBLISH"
    PUBLISH_UNACCEPTABLE = "PUBLISH that cannot be done"
    SUBSCRIBE = "SUBSCRIBE"
    UNSUBSCRIBE = "UNSUBSCRIBE"
    PINGREQ = "PINGREQ"
    DISCONNECT = "DISCONNECT"
    PUBACK = "PUBACK"
    PUBREL = "PUBREL"
    PUBREC = "PUBREC"
    PUBCOMP = "PUBCOMP"
    AUTH = "AUTH"
    MALFORMED = "malformed packet"
    SUBSCRIPTION_CONFIRMED = "subscription confirmed"
    PUBLISH_ACCEPTED = "publish accepted"
    PUBLISH_REFUSED = "publish refused"
    MAIL = "mail"
    DELIVERY = "messages for the client"
    KEPT = "messages from the session's inbox"
    KEPT_RELEASED = "PUBREC stored"
    TIMEOUT = "timeout"
    CLOSE = "close"
    CONNECTION_LOST = "connection lost"


PACKET_EVENTS: Final[dict[type[Packet], Event]] = {
    Publish: Event.PUBLISH,
    Subscribe: Event.SUBSCRIBE,
    Unsubscribe: Event.UNSUBSCRIBE,
    Pingreq: Event.PINGREQ,
    Disconnect: Event.DISCONNECT,
    Puback: Event.PUBACK,
    Pubrec: Event.PUBREC,
    Pubrel: Event.PUBREL,
    Pubcomp: Event.PUBCOMP,
    Auth: Event.AUTH,
}
"""Events of the packets that each have one; CONNECT has two."""
ANSWERS_OF_THE_SHELL: Final = (
    Event.SUBSCRIPTION_CONFIRMED,
    Event.PUBLISH_ACCEPTED,
    Event.PUBLISH_REFUSED,
    Event.MAIL,
    Event.DELIVERY,
    Event.KEPT,
    Event.KEPT_RELEASED,
)
"""Events of a connection that is accepted; earlier they mean nothing."""
