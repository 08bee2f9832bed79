"""What one MQTT client publishes: IDs and records, rates, and messages of QoS 1 until the brokers have them.

Source: docs/operations.md.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Final, Protocol

from gateway import events as ev
from gateway.clients import Clients
from gateway.publishing import Confirmable
from pixiu.errors import LeaseExpired, Offline, Overloaded, PixiuError
from pixiu.ids import SnowflakeID
from pixiu.mqtt.events import CloseReason
from pixiu.mqtt.packets import Publish
from pixiu.mqtt.topics import ROOM_PREFIX, USER_PREFIX
from pixiu.wire.record import Flag, Kind, encode, with_topic

MAX_RETRIES: Final = 3
"""How often a QoS 1 message that a broker did not confirm is sent again, as long as it is its room's newest."""
MAX_NEWEST: Final = 4096
"""Rooms whose newest QoS 1 message of a client is remembered; beyond it all are forgotten, and not sent again."""


class PublishingClient(Protocol):
    """The connection of a client that publishes."""

    uin: int
    client_id: str | None

    @property
    def is_open(self) -> bool:
        """Whether its session goes on."""

    def hold_reading(self, seconds: float) -> None:
        """Read nothing from the client for so long."""

    def published(self, packet_id: int) -> None:
        """A message of QoS 1 is done: acknowledge it."""

    def publish_refused(self, text: str) -> None:
        """A message of QoS 1 cannot be taken."""

    def end(self, reason: CloseReason, text: str) -> None:
        """End the connection."""


class Publishing:
    """See the module."""

    __slots__ = ("_client", "_clients", "_newest", "earlier", "unacknowledged")

    def __init__(self, client: PublishingClient, clients: Clients) -> None:
        self._client, self._clients = client, clients
        self._newest: dict[int, SnowflakeID] = {}
        self.unacknowledged: dict[int, SnowflakeID] = {}
        """Packet ID → the message's ID, of messages of QoS 1 that wait for the brokers."""
        self.earlier: dict[int, SnowflakeID] = {}
        """The same, as the client's last connection left it."""

    def publish(self, messages: Sequence[tuple[int, Publish]]) -> None:
        """Send these on: (room or UIN, packet) of each."""
        client, clients = self._client, self._clients
        plain: list[tuple[int, bytes]] = []
        if clients.rates.any:
            messages = self._within_rates(messages)
        for key, message in messages:
            try:
                snowflake = self._snowflake(message)
                record = self._encode(key, message, snowflake)
            except LeaseExpired as error:
                client.end(CloseReason.PUBLISH_REFUSED, str(error))
                return
            except PixiuError as error:
                if message.qos:
                    client.end(CloseReason.PUBLISH_REFUSED, str(error))
                    return
                clients.counters.unroutable += 1
                continue
            if not message.qos:
                plain.append((key, record))
                continue
            if len(self._newest) >= MAX_NEWEST:
                self._newest.clear()
            self._newest[key] = snowflake
            self.unacknowledged[message.packet_id] = snowflake
            self._send(Confirmable(self._resolved, message.packet_id, key, record, snowflake))
            if not client.is_open:
                return
        if plain:
            clients.step(ev.Publish(plain))

    def _within_rates(self, messages: Sequence[tuple[int, Publish]]) -> list[tuple[int, Publish]]:
        """Those that may pass: all of QoS 1, for which the client then waits."""
        rates, name, now = self._clients.rates, self._client.client_id or "", self._clients.now()
        passed: list[tuple[int, Publish]] = []
        hold_s = 0.0
        for key, message in messages:
            size = len(message.payload)
            if message.qos:
                hold_s = max(hold_s, rates.spend(name, key, size, now))
            elif not rates.take(name, key, size, now):
                continue
            passed.append((key, message))
        self._client.hold_reading(hold_s)
        return passed

    def _encode(self, key: int, message: Publish, snowflake: SnowflakeID) -> bytes:
        sender, limit = self._client.uin, self._clients.max_record_bytes
        if message.topic.startswith(USER_PREFIX):
            return encode(Kind.CHAT, key, message.payload, snowflake, sender=sender, limit=limit)
        free = not message.topic.startswith(ROOM_PREFIX)
        body = with_topic(message.topic, message.payload) if free else message.payload
        flags = Flag.TO_ROOM | Flag.TOPIC if free else Flag.TO_ROOM
        return encode(Kind.ROOM, key, body, snowflake, sender=sender, flags=flags, limit=limit)

    def _snowflake(self, message: Publish) -> SnowflakeID:
        """A message's ID; one that is sent again after a reconnect, with DUP, keeps the one that it had."""
        if message.dup:
            earlier = self.earlier.pop(message.packet_id, None)
            if earlier is not None:
                return earlier
        return self._clients.next_snowflake()

    def _send(self, message: Confirmable) -> None:
        try:
            self._clients.publish_confirmed(message)
        except PixiuError as error:
            self._client.end(CloseReason.PUBLISH_REFUSED, str(error))

    def _resend(self, message: Confirmable) -> None:
        if self._client.is_open:
            self._send(message)

    def _resolved(self, message: Confirmable, error: PixiuError | None) -> None:
        """A message of QoS 1 is accepted, lost, or cannot be taken.

        A message that a broker did not confirm, or that a proxy refused for now, is sent again with the same ID while it
        is the newest that this client sent to the room; an older one is acknowledged and counted, because sending it
        again would break the order.
        """
        client, counters = self._client, self._clients.counters
        if not client.is_open:
            return
        newest = self._newest.get(message.key) == message.snowflake
        if error is not None and error.code == "DROPPED":
            if newest and message.attempts < MAX_RETRIES:
                message.attempts += 1
                self._send(message)
                return
            counters.unroutable += 1
        elif isinstance(error, Overloaded) and error.retry_after_ms:
            if newest:
                wait_s = error.retry_after_ms / 1000 * random.uniform(1.0, 1.25)
                client.hold_reading(wait_s)
                asyncio.get_running_loop().call_later(wait_s, self._resend, message)
                return
            counters.unroutable += 1
        elif isinstance(error, Offline):
            # MQTT has no word for it, and closing the connection would make the client send it again.
            counters.chat_offline += 1
        elif error is not None:
            client.publish_refused(str(error))
            return
        self.unacknowledged.pop(message.packet_id, None)
        client.published(message.packet_id)
