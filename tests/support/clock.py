"""A clock that a test sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Clock:
    """Time in the unit of who reads it, an integer or not; it is `step` later at each look."""

    now: Any
    step: int = 0

    def __call__(self) -> Any:
        self.now += self.step
        return self.now
