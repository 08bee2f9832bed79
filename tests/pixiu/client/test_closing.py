"""A closed client leaves no connection, whatever of it the user keeps, and without the garbage collector."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

import pixiu
from pixiu.errors import UnknownTopic
from pixiu.wire.v1 import wire_pb2, wire_pb2_grpc
from tests.support.waiting import until

LIMIT_S = 10.0
DESCRIPTORS = Path("/proc/self/fd")
pytestmark = pytest.mark.skipif(not DESCRIPTORS.is_dir(), reason="needs /proc")


def sockets() -> int:
    """How many sockets this process has, the fake cluster's among them."""
    links = [DESCRIPTORS / name for name in os.listdir(DESCRIPTORS)]
    return sum(link.is_symlink() and os.readlink(link).startswith("socket:") for link in links)


@pytest.fixture(autouse=True)
def uncollected() -> Iterator[None]:
    """No collection of cycles."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def leaves_nothing(target: str, use: Callable[[pixiu.Client], Awaitable[object]]) -> None:
    """Use a client and close it; what `use` returned lives on."""
    async with pixiu.connect(target):  # gRPC's own sockets stay from here on
        pass
    before = sockets()
    async with pixiu.connect(target, uin=7, client="left") as px:
        kept = await use(px)
    await until(lambda: sockets() <= before, lambda: f"the end of {sockets() - before} sockets, with {kept!r} kept", LIMIT_S)


async def test_what_is_kept_of_a_client_keeps_no_connection(cluster: Any) -> None:
    async def use(px: pixiu.Client) -> object:
        subscription, inbox = px.subscribe(room=7), px.inbox()
        await subscription.ready()
        await inbox.ready()
        await px.room(7).send(b"hello")
        await px.user(7).mail(b"hello")
        return px, subscription, inbox

    await cluster.start(proxies=2, gateways=1)
    await leaves_nothing(cluster.target, use)


class Others(wire_pb2_grpc.PresenceServicer):
    """Knows no topic, and never answers who is online."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def Describe(self, request: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.NOT_FOUND, "there is none")
        raise AssertionError("abort raises")

    async def Query(self, request: wire_pb2.PresenceRequest, context: Any) -> wire_pb2.PresenceReply:
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")


@pytest.fixture
async def others(cluster: Any) -> Others:
    """A cluster with one proxy that serves these, too."""
    await cluster.start()
    proxy, servicer, server = cluster.proxies[0], Others(), grpc.aio.server()
    await proxy.kill()
    wire_pb2_grpc.add_PublisherServicer_to_server(proxy, server)
    wire_pb2_grpc.add_PresenceServicer_to_server(servicer, server)
    methods: dict[str, Any] = {"Describe": grpc.unary_unary_rpc_method_handler(servicer.Describe)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("pixiu.v1.Topics", methods),))
    assert server.add_insecure_port(proxy.address)
    await server.start()
    proxy.server = server
    return servicer


async def test_the_error_of_a_call_keeps_no_connection(cluster: Any, others: Others) -> None:
    async def use(px: pixiu.Client) -> object:
        with pytest.raises(UnknownTopic) as unknown:
            await px.topics.describe("orders")
        return unknown

    await leaves_nothing(cluster.target, use)


async def test_a_cancelled_call_keeps_no_connection(cluster: Any, others: Others) -> None:
    async def use(px: pixiu.Client) -> object:
        asking = asyncio.create_task(px.presence([7]))
        await others.asked.wait()
        asking.cancel()
        await asyncio.wait({asking})
        return asking

    await leaves_nothing(cluster.target, use)
