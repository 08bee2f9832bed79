"""The MQTT side of a gateway: one asyncio protocol around the session of `pixiu.mqtt.server`.

Source: DESIGN section 15.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import Sequence
from typing import Protocol

from gateway.backlog import Backlog, Grade
from gateway.mail_queue import OVERRUN, MailQueue
from gateway.options import Options
from gateway.rates import PublishRates
from gateway.slow_consumers import SlowConsumers
from pixiu.errors import LeaseExpired, Offline, Overloaded, PixiuError
from pixiu.ids import SnowflakeID, device_class_of_name, device_of_name, uin_of_name
from pixiu.mqtt.events import (
    Close,
    CloseReason,
    Connected,
    DropMessages,
    Effect,
    PacketsAcknowledged,
    PauseReading,
    PublishMessages,
    ResumeReading,
    Send,
    SendMail,
    SubscribeFilters,
    UnsubscribeFilters,
)
from pixiu.mqtt.mail import Mail
from pixiu.mqtt.packets import SUBACK_FAILURE, ConnackCode, Connect, Publish
from pixiu.mqtt.server import ServerSession, SessionLimits
from pixiu.mqtt.topics import ROOM_PREFIX, USER_PREFIX
from pixiu.placement.big_rooms import VRooms
from pixiu.wire.envelope import REDELIVERED, Delivery
from pixiu.wire.record import Flag, Kind, body_of, encode, with_topic

WRITE_BYTES = 64 << 10
"""A client that catches up is written so much at a time. What it does not take at once waits in asyncio's buffer; as long
as something is there, messages wait in our own bounded backlog."""
MAX_ANSWER_BYTES = 256 << 10
"""Bytes of answers that may wait behind what a client does not read; with more it is closed."""
CONNECT_SPREAD_S = 1.0
"""Connections without a CONNECT are closed up to so much late, at random: those that came together would else be closed in
one turn of the loop, while nobody is served, and come back together."""
CLOSE_TIMEOUT_S = 5.0
"""How long a client that is closed may take to read what was written before."""
REFUSAL_DELAY_S = 1.0
"""A client that is refused because too many connect is told after half of this to all of it, at random: it has no other
way to learn when to come again, and many try at once."""
RESET_AT_CLOSE = struct.pack("ii", 1, 0)
"""Linger for no time at all."""
MAX_RETRIES = 3
"""How often a QoS 1 message that a broker did not confirm is sent again, as long as it is its room's newest."""

MAX_NEWEST = 4096
"""Rooms whose newest QoS 1 message of a client is remembered; beyond it all are forgotten, and not sent again."""


class ConnectionHost(Protocol):
    """What the gateway's service offers to its protocols."""

    options: Options
    limits: SessionLimits
    max_record_bytes: int
    vrooms: VRooms
    rates: PublishRates
    slow: SlowConsumers

    def now(self) -> float:
        """Monotonic seconds."""

    def arrived(self, connection: MQTTConnection) -> int:
        """A number for a new connection, which has not said who it is yet."""

    @property
    def endpoint(self) -> int:
        """This gateway's endpoint ID."""

    def admit(self, connection: MQTTConnection) -> None:
        """The client says who it is. Raises `Overloaded` or `Draining`."""

    @property
    def serves_users(self) -> bool:
        """Whether messages to users can come."""

    def opened(self, connection: MQTTConnection, uin: int, device: int, device_class: int) -> None:
        """The client said who it is."""

    def closed(self, connection: MQTTConnection, reason: int) -> None:
        """The client is gone."""

    def take_over(self, client_id: str, connection: MQTTConnection) -> dict[int, SnowflakeID]:
        """A client ID connected: an older connection of it ends. Returns the IDs of its unacknowledged messages by packet ID."""

    def gone(self, client_id: str, connection: MQTTConnection, unacknowledged: dict[int, SnowflakeID]) -> None:
        """The connection of a client ID ended."""

    @property
    def serves_mail(self) -> bool:
        """Whether mail can come."""

    def join(
        self, connection: MQTTConnection, request: int, channels: list[tuple[int, bytes | None]], chat: bool, mail: bool
    ) -> None:
        """The client subscribes."""

    def leave(self, connection: MQTTConnection, channels: list[tuple[int, bytes | None]], chat: bool, mail: bool) -> None:
        """The client unsubscribes."""

    def packets_acknowledged(self, connection: MQTTConnection, packet_ids: Sequence[int]) -> None:
        """The client sent PUBACKs."""

    def publish(self, records: list[tuple[int, bytes]]) -> None:
        """Messages of QoS 0: (key, record)."""

    def publish_confirmed(self, message: Confirmable) -> None:
        """A message of QoS 1; `message.resolved` is called once. Raises `Overloaded` or `Unavailable`."""

    def next_snowflake(self) -> SnowflakeID:
        """A new message's ID. Raises `LeaseExpired`."""

    def count_dropped(self, messages: int) -> None:
        """Messages were dropped for a slow client."""

    def count_unroutable(self, messages: int) -> None:
        """Messages of QoS 0 went to names that no room carries, or could not be taken."""

    def count_offline(self) -> None:
        """A message of QoS 1 went to a user who is not there."""

    def count_closed(self, reason: CloseReason) -> None:
        """A connection ended for this reason."""


