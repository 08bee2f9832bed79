"""Machines of a partition lose their power at any sync; what is left of their disks is started, and every claim was true.

The runs are played by a process of their own, because the recorder must be in front of libc from its start: it is told a seed and a
fault a line, and answers with a line each.

`python -m tests.sim.power_cut.run SEED` plays one seed. `make sim` plays a thousand.

Source: docs/simulation.md, "Power cuts".
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sim.power_cut.faults import FAULTS
from tests.sim.power_cut.recorder import library
from tests.support.effort import portion, runs

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="the recorder needs Linux and a C compiler"
)
RUNS = runs("PIXIU_POWER_CUT_RUNS", local=4, ci=8)
SEEDS = 16
"""A fault must show in one of so many runs, its own seed first."""
LEAST = {
    "REPLICATED": 50, "PERSISTED": 50, "cuts": 6, "syncs": 150, "checked confirmed": 150, "checked flushed": 4, "checked seal": 50,
}  # fmt: skip
"""What must have happened, or been checked, in a run on the average: a simulation in which nothing happens finds nothing."""

Play = Callable[[int, str], Any]


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
    """Plays a seed, with a fault or without."""
    folder: Path = tmp_path_factory.mktemp("recorder")
    environment = os.environ | {"LD_PRELOAD": str(library(folder)), "TMPDIR": str(folder)}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.sim.power_cut.run", "--served"],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    told, heard = process.stdin, process.stdout

    def played(seed: int, fault: str = "") -> Any:
        told.write(json.dumps([seed, fault]) + "\n")
        told.flush()
        line = heard.readline()
        assert line, "the process that plays has ended; see what it wrote above"
        return json.loads(line)

    try:
        yield played
    finally:
        told.close()
        process.wait(60)


def test_nothing_that_was_claimed_is_lost_with_the_power(play: Play) -> None:
    happened: Counter[str] = Counter()
    for seed in range(RUNS):
        found = play(seed, "")
        assert not found["found"], "\n".join([f"seed {seed} alone: python -m tests.sim.power_cut.run {seed}", *found["found"]])
        happened.update(found["happened"])
    assert {name: happened[name] / RUNS for name, least in LEAST.items() if happened[name] < least * RUNS} == {}


def test_the_same_seed_gives_the_same_run_whatever_was_played_before(play: Play) -> None:
    first = play(7, "")["trace"]
    play(2, "")
    assert play(7, "")["trace"] == first


@pytest.mark.parametrize("fault", portion(FAULTS))
def test_a_fault_that_is_planted_is_found(play: Play, fault: str) -> None:
    seeds = [FAULTS[fault].seed, *(seed for seed in range(SEEDS) if seed != FAULTS[fault].seed)]
    assert any(play(seed, fault)["found"] for seed in seeds), f"no run of {SEEDS} found it"
