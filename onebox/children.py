"""Child processes of `pixiu up`: started with a log of their own, dead when the parent dies.

Source: docs/operations.md.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

PR_SET_PDEATHSIG = 1
LOG_TAIL_BYTES = 4_000
MAX_LOG_BYTES = 64 << 20
"""Log size above which a new log is started and the old one is kept once. Checked when the process starts, and every `ROTATE_S`
while it runs."""
ROTATE_S = 30.0
# Loaded before any fork: between fork and exec nothing may be imported.
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
PACKAGE_ROOT = Path(__file__).resolve().parent.parent


def child_environment() -> dict[str, str]:
    """The environment of a child: our packages come first, and the current folder is never on the path."""
    found = dict(os.environ)
    found["PYTHONPATH"] = os.pathsep.join([str(PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    found["PYTHONSAFEPATH"] = "1"
    return found


class DieWithParent:
    """Make a child die with its parent. Runs in the child between fork and exec.

    parent: its process ID; 0: this process, before it forks.
    """

    def __init__(self, number: int, parent: int = 0) -> None:
        self._number = number
        self._parent = parent or os.getpid()

    def __call__(self) -> None:
        if _LIBC is not None:
            _LIBC.prctl(PR_SET_PDEATHSIG, self._number)
            if os.getppid() != self._parent:  # it died in between
                os._exit(1)


def open_log(log: Path) -> BinaryIO:
    """Open a process's log for appending."""
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists() and log.stat().st_size > MAX_LOG_BYTES:
        log.replace(log.with_suffix(".old"))
    return log.open("ab")


def rotate_log(log: Path, limit: int = MAX_LOG_BYTES) -> bool:
    """Start the log of a running process afresh when it is too large. Returns True if it did.

    The process keeps its open file, so the file stays and its content is copied. Lines written in between may be lost.
    """
    try:
        if log.stat().st_size <= limit:
            return False
        shutil.copyfile(log, log.with_suffix(".old"))
        os.truncate(log, 0)
    except OSError:
        return False  # it is tried again
    return True


async def start_child(
    arguments: Sequence[str], log: Path, *, death_signal: int = signal.SIGKILL, environment: Mapping[str, str] | None = None
) -> asyncio.subprocess.Process:
    """Start `python ARGUMENTS…` in a session of its own (a terminal's Ctrl-C reaches only the parent), its output appended to a
    log.

    death_signal: what the child gets when the parent dies, however it dies (on Linux).
    """
    with open_log(log) as output:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=dict(environment or child_environment()),
            preexec_fn=DieWithParent(death_signal),  # a ctypes call only; needed because the parent may be killed
        )


def tail(log: Path, start: int = 0, limit: int = LOG_TAIL_BYTES) -> str:
    """Return the end of a log, at most from byte `start` on."""
    try:
        size = log.stat().st_size
        with log.open("rb") as file:
            file.seek(max(start, size - limit))
            return file.read(limit).decode(errors="replace").strip()
    except OSError:
        return ""
