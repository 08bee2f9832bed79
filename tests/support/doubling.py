"""Asks a partition's leader for a phase of a doubling, as the operator's tool does."""

from __future__ import annotations

import grpc.aio

from cluster.wire.v1 import doubling_pb2, doubling_pb2_grpc


async def call(address: str, wanted: doubling_pb2.DoublingAdvanceRequest) -> doubling_pb2.DoublingStatus:
    """Ask one replica. Raises gRPC's errors."""
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = doubling_pb2_grpc.DoublingStub(channel)  # type: ignore[no-untyped-call, unused-ignore]
        reply: doubling_pb2.DoublingStatus = await stub.Advance(wanted, timeout=10)
        return reply
