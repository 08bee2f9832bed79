"""Blocks of parts that are not open here yet: they wait for a moment, since writers learn of children when a part is sealed. Pure.

Source: docs/topics.md, "Writing".
"""

from __future__ import annotations

from collections import deque
from typing import Final

from cluster.core.contract import NEVER
from topic import events as ev

PARK_S: Final = 1.0
"""Time for which a block waits for its part, seconds; then it is refused as not here."""
MAX_PARKED_BYTES: Final = 8 << 20
"""Bytes that wait. Policy: more are refused as not here, and their writers come back."""


class Parked:
    """The blocks that wait."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[ev.WriteRequested]] = {}
        """Part → its blocks, in the order in which they came."""
        self._until: deque[tuple[float, int]] = deque()
        """(time, part), rising: when all blocks of a part are refused."""
        self._bytes = 0

    def park(self, part: int, event: ev.WriteRequested, now: float) -> bool:
        """Let a block wait; False: there is no space."""
        if self._bytes + len(event.block) > MAX_PARKED_BYTES:
            return False
        self._bytes += len(event.block)
        if part not in self._waiting:
            self._until.append((now + PARK_S, part))
        self._waiting.setdefault(part, []).append(event)
        return True

    def take(self, part: int) -> list[ev.WriteRequested]:
        """The blocks of a part, which wait no longer."""
        found = self._waiting.pop(part, [])
        if found:
            self._bytes -= sum(len(event.block) for event in found)
            self._until = deque(each for each in self._until if each[1] != part)
        return found

    def overdue(self, now: float) -> list[ev.WriteRequested]:
        """Blocks whose time is over."""
        found = list[ev.WriteRequested]()
        while self._until and self._until[0][0] <= now:
            found += self.take(self._until[0][1])
        return found

    def clear(self) -> list[ev.WriteRequested]:
        """Take all blocks."""
        return [event for part in list(self._waiting) for event in self.take(part)]

    def next_deadline(self) -> float:
        """Time at which `overdue` has something."""
        return self._until[0][0] if self._until else NEVER
