"""Histograms for Prometheus with classic buckets: an array of counters that a hot path adds to once a batch. Pure.

Source: docs/operations.md, "Watching a cluster".
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Final

SECONDS: Final[tuple[float, ...]] = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the buckets of times; the last bucket has no bound."""
SIZES: Final = tuple(float(1 << power) for power in range(13))
"""Upper bounds of the buckets of batch sizes: 1 to 4096."""


class Histogram:
    """Counts values in buckets.

    Args:
        name: the full name, unit last.
        text: description for people.
        bounds: upper bounds of the buckets, ascending.
        labels: constant labels.
    """

    __slots__ = ("bounds", "counts", "labels", "name", "text", "total")

    def __init__(self, name: str, text: str, bounds: tuple[float, ...] = SECONDS, labels: Mapping[str, str] | None = None) -> None:
        self.name, self.text, self.bounds = name, text, bounds
        self.labels: Mapping[str, str] = labels or {}
        self.counts = [0] * (len(bounds) + 1)
        """Number of values in each bucket."""
        self.total = 0.0
        """Sum of all values."""

    def add(self, value: float) -> None:
        """Count one value; one below 0 (clocks of two machines) counts as 0."""
        if value < 0.0:
            value = 0.0
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> Iterator[tuple[float, int]]:
        """Yield (upper bound, number of values up to it), the last bound infinite."""
        count = 0
        for bound, here in zip((*self.bounds, float("inf")), tuple(self.counts), strict=True):
            count += here
            yield bound, count


class OneAtATime:
    """Times one of many concurrent operations: the next one is marked when the marked one has ended. Bounded, and cheap.

    Args:
        histogram: a histogram of seconds.
    """

    __slots__ = ("_at", "_histogram", "mark")

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self.mark: tuple[int, int] | None = None
        """The operation that is timed: two numbers of the caller's."""
        self._at = 0.0

    def begin(self, mark: tuple[int, int], now: float) -> None:
        """Note the start of an operation; it is timed if no other one is."""
        if self.mark is None:
            self.mark, self._at = mark, now

    def end(self, now: float) -> None:
        """Record the end of the marked operation."""
        self._histogram.add(now - self._at)
        self.mark = None

    def drop(self) -> None:
        """Drop the marked operation, which will never end."""
        self.mark = None
