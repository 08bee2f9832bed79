"""Nothing is deleted early while one wall clock is wrong."""

from __future__ import annotations

from tests.sim.replication.clocks import violations
from tests.support.effort import runs

RUNS = runs("PIXIU_REPLICATION_CLOCK_RUNS", local=40, ci=40)
ALONE_IN_SYNC = (968, 1027, 1298)
"""Seeds in which a leader with a wrong clock is alone in sync, while another replica is on its way there."""


def test_no_entry_is_ahead_of_the_time_and_none_stands_still_while_one_clock_is_wrong() -> None:
    bad = {seed: found for seed in (*range(RUNS), *ALONE_IN_SYNC) if (found := violations(seed))}
    assert not bad
