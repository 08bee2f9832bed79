"""Streams to a partition's leader: which replica is asked when one was left, and by which carrier."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from cluster.rpc.framed import Framed, FramedHandler
from cluster.rpc.framed_door import FramedDoor
from cluster.rpc.leader_stream import LeaderStream, Reply
from cluster.rpc.methods import EXCHANGE
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.view import Layout, RoleLayout, View
from pixiu.ids import EndpointID
from pixiu.rpc.channels import Channels
from pixiu.wire.v1 import pi_pb2, pi_pb2_grpc
from tests.support.waiting import until


class Replica(pi_pb2_grpc.PiServicer):
    """Says whether it leads, and how often it was asked."""

    def __init__(self, epoch: int) -> None:
        self.epoch, self.leader, self.streams = epoch, "", 0
        self.server = grpc.aio.server()
        pi_pb2_grpc.add_PiServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")

    async def Exchange(self, request_iterator: AsyncIterator[pi_pb2.PiRequest], context: Any) -> AsyncIterator[pi_pb2.PiReply]:
        self.streams += 1
        async for request in request_iterator:
            yield pi_pb2.PiReply(request=request.request, epoch=self.epoch, server=pi_pb2.PiServer(address=self.leader))

    def node(self, number: int) -> Node:
        return Node("pi", 0, number, NodeState.RUNNING, "127.0.0.1", self.port, 0, EndpointID(200 + number), 1, "", "", 0)


@pytest.mark.slow
async def test_that_nobody_was_running_delays_no_stream_when_somebody_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout names the partitions that a doubling adds before their replicas run; their links are to be open at the cut."""
    for name in ("FIRST_BACKOFF_S", "MAX_BACKOFF_S"):
        monkeypatch.setattr(f"cluster.rpc.leader_stream.{name}", 3600.0)
    make: Any = Replica
    leader, follower = make(1), make(0)
    follower.leader = f"127.0.0.1:{leader.port}"
    view = View(Layout(1, {"pi": RoleLayout(1)}), ())
    ups: list[int] = []
    downs: list[str] = []
    for replica in (leader, follower):
        await replica.server.start()
    stream = LeaderStream(
        "pi", 0, lambda: view, Channels(), up=ups.append, reply=lambda _reply: None, down=downs.append, crash=lambda _error: None
    )
    try:
        await until(lambda: len(downs) >= 2, "two looks in vain", limit_s=30)
        view = View(view.layout, (follower.node(0),))
        await until(lambda: ups, "a stream to the leader whom the follower names")
        assert (follower.streams, leader.streams) == (1, 1)
    finally:
        await stream.close()
        await asyncio.gather(*(replica.server.stop(None) for replica in (leader, follower)))


@pytest.mark.parametrize("place", [0, 1])
async def test_who_leaves_a_leader_to_send_again_asks_nobody_else(place: int) -> None:
    """With two replicas every second stream would be opened at the one that does not lead first."""
    make: Any = Replica  # which does not serve what is not called here
    replicas: list[Replica] = [make(int(number == place)) for number in range(2)]
    leader, follower = replicas[place], replicas[1 - place]
    follower.leader = f"127.0.0.1:{leader.port}"
    view = View(Layout(1, {"pi": RoleLayout(1)}), tuple(replica.node(number) for number, replica in enumerate(replicas)))
    ups: list[int] = []
    replies: list[Reply] = []
    crashes: list[BaseException] = []
    for replica in replicas:
        await replica.server.start()
    stream = LeaderStream(
        "pi", 0, lambda: view, Channels(), up=ups.append, reply=replies.append, down=lambda _why: None, crash=crashes.append
    )
    try:
        await until(lambda: len(ups) == 1, "a stream")
        asked = follower.streams
        for count in range(2, 5):
            stream.leave(again=True)
            await until(lambda count=count: len(ups) == count, "the next stream")  # type: ignore[misc]
        assert follower.streams == asked
        stream.send(pi_pb2.PiRequest(request=7))
        await until(lambda: bool(replies), "an answer on the last one")
        leader.epoch, follower.epoch = 0, 2
        leader.leader = f"127.0.0.1:{follower.port}"
        stream.leave(again=True)
        await until(lambda: len(ups) == 5, "a stream to the next leader, whom the former one names")
        assert ups[-1] == 2
        assert not crashes
    finally:
        await stream.close()
        await asyncio.gather(*(replica.server.stop(None) for replica in replicas))


