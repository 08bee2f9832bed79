"""The gRPC side of a Pi replica: streams of requests, in batches.

Source: docs/links.md, docs/promises.md, "Failure rules".
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, Protocol

import grpc.aio

from cluster.listeners.call_guard import Caller, caller_of
from cluster.rpc.framed import FramedHandler
from cluster.trust.audit import Audit
from pi.events import NO_DEVICE, ReadRequest, Reply
from pi.keys import EPOCH_S
from pi.streams.work import removals
from pixiu.errors import Overloaded, PixiuError
from pixiu.rpc.duplex import Carrier, Duplex, Served
from pixiu.rpc.grpc_streams import GrpcHandler
from pixiu.rpc.status import GRPC_STATUS
from pixiu.wire.levels import Level
from pixiu.wire.v1 import pi_pb2, pi_pb2_grpc

WINDOW_REQUESTS: Final = 1000
"""Limit of unanswered requests of one stream. Policy: at it the stream is not read."""
WINDOW_BYTES: Final = 8 << 20
"""Limit of replies of one stream that wait to be sent. Policy: at it the stream is not read."""
MAX_READ: Final = 1000
MAX_READ_ENTRIES: Final = 50_000
"""Limit of entries of all reads of a request. Policy: later reads return fewer, or none, and the end of the inbox."""

Context = grpc.aio.ServicerContext[pi_pb2.PiRequest, pi_pb2.PiReply]
StreamCarrier = Carrier[pi_pb2.PiReply, pi_pb2.PiRequest]
StreamHandler = Served[pi_pb2.PiReply, pi_pb2.PiRequest]
VerifyContext = grpc.aio.ServicerContext[pi_pb2.PiVerifyRequest, pi_pb2.PiVerifyReply]


class StreamHost(Protocol):
    """Interface of the replica's service to its callers."""

    def admit(self, stream: Stream) -> int:
        """Return a number for a new stream. Raises Overloaded or Draining."""

    def request(self, number: int, request: pi_pb2.PiRequest) -> None:
        """Take a request of a stream."""

    async def verify(self, repair: bool) -> tuple[int, str, bool]:
        """Check the store: (undamaged values, damage, True if a repair begins). Raises PixiuError."""

    def left(self, number: int) -> None:
        """Remove a stream that has ended."""


class Stream:
    """One caller: its replies, and the amount of unanswered requests.

    Args:
        carrier: of the stream.
        take: called with each request.
        over: called when the stream is over.
    """

    def __init__(self, carrier: StreamCarrier, take: Callable[[pi_pb2.PiRequest], None], over: Callable[[], None]) -> None:
        self._on_request = take
        self._replies: deque[pi_pb2.PiReply] = deque()
        self._unanswered = 0
        self._bytes = 0
        self._leaving: pi_pb2.PiReply | None = None
        self._space = asyncio.Event()
        self._space.set()
        self._answered = asyncio.Event()
        self._answered.set()
        self._duplex = Duplex(carrier, self._take, self._give, over=over, last=self._answered.wait)

    def answer(self, reply: pi_pb2.PiReply) -> None:
        """Send a reply to the caller."""
        self._replies.append(reply)
        self._bytes += reply.ByteSize()
        if self._bytes >= WINDOW_BYTES:
            self._space.clear()
        self._duplex.wake()

    async def run(self) -> None:
        """Run until the caller has ended and has all its answers, or is gone."""
        await self._duplex.run()

    def _take(self, request: pi_pb2.PiRequest) -> Awaitable[object] | None:
        self._unanswered += 1
        self._answered.clear()
        if self._unanswered >= WINDOW_REQUESTS:
            self._space.clear()
        self._on_request(request)
        return None if self._space.is_set() else self._space.wait()

    def _give(self) -> pi_pb2.PiReply | None:
        """Return the next reply. A caller that does not read its replies is not read from: they count until they have left."""
        if self._leaving is not None:
            self._unanswered -= 1
            self._bytes -= self._leaving.ByteSize()
            self._leaving = None
            if self._unanswered < WINDOW_REQUESTS and self._bytes < WINDOW_BYTES:
                self._space.set()
            if not self._unanswered:
                self._answered.set()
        if self._replies:
            self._leaving = self._replies.popleft()
        return self._leaving


