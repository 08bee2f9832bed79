"""A member or reader that is closed while it opens leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pixiu.client.options import ClientOptions
from pixiu.client.topics.reading.member import ChannelMember, Joining
from pixiu.client.topics.reading.reader import TopicReader
from pixiu.client.topics.topic_map import TopicMap
from pixiu.errors import NotConnected
from tests.pixiu.client.topics.groups import Cluster


class Directory:
    """Describes a topic once it is let, and knows who follows it."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.followers: list[object] = []

    async def follow(self, _: str, on_topic: object, *__: object) -> TopicMap:
        await self.may_answer.wait()
        self.followers.append(on_topic)
        return await self.topic()

    async def topic(self, *_: object) -> TopicMap:
        return Cluster(1, 1).topic()

    def leave(self, _: str, on_topic: object) -> None:
        self.followers = [each for each in self.followers if each != on_topic]


async def ready() -> int:
    return 0


def around(directory: Directory) -> Any:
    return SimpleNamespace(directory=directory, options=ClientOptions(), uniform=lambda: 0.5, users=set(), client="me")


MAKE: list[Callable[[Any], ChannelMember | TopicReader]] = [
    lambda context: ChannelMember(context, Joining("orders", "c", 10), ready),
    lambda context: TopicReader(context, "orders", "earliest", None, None, 0),
]


@pytest.mark.parametrize("make", MAKE, ids=["member", "reader"])
def test_what_is_closed_while_it_opens_leaves_the_topic(make: Callable[[Any], ChannelMember | TopicReader]) -> None:
    async def play() -> None:
        directory = Directory()
        context = around(directory)
        reading = make(context)
        opening = asyncio.create_task(reading.open())
        await asyncio.sleep(0)
        await reading.close()
        directory.may_answer.set()
        with pytest.raises(NotConnected, match="open another one"):
            await opening
        assert (directory.followers, context.users, len(asyncio.all_tasks())) == ([], set(), 1)
        assert await reading.next() is None

    asyncio.run(play())


async def test_a_member_that_is_not_open_joins_nothing() -> None:
    """`async for message in topic.channel("c")` kept its messages after the loop was left."""
    directory = Directory()
    directory.may_answer.set()
    context = around(directory)
    with pytest.raises(NotConnected, match="async with topic"):
        async for _ in ChannelMember(context, Joining("orders", "c", 10), ready):
            pass
    assert (directory.followers, context.users) == ([], set())
