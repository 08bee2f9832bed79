"""Measure mail through the whole chain: how much a second and a CPU second, and the time until it is confirmed.

SDK, proxy, Xiu, Pi, as real processes with one partition each, alone and with two replicas; one writer, closed loop: a window
is sent, then the next one when all of it is confirmed at level replicated. The CPU of proxy, Xiu and Pi counts, that of the load
does not. 100 bytes to 1,000 users. `benchmarks.clusters.durable` has the stores alone.

Estimate, from what the parts cost elsewhere: a mail costs the proxy 2 µs, a Xiu 5 µs, a Pi 4 µs, two replicas twice as much of
the last two: 90,000 a CPU second alone and 50,000 with two replicas at windows of 1,000. A window of 1 pays 0.3 ms of gRPC for each
message of each hop, eight of them: 300 a CPU second.

First run (2 cores shared with four other loads), windows 1, 100, 1,000: alone 203, 15,600, 70,000 a CPU second; two replicas 107,
8,700, 41,000, of 24 µs a mail the proxy 4, each Xiu 5, each Pi 5. With two replicas in a quieter minute 50,000 a CPU second, 31,000
a second by the clock, and 6.8 ms at the median for one mail alone, of which most are two groups of disks, one after the other.

Since the kernel syncs the logs (decision 297), a mail alone costs 12 voluntary context switches with one replica and 20 with two;
it was 23 and 42.

    python -m benchmarks.clusters.mail [--seconds 2] [--windows 1 100 1000] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

import pixiu
from comparison.ours import Running, cluster
from comparison.processes import cpu_seconds, switched, switches

ROLES = ("proxy", "xiu", "pi")
WINDOWS = (1, 100, 1000)
USERS = 1000
BODY = bytes(100)


@dataclass(frozen=True)
class Row:
    """Result of one case."""

    replicas: int
    window: int
    per_second: float
    per_cpu: float
    p50_ms: float
    """Time from sending a window until all of it was confirmed."""
    p99_ms: float
    cpu: dict[str, float]
    """Microseconds a mail, by role."""
    switches: dict[str, float]
    """Voluntary context switches a mail, by role."""


async def measure(running: Running, replicas: int, window: int, seconds: float) -> Row:
    """Measure one case."""
    async with pixiu.connect(running.registry, client="bench-mail") as px, px.mail_writer() as writer:
        writer.send(1, BODY)
        await writer.wait_finished()
        before = {role: (cpu_seconds(running.pids[role]), switches(running.pids[role])) for role in ROLES}
        began, sent, took = time.perf_counter(), 0, list[float]()
        while (now := time.perf_counter()) < began + seconds:
            for number in range(sent, sent + window):
                writer.send(1 + number % USERS, BODY)
            await writer.wait_finished()
            sent += window
            took.append(time.perf_counter() - now)
        wall = time.perf_counter() - began
    used = {role: cpu_seconds(running.pids[role]) - before[role][0] for role in ROLES}
    waits = {role: switched(before[role][1], switches(running.pids[role])) for role in ROLES}
    took.sort()
    return Row(
        replicas, window, sent / wall, sent / max(sum(used.values()), 0.01), took[len(took) // 2] * 1000,
        took[len(took) * 99 // 100] * 1000, {role: used[role] / sent * 1e6 for role in ROLES},
        {role: waits[role] / sent for role in ROLES},
    )  # fmt: skip


async def run(seconds: float, windows: Sequence[int]) -> list[Row]:
    """Measure all cases."""
    rows: list[Row] = []
    for replicas in (1, 2):
        async with cluster(stores=replicas) as running:
            rows += [await measure(running, replicas, window, seconds) for window in windows]
    return rows


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--windows", type=int, nargs="+", default=WINDOWS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = asyncio.run(run(args.seconds, args.windows))
    if args.json:
        print(json.dumps([vars(row) for row in rows]))
        return 0
    shown = Table(
        "replicas", "window", "mails / s", "mails / CPU s", "p50 ms", "p99 ms", *(f"{role} µs (switches)" for role in ROLES)
    )
    for row in rows:
        figures = (f"{row.per_second:,.0f}", f"{row.per_cpu:,.0f}", f"{row.p50_ms:.1f}", f"{row.p99_ms:.1f}")
        shown.add_row(
            str(row.replicas), str(row.window), *figures, *(f"{row.cpu[role]:.1f} ({row.switches[role]:.2f})" for role in ROLES)
        )
    Console(width=None if sys.stdout.isatty() else 200).print(shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
