"""The time by a group's log, as a leader can tell it. Pure.

Source: docs/topics.md, "Filters, tags, load tests".
"""

from __future__ import annotations

from typing import Final

from topic.state.state import State

AHEAD_US: Final = 2_000_000
KEPT_S: Final = 60.0
"""An entry's time counts for so long while no later one is ahead of it, or behind it by more than a commit takes."""


class LogClock:
    """The clock of a log between its entries.

    Args:
        state: of the group.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._at = 0, 0.0
        """The log's time, and the same moment, monotonic seconds."""
        self.now = 0.0
        """Of the last step, monotonic seconds."""

    def at(self, now: float) -> int:
        """The log's time at a moment, Unix µs, as far as its entries tell."""
        clock_us, at = self._at
        return clock_us + int((now - at) * 1_000_000)

    def committed(self, now: float) -> None:
        """An entry is older than this moment by what its commit took. So that of the fastest commit says best what time it is."""
        clock_us, (kept_us, at) = self._state.clock_us, self._at
        ahead = self.at(now) - clock_us
        if not kept_us or not 0 <= ahead <= AHEAD_US or now - at > KEPT_S:
            self._at = clock_us, now
