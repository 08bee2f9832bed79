"""Partitions with logs, as far as a doubling concerns them: they follow the diagram of docs/doubling.md and refuse the rest."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.wire.v1 import doubling_pb2 as pb
from pixiu.discovery.view import View
from pixiu.errors import InvalidArgument, Unavailable

MOVES = {
    (pb.DOUBLING_NONE, pb.DOUBLING_LEARNING),
    (pb.DOUBLING_LEARNING, pb.DOUBLING_OPEN),
    (pb.DOUBLING_LEARNING, pb.DOUBLING_NONE),
    (pb.DOUBLING_NONE, pb.DOUBLING_SPLIT),
    (pb.DOUBLING_SPLIT, pb.DOUBLING_CLEANING),
}


@dataclass
class Partition:
    """One partition's log."""

    committed: int = 0
    learned: int = 0
    split_at: int = 0
    doubling: int = 0
    phase: pb.DoublingPhase.ValueType = pb.DOUBLING_NONE
    keys: int = 0
    digest: int = 0
    fence: int = 0


class Stores:
    """Partitions 0 to n - 1 with entries, and the empty ones that a doubling makes.

    Args:
        pace: entries that a child learns, and keys that a parent deletes, between two looks; parents get a tenth of it.
    """

    def __init__(self, n: int, entries: int, pace: int = 700) -> None:
        self.n = n
        self.pace = pace
        self.partitions = {p: Partition(entries if p < n else 0) for p in range(2 * n)}
        self.history: list[tuple[int, pb.DoublingPhase.ValueType]] = []
        self.silent: set[int] = set()
        self.late: list[tuple[int, pb.DoublingAdvanceRequest]] | None = None
        """SPLITs that are on their way, where they come late."""

    def child(self, parent: int) -> Partition:
        """Of a parent."""
        return self.partitions[parent + self.n]

    def go_on(self) -> None:
        """Time passes."""
        for number in range(self.n):
            parent, child = self.partitions[number], self.child(number)
            if parent.phase == pb.DOUBLING_NONE:
                parent.committed += self.pace // 10
            if child.phase == pb.DOUBLING_LEARNING:
                child.learned = min(child.learned + self.pace, parent.committed)
                if parent.split_at and child.learned >= parent.split_at:
                    child.digest = parent.digest
            if parent.phase == pb.DOUBLING_CLEANING:
                parent.keys = max(parent.keys - self.pace, 0)
                if not parent.keys:
                    parent.phase = pb.DOUBLING_NONE

    def said(self, number: int) -> pb.DoublingStatus:
        """What the leader of a partition says. Raises `Unavailable` while it is silent."""
        if number in self.silent:
            raise Unavailable("no leader")
        one = self.partitions[number]
        return pb.DoublingStatus(
            doubling=one.doubling, phase=one.phase, committed=one.committed, split_at=one.split_at, learned=one.learned,
            keys=one.keys, digest=one.digest, partitions=2 * self.n if one.doubling else 0, fence=one.fence,
        )  # fmt: skip

    def go_to(self, number: int, doubling: int, phase: pb.DoublingPhase.ValueType) -> None:
        """Raises `InvalidArgument` for what the diagram has not, and what would lose entries."""
        one = self.partitions[number]
        now = one.phase if one.doubling == doubling else pb.DOUBLING_NONE
        if now == phase:
            return
        if (now, phase) not in MOVES or (number < self.n) != (phase in (pb.DOUBLING_SPLIT, pb.DOUBLING_CLEANING)):
            raise InvalidArgument(f"partition {number} goes from {now} to {phase}")
        if phase == pb.DOUBLING_OPEN:
            parent = self.partitions[number - self.n]
            assert parent.split_at, "a child serves while its parent does"
            assert one.learned >= parent.split_at, "a child serves without all of its parent's entries"
        if phase == pb.DOUBLING_LEARNING:
            one.learned = 0
        if phase == pb.DOUBLING_SPLIT:
            one.committed += 1
            one.split_at, one.digest, one.keys = one.committed, 7 + number, one.committed // 2
        one.doubling, one.phase = doubling, phase
        self.history.append((number, phase))

    # As the tool asks.

    async def status(self, view: View, partition: int, doubling: int) -> pb.DoublingStatus:
        """See `ops.doubling.tool.Leaders`."""
        self.go_on()
        return self.said(partition)

    async def advance(self, view: View, partition: int, request: pb.DoublingAdvanceRequest) -> pb.DoublingStatus:
        """The same."""
        assert request.partitions == 2 * self.n
        if partition in self.silent:
            raise Unavailable("no leader")
        if request.phase == pb.DOUBLING_SPLIT and request.fence != self.partitions[partition].fence:
            raise Unavailable("it was taken back")
        if request.phase == pb.DOUBLING_SPLIT and self.late is not None:
            self.late.append((partition, request))
            raise Unavailable("no answer in time")
        self.go_to(partition, request.doubling, request.phase)
        return self.said(partition)

    async def take_back(self, view: View, partition: int, request: pb.DoublingTakeBackRequest) -> pb.DoublingStatus:
        """The same."""
        one = self.partitions[partition]
        if partition in self.silent:
            raise Unavailable("no leader")
        if one.doubling == request.doubling:
            raise InvalidArgument("it is split")
        one.committed += 1
        one.fence = one.committed
        return self.said(partition)
