"""Takes a partition's leader through the phases of a doubling, as the operator's tool does."""

from __future__ import annotations

import grpc.aio

from pixiu.wire.v1 import doubling_pb2, doubling_pb2_grpc
from tests.support.roles import Roles
from tests.support.stores import leader_of
from tests.support.waiting import until

LEARNING, SPLIT, OPEN, CLEANING = (
    doubling_pb2.DOUBLING_LEARNING,
    doubling_pb2.DOUBLING_SPLIT,
    doubling_pb2.DOUBLING_OPEN,
    doubling_pb2.DOUBLING_CLEANING,
)


async def advance(
    roles: Roles, names: set[str], doubling: str, partitions: int, phase: doubling_pb2.DoublingPhase.ValueType
) -> doubling_pb2.DoublingStatus:
    """Ask whoever of these leads, again until the phase is reached."""
    wanted = doubling_pb2.DoublingAdvanceRequest(doubling=int(doubling, 16), partitions=partitions, phase=phase, operator="a test")
    found: list[doubling_pb2.DoublingStatus] = []
    said = ""

    async def reached() -> bool:
        nonlocal said
        name = await leader_of(roles, *sorted(names))
        node = await roles.node(name) if name else None
        if node is None:
            return False
        try:
            found.append(await call(node.address, wanted))
        except grpc.aio.AioRpcError as error:
            said = f"{error.code().name}: {error.details()}"
            return False
        return True

    await until(reached, lambda: f"{names} {phase}: {said}")
    return found[-1]


async def call(address: str, wanted: doubling_pb2.DoublingAdvanceRequest) -> doubling_pb2.DoublingStatus:
    """Ask one replica. Raises gRPC's errors."""
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = doubling_pb2_grpc.DoublingStub(channel)  # type: ignore[no-untyped-call, unused-ignore]
        reply: doubling_pb2.DoublingStatus = await stub.Advance(wanted, timeout=10)
        return reply
