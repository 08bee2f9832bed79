"""Progress that a named writer had made before, for each slot. Pure.

The application's progress rises with every message, and a part keeps the highest one up to which it has all of the writer's
messages for its slots. For a slot, the highest of its part and of those before it counts: of two parts that were merged, one may
have had more than the writer has sent to their child so far.

Source: docs/sdk.md, "Durable topics".
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import NamedTuple

from pixiu.placement.slots import Lineage


class Stored(NamedTuple):
    """State of a writer in a part."""

    position: int = 0
    """Of its last message; 0: none."""
    progress: int = 0
    """The progress after that; without a message the highest one in the parts before it."""
    inherited: Mapping[int, int] = {}
    """Number of a part before it, of all generations → the progress there."""

    def left_by(self, part: int) -> int:
        """The progress that a part left, or those before it."""
        found = self.inherited.get(part)
        return found if found is not None else max((each for number, each in self.inherited.items() if number < part), default=0)


class Resumed:
    """Progress by slots when the writer opened.

    Args:
        lineage: of the topic.
        stored: by part, of all parts that are kept.
    """

    def __init__(self, lineage: Lineage, stored: Mapping[int, Stored]) -> None:
        self._lineage, self._stored = lineage, stored
        found: list[tuple[int, int]] = []
        for part in lineage.open_parts():
            found += self._of(part.number, part.low, part.high)
        found.sort()
        self._lows = [low for low, _ in found]
        self._progress = [progress for _, progress in found]

    def _of(self, number: int, low: int, high: int) -> list[tuple[int, int]]:
        """(first slot, progress) of the slots [low, high) in a part."""
        own, parents = self._stored.get(number, Stored()), self._lineage.parts[number].parents
        least = own.progress if own.position else 0
        known = [part for parent in parents if (part := self._lineage.parts.get(parent)) is not None]
        known = sorted((part for part in known if part.low < high and part.high > low), key=lambda part: part.low)
        # Which slots a parent had that is gone is not known: of several, the least counts.
        gone = max(least, min((own.left_by(parent) for parent in parents if parent not in self._lineage.parts), default=0))
        found: list[tuple[int, int]] = []
        at = low
        for part in known:
            if part.low > at:
                found.append((at, gone))
            before = self._of(part.number, max(part.low, low), min(part.high, high))
            found += [(slot, max(progress, least)) for slot, progress in before]
            at = min(part.high, high)
        return [*found, (at, gone)] if at < high else found

    def of_slot(self, slot: int) -> int:
        """The progress up to which everything for a slot is stored; 0: nothing is known to be."""
        return self._progress[bisect_right(self._lows, slot) - 1]

    @property
    def progress(self) -> int:
        """The progress after which to go on: everything up to it is stored. 0: begin with the first."""
        return min((each for each in self._progress if each), default=0)

    def covers(self, low: int, high: int) -> bool:
        """True if something is known to be stored for each of the slots [low, high)."""
        first = bisect_right(self._lows, low) - 1
        last = bisect_right(self._lows, high - 1)
        return all(self._progress[first:last])
