"""Sorted, disjoint ranges of InboxSeqs: the deleted entries of an inbox. Pure.

    ── floor ──[first ─ last]────[first ─ last]── last entry

Source: Long connections (history); docs/pi.md.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Final

MAX_RANGES: Final = 1000
"""Limit for an inbox. Policy: a deletion that would exceed it is refused; adjacent ranges are merged."""
RANGE: Final = struct.Struct("<QQ")


class Ranges:
    """A sorted set of ranges. Every range is (first, last), both included."""

    __slots__ = ("_firsts", "_lasts")

    def __init__(self, body: bytes = b"") -> None:
        """Decode the stored form."""
        pairs = list(RANGE.iter_unpack(body))
        self._firsts: list[int] = [first for first, _ in pairs]
        self._lasts: list[int] = [last for _, last in pairs]

    def encode(self) -> bytes:
        """Encode as stored."""
        return b"".join(RANGE.pack(*pair) for pair in self)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._firsts, self._lasts, strict=True))

    def __len__(self) -> int:
        return len(self._firsts)

    def add(self, first: int, last: int) -> bool:
        """Add a range. Returns False if there are too many; then nothing changes."""
        # Ranges from `low` to below `high` overlap the new one, or touch it.
        low, high = bisect_left(self._lasts, first - 1), bisect_right(self._firsts, last + 1)
        if low == high and len(self) >= MAX_RANGES:
            return False
        if low < high:
            first, last = min(first, self._firsts[low]), max(last, self._lasts[high - 1])
        self._firsts[low:high], self._lasts[low:high] = [first], [last]
        return True

    def cut(self, up_to: int) -> None:
        """Remove everything up to a number."""
        gone = bisect_right(self._lasts, up_to)
        del self._firsts[:gone], self._lasts[:gone]
        if self._firsts:
            self._firsts[0] = max(self._firsts[0], up_to + 1)

    def at(self, seq: int) -> tuple[int, int] | None:
        """Return the range that a number is in."""
        place = bisect_left(self._lasts, seq)
        if place < len(self) and self._firsts[place] <= seq:
            return self._firsts[place], self._lasts[place]
        return None

    def after(self, seq: int) -> int:
        """Return the end of the range that begins right after a number; without one the number itself."""
        found = self.at(seq + 1)
        return found[1] if found else seq

    def count(self, first: int, last: int) -> int:
        """Count the numbers from `first` to `last` that are in ranges."""
        low, high = bisect_left(self._lasts, first), bisect_right(self._firsts, last)
        whole = sum(self._lasts[place] - self._firsts[place] + 1 for place in range(low, high))
        if low < high:
            whole -= max(first - self._firsts[low], 0) + max(self._lasts[high - 1] - last, 0)
        return whole


NO_RANGES: Final = Ranges()
"""Of an inbox without deletions. It must not be changed."""
