"""Replicas with one fault each, put back into the production core: what the simulation must find."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from cluster.replication.core.context import Context
from cluster.replication.core.core import Core
from cluster.replication.core.events import Committed, Effect
from cluster.replication.core.follower import Follower
from cluster.replication.core.insync import InSync
from cluster.replication.core.leader import Leader, Mode, Progress
from cluster.replication.core.messages import Append, Mismatch
from cluster.replication.model import Entry, MemberID, PartitionState


class _OnlyZooKeepersSet(Leader):
    def required(self) -> frozenset[MemberID]:
        return self.in_sync.state.in_sync


class NoMaximalSet(Core):
    """A proposed member is required only when ZooKeeper's answer has come."""

    def make_leader(self, version: int, state: PartitionState, start: int, now: float) -> Leader:
        return _OnlyZooKeepersSet(self.context, version, state, start, now)


class _AnswersAnyway(Leader):
    def _commit(self, now: float, out: list[Effect]) -> None:
        before = len(out)
        super()._commit(now, out)
        out[before:] = [
            replace(each, copies=len(self.required())) if isinstance(each, Committed) else each for each in out[before:]
        ]


class AnswersBelowMinimum(Core):
    """What is committed is confirmed, on however few disks."""

    def make_leader(self, version: int, state: PartitionState, start: int, now: float) -> Leader:
        return _AnswersAnyway(self.context, version, state, start, now)


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


class _HearsEverything(Leader):
    def on_mismatch(self, reply: Mismatch, now: float, out: list[Effect]) -> None:
        super().on_mismatch(reply, now, out)
        if reply.sender in self.followers:
            self.followers[reply.sender].heard_at = now


class AnyAnswerIsProgress(Core):
    """A follower that answers is not silent, whatever it answers."""

    def make_leader(self, version: int, state: PartitionState, start: int, now: float) -> Leader:
        return _HearsEverything(self.context, version, state, start, now)


class _SeesSilenceOnly(Leader):
    def unfit(self, now: float) -> list[MemberID]:
        return self.silent(now)


class NeverSlow(Core):
    """Only silence puts a member out."""

    def make_leader(self, version: int, state: PartitionState, start: int, now: float) -> Leader:
        return _SeesSilenceOnly(self.context, version, state, start, now)


class _Forgets(Leader):
    def _rest(self, left: Collection[MemberID]) -> None:
        return

    def _is_steady(self, progress: Progress) -> bool:
        near = progress.matched >= self.context.log.last.counter - self.context.options.join_within
        return near and progress.mode is Mode.STREAMING


class NoRest(Core):
    """A member that was put out is required again as soon as it is near."""

    def make_leader(self, version: int, state: PartitionState, start: int, now: float) -> Leader:
        return _Forgets(self.context, version, state, start, now)


class _FollowsAnybody(Follower):
    def check_history(self, message: Append) -> None:
        return


class FollowsAnybody(Core):
    """What was trimmed here is taken to be in every leader's log."""

    def make_follower(self, now: float) -> Follower:
        return _FollowsAnybody(self.context, now)


class _TrustsItsClock(Leader):
    def _time_us(self, wall_us: int, now: float) -> int | None:
        self.context.clock.saw(wall_us, now)
        return self.context.clock.wall_us(now)


class TrustsItsClock(Core):
    """Whoever leads takes its wall clock for the time."""

    def make_leader(self, version: int, state: PartitionState, start: int, now: float) -> Leader:
        return _TrustsItsClock(self.context, version, state, start, now)


class _AsksNobody(Leader):
    def _time_us(self, wall_us: int, now: float) -> int | None:
        clock = self.context.clock
        clock.saw(wall_us, now)
        if clock.agreed is None:
            clock.judge(())
        return clock.time_us(now)


class AsksNobody(Core):
    """A leader that has heard no time writes before it knows the others' clocks."""

    def make_leader(self, version: int, state: PartitionState, start: int, now: float) -> Leader:
        return _AsksNobody(self.context, version, state, start, now)


class _NoHeirs(Leader):
    def heirs(self, now: float) -> list[MemberID]:
        return super().heirs(now) if self.draining else []


class NoHeirs(Core):
    """A leader without space keeps the office."""

    def make_leader(self, version: int, state: PartitionState, start: int, now: float) -> Leader:
        return _NoHeirs(self.context, version, state, start, now)


class EndsForAnOldSegment(Core):
    """A segment that cannot be read ends the replica, also when all that it held is in the state."""

    def _drop_rotten(self, last: int, reason: str, out: list[Effect]) -> bool:
        return False


class Faithful(Core):
    """A follower confirms its leader for as long as it hears it."""

    def _forsakes(self, epoch: int, now: float) -> bool:
        return False
