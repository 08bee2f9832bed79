"""The gRPC side of a proxy: the `Publisher` service.

One stream is one publisher. Its batches go to the core; its replies say up to which position all is resolved. A
publisher with more than its window unresolved is not read from.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from typing import Protocol

import grpc
import grpc.aio

from pixiu.errors import GRPC_STATUS, InvalidArgument, PixiuError
from pixiu.wire.record import HEADER_SIZE
from pixiu.wire.v1 import wire_pb2, wire_pb2_grpc
from proxy import events as ev
from proxy.options import Options
from proxy.worker_leases import Lender

MAX_CLIENT_BYTES = 128
MAX_FAILURES_A_REPLY = 1_000
CLOSE_TIMEOUT_S = 2.0
"""How long a write under way may take when the stream ends."""
FINISH_TIMEOUT_S = 10.0
"""How long a publisher that has said its last word is still answered."""

Context = grpc.aio.ServicerContext[wire_pb2.PublishRequest, wire_pb2.PublishReply]


class PublisherHost(Protocol):
    """What the proxy's service offers to its publishers."""

    options: Options
    lender: Lender

    def admit(self, publisher: PublisherStream) -> int:
        """A number for a new publisher. Raises `Overloaded` or `Draining`."""

    def named(self, stream: int, client: str) -> None:
        """The publisher said its name."""

    def publish(self, stream: int, request: wire_pb2.PublishRequest) -> None:
        """A batch."""

    def left(self, stream: int) -> None:
        """The publisher is gone."""

    def members(self) -> wire_pb2.ClusterReply:
        """Where the cluster's proxies and gateways are."""


class PublisherStream:
    """One publisher: its window, and the reply that is being made up."""

    def __init__(self, window_bytes: int) -> None:
        self.expected = 1
        self.worker: int | None = None
        self._window = window_bytes
        self._sizes: deque[tuple[int, int]] = deque()
        self._unresolved = 0
        self._up_to = 0
        self._failures: list[ev.Failure] = []
        self._extra: list[wire_pb2.PublishReply] = []
        self._delivered: list[int] = []
        self._wake = asyncio.Event()
        self._ended = False
        self._room = asyncio.Event()
        self._room.set()
        self._all_resolved = asyncio.Event()
        self._all_resolved.set()

    async def room(self) -> None:
        """Wait until the window has room."""
        await self._room.wait()

    async def finished(self) -> None:
        """Wait until everything is resolved and answered."""
        await self._all_resolved.wait()

    def took(self, last: int, size: int) -> None:
        """A batch up to position `last` is under way."""
        self._sizes.append((last, size))
        self._unresolved += size
        self._all_resolved.clear()
        if self._unresolved >= self._window:
            self._room.clear()

    def resolved(self, reply: ev.Reply) -> None:
        """The core's reply."""
        self._up_to = reply.up_to
        self._failures.extend(reply.failures)
        while self._sizes and self._sizes[0][0] <= reply.up_to:
            self._unresolved -= self._sizes.popleft()[1]
        if self._unresolved < self._window:
            self._room.set()
        self._wake.set()

    def say(self, reply: wire_pb2.PublishReply) -> None:
        """Send something besides what is resolved."""
        self._extra.append(reply)
        self._wake.set()

    def delivered(self, signals: list[int]) -> None:
        """Gateways delivered these of its signals. At most as many wait here as the core remembers."""
        self._delivered += signals
        self._wake.set()

    def end(self) -> None:
        """The publisher is gone: write nothing more."""
        self._ended = True
        self._wake.set()

    async def write_all(self, context: Context) -> None:
        """Write replies as they come, joined while a write is under way."""
        written = 0
        while not self._ended:
            await self._wake.wait()
            self._wake.clear()
            extra, self._extra = self._extra, []
            if self._delivered:
                extra.append(wire_pb2.PublishReply(delivered=self._delivered))
                self._delivered = []
            for reply in extra:
                await context.write(reply)
            while (self._up_to > written or self._failures) and not self._ended:
                # Failures of positions up to `up_to` must not come after it.
                failures, self._failures = self._failures[:MAX_FAILURES_A_REPLY], self._failures[MAX_FAILURES_A_REPLY:]
                written = self._up_to if not self._failures else max(written, self._failures[0].first - 1)
                await context.write(
                    wire_pb2.PublishReply(
                        up_to=written,
                        failures=[
                            wire_pb2.PublishFailure(
                                first=f.first, last=f.last, code=f.code, text=f.text, retry_after_ms=f.retry_after_ms
                            )
                            for f in failures
                        ],
                    )
                )
            if not self._sizes:
                self._all_resolved.set()


