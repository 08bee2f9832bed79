"""Calls of commands: to proxies, and to the leaders of a topic's groups. Replies are the cluster's own messages.

Source: docs/topics.md, "Commands".
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import pixiu
from pixiu.client.topics.surroundings import TopicContext, ask_leader
from pixiu.discovery.reachable import check_reachable
from pixiu.errors import PixiuError
from pixiu.wire.v1 import topic_pb2
from tools.topics.tables import Shown, Size

ASK_S: Final = 10.0
"""Time limit of one question, seconds."""
CHANGE_S: Final = 60.0
"""Time for a change to be in effect, seconds."""
PLAN_S: Final = 30.0
"""Time for a plan: the admin asks every group for its load, seconds."""
SILENT_S: Final = 5.0
"""Time after which a change that is not in effect yet says what it waits for, seconds."""
LEADER_S: Final = 15.0
"""Time for finding the leader of a group, seconds."""
MAX_SIZES: Final = 1_000
"""Parts whose sizes are asked for."""
AT_ONCE: Final = 16
"""Questions to leaders at one time."""

Item = TypeVar("Item")
Result = TypeVar("Result")


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
        self._followed: set[str] = set()

    async def __aenter__(self) -> Self:
        await self.client.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        await self.client.close()

    @property
    def _around(self) -> TopicContext:
        return self.client.topics.context

    # --- proxies

    async def describe(self, name: str) -> topic_pb2.TopicDescription:
        """Describe a topic. Raises `UnknownTopic`, `Unavailable`."""
        found: topic_pb2.TopicDescription = await self._ask("Describe", topic_pb2.DescribeTopicRequest(name=name), name, ASK_S)
        return found

    async def list(self, prefix: str, *, deleted: bool) -> list[topic_pb2.TopicDescription]:
        """Describe all topics whose names begin with a prefix."""
        found: list[topic_pb2.TopicDescription] = []
        more, after = True, ""
        while more:
            reply = await self.page(prefix, after, deleted=deleted)
            found += reply.topics
            more, after = reply.more, found[-1].name if found else ""
        return found

    async def page(self, prefix: str, after: str, *, deleted: bool, limit: int = 0) -> topic_pb2.ListTopicsReply:
        """Describe the first topics, by name, that begin with a prefix and come after a name. limit: 0 is 1,000."""
        request = topic_pb2.ListTopicsRequest(prefix=prefix, after=after, limit=limit, deleted=deleted)
        reply: topic_pb2.ListTopicsReply = await self._ask("List", request, "", ASK_S)
        return reply

    async def change(self, change: topic_pb2.TopicChange) -> topic_pb2.TopicDescription:
        """Change a topic; returns when the change is in effect. Raises its refusal, `OutcomeUnknown`, `Unavailable`."""
        waits = [f"the change of topic {change.name} is not in effect yet"]
        asked = asyncio.ensure_future(self._ask("Change", change, change.name, CHANGE_S, waits.append))
        try:
            await asyncio.wait([asked], timeout=SILENT_S)
            if not asked.done():
                sys.stderr.write(f"pixiu: waiting for {CHANGE_S - SILENT_S:.0f} s at most: {waits[-1]}\n")
            found: topic_pb2.TopicDescription = await asked
            return found
        finally:
            asked.cancel()

    async def plan(self, drain: int | None = None) -> topic_pb2.TopicPlan:
        """Ask which moves would even the groups out, or empty one. Raises `Unavailable`, `InvalidArgument`."""
        request = topic_pb2.PlanTopicsRequest() if drain is None else topic_pb2.PlanTopicsRequest(drain=drain)
        found: topic_pb2.TopicPlan = await self._ask("Plan", request, "", PLAN_S)
        return found

    async def _ask(
        self, method: str, request: object, name: str, limit_s: float, on_wait: Callable[[str], None] = lambda _why: None
    ) -> Any:  # fmt: skip
        directory = self._around.directory

        async def call(stub: Any, seconds: float) -> Any:
            return await getattr(stub, method)(request, timeout=seconds, metadata=directory.metadata())

        return await directory.ask(call, name, limit_s, changes=method == "Change", on_wait=on_wait)

    # --- leaders of groups

    async def channel(
        self, topic: topic_pb2.TopicDescription, request: topic_pb2.ChannelRequest, groups: Iterable[int] | None = None
    ) -> dict[int, topic_pb2.ChannelReply | PixiuError]:
        """Ask the leaders of a topic's groups about its channels: group → reply, or the error of a group that does not answer."""
        wanted = sorted({part.group for part in topic.parts} if groups is None else set(groups))

        async def one(group: int) -> topic_pb2.ChannelReply | PixiuError:
            try:
                found: topic_pb2.ChannelReply = await self._leader(topic.name, group, "Channel", request)
                return found
            except PixiuError as error:
                return error

        return dict(zip(wanted, await _at_once(one, wanted), strict=True))

    async def read(
        self, topic: topic_pb2.TopicDescription, part: topic_pb2.TopicPart, request: topic_pb2.TopicReadRequest
    ) -> topic_pb2.TopicReadReply:
        """Read blocks of a part from its leader."""
        limit_s = ASK_S + request.wait_ms / 1000
        found: topic_pb2.TopicReadReply = await self._leader(topic.name, part.group, "Read", request, limit_s)
        return found

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
                sizes[part.number] = Size(reply.first, reply.committed_end, reply.store if reply.HasField("store") else None)
            except PixiuError as error:
                failures[part.group] = str(error)

        known = (part for part in topic.parts if part.group not in failures and part.state != topic_pb2.PART_OPENING)
        await _at_once(size, list(known)[:MAX_SIZES])
        return Shown(topic, sizes, channels, failures)

    async def _leader(self, name: str, group: int, method: str, request: object, limit_s: float = ASK_S) -> Any:
        """Ask the leader of a group; look for it meanwhile. Raises its refusal, `Unavailable`."""
        around = self._around
        if name not in self._followed:
            self._followed.add(name)  # so that the proxies are not asked where the topic is for each question
            await around.directory.follow(name, lambda _topic: None, lambda _error: None)

        async def call(stub: Any, seconds: float) -> Any:
            return await getattr(stub, method)(request, timeout=seconds, metadata=around.channels.metadata())

        return await ask_leader(around, name, group, call, call_s=limit_s, limit_s=LEADER_S)


async def _at_once(work: Callable[[Item], Awaitable[Result]], items: Iterable[Item]) -> list[Result]:
    """Do something for each item, for some of them at one time; returns the results in order."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(item: Item) -> Result:
        async with slots:
            return await work(item)

    return list(await asyncio.gather(*map(one, items)))
