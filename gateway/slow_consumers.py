"""The slow clients of a gateway: a timer for those that catch up in batches, and one that finds those that do not at all.

Only clients that are behind are here, so that the others cost nothing. How far they are behind is told by a clock that stands
still while the event loop is late: a gateway that gets no CPU writes nothing, and must not hold that against its clients.

Source: docs/promises.md, "Failure rules" 3; the grades are those of `gateway.backlog`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from gateway.backlog import BATCH_S, Grade

CHECK_S: Final = 0.25
"""How often every slow client is looked at."""


def _ignore(_seconds: float) -> None:
    pass


class Slow(Protocol):
    """A connection that is behind."""

    id: int

    def catch_up(self) -> None:
        """Write what waits, as far as the client takes it."""

    def check(self, now: float) -> Grade:
        """How far it is behind; ends the connection when that has lasted too long."""


class SlowConsumers:
    """Watches slow clients: batches their writes, cuts those that never catch up.

    Args:
        monotonic: seconds.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._due: float | None = None
        """When the next look should come."""
        self._late_s = 0.0
        """By how much all looks came late, together."""
        self._loop = asyncio.get_running_loop()
        self._behind: dict[int, Slow] = {}
        self._grades: dict[int, Grade] = {}
        self._batched: dict[int, Slow] = {}
        self._check: asyncio.TimerHandle | None = None
        self._batch: asyncio.TimerHandle | None = None
        self.entered = dict.fromkeys(Grade, 0)
        """How often a connection came to be of a grade."""
        self.waited: Callable[[float], None] = _ignore
        """Told how long the oldest message had waited when a slow client took what was written, seconds."""

    def now(self) -> float:
        """Seconds without those in which the loop was late, as far as somebody is behind. Never goes back."""
        at = self._monotonic()
        return (at if self._due is None else min(at, self._due)) - self._late_s

    def add(self, connection: Slow) -> None:
        """A connection does not take all that it gets."""
        if connection.id not in self._behind:
            self._behind[connection.id] = connection
            self._note(connection.id, Grade.PROMPT)
        if self._check is None:
            self._look_later()

    def discard(self, connection: Slow) -> None:
        """A connection has caught up, or is gone."""
        self._behind.pop(connection.id, None)
        self._grades.pop(connection.id, None)
        self._batched.pop(connection.id, None)

    def catch_up_in_a_batch(self, connection: Slow) -> None:
        """Let a connection write at the next turn for those that are behind."""
        self._batched[connection.id] = connection
        if self._batch is None:
            self._batch = self._loop.call_later(BATCH_S, self._catch_up)

    def counts(self) -> dict[str, float]:
        """How many connections of each grade there are."""
        found = dict.fromkeys((grade.value for grade in Grade), 0.0)
        for grade in self._grades.values():
            found[grade.value] += 1
        return found

    def close(self) -> None:
        """Cancel the timers."""
        for timer in (self._check, self._batch):
            if timer is not None:
                timer.cancel()

    def _note(self, number: int, grade: Grade) -> None:
        if self._grades.get(number) is not grade:
            self._grades[number] = grade
            self.entered[grade] += 1

    def _catch_up(self) -> None:
        self._batch = None
        batched, self._batched = self._batched, {}
        for connection in batched.values():
            connection.catch_up()

    def _look_later(self) -> None:
        self._due = self._monotonic() + CHECK_S
        self._check = self._loop.call_later(CHECK_S, self._look)

    def _look(self) -> None:
        self._check = None
        if self._due is not None:
            self._late_s += max(self._monotonic() - self._due, 0.0)
            self._due = None
        now = self.now()
        for number, connection in list(self._behind.items()):
            grade = connection.check(now)
            if number in self._behind:
                self._note(number, grade)
        if self._behind:
            self._look_later()
