"""An hour of what flows through each role and partition, in memory. Pure.

    rows of `pixiu top`, every 5 s ──▶ ┌──────────────── 720 moments ───────────────┐ ──▶ plots: those after a moment
                                       └ the oldest goes when there is no space left ┘

Source: docs/console.md, "The hour".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from tools.cli.rates import Row

MOMENTS: Final = 720
MAX_ROWS: Final = 256
"""Roles and partitions that are kept of a moment. Policy: those that follow are left out."""


class Point(NamedTuple):
    """A role, or one of its partitions, at a moment."""

    role: str
    partition: int
    alive: int
    dead: int
    in_per_s: float
    out_per_s: float
    drops_per_s: float
    p99_s: float | None
    behind: int | None
    lag_s: float


class Moment(NamedTuple):
    """All roles at a moment, Unix milliseconds."""

    at_ms: int
    points: tuple[Point, ...]


class Series:
    """The moments of the last hour."""

    def __init__(self) -> None:
        self._moments: deque[Moment] = deque(maxlen=MOMENTS)

    def add(self, at_ms: int, rows: Sequence[Row]) -> None:
        """Add a moment; it is the newest."""
        self._moments.append(Moment(at_ms, tuple(_point(row) for row in rows[:MAX_ROWS])))

    def since(self, at_ms: int) -> list[Moment]:
        """Moments after this one, the oldest first."""
        newer = list[Moment]()
        for moment in reversed(self._moments):
            if moment.at_ms <= at_ms:
                break
            newer.append(moment)
        return newer[::-1]


def _point(row: Row) -> Point:
    p99 = None if row.p99_s is None else round(row.p99_s, 6)
    return Point(
        row.role, row.partition, row.alive, row.dead, round(row.in_per_s, 1), round(row.out_per_s, 1), round(row.drops_per_s, 1),
        p99, row.behind, round(row.lag_s, 4),
    )  # fmt: skip


def series_json(moments: Iterable[Moment]) -> dict[str, object]:
    """Moments as JSON: the names of the numbers once, then rows of numbers."""
    rows = [[moment.at_ms, [list(point) for point in moment.points]] for moment in moments]
    return {"fields": list(Point._fields), "moments": rows}
