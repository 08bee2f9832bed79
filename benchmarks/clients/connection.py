"""A light MQTT client of the project's own codec: 10,000 of them fit in one process.

    connection = await connect(("127.0.0.1", 1883), Session("c-7"), dialect=MQTT_5, on_message=take)
    codes = await connection.subscribe([("room/42", 1)])
    await connection.publish("room/42", b"hello", 1)

It does what a receiver owes: PUBACK, PUBREC and PUBCOMP come by themselves, and a message of QoS 2 whose packet identifier is still
open is answered and not passed on. A `Session` that is used for several connections keeps what the standard asks a client to keep.

Source: OASIS MQTT 3.1.1 and 5.0, sections 3 and 4.3, 4.4.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.mqtt.codec import DISCONNECT, PINGREQ, Decoder, encode
from cluster.mqtt.packets import (
    MAX_PACKET_ID,
    MQTT_3_1_1,
    MQTT_5,
    Connack,
    Connect,
    Dialect,
    Disconnect,
    Packet,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Side,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
    Will,
)
from cluster.mqtt.properties import Property

ANSWER_S = 60.0
"""Limit of a CONNECT, SUBSCRIBE or UNSUBSCRIBE."""
FAILURE = 0x80
"""Codes from here on are failures."""


class Lost(Exception):
    """The connection ended before the answer."""


class Refused(Exception):
    """CONNECT or PUBLISH was refused with `code`."""

    def __init__(self, code: int) -> None:
        super().__init__(f"refused with {code:#x}")
        self.code = code


@dataclass(slots=True)
class Sent:
    """A message of QoS 1 or 2 that is not done."""

    packet: Publish
    released: bool = False
    """PUBREC has come."""
    done: asyncio.Future[None] | None = None


@dataclass(slots=True)
class Session:
    """What a client keeps: packet identifiers of both directions."""

    client_id: str
    user: str | None = None
    sent: dict[int, Sent] = field(default_factory=dict)
    received: set[int] = field(default_factory=set)
    """Of messages of QoS 2 whose PUBREL has not come."""
    last_id: int = 0

    def next_id(self) -> int:
        """A packet identifier that is free."""
        for _ in range(MAX_PACKET_ID):
            self.last_id = self.last_id % MAX_PACKET_ID + 1
            if self.last_id not in self.sent:
                break
        return self.last_id

    def forget(self, error: Exception) -> None:
        """The server has no session: what is not done is not known to be done."""
        for each in self.sent.values():
            if each.done is not None and not each.done.done():
                each.done.set_exception(error)
                each.done.exception()
        self.sent.clear()
        self.received.clear()


MessageCallback = Callable[["Connection", Publish], None]
Callback = Callable[["Connection"], None]


class Connection(asyncio.Protocol):
    """One connection. Attributes:

    ended: done when it has ended. session_present: as CONNACK said. code: of a DISCONNECT from the server; -1: none came.
    repeats: messages of QoS 2 that came again within their exchange. ack_delay_s: time from a message to its PUBACK or PUBREC.
    """

    def __init__(
        self, session: Session, dialect: Dialect, on_message: MessageCallback | None, on_end: Callback | None,
        on_connected: Callback | None,
    ) -> None:  # fmt: skip
        self.session, self.dialect = session, dialect
        self.on_message, self.on_end, self.on_connected = on_message, on_end, on_connected
        self.session_present, self.code, self.repeats, self.ack_delay_s = False, -1, 0, 0.0
        self.properties: dict[int, object] = {}
        self.closing = False
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._accepted: asyncio.Future[None] = self._loop.create_future()
        self._decoder = Decoder(Side.CLIENT, dialect=dialect)
        self._answers: dict[int, asyncio.Future[tuple[int, ...]]] = {}
        self._transport: asyncio.Transport | None = None
        self._pings: asyncio.TimerHandle | None = None

    # --- of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for packet in self._decoder.feed(data):
            self._take(packet)
        if self._decoder.error is not None:
            self.cut()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._pings is not None:
            self._pings.cancel()
        error = Lost(f"{self.session.client_id}: {exc or 'closed'}")
        waiters: list[asyncio.Future[Any]] = [self._accepted, *self._answers.values()]
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(error)
                waiter.exception()
        self._answers.clear()
        if not self.ended.done():
            self.ended.set_result(None)
        if self.on_end is not None:
            self.on_end(self)

    # --- for callers

    async def open(self, connect: Connect) -> None:
        """Send CONNECT, wait for CONNACK, send again what the session has not done. Raises Refused, Lost, TimeoutError."""
        self.write(encode(connect))
        async with asyncio.timeout(ANSWER_S):
            await self._accepted
        if not self.session_present:
            self.session.forget(Lost("the server has no session"))
        for packet_id, each in self.session.sent.items():
            again: Packet = Pubrel(packet_id) if each.released else each.packet._replace(dup=True)
            self.write(encode(again, self.dialect))
        if connect.keep_alive_s:
            self._ping(connect.keep_alive_s)

    async def subscribe(self, filters: Sequence[tuple[str, int]], properties: dict[int, object] | None = None) -> tuple[int, ...]:
        """Subscribe: the codes of SUBACK. Raises Lost, TimeoutError."""
        packet_id = self.session.next_id()
        return await self._ask(packet_id, Subscribe(packet_id, tuple(filters), properties=properties))

    async def unsubscribe(self, filters: Sequence[str]) -> tuple[int, ...]:
        """Unsubscribe, and wait for UNSUBACK. Raises Lost, TimeoutError."""
        packet_id = self.session.next_id()
        return await self._ask(packet_id, Unsubscribe(packet_id, tuple(filters)))

    def publish(self, topic: str, payload: bytes, qos: int = 0, *, retain: bool = False) -> asyncio.Future[None]:
        """Publish; done at PUBACK, or at PUBREC, which says that the server has it. It fails with Refused, or with Lost once it
        is clear that no later connection brings the answer: at once for a session that ends with its connection, see `abandon`."""
        done = self._loop.create_future()
        if not qos:
            self.write(encode(Publish(topic, payload, 0, retain), self.dialect))
            done.set_result(None)
            return done
        packet_id = self.session.next_id()
        packet = Publish(topic, payload, qos, retain, False, packet_id)
        self.session.sent[packet_id] = Sent(packet, False, done)
        self.write(encode(packet, self.dialect))
        return done

    def abandon(self) -> None:
        """The session ends with this connection."""
        self.session.forget(Lost("the session is over"))

    async def disconnect(self, properties: dict[int, object] | None = None, code: int = 0) -> None:
        """End it in order, and wait until the server has closed."""
        self.closing = True
        self.write(encode(Disconnect(code, properties), self.dialect) if self.dialect is MQTT_5 else DISCONNECT)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5.0):
                await asyncio.shield(self.ended)
        self.cut()
        await self.ended

    def cut(self) -> None:
        """End it without a DISCONNECT, at once."""
        if self._transport is not None:
            self._transport.abort()

    def write(self, data: bytes) -> None:
        """Send bytes as they are."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    # --- packets

    def _take(self, packet: Packet) -> None:
        session = self.session
        match packet:
            case Publish():
                self._take_message(packet)
            case Puback(packet_id, code):
                self._done(packet_id, code)
            case Pubrec(packet_id, code):
                sent = session.sent.get(packet_id)
                if code >= FAILURE:
                    self._done(packet_id, code)
                    return
                if sent is not None:
                    sent.released = True
                    if sent.done is not None and not sent.done.done():
                        sent.done.set_result(None)
                self.write(encode(Pubrel(packet_id), self.dialect))
            case Pubcomp(packet_id):
                self._done(packet_id, 0)
            case Pubrel(packet_id):
                session.received.discard(packet_id)
                self.write(encode(Pubcomp(packet_id), self.dialect))
            case Suback(packet_id, codes) | Unsuback(packet_id, codes):
                waiter = self._answers.pop(packet_id, None)
                if waiter is not None and not waiter.done():
                    waiter.set_result(codes)
            case Connack(present, code, properties):
                self.session_present, self.properties = present, dict(properties or {})
                if not self._accepted.done():
                    if code:
                        self._accepted.set_exception(Refused(code))
                    else:
                        self._accepted.set_result(None)
                        if self.on_connected is not None:
                            self.on_connected(self)
            case Disconnect(code):
                self.code = code
                self.cut()
            case _:
                pass

    def _take_message(self, message: Publish) -> None:
        if message.qos == 2:
            again = message.packet_id in self.session.received
            self.session.received.add(message.packet_id)
            self._acknowledge(Pubrec(message.packet_id))
            if again:
                self.repeats += 1
                return
        elif message.qos:
            self._acknowledge(Puback(message.packet_id))
        if self.on_message is not None:
            self.on_message(self, message)

    def _acknowledge(self, answer: Packet) -> None:
        data = encode(answer, self.dialect)
        if self.ack_delay_s:
            self._loop.call_later(self.ack_delay_s, self.write, data)
        else:
            self.write(data)

    def _done(self, packet_id: int, code: int) -> None:
        sent = self.session.sent.pop(packet_id, None)
        if sent is None or sent.done is None or sent.done.done():
            return
        if code >= FAILURE:
            sent.done.set_exception(Refused(code))
            sent.done.exception()
        else:
            sent.done.set_result(None)

    async def _ask(self, packet_id: int, packet: Packet) -> tuple[int, ...]:
        if self.ended.done():
            raise Lost("it has ended")
        waiter: asyncio.Future[tuple[int, ...]] = self._loop.create_future()
        self._answers[packet_id] = waiter
        self.write(encode(packet, self.dialect))
        async with asyncio.timeout(ANSWER_S):
            return await waiter

    def _ping(self, keep_alive_s: int) -> None:
        self.write(PINGREQ)
        self._pings = self._loop.call_later(keep_alive_s / 2, self._ping, keep_alive_s)


