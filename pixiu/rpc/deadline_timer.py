"""The timer of a shell: rings when its core's next deadline has come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

SLACK_S: Final = 0.001
"""A deadline that is earlier by less is not worth another timer: an event loop is no more exact than this."""


class DeadlineTimer:
    """Of the deadlines that it was given since it rang last, the earliest counts.

    Args:
        ring: called in the event loop when it has come; gives the core its tick.
        least_s: rings no sooner than this after it was set, also for what is overdue.
    """

    def __init__(self, ring: Callable[[], None], least_s: float = 0.0) -> None:
        self._ring, self._least_s = ring, least_s
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_set(self) -> bool:
        """Whether it is going to ring."""
        return self._timer is not None

    def set(self, deadline: float | None) -> None:
        """Ring then, monotonic seconds (the event loop's clock). None: the core waits for nothing."""
        if deadline is None or (self._timer is not None and deadline >= self._timer.when() - SLACK_S):
            return
        loop = asyncio.get_running_loop()
        when = max(deadline, loop.time() + self._least_s)
        if self._timer is not None and when >= self._timer.when():
            return  # overdue: to set it anew with every step would put it off for ever
        self.cancel()
        self._timer = loop.call_at(when, self._rang)

    def cancel(self) -> None:
        """Ring no more, until it is set again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _rang(self) -> None:
        self._timer = None
        self._ring()
