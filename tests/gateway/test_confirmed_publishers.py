"""QoS 1 messages on their way to a proxy, and what becomes of a stream that is refused or breaks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from cluster.rpc.framed_listener import FramedListener
from cluster.rpc.methods import PUBLISH
from gateway.clients.publishing import Confirmable, ConfirmedPublishers
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.view import Layout, View
from pixiu.errors import Draining, PixiuError
from pixiu.ids import EndpointID, SnowflakeID
from pixiu.placement.big_rooms import VRooms
from pixiu.rpc.duplex import Served, StreamEnded
from pixiu.wire.record import Kind, encode
from pixiu.wire.v1 import wire_pb2
from tests.support.framed import framed_of
from tests.support.waiting import until

Handler = Served[wire_pb2.PublishReply, wire_pb2.PublishRequest]


class Proxy:
    """Accepts everything."""

    def __init__(self) -> None:
        self.opened = 0
        """Streams."""
        self.names: list[str] = []
        self.records = 0
        self.refuses = False
        self.streams: set[asyncio.Task[Any]] = set()
        self.listener = FramedListener()
        self.listener.serve(PUBLISH, wire_pb2.PublishRequest.FromString, self.serve)

    async def serve(self, handler: Handler) -> None:
        self.opened += 1
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
        stream_port = await self.listener.bind("127.0.0.1", 0, fallback=True)
        await self.listener.start()
        node = Node("proxy", -1, 0, NodeState.RUNNING, "127.0.0.1", 1, 0, EndpointID(7), 1, "", "", 0)
        return replace(node, stream_port=stream_port)

    async def stop(self) -> None:
        await self.listener.close()


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    """One that runs."""
    found = Proxy()
    yield found
    await found.stop()


class Gateway:
    """Its publishers, and what they said of each message."""

    def __init__(self, node: Node) -> None:
        self.outcomes: list[PixiuError | None] = []
        view = View(Layout(1, {}), (node,))
        self.publishers = ConfirmedPublishers("gateway-9", VRooms(0, 0), lambda: view, framed_of("gateway", 9))
        self.publishers.set_proxies((node.address,))

    def publish(self, number: int) -> None:
        record = encode(Kind.ROOM, 42, b"hello", SnowflakeID(number))
        message = Confirmable(lambda _message, error: self.outcomes.append(error), number, 42, record, SnowflakeID(number))
        assert self.publishers.publish(message, lambda: None)


async def test_messages_are_confirmed(proxy: Proxy) -> None:
    gateway = Gateway(await proxy.start())
    for number in range(1, 101):
        gateway.publish(number)
    await until(lambda: len(gateway.outcomes) == 100)
    assert gateway.outcomes == [None] * 100
    assert (proxy.records, proxy.names, proxy.opened) == (100, ["gateway-9"], 1)
    await gateway.publishers.close()


async def test_a_stream_that_breaks_is_opened_again_and_what_was_unconfirmed_is_sent_again(proxy: Proxy) -> None:
    gateway = Gateway(await proxy.start())
    gateway.publish(1)
    await until(lambda: gateway.outcomes)
    (stream,) = proxy.streams
    stream.cancel()
    gateway.publish(2)
    await until(lambda: len(gateway.outcomes) == 2)
    assert gateway.outcomes == [None, None]
    assert proxy.opened == 2
    await gateway.publishers.close()


@pytest.mark.slow
async def test_a_proxy_that_refuses_is_asked_again_later(proxy: Proxy) -> None:
    gateway = Gateway(await proxy.start())
    proxy.refuses = True
    gateway.publish(1)
    await until(lambda: proxy.opened >= 2)
    proxy.refuses = False
    await until(lambda: gateway.outcomes)
    assert gateway.outcomes == [None]
    await gateway.publishers.close()
