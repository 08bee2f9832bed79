"""The stream carrier of links: the same frames as on UDP, larger.

    this process ── frames with records or control ──►  peer      the stream that this process opened
    this process ◄── acknowledgements of them ────────  peer      its other direction

Each side opens a stream of its own for what it sends. Frames authenticate themselves by their tags.

Source: docs/links.md.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Final, Protocol

from cluster.rpc.framed import FramedCall, FramedHandler
from pixiu.errors import MalformedData
from pixiu.ids import EndpointID
from pixiu.rpc.backoff import Backoff
from pixiu.rpc.duplex import Duplex, Outbox, StreamEnded

CONNECT_WAIT_S: Final = 5.0
FIRST_BACKOFF_S: Final = 0.05
MAX_BACKOFF_S: Final = 2.0
MAX_SILENT: Final = 1024
"""Open streams without a good frame so far. Policy: the oldest is closed for a new one."""
MAX_FRAMES: Final = 1 << 20
"""Frames that may wait on one stream; the link's window keeps them far below. Policy: a further one is lost, and sent again."""


class OutgoingStream:
    """The stream that this process opens to one peer; connects when needed, again with backoff."""

    def __init__(
        self,
        peer: EndpointID,
        opens: Callable[[], FramedCall[bytes, bytes]],
        on_frame: Callable[[EndpointID, bytes], None],
        on_state: Callable[[EndpointID, bool], None],
        wanted: Callable[[EndpointID], bool],
    ) -> None:
        """Create the stream; it connects when needed.

        `opens` makes the call. `on_frame` gets the peer's answers, `on_state` True when the stream is connected and False when it
        breaks."""
        self._peer, self._opens = peer, opens
        self._on_frame = on_frame
        self._on_state = on_state
        self._wanted = wanted
        self._need = asyncio.Event()
        self._frames = Outbox[bytes](MAX_FRAMES)
        self._call: FramedCall[bytes, bytes] | None = None
        self._task = asyncio.get_running_loop().create_task(self._run())

    def need(self) -> None:
        """Connect if necessary: something must be sent."""
        self._need.set()

    def send(self, frame: bytes) -> None:
        """Queue a frame on the stream that `on_state` reported."""
        self._frames.put(frame)

    def reset(self) -> None:
        """Break the stream: data that it still holds must not arrive late."""
        self._frames.clear()
        if self._call is not None:
            self._call.cancel()

    async def close(self) -> None:
        """Break the stream for good."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S, random.random)
        while True:
            if not self._wanted(self._peer):
                self._need.clear()
                await self._need.wait()
            if await self._connection():
                backoff.reset()
            await asyncio.sleep(backoff.next_s())

    async def _connection(self) -> bool:
        """Run one connection from beginning to end. Returns True if it was established."""
        async with self._opens() as call:
            try:
                await call.opened(CONNECT_WAIT_S)
            except StreamEnded:
                return False
            self._frames.clear()
            self._call = call
            self._on_state(self._peer, True)
            await Duplex(call, self._take, self._frames.give, work=self._frames.work, over=self._down).run()
            return True

    def _take(self, frame: bytes) -> None:
        self._on_frame(self._peer, frame)

    def _down(self) -> None:
        self._call = None
        self._on_state(self._peer, False)


class IncomingStream:
    """A stream that a peer opened to this process."""

    def __init__(self, handler: FramedHandler[bytes, bytes], host: StreamHost, heard: Callable[[IncomingStream], None]) -> None:
        """`heard` is called with each good frame."""
        self.source: EndpointID | None = None
        """Sender on this stream, known from its first good frame."""
        self.name = handler.peer
        self.refused = False
        """True if it sent data that is not for this process."""
        self._host, self._heard = host, heard
        self._reply: bytes | None = None
        self._stream = Duplex(handler, self._take, self._give, over=self._over)

    def send(self, frame: bytes) -> None:
        """Send an acknowledgement. One that still waits is replaced, because the newer one contains everything in it."""
        self._reply = frame
        self._stream.wake()

    def cancel(self) -> None:
        """End the stream: a newer stream of the same peer replaced it, or this process closes."""
        self._stream.end("cancelled")

    async def run(self) -> None:
        """Run the stream until it ends."""
        await self._stream.run()

    def _take(self, frame: bytes) -> None:
        if not self._host.stream_frame(frame, self):
            self.refused = True
            self._stream.end("not a frame for this process")
        elif self.source is not None:
            self._heard(self)

    def _give(self) -> bytes | None:
        reply, self._reply = self._reply, None
        return reply

    def _over(self) -> None:
        self._host.stream_closed(self)


class StreamHost(Protocol):
    """The endpoint as the service uses it."""

    def stream_frame(self, data: bytes, stream: IncomingStream) -> bool:
        """Handle a frame. False if it was refused and no frame has been good on this stream yet."""

    def stream_closed(self, stream: IncomingStream) -> None:
        """Handle the end of the stream; called once."""


class LinkStreams:
    """Serves the streams that peers open."""

    def __init__(self, host: StreamHost) -> None:
        self._host = host
        self._silent: dict[IncomingStream, None] = {}
        """Streams without a good frame so far, oldest first."""

    async def serve(self, handler: FramedHandler[bytes, bytes]) -> None:
        """Serve one stream of one peer."""
        stream = IncomingStream(handler, self._host, self._spoke)
        if len(self._silent) >= MAX_SILENT:
            oldest = next(iter(self._silent))
            self._spoke(oldest)
            oldest.cancel()
        self._silent[stream] = None
        try:
            await stream.run()
        finally:
            self._spoke(stream)
        if stream.refused:
            raise MalformedData("not a frame for this process")

    def _spoke(self, stream: IncomingStream) -> None:
        self._silent.pop(stream, None)
