"""The timer of a shell: fires when its core's next deadline has come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from typing import Final

NEVER: Final = inf
"""The deadline of a core that waits for nothing."""
SLACK_S: Final = 0.001
"""Minimum by which a deadline must be earlier to set another timer, seconds: an event loop is not more precise than this."""


class DeadlineTimer:
    """A re-armable timer. Fires once, at the earliest deadline set since it last fired.

    Args:
        ring: called in the event loop when the deadline has come; gives the core its tick.
        least_s: minimum time from setting the timer to firing, also for overdue deadlines.
    """

    def __init__(self, ring: Callable[[], None], least_s: float = 0.0) -> None:
        self._ring, self._least_s = ring, least_s
        self._timer: asyncio.TimerHandle | None = None
        self.when = NEVER
        """Time at which the timer fires."""

    @property
    def is_set(self) -> bool:
        """True if the timer is going to fire."""
        return self._timer is not None

    def set(self, deadline: float) -> None:
        """Set the deadline, monotonic seconds (the event loop's clock)."""
        if deadline >= self.when - SLACK_S:
            return
        loop = asyncio.get_running_loop()
        when = max(deadline, loop.time() + self._least_s)
        if when >= self.when:
            return  # overdue: setting it again at every step would postpone it for ever
        self.cancel()
        self._timer, self.when = loop.call_at(when, self._rang), when

    def cancel(self) -> None:
        """Cancel the timer until it is set again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self.when = None, NEVER

    def _rang(self) -> None:
        self._timer, self.when = None, NEVER
        self._ring()
