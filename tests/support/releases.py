"""An earlier state of this tree, out of its history, whose processes run beside those of today."""

from __future__ import annotations

import atexit
import io
import os
import subprocess
import tarfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from registry.fork_server import Forked, ForkServer
from tests.support.forks import PROJECT

GIT_S = 60.0


class Release:
    """The tree of a commit, in a folder of its own, with this interpreter and its libraries."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Nothing of the folder in which the tests run is imported: `-m` would put it before PYTHONPATH.
        self._environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
        self._server = ForkServer(self._environment)
        atexit.register(self._server.close)

    def fork(self, module: str, arguments: Sequence[str], log: Path) -> Forked:
        """`python -m MODULE ARGUMENTS…` of that tree, its output appended to a log."""
        with open(log, "ab") as output:
            return self._server.start(module, arguments, output, self._environment)

    def close(self) -> None:
        """End what still runs of it."""
        self._server.close()
        atexit.unregister(self._server.close)


def release(commit: str, folder: Path) -> Release:
    """The tree of a commit, unpacked below a folder. Skips the test where the history does not reach so far."""
    archive = _archive(commit)
    if isinstance(archive, str):
        pytest.skip(f"no tree of commit {commit} to run beside this one (a shallow clone?): {archive}")
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder / commit, filter="data")
    return Release(folder / commit)


@cache
def _archive(commit: str) -> bytes | str:
    """A tar file of a commit, or why there is none."""
    try:
        made = subprocess.run(["git", "-C", PROJECT, "archive", commit], capture_output=True, timeout=GIT_S, check=False)
    except OSError as error:
        return f"git: {error.strerror}"
    return made.stdout if made.returncode == 0 else made.stderr.decode(errors="replace").strip()
