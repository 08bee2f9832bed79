"""The fan-out of a turn's messages to the connections of their channels. Pure.

    packets, records   bytes that all connections of a channel share: `Deliver`
    packets5           the same, with the properties of each message
    inside             the same, of a tenant, with its name of the topic
    exact              a `Delivery` for each connection and message: `DeliverEach`

Source: docs/architecture.md, "A message to a room"; docs/subscriptions.md, "Subscriptions".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from cluster.mqtt.properties_in_records import properties_of, qos_of, retain_of
from gateway import events as ev
from gateway.membership.rooms import MQTT_5, Channel, Grant
from pixiu.ids import snowflake_time_ms
from pixiu.wire.record import (
    EXTENSION_AT,
    FLAGS_AT,
    KEY_AT,
    LIFETIME_AT,
    LIFETIME_HIGH_AT,
    SNOWFLAKE_AT,
    Flag,
    with_key,
)

MAX_OWN: Final = 65_536
"""Messages of clients that do not want their own in one generation. Policy: beyond two generations a client may get its own."""


class OwnMessages:
    """Messages that connections with `no_local` published: SnowflakeID → connection."""

    def __init__(self) -> None:
        self._current: dict[bytes, int] = {}
        self._before: dict[bytes, int] = {}

    def put(self, record: bytes, connection: int) -> None:
        """Note a published record."""
        if len(self._current) >= MAX_OWN:
            self._before, self._current = self._current, {}
        self._current[record[SNOWFLAKE_AT:KEY_AT]] = connection

    def connection_of(self, record: bytes) -> int:
        """The connection that published a record; 0: none of these."""
        snowflake = record[SNOWFLAKE_AT:KEY_AT]
        return self._current.get(snowflake) or self._before.get(snowflake, 0)


class FanOut:
    """Messages of a turn, by channel. `unix_ms`: clock, Unix milliseconds."""

    def __init__(self, unix_ms: Callable[[], int] = lambda: 0) -> None:
        self._unix_ms = unix_ms
        self.dirty: dict[Channel, None] = {}
        self.own = OwnMessages()
        self._each: dict[int, list[ev.Delivery]] = {}
        self._ones: list[ev.Deliver] = []
        self.waits = False
        """True if something is queued for single connections; what is queued for channels is in `dirty`."""

    def queue(self, channel: Channel, record: bytes, body: bytes) -> None:
        """Queue a message for the connections of a channel. The loop over a batch does the same itself."""
        self.dirty[channel] = None
        if channel.packets:
            channel.pending_packets.append(publish_packet(channel.head, body))
        if channel.records:
            channel.pending_records.append(record)
        if channel.others:
            self.queue_others(channel, record, body)

    def queue_others(self, channel: Channel, record: bytes, body: bytes) -> None:
        """Queue a message for the connections of MQTT 5, and those that need packets of their own."""
        if channel.pending_others is None:
            channel.pending_others = []
        channel.pending_others.append((record, body))

    def each(self, connection: int, delivery: ev.Delivery) -> None:
        """Queue a message for one connection."""
        self._each.setdefault(connection, []).append(delivery)
        self.waits = True

    def one(self, connection: int, record: bytes) -> None:
        """Queue a record for one connection that gets records."""
        self._ones.append(ev.Deliver((connection,), record, 1))
        self.waits = True

    def deliver(self, out: list[ev.Effect]) -> int:
        """Deliver what is queued. Returns the number of deliveries: messages times connections."""
        deliveries = 0
        for channel in self.dirty:
            if channel.pending_packets:
                if channel.packet_targets is None:
                    channel.packet_targets = tuple(channel.packets)
                out.append(_delivery(channel, channel.packet_targets, channel.pending_packets))
                deliveries += len(channel.packet_targets) * len(channel.pending_packets)
                channel.pending_packets = []
            if channel.pending_records:
                if channel.record_targets is None:
                    channel.record_targets = tuple(channel.records)
                if channel.shown != channel.room:
                    channel.pending_records = [with_key(record, channel.shown) for record in channel.pending_records]
                out.append(_delivery(channel, channel.record_targets, channel.pending_records))
                deliveries += len(channel.record_targets) * len(channel.pending_records)
                channel.pending_records = []
            if channel.pending_others:
                deliveries += self._deliver_others(channel, channel.pending_others, out)
                channel.pending_others = None
        self.dirty.clear()
        if self._each:
            each, self._each = self._each, {}
            for connection, messages in each.items():
                out.append(ev.DeliverEach(connection, messages))
                deliveries += len(messages)
        if self._ones:
            out += self._ones
            deliveries += len(self._ones)
            self._ones = []
        self.waits = False
        return deliveries

    def _deliver_others(self, channel: Channel, pending: list[tuple[bytes, bytes]], out: list[ev.Effect]) -> int:
        exact, shared = channel.exact or {}, 0
        if channel.packets5:
            targets = tuple(channel.packets5)
            now_ms = self._unix_ms()
            packets = [publish_packet5(channel.head, body, _properties(record, now_ms)) for record, body in pending]
            out.append(_delivery(channel, targets, packets))
            shared = len(targets) * len(pending)
        if channel.inside:
            shared += self._deliver_inside(channel, channel.inside, pending, out)
        if not exact:
            return shared
        shown = channel.shown != channel.room
        for record, body in pending:
            topic = channel.head[2:] if channel.head else body[2 : 2 + (body[0] << 8 | body[1])]
            self._queue_each(exact, with_key(record, channel.shown) if shown else record, topic)
        return shared

    def _deliver_inside(
        self, channel: Channel, inside: dict[int, int], pending: list[tuple[bytes, bytes]], out: list[ev.Effect]
    ) -> int:
        """Deliver to the clients of a tenant, in its names: their bytes are shared among them."""
        tenant, first = channel.tenant, pending[0][1]
        name = channel.head[2:] if channel.head else first[2 : 2 + (first[0] << 8 | first[1])]
        inner = tenant.inward(name) if tenant is not None else b""
        if tenant is None or not inner:
            return 0
        cut = 0 if channel.head else 2 + len(name)
        size = sum(len(body) - cut for _, body in pending)
        if not tenant.take(len(inside) * len(pending), len(inside) * size):
            return 0
        head, now_ms = len(inner).to_bytes(2, "big") + inner, self._unix_ms()
        of_5 = tuple(connection for connection, dialect in inside.items() if dialect == MQTT_5)
        of_3 = tuple(connection for connection, dialect in inside.items() if dialect != MQTT_5)
        if of_5:
            packets = [publish_packet5(head, body[cut:], _properties(record, now_ms)) for record, body in pending]
            out.append(_delivery(channel, of_5, packets))
        if of_3:
            out.append(_delivery(channel, of_3, [publish_packet(head, body[cut:]) for _, body in pending]))
        return len(inside) * len(pending)

    def _queue_each(self, exact: dict[int, Grant], record: bytes, topic: bytes) -> None:
        qos, retain, expires_at_ms, publisher = qos_of(record), retain_of(record), expires_at_ms_of(record), -1
        kept = record[FLAGS_AT] & Flag.KEPT
        for connection, grant in exact.items():
            if kept and grant.kept:
                continue
            if grant.no_local:
                if publisher < 0:
                    publisher = self.own.connection_of(record)
                if publisher == connection:
                    continue
            as_published = retain and grant.retain_as_published
            early = grant.kept and qos > 0
            self.each(
                connection,
                ev.Delivery(record, topic, min(qos, grant.qos), as_published, grant.identifiers, expires_at_ms, early=early),
            )


def expires_at_ms_of(record: bytes) -> int:
    """Unix milliseconds at which a record's lifetime is over; 0: it has none. What properties say of it is in its extension."""
    lifetime_min = record[LIFETIME_AT] | record[LIFETIME_HIGH_AT] << 8
    if not lifetime_min:
        return 0
    return sent_at_ms_of(record) + lifetime_min * 60_000


