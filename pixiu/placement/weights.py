"""Weights of replicas from the quality of their heartbeats: few steps, changed late, so that keys do not flap. Pure.

    cost      round trip, at least `FLOOR_US`, divided by the cube of the answered share
    relative  cost by the lowest cost in the partition

    relative    1        1.5    2    2.5    3      4      5
    weight      1 ──────────────────▶ 1/2 ──────────────▶ 1/4      down: beyond the boundary and a quarter, 5 times in a row
                1 ◀───────┘     1/2 ◀───────┘                      up: below the boundary less a quarter, 20 times in a row

Source: PiXiu, to-do 2; docs/routing.md, "Weights".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from pixiu.ids import EndpointID
from pixiu.placement.link_quality import Quality

STEPS: Final[tuple[float, ...]] = (1.0, 0.5, 0.25)
BOUNDARIES: Final[tuple[float, ...]] = (2.0, 4.0)
"""Relative costs between one step and the next."""
MARGIN: Final = 0.25
"""Share of a boundary within which nothing changes."""
DOWN_AFTER: Final = 5
UP_AFTER: Final = 20
"""Measurements in a row that must agree; a replica looks better simply because it was relieved."""
FLOOR_US: Final = 5_000.0
"""Round trips below this count as equally good, microseconds."""
MIN_ANSWERED: Final = 0.05


@dataclass(slots=True)
class _Replica:
    """One replica's step, and the number of measurements in a row that ask for another step."""

    step: int = 0
    above: int = 0
    below: int = 0

    def measure(self, relative: float) -> bool:
        """Take a relative cost. True if the step changed."""
        down = self.step < len(BOUNDARIES) and relative > BOUNDARIES[self.step] * (1 + MARGIN)
        up = self.step > 0 and relative < BOUNDARIES[self.step - 1] * (1 - MARGIN)
        self.above = self.above + 1 if down else 0
        self.below = self.below + 1 if up else 0
        if self.above < DOWN_AFTER and self.below < UP_AFTER:
            return False
        self.step += 1 if down else -1
        self.above = self.below = 0
        return True


class Weights:
    """The weights of all replicas that one process chooses among."""

    def __init__(self) -> None:
        self._replicas: dict[EndpointID, _Replica] = {}
        self.changes = 0

    def weight(self, replica: EndpointID) -> float:
        """The weight of a replica; 1 for one that was never measured."""
        found = self._replicas.get(replica)
        return STEPS[found.step] if found is not None else STEPS[0]

    def measure(self, partitions: Iterable[Mapping[EndpointID, Quality]]) -> bool:
        """Take one measurement of every replica, by partition, once in a heartbeat interval. True if a weight changed.

        A replica that has not answered any heartbeat yet is not counted; one that is left out is forgotten.
        """
        before, self._replicas = self._replicas, {}
        changed = False
        for partition in partitions:
            costs = {replica: _cost(quality) for replica, quality in partition.items() if quality.round_trip_us}
            lowest = min(costs.values(), default=1.0)
            for replica in partition:
                found = self._replicas[replica] = before.get(replica) or _Replica()
                if replica in costs and found.measure(costs[replica] / lowest):
                    self.changes += 1
                    changed = True
        return changed


def _cost(quality: Quality) -> float:
    return max(quality.round_trip_us, FLOOR_US) / max(quality.answered, MIN_ANSWERED) ** 3
