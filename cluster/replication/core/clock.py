"""The time that a leader puts into its entries: agreed between the replicas instead of read from one wall clock. Pure.

    a leader's heartbeat     ── the agreed time ──▶  a follower, which continues with it if it is to lead
    a follower's answer      ── its wall clock ──▶   the leader

Replicas delete by the time of entries, and the time of their state never goes back, so one entry with a wrong time would have a
lasting effect. All clocks here are differences: Unix µs minus monotonic µs of this process.

Source: docs/replication.md, "Time".
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

MAX_STEP_US: Final = 60_000_000
"""Largest accepted distance of a wall clock from the agreed time. Policy: beyond it, the agreed time goes on and an operator is
informed."""
LASTS_S: Final = 60.0
"""Time after which a wall clock that was set far off is followed, if no other replica has ever reported its clock, seconds."""


def _us(now: float) -> int:
    return round(now * 1_000_000)


class Clock:
    """The clocks of one replica: its own, and the time agreed in its partition."""

    def __init__(self) -> None:
        self.own: int | None = None
        """Wall clock at its last reading; None: never read."""
        self.agreed: int | None = None
        """Agreed time; None: nothing is agreed yet."""
        self._alone = False
        """True if only this replica's own clock determined the agreed time."""
        self._moved: tuple[int, float] | None = None
        """Position of the own clock if it is far from the agreed time, and the monotonic time since when."""
        self._moved_s = 0.0
        """Seconds for which the own clock had been at that position at its last reading."""

    @property
    def off_s(self) -> float:
        """Seconds that the wall clock is ahead of the agreed time; 0 if it is close to it, or nothing is known."""
        if self.own is None or self.agreed is None or abs(self.own - self.agreed) <= MAX_STEP_US:
            return 0.0
        return (self.own - self.agreed) / 1_000_000

    def saw(self, wall_us: int, now: float) -> None:
        """Take a reading of the wall clock, Unix µs. Small corrections are followed."""
        self.own = wall_us - _us(now)
        if self.agreed is not None and abs(self.own - self.agreed) > MAX_STEP_US:
            if self._moved is None or abs(self.own - self._moved[0]) > MAX_STEP_US:
                self._moved = self.own, now
            self._moved_s = now - self._moved[1]
            return
        self._moved, self._moved_s = None, 0.0
        if self.agreed is not None:
            self.agreed = self.own

    def heard(self, agreed_us: int, now: float) -> None:
        """Take over a leader's time, Unix µs."""
        self.agreed, self._alone = agreed_us - _us(now), False

    def judge(self, others: Collection[int]) -> None:
        """Agree on the lower median of the own clock and those of other replicas, unless a time was agreed that no two clocks
        contradict. If no other clock was ever reported, an own clock that has been far off for `LASTS_S` is followed: it alone
        determined the agreed time, and a restart would follow it too."""
        if self.own is None:
            return
        self._alone = not others and (self._alone or self.agreed is None)
        if self._alone and self._moved_s >= LASTS_S:
            self.agreed = None
        clocks = sorted([*others, self.own])
        median = clocks[(len(clocks) - 1) // 2]
        near = sum(abs(clock - median) <= MAX_STEP_US for clock in clocks)
        if self.agreed is None or (near > 1 and abs(self.agreed - median) > MAX_STEP_US):
            self.agreed = self.own if abs(self.own - median) <= MAX_STEP_US else median

    def time_us(self, now: float) -> int:
        """The agreed time, Unix µs; 0: there is none."""
        return self.agreed + _us(now) if self.agreed is not None else 0

    def wall_us(self, now: float) -> int:
        """The wall clock, Unix µs; 0: never read."""
        return self.own + _us(now) if self.own is not None else 0
