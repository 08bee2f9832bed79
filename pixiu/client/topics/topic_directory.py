"""The directory of topics: asks proxies where parts are, keeps that for each topic in use, and asks again when it has changed.

Source: docs/sdk.md, "Durable topics".
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

import grpc.aio

from pixiu.client.directory import Directory
from pixiu.client.options import ClientOptions
from pixiu.client.topics.described import FINAL_STATUS, error_of_call, topic_map
from pixiu.client.topics.topic_map import TopicMap
from pixiu.errors import (
    MalformedData,
    NotAllowed,
    NotAuthenticated,
    NotServed,
    OutcomeUnknown,
    PixiuError,
    Unavailable,
    UnknownTopic,
)
from pixiu.rpc.backoff import Backoff
from pixiu.rpc.channels import Channels, reply_of
from pixiu.rpc.duplex import StreamEnded
from pixiu.wire.v1 import topic_pb2, topic_pb2_grpc

ASK_S: Final = 5.0
"""Time for one proxy to answer, seconds."""
CHANGE_S: Final = 60.0
"""Time for a change to be in effect, seconds."""
MAX_TRIES: Final = 8
"""Proxies asked in one round."""
FOLLOW_S: Final = 5.0
"""Interval at which a topic that somebody uses is asked for, seconds."""
ENDING: Final = (UnknownTopic, NotAllowed, NotAuthenticated, NotServed)
"""Errors after which asking again is useless."""
Reply = TypeVar("Reply")
OnTopic = Callable[[TopicMap], None]
OnEnd = Callable[[PixiuError], None]
log = logging.getLogger("pixiu.client")


class Followed:
    """One topic that somebody uses."""

    def __init__(self, name: str, topic: TopicMap) -> None:
        self.name, self.topic = name, topic
        self.users: list[tuple[OnTopic, OnEnd]] = []
        self.wanted = asyncio.Event()
        self.newer = False
        """True if a newer version is wanted, and not only newer addresses."""
        self.task: asyncio.Task[None] | None = None


class TopicDirectory:
    """Asks the proxies.

    Args:
        channels: to the proxies' listeners for clients.
        cluster: knows the proxies.
        options: of the client.
        uniform: returns random numbers in [0, 1).
    """

    def __init__(self, channels: Channels, cluster: Directory, options: ClientOptions, uniform: Callable[[], float]) -> None:
        self._channels, self._cluster = channels, cluster
        self._options, self._uniform = options, uniform
        self._followed: dict[str, Followed] = {}
        self._turn = int(uniform() * 1_000_000)

    async def ask(
        self, call: Callable[[topic_pb2_grpc.TopicsStub, float], Awaitable[Reply]], name: str = "", seconds: float = ASK_S,
        *, changes: bool = False, on_wait: Callable[[str], None] = lambda _why: None,
    ) -> Reply:  # fmt: skip
        """Ask one proxy after the other until one answers. `changes`: a call that one did not answer may be in effect, and is not
        made again. `on_wait` hears why all have to be asked again. Raises the error of a refusal, `Unavailable` if none answers,
        `OutcomeUnknown`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + max(seconds, self._options.connect_timeout_s)
        backoff = Backoff(self._options.backoff_s, self._options.max_backoff_s, self._uniform)
        while True:
            failures: list[str] = []
            error: PixiuError = Unavailable("the cluster has no proxy")
            for address in self._proxies():
                channel = self._channels.acquire(address)
                try:
                    stub: Any = topic_pb2_grpc.TopicsStub(channel)
                    return await reply_of(call(stub, max(0.1, min(seconds, deadline - loop.time()))))
                except grpc.aio.AioRpcError as problem:
                    error = error_of_call(problem, name)
                    if problem.code() in FINAL_STATUS or (changes and isinstance(error, OutcomeUnknown)):
                        raise error from None
                    failures.append(f"{address}: {error}")
                except StreamEnded as problem:
                    failures.append(f"{address}: {problem}")
                finally:
                    await self._channels.release(channel)
            wait_s = backoff.next_s()
            if isinstance(error, NotServed) or loop.time() + wait_s >= deadline:
                raise error if isinstance(error, NotServed) else type(error)("; ".join(failures) or str(error))
            on_wait("; ".join(failures) or str(error))
            await asyncio.sleep(wait_s)

    def _proxies(self) -> Sequence[str]:
        known = self._cluster.map.proxies
        self._turn += 1
        begin = self._turn % len(known) if known else 0
        return [*known[begin:], *known[:begin]][:MAX_TRIES]

    def metadata(self) -> tuple[tuple[str, str], ...] | None:
        """The login of a call."""
        return self._channels.metadata()

    async def describe(self, name: str, newer_than: int = 0) -> TopicMap:
        """Ask for a topic. Raises `UnknownTopic`, `NotAllowed`, `Unavailable`."""
        request = topic_pb2.DescribeTopicRequest(name=name, newer_than=newer_than)

        async def call(stub: Any, seconds: float) -> topic_pb2.TopicDescription:
            found: topic_pb2.TopicDescription = await stub.Describe(request, timeout=seconds, metadata=self.metadata())
            return found

        return self._learn(topic_map(await self.ask(call, name)))

    async def topic(self, name: str) -> TopicMap:
        """A topic as described last; it is asked for if nobody follows it."""
        followed = self._followed.get(name)
        return followed.topic if followed is not None else await self.describe(name)

    async def change(self, change: topic_pb2.TopicChange) -> TopicMap:
        """Ask for a change, and wait until it is in effect. Raises the refusal, `OutcomeUnknown`, `Unavailable`."""

        async def call(stub: Any, seconds: float) -> topic_pb2.TopicDescription:
            found: topic_pb2.TopicDescription = await stub.Change(change, timeout=seconds, metadata=self.metadata())
            return found

        name = "" if change.HasField("create") else change.name
        return self._learn(topic_map(await self.ask(call, name, CHANGE_S, changes=True)))

    async def list(self, request: topic_pb2.ListTopicsRequest) -> topic_pb2.ListTopicsReply:
        """Ask for a page of topics."""

        async def call(stub: Any, seconds: float) -> topic_pb2.ListTopicsReply:
            found: topic_pb2.ListTopicsReply = await stub.List(request, timeout=seconds, metadata=self.metadata())
            return found

        return await self.ask(call)

    def _learn(self, topic: TopicMap) -> TopicMap:
        followed = self._followed.get(topic.name)
        if followed is not None and topic != followed.topic and topic.version >= followed.topic.version:
            if not topic.groups:
                followed.wanted.set()  # it came without them, as an answer to a change
                return topic
            followed.topic = topic
            for on_topic, _ in list(followed.users):
                on_topic(topic)
        return topic

    # --- following

    async def follow(self, name: str, on_topic: OnTopic, on_end: OnEnd, version: int = 0) -> TopicMap:
        """Describe a topic, this version of it or a newer one, and from now on call `on_topic` with each newer version, and
        `on_end` when it is gone or may not be seen any more. `leave` ends it."""
        topic = await self.describe(name, max(0, version - 1))
        followed = self._followed.get(name)
        if followed is None:
            followed = self._followed[name] = Followed(name, topic)
            followed.task = asyncio.create_task(self._keep(followed), name=f"pixiu-topic-{name}")
        followed.users.append((on_topic, on_end))
        return followed.topic

    def leave(self, name: str, on_topic: OnTopic) -> None:
        """End what `follow` began."""
        followed = self._followed.get(name)
        if followed is None:
            return
        followed.users = [each for each in followed.users if each[0] != on_topic]
        if not followed.users:
            del self._followed[name]
            if followed.task is not None and followed.task is not asyncio.current_task():
                followed.task.cancel()

    def refresh(self, name: str, *, newer: bool = False) -> None:
        """Ask again soon. `newer`: for a newer version, which a proxy waits for a moment."""
        followed = self._followed.get(name)
        if followed is not None:
            followed.newer = followed.newer or newer
            followed.wanted.set()

    async def _keep(self, followed: Followed) -> None:
        backoff = Backoff(self._options.backoff_s, self._options.max_backoff_s, self._uniform)
        while True:
            try:
                async with asyncio.timeout(FOLLOW_S * (0.75 + 0.5 * self._uniform())):
                    await followed.wanted.wait()
            except TimeoutError:
                pass
            hurry, newer, known = followed.wanted.is_set(), followed.newer, followed.topic.version
            followed.wanted.clear()
            followed.newer = False
            try:
                await self.describe(followed.name, known if newer else 0)
            except ENDING as error:
                for _, on_end in list(followed.users):
                    on_end(error)
                self._followed.pop(followed.name, None)
                return
            except (PixiuError, MalformedData) as error:
                log.info("topic_not_described topic=%s error=%s", followed.name, error)
                await asyncio.sleep(backoff.next_s())
            else:
                backoff.reset()
                if hurry and followed.topic.version == known:
                    await asyncio.sleep(self._options.backoff_s * self._uniform())  # many ask at once

    async def close(self) -> None:
        """Ask no more."""
        tasks = [followed.task for followed in self._followed.values() if followed.task is not None]
        self._followed.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