class FramedReplica(Replica):
    """Offers framed streams as well."""

    def __init__(self, epoch: int) -> None:
        super().__init__(epoch)
        self.framed, self.stream_port = 0, 0
        self.door = FramedDoor()
        self.door.serve(EXCHANGE, pi_pb2.PiRequest.FromString, self.exchange)

    async def exchange(self, handler: FramedHandler[pi_pb2.PiReply, pi_pb2.PiRequest]) -> None:
        self.framed += 1
        while (request := await handler.read()) is not None:
            server = pi_pb2.PiServer(address=self.leader)
            await handler.write(pi_pb2.PiReply(request=request.request, epoch=self.epoch, server=server))

    def node(self, number: int) -> Node:
        return replace(super().node(number), stream_port=self.stream_port)


@pytest.mark.slow
async def test_a_framed_stream_is_opened_where_it_is_offered_and_grpc_where_its_port_is_closed() -> None:
    make: Any = FramedReplica
    replica: FramedReplica = make(1)
    await replica.server.start()
    view = View(Layout(1, {"pi": RoleLayout(1)}), (replica.node(0),))
    ups: list[int] = []
    downs: list[str] = []
    replies: list[Reply] = []
    stream = LeaderStream(
        "pi", 0, lambda: view, Channels(), up=ups.append, reply=replies.append, down=downs.append, crash=lambda _error: None,
        framed=Framed("proxy", 1, lambda _role: None, 1 << 20),
    )  # fmt: skip
    try:
        await until(lambda: len(ups) == 1, "a stream to a replica that offers none")
        assert (replica.streams, replica.framed) == (1, 0)
        replica.stream_port = await replica.door.bind("127.0.0.1", 0, fallback=True)
        await replica.door.start()
        view = View(view.layout, (replica.node(0),))
        stream.leave(again=True)
        await until(lambda: len(ups) == 2, "a framed stream")
        stream.send(pi_pb2.PiRequest(request=7))
        await until(lambda: len(replies) == 1, "an answer on it")
        assert (replica.streams, replica.framed) == (1, 1)
        await replica.door.close()
        await until(lambda: len(ups) == 3, "a stream although the port is closed")
        assert (replica.streams, replica.framed) == (2, 1)
        assert len(downs) == 2, "the two streams that ended: a port that is closed is no failure"
    finally:
        await stream.close()
        await replica.door.close()
        await replica.server.stop(None)


@pytest.mark.parametrize("leads", [0, 1])
async def test_a_leader_is_found_where_no_framed_port_is_reached(leads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both replicas offer framed streams at ports that are closed on the way, and the first one asked may be either."""
    for name in ("FIRST_BACKOFF_S", "MAX_BACKOFF_S"):
        monkeypatch.setattr(f"cluster.rpc.leader_stream.{name}", 3600.0)
    make: Any = FramedReplica
    replicas: list[FramedReplica] = [make(int(number == leads)) for number in range(2)]
    replicas[1 - leads].leader = f"127.0.0.1:{replicas[leads].port}"
    for replica in replicas:
        replica.stream_port = 1
        await replica.server.start()
    view = View(Layout(1, {"pi": RoleLayout(1)}), tuple(replica.node(number) for number, replica in enumerate(replicas)))
    ups: list[int] = []
    stream = LeaderStream(
        "pi", 0, lambda: view, Channels(), up=ups.append, reply=lambda _reply: None, down=lambda _why: None,
        crash=lambda _error: None, framed=Framed("proxy", 1, lambda _role: None, 1 << 20),
    )  # fmt: skip
    try:
        await until(lambda: ups, "a stream to the leader")
    finally:
        await stream.close()
        await asyncio.gather(*(replica.server.stop(None) for replica in replicas))
