"""Framed streams: a carrier of duplex streams between processes of a cluster, with one TCP connection each.

Data written in one turn of the event loop leaves in one write. A side that does not read holds its peer's writer back; TCP's
keep-alive detects a peer whose machine has vanished.

Source: docs/links.md, "Framed streams".
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Generic, NamedTuple, Protocol, Self

from google.protobuf.message import DecodeError, Message

from cluster.rpc.frames import (
    HEAD,
    MAX_HELLO_BYTES,
    FrameKind,
    Hello,
    Splitter,
    StreamRefusal,
    hello_payload,
    nonce_of,
    read_refusal,
    refusal_payload,
)
from pixiu.errors import ConfigurationError, InvalidArgument, MalformedData, PixiuError
from pixiu.rpc.channels import REFUSED
from pixiu.rpc.duplex import In, Out, StreamEnded
from pixiu.rpc.grpc_streams import GARBAGE
from pixiu.rpc.status import GRPC_STATUS
from pixiu.rpc.tls import Tls, host_name
from pixiu.rpc.turn_loop import call_at_end

OPEN_S: Final = 3.0
"""Time limit for a connection, its TLS handshake and its hello, seconds."""
WRITE_HIGH: Final = 256 << 10
"""Bytes waiting to leave above which a writer waits."""
READ_HIGH: Final = 1 << 20
"""Bytes received and not read above which receiving stops."""
READ_LOW: Final = READ_HIGH // 2
FRAME_COST: Final = 100
"""Bytes that a frame counts in addition to its payload."""
KEEP_ALIVE: Final = (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 2), ("TCP_USER_TIMEOUT", 30_000))
"""Keep-alive settings that detect a vanished peer after half a minute; in seconds, the last in milliseconds."""
OUT_OF_PLACE: Final = "the other side sent an unexpected frame"
LOST: Final = "the connection was lost"


class _Over(NamedTuple):
    """Reason why a connection is over."""

    text: str
    refused: bool = False
    retry_after_ms: int = 0

    def error(self) -> StreamEnded:
        return StreamEnded(self.text, refused=self.refused, retry_after_ms=self.retry_after_ms)


def _refusal(payload: bytes) -> _Over:
    try:
        code, text, after_ms = read_refusal(payload)
    except MalformedData as error:
        return _Over(str(error))
    return _Over(f"{code}: {text}", GRPC_STATUS.get(code) in REFUSED, after_ms)


class Connection(asyncio.Protocol):
    """One connection of either side: frames in both directions, in order and bounded.

    Args:
        max_bytes: largest received frame.
    """

    def __init__(self, max_bytes: int = MAX_HELLO_BYTES) -> None:
        self.on_lost: Callable[[], object] = lambda: None
        """Called once when the connection is gone."""
        self._splitter = Splitter(max_bytes)
        self._transport: asyncio.Transport | None = None
        self._frames: deque[tuple[int, bytes]] = deque()
        self._held = 0
        self._receives = True
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._space = True
        self._over: _Over | None = None
        self._reader: asyncio.Future[None] | None = None
        self.arrived: Callable[[], None] | None = None
        """Called when a frame has come, or the connection is over; None: nobody reads without waiting."""
        self._writers: list[asyncio.Future[None]] = []
        self._gone = asyncio.get_running_loop().create_future()
        self._drops = False

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note that the connection is open, TLS included."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=WRITE_HIGH)
        keep_alive(transport)

    def data_received(self, data: bytes) -> None:
        """Handle bytes of the other side."""
        if self._over is not None or self._drops:
            return
        try:
            found = self._splitter.feed(data)
        except MalformedData as error:
            self.fail(f"the other side sent no frames: {error}")
            return
        if not found:
            return
        self._frames.extend(found)
        for _, payload in found:
            self._held += len(payload) + FRAME_COST
        if self._held > READ_HIGH and self._receives and self._transport is not None:
            self._receives = False
            self._transport.pause_reading()
        if found[-1][0] == FrameKind.REFUSED:
            self._end(_refusal(self._frames.pop()[1]))
        self._wake_reader()

    def pause_writing(self) -> None:
        """Hold writers back: the other side does not read fast enough."""
        self._space = False

    def resume_writing(self) -> None:
        """Let writers continue: there is space again."""
        self._space = True
        self._wake_writers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the connection is gone."""
        self._end(_Over(f"{LOST}: {exc}" if exc is not None else LOST))
        if not self._gone.done():
            self._gone.set_result(None)
            self.on_lost()

    # Called by the owner.

    @property
    def transport(self) -> asyncio.Transport:
        """The transport of the open connection."""
        assert self._transport is not None
        return self._transport

    def takes(self, max_bytes: int) -> None:
        """Set the largest message, after the hello."""
        self._splitter.max_bytes = max_bytes

    async def frame(self) -> tuple[int, bytes]:
        """The next frame. Raises `StreamEnded` if there will be none."""
        while not self._frames:
            if self._over is not None:
                raise self._over.error()
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._take()

    @property
    def is_quiet(self) -> bool:
        """True if no frame has come, and one may."""
        return not self._frames and self._over is None

    def message(self) -> bytes | None:
        """Take the next message that has come; None: there is none, or another frame is before it."""
        return self._take()[1] if self._frames and self._frames[0][0] == FrameKind.MESSAGE else None

    def _take(self) -> tuple[int, bytes]:
        kind, payload = self._frames.popleft()
        self._held -= len(payload) + FRAME_COST
        if not self._receives and self._held <= READ_LOW and self._over is None:
            self._receives = True
            self.transport.resume_reading()
        return kind, payload

    def put(self, kind: FrameKind, payload: bytes = b"", *, flushes: bool = True) -> bool:
        """Queue a frame, which leaves at the end of this turn of the loop; flushes=False: with `flush`. Returns False if the other
        side takes no more now. Raises `StreamEnded`."""
        if self._over is not None:
            raise self._over.error()
        if flushes and not self._out:
            call_at_end(self.flush)
        self._out.append(HEAD.pack(len(payload) + 1, kind))
        self._out.append(payload)
        self._out_bytes += HEAD.size + len(payload)
        if self._out_bytes >= WRITE_HIGH:
            self.flush()
        return self._space

    async def space(self) -> None:
        """Wait until the other side takes more. Raises `StreamEnded`."""
        while not self._space:
            if self._over is not None:
                raise self._over.error()
            waiting = asyncio.get_running_loop().create_future()
            self._writers.append(waiting)
            try:
                await waiting
            finally:
                if waiting in self._writers:
                    self._writers.remove(waiting)

    def fail(self, text: str, *, refused: bool = False, retry_after_ms: int = 0) -> None:
        """Break the connection for a reason; queued data is lost."""
        self._end(_Over(text, refused, retry_after_ms))
        if self._transport is not None:
            abort(self._transport)

    async def leave(self, timeout_s: float) -> None:
        """End the connection in order: queued data leaves, and the connection closes when the other side has received it, or after
        this time."""
        self.flush()
        self._drops = True
        self._frames.clear()
        transport = self._transport
        if transport is None or self._gone.done():
            return
        if not self._receives and not transport.is_closing():
            transport.resume_reading()  # data unread at the end would make TCP discard the last data sent
        with contextlib.suppress(OSError):  # the time is over, or the other side has reset it and the loop has not noticed yet
            if transport.can_write_eof():
                transport.write_eof()
            else:
                transport.close()
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._gone)
        self._end(_Over(LOST))
        abort(transport)

    def flush(self) -> bool:
        """Write what is queued. Returns False if nothing more can be queued."""
        if self._out:
            out, self._out, self._out_bytes = self._out, [], 0
            if self._over is None and self._transport is not None:
                self._transport.write(b"".join(out))
        return self._space and self._over is None

    def _end(self, over: _Over) -> None:
        if self._over is None:
            self._over = over
            self._wake_reader()
            self._wake_writers()

    def _wake_reader(self) -> None:
        if self.arrived is not None:
            self.arrived()
        elif self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _wake_writers(self) -> None:
        waiting, self._writers = self._writers, []
        for each in waiting:
            if not each.done():
                each.set_result(None)


