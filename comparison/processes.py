"""Processes of servers: started in a session of their own and ended with it, their CPU and their memory.

Source: docs/performance.md, "Beside others".
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from registry.children import DieWithParent

TICKS: Final = os.sysconf("SC_CLK_TCK")
CPU_CLOCK: Final = 2
"""Of the clocks that Linux has for another process, by what it was scheduled: see clock_getcpuclockid(3)."""
START_LIMIT_S: Final = 60.0
STOP_LIMIT_S: Final = 30.0
POLL_S: Final = 0.05
"""Between two looks whether the port answers."""
SYSTEM_FOLDERS: Final = "/usr/sbin:/sbin:/usr/local/sbin"
"""Where servers are that are not in everybody's PATH."""


def cpu_seconds(pids: Sequence[int]) -> float:
    """User and system CPU seconds that these processes have used so far, to the microsecond; raises OSError when one is gone."""
    return sum(time.clock_gettime(~pid << 3 | CPU_CLOCK) for pid in pids)


def machine_seconds() -> float:
    """CPU seconds that all processes of the machine have used so far."""
    user, nice, system, _, _, *others = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8])
    return (user + nice + system + sum(others)) / TICKS


def memory_bytes(pids: Sequence[int]) -> int:
    """What these processes have in memory; what they share with others counts in part."""
    found = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                found += int(line.split()[1]) << 10
    return found


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def installed(name: str) -> str | None:
    """Where a server is; system folders are not in everybody's PATH."""
    return shutil.which(name) or shutil.which(name, path=SYSTEM_FOLDERS)


def session_pids(leader: int) -> list[int]:
    """The processes of a session that live."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == leader:
                    found.append(int(path.name))
    return found


@contextlib.contextmanager
def server(command: list[str], port: int, environment: dict[str, str]) -> Iterator[int]:
    """A server in a session of its own: the session's number, once the port answers; all of it is gone afterwards, and it
    is told to end when this process is killed."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True, env=os.environ | environment, preexec_fn=DieWithParent(signal.SIGTERM),  # noqa: PLW1509  # a ctypes call only
    )  # fmt: skip
    try:
        end = time.monotonic() + START_LIMIT_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{command[0]} does not serve (exit code {process.poll()})")
            time.sleep(POLL_S)
        yield process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(STOP_LIMIT_S)
