"""Slow clients of a gateway: a timer for those that catch up in batches, and one that finds those that never catch up.

Only clients that lag are here, so that the others cost nothing. The clock that measures their lag stands still while the event loop
is late: a gateway that gets no CPU writes nothing, and its clients must not be blamed for it.

Source: docs/promises.md, "Failure rules" 3; the grades are those of `gateway.clients.backlog`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from gateway.clients.backlog import BATCH_S, Grade

CHECK_S: Final = 0.25
"""Interval between two checks of every slow client, seconds."""


def _ignore(_seconds: float) -> None:
    pass


class Slow(Protocol):
    """A connection that lags."""

    id: int

    def catch_up(self) -> None:
        """Write what waits, as far as the client takes it."""

    def check(self, now: float) -> Grade:
        """Grade of its lag; ends the connection if that has lasted too long."""


class SlowConsumers:
    """Watches slow clients: batches their writes, ends those that never catch up.

    Args:
        monotonic: seconds.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._due: float | None = None
        """Time at which the next check is due."""
        self._late_s = 0.0
        """Sum of the delays of all checks, seconds."""
        self._loop = asyncio.get_running_loop()
        self._behind: dict[int, Slow] = {}
        self._grades: dict[int, Grade] = {}
        self._batched: dict[int, Slow] = {}
        self._check: asyncio.TimerHandle | None = None
        self._batch: asyncio.TimerHandle | None = None
        self.entered = dict.fromkeys(Grade, 0)
        """Grade → number of times that a connection entered it."""
        self.waited: Callable[[float], None] = _ignore
        """Called when a slow client takes what was written, with the time that the oldest message had waited, seconds."""

    def now(self) -> float:
        """Seconds without those in which the loop was late while a client lagged. Never goes back."""
        at = self._monotonic()
        return (at if self._due is None else min(at, self._due)) - self._late_s

    def add(self, connection: Slow) -> None:
        """Watch a connection that does not take everything."""
        if connection.id not in self._behind:
            self._behind[connection.id] = connection
            self._note(connection.id, Grade.PROMPT)
        if self._check is None:
            self._look_later()

    def discard(self, connection: Slow) -> None:
        """Forget a connection that has caught up, or is gone."""
        self._behind.pop(connection.id, None)
        self._grades.pop(connection.id, None)
        self._batched.pop(connection.id, None)

    def catch_up_in_a_batch(self, connection: Slow) -> None:
        """Let a connection write at the next batch turn."""
        self._batched[connection.id] = connection
        if self._batch is None:
            self._batch = self._loop.call_later(BATCH_S, self._catch_up)

    def counts(self) -> dict[str, float]:
        """Number of connections of each grade."""
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
