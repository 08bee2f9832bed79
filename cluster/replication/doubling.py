"""The gRPC service by which the operator's tool doubles Xiu and Pi: the leader of a partition takes it from phase to phase.

What the phases do is the role's: it takes its partition there, and says where it stands.

Source: docs/doubling.md.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import grpc.aio

from cluster.replication.replica import Replica
from cluster.runtime.export import abort
from pixiu.errors import InvalidArgument, PixiuError, Unavailable
from pixiu.placement.partition import is_partition_count
from pixiu.wire.v1 import doubling_pb2, doubling_pb2_grpc

MAX_TEXT: Final = 512
"""Of what an operator says of himself."""
PHASES: Final = frozenset(doubling_pb2.DoublingPhase.values()) - {doubling_pb2.DOUBLING_NONE}


def phase_samples(phase: int) -> dict[str, int]:
    """Samples for metrics: 1 for the phase in which a partition is, 0 for the others, by name."""
    return {name.removeprefix("DOUBLING_").lower(): int(number == phase) for name, number in doubling_pb2.DoublingPhase.items()}


class Doubled(Protocol):
    """What the service needs of a role. All are asked of a leader."""

    async def advance_doubling(self, request: doubling_pb2.DoublingAdvanceRequest) -> None:
        """Take the partition to a phase, of a request whose fields are within bounds; nothing to do where it is there, or beyond.
        Raises PixiuError."""

    async def take_back_doubling(self, request: doubling_pb2.DoublingTakeBackRequest) -> None:
        """See that nothing which was asked for before splits the partition. Raises PixiuError where it is split."""

    async def doubling_status(self) -> doubling_pb2.DoublingStatus:
        """Where the partition stands, of what is committed; a SPLIT counts from its append on. Raises PixiuError."""


class DoublingService(doubling_pb2_grpc.DoublingServicer):
    """The gRPC service `pixiu.v1.Doubling` of a replicated role.

    Args:
        server: of the process.
        replica: of the partition.
        role: knows the phases.
    """

    def __init__(self, server: grpc.aio.Server, replica: Replica, role: Doubled) -> None:
        self._replica, self._role = replica, role
        doubling_pb2_grpc.add_DoublingServicer_to_server(self, server)

    async def Status(
        self, request: doubling_pb2.DoublingStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> doubling_pb2.DoublingStatus:
        """Where the doubling of the partition stands."""
        try:
            return await self._status()
        except PixiuError as error:
            await abort(context, error)

    async def Advance(
        self, request: doubling_pb2.DoublingAdvanceRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> doubling_pb2.DoublingStatus:
        """Go on to a phase."""
        try:
            return await self._advance(request)
        except PixiuError as error:
            await abort(context, error)

    async def TakeBack(
        self, request: doubling_pb2.DoublingTakeBackRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> doubling_pb2.DoublingStatus:
        """Keep a parent whole, whatever was sent to split it."""
        try:
            self._check(request)
            await self._role.take_back_doubling(request)
            return await self._status()
        except PixiuError as error:
            await abort(context, error)

    async def _status(self) -> doubling_pb2.DoublingStatus:
        self._replica.check_leader()
        status = await self._role.doubling_status()
        if not self._replica.lease_valid():
            raise Unavailable(
                "this replica cannot tell yet whether it still leads and has applied everything; try again in a moment"
            )
        return status

    async def _advance(self, request: doubling_pb2.DoublingAdvanceRequest) -> doubling_pb2.DoublingStatus:
        if request.phase not in PHASES:
            raise InvalidArgument("a doubling goes on to a phase that is not NONE")
        self._check(request)
        await self._role.advance_doubling(request)
        return await self._status()

    def _check(self, request: doubling_pb2.DoublingAdvanceRequest | doubling_pb2.DoublingTakeBackRequest) -> None:
        if not request.doubling or not is_partition_count(request.partitions):
            raise InvalidArgument("a doubling has an ID, and a power of two of partitions")
        if not 0 < len(request.operator) <= MAX_TEXT:
            raise InvalidArgument(f"operator has 1 to {MAX_TEXT} characters")
        self._replica.check_leader()
