"""What the benchmarks share: a cluster of few processes, CPU seconds of a process, peers where they are installed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.runtime.compiled import BUILD, SWITCH
from registry.up import LocalCluster, UpOptions

TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pids: Sequence[int]) -> float:
    """User and system CPU seconds that these processes have used so far."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICKS


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass(frozen=True)
class Running:
    """A cluster that runs: the process IDs and ports by role."""

    registry: str
    pids: dict[str, list[int]]
    ports: dict[str, list[int]]
    endpoints: dict[str, list[int]]
    mqtt_ports: list[int]
    http_ports: dict[str, list[int]]

    @property
    def servers(self) -> list[int]:
        """Every role's process."""
        return [pid for pids in self.pids.values() for pid in pids]


@contextlib.asynccontextmanager
async def cluster(
    *, proxies: int = 1, gateways: int = 1, brokers: int = 1, stores: int = 0, relays: int = 0, settings: Sequence[str] = ()
) -> AsyncIterator[Running]:
    """One router, and of the others as many as are asked for; all on this machine, gone afterwards. `stores`: replicas of one
    partition each of Xiu and Pi."""
    with tempfile.TemporaryDirectory() as folder:
        options = UpOptions(
            proxies=proxies, gateways=gateways, brokers=brokers, broker_replicas=1, routers=1, router_replicas=1, relays=relays,
            mqtt_port=0, zookeeper_port=0, data=Path(folder), settings=tuple(settings),
            xius=min(stores, 1), xiu_replicas=max(stores, 1), pis=min(stores, 1), pi_replicas=max(stores, 1),
        )  # fmt: skip
        local = LocalCluster(options)
        try:
            await local.start()
            nodes = [child.node for child in local.children.values() if child.node is not None]
            roles = sorted({node.role for node in nodes})
            yield Running(
                local.target,
                {role: [node.pid for node in nodes if node.role == role] for role in roles},
                {role: [node.port for node in nodes if node.role == role] for role in roles},
                {role: [node.endpoint for node in nodes if node.role == role] for role in roles},
                [node.mqtt_port for node in nodes if node.mqtt_port],
                {role: [node.http_port for node in nodes if node.role == role] for role in roles},
            )
        finally:
            await local.stop()


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


def builds() -> list[tuple[str, str]]:
    """The builds to measure in turn: a name, and what `build` takes. Plain Python too where this is the compiled one."""
    return [("pixiu", "1"), ("pixiu, plain", "0")] if BUILD.name == "compiled" else [("pixiu", "0")]


@contextlib.contextmanager
def build(switch: str) -> Iterator[None]:
    """The build of the processes that are started within: the one that is there ("1"), or plain Python ("0")."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = switch
    try:
        yield
    finally:
        os.environ.pop(SWITCH) if before is None else os.environ.update({SWITCH: before})


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
