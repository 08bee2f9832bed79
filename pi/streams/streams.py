"""The gRPC side of a Pi replica: streams of requests, in batches.

Source: docs/links.md, docs/promises.md, "Failure rules".
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Final, Protocol

import grpc.aio

from cluster.listeners.call_guard import Caller, caller_of
from cluster.rpc.framed import FramedHandler
from cluster.store.streams import StoreStreams, Window
from cluster.trust.audit import Audit
from pi.events import NO_DEVICE, ReadRequest, Reply
from pi.keys import EPOCH_S
from pi.streams.work import of_notes, removals
from pixiu.errors import MalformedData
from pixiu.rpc.duplex import Served
from pixiu.rpc.grpc_streams import GrpcHandler
from pixiu.wire.levels import Level
from pixiu.wire.v1 import pi_pb2, pi_pb2_grpc

WINDOW: Final = Window(requests=1000, size=8 << 20)
"""Limits of one caller's stream."""
MAX_READ: Final = 1000
MAX_READ_ENTRIES: Final = 50_000
"""Limit of entries of all reads of a request. Policy: later reads return fewer, or none, and the end of the inbox."""
GATEWAY: Final = "gateway"
NOTES_ALONE: Final = "gateways set and read notes alone"

Context = grpc.aio.ServicerContext[pi_pb2.PiRequest, pi_pb2.PiReply]
StreamHandler = Served[pi_pb2.PiReply, pi_pb2.PiRequest]


class StreamHost(Protocol):
    """Interface of the replica's service to its callers."""

    def admit(self) -> None:
        """Raise Draining if no new stream is taken."""

    def request(self, number: int, request: pi_pb2.PiRequest) -> None:
        """Take a request of a stream."""

    def left(self, number: int) -> None:
        """Remove a stream that has ended."""


def reads_of(request: pi_pb2.PiRequest) -> list[ReadRequest]:
    """The reads of a request."""
    found: list[ReadRequest] = []
    left = MAX_READ_ENTRIES
    for read in request.reads:
        start = read.start if read.HasField("start") else None
        num = min(read.num, MAX_READ, left)
        left -= num
        device = NO_DEVICE if read.peek else read.device
        found.append(ReadRequest(read.uin, device, read.lane, read.session, start, num, read.before, read.devices, read.notes))
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
            code=found.code, unread=found.unread, notes_generation=found.generation,
        )  # fmt: skip
        for device in found.devices:
            answer.devices.add(
                device=device.number, client_id=device.client_id, seen_s=device.seen_s + EPOCH_S, counts=device.counts,
                up_to=device.up_to, map=device.bits, unread=device.unread,
            )  # fmt: skip
        for note in found.notes:
            answer.notes.add(name=note.name, generation=note.generation, value=note.value)
    if reply.server is not None:
        partition, partitions, address = reply.server
        message.server.CopyFrom(pi_pb2.PiServer(partition=partition, partitions=partitions, address=address))
    return message


def _of_notes(request: pi_pb2.PiRequest) -> bool:
    try:
        return of_notes(request.operations, request.reads)
    except MalformedData:
        return False


class PiService(pi_pb2_grpc.PiServicer):
    """The gRPC service `pixiu.v1.Pi`.

    Args:
        audit: of the process: records deletions of users' mail, and dropped devices.
    """

    def __init__(self, hub: StreamHost, audit: Audit) -> None:
        self._hub, self._audit = hub, audit
        self.streams: StoreStreams[pi_pb2.PiReply, pi_pb2.PiReply, pi_pb2.PiRequest] = StoreStreams(
            WINDOW, lambda request: len(request.operations), lambda replies: replies[0], hub.left
        )

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
        caller = who()

        def take(number: int, request: pi_pb2.PiRequest) -> str:
            if caller.role == GATEWAY and not _of_notes(request):
                return NOTES_ALONE
            if request.operations:
                for what in removals(request.operations):
                    if caller.role == GATEWAY:
                        break  # a client has begun anew, or ended its session
                    self._audit.write("inbox_change", caller=caller.role, name=caller.name, peer=handler.peer, **what)
            self._hub.request(number, request)
            return ""

        self._hub.admit()
        await self.streams.open(handler, take).run()
