"""gRPC service for the operator's tool that doubles Xiu and Pi: the leader of a partition takes it from phase to phase.

The role implements the phases: it takes its partition there and reports the current phase.

Source: docs/doubling.md.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import grpc.aio

from cluster.replication.replica import Replica
from cluster.wire.v1 import doubling_pb2, doubling_pb2_grpc
from pixiu.errors import InvalidArgument, Unavailable
from pixiu.placement.partition import is_partition_count

MAX_TEXT: Final = 512
"""Characters of an operator's name or reason."""
PHASES: Final = frozenset(doubling_pb2.DoublingPhase.values()) - {doubling_pb2.DOUBLING_NONE}


def phase_samples(phase: int) -> dict[str, int]:
    """Samples for metrics by name: 1 for the partition's phase, 0 for the others."""
    return {name.removeprefix("DOUBLING_").lower(): int(number == phase) for name, number in doubling_pb2.DoublingPhase.items()}


class Doubled(Protocol):
    """The role's side of the service. All methods are called on a leader."""

    async def advance_doubling(self, request: doubling_pb2.DoublingAdvanceRequest) -> None:
        """Take the partition to a phase; the fields of the request are within bounds. Does nothing if it is there already, or
        beyond. Raises PixiuError."""

    async def take_back_doubling(self, request: doubling_pb2.DoublingTakeBackRequest) -> None:
        """Ensure that no earlier request splits the partition. Raises PixiuError if it is split."""

    async def doubling_status(self) -> doubling_pb2.DoublingStatus:
        """Phase of the partition according to committed entries; a SPLIT counts as soon as it is appended. Raises PixiuError."""


class DoublingService(doubling_pb2_grpc.DoublingServicer):
    """The gRPC service `pixiu.v1.Doubling` of a replicated role.

    Args:
        server: the process's gRPC server.
        replica: the partition's replica.
        role: implements the phases.
    """

    def __init__(self, server: grpc.aio.Server, replica: Replica, role: Doubled) -> None:
        self._replica, self._role = replica, role
        doubling_pb2_grpc.add_DoublingServicer_to_server(self, server)

    async def Status(
        self, request: doubling_pb2.DoublingStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> doubling_pb2.DoublingStatus:
        """Report the phase of the partition."""
        return await self._status()

    async def Advance(
        self, request: doubling_pb2.DoublingAdvanceRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> doubling_pb2.DoublingStatus:
        """Advance to a phase."""
        if request.phase not in PHASES:
            raise InvalidArgument("a doubling goes on to a phase that is not NONE")
        self._check(request)
        await self._role.advance_doubling(request)
        return await self._status()

    async def TakeBack(
        self, request: doubling_pb2.DoublingTakeBackRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> doubling_pb2.DoublingStatus:
        """Keep a parent whole, whatever was sent to split it."""
        self._check(request)
        await self._role.take_back_doubling(request)
        return await self._status()

    async def _status(self) -> doubling_pb2.DoublingStatus:
        self._replica.check_leader()
        status = await self._role.doubling_status()
        if not self._replica.lease_valid():
            raise Unavailable(
                "this replica cannot tell yet whether it still leads and has applied everything; try again in a moment"
            )
        return status

    def _check(self, request: doubling_pb2.DoublingAdvanceRequest | doubling_pb2.DoublingTakeBackRequest) -> None:
        if not request.doubling or not is_partition_count(request.partitions):
            raise InvalidArgument("a doubling has an ID, and a power of two of partitions")
        if not 0 < len(request.operator) <= MAX_TEXT:
            raise InvalidArgument(f"operator has 1 to {MAX_TEXT} characters")
        self._replica.check_leader()
