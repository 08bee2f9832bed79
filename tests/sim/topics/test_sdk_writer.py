"""The writer of the SDK under random schedules of faults: what it says is stored is stored once, and in order."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.sim.topics import world
from tests.sim.topics.sdk_writer import SdkWriter
from tests.support.effort import runs

RUNS = runs("PIXIU_TOPIC_RUNS", local=8, ci=40)
ENOUGH = {"stored": 600, "opened": 8, "sealed": 4, "promotions": 40, "kills": 20, "power cuts": 25}
"""What 8 runs must have had at least."""
OF_WRITERS = {
    "a message is stored twice", "a slot is out of order", "confirmed and not stored", "offsets are not dense",
    "stored after the seal", "a child opened before its parent was sealed",
}  # fmt: skip
"""Promises that are those of writers; `test_topics_under_faults.py` judges the others."""


def test_everything_confirmed_is_stored_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "Writer", SdkWriter)
    totals: Counter[str] = Counter()
    for seed in range(11_000, 11_000 + RUNS):
        verdict = world.run(seed)
        broken = [each for each in verdict.violations if each[0] in OF_WRITERS]
        assert not broken, f"seed {seed}: {broken[:3]}"
        totals += verdict.counts
    assert all(totals[what] >= least for what, least in ENOUGH.items()), totals
