"""A whole cluster of production cores and production links on a seeded network, with every invariant of `tests.sim.cluster`.

A failing seed prints itself; `python -m tests.sim.cluster.run SEED` runs it alone. `make sim` runs a thousand.

Source: docs/promises.md, docs/routing.md, docs/architecture.md, docs/memberships.md, docs/promises.md, "Failure rules";
docs/simulation.md.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.sim.cluster.edges import GatewayProcess
from tests.sim.cluster.run import Load, report
from tests.support.effort import in_full, runs

FULL = in_full("PIXIU_SIM_SEEDS")
SEEDS = runs("PIXIU_SIM_SEEDS", local=2, ci=12)
RARE = (30,) if FULL else ()
"""One run in thirty has messages that are passed on to where a room was; this one does."""
ENOUGH = 13
"""Some of what must happen is rare: in one run of ten."""
HAPPENED: Counter[str] = Counter()
"""What the runs of this session had in them."""
RUNS: list[int] = []
LEAST = {
    "crashes": 1.0, "pauses": 0.5, "cuts": 0.5, "one-way cuts": 0.2, "scrambled": 2, "doublings": 0.3, "feedback": 1,
    "confirmations": 100, "confirmations of a peer's": 100, "passed on": 0.04,
    "accepted": 100, "accepted big": 0.1, "sent": 10, "stale": 0.02,
    "delivered": 100, "in order": 50, "signals": 20, "receipts": 5, "gaps": 20,
    "accepted chat": 50, "chat": 50, "chat sent": 20, "replaced": 0.1, "overtaken": 0.1, "offline": 1, "user signals": 10,
    "signals given": 40, "signals to a big room": 1,
    "listed": 3, "held": 0.5, "released": 0.5, "room sent": 20, "ended": 4, "ended as another device": 2,
    "nodes killed": 0.2, "nodes paused": 0.05, "handed over": 100,
}  # fmt: skip
"""What must have happened, or been checked, in a run on the average: a simulation in which nothing happens finds nothing."""


@pytest.mark.parametrize("seed", sorted({*range(SEEDS), *RARE}))
def test_a_cluster_keeps_its_promises(seed: int) -> None:
    found, world = report(seed)
    assert not found, "\n".join(found)
    assert world is not None
    HAPPENED.update(dict(world.pairs()))
    RUNS.append(seed)


@pytest.mark.parametrize("seed", range(20, 20 + max(SEEDS // 6, 1)))
def test_what_waits_for_more_breaks_no_promise(seed: int) -> None:
    assert report(seed, load=Load(announced=True))[0] == []


@pytest.mark.parametrize("seed", range(40, 40 + max(SEEDS // 6, 1)))
def test_what_users_publish_at_qos_1_breaks_no_promise(seed: int) -> None:
    found, world = report(seed, load=Load(confirmed=120))
    assert found == []
    assert world is not None
    gateways = [process for process in world.by_endpoint.values() if isinstance(process, GatewayProcess)]
    assert sum(gateway.core.confirming.lost for gateway in gateways), "batches are sent again in every run"


@pytest.mark.skipif(not FULL, reason="it takes as many runs as continuous integration makes in one turn of three")
def test_the_runs_have_faults_in_them() -> None:
    """Of the runs above; alone it makes as many as are enough."""
    happened, runs = HAPPENED, len(RUNS)
    if runs < ENOUGH:
        seeds = {*range(ENOUGH), *RARE}
        runs, happened = len(seeds), Counter()
        for seed in seeds:
            found, world = report(seed)
            assert world is not None, found
            happened.update(dict(world.pairs()))
    assert {name: happened[name] / runs for name, least in LEAST.items() if happened[name] < least * runs} == {}
