"""Latencies in buckets of a width of at most 1/32, so that percentiles need no list of all values. Pure."""

from __future__ import annotations

from typing import Final

SUB_BITS: Final = 5
_BUCKETS: Final = 64 << SUB_BITS


class Histogram:
    """Counts whole numbers from 0 (below 0 counts as 0); percentiles are exact to 1/32 of the value."""

    __slots__ = ("_counts", "count", "highest")

    def __init__(self) -> None:
        self._counts = [0] * _BUCKETS
        self.count = 0
        self.highest = 0

    def add(self, value: int) -> None:
        """Count one value."""
        value = max(value, 0)
        shift = max(value.bit_length() - SUB_BITS - 1, 0)
        self._counts[min((shift << SUB_BITS) + (value >> shift), _BUCKETS - 1)] += 1
        self.count += 1
        if value > self.highest:
            self.highest = value

    def percentile(self, percent: float) -> int:
        """The value that `percent` of the values do not exceed (the upper end of its bucket); 0 when there is none."""
        if not self.count:
            return 0
        wanted = self.count * percent / 100
        seen = 0
        for index, count in enumerate(self._counts):
            seen += count
            if count and seen >= wanted:
                shift = max((index >> SUB_BITS) - 1, 0)
                upper = ((index - (shift << SUB_BITS) + 1) << shift) - 1
                return min(upper, self.highest)
        return self.highest
