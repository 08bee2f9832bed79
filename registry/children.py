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
"""A larger log is started anew, and the old one is kept once: when its process starts, and every `ROTATE_S` while it runs."""
ROTATE_S = 30.0
# Loaded before any fork: between fork and exec nothing may be imported.
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
PACKAGE_ROOT = Path(__file__).resolve().parent.parent


def child_environment() -> dict[str, str]:
    """The environment of a child: our packages first, and never what lies in the current folder."""
    found = dict(os.environ)
    found["PYTHONPATH"] = os.pathsep.join([str(PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    found["PYTHONSAFEPATH"] = "1"
    return found


class DieWithParent:
    """Run in the child between fork and exec."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._parent = os.getpid()

    def __call__(self) -> None:
        if _LIBC is not None:
            _LIBC.prctl(PR_SET_PDEATHSIG, self._number)
            if os.getppid() != self._parent:  # it died in between
                os._exit(1)


def open_log(log: Path) -> BinaryIO:
    """A process's log, to be appended to."""
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists() and log.stat().st_size > MAX_LOG_BYTES:
        log.replace(log.with_suffix(".old"))
    return log.open("ab")


def rotate_log(log: Path, limit: int = MAX_LOG_BYTES) -> bool:
    """Start the log of a running process anew when it is too large. Returns whether it was.

    The process appends to the file that it has, so the file stays, and what it held is copied. Lines of the moment between may be
    lost.
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
    """`python ARGUMENTS…` in a session of its own (a terminal's Ctrl-C reaches only the parent), its output appended to a log.

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
    """The end of a log, from byte `start` on at the most."""
    try:
        size = log.stat().st_size
        with log.open("rb") as file:
            file.seek(max(start, size - limit))
            return file.read(limit).decode(errors="replace").strip()
    except OSError:
        return ""
