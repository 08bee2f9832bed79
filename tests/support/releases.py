"""The last release, out of this tree's history, whose processes run beside those of today."""

from __future__ import annotations

import atexit
import io
import os
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from onebox.fork_server import Forked, ForkServer
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


def newest_release(folder: Path) -> Release | None:
    """The tree of the newest tag `v*`, unpacked below a folder; None while there is none. Skips the test where a tag's tree is not
    at hand."""
    tags = _git("tag", "--list", "v*", "--sort=-version:refname")
    if isinstance(tags, str) or not tags.strip():
        return None
    tag = tags.decode().split()[0]
    archive = _git("archive", tag)
    if isinstance(archive, str):
        pytest.skip(f"no tree of {tag} to run beside this one (a shallow clone?): {archive}")
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder / tag, filter="data")
    return Release(folder / tag)


def _git(*words: str) -> bytes | str:
    """What a command of git writes, or why it does not."""
    try:
        made = subprocess.run(["git", "-C", PROJECT, *words], capture_output=True, timeout=GIT_S, check=False)
    except OSError as error:
        return f"git: {error.strerror}"
    return made.stdout if made.returncode == 0 else made.stderr.decode(errors="replace").strip()
