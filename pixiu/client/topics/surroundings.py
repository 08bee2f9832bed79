"""The parts of a client that its topics use, and calls of a group's leader."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import grpc.aio

from pixiu.client.options import ClientOptions
from pixiu.client.send.awaited import FailureReports
from pixiu.client.topics.described import error_of_call, refused
from pixiu.client.topics.leader_link import LeaderLink
from pixiu.client.topics.topic_directory import TopicDirectory
from pixiu.errors import (
    Draining,
    InvalidArgument,
    LimitError,
    NotAllowed,
    NotAuthenticated,
    NotLeader,
    NotServed,
    Overloaded,
    PixiuError,
    StaleWriter,
    TooFewInSync,
    Unavailable,
)
from pixiu.rpc.channels import Channels, reply_of
from pixiu.rpc.duplex import StreamEnded
from pixiu.wire.v1 import topic_pb2_grpc

LEADER_S: Final = 20.0
"""Time limit for finding a leader, seconds: a change of leaders takes about ten seconds."""
LEADER: Final = "pixiu-leader"
"""Trailing metadata of a call that is refused with NOT_LEADER: client address of the leader."""
_AGAIN: Final = (NotLeader, Unavailable, Draining, Overloaded, TooFewInSync)
Reply = TypeVar("Reply")


class Closable(Protocol):
    """An object that ends with its client."""

    async def close(self) -> None:
        """End it."""


@dataclass(frozen=True)
class TopicContext:
    """Parts of a client that its topics use."""

    client: str
    """Name for logs and metrics."""
    options: ClientOptions
    channels: Channels
    directory: TopicDirectory
    uniform: Callable[[], float]
    reports: FailureReports
    users: set[Closable]
    """Writers, members and readers that are open."""


async def ask_leader(
    around: TopicContext,
    topic: str,
    group: int,
    call: Callable[[Any, float], Awaitable[Reply]],
    *,
    call_s: float = 5.0,
    limit_s: float = LEADER_S,
) -> Reply:
    """Call a method of the leader of a group, and look for it meanwhile. `call` gets a stub and a time limit.

    Raises the refusal of a leader, and `Unavailable` if none answers within `limit_s`.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit_s
    link = LeaderLink.new(around.options.backoff_s, min(around.options.max_backoff_s, 1.0), around.uniform)
    why: PixiuError = Unavailable(f"no replica of topic group {group} is known")
    while True:
        link.set_addresses((await around.directory.topic(topic)).groups.get(group, ()))
        address = link.address()
        if address:
            channel = around.channels.acquire(address)
            try:
                reply = await reply_of(call(topic_pb2_grpc.TopicLogStub(channel), call_s))
            except grpc.aio.AioRpcError as problem:
                why = _why(problem, topic)
            except StreamEnded as problem:
                why = Unavailable(str(problem))
            else:
                refusal = getattr(reply, "refusal", None)
                if refusal is None or not refusal.code:
                    return reply
                why = refused(refusal, topic)
            finally:
                await around.channels.release(channel)
            if not isinstance(why, _AGAIN):
                raise why
        link.failed(loop.time(), getattr(why, "leader", ""), why.retry_after_ms / 1000)
        if link.rest_until > deadline or loop.time() >= deadline:
            raise Unavailable(f"no leader of topic group {group} answers: {address or 'none is known'}: {why}")
        around.directory.refresh(topic)
        await asyncio.sleep(max(0.0, link.rest_until - loop.time()))


def _why(problem: grpc.aio.AioRpcError, topic: str) -> PixiuError:
    """The error of a call. A replica that does not lead answers with the status of `NotLeader`."""
    if problem.code() is grpc.StatusCode.FAILED_PRECONDITION:
        trailing = {name: str(value) for name, value in problem.trailing_metadata() or ()}
        return NotLeader(problem.details() or "", trailing.get(LEADER, ""))
    code, _, text = (problem.details() or "").partition(": ")
    if problem.code() is grpc.StatusCode.ABORTED and code == StaleWriter.code:
        return StaleWriter(text)
    if problem.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Overloaded(problem.details() or "", 200)
    return error_of_call(problem, topic)


HOPELESS: Final = (NotAllowed, NotAuthenticated, InvalidArgument, NotServed, LimitError)
"""Errors of a stream after which another one is useless, but for `Overloaded`."""


def is_hopeless(error: PixiuError) -> bool:
    """True if trying again is useless."""
    return isinstance(error, HOPELESS) and not isinstance(error, Overloaded)
