"""A hybrid clock: wall time while it advances, a count otherwise; never the same twice, never back. Pure.

    45 bits Unix ms | 16 bits count

Source: docs/memberships.md.
"""

from __future__ import annotations

from typing import Final

COUNT_BITS: Final = 16
MAX_TIME: Final = (1 << 61) - 1


class HybridClock:
    """Gives times, and learns those of other clocks."""

    def __init__(self) -> None:
        self._last = 0

    def next(self, wall_ms: int) -> int:
        """Return a time above all that were given or seen. `wall_ms`: Unix milliseconds."""
        self._last = max(self._last + 1, wall_ms << COUNT_BITS)
        return self._last

    def see(self, time: int) -> None:
        """Learn a time of another clock; `next` stays above it."""
        if self._last < time < MAX_TIME:
            self._last = time
