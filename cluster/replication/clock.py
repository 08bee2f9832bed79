"""The time that a leader puts into its entries: agreed on with the other replicas, and not one wall clock's word. Pure.

    a leader's heartbeat     ── the agreed time ──▶  a follower, which goes on with it if it is to lead
    a follower's answer      ── its wall clock ──▶   the leader

Replicas delete by the time of entries, and their state's time never goes back: one entry with a wrong time would be for ever.
All clocks here are differences: Unix µs less monotonic µs of this process.

Source: docs/replication.md, "Time".
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

MAX_STEP_US: Final = 60_000_000
"""So far a wall clock may be from the agreed time. Policy: beyond it, time goes on as agreed, and an operator is told."""
LASTS_S: Final = 60.0
"""Where no other replica ever said what time it is, a wall clock that stands elsewhere for so long is followed."""


def _us(now: float) -> int:
    return round(now * 1_000_000)


class Clock:
    """One replica's clocks: its own, and the time that its partition agreed on."""

    def __init__(self) -> None:
        self.own: int | None = None
        """Of the wall clock as it was seen last; None: never."""
        self.agreed: int | None = None
        """None: nobody has said anything yet."""
        self._alone = False
        """What was agreed on is the word of this replica's own clock, and of no other."""
        self._moved: tuple[int, float] | None = None
        """Where the own clock stands, far from the agreed time, and since when, monotonic."""
        self._moved_s = 0.0
        """For how long it had stood there when it was seen last."""

    @property
    def off_s(self) -> float:
        """Seconds that the wall clock is ahead; 0: it is right, or nobody knows."""
        if self.own is None or self.agreed is None or abs(self.own - self.agreed) <= MAX_STEP_US:
            return 0.0
        return (self.own - self.agreed) / 1_000_000

    def saw(self, wall_us: int, now: float) -> None:
        """The wall clock says so now, Unix µs. Small corrections are followed."""
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
        """A leader's word, Unix µs."""
        self.agreed, self._alone = agreed_us - _us(now), False

    def judge(self, others: Collection[int]) -> None:
        """What the other replicas' clocks say, as this one's own: agree on the lower median, unless something was agreed on that
        no two clocks speak against. The only clock that ever spoke is followed when it has stood elsewhere for a while: what was
        agreed on was its word, and a restart would take it as well."""
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
        """The wall clock, Unix µs; 0: it was never seen."""
        return self.own + _us(now) if self.own is not None else 0
