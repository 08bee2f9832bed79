"""Streams of a store's callers: their window, and that nothing is left unanswered."""

from __future__ import annotations

import asyncio

import pytest

from cluster.store.streams import StoreStreams, Window
from tests.support.caller import Caller


def served(window: Window, left: list[int]) -> StoreStreams[int, list[int], int]:
    return StoreStreams(window, lambda request: 1, list, left.append)


@pytest.mark.parametrize(
    ("window", "got"), [(Window(2, 100), [[1], [2], [3], [4], [5]]), (Window(100, 20, joined=9), [[1, 2], [3, 4], [5]])]
)
async def test_who_does_not_read_replies_is_not_read_from(window: Window, got: list[list[int]]) -> None:
    caller, left = Caller(range(1, 6)), list[int]()
    taken: list[int] = []
    all_streams = served(window, left)

    def take(number: int, request: int) -> str:
        taken.append(request)
        all_streams.answer(number, request, 10)
        return ""

    stream = all_streams.open(caller, take)
    running = asyncio.create_task(stream.run())
    for _ in range(30):
        await asyncio.sleep(0)
    assert taken == [1, 2]  # the first reply is on its way, and is not read
    assert len(all_streams) == 1
    caller.read_all()
    async with asyncio.timeout(10):
        await running
    assert caller.got == got
    assert taken == [1, 2, 3, 4, 5]
    assert (left, len(all_streams)) == ([1], 0)


async def test_what_was_asked_is_answered_before_the_stream_is_over() -> None:
    caller, asked = Caller([1, 2]), list[int]()
    caller.read_all()
    all_streams = served(Window(9, 9, joined=9), [])

    def take(_number: int, request: int) -> str:
        asked.append(request)
        return ""

    stream = all_streams.open(caller, take)
    running = asyncio.create_task(stream.run())
    for _ in range(30):
        await asyncio.sleep(0)
    assert (asked, running.done()) == ([1, 2], False)
    all_streams.answer(1, 7)
    all_streams.answer(1, 8)
    async with asyncio.timeout(10):
        await running
    assert caller.got == [[7, 8]]


async def test_a_request_that_is_wrong_ends_its_stream() -> None:
    stream = served(Window(9, 9), []).open(Caller([1, 2]), lambda _number, request: f"{request} is wrong")
    async with asyncio.timeout(10):
        await stream.run()
    assert stream.problem == "1 is wrong"
