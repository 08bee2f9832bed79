"""The whole system in one seeded world: rooms, signals, chat, and mail from its writer to each device's application.

A failing seed prints itself; `python -m tests.sim.system.run SEED` runs it alone. `make sim` runs a thousand.

Source: docs/simulation.md, "The whole system".
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.sim.system.run import report
from tests.support.effort import in_full, runs

FULL = in_full("PIXIU_SYSTEM_SEEDS")
SEEDS = runs("PIXIU_SYSTEM_SEEDS", local=2, ci=10)
RARE = (11, 46) if FULL else ()
"""The first has two processes of every role. One run in five has a proxy that crashes, or a leader of Pi severed while it splits;
the second has both."""
ENOUGH = 11
"""Some of what must happen is rare: in one run of five."""
HAPPENED: Counter[str] = Counter()
"""What the runs of this session had in them."""
RUNS: list[int] = []
LEAST = {
    "crashes": 2, "pauses": 0.5, "cuts": 0.3, "streams broken": 5, "drained": 1, "moves without a gap": 2, "leaders isolated": 0.2,
    "leaders killed": 0.2, "deposed": 0.3,
    "pi led": 1.2, "xiu led": 1.2, "gateway crashed": 0.1, "relay crashed": 0.1, "proxy crashed": 0.1, "snapshots of logs": 0.2,
    "mails": 100, "bursts": 0.2, "mails to many": 10, "confirmed replicated": 80, "confirmed persisted": 5,
    "confirmed accepted": 5, "copies above one": 20,
    "sent again": 3, "stored": 150, "appended": 100, "appended again": 0.3, "in order": 200, "appends refused": 0.05,
    "deliveries": 150, "delivered again": 5, "written": 150, "received": 150, "received again by another run": 0.5,
    "acknowledged": 150, "cursors saved": 80, "cursors fenced": 0.05, "sessions": 10, "inboxes opened": 10,
    "applications restarted": 1, "accepted": 50, "delivered": 50, "chat": 20, "signals": 8, "receipts": 4, "offline": 1,
    "confirmations": 40,
    "pi doubling done": 0.25, "xiu doubling done": 0.25, "router doubling done": 0.1, "broker doubling done": 0.1,
    "relay doubling done": 0.1, "killed in a doubling": 0.5, "stopped in a doubling": 0.2, "tools killed": 0.5,
    "leaders severed": 0.05, "deletions before their time": 0.05,
    "nodes killed": 0.1, "handed over": 20,
    "snapshots for children": 0.3, "inboxes after a doubling": 1,
}  # fmt: skip
"""What must have happened, or been checked, in a run on the average: a simulation in which nothing happens finds nothing."""


@pytest.mark.parametrize("seed", sorted({*range(SEEDS), *RARE}))
def test_the_whole_system_keeps_its_promises(seed: int) -> None:
    found, world = report(seed)
    assert not found, "\n".join(found)
    assert world is not None
    HAPPENED.update(dict(world.pairs()))
    RUNS.append(seed)


@pytest.mark.skipif(not FULL, reason="it takes as many runs as continuous integration makes in one turn of three")
def test_the_runs_have_faults_in_them() -> None:
    """Of the runs above; alone it makes as many as are enough."""
    happened, number = HAPPENED, len(RUNS)
    if number < ENOUGH:
        seeds = {*range(ENOUGH), *RARE}
        number, happened = len(seeds), Counter()
        for seed in seeds:
            found, world = report(seed)
            assert world is not None, found
            happened.update(dict(world.pairs()))
    assert {name: happened[name] / number for name, least in LEAST.items() if happened[name] < least * number} == {}
