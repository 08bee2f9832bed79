"""Publishing of one MQTT client: IDs and records, rates, and messages of QoS 1 until the brokers have them.

Source: docs/mqtt.md, "Publishing".
"""

from __future__ import annotations

import asyncio
import random
import time
from bisect import insort
from collections import deque
from collections.abc import Collection, Sequence
from functools import partial
from typing import Final, Protocol

from cluster.access.login_guard import LoginSession
from cluster.access.tenants.use import Stage, TenantUse
from cluster.core.reading_gate import Hold, ReadingGate
from cluster.mqtt.events import CloseReason
from cluster.mqtt.packets import Publish
from cluster.mqtt.properties_in_records import extension_for, lifetime_min_of, origin_of
from cluster.mqtt.reason_codes import ReasonCode
from gateway import events as ev
from gateway.clients.access import may_publish, pay
from gateway.clients.clients import Clients
from gateway.clients.join_share import JoinRate
from gateway.clients.join_steps import JoinSteps
from gateway.events import Confirmable, Sender
from gateway.mqtt.keeping import Keeping
from gateway.sessions.service import Sessions
from pixiu.errors import (
    Draining,
    Dropped,
    InvalidArgument,
    LocalError,
    Offline,
    Overloaded,
    PixiuError,
    RecordTooLarge,
    TopicAway,
    Unavailable,
)
from pixiu.ids import SnowflakeID
from pixiu.placement.topics import ROOM_PREFIX, USER_PREFIX
from pixiu.wire.record import Flag, Kind, encode, with_topic

MAX_RETRIES: Final = 3
"""Retries of a QoS 1 message that a broker did not confirm."""
MAX_ROUTE_RETRIES: Final = 2
"""Retries of a message whose route could not store it; with the proxies' waits about 15 seconds. Then its client is told to try
again."""
MAX_CLIENT_BYTES: Final = 1 << 20
"""Bytes of one client's messages in flight, of any QoS. With more it is not read from; one message may always leave."""
RETRY_S: Final = 0.1
MAX_RETRY_S: Final = 5.0
"""First and last pause before a message that was lost, or refused for now, is sent again, seconds; it doubles, less jitter."""
NOT_ALLOWED: Final = "the client may not publish this"
LOST: Final = "the brokers that had it were lost, and a later message to the room was accepted"
OFFLINE: Final = "the user is not connected"
NO_RETAINED: Final = "the tenant has as many retained messages as it may"
REFUSED_S: Final = 1.0
"""Time for which a client of a tenant that is refused is not read from, seconds."""
LEFT_S: Final = 0.25
"""Time after the end of a connection within which its messages of QoS 1 and 2 still leave for a proxy, seconds. Later they could
overtake what the client publishes by another gateway. Nobody was told that they are accepted."""
MAX_ROOMS: Final = 4096
"""Rooms for which the last accepted message of a client is known; beyond it nothing older is sent again."""


