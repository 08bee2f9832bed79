"""QoS 1 messages on their way to a proxy: which carrier takes them, and what becomes of a stream that is refused or breaks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from cluster.rpc.framed import Framed
from cluster.rpc.framed_door import FramedDoor
from cluster.rpc.methods import PUBLISH
from gateway.publishing import Confirmable, ConfirmedPublishers
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.view import Layout, View
from pixiu.errors import Draining, PixiuError
from pixiu.ids import EndpointID, SnowflakeID
from pixiu.placement.big_rooms import VRooms
from pixiu.rpc.duplex import Served, StreamEnded
from pixiu.rpc.grpc_streams import GrpcHandler
from pixiu.wire.record import Kind, encode
from pixiu.wire.v1 import wire_pb2, wire_pb2_grpc
from tests.support.waiting import until

Handler = Served[wire_pb2.PublishReply, wire_pb2.PublishRequest]


class Proxy(wire_pb2_grpc.PublisherServicer):
    """Accepts everything, over gRPC and over frames."""

    def __init__(self) -> None:
        self.carriers: list[str] = []
        """Of each stream."""
        self.names: list[str] = []
        self.records = 0
        self.refuses = False
        self.streams: set[asyncio.Task[Any]] = set()
        self.server = grpc.aio.server()
        wire_pb2_grpc.add_PublisherServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.door = FramedDoor()
        self.door.serve(PUBLISH, wire_pb2.PublishRequest.FromString, lambda handler: self.serve("framed", handler))

    async def Publish(self, request_iterator: AsyncIterator[wire_pb2.PublishRequest], context: Any) -> None:  # type: ignore[override]
        await self.serve("grpc", GrpcHandler(context))

    async def serve(self, carrier: str, handler: Handler) -> None:
        self.carriers.append(carrier)
        if self.refuses:
            await handler.refuse(Draining("this proxy is draining; use another one"))
        task = asyncio.current_task()
        assert task is not None
        self.streams.add(task)
        with contextlib.suppress(StreamEnded):
            while (request := await handler.read()) is not None:
                if request.HasField("hello"):
                    self.names.append(request.hello.client)
                    await handler.write(wire_pb2.PublishReply(window_bytes=1 << 20))
                if request.count:
                    self.records += request.count
                    await handler.write(wire_pb2.PublishReply(up_to=request.position + request.count - 1))

    async def start(self) -> Node:
        await self.server.start()
        stream_port = await self.door.bind("127.0.0.1", 0, fallback=True)
        await self.door.start()
        node = Node("proxy", -1, 0, NodeState.RUNNING, "127.0.0.1", self.port, 0, EndpointID(7), 1, "", "", 0)
        return replace(node, stream_port=stream_port)

    async def stop(self) -> None:
        await self.door.close()
        await self.server.stop(None)


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    """One that runs."""
    make: Any = Proxy  # which serves only what gateways call
    found: Proxy = make()
    yield found
    await found.stop()


class Gateway:
    """Its publishers, and what they said of each message."""

    def __init__(self, node: Node, framed: bool) -> None:
        self.node = node
        self.outcomes: list[PixiuError | None] = []
        opens = Framed("gateway", 9, lambda _role: None, 1 << 20) if framed else None
        self.publishers = ConfirmedPublishers(
            "gateway-9", VRooms(0, 0), lambda: "", lambda: View(Layout(1, {}), (self.node,)), opens
        )  # fmt: skip
        self.publishers.set_proxies((node.address,))

    def publish(self, number: int) -> None:
        record = encode(Kind.ROOM, 42, b"hello", SnowflakeID(number))
        message = Confirmable(lambda _message, error: self.outcomes.append(error), number, 42, record, SnowflakeID(number))
        assert self.publishers.publish(message, lambda: None)


@pytest.mark.parametrize("carrier", ["grpc", "framed"])
async def test_messages_are_confirmed_whatever_carries_them(proxy: Proxy, carrier: str) -> None:
    gateway = Gateway(await proxy.start(), carrier == "framed")
    for number in range(1, 101):
        gateway.publish(number)
    await until(lambda: len(gateway.outcomes) == 100)
    assert gateway.outcomes == [None] * 100
    assert (proxy.records, proxy.names, proxy.carriers) == (100, ["gateway-9"], [carrier])
    await gateway.publishers.close()


async def test_a_port_that_is_closed_costs_nothing_but_frames(proxy: Proxy) -> None:
    node = await proxy.start()
    await proxy.door.close()
    gateway = Gateway(node, framed=True)
    gateway.publish(1)
    await until(lambda: gateway.outcomes)
    assert (gateway.outcomes, proxy.carriers) == ([None], ["grpc"])
    await gateway.publishers.close()


async def test_a_release_that_does_not_carry_messages_so_gets_them_over_grpc(proxy: Proxy) -> None:
    node = await proxy.start()
    proxy.door._methods.clear()
    gateway = Gateway(node, framed=True)
    gateway.publish(1)
    await until(lambda: gateway.outcomes)
    assert (gateway.outcomes, proxy.carriers, proxy.door.refused) == ([None], ["grpc"], 1)
    await gateway.publishers.close()


async def test_a_stream_that_breaks_is_opened_again_and_what_was_unconfirmed_is_sent_again(proxy: Proxy) -> None:
    gateway = Gateway(await proxy.start(), framed=True)
    gateway.publish(1)
    await until(lambda: gateway.outcomes)
    (stream,) = proxy.streams
    stream.cancel()
    gateway.publish(2)
    await until(lambda: len(gateway.outcomes) == 2)
    assert gateway.outcomes == [None, None]
    assert proxy.carriers == ["framed", "framed"]
    await gateway.publishers.close()


@pytest.mark.slow
async def test_a_proxy_that_refuses_is_asked_again_later_by_frames(proxy: Proxy) -> None:
    gateway = Gateway(await proxy.start(), framed=True)
    proxy.refuses = True
    gateway.publish(1)
    await until(lambda: len(proxy.carriers) >= 2)
    proxy.refuses = False
    await until(lambda: gateway.outcomes)
    assert gateway.outcomes == [None]
    assert set(proxy.carriers) == {"framed"}
    await gateway.publishers.close()
