"""MQTT 3.1.1 connections in an asyncio loop: paho-mqtt, driven by the loop that the rest of a load runs in.

Source: docs/operations.md; paho-mqtt, "External event loop support".
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from typing import Any, Final

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode

from pixiu.errors import NotConnected, Overloaded, PixiuError, RemoteError, Unavailable

CONNECT_TIMEOUT_S: Final = 10.0
"""Time limit from CONNECT to CONNACK, seconds."""
ANSWER_TIMEOUT_S: Final = 30.0
"""Time limit from a SUBSCRIBE or UNSUBSCRIBE to its answer, seconds."""
CLOSE_TIMEOUT_S: Final = 5.0
"""Time limit for `close` to send what was published, seconds."""
MAX_INFLIGHT: Final = 1024
"""Limit of messages of QoS 1 without an answer; one more raises `Overloaded`."""
FILTERS_PER_PACKET: Final = 500
"""Filters in one packet; longer lists go in several packets, one after the other."""
SUBACK_FAILURE: Final = 0x80
RETURN_CODES: Final = {132: 1, 133: 2, 136: 3, 134: 4, 135: 5}
"""MQTT 5's reason code, which paho reports for every version → MQTT 3.1.1's return code of CONNACK."""

MessageCallback = Callable[[str, bytes], None]
DisconnectCallback = Callable[[PixiuError | None], None]
Answer = asyncio.Future[list[int]]
"""Codes of a SUBACK; of other answers none."""


class ConnectionRefused(RemoteError):
    """The server answered CONNECT with a return code other than 0."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"the server refused the connection: {text} (return code {code})")
        self.return_code = code


class SubscriptionRefused(RemoteError):
    """The server refused some filters of a subscription; the others are granted."""

    def __init__(self, refused: Sequence[str]) -> None:
        shown = ", ".join(refused[:3]) + (" …" if len(refused) > 3 else "")
        super().__init__(f"the server refused {len(refused)} topic filters: {shown}")
        self.refused = tuple(refused)


