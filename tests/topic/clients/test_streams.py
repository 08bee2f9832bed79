"""Streams of clients: what one of them may have under way is bounded, whatever it sends in one message."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from cluster.core.turn import Turn
from pixiu.rpc.duplex import StreamEnded
from pixiu.wire.v1 import topic_pb2 as pb
from tests.topic.builders import Log
from topic import events as ev
from topic.clients.members import MAX_REPORTS, Members
from topic.clients.writes import MAX_BLOCKS, Writes
from topic.storage.store import Store


class Group:
    """A replica that answers nothing."""

    leader = ""

    def __init__(self) -> None:
        self.store: Store = Log().store
        self.events: list[ev.Event] = []

    def step(self, event: ev.Event) -> None:
        self.events.append(event)


class Silent:
    """A client that sends these requests, and reads nothing."""

    serves, peer = True, "client"

    def __init__(self, *requests: Any) -> None:
        self.requests = list(requests)

    async def opened(self, timeout_s: float) -> None:
        """At once."""

    async def read(self) -> Any:
        if self.requests:
            return self.requests.pop(0)
        await asyncio.Event().wait()
        return None

    async def write(self, message: Any) -> None:
        await asyncio.Event().wait()

    async def done_writing(self) -> None:
        raise StreamEnded("it is gone")


def turn() -> Turn:
    return Turn(time.monotonic, asyncio.get_running_loop().call_soon)


def spawn(work: Any) -> None:
    raise AssertionError(work)


def test_a_writer_with_many_small_blocks_is_not_read_on() -> None:
    async def play() -> None:
        writes: Any = Writes(Group(), turn(), 1 << 30)  # type: ignore[arg-type]
        stream = writes.open(Silent())
        for number in range(MAX_BLOCKS):
            assert not stream.full()
            stream.number_of(number, 56)
        assert stream.full()

    asyncio.run(play())


def test_many_reports_in_one_request_wait_for_each_other() -> None:
    async def play() -> None:
        group = Group()
        members = Members(group, turn(), spawn)  # type: ignore[arg-type]
        hello = pb.ConsumeRequest(hello=pb.ConsumeHello(topic="orders", channel="c", credit=1))
        reports = [pb.MessageReport(request=number, part=1, acknowledged=[0, 1]) for number in range(3 * MAX_REPORTS)]
        stream = members.open(Silent(hello, pb.ConsumeRequest(reports=reports)))
        members.admit(stream)
        running = asyncio.create_task(stream.served.run())
        while len(group.events) <= MAX_REPORTS:
            await asyncio.sleep(0)
        for _ in range(100):  # turns in which it could go on
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert sum(isinstance(each, ev.Reported) for each in group.events) == MAX_REPORTS

    asyncio.run(play())


def test_a_member_whose_login_is_over_has_left_though_it_does_not_read() -> None:
    async def play() -> None:
        group = Group()
        members = Members(group, turn(), spawn)  # type: ignore[arg-type]
        hello = pb.ConsumeRequest(hello=pb.ConsumeHello(topic="orders", channel="c", credit=1))
        stream = members.open(Silent(hello))
        members.admit(stream)
        running = asyncio.create_task(stream.served.run())
        while not group.events:
            await asyncio.sleep(0)
        stream.say(pb.ConsumeReply(draining=True))
        await asyncio.sleep(0)
        stream.login_over("expired")
        assert group.events[1:] == [ev.Left(stream.number)]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(play())
