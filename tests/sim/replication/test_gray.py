"""What a write waits while one replica is bad: asked while it lasts."""

from __future__ import annotations

import pytest

from tests.sim.replication.gray import AILMENTS, violations
from tests.support.effort import runs

RUNS = runs("PIXIU_REPLICATION_GRAY_RUNS", local=8, ci=30)


@pytest.mark.parametrize("ailment", AILMENTS)
def test_writes_wait_once_and_not_for_long_while_one_replica_is_bad(ailment: str) -> None:
    bad = {seed: found for seed in range(RUNS) if (found := violations(seed, ailment))}
    assert not bad
