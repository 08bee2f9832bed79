"""A receiver's record of one sequence: items that arrived, that are missing, that arrived twice.

Every (sender, item type, carrier) has its own sequence, from 1, counted in items.

Source: docs/protocol.md, "Record".
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

MAX_RANGES: Final = 256
"""Missing ranges remembered in one sequence; beyond this the oldest is confirmed lost."""
MAX_TOLD: Final = 32
"""Missing ranges in one acknowledgement, the newest."""
TELL_TIMES: Final = 64
"""Number of acknowledgements that report a missing range; later ones report "nothing known below" instead."""
MAX_JUMP: Final = 1 << 40
"""Largest believable step forward of a sequence."""


class _Range:
    __slots__ = ("first", "last", "left")

    def __init__(self, first: int, last: int, left: int) -> None:
        self.first = first
        self.last = last
        self.left = left


def _first(missing: _Range) -> int:
    return missing.first


class Tracker:
    """Accepts each item of one sequence once.

    `next` is the next sequence expected, `lost` counts items that are missing now, `reordered` those that arrived late,
    `duplicates` those refused because they had arrived before (or their range was given up).
    """

    __slots__ = ("_known_from", "_missing", "duplicates", "lost", "next", "reordered")

    def __init__(self) -> None:
        self.next = 1
        self.lost = 0
        self.reordered = 0
        self.duplicates = 0
        self._missing: list[_Range] = []
        self._known_from = 1

    def accept(self, first: int, count: int) -> bool:
        """Take the items [first, first + count). False if some or all arrived before, or the step forward is not believable."""
        expected = self.next
        if first == expected:
            self.next = first + count
            return True
        if first > expected:
            if first - expected > MAX_JUMP:
                return False
            self._miss(expected, first - 1)
            self.next = first + count
            return True
        return self._fill(first, first + count - 1)

    def _fill(self, first: int, last: int) -> bool:
        at = bisect_right(self._missing, first, key=_first) - 1
        if at < 0 or last > self._missing[at].last:
            self.duplicates += last - first + 1
            return False
        hole = self._missing[at]
        self.reordered += last - first + 1
        self.lost -= last - first + 1
        before = first > hole.first
        after = last < hole.last
        if before and after:
            self._missing.insert(at + 1, _Range(last + 1, hole.last, hole.left))
            hole.last = first - 1
            self._bound()
        elif before:
            hole.last = first - 1
        elif after:
            hole.first = last + 1
        else:
            del self._missing[at]
        return True

    def reject(self, first: int, count: int) -> None:
        """Count accepted items as missing, because they turned out malformed: their sender learns that they were not handled."""
        at = bisect_right(self._missing, first, key=_first)
        self._missing.insert(at, _Range(first, first + count - 1, TELL_TIMES))
        self.lost += count
        self._bound()

    def reveal(self, upcoming: int) -> bool:
        """Take the sender's report that `upcoming` is the next item that it will send. True if this shows a loss."""
        expected = self.next
        if not 0 < upcoming - expected <= MAX_JUMP:
            return False
        self._miss(expected, upcoming - 1)
        self.next = upcoming
        return True

    def _miss(self, first: int, last: int) -> None:
        self.lost += last - first + 1
        missing = self._missing
        if missing and missing[-1].last == first - 1 and missing[-1].left == TELL_TIMES:
            missing[-1].last = last
            return
        missing.append(_Range(first, last, TELL_TIMES))
        self._bound()

    def _bound(self) -> None:
        if len(self._missing) > MAX_RANGES:
            self._known_from = max(self._known_from, self._missing.pop(0).last + 1)

    def tell(self) -> tuple[int, list[tuple[int, int]], bool]:
        """Content of the next acknowledgement: (known_from, missing ranges as (first, last), True if the list was cut).

        Items below `known_from` are not reported. Of those from it to `next` the listed ones are missing and all others were
        handled.
        """
        told: list[tuple[int, int]] = []
        for missing in reversed(self._missing):
            if len(told) == MAX_TOLD or not missing.left:
                return max(self._known_from, missing.last + 1), told[::-1], len(told) == MAX_TOLD
            missing.left -= 1
            told.append((missing.first, missing.last))
        return self._known_from, told[::-1], False

    @property
    def missing(self) -> list[tuple[int, int]]:
        """The ranges that may still be filled, oldest first."""
        return [(hole.first, hole.last) for hole in self._missing]
