"""Machines of a partition lose their power at any sync; what is left of their disks is started, and every claim was true.

The runs are played by a process of their own, because the recorder must be in front of libc from its start: it is told a seed and a
fault a line, and answers with a line each.

`python -m tests.sim.power_cut.run SEED` plays one seed. `make sim` plays a thousand.

Source: docs/simulation.md, "Power cuts".
"""

from __future__ import annotations

import json
import select
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sim.power_cut.faults import FAULTS
from tests.sim.power_cut.recorder import environment, library
from tests.support.effort import portion, runs

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="the recorder needs Linux and a C compiler"),
    pytest.mark.timeout(0),  # each answer has a bound of its own, which ends only the process that plays
]
RUNS = runs("PIXIU_POWER_CUT_RUNS", local=4, ci=10)
ANSWER_S = 240.0
"""A run takes seconds, on a machine that has much else to do minutes. One that does not end ends itself (`threads.MAX_TURNS`)."""
LEAST = {
    "REPLICATED": 50, "PERSISTED": 50, "cuts": 6, "syncs": 150, "checked confirmed": 150, "checked flushed": 4, "checked seal": 50,
    "checked opened": 3,
}  # fmt: skip
"""What must have happened, or been checked, in a run on the average: a simulation in which nothing happens finds nothing."""
SELDOM = ("cut", "reset", "load")
"""What must have happened in the first ten runs."""


class Play:
    """Plays a seed, with a fault or without, in a process that is started anew when it has ended."""

    def __init__(self, folder: Path) -> None:
        self._environment = environment(library(folder)) | {"TMPDIR": str(folder)}
        self._process: subprocess.Popen[str] | None = None

    def __call__(self, seed: int, fault: str = "") -> Any:
        process = self._process = self._process or subprocess.Popen(
            [sys.executable, "-m", "tests.sim.power_cut.run", "--served"],
            env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([seed, fault]) + "\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], ANSWER_S)
        line = process.stdout.readline() if ready else ""
        if not line:
            self.end()
            ended = f"with {process.returncode}; see what it wrote above" if ready else f"by the test, after {ANSWER_S:.0f} s"
            pytest.fail(f"the process that played seed {seed} with the fault {fault!r} was ended {ended}")
        return json.loads(line)

    def end(self) -> None:
        """End the process; the next seed has another one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
    """Plays seeds."""
    made = Play(tmp_path_factory.mktemp("recorder"))
    try:
        yield made
    finally:
        made.end()


def test_nothing_that_was_claimed_is_lost_with_the_power(play: Play) -> None:
    happened: Counter[str] = Counter()
    for seed in range(RUNS):
        found = play(seed, "")
        assert not found["found"], "\n".join([f"seed {seed} alone: python -m tests.sim.power_cut.run {seed}", *found["found"]])
        happened.update(found["happened"])
    assert {name: happened[name] / RUNS for name, least in LEAST.items() if happened[name] < least * RUNS} == {}
    assert RUNS < 10 or all(happened[name] for name in SELDOM), happened


def test_the_same_seed_gives_the_same_run_whatever_was_played_before(play: Play) -> None:
    first = play(3, "")
    play(2, "")
    assert play(3, "") == first


def test_another_process_plays_the_same_run(play: Play) -> None:
    first = play(3, "")
    play.end()
    assert play(3, "") == first


@pytest.mark.parametrize("fault", FAULTS)
def test_a_function_still_has_the_words_that_a_fault_replaces(fault: str) -> None:
    assert FAULTS[fault].made() is not None


@pytest.mark.parametrize("fault", portion(FAULTS))
def test_a_fault_that_is_planted_is_found(play: Play, fault: str) -> None:
    assert play(FAULTS[fault].seed, fault)["found"], f"seed {FAULTS[fault].seed} does not find it any more: look for one that does"
