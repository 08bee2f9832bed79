"""In every simulation the same seed gives the same run byte for byte, in another process too, whose sets of strings are in another
order. A seed runs alone by the command that failures print."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.effort import portion

ROOT = Path(__file__).resolve().parents[2]
TRACES = {
    "cluster": "from tests.sim.cluster.run import run; print(run({seed}).wire.trace)",
    "system": "from tests.sim.system.run import run; print(run({seed}).wire.trace)",
    "replication": "from tests.sim.replication.schedule import run; print(run({seed}).trace)",
    "delivery": "from tests.sim.delivery.schedule import run; print(run({seed}).trace)",
    "mail": "from tests.proxy.test_mail_under_faults import play; print(play({seed}).trace)",
}
"""Programs that print the trace of a run."""
COMMANDS = {"cluster": "tests.sim.cluster.run", "system": "tests.sim.system.run"}
"""Modules that run a seed alone, and say its trace."""


def output(*arguments: str, hash_seed: int) -> str:
    """What a Python with such arguments prints."""
    environment = os.environ | {"PYTHONHASHSEED": str(hash_seed)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=True
    ).stdout


def trace(simulation: str, hash_seed: int) -> str:
    """Of seed 13."""
    return output("-c", TRACES[simulation].format(seed=13), hash_seed=hash_seed).strip()


@pytest.mark.parametrize("simulation", portion(TRACES))
def test_the_same_seed_gives_the_same_run_byte_for_byte(simulation: str) -> None:
    first = trace(simulation, hash_seed=1)
    if simulation in COMMANDS:
        alone = output("-m", COMMANDS[simulation], "13", hash_seed=2)
        assert alone.startswith("seed 13: ")
        assert f" trace {first}," in alone
        assert alone.rstrip().endswith("every promise kept")
    else:
        assert trace(simulation, hash_seed=2) == first
