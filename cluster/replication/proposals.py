"""Writes whose commit is awaited, with the state machine's answers.

Source: docs/stores.md, docs/replication.md.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final

from pixiu.errors import OutcomeUnknown, PixiuError

TOO_FEW: Final = "fewer than min_in_sync replicas have it; send the write again, with the same IDs"


class Proposal:
    """A write in the leader's log.

    Args:
        first: counter of its first entry.
        size: number of entries.
    """

    __slots__ = ("_answers", "_error", "_over", "first", "last")

    def __init__(self, first: int, size: int) -> None:
        self.first, self.last = first, first + size - 1
        self._answers: list[object] = []
        self._error: PixiuError | None = None
        self._over = asyncio.Event()

    async def replicated(self) -> Sequence[object]:
        """Wait until the write is applied; return the state machine's answer to each entry. Raises `OutcomeUnknown` if this replica
        stops leading before that, or if the write is applied with fewer disks than `min_in_sync`."""
        await self._over.wait()
        if self._error is not None:
            raise self._error
        return self._answers

    def answered(self, answers: Sequence[object]) -> None:
        """Add the state machine's answers to its next entries."""
        self._answers += answers

    def end(self, error: PixiuError | None = None) -> None:
        """Wake all waiters: the write is replicated, or nothing more will be known of it here."""
        self._error = error
        self._over.set()


class Proposals:
    """Writes of one leader that are not replicated yet, in log order. Bounded by `max_uncommitted` entries."""

    def __init__(self) -> None:
        self._waiting: deque[Proposal] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, proposal: Proposal) -> None:
        """Add a proposal that follows all others."""
        self._waiting.append(proposal)

    def applied(self, first: int, answers: Sequence[object], copies: int) -> None:
        """Note the answers to the entries applied from a counter on."""
        end = first + len(answers)
        while self._waiting and self._waiting[0].first < end:
            proposal = self._waiting[0]
            begin = max(proposal.first, first)
            proposal.answered(answers[begin - first : proposal.last + 1 - first])
            if proposal.last >= end:
                return
            self._waiting.popleft().end(None if copies else OutcomeUnknown(TOO_FEW))

    def fail(self, error: PixiuError) -> None:
        """Fail all proposals: this replica no longer leads."""
        failed, self._waiting = self._waiting, deque()
        for proposal in failed:
            proposal.end(error)
