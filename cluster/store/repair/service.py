"""The gRPC service by which operators check, repair and compare replicas, and replicas ask one another.

    replica ── a mark ──▶ leader ── digests its state there ──┐
        └── digests its own meanwhile ────────────────────────┴─▶ the ranges that differ

Writes go on meanwhile. A difference is the replica's fault by definition: the leader's state is what users read.

Source: docs/replication.md.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

import grpc
import grpc.aio

from cluster.process.context import Context
from cluster.replication.replica import Replica
from cluster.store.repair.digests import Digests
from cluster.store.repair.repairer import StoreRepairer
from cluster.wire.v1 import repair_pb2 as pb
from cluster.wire.v1 import repair_pb2_grpc as pb_grpc
from pixiu.errors import MalformedData, Overloaded, Unavailable
from pixiu.rpc.channels import PEER_CHANNEL
from pixiu.rpc.tls import Tls, peer_channel

READ_S: Final = 3600.0
"""Time limit for reading all of a state, seconds."""
LEADER_S: Final = 10.0
"""Time limit for finding a leader, seconds."""
LEADER_POLL_S: Final = 0.1
MAX_DIGESTS_BYTES: Final = 64 << 20
"""Limit of an answer with digests."""
NAMED: Final = 8
"""Ranges named in a text."""

Call = grpc.aio.ServicerContext[Any, Any]


class RepairService(pb_grpc.RepairServicer):
    """The gRPC service `pixiu.v1.Repair` of a replicated role.

    Args:
        context: of the process.
        replica: the partition's replica.
        repairer: of its state.
    """

    def __init__(self, context: Context[Any], replica: Replica, repairer: StoreRepairer) -> None:
        self._role, self._tls, self._replica, self._repairer = context.role, context.tls, replica, repairer
        self._verifying = asyncio.Lock()
        pb_grpc.add_RepairServicer_to_server(self, context.server)

    async def Verify(self, request: pb.VerifyRequest, context: Call) -> pb.VerifyReply:
        """Check everything stored, and repair it."""
        self._check_open()
        if self._verifying.locked():
            raise Overloaded("this replica is being checked already; wait for it to end")
        async with self._verifying:
            return await self._repairer.verify(request.repair)

    async def Compare(self, request: pb.CompareRequest, context: Call) -> pb.CompareReply:
        """Compare this state with the leader's."""
        self._check_open()
        address = await self._leader()
        if not address:
            return pb.CompareReply()
        mark = self._repairer.mark()
        own = asyncio.create_task(self._repairer.digests(mark, leads=False))
        try:
            theirs = await _ask(address, self._role, self._tls, mark)
            mine = await own
        finally:
            own.cancel()
            await asyncio.gather(own, return_exceptions=True)
        if mine.position != theirs.position:
            raise MalformedData(f"the leader's mark is at {theirs.position}, here it is at {mine.position}")
        differing = mine.differing(theirs)
        if not differing:
            return pb.CompareReply()
        text = f"at {mine.position} the state differs from the leader's, in ranges {differing[:NAMED]} of {self._repairer.RANGES}"
        restarts = request.repair and await self._repairer.begin_again(text)
        return pb.CompareReply(differing=differing, text=text, restarts=restarts)

    async def Digest(self, request: pb.StateDigestRequest, context: Call) -> pb.StateDigestReply:
        """Return the digests of this leader's state at a mark."""
        self._check_open()
        found = await self._repairer.digests(request.mark, leads=True)
        return pb.StateDigestReply(position=found.position, floor=found.floor, sums=found.sums)

    async def GiveUp(self, request: pb.GiveUpRequest, context: Call) -> pb.GiveUpReply:
        """Give up values that no replica has."""
        self._check_open()
        values, lost = await self._repairer.give_up(request.operator, request.reason)
        return pb.GiveUpReply(values=values, lost=lost)

    def _check_open(self) -> None:
        if not self._repairer.opened:
            raise Unavailable("this replica is not open; try again soon")

    async def _leader(self) -> str:
        """Return the leader's address; empty: this replica leads."""
        limit = time.monotonic() + LEADER_S
        while not self._replica.is_leader:
            if address := self._replica.leader_address:
                return address
            if time.monotonic() > limit:
                raise Unavailable("this partition has no leader to compare with")
            await asyncio.sleep(LEADER_POLL_S)
        return ""


async def _ask(address: str, role: str, tls: Tls | None, mark: int) -> Digests:
    options = [*PEER_CHANNEL, ("grpc.max_receive_message_length", MAX_DIGESTS_BYTES)]
    async with peer_channel(address, role, tls, options) as channel:
        stub: Any = pb_grpc.RepairStub(channel)
        try:
            reply = await stub.Digest(pb.StateDigestRequest(mark=mark), timeout=READ_S)
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"the leader {address} gives no digest: {error.details()}") from error
        return Digests(reply.position, dict(reply.sums), reply.floor)
