"""See `broken_values.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.replication.broken_values import PassesOn, violations
from tests.support.effort import runs

RUNS = runs("PIXIU_BROKEN_VALUE_RUNS", local=5, ci=20)


async def test_no_broken_value_goes_from_one_replica_to_another(tmp_path: Path) -> None:
    found = {seed: await violations(seed, tmp_path / str(seed)) for seed in range(RUNS)}
    assert not [seed for seed, wrong in found.items() if wrong], found


async def test_a_replica_that_looks_at_no_value_is_found(tmp_path: Path) -> None:
    for seed in range(20):
        if {what for what, _ in await violations(seed, tmp_path / str(seed), PassesOn)} & {"a broken value was passed on"}:
            return
    pytest.fail("20 runs saw nothing of it")
