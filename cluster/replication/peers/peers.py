"""Streams between the replicas of a partition: a replica that has something to send opens one, and answers return on it.

    leader  ── append, heartbeat ──▶  follower      the stream that the leader opened
            ◀── appended, mismatch ─

Messages may be lost: a broken stream loses what it holds, a full queue drops new messages. The cores repeat them.
Bytes are parsed only when their sender and their size are known.

Source: docs/replication.md, docs/promises.md, "Failure rules".
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from cluster.process.context import Context
from cluster.replication.core.messages import Message
from cluster.replication.model import MemberID
from cluster.replication.options import ReplicationOptions
from cluster.replication.peers.registry import LiveReplica
from cluster.replication.peers.wire import decode_message
from cluster.rpc.framed import Framed, FramedCall, FramedHandler
from cluster.rpc.methods import REPLICATE
from cluster.wire.v1 import replication_pb2 as pb
from pixiu.errors import ConfigurationError, MalformedData, Overloaded, Unavailable
from pixiu.ids import hex_id
from pixiu.rpc.backoff import Backoff
from pixiu.rpc.channels import PEER_CHANNEL
from pixiu.rpc.duplex import Duplex, Outbox, StreamEnded
from pixiu.rpc.tls import peer_channel

SERVICE: Final = "pixiu.v1.Replication"
MAX_MESSAGE_BYTES: Final = 4 << 20
"""Size of one message; larger ones are not parsed."""
MAX_QUEUED: Final = 256
MAX_QUEUED_BYTES: Final = 32 << 20
"""Limits of the queue for one peer. Policy: beyond either, new messages are dropped; the core sends them again."""
MAX_STREAMS: Final = 64
"""Streams that other replicas may have open here, one for each member. Policy: others are refused."""
MAX_BEGIN_BYTES: Final = 4096
"""Size of a snapshot's first message."""
MAX_TEXT: Final = 512
"""Characters of an operator's name or reason."""
HEARD_S: Final = 2.0
"""Time after which a stream without a message from the peer may be broken without notice: a stream is then opened from here."""
CONNECT_WAIT_S: Final = 2.0
HELD_TIMEOUT_S: Final = 5.0
"""Time limit for a peer to report how much it has of a snapshot, seconds."""
CLOSE_WAIT_S: Final = 2.0
"""Longest wait for the handlers of peers' streams at the end, seconds."""
FIRST_BACKOFF_S: Final = 0.05
MAX_BACKOFF_S: Final = 1.0
CHANNEL_OPTIONS: Final = [
    *PEER_CHANNEL,
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 6_000),
    ("grpc.keepalive_timeout_ms", 4_000),
]

Messages = Outbox[bytes]
Received = Callable[[MemberID, bytes, Messages], None]
OperatorCall = Callable[[str, str], Awaitable[None]]
"""Called with the operator's name and reason."""
SnapshotCall = Callable[[MemberID, AsyncIterator[bytes]], Awaitable[None]]
HeldCall = Callable[[MemberID, pb.SnapshotPart.Begin], Awaitable[pb.SnapshotHeld]]


def new_outbox() -> Messages:
    """Make a bounded queue of messages for one peer."""
    return Outbox(MAX_QUEUED, MAX_QUEUED_BYTES)


class _Outgoing:
    """The stream that this replica opens to a peer when there is something to send; opened again with backoff."""

    def __init__(self, peer: LiveReplica, about: str, on_data: Received, framed: Framed) -> None:
        self._peer, self._framed = peer, framed
        self.outbox = new_outbox()
        self._about, self._on_data = about, on_data
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S, random.random)
        while True:
            await self.outbox.wait()
            if await self._connection():
                backoff.reset()
            self.outbox.clear()  # old messages are sent anew
            await asyncio.sleep(backoff.next_s())

    async def _connection(self) -> bool:
        """Run one connection from beginning to end. Returns whether it was established."""
        call: FramedCall[bytes, bytes] = self._framed.call(self._peer.node, REPLICATE, bytes, self._about)
        try:
            async with call:
                await call.opened(CONNECT_WAIT_S)
                await Duplex(call, self._take, self.outbox.give, work=self.outbox.work).run()
        except StreamEnded:
            return False
        return True

    def _take(self, data: bytes) -> None:
        self._on_data(self._peer.presence.member, data, self.outbox)


