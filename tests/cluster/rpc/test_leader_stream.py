"""Streams to a partition's leader: which replica is asked, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from cluster.rpc.framed import FramedHandler
from cluster.rpc.framed_listener import FramedListener
from cluster.rpc.leader_stream import LeaderStream, Reply
from cluster.rpc.methods import EXCHANGE
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.view import Layout, RoleLayout, View
from pixiu.ids import EndpointID
from pixiu.wire.v1 import pi_pb2
from tests.support.framed import framed_of
from tests.support.waiting import until


class Replica:
    """Says whether it leads, and how often it was asked."""

    def __init__(self, epoch: int) -> None:
        self.epoch, self.leader, self.streams = epoch, "", 0
        self.listener, self.port = FramedListener(), 0
        self.listener.serve(EXCHANGE, pi_pb2.PiRequest.FromString, self.exchange)

    async def start(self) -> None:
        self.port = await self.listener.bind("127.0.0.1", self.port, fallback=False, reuse=True)
        await self.listener.start()

    @property
    def address(self) -> str:
        """As the registry has it; nothing listens there."""
        return f"127.0.0.1:{self.port - 3}"

    async def exchange(self, handler: FramedHandler[pi_pb2.PiReply, pi_pb2.PiRequest]) -> None:
        self.streams += 1
        while (request := await handler.read()) is not None:
            server = pi_pb2.PiServer(address=self.leader)
            await handler.write(pi_pb2.PiReply(request=request.request, epoch=self.epoch, server=server))

    def node(self, number: int, state: NodeState = NodeState.RUNNING) -> Node:
        port = self.port - 3
        return Node("pi", 0, number, state, "127.0.0.1", port, 0, EndpointID(200 + number), 1, "", "", 0, stream_port=self.port)


@asynccontextmanager
async def running(*epochs: int) -> AsyncIterator[list[Replica]]:
    """Replicas; epoch 0: it does not lead."""
    replicas = [Replica(epoch) for epoch in epochs]
    try:
        for replica in replicas:
            await replica.start()
        yield replicas
    finally:
        for replica in replicas:
            await replica.listener.close()


def view_of(*nodes: Node) -> View:
    return View(Layout(1, {"pi": RoleLayout(1)}), nodes)


class Caller:
    """What a stream to a leader reported."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.ups: list[int] = []
        self.downs: list[str] = []
        self.replies: list[Reply] = []
        self.crashes: list[BaseException] = []
        self.stream = LeaderStream(
            "pi", 0, lambda: self.view, framed_of("proxy"), up=self.ups.append, reply=self.replies.append, down=self.downs.append,
            crash=self.crashes.append,
        )  # fmt: skip

    async def close(self) -> None:
        await self.stream.close()
        assert not self.crashes


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure there is a pause that does not end in a test."""
    for name in ("FIRST_BACKOFF_S", "MAX_BACKOFF_S"):
        monkeypatch.setattr(f"cluster.rpc.leader_stream.{name}", 3600.0)


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
async def test_that_nobody_was_running_delays_no_stream_when_somebody_is() -> None:
    """The layout names the partitions that a doubling adds before their replicas run; their links are to be open at the cut."""
    async with running(1, 0) as (leader, follower):
        follower.leader = leader.address
        caller = Caller(view_of())
        await until(lambda: len(caller.downs) >= 2, "two looks in vain", limit_s=30)
        caller.view = view_of(follower.node(0), leader.node(1, NodeState.INIT))
        await until(lambda: caller.ups, "a stream to the leader whom the follower names")
        assert (follower.streams, leader.streams) == (1, 1)
        await caller.close()


@pytest.mark.parametrize("place", [0, 1])
async def test_who_leaves_a_leader_to_send_again_asks_nobody_else(place: int) -> None:
    """With two replicas every second stream would be opened at the one that does not lead first."""
    async with running(int(place == 0), int(place == 1)) as replicas:
        leader, follower = replicas[place], replicas[1 - place]
        follower.leader = leader.address
        caller = Caller(view_of(*(replica.node(number) for number, replica in enumerate(replicas))))
        await until(lambda: len(caller.ups) == 1, "a stream")
        asked = follower.streams
        for count in range(2, 5):
            caller.stream.leave(again=True)
            await until(lambda count=count: len(caller.ups) == count, "the next stream")  # type: ignore[misc]
        assert follower.streams == asked
        caller.stream.send(pi_pb2.PiRequest(request=7))
        await until(lambda: bool(caller.replies), "an answer on the last one")
        leader.epoch, follower.epoch = 0, 2
        leader.leader = follower.address
        caller.stream.leave(again=True)
        await until(lambda: len(caller.ups) == 5, "a stream to the next leader, whom the former one names")
        assert caller.ups[-1] == 2
        await caller.close()


async def test_a_leader_that_is_named_is_asked_at_once_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.rpc.leader_stream.Backoff.after_s", lambda _self, failures: 0.01 if failures == 1 else 3600.0)
    async with running(0, 1, 0) as (follower, leader, gone):
        follower.leader = leader.address
        await gone.listener.close()
        caller = Caller(view_of(follower.node(0), gone.node(1), leader.node(2, NodeState.INIT)))
        await until(lambda: caller.ups, "a stream to the leader", limit_s=30)
        assert [down.partition(": ")[0] for down in caller.downs] == [gone.address, follower.address]
        await caller.close()


@pytest.mark.usefixtures("patient")
async def test_two_replicas_that_name_each_other_are_not_asked_without_a_pause() -> None:
    async with running(0, 0) as (one, other):
        one.leader, other.leader = other.address, one.address
        caller = Caller(view_of(one.node(0), other.node(1)))
        await until(lambda: len(caller.downs) >= 2, "both were asked")
        await asyncio.sleep(0.2)
        assert (one.streams, other.streams) == (1, 1)
        one.epoch = 1
        caller.stream.hurry()
        await until(lambda: caller.ups, "a stream to the one that leads")
        await caller.close()


async def test_a_replica_without_a_port_of_streams_is_a_clear_reason() -> None:
    async with running(1) as (leader,):
        caller = Caller(view_of(replace(leader.node(0), stream_port=0)))
        await until(lambda: caller.downs, "it is not reached")
        assert caller.downs[0] == f"{leader.address}: the pi at 127.0.0.1 has no stream_port in the registry"
        await caller.close()
