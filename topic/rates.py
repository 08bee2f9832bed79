"""Rates of a group: bytes and messages that were written to its parts lately, and the CPU that it used. Pure.

Source: docs/topics.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

HALF_LIFE_S: Final = 30.0
"""Time after which a rate that ended counts half."""


class Rates:
    """Rates of parts that take messages, and of the process."""

    def __init__(self) -> None:
        self.cpu = 0.0
        """Share of a core that the process used lately."""
        self._cpu_s = 0.0
        self._totals: Mapping[int, tuple[int, int]] = {}
        self._rates: dict[int, tuple[float, float]] = {}
        self._at = 0.0

    def look(self, totals: Mapping[int, tuple[int, int]], now: float, cpu_s: float = 0.0) -> None:
        """Renew the rates. totals: part → bytes and messages so far. now: monotonic seconds. cpu_s: CPU seconds of the process."""
        passed = max(now - self._at, 0.001)
        kept, rates = math.exp2(-passed / HALF_LIFE_S), dict[int, tuple[float, float]]()
        for part, (size, messages) in totals.items():
            before, (rate, message_rate) = self._totals.get(part, (size, messages)), self.of(part)
            rates[part] = (
                rate * kept + (size - before[0]) / passed * (1 - kept),
                message_rate * kept + (messages - before[1]) / passed * (1 - kept),
            )
        self._rates = {part: rate for part, rate in rates.items() if rate[0] >= 1.0}
        if self._at:  # else it is the CPU of the start
            self.cpu = self.cpu * kept + (cpu_s - self._cpu_s) / passed * (1 - kept)
        self._totals, self._at, self._cpu_s = totals, now, cpu_s

    def of(self, part: int) -> tuple[float, float]:
        """Bytes and messages of a part, a second."""
        return self._rates.get(part, (0.0, 0.0))