class Confirmable:
    """A message of QoS 1 on its way to the brokers."""

    __slots__ = ("_connection", "attempts", "key", "packet_id", "record", "snowflake")

    def __init__(self, connection: MQTTConnection, packet_id: int, key: int, record: bytes, snowflake: SnowflakeID) -> None:
        self._connection = connection
        self.packet_id = packet_id
        self.key = key
        self.record = record
        self.snowflake = snowflake
        self.attempts = 0

    def resolved(self, error: PixiuError | None) -> None:
        """The brokers have it, or `error` says why not."""
        self._connection.publish_resolved(self, error)


class MQTTConnection(asyncio.Protocol):
    """One MQTT client."""

    def __init__(self, hub: ConnectionHost) -> None:
        self.id = 0
        self.uin = 0
        self._hub = hub
        self._loop = asyncio.get_running_loop()
        self._session: ServerSession | None = None
        self._transport: asyncio.Transport | None = None
        self._client_id: str | None = None
        self._out: bytes | None = None
        self._out_count = 0
        self._paused = False
        self._refusing = False
        self._refusal: list[Effect] = []
        self._backlog = Backlog(hub.options.connection_buffer_bytes, hub.options.slow_consumer_timeout_s)
        self._mail = MailQueue()
        self._takes_mail = False
        self._timer: asyncio.TimerHandle | None = None
        self._unacknowledged: dict[int, SnowflakeID] = {}
        self._earlier: dict[int, SnowflakeID] = {}
        self._newest: dict[int, SnowflakeID] = {}
        self._codes: dict[int, list[int]] = {}
        """Packet ID of a SUBSCRIBE that names users → what its SUBACK says; as many as the session lets wait."""

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client connected."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.id = self._hub.arrived(self)
        transport.set_write_buffer_limits(high=0)
        sock: socket.socket = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._hub.options.socket_send_buffer_bytes)
        # Unlike that of every other client of the cluster: two with one ID would take each other's place.
        name = f"pixiu-{self._hub.endpoint:x}-{self.id:x}"
        self._session = ServerSession(self._hub.now(), name, self._hub.limits, self._admit, self._hub.vrooms)
        self._arm()

    def data_received(self, data: bytes) -> None:
        """Bytes of a client."""
        if self._session is None:
            return
        effects = self._session.receive(data, self._hub.now())
        if self._refusing:
            self._refuse_later(effects)
        else:
            self._perform(effects)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._transport = None
        self._hub.slow.discard(self)
        self._refuse()
        if self._session is not None:
            self._perform(self._session.connection_lost(self._hub.now()))

    def pause_writing(self) -> None:
        """The client did not take all: messages wait in the backlog."""
        self._paused = True
        self._backlog.leaving(self._hub.slow.now())
        self._hub.slow.add(self)

    def resume_writing(self) -> None:
        """The client took what was written: write what waits, at once or, when it is behind, in a while."""
        self._paused = False
        grade = self._backlog.grade(self._hub.slow.now())
        self._backlog.left()
        if self._backlog and grade is not Grade.PROMPT:
            self._hub.slow.catch_up_in_a_batch(self)
        else:
            self.catch_up()

    # What the slow consumers' timers call.

    def catch_up(self) -> None:
        """Write what waits, as far as the client takes it."""
        self._write_mail()
        while self._backlog and not self._paused and self._transport is not None:
            chunks, _ = self._backlog.take(WRITE_BYTES)
            self._transport.write(b"".join(chunks))
            if not self._paused:
                self._backlog.left()
        if not self._backlog and not self._mail and not self._paused:
            self._hub.slow.discard(self)

    def check(self, now: float) -> Grade:
        """How far the client is behind; ends the connection when that has lasted too long."""
        if not self._backlog.patient(now):
            self.end(CloseReason.SLOW_CONSUMER, SLOW)
        return self._backlog.grade(now)

    # What the gateway calls.

    def deliver(self, data: bytes, count: int) -> None:
        """Take `count` packets; they leave at `flush`."""
        if self._out is None:
            self._out, self._out_count = data, count
        else:
            self._out += data
            self._out_count += count

    def flush(self) -> None:
        """Write what was delivered in this turn."""
        data, count = self._out, self._out_count
        self._out, self._out_count = None, 0
        if data is None or self._transport is None:
            return
        if not self._paused and not self._backlog:
            self._transport.write(data)
            return
        before = self._backlog.dropped
        patient = self._backlog.put(data, count, self._hub.slow.now())
        if self._backlog.dropped != before:
            self._hub.count_dropped(self._backlog.dropped - before)
        if not patient:
            self.end(CloseReason.SLOW_CONSUMER, SLOW)

    def deliver_mail(self, deliveries: Sequence[Delivery], anew: bool) -> None:
        """Write mail, as the client takes it."""
        if self._session is not None:
            mails = [Mail(item.lane, item.seq, body_of(item.record), bool(item.flags & REDELIVERED)) for item in deliveries]
            self._perform(self._session.deliver_mail(f"{USER_PREFIX}{self.uin}", mails, self._hub.now(), anew=anew))

    def answer(self, request: int, known: bool) -> None:
        """A subscription has taken effect."""
        if self._session is not None:
            self._perform(self._session.subscription_confirmed(request, self._hub.now(), self._codes.pop(request, None)))

    def announce(self) -> None:
        """MQTT 3.1.1 has no word for it."""

    def close(self, reason: str) -> None:
        """The gateway is going."""
        self.end(CloseReason.DRAINING, reason)

    def replaced(self, moved: bool) -> None:
        """A newer login took the place of this one. MQTT 3.1.1 has no word for it."""
        if moved:
            self.end(CloseReason.TAKEN_OVER, "the same client connected to another gateway")
        else:
            self.end(CloseReason.REPLACED, "another device of the user connected, and the login policy allows one")

    def evict(self) -> None:
        """Too many connections have not said who they are, and this is the oldest."""
        self._refuse()
        self.end(CloseReason.EVICTED, "no CONNECT, and others came")

    def end(self, reason: CloseReason, text: str) -> None:
        """End the connection."""
        if self._session is not None:
            self._perform(self._session.close(reason, text, self._hub.now()))

    def publish_resolved(self, message: Confirmable, error: PixiuError | None) -> None:
        """A message of QoS 1 is accepted, lost, or cannot be taken.

        A message that a broker did not confirm, or that a proxy refused for now, is sent again with the same ID while it
        is the newest that this client sent to the room; an older one is acknowledged and counted, because sending it
        again would break the order.
        """
        if self._session is None:
            return
        if error is not None and error.code == "DROPPED":
            newest = self._newest.get(message.key) == message.snowflake
            if newest and message.attempts < MAX_RETRIES:
                message.attempts += 1
                self._confirm_by_hub(message)
                return
            self._hub.count_unroutable(1)
        elif isinstance(error, Overloaded) and error.retry_after_ms:
            if self._newest.get(message.key) == message.snowflake:
                wait_s = error.retry_after_ms / 1000 * random.uniform(1.0, 1.25)
                self._hold(wait_s)
                self._loop.call_later(wait_s, self._again, message)
                return
            self._hub.count_unroutable(1)
        elif isinstance(error, Offline):
            # MQTT has no word for it, and closing the connection would make the client send it again.
            self._hub.count_offline()
        elif error is not None:
            self._perform(self._session.publish_refused(str(error), self._hub.now()))
            return
        self._unacknowledged.pop(message.packet_id, None)
        self._perform(self._session.publish_accepted((message.packet_id,), self._hub.now()))

    # Inside.

    def _admit(self, connect: Connect) -> ConnackCode:
        try:
            self._hub.admit(self)
        except PixiuError:
            self._refusing = True
            return ConnackCode.SERVER_UNAVAILABLE
        return ConnackCode.ACCEPTED

    def _refuse_later(self, effects: list[Effect]) -> None:
        """Keep the refusal for a while. Until it is told the connection counts among those that are not connected."""
        if effects:
            self._refusal = effects
            self._read(False)
            self._loop.call_later(random.uniform(0.5, 1.0) * REFUSAL_DELAY_S, self._refuse)

    def _refuse(self) -> None:
        effects, self._refusal = self._refusal, []
        self._perform(effects)

    def _again(self, message: Confirmable) -> None:
        if self._session is not None:
            self._confirm_by_hub(message)

    def _hold(self, seconds: float) -> None:
        """Read nothing from the client for so long."""
        if self._session is not None and seconds:
            now = self._hub.now()
            self._perform(self._session.hold_reading(now + seconds, now))
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._arm()

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, PublishMessages):
                self._publish(effect.messages)
            elif isinstance(effect, Send):
                if self._transport is not None:
                    self._transport.write(effect.data)
            elif isinstance(effect, SubscribeFilters):
                self._subscribe(effect)
            elif isinstance(effect, UnsubscribeFilters):
                channels = [_channel(*item) for item in effect.filters if not item[0].startswith(USER_PREFIX)]
                self._leave(channels, len(channels) < len(effect.filters))
            elif isinstance(effect, SendMail):
                self._send_mail(effect)
            elif isinstance(effect, PacketsAcknowledged):
                self._hub.packets_acknowledged(self, effect.packet_ids)
            elif isinstance(effect, Connected):
                self._connected(effect)
            elif isinstance(effect, DropMessages):
                self._hub.count_unroutable(effect.number)
            elif isinstance(effect, PauseReading | ResumeReading):
                self._read(isinstance(effect, ResumeReading))
            elif isinstance(effect, Close):
                self._closed(effect)
        if effects:
            self._arm()
        if self._paused and self._transport is not None and self._transport.get_write_buffer_size() > MAX_ANSWER_BYTES:
            self.end(CloseReason.SLOW_CONSUMER, SLOW)

    def _connected(self, effect: Connected) -> None:
        self._client_id = effect.client_id
        self.uin = uin_of_name(effect.user_name or effect.client_id)
        self._earlier = self._hub.take_over(effect.client_id, self)
        device_class, named, _ = effect.client_id.partition(":")
        class_number = device_class_of_name(device_class) if named else 0
        self._hub.opened(self, self.uin, device_of_name(effect.client_id), class_number)

    def _subscribe(self, effect: SubscribeFilters) -> None:
        """Rooms and topics as they are; of users only the client's own, and only where messages to users can come."""
        channels: list[tuple[int, bytes | None]] = []
        codes: list[int] = []
        chat = mail = False
        for name, number in effect.filters:
            if not name.startswith(USER_PREFIX):
                channels.append(_channel(name, number))
                codes.append(0)
            elif number == self.uin and self._hub.serves_users:
                chat, mail = True, name in effect.mail and self._hub.serves_mail
                codes.append(int(mail))
            else:
                codes.append(SUBACK_FAILURE)
        if len(channels) < len(codes):
            self._codes[effect.packet_id] = codes
        if chat and self._takes_mail and not mail:
            self._hub.leave(self, [], False, True)
        self._takes_mail = mail if chat else self._takes_mail
        if channels or chat:
            self._hub.join(self, effect.packet_id, channels, chat, mail)
        else:
            self.answer(effect.packet_id, True)

    def _leave(self, channels: list[tuple[int, bytes | None]], user: bool) -> None:
        mail, self._takes_mail = user and self._takes_mail, self._takes_mail and not user
        self._hub.leave(self, channels, user, mail)

    def _send_mail(self, effect: SendMail) -> None:
        if self._mail.put(effect.packets, anew=effect.anew):
            self._write_mail()
        else:
            self.end(CloseReason.MAIL_OVERRUN, OVERRUN)

    def _write_mail(self) -> None:
        while self._mail and not self._paused and self._transport is not None:
            self._transport.write(b"".join(self._mail.take(WRITE_BYTES)))

    def _closed(self, effect: Close) -> None:
        self._hub.count_closed(effect.reason)
        self._session = None
        self._hub.slow.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        if self._client_id is not None:
            self._hub.gone(self._client_id, self, self._unacknowledged)
        self._hub.closed(self, _LOGOUT_REASONS.get(effect.reason, 1))
        if self._transport is not None:
            if effect.reason is CloseReason.SLOW_CONSUMER:
                self._reset()
                return
            self._transport.close()
            if self._transport.get_write_buffer_size():
                self._loop.call_later(CLOSE_TIMEOUT_S, self._reset)

    def _reset(self) -> None:
        """Drop the connection with all that it has not taken: who does not read would keep it in our memory, and, after an
        ordinary close, for minutes in the kernel's."""
        if self._transport is not None:
            sock: socket.socket = self._transport.get_extra_info("socket")
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
            self._transport.abort()

    def _read(self, wanted: bool) -> None:
        if self._transport is not None and not self._transport.is_closing():
            if wanted:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def _publish(self, messages: Sequence[tuple[int, Publish]]) -> None:
        plain: list[tuple[int, bytes]] = []
        if self._hub.rates.any:
            messages = self._within_rates(messages)
        for room, message in messages:
            try:
                snowflake = self._snowflake(message)
                record = self._encode(room, message, snowflake)
            except LeaseExpired as error:
                self.end(CloseReason.PUBLISH_REFUSED, str(error))
                return
            except PixiuError as error:
                if message.qos:
                    self.end(CloseReason.PUBLISH_REFUSED, str(error))
                    return
                self._hub.count_unroutable(1)
                continue
            if not message.qos:
                plain.append((room, record))
                continue
            if len(self._newest) >= MAX_NEWEST:
                self._newest.clear()
            self._newest[room] = snowflake
            self._unacknowledged[message.packet_id] = snowflake
            self._confirm_by_hub(Confirmable(self, message.packet_id, room, record, snowflake))
            if self._session is None:
                return
        if plain:
            self._hub.publish(plain)

    def _within_rates(self, messages: Sequence[tuple[int, Publish]]) -> list[tuple[int, Publish]]:
        """Those that may pass: all of QoS 1, for which the client then waits."""
        rates, client, now = self._hub.rates, self._client_id or "", self._hub.now()
        passed: list[tuple[int, Publish]] = []
        hold_s = 0.0
        for room, message in messages:
            size = len(message.payload)
            if message.qos:
                hold_s = max(hold_s, rates.spend(client, room, size, now))
            elif not rates.take(client, room, size, now):
                continue
            passed.append((room, message))
        self._hold(hold_s)
        return passed

    def _encode(self, room: int, message: Publish, snowflake: SnowflakeID) -> bytes:
        if message.topic.startswith(USER_PREFIX):
            return encode(Kind.CHAT, room, message.payload, snowflake, sender=self.uin, limit=self._hub.max_record_bytes)
        free = not message.topic.startswith(ROOM_PREFIX)
        body = with_topic(message.topic, message.payload) if free else message.payload
        flags = Flag.TO_ROOM | Flag.TOPIC if free else Flag.TO_ROOM
        return encode(Kind.ROOM, room, body, snowflake, sender=self.uin, flags=flags, limit=self._hub.max_record_bytes)

    def _snowflake(self, message: Publish) -> SnowflakeID:
        """A message's ID; one that comes again after a reconnect, with DUP, keeps the one that it had."""
        if message.dup:
            earlier = self._earlier.pop(message.packet_id, None)
            if earlier is not None:
                return earlier
        return self._hub.next_snowflake()

    def _confirm_by_hub(self, message: Confirmable) -> None:
        try:
            self._hub.publish_confirmed(message)
        except PixiuError as error:
            self.end(CloseReason.PUBLISH_REFUSED, str(error))

    def _arm(self) -> None:
        """One timer a connection; it is moved only when it fires."""
        if self._timer is None and self._session is not None:
            deadline = self._session.next_deadline()
            if deadline is not None:
                wait_s = max(deadline - self._hub.now(), 0.01)
                if self._client_id is None:
                    wait_s += random.uniform(0.0, CONNECT_SPREAD_S)
                self._timer = self._loop.call_later(wait_s, self._timeout)

    def _timeout(self) -> None:
        self._timer = None
        if self._session is not None:
            self._perform(self._session.timeout(self._hub.now()))
            self._arm()


SLOW = "the client does not read its messages fast enough"
_LOGOUT_REASONS = {
    CloseReason.KEEP_ALIVE: 2,
    CloseReason.CONNECTION_LOST: 2,
    CloseReason.SLOW_CONSUMER: 3,
    CloseReason.DRAINING: 4,
    CloseReason.TAKEN_OVER: 5,
    CloseReason.REPLACED: 5,
}
"""Why a user left, as `Reason` of control.proto has it; 1 (left) otherwise."""


def _channel(name: str, room: int) -> tuple[int, bytes | None]:
    return room, None if name.startswith(ROOM_PREFIX) else name.encode()