@dataclass(slots=True)
class _Incoming:
    """A stream that a peer has open here."""

    outbox: Messages
    stream: Duplex[bytes, bytes]


class Peers:
    """All streams of one replica, and the service of `replication.proto`.

    Args:
        context: the process's context; its server gets the service.
        options: settings of replication.
        on_message: called with each message of a peer.
        own: returns this replica's member; 0 before it is known.
    """

    def __init__(
        self, context: Context[Any], options: ReplicationOptions, on_message: Callable[[Message], None], own: Callable[[], MemberID]
    ) -> None:
        self._context, self._options, self._on_message, self._own = context, options, on_message, own
        self._live: dict[MemberID, LiveReplica] = {}
        self._outgoing: dict[MemberID, _Outgoing] = {}
        self._incoming: dict[MemberID, _Incoming] = {}
        self._heard: dict[MemberID, tuple[Messages, float]] = {}
        """Queue and time of a peer's newest message: answers go back there."""
        self._closing: set[asyncio.Task[None]] = set()
        self._serving: set[asyncio.Task[Any]] = set()
        """Handlers of streams that peers have open here."""
        self._closed = False
        self._receive_snapshot: SnapshotCall | None = None
        self._held: HeldCall | None = None
        self.counts = {
            "messages_sent_total": 0,
            "messages_received_total": 0,
            "messages_dropped_total": 0,
            "messages_malformed_total": 0,
        }

    def serve(self, receive_snapshot: SnapshotCall, held: HeldCall, promote: OperatorCall, set_clock: OperatorCall) -> None:
        """Add the service to the process's server, and the peers' streams to its listener of these."""
        self._receive_snapshot, self._held = receive_snapshot, held
        handlers: dict[str, Any] = {
            "Snapshot": grpc.stream_unary_rpc_method_handler(self._snapshot),
            "ResumeSnapshot": grpc.unary_unary_rpc_method_handler(self._resume_snapshot),
            "Promote": grpc.unary_unary_rpc_method_handler(self._by_operator(promote)),
            "SetClock": grpc.unary_unary_rpc_method_handler(self._by_operator(set_clock)),
        }
        self._context.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self._context.streams.serve(REPLICATE, bytes, self._exchange)

    def set_live(self, live: dict[MemberID, LiveReplica]) -> None:
        """Set the addresses of the live replicas; streams to a new incarnation are opened anew."""
        before, now = ({member: peer.presence.incarnation for member, peer in peers.items()} for peers in (self._live, live))
        for member in [m for m in self._heard if now.get(m) != before.get(m)]:
            del self._heard[member]
        for member in [m for m in self._outgoing if now.get(m) != before.get(m)]:
            self._close(self._outgoing.pop(member))
        self._live = live

    def _close(self, stream: _Outgoing) -> None:
        for member in [m for m, (outbox, _) in self._heard.items() if outbox is stream.outbox]:
            del self._heard[member]
        task = asyncio.create_task(stream.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def send(self, to: MemberID, data: bytes) -> None:
        """Send to a peer if it can be reached and its queue has space; otherwise drop the message."""
        outbox, heard_at = self._heard.get(to, (None, 0.0))
        if outbox is None or time.monotonic() > heard_at + HEARD_S:
            stream = self._outgoing.get(to)
            peer = self._live.get(to)
            if stream is None and peer is not None:
                stream = self._outgoing[to] = _Outgoing(peer, self.about(to), self._take, self._context.framed)
            outbox = stream.outbox if stream is not None else None
        if outbox is not None and outbox.put(data, len(data)):
            self.counts["messages_sent_total"] += 1
        else:
            self.counts["messages_dropped_total"] += 1

    def metadata(self, to: MemberID) -> tuple[tuple[str, str], ...]:
        """Metadata that identifies a call."""
        return (
            ("pixiu-role", self._context.role),
            ("pixiu-partition", str(self._context.options.partition)),
            ("pixiu-from", hex_id(self._own())),
            ("pixiu-to", hex_id(to)),
        )

    def about(self, to: MemberID) -> str:
        """The same, for the hello of a stream."""
        return " ".join(f"{key}={value}" for key, value in self.metadata(to))

    def _address(self, to: MemberID) -> str:
        peer = self._live.get(to)
        if peer is None:
            raise Unavailable(f"the replica {hex_id(to)} is not in the registry")
        return peer.address

    async def ask_held(self, to: MemberID, begin: pb.SnapshotPart.Begin) -> pb.SnapshotHeld:
        """Ask a peer how much it has of an interrupted snapshot. Raises Unavailable."""
        address = self._address(to)
        async with peer_channel(address, self._context.role, self._context.tls, CHANNEL_OPTIONS) as channel:
            call: Any = channel.unary_unary(f"/{SERVICE}/ResumeSnapshot")
            try:
                data = await call(begin.SerializeToString(), metadata=self.metadata(to), timeout=HELD_TIMEOUT_S)
                return pb.SnapshotHeld.FromString(data)
            except grpc.aio.AioRpcError as error:
                raise Unavailable(f"{address}: {error.code().name}: {error.details()}") from error
            except DecodeError as problem:
                raise Unavailable(f"{address}: its answer cannot be read: {problem}") from problem

    async def send_snapshot(self, to: MemberID, parts: AsyncIterator[bytes]) -> None:
        """Send a complete snapshot. There is no total limit while the peer keeps taking parts; to check them it has the usual
        time-out plus the time that the transfer took. Raises Unavailable."""
        address = self._address(to)
        loop, limit_s = asyncio.get_running_loop(), self._options.snapshot_timeout_s
        begun = loop.time()

        async def moving(limit: asyncio.Timeout) -> AsyncIterator[bytes]:
            async for part in parts:
                limit.reschedule(loop.time() + limit_s)
                yield part
            limit.reschedule(loop.time() + limit_s + (loop.time() - begun))

        async with peer_channel(address, self._context.role, self._context.tls, CHANNEL_OPTIONS) as channel:
            call: Any = channel.stream_unary(f"/{SERVICE}/Snapshot")
            try:
                async with asyncio.timeout(limit_s) as limit:
                    await call(moving(limit), metadata=self.metadata(to))
            except TimeoutError:
                raise Unavailable(f"{address} accepted nothing of the snapshot for {limit_s:g} s") from None
            except grpc.aio.AioRpcError as error:
                raise Unavailable(f"{address}: {error.code().name}: {error.details()}") from error

    async def close(self) -> None:
        """End every stream and accept no new one."""
        self._closed = True
        for incoming in self._incoming.values():
            incoming.stream.end("this replica is draining")
        for stream in self._outgoing.values():
            self._close(stream)
        self._outgoing.clear()
        await asyncio.gather(*self._closing, return_exceptions=True)
        if self._serving:  # gRPC reports a handler that is cancelled with the event loop as our error
            await asyncio.wait(self._serving, timeout=CLOSE_WAIT_S)

    # --- methods that peers call

    def _take(self, member: MemberID, data: bytes, outbox: Messages) -> None:
        try:
            if len(data) > MAX_MESSAGE_BYTES:
                raise MalformedData(f"a message of {len(data)} bytes")
            message = decode_message(data)
            if message.sender != member:
                raise MalformedData(f"a message of {hex_id(message.sender)} on a stream of {hex_id(member)}")
        except MalformedData:
            self.counts["messages_malformed_total"] += 1
            return
        self.counts["messages_received_total"] += 1
        self._heard[member] = (outbox, time.monotonic())
        self._on_message(message)

    def _caller(self, context: grpc.aio.ServicerContext[Any, Any]) -> MemberID:
        """The member that makes a call. Raises as `_member`."""
        return self._member({key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)})

    def _member(self, said: Mapping[str, str]) -> MemberID:
        """The member that makes a call, from its metadata. Raises `ConfigurationError` if the call is not for this replica."""
        own = self._own()
        problem = ""
        member = MemberID(0)
        try:
            member = MemberID(int(said.get("pixiu-from", ""), 16))
        except ValueError:
            problem = "pixiu-from is not a MemberID in hex"
        if said.get("pixiu-role") != self._context.role or said.get("pixiu-partition") != str(self._context.options.partition):
            problem = f"this is {self._context.role}, partition {self._context.options.partition}"
        elif not own or said.get("pixiu-to") != hex_id(own):
            problem = f"this is the replica {hex_id(own)}"
        elif not problem and (member == own or not 0 < member < 1 << 63):
            problem = "pixiu-from is not another replica"
        if problem:
            raise ConfigurationError(problem)
        return member

    async def _exchange(self, handler: FramedHandler[bytes, bytes]) -> None:
        """Serve a peer's stream."""
        member = self._member(dict(word.partition("=")[::2] for word in handler.about.split()))
        if self._closed:
            raise Unavailable("this replica is draining")
        if member not in self._incoming and len(self._incoming) >= MAX_STREAMS:
            raise Overloaded(f"more than {MAX_STREAMS} streams")
        if (before := self._incoming.get(member)) is not None:
            before.stream.end("a newer stream took its place")
        outbox = new_outbox()
        stream = Duplex(
            handler,
            lambda data: self._take(member, data, outbox),
            outbox.give,
            work=outbox.work,
            over=lambda: self._gone(member, outbox),
        )
        self._incoming[member] = _Incoming(outbox, stream)
        if (task := asyncio.current_task()) is not None:
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)
        await stream.run()

    def _gone(self, member: MemberID, outbox: Messages) -> None:
        there = self._incoming.get(member)
        if there is not None and there.outbox is outbox:
            del self._incoming[member]
        if self._heard.get(member, (None, 0.0))[0] is outbox:
            del self._heard[member]

    async def _snapshot(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        member = self._caller(context)
        assert self._receive_snapshot is not None
        await self._receive_snapshot(member, requests)
        return pb.SnapshotReceipt().SerializeToString()

    async def _resume_snapshot(self, data: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        member = self._caller(context)
        assert self._held is not None
        begin = pb.SnapshotPart.Begin()
        with contextlib.suppress(DecodeError):  # one without an ID: nothing of it is here
            if len(data) <= MAX_BEGIN_BYTES:
                begin = pb.SnapshotPart.Begin.FromString(data)
        return (await self._held(member, begin)).SerializeToString()

    def _by_operator(self, call: OperatorCall) -> Callable[[bytes, grpc.aio.ServicerContext[Any, Any]], Awaitable[bytes]]:
        """Wrap a method for operators only: the request names the operator, the reason and the replica."""

        async def handle(data: bytes, _context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
            await call(*self._operator(data))
            return pb.OperatorReply().SerializeToString()

        return handle

    def _operator(self, data: bytes) -> tuple[str, str]:
        problem = ""
        request = pb.OperatorRequest()
        with contextlib.suppress(DecodeError):
            if len(data) <= 8 * MAX_TEXT:
                request = pb.OperatorRequest.FromString(data)
        if not (0 < len(request.operator) <= MAX_TEXT and 0 < len(request.reason) <= MAX_TEXT):
            problem = f"operator and reason have 1 to {MAX_TEXT} characters"
        elif request.member != self._own():
            problem = f"this is the replica {hex_id(self._own())}"
        if problem:
            raise ConfigurationError(problem)
        return request.operator, request.reason
