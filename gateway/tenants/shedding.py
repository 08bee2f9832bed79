"""The order in which an overloaded gateway takes from its tenants. Pure.

    pressure ≥ 1      one step more: of the tenants above their share the one that is most above it loses its messages of QoS 0;
                      once all of these have, the one most above it is refused
    pressure < 0.5    for a while: the last step is taken back

A tenant's share is its weight among those of the tenants that use anything. What it was refused counts as used, so that it does not
come back under its share by being refused.

Source: docs/tenants.md, "Overload".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from cluster.access.tenants.use import Stage

HIGH: Final = 1.0
LOW: Final = 0.5
CALM: Final = 8
"""Looks in a row below `LOW` after which the last step is taken back."""
STEADY: Final = 2
"""Looks between two steps: the effect of one must be seen before the next."""


class Offered(NamedTuple):
    """Work that was asked of the gateway for one tenant since the last look."""

    name: str
    weight: float
    use: float


class Shedding:
    """Stages of the tenants."""

    def __init__(self) -> None:
        self._steps: list[tuple[str, Stage]] = []
        self._since = STEADY
        self._calm = 0

    def look(self, pressure: float, offered: Sequence[Offered]) -> dict[str, Stage]:
        """Take the next step, if it is time. Returns the stages of the tenants that have one."""
        self._since += 1
        self._calm = self._calm + 1 if pressure < LOW else 0
        known = {each.name for each in offered}
        self._steps = [step for step in self._steps if step[0] in known]
        if pressure >= HIGH and self._since > STEADY:
            step = self._next(offered)
            if step is not None:
                self._steps.append(step)
                self._since = 0
        elif self._calm >= CALM and self._steps:
            self._steps.pop()
            self._calm = 0
        return self.stages

    @property
    def stages(self) -> dict[str, Stage]:
        """Stages of the tenants that have one."""
        return dict(self._steps)

    def _next(self, offered: Sequence[Offered]) -> tuple[str, Stage] | None:
        active = [each for each in offered if each.use > 0]
        total, weights = sum(each.use for each in active), sum(each.weight for each in active)
        above = [(each.use / total / (each.weight / weights), each.name) for each in active]
        # The one that is most above its share is never below it, even if it is alone.
        above = sorted((ratio, name) for ratio, name in above if ratio > 1 - 1e-9)
        stages = self.stages
        for stage in (Stage.NO_QOS_0, Stage.REFUSED):
            left = [name for _, name in above if stages.get(name, Stage.NONE) < stage]
            if left:
                return left[-1], stage
        return None
