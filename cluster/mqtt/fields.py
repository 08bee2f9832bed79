"""The fields of simple packets by packet type, for MQTT 3 and MQTT 5, as tables that the decoder and the codec share. Pure.

CONNECT, PUBLISH, SUBSCRIBE and UNSUBSCRIBE have code of their own in both.

Source: OASIS MQTT 3.1.1 and 5.0 section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, Final, NamedTuple

from cluster.mqtt.packets import (
    Auth,
    Connack,
    Dialect,
    Disconnect,
    Packet,
    PacketType,
    Pingreq,
    Pingresp,
    Puback,
    Pubcomp,
    Pubrec,
    Pubrel,
    Side,
    Suback,
    Unsuback,
)


class Field(Enum):
    """A field of a packet; the value is its attribute of the packet."""

    PACKET_ID = "packet_id"
    SESSION_PRESENT = "session_present"
    CODE = "code"
    PROPERTIES = "properties"
    CODES = "codes"
    """The rest of the packet."""


class Layout(NamedTuple):
    """The fields of a packet in their order. A packet may end before any field from number `required` on."""

    make: Callable[..., Packet]
    fields: tuple[Field, ...]
    required: int


def _layout(make: Callable[..., Packet], *fields: Field, optional: int = 0) -> Layout:
    return Layout(make, fields, len(fields) - optional)


_ACKNOWLEDGEMENTS: Final[dict[PacketType, Any]] = {
    PacketType.PUBACK: Puback,
    PacketType.PUBREC: Pubrec,
    PacketType.PUBREL: Pubrel,
    PacketType.PUBCOMP: Pubcomp,
}
_PINGS: Final = {PacketType.PINGREQ: _layout(Pingreq), PacketType.PINGRESP: _layout(Pingresp)}
_MQTT_3: Final[dict[PacketType, Layout]] = {
    **_PINGS,
    **{kind: _layout(make, Field.PACKET_ID) for kind, make in _ACKNOWLEDGEMENTS.items()},
    PacketType.CONNACK: _layout(Connack, Field.SESSION_PRESENT, Field.CODE),
    PacketType.SUBACK: _layout(Suback, Field.PACKET_ID, Field.CODES),
    PacketType.UNSUBACK: _layout(Unsuback, Field.PACKET_ID),
    PacketType.DISCONNECT: _layout(Disconnect),
}
_MQTT_5: Final[dict[PacketType, Layout]] = {
    **_PINGS,
    **{
        kind: _layout(make, Field.PACKET_ID, Field.CODE, Field.PROPERTIES, optional=2)
        for kind, make in _ACKNOWLEDGEMENTS.items()
    },
    PacketType.CONNACK: _layout(Connack, Field.SESSION_PRESENT, Field.CODE, Field.PROPERTIES),
    PacketType.SUBACK: _layout(Suback, Field.PACKET_ID, Field.PROPERTIES, Field.CODES),
    PacketType.UNSUBACK: _layout(Unsuback, Field.PACKET_ID, Field.PROPERTIES, Field.CODES),
    PacketType.DISCONNECT: _layout(Disconnect, Field.CODE, Field.PROPERTIES, optional=2),
    PacketType.AUTH: _layout(Auth, Field.CODE, Field.PROPERTIES, optional=2),
}  # fmt: skip
LAYOUTS: Final[dict[Dialect, dict[PacketType, Layout]]] = {
    Dialect.MQTT_3_1: _MQTT_3,
    Dialect.MQTT_3_1_1: _MQTT_3,
    Dialect.MQTT_5: _MQTT_5,
}
_BOTH_WAYS: Final = frozenset(
    {PacketType.PUBLISH, PacketType.PUBACK, PacketType.PUBREC, PacketType.PUBREL, PacketType.PUBCOMP}
)  # fmt: skip
_TO_SERVER: Final = _BOTH_WAYS | {
    PacketType.CONNECT, PacketType.SUBSCRIBE, PacketType.UNSUBSCRIBE, PacketType.PINGREQ, PacketType.DISCONNECT,
}  # fmt: skip
_TO_CLIENT: Final = _BOTH_WAYS | {PacketType.CONNACK, PacketType.SUBACK, PacketType.UNSUBACK, PacketType.PINGRESP}
DIRECTIONS: Final[dict[tuple[Dialect, Side], frozenset[PacketType]]] = {
    (Dialect.MQTT_3_1, Side.SERVER): _TO_SERVER,
    (Dialect.MQTT_3_1, Side.CLIENT): _TO_CLIENT,
    (Dialect.MQTT_3_1_1, Side.SERVER): _TO_SERVER,
    (Dialect.MQTT_3_1_1, Side.CLIENT): _TO_CLIENT,
    (Dialect.MQTT_5, Side.SERVER): _TO_SERVER | {PacketType.AUTH},
    (Dialect.MQTT_5, Side.CLIENT): _TO_CLIENT | {PacketType.AUTH, PacketType.DISCONNECT},
}
"""Packet types that a side may read."""
