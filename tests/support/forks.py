"""Processes of tests, forked from one that has imported what they need: most of what starting a role takes is imports."""

from __future__ import annotations

import atexit
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import BinaryIO

from onebox.fork_server import PRELOADED, Forked, ForkServer
from tests.support.waiting import WAIT_S

PROJECT = Path(__file__).resolve().parents[2]
FORKED_PIXIU = "tests.support.forked_pixiu"
OURS = ("tests.support.replicated_role", "tests.support.counter_role", "tests.support.deaf_role", "tests.support.imported_pixiu")


@cache
def _server() -> ForkServer:
    server = ForkServer(_environment(), [*PRELOADED, *OURS])
    atexit.register(server.close)
    return server


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(PROJECT)}


def fork(module: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> Forked:
    """`python -m MODULE ARGUMENTS…`, its output appended to a log."""
    with open(log, "ab") as output:
        return fork_into(output, module, arguments, environment)


def fork_into(output: BinaryIO, module: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Forked:
    """The same into an open file or pipe."""
    return _server().start(module, arguments, output, _environment() | dict(environment or {}))


def fork_pixiu(
    *arguments: str, given: str = "", environment: Mapping[str, str] | None = None, limit_s: float = WAIT_S
) -> subprocess.CompletedProcess[str]:
    """`pixiu ARGUMENTS…`, until it ends. Of the environment variables can only be more, and none less. `given`: its input."""
    with tempfile.TemporaryDirectory(prefix="pixiu-command-") as folder:
        output, errors = Path(folder) / "output", Path(folder) / "errors"
        (Path(folder) / "input").write_text(given)
        process = fork(FORKED_PIXIU, [folder, *arguments], output, environment)
        try:
            code = process.wait(limit_s)
        except BaseException:
            process.kill()
            raise
        return subprocess.CompletedProcess(["pixiu", *arguments], code, output.read_text(), errors.read_text())
