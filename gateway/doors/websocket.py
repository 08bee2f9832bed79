"""MQTT over WebSocket: a transport inside a WebSocket, around which an MQTT connection does not know the difference.

    bytes ──▶ handshake: GET /mqtt, subprotocol mqtt, allowed origin ──▶ 101 ──▶ binary frames ──▶ MQTTConnection
                │ late, or too many wait: closed                          text: closed with 1003
                └ refused: 400, 403, 404, 426, 503

The parts of a frame are passed on as they come, so that a frame costs no memory here, whatever its length. Until the handshake is
over the connection counts as not identified, and after it until its CONNECT.

Source: RFC 6455; OASIS MQTT 5.0 section 6; docs/operations.md, "MQTT over WebSocket".
"""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from wsproto import ConnectionType, WSConnection
from wsproto.connection import ConnectionState
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Event,
    Ping,
    RejectConnection,
    RejectData,
    Request,
    TextMessage,
)
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import LocalProtocolError, RemoteProtocolError

from cluster.listeners.clients import close_once, host_of
from cluster.listeners.origins import Origins
from gateway.clients.clients import Clients

PATH: Final = "/mqtt"
SUBPROTOCOLS: Final = ("mqtt", "mqttv3.1")
HANDSHAKE_TIMEOUT_S: Final = 5.0
MAX_HANDSHAKE_BYTES: Final = 8192
READ_BYTES: Final = 4096
"""Bytes read at a time: masked frames of few bytes cost more than MQTT packets."""
MAX_IDLE_FRAMES: Final = 64
"""Frames in one read that carry nothing: pings, pongs, and those with fewer bytes than the smallest packet."""
PACKET_BYTES: Final = 2
BINARY: Final = 0x82
"""First byte of a binary frame that is a whole message."""
CLOSE_TIMEOUT_S: Final = 5.0
"""Time for a client to answer the closing frame."""
LEFT: Final = 1

Headers = Sequence[tuple[bytes, bytes]]


@dataclass
class WebSockets:
    """Surroundings that the WebSockets of one gateway share.

    Args:
        connect: makes the protocol inside.
    """

    clients: Clients
    connect: Callable[[], asyncio.Protocol]
    origins: Origins
    refused: Counter[str] = field(default_factory=Counter)
    """Reason → handshakes that were refused, and connections that broke the rules."""


