"""Replication under random schedules of faults: nothing acknowledged is lost, and each fault of the code is found.

PIXIU_REPLICATION_RUNS says how many seeds are played; `make sim` plays 100,000.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from cluster.replication.core.core import Core
from tests.sim.replication import clocks, faulty, forced, rotten
from tests.sim.replication.files import FileDisk
from tests.sim.replication.gray import FULL_LEADER, UNREGISTERED_LEADER, violations
from tests.sim.replication.schedule import Verdict, run
from tests.support.effort import in_full, portion, runs

BLOCK = 250 if in_full("PIXIU_REPLICATION_RUNS") else 200
BLOCKS = max(1, runs("PIXIU_REPLICATION_RUNS", local=BLOCK, ci=250) // BLOCK)
FILE_RUNS = runs("PIXIU_REPLICATION_FILE_RUNS", local=5, ci=8)
ENOUGH = {
    "acknowledged": 50_000, "promotions": 2000, "shrinks": 500, "grows": 1500, "kills": 1000, "power cuts": 1000, "pauses": 700,
    "power cuts within the lag of a seal": 200, "late proposals": 700, "snapshots": 700, "damaged starts": 300,
    "→ Repairing": 400, "→ HandingOver": 80,
    "fault: isolate leader": 1000, "fault: zookeeper": 1000, "fault: one way": 1000, "fault: expire": 1000, "fault: cut": 1000,
}  # fmt: skip
"""What 1,000 runs must have had at least; about half of what was counted when this was written."""


@cache
def block(number: int) -> tuple[Counter[str], tuple[Verdict, ...]]:
    """What happened in a block of runs, and the verdicts of those that broke something."""
    totals: Counter[str] = Counter()
    bad = []
    for seed in range(number * BLOCK, (number + 1) * BLOCK):
        verdict = run(seed)
        totals += verdict.counts
        if verdict.violations:
            bad.append(verdict)
    return totals, tuple(bad)


@pytest.mark.parametrize("number", range(BLOCKS))
def test_nothing_acknowledged_is_lost_under_faults(number: int) -> None:
    totals, bad = block(number)
    assert not bad, [f"python -m tests.sim.replication.schedule {verdict.seed}: {verdict.violations[:3]}" for verdict in bad[:5]]
    by_force = totals["well by an operator's word"]
    assert totals["well"] + by_force == BLOCK
    assert by_force <= 4 + BLOCK // 60  # 6 of 1,000 on average; more are met in less than one block of 10,000


def test_the_schedules_do_enough() -> None:
    totals = block(0)[0] + block(1)[0] if BLOCKS > 1 else block(0)[0] + block(0)[0]
    too_few = {what: totals[what] for what, least in ENOUGH.items() if totals[what] < least * 2 * BLOCK / 1000}
    assert not too_few, too_few


def test_nothing_is_lost_with_logs_on_real_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    totals: Counter[str] = Counter()
    for seed in range(FILE_RUNS):
        with monkeypatch.context() as system:
            verdict = run(seed, files=lambda member, seed=seed: FileDisk(tmp_path / f"{seed}-{member}", system))  # type: ignore[misc]
        assert not verdict.violations, (seed, verdict.violations[:3])
        totals += verdict.counts
    assert totals["power cuts"] > FILE_RUNS
    assert totals["kills"] > FILE_RUNS
    assert totals["damaged starts"] > FILE_RUNS // 5
    assert totals["snapshots"] >= FILE_RUNS // 5


def test_after_a_forced_promotion_the_old_leader_is_not_taken_for_a_copy() -> None:
    bad = {
        seed: found for seed in range(runs("PIXIU_REPLICATION_FORCED_RUNS", local=25, ci=50)) if (found := forced.violations(seed))
    }
    assert not bad


def test_the_same_seed_gives_the_same_run() -> None:
    first, second = run(7), run(7)
    assert (first.trace, first.counts, first.outcome) == (second.trace, second.counts, second.outcome)
    assert first.trace != run(8).trace


Run = Callable[[int], list[tuple[str, str]]]


def under(core: type[Core] = Core, **world: bool) -> Run:
    """The violations of a seed of the schedules with this core, or with a world that is not as it should be."""
    return lambda seed: run(seed, core, **world).violations  # type: ignore[arg-type]


def gray(ailment: str, core: type[Core]) -> Run:
    """The same while one replica has an ailment."""
    return lambda seed: violations(seed, ailment, core)


FAULTS: dict[str, tuple[Run, set[str]]] = {
    "no maximal set": (under(faulty.NoMaximalSet), {"acknowledged entry lost"}),
    "confirms below min_in_sync": (under(faulty.AnswersBelowMinimum), {"answered with fewer copies"}),
    "no cut-off": (under(faulty.NoCutOff), {"prefixes differ", "replicas diverge", "stuck"}),
    "no first entry": (under(faulty.NoFirstEntry), {"replicas diverge", "stuck"}),
    "acknowledges before the shrink": (
        under(faulty.AcknowledgesBeforeTheShrink),
        {"acknowledged entry lost", "acknowledged late", "stale read"},
    ),
    "trusts a damaged log": (under(trust_damage=True), {"unclean promoted", "acknowledged entry lost"}),
    "goes on alone": (under(faulty.GoesOnAlone), {"acknowledged entry lost"}),
    "a follower that takes nothing is not silent": (
        gray("deaf to entries", faulty.AnyAnswerIsProgress),
        {"a write waits too long"},
    ),
    "a leader trusts its clock": (lambda seed: clocks.violations(seed, faulty.TrustsItsClock), {"deleted early"}),
    "a leader asks nobody for the time": (lambda seed: clocks.violations(seed, faulty.AsksNobody), {"deleted early"}),
    "a slow follower stays": (gray("slow disk", faulty.NeverSlow), {"writes are held up again and again"}),
    "who left is required again at once": (gray("slow disk", faulty.NoRest), {"writes are held up again and again"}),
    "follows who lacks what is committed here": (
        lambda seed: forced.violations(seed, faulty.FollowsAnybody),
        {"confirmed but not on the disk"},
    ),
    "a leader with a full disk stays": (gray(FULL_LEADER, faulty.NoHeirs), {"few writes"}),
    "confirms a leader that is out of the registry": (gray(UNREGISTERED_LEADER, faulty.Faithful), {"nobody can find the leader"}),
    "an old segment that is broken ends the replica": (
        lambda seed: rotten.violations(seed, faulty.EndsForAnOldSegment),
        {"halted"},
    ),
    "trusts the page cache": (under(trust_cache=True), {"confirmed but not on the disk"}),
    "takes what stands behind an old seal for torn": (under(cut_at_seal=True), {"acknowledged entry lost"}),
}


FOUND_AT: dict[str, tuple[int, ...]] = {"trusts the page cache": (464,)}
"""Seeds of faults that few seeds find; they are played first."""


@pytest.mark.parametrize("name", portion(FAULTS))
def test_a_fault_put_back_is_found(name: str) -> None:
    play, signs = FAULTS[name]
    for seed in (*FOUND_AT.get(name, ()), *range(400)):
        if signs & {what for what, _ in play(seed)}:
            return
    pytest.fail("400 runs saw nothing of it")
