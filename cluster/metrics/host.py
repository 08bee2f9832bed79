"""Free resources of the host that a process runs on: memory, and space for its data. Read in a thread, never in the event loop.

Source: docs/operations.md, "Growth".
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

MEMINFO: Final = Path("/proc/meminfo")
CGROUP: Final = Path("/sys/fs/cgroup")
_KIB: Final = 1024


def host_samples(data_dir: str) -> dict[str, int]:
    """Return the free bytes by name of the metric; unknown ones are left out. data_dir: empty: there is none."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        found["machine_memory_available_bytes"] = memory_available()
    if data_dir:
        with contextlib.suppress(OSError):
            stat = os.statvfs(data_dir)
            found["data_dir_free_bytes"] = stat.f_bavail * stat.f_frsize
    return found


def memory_available(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """Return the bytes that programs may take without swapping: the machine's, or what a control group leaves if that is less.
    Raises OSError, ValueError, IndexError if it is unknown."""
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    if "MemAvailable" not in lines:
        raise ValueError("no MemAvailable")
    left = int(lines["MemAvailable"].split()[0]) * _KIB
    with contextlib.suppress(OSError, ValueError):
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        left = left if limit == "max" else min(left, max(int(limit) - used, 0))
    return left
