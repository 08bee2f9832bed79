"""Progress that a named writer had made before, for each slot. Pure.

The application's progress rises with every message, and a part keeps the highest one up to which it has all of the writer's
messages for its slots. A part that the writer has not written to says nothing of its own; then those before it count.

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
    """The progress after that, or in the parts before it."""


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
        known = [part for parent in parents if (part := self._lineage.parts.get(parent)) is not None]
        known = sorted((part for part in known if part.low < high and part.high > low), key=lambda part: part.low)
        if own.position or not known:
            return [(low, own.progress)]
        found: list[tuple[int, int]] = []
        at = low
        for part in known:
            if part.low > at:
                found.append((at, own.progress))  # that parent is gone: what it left behind is all that is known
            found += self._of(part.number, max(part.low, low), min(part.high, high))
            at = min(part.high, high)
        return [*found, (at, own.progress)] if at < high else found

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