class MQTTClient:
    """One connection to a gateway, or to any MQTT 3.1.1 server, with a clean session.

    host, port: of the server. client_id: unique among its clients; empty: the server chooses. username: for a gateway, the UIN in
    decimal or any name. keep_alive_s: 0: none. tls: certificates to trust and to present; None: no TLS.

    on_message(topic, payload) is called in the event loop for each message. on_disconnect(error) is called once when an established
    connection ends; error is None after `close`. Exceptions of both go to the loop's exception handler.

    A client connects once: to connect again, make a new one.
    """

    def __init__(
        self,
        host: str,
        port: int,
        client_id: str = "",
        username: str | None = None,
        *,
        password: str | None = None,
        keep_alive_s: int = 60,
        on_message: MessageCallback | None = None,
        on_disconnect: DisconnectCallback | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.on_message, self.on_disconnect = on_message, on_disconnect
        self._host, self._port, self._keep_alive_s = host, port, keep_alive_s
        self._client = client = paho.Client(CallbackAPIVersion.VERSION2, client_id, reconnect_on_failure=False)
        client.max_inflight_messages_set(0)  # the limit is that of the queue: nothing waits in it unsent
        client.max_queued_messages_set(MAX_INFLIGHT)
        if username is not None:
            client.username_pw_set(username, password)
        if tls is not None:
            client.tls_set_context(tls)
        client.on_connect = self._on_connack
        client.on_message = self._on_publish
        client.on_publish = lambda _c, _u, mid, *_: self._answered(mid)
        client.on_subscribe = lambda _c, _u, mid, codes, _p: self._answered(mid, [code.value for code in codes])
        client.on_unsubscribe = lambda _c, _u, mid, *_: self._answered(mid)
        client.on_disconnect = self._on_end
        self._loop: asyncio.AbstractEventLoop | None = None
        self._accepted: asyncio.Future[None] | None = None
        self._gone: asyncio.Future[None] | None = None
        self._closing = False
        self._written = asyncio.Event()
        self._answers: dict[int, Answer] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def connected(self) -> bool:
        """True if the connection is established and has not ended."""
        return self._client.is_connected()

    async def connect(self) -> None:
        """Connect and wait for the server's CONNACK.

        Raises `ConnectionRefused` (a `RemoteError`) with the return code, `Unavailable` when nobody answers at the
        address, and `NotConnected` when this client was connected before.
        """
        if self._loop is not None or self._closing:
            raise NotConnected("a client connects once; make a new one to connect again")
        self._loop = loop = asyncio.get_running_loop()
        self._accepted, self._gone = loop.create_future(), loop.create_future()
        where = f"{self._host}:{self._port}"
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self._open(loop)
                await self._accepted
        except TimeoutError:
            raise Unavailable(f"no connection to {where} within {CONNECT_TIMEOUT_S:g} s") from None
        except ssl.SSLError as error:
            raise Unavailable(f"no connection to {where} by TLS: {getattr(error, 'verify_message', '') or error.reason}") from None
        except OSError as error:
            raise Unavailable(f"no connection to {where}: {error.strerror or error}; is an MQTT server there?") from None
        finally:
            if not self.connected:
                self._abort()

    async def subscribe(self, filters: Sequence[str], qos: int = 0) -> None:
        """Subscribe and wait until it takes effect. Raises `SubscriptionRefused` with the filters that were refused.

        Also raises `NotConnected` and `Unavailable`.
        """
        refused: list[str] = []
        for first in range(0, len(filters), FILTERS_PER_PACKET):
            part = filters[first : first + FILTERS_PER_PACKET]
            codes = await self._ask(*self._client.subscribe([(name, qos) for name in part]))
            refused += [name for name, code in zip(part, codes, strict=True) if code == SUBACK_FAILURE]
        if refused:
            raise SubscriptionRefused(refused)

    async def unsubscribe(self, filters: Sequence[str]) -> None:
        """Unsubscribe and wait for the answer. Raises `NotConnected` and `Unavailable`."""
        for first in range(0, len(filters), FILTERS_PER_PACKET):
            await self._ask(*self._client.unsubscribe(list(filters[first : first + FILTERS_PER_PACKET])))

    def publish(self, topic: str, payload: bytes) -> None:
        """Queue a message of QoS 0; `drain` waits until the network has it. Raises `NotConnected`."""
        self._check_connected()
        self._client.publish(topic, payload)

    def publish_with_ack(self, topic: str, payload: bytes) -> Answer:
        """Queue a message of QoS 1; the future resolves at its PUBACK, or fails when the connection ends before.

        Raises `NotConnected`, and `Overloaded` when too many wait for theirs.
        """
        self._check_connected()
        info = self._client.publish(topic, payload, 1)
        if info.rc == MQTTErrorCode.MQTT_ERR_QUEUE_SIZE:
            raise Overloaded(f"{MAX_INFLIGHT} messages wait for the server; wait for some of them", retry_after_ms=100)
        return self._waiter(info.mid)

    async def drain(self) -> None:
        """Wait until the network has everything. Raises `NotConnected` when the connection has ended."""
        while self.connected and self._client.want_write():
            self._written.clear()
            await self._written.wait()
        self._check_connected()

    async def close(self) -> None:
        """Send DISCONNECT and close, after writing what was published before. Never raises; may be called again."""
        self._closing = True
        if self._gone is not None and not self._gone.done():
            self._client.disconnect()
            await asyncio.wait([self._gone], timeout=CLOSE_TIMEOUT_S)
            self._abort()

    # --- paho's socket and timer in the loop

    async def _open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Connect in a thread, because paho does it blocking; what follows happens in the loop."""
        client = self._client
        opening = loop.run_in_executor(None, client.connect, self._host, self._port, self._keep_alive_s)
        try:
            await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(lambda done: done.exception() or client.disconnect())
            raise
        socket: Any = client.socket()
        if socket is None:
            raise ConnectionResetError("the server closed the connection")
        client.on_socket_register_write = lambda *_: loop.add_writer(socket, client.loop_write)
        client.on_socket_unregister_write = self._all_written
        client.on_socket_close = self._socket_closed
        loop.add_reader(socket, self._readable)
        self._tick()

    def _readable(self) -> None:
        self._client.loop_read()
        while isinstance(socket := self._client.socket(), ssl.SSLSocket) and socket.pending():
            self._client.loop_read()  # decrypted already: the loop does not see that there is more to read

    def _all_written(self, _client: Any, _data: Any, socket: Any) -> None:
        assert self._loop is not None
        self._loop.remove_writer(socket)
        self._written.set()

    def _socket_closed(self, _client: Any, _data: Any, socket: Any) -> None:
        assert self._loop is not None
        self._loop.remove_reader(socket)

    def _tick(self) -> None:
        self._client.loop_misc()
        if self._keep_alive_s and self._loop is not None and self._client.socket() is not None:
            self._timer = self._loop.call_later(self._keep_alive_s / 4, self._tick)

    def _abort(self) -> None:
        """Drop a connection that was not established, or does not end."""
        socket: Any = self._client.socket()
        if socket is not None and self._loop is not None:
            self._loop.remove_reader(socket)
            self._loop.remove_writer(socket)
            socket.close()
        self._end(NotConnected("the connection was closed"))

    # --- paho's callbacks

    def _on_connack(self, _client: Any, _data: Any, _flags: Any, reason: Any, _properties: Any) -> None:
        if self._accepted is not None and not self._accepted.done():
            if reason.is_failure:
                self._accepted.set_exception(ConnectionRefused(RETURN_CODES.get(reason.value, 0), str(reason)))
            else:
                self._accepted.set_result(None)

    def _on_publish(self, _client: Any, _data: Any, message: paho.MQTTMessage) -> None:
        if self.on_message is not None:
            try:
                self.on_message(message.topic, bytes(message.payload))
            except Exception as error:  # an error of the application must not end the connection
                self._report("on_message raised", error)

    def _on_end(self, _client: Any, _data: Any, _flags: Any, reason: Any, _properties: Any) -> None:
        where = f"{self._host}:{self._port}"
        error = None if self._closing else Unavailable(f"the connection to {where} was lost: {reason}")
        established = self._accepted is not None and self._accepted.done() and self._accepted.exception() is None
        self._end(error or NotConnected("the connection was closed"))
        if established and self.on_disconnect is not None:
            try:
                self.on_disconnect(error)
            except Exception as raised:
                self._report("on_disconnect raised", raised)

    def _end(self, failure: PixiuError) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for waiter in (self._accepted, *self._answers.values()):
            if waiter is not None and not waiter.done():
                waiter.set_exception(failure)
                waiter.exception()  # retrieved: nobody may wait for it any more
        self._answers.clear()
        self._written.set()
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(None)

    # --- requests and their answers

    def _check_connected(self) -> None:
        if not self.connected:
            raise NotConnected("this needs a connection: await connect() first, or make a new client when it has ended")

    async def _ask(self, code: MQTTErrorCode, mid: int | None) -> list[int]:
        self._check_connected()
        assert code == MQTTErrorCode.MQTT_ERR_SUCCESS
        assert mid is not None
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await self._waiter(mid)
        except TimeoutError:
            raise Unavailable(f"the server did not answer within {ANSWER_TIMEOUT_S:g} s") from None

    def _waiter(self, mid: int) -> Answer:
        assert self._loop is not None
        waiter = self._answers[mid] = self._loop.create_future()
        return waiter

    def _answered(self, mid: int, codes: Sequence[int] = ()) -> None:
        waiter = self._answers.pop(mid, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(list(codes))

    def _report(self, text: str, error: Exception) -> None:
        if self._loop is not None:
            self._loop.call_exception_handler({"message": f"MQTTClient: {text}", "exception": error})
