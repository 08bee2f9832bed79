"""Publishing of one MQTT client: IDs and records, rates, and messages of QoS 1 until the brokers have them.

Source: docs/operations.md.
"""

from __future__ import annotations

import asyncio
import random
from bisect import insort
from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol

from cluster.access.login_guard import LoginSession
from cluster.core.reading_gate import Hold, ReadingGate
from cluster.mqtt.events import CloseReason
from cluster.mqtt.packets import Publish
from gateway import events as ev
from gateway.clients.access import may_publish, pay
from gateway.clients.clients import Clients
from gateway.clients.join_share import JoinRate
from gateway.clients.join_steps import JoinSteps
from gateway.events import Confirmable
from pixiu.errors import Draining, Dropped, LocalError, Offline, Overloaded, PixiuError, Unavailable
from pixiu.ids import UIN, RoomID, SnowflakeID
from pixiu.placement.topics import ROOM_PREFIX, USER_PREFIX
from pixiu.wire.record import Flag, Kind, encode, with_topic

MAX_RETRIES: Final = 3
"""Retries of a QoS 1 message that a broker did not confirm."""
MAX_CLIENT_BYTES: Final = 1 << 20
"""Bytes of one client's messages in flight, of any QoS. With more it is not read from; one message may always leave."""
RETRY_S: Final = 0.1
MAX_RETRY_S: Final = 5.0
"""First and last pause before a message that was lost, or refused for now, is sent again, seconds; it doubles, less jitter."""
MAX_ROOMS: Final = 4096
"""Rooms for which the last accepted message of a client is known; beyond it nothing older is sent again."""


class MQTTClient(Protocol):
    """The connection of a client that publishes and subscribes."""

    id: int
    uin: int
    client_id: str | None
    access: LoginSession | None
    gate: ReadingGate
    joins: JoinRate
    steps: JoinSteps

    @property
    def subscriptions(self) -> dict[str, RoomID | UIN] | None:
        """Its filters and their rooms; None: its session is over."""

    @property
    def is_open(self) -> bool:
        """True while its session continues."""

    def hold(self, reason: Hold, seconds: float) -> None:
        """Do not read from the client for a time."""

    def published(self, packet_id: int) -> None:
        """Acknowledge a message of QoS 1 that is done."""

    def subscribed(self, packet_id: int, codes: Sequence[int]) -> None:
        """Answer a SUBSCRIBE."""

    def end(self, reason: CloseReason, text: str) -> None:
        """End the connection to the client."""


