"""Our own cluster on this machine, with few processes or as a user starts it, and its builds.

Source: docs/performance.md, "Beside others".
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cluster.core.compiled import SWITCH, build_of_new_process
from comparison.cases import Kind
from comparison.processes import family_pids
from onebox.grouping import Grouping
from onebox.up import LocalCluster, UpOptions
from pixiu.errors import Unavailable
from pixiu.testing import LOG_END, running_event

ONCE: Final = ("proxies", "gateways", "brokers", "broker-replicas", "routers", "router-replicas")
LAYOUTS: Final[Mapping[str, Sequence[str]]] = {"nodes": (), "separate": ("--separate",), "small": ("--small",)}
"""Layout → the options of `pixiu up` that choose it. "": as `pixiu up` does by default."""
STOP_LIMIT_S: Final = 150.0
"""Longer than a `pixiu up` gives its processes."""


@dataclass(frozen=True)
class Running:
    """A running cluster: the process IDs and ports by role."""

    registry: str
    pids: dict[str, list[int]]
    ports: dict[str, list[int]]
    endpoints: dict[str, list[int]]
    mqtt_ports: list[int]
    http_ports: dict[str, list[int]]
    proxies: str
    """Addresses for programs to connect to."""


@contextlib.asynccontextmanager
async def cluster(
    *,
    gateways: int = 1,
    stores: int = 0,
    topics: int = 0,
    settings: Sequence[str] = (),
) -> AsyncIterator[Running]:
    """Run a cluster for a benchmark that looks at single processes, removed afterwards: one proxy, router and broker. `stores`:
    replicas of one partition each of Xiu and Pi, or none. `topics`: groups of durable topics, of one replica each."""
    with tempfile.TemporaryDirectory() as folder:
        options = UpOptions(
            grouping=Grouping.SEPARATE,
            proxies=1, gateways=gateways, brokers=1, broker_replicas=1, routers=1, router_replicas=1, relays=0,
            mqtt_port=0, zookeeper_port=0, data=Path(folder), settings=tuple(settings),
            xius=min(stores, 1), xiu_replicas=max(stores, 1), pis=min(stores, 1), pi_replicas=max(stores, 1),
            topics=topics, topic_replicas=1, admins=1,
        )  # fmt: skip
        local = LocalCluster(options)
        try:
            await local.start()
            nodes = local.nodes()
            roles = sorted({node.role for node in nodes})
            yield Running(
                local.target,
                {role: [node.pid for node in nodes if node.role == role] for role in roles},
                {role: [node.port for node in nodes if node.role == role] for role in roles},
                {role: [node.endpoint for node in nodes if node.role == role] for role in roles},
                [node.mqtt_port for node in nodes if node.mqtt_port],
                {role: [node.http_port for node in nodes if node.role == role] for role in roles},
                ",".join(local.addresses()["proxies"]),
            )
        finally:
            await local.stop()


@dataclass(frozen=True, slots=True)
class Up:
    """A running `pixiu up`."""

    pid: int
    mqtt_port: int
    """Port of a gateway."""
    proxies: str
    """Addresses for programs to connect to."""
    start_s: float
    """Time from its start until every process was Running."""

    def pids(self) -> dict[str, list[int]]:
        """Return its processes by kind, its own and ZooKeeper's included."""
        found: dict[str, list[int]] = {}
        for pid in family_pids(self.pid):
            found.setdefault(kind_of(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()), []).append(pid)
        return found


def kind_of(command: str) -> str:
    """Return the kind of a process of `pixiu up` by its command line: the module that it runs, `zookeeper` or `supervisor`."""
    module = command.partition(" -m ")[2].partition(" ")[0]
    if module == "onebox.embedded" or "QuorumPeerMain" in command:
        return "zookeeper"
    return module if module and "." not in module else "supervisor"


def options(kind: Kind, layout: str) -> list[str]:
    """Return the options of `pixiu up` for cases of a kind in a layout: at rest no counts, else one proxy, broker, router and
    gateway, for mail also a relay, a Xiu and a Pi, each with two replicas, and for topics an admin and a group of one replica."""
    words = list(LAYOUTS[layout]) if layout else []
    if kind == "idle":
        return words
    counts = dict.fromkeys(ONCE, 1) | dict.fromkeys(("relays", "xius", "pis"), int(kind == "mail"))
    counts |= {"topics": 1, "topic-replicas": 1, "admins": 1} if kind == "topics" else {"topics": 0}
    return words + [f"--{name}={count}" for name, count in counts.items()]


@contextlib.asynccontextmanager
async def up(words: Sequence[str]) -> AsyncIterator[Up]:
    """Run `pixiu up` with these options, on free ports and in a folder of its own. It ends afterwards, and when this process does.
    Raises Unavailable when it does not come up."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tools.cli.main", "up", "--json", "--until-eof", "--mqtt-port=0", "--zookeeper-port=0",
            f"--data={folder}", *words,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            said = event = ""
            while not (found := running_event(event)):
                event = (await process.stdout.readline()).decode(errors="replace")
                said += event
                if not event:
                    raise Unavailable(f"`pixiu up {' '.join(words)}` did not start: {said[-LOG_END:].strip()}")
            port = int(found["mqtt"][0].rpartition(":")[2])
            yield Up(process.pid, port, ",".join(found["proxies"]), time.monotonic() - began)
        finally:
            process.stdin.close()
            try:
                async with asyncio.timeout(STOP_LIMIT_S):
                    await process.communicate()
            except TimeoutError:
                process.kill()
                await process.wait()


def builds() -> list[tuple[str, str]]:
    """Return the builds to measure in turn: a name, and the argument of `build`. Includes plain Python if servers run the
    compiled build."""
    return [("pixiu", "1"), ("pixiu, plain", "0")] if build_of_new_process().name == "compiled" else [("pixiu", "0")]


@contextlib.contextmanager
def build(switch: str) -> Iterator[None]:
    """Select the build of processes started within: the existing one ("1"), or plain Python ("0")."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = switch
    try:
        yield
    finally:
        os.environ.pop(SWITCH) if before is None else os.environ.update({SWITCH: before})