def abort(transport: asyncio.Transport) -> None:
    """Break a connection, if it is still there. An asyncio transport raises if it has closed itself after its last bytes."""
    with contextlib.suppress(AttributeError):
        transport.abort()


def keep_alive(transport: asyncio.Transport) -> None:
    """Set TCP options that detect a vanished peer."""
    sock: socket.socket | None = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEP_ALIVE:
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class FramedCall(Generic[Out, In]):
    """A stream that this process opens; it connects when it is first used, and `async with` ends it.

    Args:
        host, port: of the other side.
        role: of the other side, which it must prove if this process has certificates.
        hello: identifies the caller and the method.
        key: returns the key of the hello's tag; None: there is none. Raises ConfigurationError.
        parse: makes a message of bytes.
        max_bytes: largest received message.
        tls: this process's certificates; None: connections are not encrypted.
    """

    serves = False

    def __init__(
        self,
        host: str,
        port: int,
        role: str,
        hello: Hello,
        key: Callable[[], bytes | None],
        parse: Callable[[bytes], Any],
        max_bytes: int,
        tls: Tls | None = None,
    ) -> None:
        self._host, self._port, self._role = host, port, role
        self._hello, self._key, self._parse, self._max_bytes, self._tls = hello, key, parse, max_bytes, tls
        self._connection: Connection | None = None
        self._opening: asyncio.Task[Connection] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """End the stream."""
        self.cancel()
        if self._opening is not None:
            await asyncio.gather(self._opening, return_exceptions=True)

    def cancel(self) -> None:
        """Break the stream; its data is lost."""
        if self._opening is not None:
            self._opening.cancel()
        if self._connection is not None:
            self._connection.fail("the call was cancelled")

    async def opened(self, timeout_s: float) -> None:
        """Wait until the other side has accepted the stream. Raises `StreamEnded`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._open()
        except TimeoutError:
            raise StreamEnded("no connection in time") from None

    async def read(self) -> In | None:
        """The next message; None at the end. Raises `StreamEnded`."""
        connection = self._connection or await self._open()
        kind, payload = await connection.frame()
        if kind == FrameKind.MESSAGE:
            return self._message(connection, payload)
        if kind != FrameKind.LAST:
            connection.fail(OUT_OF_PLACE)
            raise StreamEnded(OUT_OF_PLACE)
        return None

    def _message(self, connection: Connection, payload: bytes) -> In:
        try:
            message: In = self._parse(payload)
        except DecodeError:
            connection.fail("the other side sent something that is not a message of this method")
            raise StreamEnded("the other side sent something that is not a message of this method") from None
        return message

    def hear(self, arrived: Callable[[], None] | None) -> bool:
        """See `pixiu.rpc.duplex.Direct`."""
        connection = self._connection
        if connection is None or (arrived is not None and not connection.is_quiet):
            return False
        connection.arrived = arrived
        return True

    def take(self) -> In | None:
        """The next message if it has come. Raises `StreamEnded`."""
        connection = self._connection
        payload = connection.message() if connection is not None else None
        return None if connection is None or payload is None else self._message(connection, payload)

    async def write(self, message: Out) -> None:
        """Send a message. Raises `StreamEnded`."""
        connection = self._connection or await self._open()
        connection.put(FrameKind.MESSAGE, packed(message))
        await connection.space()

    def put(self, message: Out) -> bool:
        """See `pixiu.rpc.duplex.Direct`."""
        assert self._connection is not None
        return self._connection.put(FrameKind.MESSAGE, packed(message), flushes=False)

    def flush(self) -> bool:
        """See `pixiu.rpc.duplex.Direct`."""
        return self._connection is not None and self._connection.flush()

    async def done_writing(self) -> None:
        """Announce that no more will be sent. Raises `StreamEnded`."""
        connection = self._connection or await self._open()
        connection.put(FrameKind.LAST)

    async def _open(self) -> Connection:
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self._connect())
            self._opening.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            return await asyncio.shield(self._opening)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise StreamEnded("the call was cancelled") from None

    async def _connect(self) -> Connection:
        if not self._port:
            raise StreamEnded(f"the {self._role} at {self._host} has no stream_port in the registry")
        own = self._tls
        try:
            async with asyncio.timeout(OPEN_S):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: Connection(self._max_bytes), self._host, self._port,
                    ssl=own.client_context() if own is not None else None,
                    server_hostname=host_name(self._role) if own is not None else None,
                )  # fmt: skip
                await self._introduce(connection)
        except TimeoutError:
            raise StreamEnded("no connection in time") from None
        except ssl.SSLCertVerificationError as error:
            raise StreamEnded(f"it does not prove that it is a {self._role}: {error.verify_message}") from None
        except ConnectionRefusedError:
            raise StreamEnded("connection refused: no process listens there") from None
        except (OSError, ConfigurationError) as error:
            raise StreamEnded(f"no connection: {error}") from None
        self._connection = connection
        return connection

    async def _introduce(self, connection: Connection) -> None:
        try:
            kind, payload = await connection.frame()
            if kind == FrameKind.CHALLENGE:
                connection.put(FrameKind.HELLO, hello_payload(self._hello, self._key(), nonce_of(payload)))
                kind, payload = await connection.frame()
            if kind != FrameKind.WELCOME:
                raise MalformedData(OUT_OF_PLACE)
        except BaseException as error:
            connection.fail(str(error))
            if isinstance(error, MalformedData):
                raise StreamEnded(str(error)) from None
            raise


class FramedHandler(Generic[Out, In]):
    """A stream that another process opened to this one; it ends when its server function returns.

    Args:
        connection: after the hello.
        parse: makes a message of bytes.
        peer: address of the caller, for logs.
        role, name: of the caller, as far as it has proved them.
        about: the hello's text for the method.
        endpoint: of the caller, as it says: its key proves its role only.
    """

    serves = True

    def __init__(
        self,
        connection: Connection,
        parse: Callable[[bytes], Any],
        peer: str,
        role: str,
        name: str,
        about: str = "",
        endpoint: int = 0,
    ) -> None:
        self._connection, self._parse, self.endpoint = connection, parse, endpoint
        self.peer, self.role, self.name, self.about = peer, role, name, about

    async def opened(self, timeout_s: float = 0.0) -> None:
        """Do nothing: the caller was informed when its hello was accepted."""

    async def read(self) -> In | None:
        """The next message; None when the caller sends no more. Raises `StreamEnded`, and `InvalidArgument` for garbage."""
        kind, payload = await self._connection.frame()
        if kind == FrameKind.LAST:
            return None
        if kind != FrameKind.MESSAGE:
            raise InvalidArgument(OUT_OF_PLACE)
        return self._message(payload)

    def _message(self, payload: bytes) -> In:
        try:
            message: In = self._parse(payload)
        except DecodeError:
            raise InvalidArgument(GARBAGE) from None
        return message

    def hear(self, arrived: Callable[[], None] | None) -> bool:
        """See `pixiu.rpc.duplex.Direct`."""
        if arrived is not None and not self._connection.is_quiet:
            return False
        self._connection.arrived = arrived
        return True

    def take(self) -> In | None:
        """The next message if it has come. Raises `InvalidArgument` for garbage."""
        payload = self._connection.message()
        return None if payload is None else self._message(payload)

    async def write(self, message: Out) -> None:
        """Send a message. Raises `StreamEnded`."""
        self._connection.put(FrameKind.MESSAGE, packed(message))
        await self._connection.space()

    def put(self, message: Out) -> bool:
        """See `pixiu.rpc.duplex.Direct`."""
        return self._connection.put(FrameKind.MESSAGE, packed(message), flushes=False)

    def flush(self) -> bool:
        """See `pixiu.rpc.duplex.Direct`."""
        return self._connection.flush()

    async def done_writing(self) -> None:
        """Do nothing: the handler's return ends the stream."""


