"""The hook by which a test has `pixiu double` killed in a phase."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from ops.doubling import double_command
from ops.doubling.doubling import Phase
from pixiu.errors import ConfigurationError

PROGRAM = (
    "from ops.doubling.double_command import _hook; from ops.doubling.doubling import Phase; _hook(%r)(Phase(%r)); print('lives')"
)


@pytest.mark.process
@pytest.mark.parametrize(("named", "phase", "code"), [("split,open", "open", -signal.SIGKILL), ("split,open", "commit", 0)])
def test_the_tool_is_killed_in_the_phases_that_are_named(named: str, phase: str, code: int) -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM % (named, phase)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (result.returncode, result.stdout) == (code, "" if code else "lives\n")


def test_a_phase_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=f"must be of {Phase.BEGIN.value}, "):
        double_command._hook("split,opne")