class WebSocketConnection(asyncio.Protocol):
    """One connection to the WebSocket listener: asyncio's protocol outside, the transport of another one inside."""

    def __init__(self, shared: WebSockets) -> None:
        self.id = 0
        self._shared, self._clients = shared, shared.clients
        self._websocket = WSConnection(ConnectionType.SERVER)
        self._received = 0
        self._wire: asyncio.Transport | None = None
        self._inside: asyncio.Protocol | None = None
        self._paused = False
        self._ping: Ping | None = None
        """The latest that waits until the client reads: the earlier ones need no answer."""
        self._timer: asyncio.TimerHandle | None = None
        self.reads = True
        """False while the protocol inside does not read."""
        self.ending = False
        """Set once the client has closed the connection: nothing is sent any more."""

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio when the client has connected."""
        assert isinstance(transport, asyncio.Transport)
        self._wire = transport
        self.id = self._clients.arrived(self, host_of(transport))
        self._timer = asyncio.get_running_loop().call_later(HANDSHAKE_TIMEOUT_S, self._late)

    def data_received(self, data: bytes) -> None:
        """Process a client's bytes: its handshake, or frames."""
        if self._inside is None and self._websocket.state is ConnectionState.CONNECTING:
            self._received += len(data)
            if self._received > MAX_HANDSHAKE_BYTES:
                self._reject(431, "too large")
                return
        try:
            self._websocket.receive_data(data)
            self._take(self._websocket.events())
        except RemoteProtocolError as error:
            self._broken(error.event_hint)
        except (LocalProtocolError, UnicodeError):
            self._broken(None)

    def pause_writing(self) -> None:
        """Let the protocol inside wait."""
        self._paused = True
        if self._inside is not None:
            self._inside.pause_writing()

    def resume_writing(self) -> None:
        """Let the protocol inside write again."""
        self._paused = False
        if self._ping is not None:
            ping, self._ping = self._ping, None
            self.send(ping.response())
        if self._inside is not None:
            self._inside.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the connection."""
        self._wire = None
        self._end_wait()
        self._lose(exc)

    def evict(self) -> None:
        """End the handshake: too many connections are not identified, and this is the oldest."""
        self._reject(503, "evicted")

    # What the transport inside calls.

    @property
    def wire(self) -> asyncio.Transport | None:
        """Transport of the connection; None once it is over."""
        return self._wire

    @property
    def is_open(self) -> bool:
        """True while frames may be sent."""
        return self._wire is not None and not self._wire.is_closing() and self._websocket.state is ConnectionState.OPEN

    def send(self, event: Event) -> None:
        """Send a frame, unless the connection is over."""
        if self._wire is not None and not self._wire.is_closing():
            self._wire.write(self._websocket.send(event))

    def close(self, code: int) -> None:
        """Send the closing frame, and wait for the client's for a while."""
        if self.is_open:
            self.send(CloseConnection(code))
            self._timer = asyncio.get_running_loop().call_later(CLOSE_TIMEOUT_S, self._abort)
        elif self._wire is not None and self._websocket.state is not ConnectionState.LOCAL_CLOSING:
            close_once(self._wire)

    # Inside.

    def _take(self, events: Any) -> None:
        payload, idle = bytearray(), 0
        for event in events:
            if isinstance(event, BytesMessage):
                payload += event.data
                idle += len(event.data) < PACKET_BYTES
            elif isinstance(event, Ping):
                idle += 1
                if self._paused:
                    self._ping = event
                else:
                    self.send(event.response())
            elif isinstance(event, Request):
                self._answer(event)
            elif isinstance(event, CloseConnection):
                if self._websocket.state is ConnectionState.OPEN:  # the client's frames are malformed
                    self._give(payload)
                    self._fail(event.code, "malformed")
                elif self._websocket.state is ConnectionState.REMOTE_CLOSING:
                    self.send(event.response())
                    self._end(payload)
                elif self._wire is not None:
                    close_once(self._wire)
                return
            elif isinstance(event, TextMessage):
                self._give(payload)
                self._fail(CloseReason.UNSUPPORTED_DATA, "text frame")
                return
            else:
                idle += 1
            if idle > MAX_IDLE_FRAMES:
                self._fail(CloseReason.POLICY_VIOLATION, "frames without content")
                return
        self._give(payload)

    def _give(self, payload: bytearray) -> None:
        if payload and self._inside is not None and self._websocket.state is ConnectionState.OPEN:
            self._inside.data_received(bytes(payload))

    def _end(self, payload: bytearray) -> None:
        """Close the connection, which the client has closed, once the protocol inside has worked off what came before."""
        self.ending = True
        if payload and self._inside is not None:
            self._inside.data_received(bytes(payload))
        if self._wire is not None and self.reads:
            close_once(self._wire)
        else:
            self._timer = asyncio.get_running_loop().call_later(CLOSE_TIMEOUT_S, self._abort)

    def _answer(self, request: Request) -> None:
        """Accept or refuse a handshake."""
        origin = next((value for name, value in request.extra_headers if name.lower() == b"origin"), b"")
        subprotocol = next((name for name in SUBPROTOCOLS if name in request.subprotocols), None)
        if request.target.partition("?")[0] != PATH:
            self._reject(404, "another path")
        elif not self._shared.origins.allow(origin.decode("latin-1"), request.host):
            self._reject(403, "origin")
        elif subprotocol is None:
            self._reject(400, "no subprotocol mqtt")
        elif self._clients.draining:
            self._reject(503, "draining")
        else:
            self.send(AcceptConnection(subprotocol=subprotocol))
            self._end_wait()
            self._inside = self._shared.connect()
            self._inside.connection_made(WebSocketTransport(self))
            if self._paused:
                self._inside.pause_writing()

    def _reject(self, status: int, reason: str, headers: Headers = ()) -> None:
        """Refuse a handshake."""
        self._shared.refused[reason] += 1
        self._end_wait()
        if self._wire is None or self._wire.is_closing():
            return
        try:
            shown = [*headers, (b"Content-Length", b"0"), (b"Connection", b"close")]
            answer = self._websocket.send(RejectConnection(status_code=status, headers=shown, has_body=True))
            self._wire.write(answer + self._websocket.send(RejectData(data=b"", body_finished=True)))
        except LocalProtocolError:  # no request has come yet
            pass
        close_once(self._wire)

    def _broken(self, hint: Event | None) -> None:
        if isinstance(hint, RejectConnection):
            self._reject(hint.status_code, "malformed", hint.headers)
        elif self._websocket.state is ConnectionState.CONNECTING:
            self._reject(400, "malformed")
        else:
            self._fail(hint.code if isinstance(hint, CloseConnection) else CloseReason.PROTOCOL_ERROR, "malformed")

    def _fail(self, code: int, reason: str) -> None:
        """Close the connection: the client broke the rules. The protocol inside ends at once."""
        self._shared.refused[reason] += 1
        self.close(code)
        self._lose(None)

    def _lose(self, error: Exception | None) -> None:
        inside, self._inside = self._inside, None
        if inside is not None:
            inside.connection_lost(error)

    def _late(self) -> None:
        self._reject(408, "late")

    def _end_wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._clients.closed(self, LEFT)

    def _abort(self) -> None:
        if self._wire is not None:
            self._wire.abort()


