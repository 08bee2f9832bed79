"""The limits of connections, and the terms of one: what its CONNECT asks for, within them, and the CONNACK that says so. Pure.

Source: OASIS MQTT 5.0 sections 3.1.2.11 and 3.2.2.3; docs/mqtt.md, "Limits".
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Final, NamedTuple

from cluster.mqtt import codec
from cluster.mqtt.packets import (
    LEAST_PACKET_BYTES,
    MAX_FILTERS,
    MAX_PACKET_BYTES,
    MQTT_3_1,
    MQTT_3_1_1,
    MQTT_5,
    Connack,
    Connect,
    Dialect,
    Properties,
)
from cluster.mqtt.properties import Property, number
from cluster.mqtt.reason_codes import ReasonCode
from pixiu.errors import ConfigurationError

NO_LIMIT: Final = 0xFFFF_FFFF
"""Bytes of the largest packet for a client that sets no maximum."""
ALL_IDS: Final = 0xFFFF
NO_KEEP_ALIVE_LIMIT: Final = 0xFFFF
CACHED_TERMS: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Limits of one connection. Those that MQTT 5 has a property for are announced to its clients."""

    connect_timeout_s: float = 5.0
    """Time limit from the connection to its CONNECT, seconds."""
    keep_alive_factor: float = 1.5
    """The connection is closed after this multiple of the client's keep-alive without a packet [MQTT-3.1.2-24]."""
    max_keep_alive_s: int = 0xFFFF
    """Longest keep-alive, seconds: a client of MQTT 5 that asks for more, or for none, gets this one. 65535: as the client asks."""
    answer_timeout_s: float = 30.0
    """Time limit for the cluster to confirm a subscription or accept a message, seconds; then the connection is closed."""
    puback_timeout_s: float = 300.0
    """Time for which a lane of mail, or the messages of topics, may wait for any acknowledgement, seconds; then the connection is
    closed."""
    max_packet_bytes: int = MAX_PACKET_BYTES
    """Largest packet after CONNECT, header included, bytes."""
    max_subscriptions: int = 1000
    """Limit of filters of one connection; more are refused."""
    max_filters: int = MAX_FILTERS
    """Limit of filters in one SUBSCRIBE or UNSUBSCRIBE; more are malformed."""
    max_packets_a_turn: int = 256
    """Limit of packets, and filters of SUBSCRIBEs, in one call of `receive`, about 8 µs each; the rest waits for the next call."""
    packet_timeout_s: float = 120.0
    """Time limit for a packet from its first byte to its last, seconds; then the connection is closed."""
    max_filter_bytes: int = 64 << 10
    """Limit of the bytes of all filters of one connection; more are refused."""
    max_inflight: int = 1024
    """Messages of QoS 1 and 2, and filters, that wait for the cluster: at this number reading pauses, at half of it reading
    resumes. Packets read before the pause still count, so there may be more, at most one for each packet identifier; a client of
    MQTT 5 that sends more than this number without an acknowledgement is disconnected."""
    max_outbound: int = 256
    """Messages of QoS 1 and 2 of topics that may be sent without an acknowledgement, at most the client's receive maximum."""
    max_outbound_bytes: int = 2 << 20
    """Bytes of messages of topics that wait for the client. Beyond it the oldest of QoS 0 are dropped; where only QoS 1 and 2 wait,
    the connection is closed."""
    max_topic_aliases: int = 64
    """Topic aliases of a client of MQTT 5, in each direction."""

    def validate(self) -> None:
        """Check all limits. Raises `ConfigurationError` that names the key."""
        for limit in fields(self):
            least = LEAST_PACKET_BYTES if limit.name == "max_packet_bytes" else 1
            value = getattr(self, limit.name)
            if limit.name.startswith("max_") and value < least:
                raise ConfigurationError(f"{limit.name} = {value}: must be at least {least}")
            if value <= 0:
                raise ConfigurationError(f"{limit.name} = {value}: must be above 0")


class Terms(NamedTuple):
    """Terms of a connection."""

    dialect: Dialect
    window: int
    """Messages of QoS 1 and 2 of topics that may be sent without an acknowledgement."""
    receive_maximum: int = ALL_IDS
    """The same for all messages, mail included, as the client limits it."""
    max_packet_bytes: int = NO_LIMIT
    """Largest packet that the client takes."""
    aliases: int = 0
    """Topic aliases that may be used to the client."""
    keep: bool = False
    """True if the client asks for a session that is kept after the connection."""
    keep_alive_s: int = 0
    explain: bool = True
    """True if the client takes reason strings in all packets; otherwise only in CONNACK and DISCONNECT."""

    @property
    def limited(self) -> bool:
        """True if packets have to be made for this client alone."""
        return self.aliases > 0 or self.max_packet_bytes < NO_LIMIT

    def explained(self, text: str) -> Properties | None:
        """Properties of an answer that fails, as far as the client takes them."""
        if text and self.dialect is MQTT_5 and self.explain and self.max_packet_bytes >= len(text) * 4 + 64:
            return {Property.REASON_STRING: text}
        return None


