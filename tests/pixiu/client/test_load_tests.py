"""Marks of load tests: receivers choose, what is blocked is counted, and handlers hand on the mark of what they handle."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import pixiu
from pixiu.client.inbox.mail import Mail
from pixiu.client.messages.drafts import ROOM_KIND, draft
from pixiu.client.messages.load_test import LoadTest
from pixiu.client.topics.drafts import draft as topic_draft
from pixiu.errors import InvalidArgument
from pixiu.ids import snowflake
from pixiu.wire import block
from pixiu.wire.record import Flag, Kind, encode

Until = Callable[[Callable[[], object]], Awaitable[None]]
SENT_MS = 1_700_000_000_000
WANTED: dict[LoadTest, list[bytes]] = {"block": [b"1", b"3"], "pass": [b"1", b"2", b"3", b"4"], "only": [b"2", b"4"]}


def record(number: int) -> bytes:
    """Even numbers are marked."""
    flags = Flag.TO_ROOM | (0 if number % 2 else Flag.LOAD_TEST)
    return encode(Kind.ROOM, 42, b"%d" % number, snowflake(SENT_MS, 3, number), flags=flags)


def marks() -> tuple[bool, bool]:
    """The marks of a message to a room and of one to a durable topic that are sent now."""
    room, topic = draft(ROOM_KIND, 42, b"x", 1000), topic_draft(b"x")
    return bool(room.flags & Flag.LOAD_TEST), bool(topic.encoded.flags & block.Flag.LOAD_TEST)


async def later() -> tuple[bool, bool]:
    await asyncio.sleep(0)
    return marks()


@pytest.mark.parametrize("load_test", WANTED)
async def test_a_subscription_gets_what_it_asks_for(cluster: Any, until: Until, load_test: LoadTest) -> None:
    await cluster.start(gateways=1)
    (gateway,) = cluster.gateways
    wanted = WANTED[load_test]
    async with pixiu.connect(cluster.target) as px, px.subscribe(room=42, load_test=load_test) as messages:
        gateway.send(*map(record, range(1, 5)))
        found = [await anext(messages) for _ in wanted]
        assert [(each.payload, each.load_test) for each in found] == [(body, int(body) % 2 == 0) for body in wanted]
        await until(lambda: messages.counters.load_test_blocked == 4 - len(wanted))
        assert messages.counters.received == len(wanted)


@pytest.mark.parametrize("load_test", WANTED)
async def test_an_inbox_acknowledges_what_it_does_not_give(cluster: Any, until: Until, load_test: LoadTest) -> None:
    await cluster.start(gateways=1)
    for number in range(1, 5):
        cluster.inboxes.put(7, b"%d" % number, flags=0 if number % 2 else Flag.LOAD_TEST)
    wanted = WANTED[load_test]
    async with pixiu.connect(cluster.target) as px, px.inbox(uin=7, device="phone", load_test=load_test) as inbox:
        for body in wanted:
            mail = await anext(inbox)
            assert (mail.payload, mail.load_test) == (body, int(body) % 2 == 0)
            mail.acknowledge()
        more = asyncio.ensure_future(anext(inbox))
        await until(lambda: cluster.inboxes.missing(7, ("phone", 0)) == [])
        assert inbox.counters.load_test_blocked == 4 - len(wanted)
        more.cancel()


async def test_what_a_handler_sends_has_the_mark_of_what_it_handles(cluster: Any, until: Until) -> None:
    await cluster.start(gateways=1)
    (gateway,) = cluster.gateways
    found = list[tuple[str, tuple[bool, bool]]]()

    async def handle(message: pixiu.Message | Mail) -> None:
        what = message.payload.decode()
        found.append((what, marks()))
        found.append((f"{what} thread", await asyncio.to_thread(marks)))
        found.append((f"{what} task", await asyncio.create_task(later())))
        assert not draft(ROOM_KIND, 42, b"x", 1000, load_test=False).flags & Flag.LOAD_TEST

    cluster.inboxes.put(7, b"mail", flags=Flag.LOAD_TEST)
    async with pixiu.connect(cluster.target) as px:
        async with px.subscribe(room=42, load_test="pass") as messages:
            running = asyncio.ensure_future(messages.run(handle))
            gateway.send(record(1), record(2))
            await until(lambda: len(found) == 6)
        await running
        async with px.inbox(uin=7, device="phone", load_test="pass") as inbox:
            running = asyncio.ensure_future(inbox.run(handle))
            await until(lambda: len(found) == 9)
        await running
    for what, marked in found:
        assert marked == ((False, False) if what.startswith("1") else (True, True)), what
    assert marks() == (False, False)


def test_what_is_no_choice_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="True or False"):
        draft(ROOM_KIND, 42, b"x", 1000, load_test="yes")  # type: ignore[arg-type]
    assert draft(ROOM_KIND, 42, b"x", 1000, load_test=True).flags == Flag.TO_ROOM | Flag.LOAD_TEST


async def test_a_choice_is_checked_at_once(cluster: Any) -> None:
    await cluster.start(gateways=1)
    async with pixiu.connect(cluster.target, uin=7) as px:
        with pytest.raises(InvalidArgument, match="one of block, pass, only"):
            px.subscribe(room=42, load_test="all")  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="one of block, pass, only"):
            px.inbox(device="x", load_test="all")  # type: ignore[arg-type]
