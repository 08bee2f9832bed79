"""Framed streams between the roles of one process: the same frames, hello and bounds, without sockets, TLS and keys.

    caller's Connection ─ End ◄──► End ─ served Connection        what one side writes, the other has received when `write` returns

A side that does not read holds the other one's writer back, as between processes.

Source: docs/links.md, "Framed streams".
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from cluster.rpc.framed import OPEN_S, WRITE_HIGH, Connection, FramedCall, Reachable
from cluster.rpc.frames import Hello
from pixiu.rpc.duplex import In, StreamEnded


class End(asyncio.Transport):
    """One end of a connection inside a process. Reading begins with `resume_reading`."""

    def __init__(self) -> None:
        super().__init__()
        self.other = self
        self._protocol: asyncio.Protocol | None = None
        self._waiting: deque[bytes] = deque()
        """Data written while the other end did not read. `pause_writing` holds its writer back, which bounds it."""
        self._bytes, self._high = 0, WRITE_HIGH
        self._paused = False
        self._reads = False
        self._ends = self._over = False

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Set the receiver at this end."""
        assert isinstance(protocol, asyncio.Protocol)
        self._protocol = protocol

    def get_protocol(self) -> asyncio.Protocol | None:  # type: ignore[override]
        """Return the receiver at this end."""
        return self._protocol

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set the bytes that may wait before the writer is held back."""
        self._high = WRITE_HIGH if high is None else high

    def get_write_buffer_size(self) -> int:
        """Bytes that wait."""
        return self._bytes

    def pause_reading(self) -> None:
        """Receive no more."""
        self._reads = False

    def resume_reading(self) -> None:
        """Receive what waits, and what comes."""
        self._reads = True
        self.other._pass_on()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Pass bytes on to the other end."""
        if self._over or self._ends:
            return
        self._waiting.append(bytes(data))
        self._bytes += len(data)
        self._pass_on()
        if self._bytes > self._high and not self._paused and self._protocol is not None:
            self._paused = True
            self._protocol.pause_writing()

    def can_write_eof(self) -> bool:
        """Return True: each direction ends by itself."""
        return True

    def write_eof(self) -> None:
        """Write no more. The other end closes when it has received everything."""
        self._ends = True
        self._pass_on()

    def close(self) -> None:
        """Write no more, and end the connection when the other end has received everything."""
        self.write_eof()

    def is_closing(self) -> bool:
        """Return True if nothing can be written any more."""
        return self._ends or self._over

    def abort(self) -> None:
        """End the connection; what waits is lost."""
        for end in (self, self.other):
            end._lose()

    def _pass_on(self) -> None:
        other = self.other
        while self._waiting and other._reads and other._protocol is not None and not self._over:
            data = self._waiting.popleft()
            self._bytes -= len(data)
            other._protocol.data_received(data)
        if self._paused and self._bytes <= self._high // 4 and self._protocol is not None:
            self._paused = False
            self._protocol.resume_writing()
        if self._ends and not self._waiting and not self._over:
            if other._ends:
                self.abort()
            else:
                # Who receives the end of a connection of frames has nothing more to write than what waits already.
                other.write_eof()

    def _lose(self) -> None:
        if not self._over:
            self._over = True
            self._waiting.clear()
            if self._protocol is not None:
                asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)


def connection() -> tuple[End, End]:
    """Make the two ends of a connection."""
    one, other = End(), End()
    one.other, other.other = other, one
    return one, other


class Serves(Protocol):
    """A listener that also serves the roles of its process (`cluster.rpc.framed_listener.FramedListener`)."""

    def arrive(self, transport: asyncio.Transport) -> None:
        """Serve a connection of a role of this process."""


class LocalStreams:
    """The listeners of one process, by the endpoints of their roles."""

    def __init__(self) -> None:
        self.listeners: dict[int, Serves] = {}

    def __contains__(self, endpoint: object) -> bool:
        """Return True if this is the endpoint of a role of this process."""
        return endpoint in self.listeners

    def call(self, node: Reachable, hello: Hello, parse: Callable[[bytes], In], max_bytes: int) -> FramedCall[Any, In]:
        """Make a stream to a role of this process."""
        return LocalCall(self, node.endpoint, node.role, hello, parse, max_bytes)


class LocalCall(FramedCall[Any, In]):
    """A stream to a role of the same process."""

    def __init__(
        self, streams: LocalStreams, endpoint: int, role: str, hello: Hello, parse: Callable[[bytes], In], max_bytes: int
    ) -> None:
        super().__init__("this process", 0, role, hello, lambda: None, parse, max_bytes)
        self._streams, self._endpoint = streams, endpoint

    async def _connect(self) -> Connection:
        listener = self._streams.listeners.get(self._endpoint)
        if listener is None:
            raise StreamEnded(f"the {self._role} of this process has ended")
        own, others = connection()
        made = Connection(self._max_bytes)
        own.set_protocol(made)
        made.connection_made(own)
        own.resume_reading()
        listener.arrive(others)
        try:
            async with asyncio.timeout(OPEN_S):
                await self._introduce(made)
        except TimeoutError:
            raise StreamEnded("no connection in time") from None
        self._connection = made
        return made