class PublisherService(wire_pb2_grpc.PublisherServicer):
    """Serves `pixiu.v1.Publisher`."""

    def __init__(self, host: PublisherHost) -> None:
        self._host = host

    async def Cluster(
        self, request: wire_pb2.ClusterRequest, context: grpc.aio.ServicerContext[wire_pb2.ClusterRequest, wire_pb2.ClusterReply]
    ) -> wire_pb2.ClusterReply:
        """Where the cluster's proxies and gateways are."""
        return self._host.members()

    async def Publish(  # type: ignore[override]
        self, request_iterator: AsyncIterator[wire_pb2.PublishRequest], context: Context
    ) -> None:
        """One publisher's stream."""
        publisher = PublisherStream(self._host.options.publisher_window_bytes)
        try:
            number = self._host.admit(publisher)
        except PixiuError as error:
            await context.abort(GRPC_STATUS[error.code], str(error))
        writer = asyncio.create_task(publisher.write_all(context))
        reader = asyncio.create_task(self._read(number, publisher, request_iterator))
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
            problem = reader.exception() if reader.done() else None
            if reader.done() and problem is None:
                await _first_of(writer, publisher.finished(), FINISH_TIMEOUT_S)
        finally:
            self._host.left(number)
            if publisher.worker is not None:
                self._host.lender.give_back(publisher.worker, 0)
            publisher.end()
            reader.cancel()
            # A write under way is left to end: gRPC refuses to close a call in the middle of one.
            await asyncio.wait({reader, writer}, timeout=CLOSE_TIMEOUT_S)
            writer.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)
        if isinstance(problem, PixiuError):
            await context.abort(GRPC_STATUS[problem.code], str(problem))
        elif problem is not None:
            raise problem

    async def _read(self, number: int, publisher: PublisherStream, requests: AsyncIterator[wire_pb2.PublishRequest]) -> None:
        async for request in requests:
            if request.HasField("hello"):
                await self._hello(number, publisher, request.hello)
            if request.renew_worker and publisher.worker is not None:
                loan = self._host.lender.renew(publisher.worker, _now_ms())
                publisher.say(wire_pb2.PublishReply(worker=loan.worker, worker_from_ms=loan.from_ms, worker_until_ms=loan.until_ms))
            if request.last_used_ms and publisher.worker is not None:
                self._host.lender.give_back(publisher.worker, request.last_used_ms)
                publisher.worker = None
            if request.count:
                self._take(number, publisher, request)
                await publisher.room()

    async def _hello(self, number: int, publisher: PublisherStream, hello: wire_pb2.PublishHello) -> None:
        if len(hello.client.encode()) > MAX_CLIENT_BYTES:
            raise InvalidArgument(f"a client's name has at most {MAX_CLIENT_BYTES} bytes")
        self._host.named(number, hello.client)
        reply = wire_pb2.PublishReply(window_bytes=self._host.options.publisher_window_bytes)
        if hello.lend_worker and publisher.worker is None:
            loan = await self._host.lender.lend(_now_ms())
            publisher.worker = loan.worker
            reply.worker, reply.worker_from_ms, reply.worker_until_ms = loan.worker, loan.from_ms, loan.until_ms
        publisher.say(reply)

    def _take(self, number: int, publisher: PublisherStream, request: wire_pb2.PublishRequest) -> None:
        data, count, position = request.batch, request.count, request.position
        if position != publisher.expected:
            raise InvalidArgument(f"positions are dense: {publisher.expected} was expected, {position} came")
        if count * HEADER_SIZE > len(data):
            raise InvalidArgument(f"a batch of {len(data)} bytes cannot hold {count} records")
        publisher.expected += count
        publisher.took(position + count - 1, len(data))
        self._host.publish(number, request)


async def _first_of(task: asyncio.Task[None], other: Coroutine[None, None, None], timeout_s: float) -> None:
    """Wait for one of two, at most so long."""
    waiting = asyncio.ensure_future(other)
    await asyncio.wait({task, waiting}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