def sent_at_ms_of(record: bytes) -> int:
    """Unix milliseconds at which a record's gateway took it."""
    return snowflake_time_ms(int.from_bytes(record[SNOWFLAKE_AT:KEY_AT], "little"))


def publish_packet(head: bytes, body: bytes) -> bytes:
    """Encode a QoS 0 PUBLISH of MQTT 3.1.1. `head`: topic length and name; empty if the body begins with them."""
    size = len(head) + len(body)
    if size < 128:
        return b"0" + bytes((size,)) + head + body
    if size < 16_384:
        return b"0" + bytes((size & 127 | 128, size >> 7)) + head + body
    return b"0" + bytes((size & 127 | 128, size >> 7 & 127 | 128, size >> 14)) + head + body


def publish_packet5(head: bytes, body: bytes, properties: bytes = b"\0") -> bytes:
    """Encode a QoS 0 PUBLISH of MQTT 5. `properties`: with their length."""
    if head:
        return publish_packet(head + properties, body)
    after = 2 + (body[0] << 8 | body[1])
    return publish_packet(body[:after] + properties, body[after:])


def _properties(record: bytes, now_ms: int) -> bytes:
    return properties_of(record, now_ms) if record[EXTENSION_AT] or record[EXTENSION_AT + 1] else b"\0"


def _delivery(channel: Channel, targets: tuple[int, ...], pending: list[bytes]) -> ev.Deliver:
    data = b"".join(pending) if len(pending) > 1 else pending[0]
    return ev.Deliver(targets, data, len(pending), channel.shown != channel.room)
