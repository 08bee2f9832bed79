"""The stream carrier: the same frames as on UDP, larger, over the bidirectional gRPC call `Link.Exchange`.

    this process ── frames with records or control ──►  peer      the stream that this process opened
    this process ◄── acknowledgements of them ────────  peer      its other direction

Each side opens a stream of its own for what it sends. Frames authenticate themselves by their tags.

Source: DESIGN section 6.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, Protocol

import grpc
import grpc.aio

from pixiu.ids import EndpointID
from pixiu.rpc.backoff import Backoff
from pixiu.rpc.channels import PEER_CHANNEL
from pixiu.wire.v1.wire_pb2 import LinkFrame
from pixiu.wire.v1.wire_pb2_grpc import LinkServicer, LinkStub

CONNECT_WAIT_S: Final = 5.0
FIRST_BACKOFF_S: Final = 0.05
MAX_BACKOFF_S: Final = 2.0
MAX_INCOMING: Final = 4096
"""Streams that others may have open to this process."""


class OutgoingStream:
    """The stream that this process opens to one peer; connects when wanted, again with jittered back-off."""

    def __init__(
        self,
        peer: EndpointID,
        target: str,
        on_frame: Callable[[EndpointID, bytes], None],
        on_state: Callable[[EndpointID, bool], None],
        wanted: Callable[[EndpointID], bool],
    ) -> None:
        """`target` is "host:port"; `on_frame` gets what the peer answers, `on_state` whether the stream is there."""
        self._peer = peer
        self._target = target
        self._on_frame = on_frame
        self._on_state = on_state
        self._wanted = wanted
        self._need = asyncio.Event()
        self._work = asyncio.Event()
        # Bounded by the window: what is in it is in flight.
        self._frames: deque[bytes] = deque()
        self._call: Any = None
        self._task = asyncio.get_running_loop().create_task(self._run())

    def need(self) -> None:
        """Something wants to leave."""
        self._need.set()

    def send(self, frame: bytes) -> None:
        """Queue a frame on the stream that `on_state` reported."""
        self._frames.append(frame)
        self._work.set()

    def reset(self) -> None:
        """Break the stream: what it still holds must not arrive late."""
        self._frames.clear()
        if self._call is not None:
            self._call.cancel()

    async def close(self) -> None:
        """Break the stream for good."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

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
        """One connection from beginning to end. Whether it was there at all."""
        up = False
        async with grpc.aio.insecure_channel(self._target, options=PEER_CHANNEL) as channel:
            call: Any = LinkStub(channel).Exchange()
            workers: list[asyncio.Task[None]] = []
            try:
                async with asyncio.timeout(CONNECT_WAIT_S):
                    await call.wait_for_connection()
                up = True
                self._frames.clear()
                self._call = call
                self._on_state(self._peer, True)
                workers = [asyncio.create_task(self._read(call)), asyncio.create_task(self._write(call))]
                await asyncio.wait(workers, return_when=asyncio.FIRST_COMPLETED)
            except (grpc.aio.AioRpcError, grpc.aio.UsageError, TimeoutError):
                pass
            except asyncio.CancelledError:
                # The call was cancelled by `reset`, or this task by `close`.
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
            finally:
                self._call = None
                if up:
                    self._on_state(self._peer, False)
                call.cancel()
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
        return up

    async def _read(self, call: Any) -> None:
        while (frame := await call.read()) is not grpc.aio.EOF:
            self._on_frame(self._peer, frame.datagram)

    async def _write(self, call: Any) -> None:
        while True:
            while self._frames:
                await call.write(LinkFrame(datagram=self._frames.popleft()))
            self._work.clear()
            await self._work.wait()


class IncomingStream:
    """A stream that a peer opened to this process."""

    def __init__(self, context: Any) -> None:
        self.source: EndpointID | None = None
        """Who speaks, known from its first good frame."""
        self.name = str(context.peer())
        self._context = context
        # The task of this call's handler: the server's context itself cannot be cancelled.
        self._task = asyncio.current_task()
        self._reply = b""
        self._work = asyncio.Event()

    def send(self, frame: bytes) -> None:
        """Send an acknowledgement. One that still waits is replaced, because the newer one says all that it said."""
        self._reply = frame
        self._work.set()

    def cancel(self) -> None:
        """End it: a newer stream of the same peer took its place, or this process closes."""
        if self._task is not None:
            self._task.cancel()

    async def write(self) -> None:
        """Send what `send` leaves, until cancelled."""
        while True:
            await self._work.wait()
            self._work.clear()
            await self._context.write(LinkFrame(datagram=self._reply))


class StreamHost(Protocol):
    """What the service needs of the endpoint."""

    def stream_frame(self, data: bytes, stream: IncomingStream) -> bool:
        """A frame came. False: it was refused and nobody good has spoken on this stream yet."""

    def stream_closed(self, stream: IncomingStream) -> None:
        """The stream ended."""


class LinkService(LinkServicer):
    """The server's side of `Link.Exchange`."""

    def __init__(self, host: StreamHost) -> None:
        self._host = host
        self._open = 0

    async def Exchange(  # type: ignore[override]
        self, request_iterator: AsyncIterator[LinkFrame], context: grpc.aio.ServicerContext[LinkFrame, LinkFrame]
    ) -> None:
        """One stream of one peer."""
        if self._open >= MAX_INCOMING:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"this process has {MAX_INCOMING} streams open")
        self._open += 1
        stream = IncomingStream(context)
        writer = asyncio.create_task(stream.write())
        try:
            # Tells the peer that the service is here, before there is anything to answer.
            await context.send_initial_metadata(())
            async for frame in request_iterator:
                if not self._host.stream_frame(frame.datagram, stream):
                    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not a frame for this process")
        finally:
            self._open -= 1
            self._host.stream_closed(stream)
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
