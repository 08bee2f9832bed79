"""What the benchmarks share: peers where they are installed, a load in a process of its own, and what the comparison has."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

from comparison.ours import Running, build, builds, cluster
from comparison.processes import cpu_seconds, free_port

__all__ = ["Running", "build", "builds", "cluster", "cpu_seconds", "free_port", "load", "peer", "working"]


@contextlib.asynccontextmanager
async def working(tasks: Sequence[asyncio.Task[None]]) -> AsyncIterator[None]:
    """Tasks that are ended afterwards; what went wrong in one is raised."""
    try:
        yield
    finally:
        for task in tasks:
            if task.done():
                task.result()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def peer(command: Sequence[str], port: int) -> Iterator[int | None]:
    """Another server on a free port: its process ID, or None where it is not installed."""
    if shutil.which(command[0]) is None and not Path(f"/usr/sbin/{command[0]}").exists():
        yield None
        return
    path = shutil.which(command[0]) or f"/usr/sbin/{command[0]}"
    process = subprocess.Popen([path, *command[1:]], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            if process.poll() is not None:
                raise RuntimeError(f"{command[0]} ended at once with code {process.returncode}")
            subprocess.run(["sleep", "0.05"], check=True)
        yield process.pid
    finally:
        process.terminate()
        process.wait(10)


async def load(ports: Sequence[int], pids: Sequence[int], **options: object) -> dict[str, float]:
    """Run `benchmarks.mqtt_load` in a process of its own; adds `server_cpu_s` and `per_cpu_s` of the servers."""
    arguments = [sys.executable, "-m", "benchmarks.mqtt_load"]
    for port in ports:
        arguments += ["--port", str(port)]
    for name, value in options.items():
        arguments += [f"--{name}", str(value)]
    before = cpu_seconds(pids)
    process = await asyncio.create_subprocess_exec(*arguments, stdout=subprocess.PIPE)
    output, _ = await process.communicate()
    used = cpu_seconds(pids) - before
    result: dict[str, float] = json.loads(output)
    result["server_cpu_s"] = used
    result["per_cpu_s"] = result["deliveries"] / used if used else 0.0
    return result
