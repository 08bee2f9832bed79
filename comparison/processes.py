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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from onebox.children import DieWithParent

TICKS: Final = os.sysconf("SC_CLK_TCK")
CPU_CLOCK: Final = 2
"""Linux's clock of another process by its scheduled time: see clock_getcpuclockid(3)."""
START_LIMIT_S: Final = 60.0
STOP_LIMIT_S: Final = 30.0
POLL_S: Final = 0.01
"""Interval of checking that the port answers."""
SYSTEM_FOLDERS: Final = "/usr/sbin:/sbin:/usr/local/sbin"
"""Folders of servers that may be missing from PATH."""


def cpu_seconds(pids: Sequence[int]) -> float:
    """Return the user and system CPU seconds that these processes have used so far, to the microsecond. Raises OSError when one
    is gone."""
    return sum(time.clock_gettime(~pid << 3 | CPU_CLOCK) for pid in pids)


def machine_seconds() -> float:
    """Return the CPU seconds that all processes of the machine have used so far."""
    user, nice, system, _, _, *others = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8])
    return (user + nice + system + sum(others)) / TICKS


def memory_bytes(pids: Sequence[int]) -> int:
    """Return the memory of these processes; memory shared with others counts in part."""
    found = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                found += int(line.split()[1]) << 10
    return found


def switches(pids: Sequence[int]) -> dict[int, int]:
    """Return the voluntary context switches so far of each thread of these processes, by its ID."""
    found: dict[int, int] = {}
    for pid in pids:
        for status in Path(f"/proc/{pid}/task").glob("*/status"):
            with contextlib.suppress(OSError):  # a thread that has ended
                found[int(status.parent.name)] = int(status.read_text().partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return found


def switched(before: Mapping[int, int], after: Mapping[int, int]) -> int:
    """Return the context switches between two looks of the threads that are in both."""
    return sum(now - before[thread] for thread, now in after.items() if thread in before)


def free_port() -> int:
    """Find a TCP port that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def installed(name: str) -> str | None:
    """Return the path of a server, also in system folders that may be missing from PATH."""
    return shutil.which(name) or shutil.which(name, path=SYSTEM_FOLDERS)


def _living() -> dict[int, tuple[int, int]]:
    """Return every live process, with its parent and its session."""
    found = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                found[int(path.name)] = int(fields[1]), int(fields[3])
    return found


def session_pids(leader: int) -> list[int]:
    """Return the live processes of a session."""
    return [pid for pid, (_, session) in _living().items() if session == leader]


def family_pids(first: int) -> list[int]:
    """Return a live process and those that it, or one of them, started."""
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in _living().items():
        children.setdefault(parent, []).append(pid)
    found = [first]
    for pid in found:
        found += children.get(pid, [])
    return found


@contextlib.contextmanager
def server(command: list[str], port: int, environment: dict[str, str]) -> Iterator[int]:
    """Run a server in a session of its own. Yields the session's number once the port answers. All of it is ended afterwards,
    and asked to end when this process is killed."""
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
