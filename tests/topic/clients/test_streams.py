"""Streams of clients: what one of them may have under way is bounded, whatever it sends in one message."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from cluster.core.turn import Turn
from pixiu.errors import InvalidArgument, Unavailable
from pixiu.rpc.duplex import StreamEnded
from pixiu.wire.v1 import topic_pb2 as pb
from tests.topic.builders import PART, Log
from topic import events as ev
from topic.clients import listener
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


class Reading(Silent):
    """A client that sends nothing, and reads."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    async def write(self, message: Any) -> None:
        self.found.append(message)

    async def done_writing(self) -> None:
        """It takes that."""

    async def refuse(self, error: Exception) -> None:
        raise error


@pytest.mark.parametrize("kind", ["writes", "members"])
def test_a_stream_that_says_nothing_is_ended(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(listener, "HELLO_TIMEOUT_S", 0.01)

    async def play() -> None:
        group: Any = Group()
        streams: Any = {"writes": Writes(group, turn(), 1 << 20), "members": Members(group, turn(), spawn)}
        service, client, nothing = listener.TopicLog(group, **streams, reads=None, guard=None, audit=None), Reading(), None  # type: ignore[arg-type]
        await service._run(client, streams[kind].open(client), streams[kind].admit, nothing)  # type: ignore[arg-type]
        assert [reply.end.code for reply in client.found] == ["OVERLOADED"]
        assert not streams[kind].streams

    asyncio.run(play())


@pytest.mark.parametrize(
    "ask", [pb.TopicReadRequest(topic="x" * 100_000), pb.ChannelRequest(topic="orders", channel="x" * 100_000)]
)
def test_a_long_name_is_not_repeated(ask: Any) -> None:
    async def play() -> None:
        service: Any = listener.TopicLog(Group(), None, None, None, None, None)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument) as refused:
            await (service.Read if isinstance(ask, pb.TopicReadRequest) else service.Channel)(ask, None)
        assert len(str(refused.value)) < 300

    asyncio.run(play())


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


async def test_a_member_keeps_what_it_is_to_get_while_the_object_store_is_away() -> None:
    group, tasks, answers = Group(), list[asyncio.Task[None]](), iter([False, False, True])

    class Reader:
        async def load(self, part: int, offset: int) -> None:
            if not next(answers):
                raise Unavailable("503")

    group.reader = Reader()  # type: ignore[attr-defined]
    members = Members(group, turn(), lambda work: tasks.append(asyncio.create_task(work)))  # type: ignore[arg-type]
    stream = members.open(Silent())
    members.admit(stream)
    stream.deliver(PART, [ev.Run(0, 3, 1)])
    assert stream.give() is None
    await asyncio.gather(*tasks)
    assert group.events == [ev.Touched(stream.number, PART, range(3))] * 2
