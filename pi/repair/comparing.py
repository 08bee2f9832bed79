"""Comparison of a Pi replica with its leader, at one position of the log.

    replica ── a new mark ──▶ leader ── entry ──▶ log ──▶ both apply it: a view on each
            ◀──── digests of its view ──┘                 the replica's own digests beside them

Writes go on meanwhile. A difference is the replica's fault by definition: the leader's state is what users read.

Source: docs/replication.md.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

import grpc
import grpc.aio

from cluster.replication.replica import Replica
from cluster.wire.v1 import pi_replicas_pb2 as pb
from cluster.wire.v1 import pi_replicas_pb2_grpc as pb_grpc
from pi.repair.repairer import Repairer
from pi.store.digest import Digest
from pi.store.machine import Machine
from pi.store.view import MARK_BYTES, MARK_KIND, View
from pixiu.errors import MalformedData, OutcomeUnknown, Unavailable
from pixiu.ids import MAX_ID
from pixiu.rpc.channels import PEER_CHANNEL
from pixiu.rpc.tls import peer_channel

MARK_S: Final = 30.0
"""Time limit for a replica to apply the mark, seconds."""
READ_S: Final = 3600.0
"""Time limit for reading all of a state, seconds."""
LEADER_S: Final = 10.0
"""Time limit for finding a leader, seconds."""
LEADER_POLL_S: Final = 0.1


class Compared(NamedTuple):
    """Result of a comparison."""

    position: int
    rows: int
    differing: list[int]
    """Ranges of users (`pi.store.digest`)."""


class Comparer:
    """Compares one replica's state with its leader's.

    Args:
        machine: its state.
        replica: its log.
    """

    def __init__(self, machine: Machine, replica: Replica) -> None:
        self._machine, self._replica = machine, replica

    @asynccontextmanager
    async def _expected(self, mark: int) -> AsyncIterator[asyncio.Future[View]]:
        future = self._machine.views.expect(mark)
        try:
            yield future
        finally:
            self._machine.views.forget(mark)

    async def digest(self, mark: int) -> tuple[int, Digest]:
        """Write a mark; return its position and the digest of the state there. Raises NotLeader, Overloaded, Unavailable,
        StorageError."""
        async with self._expected(mark) as future:
            try:
                await self._replica.propose([(MARK_KIND, mark.to_bytes(MARK_BYTES, "little"))])
            except OutcomeUnknown as unknown:
                raise Unavailable("this replica is no longer the leader; compare again") from unknown
            return await self._read(future)

    async def _read(self, future: asyncio.Future[View]) -> tuple[int, Digest]:
        try:
            async with asyncio.timeout(MARK_S):
                view = await asyncio.shield(future)
        except TimeoutError as late:
            raise Unavailable(f"this replica does not reach the mark within {MARK_S:.0f} s; compare again later") from late
        return view.position, await self._machine.digest(view)

    async def compare(self) -> Compared | None:
        """Compare with the leader; None if this replica leads. Raises Unavailable, Overloaded, MalformedData, StorageError."""
        address = await self._leader()
        if not address:
            return None
        mark = secrets.randbelow(MAX_ID) + 1
        async with self._expected(mark) as future:
            own = asyncio.create_task(self._read(future))
            try:
                theirs = await _ask(address, mark)
                position, digest = await own
            finally:
                own.cancel()
                await asyncio.gather(own, return_exceptions=True)
        if position != theirs.position:
            raise MalformedData(f"the leader's mark is at {theirs.position}, here it is at {position}")
        return Compared(position, digest.rows, digest.differing(theirs.digests))

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


async def _ask(address: str, mark: int) -> pb.PiDigestReply:
    async with peer_channel(address, "pi", PEER_CHANNEL) as channel:
        stub: Any = pb_grpc.PiReplicasStub(channel)
        try:
            reply: pb.PiDigestReply = await stub.Digest(pb.PiDigestRequest(mark=mark), timeout=READ_S)
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"the leader {address} gives no digest: {error.details()}") from error
        return reply


DigestContext = grpc.aio.ServicerContext[pb.PiDigestRequest, pb.PiDigestReply]
GiveUpContext = grpc.aio.ServicerContext[pb.PiGiveUpRequest, pb.PiGiveUpReply]
CompareContext = grpc.aio.ServicerContext[pb.PiCompareRequest, pb.PiCompareReply]


class ReplicasService(pb_grpc.PiReplicasServicer):
    """The gRPC service `pixiu.v1.PiReplicas`.

    Args:
        comparer: of this replica.
        repairer: of this replica.
    """

    def __init__(self, comparer: Comparer, repairer: Repairer) -> None:
        self._comparer, self._repairer = comparer, repairer

    async def Digest(self, request: pb.PiDigestRequest, context: DigestContext) -> pb.PiDigestReply:
        """Return the digest of the state at a new mark."""
        if not 0 < request.mark <= MAX_ID:
            raise MalformedData(f"there is no mark {request.mark}")
        position, digest = await self._comparer.digest(request.mark)
        return pb.PiDigestReply(position=position, rows=digest.rows, digests=digest.sums)

    async def Compare(self, request: pb.PiCompareRequest, context: CompareContext) -> pb.PiCompareReply:
        """Compare this state with the leader's."""
        found = await self._comparer.compare()
        if found is None:
            return pb.PiCompareReply(leads=True)
        repairing, (position, rows, differing) = False, found
        if differing and request.repair:
            text = f"after entry {position} the state differs from the leader's, in ranges {differing[:8]} of users"
            repairing = await self._repairer.begin_again(text)
        return pb.PiCompareReply(position=position, rows=rows, differing=differing, repairing=repairing)

    async def GiveUp(self, request: pb.PiGiveUpRequest, context: GiveUpContext) -> pb.PiGiveUpReply:
        """Give up values that no replica has."""
        values, lost = await self._repairer.give_up(request.operator, request.reason)
        return pb.PiGiveUpReply(values=values, lost=lost)
