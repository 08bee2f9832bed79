"""Takes snapshots of a router's membership over gRPC, for brokers and for routers.

Source: PiXiu §2.3 step 4, §5.2 step 7, §5.3 step 7 (loading); docs/memberships.md, "Start-up".
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import grpc
import grpc.aio

from cluster.membership.map.updates import Chunk
from cluster.wire.v1 import membership_pb2, membership_pb2_grpc
from pixiu.discovery.view import View
from pixiu.ids import EndpointID
from pixiu.rpc.channels import PEER_CHANNEL
from pixiu.rpc.tls import Tls, peer_channel

CHUNK_TIMEOUT_S: Final = 10.0
"""Time after which a router that sends no chunk has failed, seconds."""
MAX_SNAPSHOTS: Final = 256
"""Snapshots at one time: one for each router partition. Policy: a further one fails at once."""


class SnapshotReader:
    """Takes snapshots, at most one from a router at a time: a new one ends the previous one silently.

    Args:
        endpoint: this process; the router sends it live messages from the moment of the snapshot on.
        role: "broker" or "router".
        on_chunk: called in the event loop for each part.
        on_finished: called once at the end with None, or with the reason of the failure.
        tls: this process's certificates; None: it has none.
    """

    def __init__(
        self,
        endpoint: EndpointID,
        role: str,
        on_chunk: Callable[[EndpointID, Chunk], None],
        on_finished: Callable[[EndpointID, str | None], None],
        tls: Tls | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._role = role
        self._on_chunk = on_chunk
        self._on_finished = on_finished
        self._tls = tls
        self._tasks: dict[EndpointID, asyncio.Task[None]] = {}

    def take(self, source: EndpointID, view: View, partition: int, partitions: int) -> None:
        """Start taking a snapshot; returns at once. The router's address is taken from the view now."""
        before = self._tasks.pop(source, None)
        if before is not None:
            before.cancel()
        node = view.by_endpoint(source)
        place = (node.address, node.role) if node is not None and len(self._tasks) < MAX_SNAPSHOTS else None
        request = membership_pb2.SnapshotRequest(
            endpoint=self._endpoint, role=self._role, partition=partition, partitions=partitions
        )
        self._tasks[source] = asyncio.create_task(self._take(source, place, request))

    async def close(self) -> None:
        """End all snapshots under way, silently."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _take(self, source: EndpointID, place: tuple[str, str] | None, request: membership_pb2.SnapshotRequest) -> None:
        error = "the router is no longer in the registry" if place is None else await self._read(source, *place, request)
        # A cancelled task does not get here, so only the newest one of a source reports.
        del self._tasks[source]
        self._on_finished(source, error)

    async def _read(self, source: EndpointID, address: str, role: str, request: membership_pb2.SnapshotRequest) -> str | None:
        """Read a snapshot. Returns None if it is complete, otherwise the reason why it is not."""
        try:
            async with peer_channel(address, role, self._tls, PEER_CHANNEL) as channel:
                call = membership_pb2_grpc.MembershipStub(channel).Snapshot(request)
                while True:
                    async with asyncio.timeout(CHUNK_TIMEOUT_S):
                        chunk = await call.read()
                    if not isinstance(chunk, membership_pb2.SnapshotChunk):
                        return f"{address} ended the snapshot before its last part"
                    self._on_chunk(source, Chunk(chunk.entries, chunk.tombstones, chunk.values))
                    if chunk.last:
                        return None
        except TimeoutError:
            return f"{address} sent nothing for {CHUNK_TIMEOUT_S:.0f} s"
        except grpc.aio.AioRpcError as error:
            return f"{address}: {error.code().name}: {error.details()}"
