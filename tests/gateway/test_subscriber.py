"""A Subscribe stream says hello in time, as far as the gateway's own loop lets it; what it asks for is bounded and paced."""

from __future__ import annotations

import asyncio
import time

import pytest

from gateway import events as ev
from gateway import subscriber
from gateway.options import Options
from gateway.subscriber import MAX_FILTER_BYTES, SubscriberService, _Stream
from pixiu.errors import InvalidArgument, Overloaded
from pixiu.rpc.channels import REFUSED
from pixiu.rpc.status import GRPC_STATUS
from pixiu.wire.v1 import wire_pb2
from tests.gateway.world import World, of

HELLO = wire_pb2.SubscribeRequest(hello=wire_pb2.SubscribeHello(uin=7))
HOPS = 20
"""Turns of the loop between the bytes of a request and the request."""


class Carrier:
    """A stream whose hello comes when `there` is set."""

    serves = True

    def __init__(self, there: asyncio.Event) -> None:
        self._there = there
        self.hello: wire_pb2.SubscribeRequest | None = HELLO

    async def opened(self, timeout_s: float) -> None: ...
    async def done_writing(self) -> None: ...
    async def write(self, message: wire_pb2.SubscribeReply) -> None: ...

    async def read(self) -> wire_pb2.SubscribeRequest | None:
        await self._there.wait()
        for _ in range(HOPS):
            await asyncio.sleep(0)
        return self.hello


async def first(there: asyncio.Event) -> wire_pb2.SubscribeRequest:
    clients = World().clients
    return await SubscriberService(clients)._first(_Stream(clients, ""), Carrier(there))


@pytest.mark.slow
async def test_a_hello_that_came_while_the_loop_stood_still_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriber, "HELLO_TIMEOUT_S", 0.1)
    monkeypatch.setattr(subscriber, "LATE_S", 0.2)
    there = asyncio.Event()

    def stand_still() -> None:
        time.sleep(0.5)
        there.set()

    asyncio.get_running_loop().call_soon(stand_still)
    assert await first(there) == HELLO


async def test_a_stream_whose_hello_is_late_may_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriber, "HELLO_TIMEOUT_S", 0.1)
    with pytest.raises(Overloaded, match="the first request") as raised:
        await first(asyncio.Event())
    assert raised.value.retry_after_ms > 0
    assert GRPC_STATUS[Overloaded.code] not in REFUSED, "clients take these for the last word"


async def test_a_stream_that_ends_without_a_hello_is_refused() -> None:
    clients = World().clients
    ended = asyncio.Event()
    ended.set()
    carrier = Carrier(ended)
    carrier.hello = None
    with pytest.raises(InvalidArgument, match="the first request"):
        await SubscriberService(clients)._first(_Stream(clients, ""), carrier)


def asks(number: int, *topics: str, leave: bool = False) -> wire_pb2.SubscribeRequest:
    return wire_pb2.SubscribeRequest(request=number, join_topics=() if leave else topics, leave_topics=topics if leave else ())


async def test_the_names_of_a_streams_topics_have_one_bound_of_bytes() -> None:
    world = World()
    service, stream = SubscriberService(world.clients), _Stream(world.clients, "")
    large = MAX_FILTER_BYTES // 16
    for number in range(1, 18):
        service._take(stream, asks(number, f"devices/{number}/".ljust(large - 1, "x")))
    service._take(stream, asks(18, "devices/1/".ljust(large - 1, "x"), leave=True))
    service._take(stream, asks(19, "devices/19/".ljust(large - 1, "x")))
    joined = [join.request for join in of(ev.Join, world.events)]
    assert joined == [*range(1, 17), 19], "the seventeenth has no room until another one left"


async def test_a_stream_that_joins_and_leaves_without_end_is_not_read_from_for_a_while() -> None:
    world = World(Options(client_joins_per_s=10, client_joins_burst=100), now=1000.0)
    service, stream = SubscriberService(world.clients), _Stream(world.clients, "")
    pauses = [service._take(stream, asks(number, "devices/1", leave=bool(number % 2))) for number in range(150)]
    assert not any(pauses[:100])
    assert all(pauses[101:])
    for pause in filter(None, pauses):
        assert asyncio.iscoroutine(pause)
        pause.close()
