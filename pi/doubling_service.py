"""The gRPC service `pixiu.v1.Doubling` of a Pi: what the operator's tool asks of a partition's leader.

Source: docs/doubling.md.
"""

from __future__ import annotations

from typing import Any

import grpc.aio

from pi.doubler import Doubler
from pixiu.errors import PixiuError
from pixiu.rpc.status import GRPC_STATUS
from pixiu.wire.v1 import doubling_pb2 as pb
from pixiu.wire.v1 import doubling_pb2_grpc as pb_grpc

Call = grpc.aio.ServicerContext[Any, Any]


class DoublingService(pb_grpc.DoublingServicer):
    """Serves it.

    Args:
        doubler: of this replica.
    """

    def __init__(self, doubler: Doubler) -> None:
        self._doubler = doubler

    async def Status(self, request: pb.DoublingStatusRequest, context: Call) -> pb.DoublingStatus:
        """Where the doubling of this partition stands."""
        try:
            return self._doubler.status()
        except PixiuError as error:
            await context.abort(GRPC_STATUS[error.code], f"{error.code}: {error}")

    async def Advance(self, request: pb.DoublingAdvanceRequest, context: Call) -> pb.DoublingStatus:
        """Go on to a phase."""
        try:
            return await self._doubler.advance(request)
        except PixiuError as error:
            await context.abort(GRPC_STATUS[error.code], f"{error.code}: {error}")
