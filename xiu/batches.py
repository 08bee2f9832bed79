"""Writers' batches without an answer, by what they wait for. Pure.

    ──▶ asking: the parent's answer ──▶ proposed ──▶ accepted ──┬──▶ persisting ──▶ answer
                                                                └──▶ committing ──▶ answer

Source: docs/promises.md, docs/doubling.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from pixiu.wire.levels import Level
from xiu import events as ev
from xiu.records.asking import Asking


@dataclass(slots=True)
class Batch:
    """A writer's batch in progress."""

    stream: int
    position: int
    level: Level
    runs: list[tuple[int, int]]
    """(index in the batch, records) of each entry."""
    refused: list[ev.Result]
    """Refused before the log."""
    results: list[ev.Result]
    elsewhere: int | None = None
    """Number of disks with its records that the parent has; None: the parent has none."""

    def unknown(self, code: str, why: str) -> list[ev.Result]:
        """Results of a batch whose entries may commit or not."""
        text = f"{why}; whether it was stored is unknown: send again with the same SnowflakeIDs"
        return [*self.refused, *(ev.Result(self.position + index, count, code, text=text) for index, count in self.runs)]


class Batches:
    """All batches whose writers wait. Bounded by the streams' windows."""

    def __init__(self) -> None:
        self.asking: Asking[Batch] = Asking()
        self._token = 0
        self._proposed: dict[int, Batch] = {}
        self._persisting: deque[tuple[int, Batch]] = deque()
        self._committing: deque[tuple[int, Batch]] = deque()

    def __len__(self) -> int:
        return len(self.asking) + len(self._proposed) + len(self._persisting) + len(self._committing)

    def new_token(self) -> int:
        """Return the number of the next proposal or question."""
        self._token += 1
        return self._token

    def propose(self, batch: Batch) -> int:
        """Add a batch on its way into the log; return its token."""
        token = self.new_token()
        self._proposed[token] = batch
        return token

    def take(self, token: int) -> Batch | None:
        """Remove a batch that the log has accepted or refused; None: no writer waits."""
        return self._proposed.pop(token, None)

    def wait(self, batch: Batch, counter: int) -> None:
        """Have a batch wait until its last entry is as safe as its level says."""
        (self._persisting if batch.level is Level.PERSISTED else self._committing).append((counter, batch))

    def persisted(self, counter: int) -> Iterator[Batch]:
        """Remove batches that wait for the leader's disk, up to a counter."""
        return _up_to(self._persisting, counter)

    def committed(self, counter: int) -> Iterator[Batch]:
        """Remove batches that wait for their commit, up to a counter."""
        return _up_to(self._committing, counter)

    def drop(self) -> list[Batch]:
        """Remove all; return them."""
        lost = [*self.asking.drop(), *self._proposed.values(), *(batch for _, batch in (*self._persisting, *self._committing))]
        self._proposed.clear()
        self._persisting.clear()
        self._committing.clear()
        return lost


def _up_to(waiting: deque[tuple[int, Batch]], counter: int) -> Iterator[Batch]:
    while waiting and waiting[0][0] <= counter:
        yield waiting.popleft()[1]
