"""The listener on which a process serves framed streams: admits callers, and runs the handlers of methods.

    accepted ─ TLS, where there are certificates ─ challenge ─ hello ─ allowed? ─ welcome ─ the method's handler ─ last word

Until its hello is accepted a connection is a stranger's: bounded in number, in total and per address, in time and in bytes.

Source: docs/links.md, "Framed streams", docs/security.md.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import os
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, NamedTuple, Protocol

from cluster.rpc.framed import OPEN_S, Connection, FramedHandler, abort, refuse
from cluster.rpc.frames import MAGIC, NONCE_BYTES, FrameKind, Hello, read_hello
from cluster.rpc.local_streams import End, LocalStreams
from pixiu.errors import ConfigurationError, InvalidArgument, MalformedData, NotAllowed, NotAuthenticated, PixiuError, RemoteError
from pixiu.rpc.duplex import StreamEnded

MAX_STRANGERS: Final = 128
"""Connections without an accepted hello. Policy: a further one is closed at once."""
MAX_STRANGERS_OF_ADDRESS: Final = 96
MAX_STREAMS: Final = 4096
"""Open streams. Policy: a further one is closed at once."""
BACKLOG: Final = 128
STOP_S: Final = 1.0
"""Time for streams to end by themselves when the listener closes, seconds."""
LEAVE_S: Final = 2.0
"""Time for a caller to receive the last word, seconds."""
Serve = Callable[[Any], Awaitable[None]]


class Admits(Protocol):
    """Identifies and admits callers."""

    def __call__(self, hello: Hello, certificate: bytes | None, peer: str) -> tuple[str, str]:
        """Return the caller's role and name. certificate: DER, verified; empty: none; None: the caller is of this process, and its
        role is what the hello says. Raises `NotAllowed`."""


class _Method(NamedTuple):
    parse: Callable[[bytes], Any]
    serve: Serve


def anybody(hello: Hello, certificate: bytes | None, peer: str) -> tuple[str, str]:
    """Accept every caller with the role that it claims."""
    return hello.role, ""


class FramedListener:
    """Listens on a port.

    Args:
        admits: see `Admits`.
        context: returns the newest certificates for a new connection; None: connections are not encrypted.
        keys: returns the keys by which a caller proves a role; None: there are none, and nothing needs proof.
        max_bytes: largest received message.
        failed: called with an error of a handler that is a bug.
    """

    def __init__(
        self,
        admits: Admits = anybody,
        context: Callable[[], ssl.SSLContext | None] = lambda: None,
        keys: Callable[[str], tuple[bytes, ...] | None] = lambda _role: None,
        max_bytes: int = 4 << 20,
        failed: Callable[[str, Exception], None] = lambda _method, _error: None,
    ) -> None:
        self._admits, self._context, self._keys = admits, context, keys
        self._max_bytes, self._failed = max_bytes, failed
        self._methods: dict[str, _Method] = {}
        self._server: asyncio.Server | None = None
        self._strangers: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._local: tuple[LocalStreams, int, contextvars.Context] | None = None
        self.open = 0
        """Number of streams that are served now."""
        self.served = self.refused = self.failures = 0
        """Numbers since the start: streams opened, streams refused, and connections that failed."""

    def serve(self, method: str, parse: Callable[[bytes], Any], serve: Serve) -> None:
        """Serve streams of a method (`/pixiu.v1.Xiu/Store`): each gets a `FramedHandler`, and ends when `serve` returns."""
        self._methods[method] = _Method(parse, serve)

    async def bind(self, host: str, port: int, *, fallback: bool, reuse: bool = False) -> int:
        """Bind the port, or with `fallback` any other one if it is taken; returns it. Raises ConfigurationError.

        reuse: also bind a port whose earlier connections are in TIME_WAIT. Only for a port that an operator chose.
        """
        try:
            self._server = await self._listen(host, port, reuse)
        except OSError as error:
            if not fallback or error.errno != errno.EADDRINUSE:
                raise ConfigurationError(
                    f"port {port} on {host} cannot be used for framed streams: {error.strerror or error}: "
                    "free it, or set stream_port to another one"
                ) from None
            try:
                self._server = await self._listen(host, 0, reuse=False)
            except OSError as further:
                raise ConfigurationError(
                    f"no port on {host} can be used for framed streams: {further.strerror or further}: set stream_port"
                ) from None
        return int(self._server.sockets[0].getsockname()[1])

    async def _listen(self, host: str, port: int, reuse: bool) -> asyncio.Server:
        # `start` listens. Until then the kernel could give a port that is bound with SO_REUSEADDR to another process.
        loop = asyncio.get_running_loop()
        return await loop.create_server(
            lambda: _Arrival(self._arrived), host, port, backlog=BACKLOG, reuse_address=reuse, start_serving=False
        )

    async def start(self) -> None:
        """Start accepting connections."""
        if self._server is not None:
            for listener in self._server.sockets:
                # Connections inherit this. Without it those in TIME_WAIT would keep a restarted process from its port a minute.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            await self._server.start_serving()

    def serve_locally(self, streams: LocalStreams, endpoint: int) -> None:
        """Also serve the other roles of this process. `endpoint`: of the role that serves, in whose context this is called."""
        self._local = streams, endpoint, contextvars.copy_context()
        streams.listeners[endpoint] = self

    def arrive(self, transport: asyncio.Transport) -> None:
        """Serve a connection of a role of this process: it needs neither TLS nor a key, and is not counted among strangers."""
        assert self._local is not None
        if len(self._tasks) >= MAX_STREAMS + MAX_STRANGERS:
            self.failures += 1
            transport.abort()
            return
        self._start(self._connection(transport, None, "this process"), self._local[2])

    def _start(self, serving: Coroutine[Any, Any, None], context: contextvars.Context | None = None) -> None:
        task = asyncio.get_running_loop().create_task(serving, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Accept no more connections, and end the open ones."""
        if self._local is not None:
            self._local[0].listeners.pop(self._local[1], None)
        if self._server is not None:
            self._server.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=STOP_S)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def samples(self) -> dict[str, int]:
        """Figures for /metrics."""
        return {
            "framed_streams": self.open, "framed_streams_total": self.served, "framed_streams_refused_total": self.refused,
            "framed_connections_failed_total": self.failures,
        }  # fmt: skip

    def _arrived(self, transport: asyncio.Transport) -> None:
        peer = transport.get_extra_info("peername")
        address = str(peer[0]) if isinstance(peer, tuple) else ""
        if (
            self._strangers.total() >= MAX_STRANGERS
            or self._strangers[address] >= MAX_STRANGERS_OF_ADDRESS
            or len(self._tasks) >= MAX_STREAMS + MAX_STRANGERS
        ):
            self.failures += 1
            transport.abort()
            return
        self._strangers[address] += 1
        self._start(self._connection(transport, address, _name(peer)))

    async def _connection(self, transport: asyncio.Transport, address: str | None, peer: str) -> None:
        """Serve a connection. address: of a caller in another process."""
        connection = Connection()
        try:
            try:
                async with asyncio.timeout(OPEN_S):
                    hello, role, name = await self._meet(transport, connection, peer)
            finally:
                if address is not None:
                    self._strangers[address] -= 1
                    if not self._strangers[address]:
                        del self._strangers[address]
        except PixiuError as error:
            self.refused += 1
            refuse(connection, error)
            await connection.leave(LEAVE_S)
        except (TimeoutError, StreamEnded, OSError):  # ssl.SSLError is an OSError
            self.failures += 1
        else:
            await self._stream(hello, connection, peer, role, name)
        finally:
            connection.fail("it is over")
            abort(transport)

    async def _meet(self, transport: asyncio.Transport, connection: Connection, peer: str) -> tuple[Hello, str, str]:
        """Take a connection up to its hello. Raises if it must not be served."""
        local = isinstance(transport, End)
        context, certificate = None if local else self._context(), None if local else b""
        if context is None:
            transport.set_protocol(connection)
            connection.connection_made(transport)
            transport.resume_reading()
        else:
            secured = await asyncio.get_running_loop().start_tls(
                transport, connection, context, server_side=True, ssl_handshake_timeout=OPEN_S, ssl_shutdown_timeout=LEAVE_S
            )
            if secured is None:
                raise StreamEnded("it left")
            connection.connection_made(secured)
            certificate = secured.get_extra_info("ssl_object").getpeercert(binary_form=True) or b""
        nonce = os.urandom(NONCE_BYTES)
        connection.put(FrameKind.CHALLENGE, MAGIC + nonce)
        kind, payload = await connection.frame()
        if kind != FrameKind.HELLO:
            raise InvalidArgument("a stream begins with a hello")
        try:
            hello, proven = read_hello(payload, self._keys if not local else _no_keys, nonce)
        except MalformedData as error:
            raise InvalidArgument(str(error)) from None
        if not proven:
            raise NotAuthenticated(f"the caller does not prove that it is a {hello.role}: does it have the cluster's keys?")
        role, name = self._admits(hello, certificate, peer)
        if hello.method not in self._methods:
            raise NotAllowed(f"{hello.method} is not served here")
        return hello, role, name

    async def _stream(self, hello: Hello, connection: Connection, peer: str, role: str, name: str) -> None:
        method = self._methods[hello.method]
        task = asyncio.current_task()
        assert task is not None
        connection.takes(self._max_bytes)
        connection.on_lost = task.cancel
        self.open += 1
        self.served += 1
        try:
            connection.put(FrameKind.WELCOME)
            await method.serve(FramedHandler(connection, method.parse, peer, role, name, hello.about, hello.endpoint))
            connection.put(FrameKind.LAST)
        except StreamEnded:
            pass
        except PixiuError as error:
            refuse(connection, error)
        except Exception as error:
            self._failed(hello.method, error)
            refuse(connection, RemoteError("the stream failed: see the log of the process that serves it"))
        finally:
            connection.on_lost = lambda: None
            self.open -= 1
        await connection.leave(LEAVE_S)


class _Arrival(asyncio.Protocol):
    """A connection from which nothing has been read."""

    def __init__(self, arrived: Callable[[asyncio.Transport], None]) -> None:
        self._arrived = arrived

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Pass the new connection on."""
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        self._arrived(transport)


def _no_keys(_role: str) -> None:
    """Keys of a role of this process."""


def _name(peer: object) -> str:
    return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else ""