def agree(connect: Connect, limits: SessionLimits) -> Terms:
    """Terms of a connection that is accepted."""
    dialect = connect.dialect
    if dialect is not MQTT_5:
        return _of_mqtt_3(limits.max_outbound, not connect.clean_session, connect.keep_alive_s)
    asked = connect.properties
    receive_maximum = number(asked, Property.RECEIVE_MAXIMUM, ALL_IDS)
    return Terms(
        dialect,
        min(receive_maximum, limits.max_outbound),
        receive_maximum,
        number(asked, Property.MAXIMUM_PACKET_SIZE, NO_LIMIT),
        min(number(asked, Property.TOPIC_ALIAS_MAXIMUM, 0), limits.max_topic_aliases),
        number(asked, Property.SESSION_EXPIRY, 0) > 0,
        _keep_alive_s(connect, limits),
        number(asked, Property.REQUEST_PROBLEM, 1) == 1,
    )


@lru_cache(CACHED_TERMS)
def _of_mqtt_3(window: int, keep: bool, keep_alive_s: int) -> Terms:
    """Terms for clients of MQTT 3, most of which share theirs. After CONNECT, 3.1 is as 3.1.1."""
    return Terms(MQTT_3_1_1, window, keep=keep, keep_alive_s=keep_alive_s)


def _keep_alive_s(connect: Connect, limits: SessionLimits) -> int:
    if limits.max_keep_alive_s >= NO_KEEP_ALIVE_LIMIT:
        return connect.keep_alive_s
    return min(connect.keep_alive_s or limits.max_keep_alive_s, limits.max_keep_alive_s)


def connack(
    connect: Connect, terms: Terms, limits: SessionLimits, assigned: str, *, present: bool = False, expiry_s: int = 0
) -> bytes:
    """Encode the CONNACK that accepts a connection. assigned: the name for a client that sends none. present, expiry_s: of its
    session; without a store it ends with its connection, whatever the client asks for, so its expiry is 0."""
    properties: Properties | None = None
    if terms.dialect is MQTT_5:
        properties = announced(connect, terms, limits, connect.client_id or assigned, expiry_s)
    return codec.encode(Connack(present, ReasonCode.SUCCESS, properties), terms.dialect)


def fault_of(connect: Connect, limits: SessionLimits, assigned: str) -> ReasonCode:
    """The reason to refuse a CONNECT, whoever sends it; SUCCESS: there is none."""
    unnamed = not connect.client_id
    if unnamed and connect.dialect is not MQTT_5 and (connect.dialect is MQTT_3_1 or not connect.clean_session):
        return ReasonCode.CLIENT_ID_NOT_VALID
    if not connect.properties:
        return ReasonCode.SUCCESS
    if Property.AUTHENTICATION_METHOD in connect.properties:
        return ReasonCode.BAD_AUTHENTICATION_METHOD
    terms = agree(connect, limits)
    if terms.max_packet_bytes < NO_LIMIT and len(connack(connect, terms, limits, assigned)) > terms.max_packet_bytes:
        return ReasonCode.PACKET_TOO_LARGE  # [MQTT5-3.1.2-24]
    return ReasonCode.SUCCESS


def announced(connect: Connect, terms: Terms, limits: SessionLimits, client_id: str, expiry_s: int = 0) -> dict[int, object]:
    """Properties of the CONNACK of MQTT 5 that accepts a connection. What is not announced has the standard's default."""
    found: dict[int, object] = {Property.MAXIMUM_PACKET_SIZE: limits.max_packet_bytes}
    if limits.max_inflight < ALL_IDS:
        found[Property.RECEIVE_MAXIMUM] = limits.max_inflight
    found[Property.TOPIC_ALIAS_MAXIMUM] = min(limits.max_topic_aliases, ALL_IDS)
    if terms.keep and expiry_s != number(connect.properties, Property.SESSION_EXPIRY, 0):
        found[Property.SESSION_EXPIRY] = expiry_s
    if not connect.client_id:
        found[Property.ASSIGNED_CLIENT_ID] = client_id
    if terms.keep_alive_s != connect.keep_alive_s:
        found[Property.SERVER_KEEP_ALIVE] = terms.keep_alive_s
    return found
