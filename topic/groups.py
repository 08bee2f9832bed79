"""`pixiu.v1.TopicGroups` at the cluster's port: what the admin and the leaders of other groups ask for, and what this leader asks.

Source: docs/topics.md, "Channels", proto/cluster/wire/v1/topic_group.proto.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Final

import grpc.aio

from cluster.process.context import Context
from cluster.topics import entries as en
from cluster.wire.v1 import topic_group_pb2 as pb
from cluster.wire.v1 import topic_group_pb2_grpc as pb_grpc
from pixiu.discovery.node import Node
from pixiu.discovery.topics import read_topic
from pixiu.errors import NotServed, PixiuError, Unavailable
from pixiu.rpc.channels import Channels
from pixiu.wire.block import stamped
from topic import events as ev
from topic.clients.group import Group, refusal_of
from topic.rates import Rates
from topic.state.state import Done, Sealed
from topic.storage.segment import Gap

ASK_S: Final = 2.0
"""Time limit of a question to another group's leader."""
MAX_BYTES: Final = 1 << 20
"""Bytes of blocks in one reply; one block may have more."""
NOBODY: Final = -1
MAX_ASKED: Final = 10_000
"""Parts in one question."""


class TopicGroups(pb_grpc.TopicGroupsServicer):
    """Serves other processes of the cluster.

    Args:
        group: the replica.
        rates: of its parts.
    """

    def __init__(self, group: Group, rates: Rates) -> None:
        self._group, self._rates = group, rates

    async def Append(self, request: pb.GroupEntry, context: Any) -> pb.GroupAnswer:
        """Append an entry of the admin; answer when it is applied."""
        try:
            if request.kind not in en.ADMIN_KINDS:
                raise NotServed(f"the admin has no entries of kind {request.kind}")
            answer = await self._group.request(request.kind, request.payload)
        except PixiuError as problem:
            return pb.GroupAnswer(refusal=refusal_of(self._group, problem))
        if isinstance(answer, Sealed):
            return pb.GroupAnswer(ok=True, sealed=json.dumps(answer._asdict(), separators=(",", ":")).encode())
        assert isinstance(answer, Done)
        return pb.GroupAnswer(ok=answer.ok, why=answer.why)

    async def Finished(self, request: pb.FinishedRequest, context: Any) -> pb.FinishedReply:
        """Answer which parts a channel has finished."""
        try:
            self._group.check_reads()
        except PixiuError as problem:
            return pb.FinishedReply(refusal=refusal_of(self._group, problem))
        core = self._group.core
        return pb.FinishedReply(finished=[part for part in request.parts if core.finished(request.channel, part)])

    async def Load(self, request: pb.GroupLoadRequest, context: Any) -> pb.GroupLoad:
        """Answer how large and busy the parts are."""
        try:
            self._group.check_reads()
        except PixiuError as problem:
            return pb.GroupLoad(refusal=refusal_of(self._group, problem))
        store, reply = self._group.store, pb.GroupLoad(cpu=self._rates.cpu)
        members = {topic: self._members_of(topic) for topic in store.state.topics}
        for part in store.state.parts.values():
            log, (bytes_per_s, messages_per_s) = store.logs.get(part.part), self._rates.of(part.part)
            reply.parts.add(
                part=part.part, sealed=part.sealed, first=part.first, end=part.end, stored_bytes=log.stored_bytes if log else 0,
                bytes_per_s=bytes_per_s, messages_per_s=messages_per_s, members=members.get(en.topic_of(part.part), 0),
            )  # fmt: skip
        return reply

    async def Blocks(self, request: pb.BlocksRequest, context: Any) -> pb.BlocksReply:
        """Give blocks that another replica cannot read."""
        state, at, blocks, took = self._group.store.state.parts.get(request.part), request.low, list[bytes](), 0
        if state is None or not state.first <= request.low < request.high <= state.end:
            return pb.BlocksReply(refusal=refusal_of(self._group, NotServed("this replica does not hold these offsets")))
        while at < request.high and took < MAX_BYTES:
            try:
                found = await self._group.reader.find(request.part, at)
            except Unavailable as away:
                return pb.BlocksReply(blocks=b"".join(blocks), refusal=None if blocks else refusal_of(self._group, away))
            if isinstance(found, Gap):
                return pb.BlocksReply(blocks=b"".join(blocks), unreadable=not blocks)
            stamp, block = found
            blocks.append(stamped(block.data, stamp))
            took += len(blocks[-1])
            at = stamp.base + block.count
        return pb.BlocksReply(blocks=b"".join(blocks))

    def _members_of(self, topic: int) -> int:
        channels = self._group.store.state.channels_of(topic)
        views = [next(iter(self._group.core.describe(channel.channel)), None) for channel in channels]
        return sum(len(view.members) for view in views if view is not None)


class Parents:
    """Asks the leaders of other groups whether channels have finished parents of parts here. The registry says which group holds a
    parent; one that it no longer knows was dropped, and there is nothing to wait for.

    Args:
        context: of the process.
        group: the replica.
    """

    def __init__(self, context: Context[Any], group: Group) -> None:
        self._context, self._group = context, group
        self._channels = Channels("topic", own=context.tls)
        self._asked: dict[int, set[int]] = {}
        """Parent → channels, of the next question."""
        self._asking: asyncio.Task[None] | None = None

    def ask(self, effect: ev.AskParent) -> None:
        """Ask soon, together with everything else of this turn."""
        self._asked.setdefault(effect.part, set()).add(effect.channel)
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask_all())

    async def close(self) -> None:
        """Ask no more."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        await self._channels.close()

    async def _ask_all(self) -> None:
        await asyncio.sleep(0)
        asked, self._asked = self._asked, {}
        questions: dict[tuple[int, int], list[int]] = {}
        for topic in sorted({en.topic_of(part) for part in asked}):
            held = await self._held(topic)
            for part, channels in asked.items():
                if held is None or en.topic_of(part) != topic:
                    continue
                group = held.get(part, NOBODY)
                for channel in sorted(channels):
                    if group == NOBODY:
                        self._group.step(ev.ParentFinished(channel, part))
                    else:
                        questions.setdefault((group, channel), []).append(part)
        view = self._context.view
        await asyncio.gather(
            *(
                self._ask(node, channel, parts[:MAX_ASKED])
                for (group, channel), parts in questions.items()
                for node in view.replicas("topic", group)
            )
        )

    async def _held(self, topic: int) -> dict[int, int] | None:
        """ID of each part of a topic → its group; None: it cannot be known now."""
        settings = self._group.store.state.topics.get(topic)
        if settings is None:
            return None
        try:
            found = await read_topic(self._context.zookeeper, self._context.root, settings.name)
        except PixiuError:
            return None
        if found is None or found[0].topic != topic:
            return None
        return {en.part_id(topic, part.number): part.group for part in found[0].parts}

    async def _ask(self, node: Node, channel: int, parts: Sequence[int]) -> None:
        connection = self._channels.acquire(node.address)
        try:
            request = pb.FinishedRequest(channel=channel, parts=parts)
            reply = await pb_grpc.TopicGroupsStub(connection).Finished(request, timeout=ASK_S)
        except grpc.aio.AioRpcError:
            return  # the core asks again
        finally:
            await self._channels.release(connection)
        for part in reply.finished:
            self._group.step(ev.ParentFinished(channel, part))