def frame_head(size: int) -> bytes:
    """Head of a binary frame of a server with a payload of this size. Source: RFC 6455 section 5.2."""
    if size < 126:
        return bytes((BINARY, size))
    return struct.pack("!BBH", BINARY, 126, size) if size < 1 << 16 else struct.pack("!BBQ", BINARY, 127, size)


class WebSocketTransport(asyncio.Transport):
    """The transport of the protocol inside."""

    def __init__(self, connection: WebSocketConnection) -> None:
        super().__init__()
        self._connection = connection
        self._wire = connection.wire

    @property
    def max_size(self) -> int:
        """Bytes read at a time."""
        return READ_BYTES

    @max_size.setter
    def max_size(self, size: int) -> None:
        self._wire.max_size = min(size, READ_BYTES)  # type: ignore[union-attr]  # asyncio's own

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return what is known of the connection."""
        return default if self._wire is None else self._wire.get_extra_info(name, default)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set the limits of the connection."""
        if self._wire is not None:
            self._wire.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        """Bytes that the connection has not taken."""
        return 0 if self._wire is None else self._wire.get_write_buffer_size()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send one binary frame. It has no state, and the library takes twenty times as long for it."""
        if self._connection.is_open and self._wire is not None:
            self._wire.write(frame_head(len(data)) + data)

    def pause_reading(self) -> None:
        """Stop reading from the connection."""
        self._connection.reads = False
        if self._wire is not None:
            self._wire.pause_reading()

    def resume_reading(self) -> None:
        """Read from the connection again."""
        self._connection.reads = True
        if self._wire is not None and self._connection.ending:
            close_once(self._wire)
        elif self._wire is not None:
            self._wire.resume_reading()

    def is_closing(self) -> bool:
        """True once a closing frame was sent, or the client has closed the connection and all that it sent was worked off."""
        return not self._connection.is_open and (not self._connection.ending or self._wire is None or self._wire.is_closing())

    def close(self) -> None:
        """Close with 1000."""
        self._connection.close(CloseReason.NORMAL_CLOSURE)

    def abort(self) -> None:
        """Drop the connection."""
        if self._wire is not None:
            self._wire.abort()
