"""Calls of commands: to proxies, and to the leaders of a topic's groups.

Source: docs/topics.md, "Commands".
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import grpc
import grpc.aio

import pixiu
from pixiu.discovery.reachable import check_reachable
from pixiu.errors import (
    InvalidArgument,
    LimitError,
    NotAllowed,
    NotAuthenticated,
    NotLeader,
    OutcomeUnknown,
    PixiuError,
    TopicExists,
    Unavailable,
    UnknownTopic,
    error_of_code,
)
from pixiu.rpc.channels import Channels, reason_of
from pixiu.wire.v1 import topic_pb2, topic_pb2_grpc
from tools.topics.tables import Shown, Size

ASK_S: Final = 10.0
CHANGE_S: Final = 60.0
"""Time for a change to be in effect, seconds."""
LEADER_S: Final = 15.0
"""Time for finding the leader of a group, seconds."""
RETRY_S: Final = 0.3
MAX_SIZES: Final = 1_000
"""Parts whose sizes are asked for."""
AT_ONCE: Final = 16
"""Questions to leaders at one time."""
STATUSES: Final[dict[grpc.StatusCode, type[PixiuError]]] = {
    grpc.StatusCode.NOT_FOUND: UnknownTopic,
    grpc.StatusCode.ALREADY_EXISTS: TopicExists,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.FAILED_PRECONDITION: InvalidArgument,
    grpc.StatusCode.PERMISSION_DENIED: NotAllowed,
    grpc.StatusCode.UNAUTHENTICATED: NotAuthenticated,
    grpc.StatusCode.RESOURCE_EXHAUSTED: LimitError,
    grpc.StatusCode.ABORTED: OutcomeUnknown,
}

Item = TypeVar("Item")
Result = TypeVar("Result")
Reply = TypeVar("Reply", topic_pb2.ChannelReply, topic_pb2.TopicReadReply)
Metadata = tuple[tuple[str, str], ...] | None


def run(target: str, work: Callable[[TopicCluster], Awaitable[Result]]) -> Result:
    """Connect to a cluster, do something there, and disconnect."""

    async def go() -> Result:
        check_reachable(target)
        async with TopicCluster(target) as cluster:
            return await work(cluster)

    return asyncio.run(go())


class TopicCluster:
    """A cluster's topics: `async with TopicCluster(target) as cluster`. Raises `Unreachable`, `RegistryUnavailable`."""

    def __init__(self, target: str) -> None:
        self.client = pixiu.connect(target, client="pixiu-topic")

    async def __aenter__(self) -> Self:
        await self.client.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        await self.client.close()

    @property
    def channels(self) -> Channels:
        """Channels to the listeners for clients."""
        assert self.client._channels is not None
        return self.client._channels

    # --- proxies

    async def describe(self, name: str, newer_than: int = 0) -> topic_pb2.TopicDescription:
        """Describe a topic. Raises `UnknownTopic`, `Unavailable`."""
        request = topic_pb2.DescribeTopicRequest(name=name, newer_than=newer_than)
        found: topic_pb2.TopicDescription = await self._ask("Describe", request, ASK_S)
        return found

    async def list(self, prefix: str, *, deleted: bool) -> list[topic_pb2.TopicDescription]:
        """Describe all topics whose names begin with a prefix."""
        found: list[topic_pb2.TopicDescription] = []
        more, after = True, ""
        while more:
            request = topic_pb2.ListTopicsRequest(prefix=prefix, after=after, deleted=deleted)
            reply: topic_pb2.ListTopicsReply = await self._ask("List", request, ASK_S)
            found += reply.topics
            more, after = reply.more, found[-1].name if found else ""
        return found

    async def change(self, change: topic_pb2.TopicChange) -> topic_pb2.TopicDescription:
        """Change a topic; returns when the change is in effect. Raises its refusal, `OutcomeUnknown`, `Unavailable`."""
        found: topic_pb2.TopicDescription = await self._ask("Change", change, CHANGE_S)
        return found

    async def _ask(self, method: str, request: object, limit_s: float) -> Any:
        """Ask one proxy after the other until one answers."""
        failures: list[str] = []
        for address in self.client.cluster().proxies:
            channel = self.channels.acquire(address)
            try:
                call = getattr(topic_pb2_grpc.TopicsStub(channel), method)
                return await call(request, timeout=limit_s, metadata=self.channels.metadata())
            except grpc.aio.AioRpcError as error:
                kind = STATUSES.get(error.code())
                if kind is not None:
                    raise kind(error.details() or error.code().name) from None
                failures.append(f"{address}: {reason_of(error)}")
            finally:
                await self.channels.release(channel)
        raise Unavailable(f"no proxy answers: {'; '.join(failures) or 'the cluster has none'}")

    # --- leaders of groups

    async def channel(
        self, topic: topic_pb2.TopicDescription, request: topic_pb2.ChannelRequest, groups: Iterable[int] | None = None
    ) -> dict[int, topic_pb2.ChannelReply | PixiuError]:
        """Ask the leaders of a topic's groups about its channels: group → reply, or the error of a group that does not answer."""
        wanted = sorted({part.group for part in topic.parts} if groups is None else set(groups))

        async def ask(stub: Any, metadata: Metadata) -> topic_pb2.ChannelReply:
            reply: topic_pb2.ChannelReply = await stub.Channel(request, timeout=ASK_S, metadata=metadata)
            return reply

        async def one(group: int) -> topic_pb2.ChannelReply | PixiuError:
            try:
                return await self._leader(topic, group, ask)
            except PixiuError as error:
                return error

        return dict(zip(wanted, await _at_once(one, wanted), strict=True))

    async def read(
        self, topic: topic_pb2.TopicDescription, part: topic_pb2.TopicPart, request: topic_pb2.TopicReadRequest
    ) -> topic_pb2.TopicReadReply:
        """Read blocks of a part from its leader."""

        async def ask(stub: Any, metadata: Metadata) -> topic_pb2.TopicReadReply:
            reply: topic_pb2.TopicReadReply = await stub.Read(request, timeout=ASK_S + request.wait_ms / 1000, metadata=metadata)
            return reply

        return await self._leader(topic, part.group, ask)

    async def show(self, name: str) -> Shown:
        """A topic with the sizes of its parts and the state of its channels, as far as leaders answer."""
        topic = await self.describe(name)
        failures: dict[int, str] = {}
        channels: list[topic_pb2.ChannelPart] = []
        replies = await self.channel(topic, topic_pb2.ChannelRequest(topic=name, state=True))
        for group, reply in replies.items():
            if isinstance(reply, PixiuError):
                failures[group] = str(reply)
            else:
                channels += reply.parts
        sizes: dict[int, Size] = {}

        async def size(part: topic_pb2.TopicPart) -> None:
            request = topic_pb2.TopicReadRequest(topic=name, part=part.number, end=True, max_bytes=1)
            try:
                reply = await self.read(topic, part, request)
                sizes[part.number] = Size(reply.first, reply.committed_end)
            except PixiuError as error:
                failures[part.group] = str(error)

        await _at_once(size, [part for part in topic.parts if part.group not in failures][:MAX_SIZES])
        return Shown(topic, sizes, channels, failures)

    async def _leader(
        self,
        topic: topic_pb2.TopicDescription,
        group: int,
        call: Callable[[Any, Metadata], Awaitable[Reply]],
    ) -> Reply:
        """Ask the leader of a group; look for it meanwhile. Raises its refusal, `Unavailable`."""
        until = time.monotonic() + LEADER_S
        addresses = next((list(each.addresses) for each in topic.groups if each.group == group), [])
        why, at = "none of its replicas is running", 0
        while addresses:
            address = addresses[at % len(addresses)]
            at += 1
            channel = self.channels.acquire(address)
            try:
                reply = await call(topic_pb2_grpc.TopicLogStub(channel), self.channels.metadata())
                refusal = getattr(reply, "refusal", None)
                if refusal is None or not refusal.code:
                    return reply
                if refusal.code != NotLeader.code:
                    raise error_of_code(refusal.code, refusal.text, refusal.retry_after_ms)
                why = f"{address}: {refusal.text}"
            except grpc.aio.AioRpcError as error:
                kind = STATUSES.get(error.code())
                if kind is not None and error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                    raise kind(error.details() or error.code().name) from None
                why = f"{address}: {reason_of(error)}"
            finally:
                await self.channels.release(channel)
            if at % len(addresses) == 0:
                if time.monotonic() > until:
                    break
                await asyncio.sleep(RETRY_S)
        raise Unavailable(f"no leader of group {group} answers ({why}); `pixiu status` shows who leads")


async def _at_once(work: Callable[[Item], Awaitable[Result]], items: Iterable[Item]) -> list[Result]:
    """Do something for each item, for some of them at one time; returns the results in order."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(item: Item) -> Result:
        async with slots:
            return await work(item)

    return list(await asyncio.gather(*map(one, items)))
