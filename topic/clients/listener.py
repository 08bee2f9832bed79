"""`pixiu.v1.TopicLog` at the clients' port: logins and rules, in front of writers, members, readers and channels.

Source: docs/topics.md, docs/security.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, TypeVar

import grpc.aio

from cluster.access.login_guard import LoginGuard, LoginSession
from cluster.access.logins import enter
from cluster.access.rules import CHANNEL, CONSUME, PRODUCE
from cluster.trust.audit import Audit
from pixiu.discovery.topics import check_name
from pixiu.errors import InvalidArgument, NotLeader, Overloaded, PixiuError
from pixiu.rpc.grpc_streams import GrpcHandler
from pixiu.wire.v1 import topic_pb2 as pb
from pixiu.wire.v1 import topic_pb2_grpc as pb_grpc
from topic.clients.channels import Channels
from topic.clients.group import Group, refusal_of, require
from topic.clients.lasts import last
from topic.clients.members import Members, MemberStream
from topic.clients.reads import Reads, positions
from topic.clients.writes import Writes, WriteStream

MAX_POSITIONS: Final = 10_000
"""Parts in one question for positions."""
LEADER: Final = "pixiu-leader"
"""Trailing metadata of a call that is refused with NOT_LEADER: client address of the leader."""

HELLO_TIMEOUT_S: Final = 10.0
"""Time in which a stream must send its first request, seconds."""

Call = grpc.aio.ServicerContext[Any, Any]
Reply = TypeVar("Reply")


class TopicLog(pb_grpc.TopicLogServicer):
    """Serves clients.

    Args:
        group: the replica.
        writes, members, reads: its streams and reads.
        guard: authenticates clients; None: nobody has to log in.
        audit: of the process.
    """

    def __init__(
        self, group: Group, writes: Writes, members: Members, reads: Reads, guard: LoginGuard | None, audit: Audit
    ) -> None:  # fmt: skip
        self._group, self._writes, self._members, self._reads = group, writes, members, reads
        self._channels = Channels(group)
        self._guard, self._audit = guard, audit

    async def Write(  # type: ignore[override]  # the generated base has the synchronous signature as well
        self, request_iterator: AsyncIterator[pb.TopicWriteRequest], context: Call
    ) -> None:
        """Serve a writer's stream."""
        handler: GrpcHandler[pb.TopicWriteReply, pb.TopicWriteRequest] = GrpcHandler(context)
        await self._run(handler, self._writes.open(handler), self._writes.admit, context)

    async def Consume(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.ConsumeRequest], context: Call
    ) -> None:
        """Serve a member's stream."""
        handler: GrpcHandler[pb.ConsumeReply, pb.ConsumeRequest] = GrpcHandler(context)
        await self._run(handler, self._members.open(handler), self._members.admit, context)

    async def _run(self, handler: GrpcHandler[Any, Any], stream: Any, admit: Callable[[Any], None], context: Call) -> None:
        assert isinstance(stream, WriteStream | MemberStream)
        try:
            stream.session = await enter(self._guard, context, "", stream.login_over)
        except PixiuError as refused:
            await handler.refuse(refused)
        try:
            admit(stream)
        except PixiuError as refused:
            stream.end(refusal_of(self._group, refused))
        late = asyncio.get_running_loop().call_later(HELLO_TIMEOUT_S, self._late, stream)
        try:
            await stream.served.run()
        except PixiuError as error:
            await handler.refuse(error)
        finally:
            late.cancel()

    def _late(self, stream: WriteStream | MemberStream) -> None:
        if not stream.opened:
            text = f"the first request of a stream must come within {HELLO_TIMEOUT_S:.0f} s; open another one"
            stream.end(refusal_of(self._group, Overloaded(text)))

    async def Positions(self, request: pb.WriterPositionsRequest, context: Call) -> pb.WriterPositionsReply:
        """Answer what a writer has stored."""

        async def answer(session: LoginSession | None) -> pb.WriterPositionsReply:
            if len(request.parts) > MAX_POSITIONS:
                raise InvalidArgument(f"at most {MAX_POSITIONS} parts are asked for at once")
            topic = self._group.store.state.topics.get(request.topic)
            if topic is not None:
                await require(session, PRODUCE, topic.name)
            return await positions(self._group, request)

        return await self._answered(context, answer)

    async def Read(self, request: pb.TopicReadRequest, context: Call) -> pb.TopicReadReply:
        """Serve a read."""

        async def answer(session: LoginSession | None) -> pb.TopicReadReply:
            await require(session, CONSUME, check_name(request.topic))
            return await self._reads.read(request)

        return await self._answered(context, answer)

    async def Last(self, request: pb.TopicLastRequest, context: Call) -> pb.TopicLastReply:
        """Answer which message is the last of a key."""

        async def answer(session: LoginSession | None) -> pb.TopicLastReply:
            await require(session, CONSUME, check_name(request.topic))
            return await last(self._group, request)

        return await self._answered(context, answer)

    async def Channel(self, request: pb.ChannelRequest, context: Call) -> pb.ChannelReply:
        """Serve a question about channels, or a change."""
        changes = request.WhichOneof("ask") in ("resend", "seek", "rejoin")

        async def answer(session: LoginSession | None) -> pb.ChannelReply:
            await require(session, CHANNEL if changes else CONSUME, check_name(request.topic))
            if request.channel:
                check_name(request.channel, "channel")
            if request.WhichOneof("ask") == "rejoin":
                self._members.rejoin(request.topic, request.channel)
                return pb.ChannelReply()
            try:
                reply = await self._channels.serve(request)
            except PixiuError as problem:
                return pb.ChannelReply(refusal=refusal_of(self._group, problem))
            if changes:
                user = session.identity.user if session is not None else ""
                self._audit.write(
                    "topic_channel", user=user, peer=str(context.peer()), topic=request.topic, channel=request.channel,
                    what=request.WhichOneof("ask"), messages=reply.changed,
                )  # fmt: skip
            return reply

        return await self._answered(context, answer)

    async def _answered(self, context: Call, answer: Callable[[LoginSession | None], Awaitable[Reply]]) -> Reply:
        """Log the caller in and answer. Raises PixiuError."""
        session = await enter(self._guard, context, "", lambda _why: None)
        try:
            return await answer(session)
        except NotLeader:
            if self._group.leader:
                context.set_trailing_metadata(((LEADER, self._group.leader),))
            raise
        finally:
            if session is not None:
                session.close()
