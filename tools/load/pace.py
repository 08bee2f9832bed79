"""Pace of the messages of a load. Pure: times are seconds since the load began.

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
    """Limit of messages under way; 0, with a rate: none."""

    def due(self, elapsed_s: float, sent: int, under_way: int) -> int:
        """Number of messages that may leave now, of a load that has sent `sent`; never below 0."""
        due = int(elapsed_s * self.rate) + 1 - sent if self.rate else self.window
        return max(min(due, self.window - under_way) if self.window else due, 0)

    def at_s(self, number: int) -> float:
        """Time at which a message of an open load is due, seconds."""
        return number / self.rate
