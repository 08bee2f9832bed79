"""Topics under random schedules of faults: everything confirmed is read, in order, and each fault of the code is found.

PIXIU_TOPIC_RUNS says how many seeds are played; `make sim` plays 2,000.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tests.sim.topics import faulty
from tests.sim.topics.world import run
from tests.support.effort import portion, runs

BLOCK = 12
BLOCKS = max(1, runs("PIXIU_TOPIC_RUNS", local=BLOCK, ci=60) // BLOCK)
ENOUGH = {
    "stored": 1000, "given": 3000, "given again": 120, "acknowledgements confirmed": 2800, "opened": 14, "followed": 7,
    "promotions": 45, "kills": 40, "power cuts": 50, "snapshots": 40, "holes": 170, "sealed": 8, "flushes without space": 5,
    "members left": 40, "never answered": 40,
    "dead letters": 6, "answered early": 40, "members ended": 300, "parts finished": 120, "seeks": 2, "resent": 1, "deleted": 1,
}  # fmt: skip
"""What the first 12 runs must have had at least; about half of what was counted when this was written."""


@pytest.mark.parametrize("number", range(BLOCKS))
def test_everything_confirmed_is_read_once_and_in_order(number: int) -> None:
    totals: Counter[str] = Counter()
    for seed in range(number * BLOCK, (number + 1) * BLOCK):
        verdict = run(seed)
        assert not verdict.violations, f"python -m tests.sim.topics.world {seed}: {verdict.violations[:3]}"
        totals += verdict.counts
    too_few = {what: totals[what] for what, least in ENOUGH.items() if totals[what] < least}
    assert number or not too_few, too_few


def test_the_same_seed_gives_the_same_run() -> None:
    first, second = run(3), run(3)
    assert (first.trace, first.counts) == (second.trace, second.counts)
    assert first.trace != run(4).trace


Run = Callable[[int], list[tuple[str, str]]]
FAULTS: dict[str, tuple[Run, set[str]]] = {
    "a child opens before the seal commits": (
        lambda seed: run(seed, faulty.AnswersSealsEarly).violations,
        {"a child opened before its parent was sealed", "a slot is out of order"},
    ),
    "an acknowledgement counts before its commit": (
        lambda seed: run(seed, faulty.CountsEarly).violations,
        {"an acknowledgement counted before it was committed"},
    ),
    "a leader delivers before it knows everything": (
        lambda seed: run(seed, faulty.DeliversAtOnce).violations,
        {"given again after its acknowledgement was confirmed"},
    ),
    "a lane is with two members": (
        lambda seed: run(seed, faulty.SharesLanes).violations,
        {"a lane was handed on before it was done"},
    ),
    "a child is read before its parents": (
        lambda seed: run(seed, faulty.ForgetsParents).violations,
        {"a lane was handed on before it was done"},
    ),
    "a filtered message is left unacknowledged": (
        lambda seed: run(seed, faulty.LeavesUnwanted).violations,
        {"never acknowledged"},
    ),
    "a refused message is given again before that is committed": (
        lambda seed: run(seed, faulty.GivesEarly).violations,
        {"with two members at the same time"},
    ),
    "a message is given before its time": (
        lambda seed: run(seed, faulty.Hurries).violations,
        {"given before its time"},
    ),
    "the journal is trimmed before the segments are synced": (
        lambda seed: run(seed, store=faulty.TrimsBeforeSync).violations,
        {"given something else than was stored", "never given to a channel"},
    ),
    "a flush that failed counts as done": (
        lambda seed: run(seed, store=faulty.IgnoresFailures).violations,
        {"given something else than was stored"},
    ),
    "a writer is forgotten when the leader changes": (
        lambda seed: run(seed, store=faulty.ForgetsWriters).violations,
        {"replicas differ"},
    ),
}
FOUND_AT: dict[str, tuple[int, ...]] = {"a leader delivers before it knows everything": (11,)}
"""Seeds of faults that few seeds find; they are played first."""


@pytest.mark.parametrize("name", portion(FAULTS))
def test_a_fault_put_back_is_found(name: str) -> None:
    play, signs = FAULTS[name]
    for seed in (*FOUND_AT.get(name, ()), *range(100)):
        if signs & {what for what, _ in play(seed)}:
            return
    pytest.fail("100 runs saw nothing of it")
