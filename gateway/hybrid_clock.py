"""A hybrid clock: wall time where it goes forward, a count where it does not; never twice the same, never back. Pure.

    45 bits Unix ms | 16 bits count

Source: docs/memberships.md.
"""

from __future__ import annotations

from typing import Final

COUNT_BITS: Final = 16
MAX_TIME: Final = (1 << 61) - 1


class HybridClock:
    """Gives times; learns the ones that others gave."""

    def __init__(self) -> None:
        self._last = 0

    def next(self, wall_ms: int) -> int:
        """A time above every one that was given or seen. `wall_ms`: Unix milliseconds."""
        self._last = max(self._last + 1, wall_ms << COUNT_BITS)
        return self._last

    def see(self, time: int) -> None:
        """Another clock gave this time; what `next` gives is above it."""
        if self._last < time < MAX_TIME:
            self._last = time
