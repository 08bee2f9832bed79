"""See `rotten.py`."""

from __future__ import annotations

from tests.sim.replication.rotten import play
from tests.support.effort import runs

RUNS = runs("PIXIU_ROTTEN_RUNS", local=20, ci=40)


def test_nothing_ends_or_waits_for_an_old_segment_that_is_broken_and_in_the_state() -> None:
    worlds = [play(seed) for seed in range(RUNS)]
    assert not [world.history.violations for world in worlds if world.history.violations]
    dropped = sum(world.counts["logs dropped"] for world in worlds)
    assert dropped >= RUNS * 0.9  # in a few runs the log was trimmed before anybody read it there
