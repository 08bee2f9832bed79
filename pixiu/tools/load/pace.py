"""When the messages of a load leave. Pure: times are seconds since the load began.

Source: docs/operations.md, "Watching a cluster".
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pace:
    """The rate of an open load, which does not wait for answers, or the window of a closed one, or both."""

    rate: float = 0.0
    """Messages a second; 0: as fast as the window allows."""
    window: int = 0
    """Messages that may be under way; 0, with a rate: any number."""

    def due(self, elapsed_s: float, sent: int, under_way: int) -> int:
        """How many may leave now, of a load that has sent so many; never below 0."""
        due = int(elapsed_s * self.rate) + 1 - sent if self.rate else self.window
        return max(min(due, self.window - under_way) if self.window else due, 0)

    def at_s(self, number: int) -> float:
        """When a message of an open load is due."""
        return number / self.rate