class MQTTClient(Protocol):
    """The connection of a client that publishes and subscribes."""

    id: int
    uin: int
    client_id: str | None
    dialect: int
    """3: MQTT 3.1 or 3.1.1, 5: MQTT 5."""
    access: LoginSession | None
    gate: ReadingGate
    keeping: Keeping | None
    """Its session, if that outlives the connection."""
    joins: JoinRate
    steps: JoinSteps

    @property
    def sessions(self) -> Sessions | None:
        """The gateway's sessions that outlive their connections."""

    @property
    def subscriptions(self) -> Collection[str] | None:
        """Its filters; None: its session is over."""

    @property
    def is_open(self) -> bool:
        """True while its session continues."""

    def hold(self, reason: Hold, seconds: float) -> None:
        """Do not read from the client for a time."""

    def published(self, packet_id: int) -> None:
        """Acknowledge a message of QoS 1 or 2 that is done."""

    def refused(self, packet_id: int, code: ReasonCode, text: str) -> None:
        """Answer a message of QoS 1 or 2 that is refused; in MQTT 3 as if it were done."""

    def subscribed(self, packet_id: int, codes: Sequence[int]) -> None:
        """Answer a SUBSCRIBE."""

    def forget(self, names: Sequence[str]) -> None:
        """Remove filters."""

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
        "_retaining",
        "_sender",
        "_sent",
        "_under_way",
        "_unstored",
        "earlier",
        "unacknowledged",
        "waiting_bytes",
    )

    def __init__(self, client: MQTTClient, clients: Clients) -> None:
        self._client, self._clients = client, clients
        self._sender = Sender(client.id)
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
        self._retaining: dict[int, tuple[ReasonCode, str] | None] | None = None
        """Packet ID → what becomes of the message once its retained copy is kept; None: its publication is not done either."""
        self._unstored: set[int] | None = None
        """Packet IDs of messages of QoS 2 that wait, with all later ones, until the client's session is stored with them."""
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
                # No worker number now, or too large: an acknowledgement would be false, and MQTT 3 cannot refuse [MQTT-3.3.5-2].
                clients.counters.unroutable += 1
                if message.qos and client.dialect < 5:
                    refusal = str(error)
                    break
                if message.qos:
                    large = isinstance(error, RecordTooLarge | InvalidArgument)
                    code = ReasonCode.QUOTA_EXCEEDED if large else ReasonCode.IMPLEMENTATION_SPECIFIC
                    client.refused(message.packet_id, code, str(error))
                continue
            if message.retain and not message.topic.startswith(USER_PREFIX):
                self._retain(message, record)
            if not message.qos:
                plain.append((key, record))
                continue
            self.unacknowledged[message.packet_id] = snowflake
            confirmable = Confirmable(self._resolved, message.packet_id, key, record, snowflake, self._sender)
            self._number += 1
            confirmable.number = self._number
            if self._queue is None:
                self._queue = deque()
            self._queue.append(confirmable)
            self.waiting_bytes += len(record)
            if message.qos == 2 and client.keeping is not None:
                self._store(client.keeping, message.packet_id, snowflake)
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

    def _store(self, keeping: Keeping, packet_id: int, snowflake: SnowflakeID) -> None:
        """Have a message of QoS 2 wait until the client's session is stored with it, unless it is already."""
        if keeping.snowflake(packet_id) is None:
            self._unstored = self._unstored or set()
            self._unstored.add(packet_id)
            keeping.store(packet_id, snowflake, partial(self._stored, packet_id))

    def _stored(self, packet_id: int) -> None:
        if self._unstored is not None:
            self._unstored.discard(packet_id)
        self._send_on()

    def _retain(self, message: Publish, record: bytes) -> None:
        """Have a message kept for later subscribers; one of QoS 1 or 2 is not acknowledged before it is."""
        if message.qos:
            if self._retaining is None:
                self._retaining = {}
            self._retaining[message.packet_id] = None
        self._clients.retain(record, message.topic, partial(self._retained, message.packet_id))

    def _retained(self, packet_id: int, error: PixiuError | None) -> None:
        """Handle the outcome of a retained copy."""
        if error is not None:
            self._clients.counters.retained_refused += 1
        if not packet_id or self._retaining is None or packet_id not in self._retaining or not self._client.is_open:
            return
        outcome = self._retaining.pop(packet_id)
        if error is not None and self._client.dialect < 5 and isinstance(error, Overloaded | Unavailable | Draining):
            self._client.end(CloseReason.PUBLISH_REFUSED, str(error))  # the client sends it again when it is back
        elif error is not None:
            self.unacknowledged.pop(packet_id, None)
            self._client.refused(packet_id, ReasonCode.QUOTA_EXCEEDED, str(error))
        elif outcome is not None:
            self._answer(packet_id, *outcome)

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
        """Return the messages that the client may publish. The others are dropped, or refused; at QoS 1 and 2 that ends the session
        of a client of MQTT 3, which cannot refuse. The client is charged for all."""
        if access.tenant is not None:
            messages = self._of_tenant(messages, access.tenant)
        self._client.hold(Hold.QUOTA, pay(access, messages))
        passed: list[tuple[int, Publish]] = []
        for key, message in messages:
            if may_publish(access, key, message):
                passed.append((key, message))
            elif access.over:  # the end that says why is on its way; the client sends again what is not acknowledged
                return passed
            elif message.qos and self._client.dialect < 5:
                self._client.end(CloseReason.NOT_ALLOWED, NOT_ALLOWED)
                return passed
            else:
                self._clients.counters.denied += 1
                if message.qos:
                    self._client.refused(message.packet_id, ReasonCode.NOT_AUTHORISED, NOT_ALLOWED)
        return passed

    def _of_tenant(self, messages: Sequence[tuple[int, Publish]], tenant: TenantUse) -> list[tuple[int, Publish]]:
        """Return the messages that the client's tenant may publish now. Those of QoS 0 are dropped, others refused: not in MQTT 3,
        whose client is not read from instead. A client of MQTT 5 whose QoS 0 the overloaded gateway refuses is closed: nothing
        else tells it."""
        why, client, counters = tenant.why_over(self._clients.now()), self._client, tenant.counters
        passed: list[tuple[int, Publish]] = []
        dropped = 0
        for each in messages:
            message = each[1]
            if not message.qos and (why or tenant.stage):
                dropped += 1
            elif why and client.dialect >= 5:
                counters.refused_messages += 1
                client.refused(message.packet_id, ReasonCode.QUOTA_EXCEEDED, why)
            elif message.retain and not tenant.take_retained(len(message.payload)):
                self._clients.counters.retained_refused += 1
                if message.qos:
                    client.refused(message.packet_id, ReasonCode.QUOTA_EXCEEDED, NO_RETAINED)
            else:
                passed.append(each)
        counters.dropped_in += dropped
        if tenant.stage is Stage.REFUSED:
            client.hold(Hold.QUOTA, REFUSED_S)
            if dropped and client.dialect >= 5:
                client.end(CloseReason.RATE, why)
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
        qos = message.qos
        if not qos:
            sessions = self._client.sessions
            if sessions is not None and sessions.important and sessions.is_important(message.topic):
                qos = 1  # sessions that are away get it
        origin = origin_of(qos, retain=message.retain)
        extension, lifetime = b"", 0
        if message.properties is not None:
            extension = extension_for(message.properties, time.time_ns() // 1_000_000)
            lifetime = lifetime_min_of(message.properties)
        if message.topic.startswith(USER_PREFIX):
            return encode(
                Kind.CHAT, key, message.payload, snowflake, sender=sender, limit=limit, origin=origin, extension=extension,
                lifetime_min=lifetime,
            )  # fmt: skip
        free = not message.topic.startswith(ROOM_PREFIX)
        body = with_topic(message.topic, message.payload) if free else message.payload
        flags = Flag.TO_ROOM | Flag.TOPIC if free else Flag.TO_ROOM
        return encode(
            Kind.ROOM, key, body, snowflake, sender=sender, flags=flags, limit=limit, origin=origin, extension=extension,
            lifetime_min=lifetime,
        )  # fmt: skip

    def _snowflake(self, message: Publish) -> SnowflakeID:
        """Return a message's ID; one that is sent again after a reconnect, with DUP, keeps its ID."""
        if message.qos == 2 and self._client.keeping is not None:
            stored = self._client.keeping.snowflake(message.packet_id)
            if stored is not None:
                return stored
        if message.dup:
            earlier = self.earlier.pop(message.packet_id, None)
            if earlier is not None:
                return earlier
        return self._clients.next_snowflake()

    def closed(self, *, elsewhere: bool = False) -> None:
        """Send nothing more, because the connection has ended; `elsewhere`: its client has another one. What a proxy does not have
        shortly after leaves no more."""
        self._sender.until = self._clients.now() + (0.0 if elsewhere else LEFT_S)
        self._queue = None
        self._again.clear()
        self._clients.publishers.forget(self._send_on)

    def _send_on(self) -> None:
        """Send what may leave, and read from the client only while nothing waits."""
        leaving: list[Confirmable] = []
        while self._queue and not self._again and self._client.is_open:
            message = self._queue[0]
            if self._unstored and message.packet_id in self._unstored:
                break
            size = len(message.record)
            if (self._accepted or self._never_again) and self._is_late(message):
                self._queue.popleft()
                self.waiting_bytes -= size
                self._give_up(message, LOST)
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
        accepted; an older one is refused (in MQTT 3 acknowledged) and counted, because sending it again would break the order.
        """
        self._under_way -= len(message.record)
        count, latest = self._sent.pop(message.key)
        if count > 1:
            self._sent[message.key] = count - 1, latest
        client, counters = self._client, self._clients.counters
        if not client.is_open:
            return
        code, text = ReasonCode.SUCCESS, ""
        self._clients.hurry()
        if error is not None:
            message.refused |= isinstance(error, Overloaded | Unavailable | Draining)
        if error is None:
            if len(self._accepted) >= MAX_ROOMS:
                self._accepted.clear()
                self._never_again = message.number
            self._accepted[message.key] = max(message.number, self._accepted.get(message.key, 0))
        elif isinstance(error, Offline):
            # MQTT has no message for it, and closing the connection would make the client send it again.
            counters.chat_offline += 1
            code, text = ReasonCode.NO_MATCHING_SUBSCRIBERS, OFFLINE
        elif self._may_go_again(message, error):
            pause_s = min(RETRY_S * 2**message.attempts, MAX_RETRY_S) * random.uniform(0.5, 1.0)
            if isinstance(error, Overloaded) and error.retry_after_ms:
                pause_s = error.retry_after_ms / 1000 * random.uniform(1.0, 1.25)
            self._send_again(message, pause_s)
            return
        elif isinstance(error, LocalError):
            counters.unroutable += 1
            if client.dialect < 5:
                client.end(CloseReason.PUBLISH_REFUSED, str(error))
                return
            code, text = ReasonCode.IMPLEMENTATION_SPECIFIC, str(error)
        elif isinstance(error, TopicAway) and client.dialect >= 5:
            counters.unroutable += 1
            code, text = ReasonCode.QUOTA_EXCEEDED, str(error)
        else:
            code, text = ReasonCode.UNSPECIFIED, LOST if isinstance(error, Dropped) else str(error)
        if code is ReasonCode.UNSPECIFIED:
            self._give_up(message, text)
        else:
            self._done(message, code, text)
        if self._queue and client.is_open:
            self._send_on()

    def _give_up(self, message: Confirmable, text: str) -> None:
        """Refuse a message that is not sent again. A client of MQTT 3 learns that it was refused for now only if its connection
        ends: then it sends it again."""
        self._clients.counters.unroutable += 1
        if message.refused and self._client.dialect < 5:
            self._client.end(CloseReason.PUBLISH_REFUSED, text)
            return
        self._done(message, ReasonCode.UNSPECIFIED, text)

    def _done(self, message: Confirmable, code: ReasonCode = ReasonCode.SUCCESS, text: str = "") -> None:
        if self._retaining is not None and message.packet_id in self._retaining:
            self._retaining[message.packet_id] = code, text
            return
        self._answer(message.packet_id, code, text)

    def _answer(self, packet_id: int, code: ReasonCode, text: str) -> None:
        self.unacknowledged.pop(packet_id, None)
        if not self.unacknowledged:
            self._accepted.clear()  # nothing older remains that could be sent again
        if code:
            self._client.refused(packet_id, code, text)
        else:
            self._client.published(packet_id)

    def _is_late(self, message: Confirmable) -> bool:
        """True if a later message of this client to the room was accepted."""
        return message.number <= max(self._accepted.get(message.key, 0), self._never_again)

    def _may_go_again(self, message: Confirmable, error: PixiuError) -> bool:
        if self._is_late(message):
            return False
        if isinstance(error, Dropped):
            return message.attempts < MAX_RETRIES
        if isinstance(error, TopicAway):
            return message.attempts < MAX_ROUTE_RETRIES
        return isinstance(error, Overloaded | Unavailable | Draining)
