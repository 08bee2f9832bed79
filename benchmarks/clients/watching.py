"""What benchmarks of many clients see of a cluster: memory and CPU of its processes, pages, and victims for faults."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pixiu.errors import PixiuError
from tests.support.cluster import LocalCluster
from tools.cli.http import fetch, samples

STOP_S = (2.0, 8.0)
"""Shortest and longest stop of a victim."""


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which so much of them lies; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else 0.0


def anonymous_mib(pid: int) -> float:
    """RssAnon of a process, MiB; 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")) / 1024
    except (OSError, StopIteration):
        return 0.0


def cpu_s(cluster: LocalCluster) -> dict[int, float]:
    """CPU seconds so far, by process that runs."""
    found = dict[int, float]()
    for pid in {int(process["pid"]) for process in cluster.status()["processes"]}:
        with contextlib.suppress(OSError):
            ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
            found[pid] = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return found


async def counters(process: Mapping[str, Any], wanted: Callable[[str], bool]) -> Counter[str]:
    """Samples of a process's page, by name, over all labels."""
    host, _, port = process["http"].removeprefix("http://").rpartition(":")
    found: Counter[str] = Counter()
    with contextlib.suppress(OSError):
        for name, _, value in samples((await fetch(host, int(port), "/metrics", 10.0))[1]):
            if wanted(name):
                found[name] += int(value)
    return found


class Memory:
    """Samples the memory of all processes of a cluster until it is cancelled."""

    def __init__(self, cluster: LocalCluster, every_s: float = 2.0) -> None:
        self._cluster, self._every_s = cluster, every_s
        self.samples: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
        """(role, process ID) → (monotonic seconds, MiB)."""

    async def run(self) -> None:
        """Sample."""
        while True:
            with contextlib.suppress(PixiuError, OSError, AssertionError):
                for process in (await asyncio.to_thread(self._cluster.status))["processes"]:
                    mib = anonymous_mib(int(process["pid"]))
                    if mib:
                        self.samples[process["role"], int(process["pid"])].append((time.monotonic(), mib))
            await asyncio.sleep(self._every_s)

    def slopes(self, least_s: float = 60.0) -> dict[str, dict[str, float]]:
        """By role: the greatest MiB of a process, and the greatest slope, MiB a minute, of those that ran for so long; their first
        third is left out, in which tables and caches fill."""
        found: dict[str, dict[str, float]] = {}
        for (role, _), points in self.samples.items():
            mine = found.setdefault(role, {"most_mib": 0.0})
            mine["most_mib"] = round(max(mine["most_mib"], *(mib for _, mib in points)), 1)
            if points[-1][0] - points[0][0] >= least_s:
                slope = _slope(points[len(points) // 3 :]) * 60.0
                mine["slope_mib_per_min"] = round(max(mine.get("slope_mib_per_min", slope), slope), 2)
        return found


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Least squares."""
    x, y = (sum(each) / len(points) for each in zip(*points, strict=True))
    below = sum((at - x) ** 2 for at, _ in points)
    return sum((at - x) * (mib - y) for at, mib in points) / below if below else 0.0


class Victims:
    """Kills and stops processes of a cluster in turn.

    Args:
        kinds: roles, and `xiu-leader`, `pi-leader`.
        on_fault: called with the kind, when it began and when it ended, monotonic seconds.
    """

    def __init__(
        self,
        cluster: LocalCluster,
        kinds: Sequence[str],
        seed: int,
        on_fault: Callable[[str, float, float], None],
        stops: float = 0.4,
    ) -> None:
        self._cluster, self._kinds, self._on_fault, self._stops = cluster, kinds, on_fault, stops
        self._rolls, self._left = random.Random(seed), list[str]()
        self.counts: Counter[str] = Counter()

    async def strike(self, kind: str = "") -> None:
        """Strike the next kind, or this one; returns when the victim goes on, or has ended."""
        if not kind:
            if not self._left:
                self._left = self._rolls.sample(list(self._kinds), len(self._kinds))
            kind = self._left.pop()
        role = kind.removesuffix("-leader")
        try:
            found = await asyncio.to_thread(self._cluster.processes, role)
        except PixiuError:
            return
        if kind != role:
            led = [each for each in found if each.get("replication")]
            found = [each for each in led if each["replication"]["member"] == each["replication"]["leader"]]
        if not found:
            self.counts[f"no {kind} to strike"] += 1
            return
        pid, stops = int(self._rolls.choice(found)["pid"]), self._rolls.random() < self._stops
        self.counts[f"{'stop' if stops else 'kill'} of {kind}"] += 1
        began = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP if stops else signal.SIGKILL)
            if stops:
                try:
                    await asyncio.sleep(self._rolls.uniform(*STOP_S))
                finally:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)
        self._on_fault(kind, began, time.monotonic())
