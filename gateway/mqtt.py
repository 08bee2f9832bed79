"""The MQTT side of a gateway: one asyncio protocol around the session of `pixiu.mqtt.server`.

Source: docs/operations.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import Sequence

from gateway import events as ev
from gateway.backlog import Backlog, Grade
from gateway.clients import Clients
from gateway.mail_queue import OVERRUN, MailQueue
from gateway.mqtt_publishing import Publishing
from pixiu.errors import PixiuError
from pixiu.ids import device_class_of_name, device_of_name, uin_of_name
from pixiu.mqtt import events as session_events
from pixiu.mqtt.events import CloseReason, Effect
from pixiu.mqtt.mail import Mail
from pixiu.mqtt.packets import SUBACK_FAILURE, ConnackCode, Connect
from pixiu.mqtt.server import ServerSession
from pixiu.mqtt.topics import ROOM_PREFIX, USER_PREFIX
from pixiu.wire.envelope import ENVELOPE_SIZE, REDELIVERED, Envelope
from pixiu.wire.record import body_of

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


class MQTTConnection(asyncio.Protocol):
    """The connection of one MQTT client."""

    packets = True

    def __init__(self, clients: Clients) -> None:
        self.id = 0
        self.uin = 0
        self.client_id: str | None = None
        """Once it is connected."""
        self._clients = clients
        self._loop = asyncio.get_running_loop()
        self._session: ServerSession | None = None
        self._transport: asyncio.Transport | None = None
        self._out: bytes | None = None
        self._out_count = 0
        self._paused = False
        self._refusing = False
        self._refusal: list[Effect] = []
        self._backlog = Backlog(clients.options.connection_buffer_bytes, clients.options.slow_consumer_timeout_s)
        self._mail = MailQueue()
        self._takes_mail = False
        self._timer: asyncio.TimerHandle | None = None
        self._publishing = Publishing(self, clients)
        self._codes: dict[int, list[int]] = {}
        """Packet ID of a SUBSCRIBE that names users → what its SUBACK says; as many as the session lets wait."""

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio when the client has connected."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.id = self._clients.arrived(self)
        transport.set_write_buffer_limits(high=0)
        sock: socket.socket = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._clients.options.socket_send_buffer_bytes)
        # Unlike that of every other client of the cluster: two with one ID would take each other's place.
        name = f"pixiu-{self._clients.endpoint:x}-{self.id:x}"
        self._session = ServerSession(self._clients.now(), name, self._clients.limits, self._admit, self._clients.vrooms)
        self._arm()

    def data_received(self, data: bytes) -> None:
        """Bytes of a client."""
        if self._session is None:
            return
        effects = self._session.receive(data, self._clients.now())
        if self._refusing:
            self._refuse_later(effects)
        else:
            self._perform(effects)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._transport = None
        self._clients.slow_consumers.discard(self)
        self._refuse()
        if self._session is not None:
            self._perform(self._session.connection_lost(self._clients.now()))

    def pause_writing(self) -> None:
        """The client did not take all: messages wait in the backlog."""
        self._paused = True
        self._backlog.leaving(self._clients.slow_consumers.now())
        self._clients.slow_consumers.add(self)

    def resume_writing(self) -> None:
        """The client took what was written: write what waits, at once or, when it is behind, in a while."""
        self._paused = False
        now = self._clients.slow_consumers.now()
        grade = self._backlog.grade(now)
        self._clients.slow_consumers.waited(self._backlog.behind_s(now))
        self._backlog.left()
        if self._backlog and grade is not Grade.PROMPT:
            self._clients.slow_consumers.catch_up_in_a_batch(self)
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
            self._clients.slow_consumers.discard(self)

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
        patient = self._backlog.put(data, count, self._clients.slow_consumers.now())
        if self._backlog.dropped != before:
            self._clients.counters.slow_consumer_dropped += self._backlog.dropped - before
        if not patient:
            self.end(CloseReason.SLOW_CONSUMER, SLOW)

    def deliver_mail(self, deliveries: Sequence[Envelope], anew: bool) -> None:
        """Write mail, as the client takes it."""
        if self._session is not None:
            mails = [
                Mail(item.lane, item.seq, body_of(item.data[ENVELOPE_SIZE:]), bool(item.flags & REDELIVERED)) for item in deliveries
            ]
            self._perform(self._session.deliver_mail(f"{USER_PREFIX}{self.uin}", mails, self._clients.now(), anew=anew))

    def answer(self, request: int, known: bool) -> None:
        """A subscription has taken effect."""
        if self._session is not None:
            self._perform(self._session.subscription_confirmed(request, self._clients.now(), self._codes.pop(request, None)))

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
        """End the connection to the client."""
        if self._session is not None:
            self._perform(self._session.close(reason, text, self._clients.now()))

    @property
    def is_open(self) -> bool:
        """Whether the session goes on."""
        return self._session is not None

    def hold_reading(self, seconds: float) -> None:
        """Read nothing from the client for so long."""
        if self._session is not None and seconds:
            now = self._clients.now()
            self._perform(self._session.hold_reading(now + seconds, now))
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._arm()

    def published(self, packet_id: int) -> None:
        """A message of QoS 1 is done: acknowledge it."""
        if self._session is not None:
            self._perform(self._session.publish_accepted((packet_id,), self._clients.now()))

    def publish_refused(self, text: str) -> None:
        """A message of QoS 1 cannot be taken."""
        if self._session is not None:
            self._perform(self._session.publish_refused(text, self._clients.now()))

    # Inside.

    def _admit(self, connect: Connect) -> ConnackCode:
        try:
            self._clients.admit(self)
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

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, session_events.PublishMessages):
                self._publishing.publish(effect.messages)
            elif isinstance(effect, session_events.Send):
                if self._transport is not None:
                    self._transport.write(effect.data)
            elif isinstance(effect, session_events.SubscribeFilters):
                self._subscribe(effect)
            elif isinstance(effect, session_events.UnsubscribeFilters):
                channels = [_channel(*item) for item in effect.filters if not item[0].startswith(USER_PREFIX)]
                self._leave(channels, len(channels) < len(effect.filters))
            elif isinstance(effect, session_events.SendMail):
                self._send_mail(effect)
            elif isinstance(effect, session_events.PacketsAcknowledged):
                self._clients.step(ev.PacketsAcknowledged(self.id, effect.packet_ids))
            elif isinstance(effect, session_events.Connected):
                self._connected(effect)
            elif isinstance(effect, session_events.DropMessages):
                self._clients.counters.unroutable += effect.number
            elif isinstance(effect, session_events.PauseReading | session_events.ResumeReading):
                self._read(isinstance(effect, session_events.ResumeReading))
            elif isinstance(effect, session_events.Close):
                self._closed(effect)
        if effects:
            self._arm()
        if self._paused and self._transport is not None and self._transport.get_write_buffer_size() > MAX_ANSWER_BYTES:
            self.end(CloseReason.SLOW_CONSUMER, SLOW)

    def _connected(self, effect: session_events.Connected) -> None:
        self.client_id = effect.client_id
        self.uin = uin_of_name(effect.user_name or effect.client_id)
        self._publishing.earlier = self._clients.take_over(effect.client_id, self)
        device_class, named, _ = effect.client_id.partition(":")
        class_number = device_class_of_name(device_class) if named else 0
        self._clients.opened(self, self.uin, device_of_name(effect.client_id), class_number, name=effect.client_id)

    def _subscribe(self, effect: session_events.SubscribeFilters) -> None:
        """Rooms and topics as they are; of users only the client's own, and only where messages to users can come."""
        channels: list[tuple[int, bytes | None]] = []
        codes: list[int] = []
        chat = mail = False
        for name, number in effect.filters:
            if not name.startswith(USER_PREFIX):
                channels.append(_channel(name, number))
                codes.append(0)
            elif number == self.uin and self._clients.serves_users:
                chat, mail = True, name in effect.mail and self._clients.serves_mail
                codes.append(int(mail))
            else:
                codes.append(SUBACK_FAILURE)
        if len(channels) < len(codes):
            self._codes[effect.packet_id] = codes
        if chat and self._takes_mail and not mail:
            self._clients.step(ev.Leave(self.id, [], False, True))
        self._takes_mail = mail if chat else self._takes_mail
        if channels or chat:
            self._clients.step(ev.Join(self.id, effect.packet_id, channels, chat, mail))
        else:
            self.answer(effect.packet_id, True)

    def _leave(self, channels: list[tuple[int, bytes | None]], user: bool) -> None:
        mail, self._takes_mail = user and self._takes_mail, self._takes_mail and not user
        self._clients.step(ev.Leave(self.id, channels, user, mail))

    def _send_mail(self, effect: session_events.SendMail) -> None:
        if self._mail.put(effect.packets, anew=effect.anew):
            self._write_mail()
        else:
            self.end(CloseReason.MAIL_OVERRUN, OVERRUN)

    def _write_mail(self) -> None:
        while self._mail and not self._paused and self._transport is not None:
            self._transport.write(b"".join(self._mail.take(WRITE_BYTES)))

    def _closed(self, effect: session_events.Close) -> None:
        self._clients.closed_by_reason[effect.reason.value] += 1
        self._session = None
        self._clients.slow_consumers.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        if self.client_id is not None:
            self._clients.gone(self.client_id, self, self._publishing.unacknowledged)
        self._clients.closed(self, _LOGOUT_REASONS.get(effect.reason, 1))
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

    def _arm(self) -> None:
        """One timer a connection; it is moved only when it fires."""
        if self._timer is None and self._session is not None:
            deadline = self._session.next_deadline()
            if deadline is not None:
                wait_s = max(deadline - self._clients.now(), 0.01)
                if self.client_id is None:
                    wait_s += random.uniform(0.0, CONNECT_SPREAD_S)
                self._timer = self._loop.call_later(wait_s, self._timeout)

    def _timeout(self) -> None:
        self._timer = None
        if self._session is not None:
            self._perform(self._session.timeout(self._clients.now()))
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
