"""A Subscribe stream says hello in time, as far as the gateway's own loop lets it; what it asks for is bounded and paced."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.access.login_guard import LoginGuard
from cluster.access.rules import RuleSet
from cluster.access.settings import parse
from cluster.core import log
from cluster.trust.audit import Audit
from cluster.trust.identity import Credentials
from gateway import events as ev
from gateway.grpc import subscriber
from gateway.grpc.subscriber import FEW_NAMES, MAX_FILTER_BYTES, SubscriberService, _Stream
from gateway.options import Options
from pixiu.errors import InvalidArgument, LimitError, NotAllowed, Overloaded
from pixiu.rpc.channels import REFUSED
from pixiu.rpc.status import GRPC_STATUS
from pixiu.wire.v1 import wire_pb2
from tests.gateway.world import World, of
from tests.support.logins import Logins

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
    assert joined == [*range(1, 17), 19], "the seventeenth has no space until another one left"


async def test_a_stream_that_joins_and_leaves_without_end_is_not_read_from_for_a_while() -> None:
    world = World(Options(client_joins_per_s=10, client_joins_burst=100), now=1000.0)
    service, stream = SubscriberService(world.clients), _Stream(world.clients, "")
    pauses = [service._take(stream, asks(number, "devices/1", leave=bool(number % 2))) for number in range(150)]
    assert not any(pauses[:100])
    assert all(pauses[101:])
    for pause in filter(None, pauses):
        assert asyncio.iscoroutine(pause)
        pause.close()


MANY = 10 * FEW_NAMES


async def take(service: SubscriberService, stream: _Stream, request: wire_pb2.SubscribeRequest) -> None:
    """Have a request carried out, in however many pieces."""
    pause = service._take(stream, request)
    if pause is not None:
        await pause


async def joined_in_steps(request: int) -> tuple[_Stream, list[ev.Join]]:
    world = World(Options(joins_per_s=0, client_joins_per_s=0))
    service, stream = SubscriberService(world.clients), _Stream(world.clients, "")
    await take(service, stream, wire_pb2.SubscribeRequest(join_rooms=range(1, 1 + MANY), request=request))
    joins = of(ev.Join, world.events)
    assert [wanted.filter for join in joins for wanted in join.channels] == [f"room/{room}" for room in range(1, 1 + MANY)]
    assert max(len(join.channels) for join in joins) <= FEW_NAMES
    return stream, joins


@pytest.mark.parametrize("request_id", [0, 5])
async def test_a_request_of_many_joins_is_answered_once_when_all_of_it_has_taken_effect(request_id: int) -> None:
    stream, joins = await joined_in_steps(request_id)
    for join in reversed(joins[1:]):
        stream.answer(ev.Answer(join.connection, join.request, True))
    assert stream.give() is None
    stream.answer(ev.Answer(joins[0].connection, joins[0].request, True))
    assert stream.give() == wire_pb2.SubscribeReply(request=request_id)
    assert stream.give() is None


async def test_of_many_joins_those_that_are_refused_are_not_had() -> None:
    stream, joins = await joined_in_steps(5)
    for join in joins:
        refused = frozenset(wanted.filter for wanted in join.channels) if join is joins[2] else frozenset()
        stream.answer(ev.Answer(join.connection, join.request, True, refused))
    reply = stream.give()
    assert reply is not None
    assert (reply.request, reply.error_code) == (5, LimitError.code)
    assert len(stream.channels) == MANY - FEW_NAMES


async def test_of_many_names_one_that_is_wrong_has_nothing_joined_or_left() -> None:
    world = World(Options(joins_per_s=0, client_joins_per_s=0))
    service, stream = SubscriberService(world.clients), _Stream(world.clients, "")
    wrong = wire_pb2.SubscribeRequest(leave_rooms=range(1, 1 + MANY), join_rooms=[*range(1, MANY), 1 << 62], request=5)
    await take(service, stream, wrong)
    assert world.events == []
    assert not stream.channels
    reply = stream.give()
    assert reply is not None
    assert reply.error_code == InvalidArgument.code


async def test_rules_that_change_while_many_names_are_checked_are_those_that_count(tmp_path: Path) -> None:
    """A name that was let in a piece before is not joined by rules that are over."""
    logins = Logins(tmp_path)
    logins.write_rules('[[rule]]\nallow = ["subscribe"]\n')
    world = World(Options(joins_per_s=0, client_joins_per_s=0))
    guard = LoginGuard(str(logins.file), log.get_logger(), Audit(None))
    try:
        service, stream = SubscriberService(world.clients), _Stream(world.clients, "")
        identity = await guard.check(Credentials("alice", logins.token("alice", 7)))
        stream.access = guard.open(identity, "", "", stream.close)
        pieces = 0

        async def run(work: Callable[[], bool], size: int) -> bool:
            nonlocal pieces
            pieces += 1
            if pieces == MANY // FEW_NAMES + 3:  # names are read, and two pieces of them checked
                logins.write_rules('[[rule]]\ndeny = ["subscribe"]\nrooms = ["1"]\n[[rule]]\nallow = ["subscribe"]\n')
                guard.tenants.rules = RuleSet(parse(logins.file.read_text(), "access.toml").rules)
                guard.as_of += 1
            return work()

        world.clients.turn.run = run  # type: ignore[method-assign, assignment]
        await take(service, stream, wire_pb2.SubscribeRequest(join_rooms=range(1, 1 + MANY), request=5))
    finally:
        await guard.close()
    assert of(ev.Join, world.events) == []
    reply = stream.give()
    assert reply is not None
    assert reply.error_code == NotAllowed.code
