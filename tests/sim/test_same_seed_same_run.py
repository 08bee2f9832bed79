"""In every simulation the same seed gives the same run byte for byte, in another process too, whose sets of strings are in another
order; and another seed another one."""

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


def trace(simulation: str, seed: int, hash_seed: int) -> str:
    program = TRACES[simulation].format(seed=seed)
    environment = os.environ | {"PYTHONHASHSEED": str(hash_seed)}
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=True
    ).stdout


@pytest.mark.parametrize("simulation", portion(TRACES))
def test_the_same_seed_gives_the_same_run_byte_for_byte(simulation: str) -> None:
    first = trace(simulation, 13, hash_seed=1)
    assert first.strip()
    assert trace(simulation, 13, hash_seed=2) == first
    assert trace(simulation, 14, hash_seed=1) != first
