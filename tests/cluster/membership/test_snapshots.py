"""Taking snapshots over gRPC from a server that the test plays, and telling stale senders."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from cluster.core.layout_notices import MAX_NOTICED, LayoutNotices
from cluster.membership.map.updates import Chunk
from cluster.membership.member.snapshot_client import SnapshotReader
from cluster.wire.v1 import control_pb2, membership_pb2, membership_pb2_grpc
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.view import View
from pixiu.ids import EndpointID

ROUTER = EndpointID(10)


class Server(membership_pb2_grpc.MembershipServicer):
    """Sends `parts` chunks, then ends as `ending` says."""

    def __init__(self, parts: int, ending: str) -> None:
        self.parts, self.ending = parts, ending
        self.requests: list[membership_pb2.SnapshotRequest] = []
        self.cancelled = asyncio.Event()

    async def Snapshot(
        self, request: membership_pb2.SnapshotRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[membership_pb2.SnapshotChunk]:
        self.requests.append(request)
        for i in range(self.parts):
            yield membership_pb2.SnapshotChunk(entries=bytes([i]) * 24)
        if self.ending == "refuse":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this router is Syncing")
        if self.ending == "hang":
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        if self.ending == "last":
            yield membership_pb2.SnapshotChunk(tombstones=b"t" * 24, last=True)


class Asker:
    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.finished: list[str | None] = []
        self.reader = SnapshotReader(EndpointID(5), "broker", lambda _, chunk: self.chunks.append(chunk), self._finish)

    def _finish(self, source: EndpointID, error: str | None) -> None:
        assert source == ROUTER
        self.finished.append(error)

    async def done(self, count: int = 1) -> None:
        async with asyncio.timeout(60):
            while len(self.finished) < count:
                await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(service: Server) -> AsyncIterator[View]:
    server = grpc.aio.server()
    membership_pb2_grpc.add_MembershipServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        node = Node("router", 0, 0, NodeState.RUNNING, "127.0.0.1", port, 0, ROUTER, 1, "", "", 0)
        yield View(nodes=(node,))
    finally:
        await server.stop(None)


async def test_every_part_arrives_in_order_and_the_request_names_the_asker() -> None:
    service, asker = Server(3, "last"), Asker()
    async with serving(service) as view:
        asker.reader.take(ROUTER, view, 2, 4)
        await asker.done()
        await asker.reader.close()
    assert asker.finished == [None]
    assert [chunk.entries[:1] for chunk in asker.chunks] == [b"\0", b"\1", b"\2", b""]
    assert asker.chunks[-1].tombstones == b"t" * 24
    (request,) = service.requests
    assert (request.endpoint, request.role, request.partition, request.partitions) == (5, "broker", 2, 4)


@pytest.mark.parametrize(("ending", "says"), [("end", "before its last part"), ("refuse", "this router is Syncing")])
async def test_what_is_not_complete_has_failed(ending: str, says: str) -> None:
    asker = Asker()
    async with serving(Server(2, ending)) as view:
        asker.reader.take(ROUTER, view, 0, 1)
        await asker.done()
        await asker.reader.close()
    (error,) = asker.finished
    assert error is not None
    assert says in error


async def test_a_router_that_nobody_reaches_or_that_is_not_in_the_view_fails() -> None:
    asker = Asker()
    async with serving(Server(0, "last")) as view:
        pass
    asker.reader.take(ROUTER, view, 0, 1)
    await asker.done(1)
    asker.reader.take(ROUTER, View(), 0, 1)
    await asker.done(2)
    await asker.reader.close()
    assert asker.finished[0] is not None
    assert asker.finished[1] == "the router is no longer in the registry"


async def test_a_new_snapshot_from_a_router_ends_the_one_before_without_a_word() -> None:
    asker, hanging = Asker(), Server(1, "hang")
    async with serving(hanging) as view:
        asker.reader.take(ROUTER, view, 0, 1)
        async with asyncio.timeout(60):
            while not asker.chunks:
                await asyncio.sleep(0.005)
        async with serving(Server(1, "last")) as other:
            asker.reader.take(ROUTER, other, 0, 1)
            await asker.done()
            async with asyncio.timeout(60):
                await hanging.cancelled.wait()
    await asker.reader.close()
    assert asker.finished == [None]


async def test_closing_ends_what_is_under_way_without_a_word() -> None:
    asker, hanging = Asker(), Server(1, "hang")
    async with serving(hanging) as view:
        asker.reader.take(ROUTER, view, 0, 1)
        async with asyncio.timeout(60):
            while not asker.chunks:
                await asyncio.sleep(0.005)
        await asker.reader.close()
    assert asker.finished == []


def test_a_stale_sender_is_told_once_a_second() -> None:
    notices = LayoutNotices()
    first = notices.due(EndpointID(1), 7, 100.0)
    assert first is not None
    assert control_pb2.Control.FromString(first).layout_notice.version == 7
    assert notices.due(EndpointID(1), 7, 100.9) is None
    assert notices.due(EndpointID(2), 7, 100.9) is not None
    assert notices.due(EndpointID(1), 8, 101.0) is not None


def test_many_stale_senders_do_not_fill_the_memory() -> None:
    notices = LayoutNotices()
    for number in range(MAX_NOTICED + 1):
        assert notices.due(EndpointID(number), 1, 0.0) is not None
    assert notices.due(EndpointID(MAX_NOTICED), 1, 0.5) is None
    assert notices.due(EndpointID(0), 1, 0.5) is not None
