"""Counts the rooms and users with the most messages, in the present ten seconds and the ten before, bounded. Pure.

One record of each batch represents the whole batch, so that a batch costs one dict lookup. If there are too many keys, the ones
with the fewest messages are forgotten; a hot key stays.

Source: docs/operations.md, "Watching a cluster".
"""

from __future__ import annotations

import heapq
from typing import Final

WINDOW_S: Final = 10.0
MAX_KEYS: Final = 4096
"""Maximum keys counted in a window; above it a quarter of them stays."""
SHOWN: Final = 20


class HotKeys:
    """The hottest keys of one process. Times are seconds of any clock that goes forward."""

    def __init__(self) -> None:
        self._counts: dict[int, float] = {}
        self._began = 0.0
        self._total = 0.0
        self._before: dict[int, float] = {}
        self._before_total = 0.0
        self._before_s = WINDOW_S

    def add(self, key: int, count: int, now: float) -> None:
        """Count a batch of `count` messages, of which one is for `key`."""
        if now - self._began >= WINDOW_S:
            self._turn(now)
        self._total += count
        counts = self._counts
        counts[key] = counts.get(key, 0.0) + count
        if len(counts) > MAX_KEYS:
            self._counts = dict(self._highest(counts, MAX_KEYS // 4))

    def top(self, now: float) -> list[tuple[int, float]]:
        """Return the hottest keys of the last whole window with their messages a second, hottest first."""
        if now - self._began >= WINDOW_S:
            self._turn(now)
        return [(key, count / self._before_s) for key, count in self._highest(self._before, SHOWN)]

    def per_s(self, now: float) -> float:
        """Return the messages a second for all keys together, in the last whole window."""
        if now - self._began >= WINDOW_S:
            self._turn(now)
        return self._before_total / self._before_s

    def _turn(self, now: float) -> None:
        """Start a new window. Counts older than two windows are dropped."""
        over_s = now - self._began
        fresh = over_s < 2 * WINDOW_S
        self._before, self._before_total = (self._counts, self._total) if fresh else ({}, 0.0)
        self._before_s = over_s
        self._counts, self._total, self._began = {}, 0.0, now

    @staticmethod
    def _highest(counts: dict[int, float], most: int) -> list[tuple[int, float]]:
        return heapq.nlargest(most, counts.items(), key=lambda one: (one[1], one[0]))