def reads_of(request: pi_pb2.PiRequest) -> list[ReadRequest]:
    """The reads of a request."""
    found: list[ReadRequest] = []
    left = MAX_READ_ENTRIES
    for read in request.reads:
        start = read.start if read.HasField("start") else None
        num = min(read.num, MAX_READ, left)
        left -= num
        device = NO_DEVICE if read.peek else read.device
        found.append(ReadRequest(read.uin, device, read.lane, read.session, start, num, read.before, read.devices))
    return found


def level_of(request: pi_pb2.PiRequest) -> Level:
    """The level of a request's operations; an unknown one counts as the safest."""
    return Level.from_wire(request.level) or Level.REPLICATED


def message_of(reply: Reply) -> pi_pb2.PiReply:
    """Encode a reply."""
    message = pi_pb2.PiReply(
        request=reply.request, results=reply.results, code=reply.code, text=reply.text, retry_after_ms=reply.retry_after_ms,
        layout_version=reply.triple.layout_version, epoch=reply.triple.epoch, committed=reply.triple.committed,
        copies=reply.copies,
    )  # fmt: skip
    for found in reply.reads:
        answer = message.reads.add(
            seqs=[seq for seq, _ in found.entries], msg_ids=[msg_id for _, msg_id in found.entries], floor=found.floor,
            gap=found.gap, last=found.last, dropped=found.dropped, up_to=found.up_to,
            code=found.code, unread=found.unread,
        )  # fmt: skip
        for device in found.devices:
            answer.devices.add(
                device=device.number, client_id=device.client_id, seen_s=device.seen_s + EPOCH_S, counts=device.counts,
                up_to=device.up_to, map=device.bits, unread=device.unread,
            )  # fmt: skip
    if reply.server is not None:
        partition, partitions, address = reply.server
        message.server.CopyFrom(pi_pb2.PiServer(partition=partition, partitions=partitions, address=address))
    return message


class PiService(pi_pb2_grpc.PiServicer):
    """The gRPC service `pixiu.v1.Pi`.

    Args:
        audit: of the process: records deletions of users' mail, and dropped devices.
    """

    def __init__(self, hub: StreamHost, audit: Audit) -> None:
        self._hub, self._audit = hub, audit
        self._verifying = asyncio.Lock()

    async def Exchange(  # type: ignore[override]  # the generated base has the synchronous signature as well
        self, request_iterator: AsyncIterator[pi_pb2.PiRequest], context: Context
    ) -> None:
        """Serve one caller's stream."""
        await self.exchange(GrpcHandler(context), lambda: caller_of(context))

    async def exchange_framed(self, handler: FramedHandler[pi_pb2.PiReply, pi_pb2.PiRequest]) -> None:
        """Serve one caller's stream, over frames."""
        await self.exchange(handler, lambda: Caller(handler.role, handler.name))

    async def exchange(self, handler: StreamHandler, who: Callable[[], Caller]) -> None:
        """Serve one caller's stream over any carrier."""
        number = 0
        caller: Caller | None = None

        def take(request: pi_pb2.PiRequest) -> None:
            nonlocal caller
            if request.operations:
                for what in removals(request.operations):
                    caller = caller or who()
                    self._audit.write("inbox_change", caller=caller.role, name=caller.name, peer=handler.peer, **what)
            self._hub.request(number, request)

        stream = Stream(handler, take, lambda: self._hub.left(number))
        try:
            number = self._hub.admit(stream)
        except PixiuError as refused:
            await handler.refuse(refused)
        await stream.run()

    async def Verify(self, request: pi_pb2.PiVerifyRequest, context: VerifyContext) -> pi_pb2.PiVerifyReply:
        """Check every stored value."""
        if self._verifying.locked():
            await context.abort(GRPC_STATUS[Overloaded.code], "this replica is being checked already; wait for it to end")
        async with self._verifying:
            try:
                values, damage, repairing = await self._hub.verify(request.repair)
            except PixiuError as error:
                await context.abort(GRPC_STATUS[error.code], f"{error.code}: {error}")
            return pi_pb2.PiVerifyReply(values=values, damage=damage, repairing=repairing)