async def connect(
    address: tuple[str, int],
    session: Session,
    *,
    dialect: Dialect = MQTT_3_1_1,
    clean: bool = True,
    expiry_s: int = 0,
    will: Will | None = None,
    keep_alive_s: int = 0,
    source: str = "",
    on_message: MessageCallback | None = None,
    on_end: Callback | None = None,
    on_connected: Callback | None = None,
) -> Connection:
    """Connect.

    Args:
        address: of the gateway.
        session: is forgotten if `clean`.
        expiry_s: session expiry, of MQTT 5.
        source: address of the client, so that there are enough ports.
        on_message, on_end, on_connected: called for each message, when the connection has ended, and at its CONNACK.

    Raises Refused, Lost, TimeoutError, OSError.
    """
    loop = asyncio.get_running_loop()
    if clean:
        session.forget(Lost("a clean start"))
    properties: dict[int, object] | None = {Property.SESSION_EXPIRY: expiry_s} if dialect is MQTT_5 and expiry_s else None
    local = (source, 0) if source else None
    packet = Connect(session.client_id, clean, keep_alive_s, session.user, None, will, dialect, properties)
    async with asyncio.timeout(ANSWER_S):
        _, protocol = await loop.create_connection(
            lambda: Connection(session, dialect, on_message, on_end, on_connected), *address, local_addr=local
        )
    try:
        await protocol.open(packet)
    except BaseException:
        protocol.cut()
        raise
    return protocol
