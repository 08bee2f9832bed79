"""Bridges through kills, pauses and targets that fail: at least once, in order, and dead letters for what is wrong alone."""

from __future__ import annotations

import os

import pytest

from bridge import events as ev
from bridge.connector import Outcome, Verdict
from bridge.core import Core
from tests.bridge.world import World

pytestmark = pytest.mark.sim
RUNS = int(os.environ.get("PIXIU_BRIDGE_RUNS", "40"))


def test_everything_is_written_in_order_or_is_a_dead_letter() -> None:
    repeats = kills = breaks = 0
    for seed in range(RUNS):
        found = World(seed, ordered=seed % 3 > 0).run()
        assert not found.violations, f"python -m tests.bridge.world {seed}: {found.violations[:3]}"
        repeats, kills, breaks = repeats + found.repeats, kills + found.kills, breaks + found.breaks
    assert repeats
    assert kills
    assert breaks


class ForgetsLanes(Core):
    """A fault: it writes a lane in two batches at a time."""

    def _next_batch(self, now: float, out: list[ev.Effect]) -> list:  # type: ignore[type-arg]
        flights, self._flights = self._flights, {}
        try:
            return super()._next_batch(now, out)
        finally:
            self._flights = flights


class AcknowledgesEarly(Core):
    """A fault: what is written again counts as written."""

    def _on_written(self, event: ev.Written, now: float, out: list[ev.Effect]) -> None:
        outcomes = [Outcome(Verdict.DONE) if each.verdict is Verdict.AGAIN else each for each in event.outcomes]
        super()._on_written(ev.Written(event.batch, outcomes), now, out)


class ForgetsOrder(Core):
    """A fault: what is written again comes after what waits."""

    def _again(self, entries, out) -> None:  # type: ignore[no-untyped-def]
        for number, entry in enumerate(entries):
            entry.number, entry.arrived = entry.number, 1e9 + number
        super()._again(entries, out)
        self._queue.sort(key=lambda entry: entry.arrived)


@pytest.mark.parametrize("fault", [ForgetsLanes, AcknowledgesEarly, ForgetsOrder])
def test_planted_faults_are_found(fault: type[Core]) -> None:
    assert any(World(seed, fault).run().violations for seed in range(40))