def refuse(connection: Connection, error: PixiuError) -> None:
    """Inform the caller why its stream is not served, or no longer."""
    after_ms = error.retry_after_ms
    with contextlib.suppress(StreamEnded):
        connection.put(FrameKind.REFUSED, refusal_payload(StreamRefusal(error.code, str(error), after_ms)))


def packed(message: object) -> bytes:
    """Bytes of a message: protobuf, or bytes unchanged."""
    return message.SerializeToString() if isinstance(message, Message) else message  # type: ignore[return-value]


class Reachable(Protocol):
    """A process that serves framed streams: a node of the registry, or a link's peer."""

    @property
    def endpoint(self) -> int: ...

    @property
    def role(self) -> str: ...

    @property
    def host(self) -> str: ...

    @property
    def stream_port(self) -> int: ...


class InProcess(Protocol):
    """Opens streams to the roles of this process (`cluster.rpc.local_streams.LocalStreams`)."""

    def __contains__(self, endpoint: object) -> bool:
        """Return True if this is the endpoint of a role of this process."""

    def call(self, node: Reachable, hello: Hello, parse: Callable[[bytes], In], max_bytes: int) -> FramedCall[Any, In]:
        """Make a stream to a role of this process."""


class Framed:
    """Opens framed streams to other processes.

    Args:
        role, endpoint: of this process.
        key: returns the key by which this process proves its role to another role; None: there is none. Raises ConfigurationError.
        max_bytes: largest received message.
        tls: this process's certificates; None: connections are not encrypted.
    """

    def __init__(
        self, role: str, endpoint: int, key: Callable[[str], bytes | None], max_bytes: int, tls: Tls | None = None
    ) -> None:
        self._role, self._endpoint, self._key, self._max_bytes, self._tls = role, endpoint, key, max_bytes, tls

    local: InProcess | None = None
    """Opens streams to other roles of this process; None: there are none."""

    def call(self, node: Reachable, method: str, parse: Callable[[bytes], In], about: str = "") -> FramedCall[Any, In]:
        """Make a stream of a method (`cluster.rpc.methods`) to a process. about: see `Hello`."""
        if self.local is not None and node.endpoint in self.local:
            return self.local.call(node, Hello(method, self._role, self._endpoint, about), parse, self._max_bytes)
        hello = Hello(method, self._role, self._endpoint, about)
        return FramedCall(
            node.host, node.stream_port, node.role, hello, lambda: self._key(node.role), parse, self._max_bytes, self._tls
        )
