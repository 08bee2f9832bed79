"""Processes of tests, forked from one that has imported what they need: most of what starting a role takes is imports."""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from registry.fork_server import PRELOADED, Forked, ForkServer

PROJECT = Path(__file__).resolve().parents[2]
OURS = ("tests.support.replicated_role", "tests.support.deaf_role")


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
        return _server().start(module, arguments, output, _environment() | dict(environment or {}))
