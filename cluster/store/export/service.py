"""The gRPC service by which pipelines read a store, on any replica. The role supplies positions and rows.

Source: docs/pipeline.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, ClassVar

import grpc.aio

from cluster.process.context import Context
from cluster.store.export.export import Exporter, Part
from pixiu.errors import InvalidArgument, Unavailable
from pixiu.wire.export_tables import MAX_USERS, Columns, columns_of
from pixiu.wire.v1 import export_pb2, export_pb2_grpc

Call = grpc.aio.ServicerContext[Any, Any]


class ExportService(export_pb2_grpc.ExportServicer, ABC):
    """Serves `pixiu.v1.Export`. Derive from it per role.

    Args:
        context: of the process; the role's options have `partition` and `export_share`.
    """

    TABLES: ClassVar[Mapping[str, Columns]]
    """Name and columns of each table."""
    reading: AbstractAsyncContextManager[object] = nullcontext()
    """Held while a part is read."""

    def __init__(self, context: Context[Any]) -> None:
        self._context, self._partition = context, context.options.partition
        self.exporter = Exporter(context.options.export_share)
        export_pb2_grpc.add_ExportServicer_to_server(self, context.server)

    @property
    @abstractmethod
    def opened(self) -> bool:
        """True while the state can be read."""

    @abstractmethod
    def bounds(self, request: export_pb2.BoundsRequest) -> export_pb2.BoundsReply:
        """Report bounds of positions. Called in a thread. Raises PixiuError."""

    @abstractmethod
    async def parts(self, request: export_pb2.RowsOfRequest, columns: Columns, users: frozenset[int]) -> Callable[[], Part]:
        """Return a function that reads the next rows of a request, called in a thread. `users`: whose rows are wanted; none:
        everybody's. Raises PixiuError."""

    async def hold(self, reader: str, position: int | None) -> None:
        """Note that retention waits for a reader from a position on; None: no longer. Raises PixiuError."""
        raise InvalidArgument(f"a {self._context.role.capitalize()} has no positions to hold; name readers to a Xiu")

    async def Bounds(self, request: export_pb2.BoundsRequest, context: Call) -> export_pb2.BoundsReply:
        """Report bounds of positions, and the replicas that have them."""
        self._check_open()
        reply = await self.exporter.run(lambda: self.bounds(request))
        view, role = self._context.view, self._context.role
        reply.role, reply.partition, reply.cluster = role, self._partition, view.layout.cluster
        reply.partitions = view.layout.partitions(role) if view.layout.roles else 1
        reply.replicas.extend(
            export_pb2.ExportReplica(partition=node.partition, address=node.address) for node in view.running(role)
        )
        return reply

    async def Rows(self, request: export_pb2.RowsOfRequest, context: Call) -> AsyncIterator[export_pb2.RowsOfReply]:
        """Stream rows in the order of their positions."""
        self._check_open()
        if len(request.users) > MAX_USERS:
            raise InvalidArgument(f"{len(request.users)} users; a request names at most {MAX_USERS}: ask several times")
        columns = columns_of(request.table, request.columns, self.TABLES)
        part = await self.parts(request, columns, frozenset(request.users))
        async for reply in self.exporter.stream(columns, part, self.reading):
            yield reply

    async def Hold(self, request: export_pb2.HoldRequest, context: Call) -> export_pb2.HoldReply:
        """Note a reader; a replica that does not lead refuses."""
        self._check_open()
        await self.hold(request.reader, None if request.release else request.position)
        return export_pb2.HoldReply()

    def _check_open(self) -> None:
        if not self.opened:
            raise Unavailable(f"this {self._context.role.capitalize()} is not open; try again soon")
