"""A proxy's reads of topics: one for all who ask at a time, and the last result while the registry is away."""

from __future__ import annotations

import asyncio
import gc
from functools import partial

import pytest

from pixiu.discovery.topics import PartState, TopicNode, TopicPart
from pixiu.errors import RegistryUnavailable
from pixiu.placement.slots import SLOTS
from proxy import topics
from proxy.topics import Cache, answers


async def test_one_read_serves_all_who_ask_meanwhile() -> None:
    cache, reads = Cache(), 0

    async def read() -> int:
        nonlocal reads
        reads += 1
        await asyncio.sleep(0)
        return reads

    assert await asyncio.gather(*(cache.get("orders", read) for _ in range(10))) == [1] * 10
    assert await cache.get("orders", read) == 1
    cache.forget("orders", "others")
    assert await cache.get("orders", read) == 2
    assert await cache.get("others", read) == 3


async def test_the_last_result_stays_while_the_registry_is_away() -> None:
    cache, away = Cache(), True

    async def read() -> str:
        if away:
            raise RegistryUnavailable("away")
        return "found"

    with pytest.raises(RegistryUnavailable):
        await cache.get("orders", read)
    away = False
    assert await cache.get("orders", read) == "found"
    away = True
    for _ in range(3):
        cache.forget("orders")
        assert await cache.get("orders", read) == "found"


async def test_a_read_that_fails_after_its_callers_have_gone_is_no_error_of_the_loop() -> None:
    cache, reported, away = Cache(), list[object](), asyncio.Event()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

    async def read() -> str:
        await away.wait()
        raise RegistryUnavailable("away")

    caller = asyncio.ensure_future(cache.get("orders", read))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    away.set()
    for _ in range(4):
        await asyncio.sleep(0)
    del cache, caller
    gc.collect()
    assert not reported


async def test_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topics, "MAX_CACHED", 2)
    cache, read = Cache(), list[int]()

    async def find(number: int) -> int:
        read.append(number)
        return number

    for number in (1, 2, 3, 3, 2, 1):
        assert await cache.get(number, partial(find, number)) == number
    assert read == [1, 2, 3, 1]


def test_who_knows_a_topic_before_a_resize_waits_until_the_children_are_open() -> None:
    def node(version: int, state: PartState) -> TopicNode:
        return TopicNode("orders", 1, version, parts=(TopicPart(1, 0, SLOTS, 0, state=state),))

    assert not answers(node(4, PartState.OPEN), 4)
    assert not answers(node(5, PartState.SEALING), 4)
    assert answers(node(6, PartState.SEALED), 4)
    assert answers(node(7, PartState.SEALING), 4)  # of the next resize: it has the children of the one before
    assert answers(node(5, PartState.SEALING), 0)


async def test_what_is_missing_is_read_again_by_the_next_who_asks() -> None:
    """A topic was created by another proxy, and this one said for a second that there is none."""
    cache, there = Cache(), [False]

    async def read() -> str | None:
        await asyncio.sleep(0)
        return "topic" if there[0] else None

    assert list(await asyncio.gather(cache.get("a", read), cache.get("a", read))) == [None, None]
    there[0] = True
    assert await cache.get("a", read) == "topic"
    there[0] = False
    assert await cache.get("a", read) == "topic", "for a second"
