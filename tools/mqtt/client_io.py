"""A light MQTT 3.1.1 client for asyncio: hundreds of connections and tens of thousands of messages a second in one loop.

Source: docs/operations.md.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from typing import Any, Final

from cluster.mqtt.events import Accepted, Answered, ClientEffect, Closed, Messages, Send
from cluster.mqtt.packets import SUBACK_FAILURE
from pixiu.errors import NotConnected, Overloaded, PixiuError, RemoteError, Unavailable
from tools.mqtt.client import CONNECT_TIMEOUT_S, ClientSession, State

FILTERS_PER_PACKET: Final = 500
"""Filters in one packet; longer lists go in several packets, one after the other."""
MAX_UNSENT_BYTES: Final = 4 << 20
"""Limit of bytes that wait for the network; above it `publish` raises `Overloaded`."""

CLOSE_TIMEOUT_S: Final = 5.0
"""Time limit for `close` to send what was published, seconds."""

MessageCallback = Callable[[str, bytes], None]
DisconnectCallback = Callable[[PixiuError | None], None]


class SubscriptionRefused(RemoteError):
    """The server refused some filters of a subscription; the others are granted."""

    def __init__(self, refused: Sequence[str]) -> None:
        shown = ", ".join(refused[:3]) + (" …" if len(refused) > 3 else "")
        super().__init__(f"the server refused {len(refused)} topic filters: {shown}")
        self.refused = tuple(refused)


class MQTTClient:
    """One connection to a gateway, or to any MQTT 3.1.1 server.

    host, port: of the server. client_id: unique among its clients; empty: the server chooses. username: for a gateway, the UIN in
    decimal or any name. keep_alive_s: 0: none. tls: certificates to trust and to present; None: no TLS.

    on_message(topic, payload) is called in the event loop for each message. on_disconnect(error) is called once when an established
    connection ends; error is None after `close`. Exceptions of both go to the loop's exception handler.

    A client connects once: to connect again, make a new one.

    Source: docs/operations.md; OASIS MQTT 3.1.1.
    """

    def __init__(
        self,
        host: str,
        port: int,
        client_id: str = "",
        username: str | None = None,
        *,
        password: bytes | None = None,
        keep_alive_s: int = 60,
        on_message: MessageCallback | None = None,
        on_disconnect: DisconnectCallback | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.on_message = on_message
        self.on_disconnect = on_disconnect
        self._host = host
        self._port = port
        self._tls = tls
        self._session = ClientSession(client_id, username, password, keep_alive_s)
        self._transport: asyncio.Transport | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        self._flushing = False
        self._writable: asyncio.Future[None] | None = None
        self._accepted: asyncio.Future[None] | None = None
        self._answers: dict[int, asyncio.Future[tuple[int, ...]]] = {}
        self._gone: asyncio.Future[None] | None = None
        self._error: PixiuError | None = None

    @property
    def connected(self) -> bool:
        """True if the connection is established and has not ended."""
        return self._session.state is State.CONNECTED

    @property
    def unacknowledged(self) -> int:
        """Number of requests that wait for their answer, including messages of QoS 1."""
        return self._session.unanswered

    async def connect(self) -> None:
        """Connect and wait for the server's CONNACK.

        Raises `ConnectionRefused` (a `RemoteError`) with the return code, `Unavailable` when nobody answers at the
        address, and `NotConnected` when this client was connected before.
        """
        if self._loop is not None or self._session.state is not State.NEW:
            raise NotConnected("a client connects once; make a new one to connect again")
        self._loop = loop = asyncio.get_running_loop()
        self._accepted, self._gone = loop.create_future(), loop.create_future()
        self._gone.add_done_callback(_retrieve)
        where = f"{self._host}:{self._port}"
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await loop.create_connection(lambda: _Connection(self), self._host, self._port, ssl=self._tls)
        except TimeoutError:
            raise Unavailable(f"no connection to {where} within {CONNECT_TIMEOUT_S:g} s") from None
        except ssl.SSLError as error:
            raise Unavailable(f"no connection to {where} by TLS: {getattr(error, 'verify_message', '') or error.reason}") from None
        except OSError as error:
            raise Unavailable(f"no connection to {where}: {error.strerror or error}; is an MQTT server there?") from None
        try:
            self._perform(self._session.connect(loop.time()))
            self._arm()
            await self._accepted
        except BaseException:
            self._abort()
            raise

    async def subscribe(self, filters: Sequence[str], qos: int = 0) -> None:
        """Subscribe and wait until it takes effect. Raises `SubscriptionRefused` with the filters that were refused.

        Also raises `NotConnected`, `InvalidArgument` and `Unavailable`.
        """
        refused: list[str] = []
        for first in range(0, len(filters), FILTERS_PER_PACKET):
            part = filters[first : first + FILTERS_PER_PACKET]
            codes = await self._ask(*self._session.subscribe(part, qos, self._now()))
            refused += [name for name, code in zip(part, codes, strict=True) if code == SUBACK_FAILURE]
        if refused:
            raise SubscriptionRefused(refused)

    async def unsubscribe(self, filters: Sequence[str]) -> None:
        """Unsubscribe and wait for the answer. Raises `NotConnected`, `InvalidArgument` and `Unavailable`."""
        for first in range(0, len(filters), FILTERS_PER_PACKET):
            await self._ask(*self._session.unsubscribe(filters[first : first + FILTERS_PER_PACKET], self._now()))

    def publish(self, topic: str, payload: bytes, qos: int = 0) -> None:
        """Queue a message; it leaves at the end of the loop's turn. The PUBACK of QoS 1 is not awaited.

        Raises `NotConnected`, `InvalidArgument`, `RecordTooLarge`, and `Overloaded` when too much waits (`drain` helps).
        """
        self._check_unsent()
        self._write(self._session.publish(topic, payload, qos, self._now())[1])
        if qos:
            self._arm()

    def publish_with_ack(self, topic: str, payload: bytes) -> asyncio.Future[tuple[int, ...]]:
        """Queue a message of QoS 1; the future resolves to `()` at its PUBACK, or fails when the connection ends before.

        Raises the errors of `publish`.
        """
        self._check_unsent()
        return self._ask(*self._session.publish(topic, payload, 1, self._now()))

    async def drain(self) -> None:
        """Wait until the network accepts more. Raises `NotConnected` when the connection has ended."""
        if self._unsent:
            await asyncio.sleep(0)
        while self._writable is not None:
            await asyncio.shield(self._writable)
        if not self.connected:
            raise NotConnected(f"the connection has ended: {self._error or 'closed'}")

    async def close(self) -> None:
        """Send DISCONNECT and close, after writing what was published before. Never raises; may be called again."""
        if self._loop is None:
            self._perform(self._session.close(0.0))
            return
        self._perform(self._session.close(self._loop.time()))
        if self._transport is not None and self._gone is not None:
            await asyncio.wait([self._gone], timeout=CLOSE_TIMEOUT_S)
            self._transport.abort()

    # ------------------------------------------------------------------------------------------ effects

    def _now(self) -> float:
        return 0.0 if self._loop is None else self._loop.time()

    def _perform(self, effects: list[ClientEffect]) -> None:
        for effect in effects:
            if type(effect) is Messages:
                self._hand_over(effect)
            elif type(effect) is Send:
                self._write(effect.data)
            elif type(effect) is Answered:
                waiter = self._answers.pop(effect.packet_id, None)
                if waiter is not None and not waiter.done():
                    waiter.set_result(effect.codes)
            elif type(effect) is Accepted:
                if self._accepted is not None and not self._accepted.done():
                    self._accepted.set_result(None)
                self._arm()  # keep-alive may be due before the deadline for CONNACK
            elif type(effect) is Closed:
                self._end(effect.error)

    def _hand_over(self, effect: Messages) -> None:
        callback = self.on_message
        if callback is None:
            return
        for message in effect.messages:
            try:
                callback(message[0], message[1])
            except Exception as error:  # an error of the application must not end the connection
                self._report("on_message raised", error)

    def _end(self, error: PixiuError | None) -> None:
        established = self._accepted is not None and self._accepted.done() and not self._accepted.cancelled()
        established = established and self._accepted is not None and self._accepted.exception() is None
        self._error = error
        failure = error or NotConnected("the connection was closed")
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for waiter in [self._accepted, *self._answers.values()]:
            if waiter is not None and not waiter.done():
                waiter.set_exception(failure)
                waiter.add_done_callback(_retrieve)
        self._answers.clear()
        self._release_writers()
        if self._transport is not None:
            self._flush()
            self._transport.close()
        if established and self.on_disconnect is not None:
            try:
                self.on_disconnect(error)
            except Exception as raised:
                self._report("on_disconnect raised", raised)

    def _report(self, text: str, error: Exception) -> None:
        if self._loop is not None:
            self._loop.call_exception_handler({"message": f"MQTTClient: {text}", "exception": error})

    def _abort(self) -> None:
        """Give up a connection that was not established; the caller gets the error from elsewhere."""
        if self._accepted is not None:
            self._accepted.cancel()
        self._perform(self._session.close(self._now()))
        if self._transport is not None:
            self._transport.abort()

    def _ask(self, packet_id: int, data: bytes) -> asyncio.Future[tuple[int, ...]]:
        assert self._loop is not None
        waiter: asyncio.Future[tuple[int, ...]] = self._loop.create_future()
        self._answers[packet_id] = waiter
        self._write(data)
        self._arm()
        return waiter

    # ------------------------------------------------------------------------------------------ timers and writing

    def _arm(self) -> None:
        """Set the timer if the next deadline is earlier; a later one is found when the timer fires."""
        deadline = self._session.next_deadline()
        if deadline is None or self._loop is None or (self._timer is not None and self._timer_at <= deadline):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = self._loop.call_at(deadline, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._perform(self._session.timeout(self._now()))
        self._arm()

    def _check_unsent(self) -> None:
        transport = self._transport
        waiting = self._unsent_bytes + (transport.get_write_buffer_size() if self._writable and transport else 0)
        if waiting > MAX_UNSENT_BYTES:
            raise Overloaded(f"{waiting} bytes wait for the network; await drain() between messages", retry_after_ms=100)

    def _write(self, data: bytes) -> None:
        # Joined per turn of the loop: a write costs far more than a message (benchmarks/README.md).
        self._unsent.append(data)
        self._unsent_bytes += len(data)
        if not self._flushing and self._loop is not None:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if self._unsent and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(self._unsent))
        self._unsent.clear()
        self._unsent_bytes = 0

    def _release_writers(self) -> None:
        if self._writable is not None:
            if not self._writable.done():
                self._writable.set_result(None)
            self._writable = None


class _Connection(asyncio.Protocol):
    """Passes the transport's callbacks to the client."""

    def __init__(self, client: MQTTClient) -> None:
        self._client = client

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._client._transport = transport

    def data_received(self, data: bytes) -> None:
        client = self._client
        client._perform(client._session.receive(data, client._now()))
        client._arm()  # after a PINGRESP the next PINGREQ is due before the deadline of its answer

    def pause_writing(self) -> None:
        client = self._client
        if client._loop is not None and client.connected:
            client._writable = client._loop.create_future()

    def resume_writing(self) -> None:
        self._client._release_writers()

    def connection_lost(self, error: Exception | None) -> None:
        client = self._client
        text = f"the connection to {client._host}:{client._port} was lost: {error or 'the server closed it'}"
        client._perform(client._session.connection_lost(text, client._now()))
        client._release_writers()
        if client._gone is not None and not client._gone.done():
            client._gone.set_result(None)


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Retrieve the exception of a waiter that nobody awaits any more, so that the loop does not report it."""
    if not future.cancelled():
        future.exception()