class Publishing:
    """Publishes one MQTT client's messages, within its rate."""

    __slots__ = (
        "_accepted",
        "_again",
        "_client",
        "_clients",
        "_never_again",
        "_number",
        "_plain",
        "_queue",
        "_sent",
        "_under_way",
        "earlier",
        "unacknowledged",
        "waiting_bytes",
    )

    def __init__(self, client: MQTTClient, clients: Clients) -> None:
        self._client, self._clients = client, clients
        self._number = 0
        self._queue: deque[Confirmable] | None = None
        """Messages of QoS 1 that are not in flight yet, in order; created at the first one."""
        self.waiting_bytes = 0
        """Bytes of these, and of those that are sent again: of QoS 1, and not in flight."""
        self._plain = 0
        """Bytes of QoS 0 in flight to the proxies."""
        self._under_way = 0
        """Bytes of QoS 1 in flight."""
        self._again: list[Confirmable] = []
        """Messages to send again after their pause, in order, before all others."""
        self._accepted: dict[int, int] = {}
        """Room or user → the number of the last message that was accepted."""
        self._sent: dict[int, tuple[int, int]] = {}
        """Room or user → number of messages in flight, and the highest message number among them (or of one that is sent again)."""
        self._never_again = 0
        """Messages up to this number are not sent again."""
        self.unacknowledged: dict[int, SnowflakeID] = {}
        """Packet ID → message ID, of messages of QoS 1 that wait for the brokers."""
        self.earlier: dict[int, SnowflakeID] = {}
        """The same, left by the client's last connection."""

    def publish(self, messages: Sequence[tuple[int, Publish]]) -> None:
        """Send messages on: (room or UIN, packet) of each."""
        client, clients = self._client, self._clients
        plain: list[tuple[int, bytes]] = []
        refusal = ""
        if client.access is not None:
            messages = self._allowed(messages, client.access)
        if clients.rates.any:
            messages = self._within_rates(messages)
        for key, message in messages:
            try:
                snowflake = self._snowflake(message)
                record = self._encode(key, message, snowflake)
            except PixiuError as error:
                # No worker number now, or too large: an acknowledgement would be false, and MQTT 3.1.1 cannot refuse
                # [MQTT-3.3.5-2].
                clients.counters.unroutable += 1
                if message.qos:
                    refusal = str(error)
                    break
                continue
            if not message.qos:
                plain.append((key, record))
                continue
            self.unacknowledged[message.packet_id] = snowflake
            confirmable = Confirmable(self._resolved, message.packet_id, key, record, snowflake, self._client.id)
            self._number += 1
            confirmable.number = self._number
            if self._queue is None:
                self._queue = deque()
            self._queue.append(confirmable)
            self.waiting_bytes += len(record)
        if self._queue:
            self._send_on()
        if plain:
            self._plain += sum(len(record) for _, record in plain)
            if self._plain > MAX_CLIENT_BYTES:
                # More would fill the links to the proxies, and these drop others' messages as well.
                client.gate.hold(Hold.IN_FLIGHT, clients.now())
            clients.step(ev.Publish(plain, client.id))
        if refusal:  # last: earlier messages are in flight
            client.end(CloseReason.PUBLISH_REFUSED, refusal)

    def passed(self, size: int) -> None:
        """Note that `size` bytes of QoS 0 are with the proxies, or lost."""
        self._plain -= size
        if not self._client.gate.reads and self._plain <= MAX_CLIENT_BYTES // 2:
            self._client.gate.release(Hold.IN_FLIGHT, self._clients.now())

    def _set_reading(self) -> None:
        """Read from the client only while no QoS 1 message waits."""
        gate = self._client.gate
        if self._queue or self._again:
            gate.hold(Hold.PUBLISHING, self._clients.now())
        elif not gate.reads:
            gate.release(Hold.PUBLISHING, self._clients.now())

    def _allowed(self, messages: Sequence[tuple[int, Publish]], access: LoginSession) -> list[tuple[int, Publish]]:
        """Return the messages that the client may publish. The others are dropped; at QoS 1 that ends the session, because MQTT
        cannot refuse. The client is charged for all."""
        self._client.hold(Hold.QUOTA, pay(access, messages))
        passed: list[tuple[int, Publish]] = []
        for key, message in messages:
            if may_publish(access, key, message):
                passed.append((key, message))
            elif access.over:  # the end that says why is on its way; the client sends again what is not acknowledged
                return passed
            elif message.qos:
                self._client.end(CloseReason.NOT_ALLOWED, "the client may not publish this")
                return passed
            else:
                self._clients.counters.denied += 1
        return passed

    def _within_rates(self, messages: Sequence[tuple[int, Publish]]) -> list[tuple[int, Publish]]:
        """Return the messages that may pass: all of QoS 1, for which the client then waits."""
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
        self._client.hold(Hold.RATE, hold_s)
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
        """Return a message's ID; one that is sent again after a reconnect, with DUP, keeps its ID."""
        if message.dup:
            earlier = self.earlier.pop(message.packet_id, None)
            if earlier is not None:
                return earlier
        return self._clients.next_snowflake()

    def closed(self) -> None:
        """Send nothing more, because the connection has ended."""
        self._queue = None
        self._again.clear()
        self._clients.publishers.forget(self._send_on)

    def _send_on(self) -> None:
        """Send what may leave, and read from the client only while nothing waits."""
        leaving: list[Confirmable] = []
        while self._queue and not self._again and self._client.is_open:
            message = self._queue[0]
            size = len(message.record)
            if self._is_late(message):
                self._queue.popleft()
                self.waiting_bytes -= size
                self._clients.counters.unroutable += 1
                self._done(message)
                continue
            count, latest = self._sent.get(message.key, (0, 0))
            if message.number < latest:
                # A later one is in flight: if it is accepted this one is too late, otherwise both are sent again in order.
                break
            if self._under_way and self._under_way + size > MAX_CLIENT_BYTES:
                break
            if not self._clients.publishers.admit(message.key, size, self._send_on):
                break
            leaving.append(self._queue.popleft())
            self.waiting_bytes -= size
            self._under_way += size
            self._sent[message.key] = count + 1, message.number
        if leaving:
            self._clients.hurry()
            self._clients.publishers.publish(leaving)
        self._set_reading()

    def _send_again(self, message: Confirmable, wait_s: float) -> None:
        message.attempts += 1
        self.waiting_bytes += len(message.record)
        if not self._again:
            asyncio.get_running_loop().call_later(wait_s, self._pause_is_over)
        insort(self._again, message, key=lambda waiting: waiting.number)
        self._set_reading()

    def _pause_is_over(self) -> None:
        again, self._again = self._again, []
        # Messages that were sent again before and met no capacity are in the queue, and may be older.
        self._queue = deque(sorted([*again, *(self._queue or ())], key=lambda message: message.number))
        if self._client.is_open:
            self._send_on()

    def _resolved(self, message: Confirmable, error: PixiuError | None) -> None:
        """Handle the outcome of a QoS 1 message: accepted, lost, or refused.

        A lost message, or one refused for now, is sent again with the same ID while no later message of this client to the room was
        accepted; an older one is acknowledged and counted, because sending it again would break the order.
        """
        self._under_way -= len(message.record)
        count, latest = self._sent.pop(message.key)
        if count > 1:
            self._sent[message.key] = count - 1, latest
        client, counters = self._client, self._clients.counters
        if not client.is_open:
            return
        self._clients.hurry()
        if error is None:
            if len(self._accepted) >= MAX_ROOMS:
                self._accepted.clear()
                self._never_again = message.number
            self._accepted[message.key] = max(message.number, self._accepted.get(message.key, 0))
        elif isinstance(error, Offline):
            # MQTT has no message for it, and closing the connection would make the client send it again.
            counters.chat_offline += 1
        elif self._may_go_again(message, error):
            pause_s = min(RETRY_S * 2**message.attempts, MAX_RETRY_S) * random.uniform(0.5, 1.0)
            if isinstance(error, Overloaded) and error.retry_after_ms:
                pause_s = error.retry_after_ms / 1000 * random.uniform(1.0, 1.25)
            self._send_again(message, pause_s)
            return
        elif isinstance(error, LocalError):
            counters.unroutable += 1
            client.end(CloseReason.PUBLISH_REFUSED, str(error))
            return
        else:
            counters.unroutable += 1
        self._done(message)
        if self._queue and client.is_open:
            self._send_on()

    def _done(self, message: Confirmable) -> None:
        self.unacknowledged.pop(message.packet_id, None)
        if not self.unacknowledged:
            self._accepted.clear()  # nothing older remains that could be sent again
        self._client.published(message.packet_id)

    def _is_late(self, message: Confirmable) -> bool:
        """True if a later message of this client to the room was accepted."""
        return message.number <= max(self._accepted.get(message.key, 0), self._never_again)

    def _may_go_again(self, message: Confirmable, error: PixiuError) -> bool:
        if self._is_late(message):
            return False
        if isinstance(error, Dropped):
            return message.attempts < MAX_RETRIES
        return isinstance(error, Overloaded | Unavailable | Draining)
