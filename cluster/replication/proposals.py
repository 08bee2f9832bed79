"""Pending writes: they wait for the leader's disk, for their commit, and for the state machine's answers.

Source: docs/stores.md, docs/replication.md.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pixiu.errors import OutcomeUnknown, PixiuError
from pixiu.wire.levels import Level


@dataclass(frozen=True, slots=True)
class Written:
    """Outcome of a write."""

    epoch: int
    first: int
    """Counter of its first entry; the others follow it."""
    level: Level
    """Level that it has reached; may be above the requested one."""
    copies: int
    """Replicas known to have it on their disks; 0: fewer than `min_in_sync`."""
    answers: Sequence[object]
    """The state machine's answer to each payload; empty below REPLICATED."""


class Proposal:
    """A write in the leader's log.

    Args:
        epoch: the leader's epoch.
        first: counter of its first entry.
        size: number of entries.
    """

    __slots__ = ("_answers", "_error", "_waiting", "copies", "epoch", "first", "last", "level")

    def __init__(self, epoch: int, first: int, size: int) -> None:
        self.epoch, self.first, self.last = epoch, first, first + size - 1
        self.level = Level.ACCEPTED
        self.copies = 0
        self._answers: list[object] = []
        self._error: PixiuError | None = None
        self._waiting: list[tuple[Level, asyncio.Future[None]]] = []

    async def reached(self, level: Level) -> Written:
        """Wait until the write has reached a level. Raises `OutcomeUnknown` if this replica stops leading before that, or if the
        write is applied with fewer disks than `min_in_sync`."""
        written = await self.settled(level)
        if level is Level.REPLICATED and not written.copies:
            raise OutcomeUnknown("fewer than min_in_sync replicas have it; send the write again, with the same IDs")
        return written

    async def settled(self, level: Level) -> Written:
        """Wait like `reached`, but ignore `min_in_sync`: with 0 copies the write must not be reported as replicated."""
        if not self.level.at_least(level):
            if self._error is not None:
                raise self._error
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((level, future))
            await future
        return Written(self.epoch, self.first, self.level, self.copies, self._answers if self.level is Level.REPLICATED else ())

    def rise(self, level: Level, copies: int) -> None:
        """Note that the write has reached a level."""
        self.level, self.copies = level, copies
        for wanted, future in self._waiting:
            if level.at_least(wanted) and not future.done():
                future.set_result(None)

    def answered(self, answers: Sequence[object]) -> None:
        """Add the state machine's answers to its next entries."""
        self._answers += answers

    def fail(self, error: PixiuError) -> None:
        """Fail all waiters: nothing more will be known of the write here."""
        self._error = error
        for _, future in self._waiting:
            if not future.done():
                future.set_exception(error)


class Proposals:
    """Writes of one leader that are not replicated yet, in log order. Bounded by `max_uncommitted` entries."""

    def __init__(self) -> None:
        self._unsynced: deque[Proposal] = deque()
        self._unapplied: deque[Proposal] = deque()

    def __len__(self) -> int:
        return len(self._unapplied)

    def add(self, proposal: Proposal) -> None:
        """Add a proposal that follows all others."""
        self._unsynced.append(proposal)
        self._unapplied.append(proposal)

    def persisted(self, counter: int) -> None:
        """Note that the leader's disk has everything up to this counter."""
        while self._unsynced and self._unsynced[0].last <= counter:
            self._unsynced.popleft().rise(Level.PERSISTED, 1)

    def applied(self, first: int, answers: Sequence[object], copies: int) -> None:
        """Note the answers to the entries applied from a counter on."""
        end = first + len(answers)
        while self._unapplied and self._unapplied[0].first < end:
            proposal = self._unapplied[0]
            begin = max(proposal.first, first)
            proposal.answered(answers[begin - first : proposal.last + 1 - first])
            if proposal.last >= end:
                return
            self._unapplied.popleft().rise(Level.REPLICATED, copies)

    def fail(self, error: PixiuError) -> None:
        """Fail all proposals: this replica no longer leads."""
        failed, self._unapplied = self._unapplied, deque()
        self._unsynced.clear()
        for proposal in failed:
            proposal.fail(error)
