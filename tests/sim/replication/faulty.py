"""Replicas with one fault each, put back into the production core: what the simulation must find."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.replication.context import Context
from cluster.replication.core import Core
from cluster.replication.events import Effect
from cluster.replication.follower import Follower
from cluster.replication.insync import InSync
from cluster.replication.leader import Leader
from cluster.replication.model import Entry, MemberID, PartitionState


class _OnlyZooKeepersSet(Leader):
    def required(self) -> frozenset[MemberID]:
        return self.in_sync.state.in_sync


class NoMaximalSet(Core):
    """A proposed member is required only when ZooKeeper's answer has come."""

    def make_leader(self, version: int, state: PartitionState, start: int, now: float) -> Leader:
        return _OnlyZooKeepersSet(self.context, version, state, start, now)


class _KeepsItsTail(Follower):
    def _take(self, entries: Sequence[Entry]) -> bool:
        log = self.context.log
        new = [entry for entry in entries if entry.counter > log.last.counter]
        if new:
            log.append(new)
        return bool(new)


class NoCutOff(Core):
    """A follower keeps what differs and takes only what is beyond its end."""

    def make_follower(self, now: float) -> Follower:
        return _KeepsItsTail(self.context, now)


class NoFirstEntry(Core):
    """A promotion appends nothing."""

    def open_epoch(self, epoch: int) -> None:
        return


class _ShrinksBeforeItIsWritten(InSync):
    @property
    def maximal(self) -> frozenset[MemberID]:
        return super().maximal - self._leaving


class _Hasty(Leader):
    def __init__(self, context: Context, version: int, state: PartitionState, start: int, now: float) -> None:
        super().__init__(context, version, state, start, now)
        self.in_sync = _ShrinksBeforeItIsWritten(context.member, version, state)


class AcknowledgesBeforeTheShrink(Core):
    """A silent member counts no longer as soon as the compare-and-set has left."""

    def make_leader(self, version: int, state: PartitionState, start: int, now: float) -> Leader:
        return _Hasty(self.context, version, state, start, now)


class _GoesOnAlone(Leader):
    def required(self) -> frozenset[MemberID]:
        return self.in_sync.maximal - set(self.silent(self._now))

    def revise(self, token: int, now: float, out: list[Effect]) -> bool:
        return False if self.silent(now) else super().revise(token, now, out)


class GoesOnAlone(Core):
    """A leader stops waiting for a silent member and tells nobody."""

    def make_leader(self, version: int, state: PartitionState, start: int, now: float) -> Leader:
        return _GoesOnAlone(self.context, version, state, start, now)
