"""Drives the doubling of Pi through its phases, as an operator's tool does: of whoever leads, again and again until it is so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc.aio

from cluster.wire.v1 import doubling_pb2 as pb
from cluster.wire.v1 import doubling_pb2_grpc as pb_grpc
from pixiu.discovery.paths import DEFAULT_ROOT
from registry.layout import begin_doubling, commit_doubling
from tests.support.roles import Roles
from tests.support.waiting import until

ANSWER_S = 10.0


class PiDoubling:
    """One doubling, of n partitions.

    Args:
        roles: of the processes.
        names: of the replicas of each partition, of the children too.
        doubling: its ID.
    """

    def __init__(self, roles: Roles, names: dict[int, tuple[str, ...]], doubling: int = 0xD0) -> None:
        self._roles, self._names, self.doubling = roles, names, doubling
        self.partitions = len(names)

    @property
    def parents(self) -> range:
        """Partitions that are split."""
        return range(self.partitions // 2)

    @property
    def children(self) -> range:
        """Partitions that are new."""
        return range(self.partitions // 2, self.partitions)

    async def begin(self) -> None:
        """Name it in the layout: children may start then."""
        await begin_doubling(self._roles.zookeeper, DEFAULT_ROOT, "pi", f"{self.doubling:016x}")

    async def commit(self) -> None:
        """Make the number of partitions the layout's."""
        await commit_doubling(self._roles.zookeeper, DEFAULT_ROOT, "pi", f"{self.doubling:016x}")

    async def _ask(self, partition: int, ask: Callable[[Any], Any]) -> pb.DoublingStatus:
        """An answer of the partition's leader."""
        found: list[pb.DoublingStatus] = []
        why = ""

        async def answered() -> bool:
            nonlocal why
            for name in self._names[partition]:
                try:
                    node = await self._roles.node(name)
                except AssertionError:  # it was killed
                    continue
                if node is None:
                    continue
                async with grpc.aio.insecure_channel(node.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
                    try:
                        found.append(await ask(pb_grpc.DoublingStub(channel)))  # type: ignore[no-untyped-call, unused-ignore]
                    except grpc.aio.AioRpcError as error:
                        why = str(error.details())
                    else:
                        return True
            return False

        await until(answered, f"an answer of pi partition {partition} ({why})")
        return found[0]

    async def status(self, partition: int) -> pb.DoublingStatus:
        """Where a partition stands."""
        request = pb.DoublingStatusRequest(doubling=self.doubling)
        return await self._ask(partition, lambda stub: stub.Status(request, timeout=ANSWER_S))

    async def advance(self, partition: int, phase: pb.DoublingPhase.ValueType) -> pb.DoublingStatus:
        """Take a partition to a phase."""
        request = pb.DoublingAdvanceRequest(doubling=self.doubling, partitions=self.partitions, phase=phase, operator="test")
        return await self._ask(partition, lambda stub: stub.Advance(request, timeout=ANSWER_S))

    async def reach(self, partition: int, wanted: Callable[[pb.DoublingStatus], bool], what: str) -> pb.DoublingStatus:
        """Wait for a status."""
        last = await self.status(partition)

        async def reached() -> bool:
            nonlocal last
            last = await self.status(partition)
            return wanted(last)

        if not wanted(last):
            await until(reached, f"partition {partition}: {what}")
        return last

    async def learn(self) -> None:
        """Children learn until they have what their parents had when this was called."""
        for child in self.children:
            await self.advance(child, pb.DOUBLING_LEARNING)
        for child in self.children:
            committed = (await self.status(child - self.parents.stop)).committed
            await self.reach(child, lambda status, committed=committed: status.learned >= committed, "caught up")  # type: ignore[misc]

    async def cut(self) -> None:
        """Split all parents; their children open by themselves."""
        await asyncio.gather(*(self.advance(parent, pb.DOUBLING_SPLIT) for parent in self.parents))
        for child in self.children:
            await self.reach(child, lambda status: status.phase in (pb.DOUBLING_OPEN, pb.DOUBLING_NONE), "open")

    async def digests(self) -> list[tuple[int, int]]:
        """Of what moved, of each parent and its child; waits until they are known."""
        known = [await self.reach(p, lambda status: status.digest != 0, "its digest") for p in range(self.partitions)]
        return [(known[p].digest, known[p + len(self.parents)].digest) for p in self.parents]

    async def clean(self) -> None:
        """Parents delete what moved; children are partitions as others."""
        for parent in self.parents:
            await self.advance(parent, pb.DOUBLING_CLEANING)
        for partition in range(self.partitions):
            await self.reach(partition, lambda status: status.phase == pb.DOUBLING_NONE, "over")
