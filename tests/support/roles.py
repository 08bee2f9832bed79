"""Roles as processes of their own beside an embedded ZooKeeper, each with its own options and root."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from onebox.embedded import EmbeddedZooKeeper
from onebox.fork_server import Forked
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.operations import NoNode
from pixiu.discovery.paths import DEFAULT_ROOT, DRAIN_ORDER, node_directory, replica_of
from pixiu.discovery.view import RoleLayout
from pixiu.discovery.zookeeper import ZooKeeper
from registry.layout import ensure_layout
from tests.support.forks import fork
from tests.support.waiting import until
from tests.support.zookeeper import connected, remove

PROGRAM = "program"
WAIT_S = 120.0
"""For what must come; generous, because machines are loaded."""
SETTINGS = {"log_format": "json", "session_timeout_ms": "4000", "cluster.heartbeat_interval_ms": "250"}


class Roles:
    """Starts and ends them. `zookeeper` is for the test's own reads and writes."""

    def __init__(self, folder: Path, server: EmbeddedZooKeeper, zookeeper: ZooKeeper) -> None:
        self.folder, self.server, self.zookeeper = folder, server, zookeeper
        self.fork: Callable[[str, Sequence[str], Path], Forked] = fork
        """What starts a process: of this tree, unless a test says otherwise."""
        self._processes: dict[str, Forked] = {}
        self._places: dict[str, tuple[str, str, int]] = {}
        self._nodes: dict[str, str] = {}
        """Name of a role of a node → the first one of that node, which names its log."""
        self._refused: set[str] = set()
        self._roots: set[str] = {DEFAULT_ROOT}

    def target(self, root: str = DEFAULT_ROOT) -> str:
        """What a client connects to."""
        return f"zk://{self.server.address}{root}"

    async def layout(self, root: str = DEFAULT_ROOT, **partitions: int) -> None:
        """Write a cluster's first layout."""
        self._roots.add(root)
        await ensure_layout(self.zookeeper, root, {role: RoleLayout(n, n, 1) for role, n in partitions.items()})

    def start(self, name: str, root: str = DEFAULT_ROOT, *, deaf: bool = False, partition: int = -1, **settings: object) -> None:
        """Start a process; its role is the name up to the first "-". Of a node (`roles=…`) the first of its roles stands here for
        all.

        deaf: without watches and, nearly, without polls; its session outlasts a ZooKeeper that is silent for some seconds, as on a
        busy machine, because who connects anew reads the registry.
        """
        role = name.partition("-")[0]
        self._roots.add(root)
        wanted = SETTINGS | {"registry": self.target(root), "data_dir": str(self.folder / name)}
        wanted |= {"partition": str(partition)} if partition >= 0 else {}
        wanted |= {"poll_interval_s": "3600", "session_timeout_ms": "120000"} if deaf else {}
        wanted |= {"table_dir": str(self.folder), "table_mb": "8"} if role == "xiu" else {}
        wanted |= {"mqtt_port": "0", "signal_table_dir": str(self.folder)} if role == "gateway" else {}
        wanted |= {key.replace("cluster_", "cluster."): str(value) for key, value in settings.items()}
        arguments = [part for key, value in wanted.items() for part in ("--set", f"{key}={value}")]
        module, arguments = ("tests.support.deaf_role", [role, *arguments]) if deaf else (role, arguments)
        self._processes[name] = self.fork(module, arguments, self.folder / f"{name}.log")
        if role == "node":
            role, _, number = str(settings["roles"]).partition(",")[0].partition("-")
            partition = int(number or -1)
        self._places[name] = (root, role, partition)

    def start_program(self, name: str, module: str, arguments: Sequence[str]) -> None:
        """Start a program that is no role, and ends in good order on SIGTERM, before the roles do."""
        self._processes[name] = self.fork(module, arguments, self.folder / f"{name}.log")
        self._places[name] = (DEFAULT_ROOT, PROGRAM, -1)

    def start_node(self, *names: str, **settings: object) -> None:
        """Start a node of these roles, by their names in `node.roles`; each then has that name here.

        settings: as for --set, `ROLE__KEY` for one role's.
        """
        wanted = SETTINGS | {"roles": ",".join(names), "registry": self.target(), "data_dir": str(self.folder)}
        for name in names:
            role, _, number = name.partition("-")
            self._places[name] = (DEFAULT_ROOT, role, int(number or -1))
            wanted |= {"xiu.table_dir": str(self.folder), "xiu.table_mb": "8"} if role == "xiu" else {}
            wanted |= {"gateway.signal_table_dir": str(self.folder)} if role == "gateway" else {}
        wanted |= {key.replace("__", "."): str(value) for key, value in settings.items()}
        arguments = [part for key, value in wanted.items() for part in ("--set", f"{key}={value}")]
        process = self.fork("node", arguments, self.folder / f"{names[0]}.log")
        self._processes |= dict.fromkeys(names, process)
        self._nodes |= dict.fromkeys(names, names[0])

    def send_signal(self, name: str, number: signal.Signals) -> None:
        """To one process; a killed one is waited for, so that its folder is free for the next one."""
        self._processes[name].send_signal(number)
        if number is signal.SIGKILL:
            self._processes[name].wait(WAIT_S)

    async def kill(self, name: str) -> None:
        """End a process as a crash does; `start` it again before the end."""
        process = self._processes[name]
        process.kill()
        await asyncio.to_thread(process.wait, WAIT_S)

    async def failed(self, name: str) -> str:
        """What a process logged that ended with an error at its start; it is forgotten."""
        process = self._processes.pop(name)
        assert await asyncio.to_thread(process.wait, WAIT_S) == 1, self.log(name)
        return self.log(name)

    async def end(self, name: str) -> None:
        """End a process in good order; `start` it again before the end."""
        process = self._processes[name]
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, WAIT_S) == 0, self.log(name)

    async def ended(self, name: str) -> int:
        """The exit code of a process that was told to end."""
        return await asyncio.to_thread(self._processes[name].wait, WAIT_S)

    async def refused(self, name: str) -> str:
        """What a process logged that ended because its options cannot be."""
        assert await asyncio.to_thread(self._processes[name].wait, WAIT_S) == 2, self.log(name)
        self._refused.add(name)
        return self.log(name)

    def log(self, name: str) -> str:
        """What a process logged."""
        return (self.folder / f"{self._nodes.get(name, name)}.log").read_text()

    async def node(self, name: str) -> Node | None:
        """The node of a process, once it is Running."""
        process = self._processes[name]
        assert process.poll() is None, self.log(name)
        directory = node_directory(*self._places[name])
        try:
            for child in await self.zookeeper.children(directory):
                replica = replica_of(child)
                if replica is not None:
                    node = Node.from_json((await self.zookeeper.get(f"{directory}/{child}"))[0], replica=replica)
                    if node.pid == process.pid:
                        return node if node.state is NodeState.RUNNING else None
        except NoNode:
            pass
        return None

    def _metric(self, node: Node, name: str) -> float:
        with urllib.request.urlopen(f"http://{node.host}:{node.http_port}/metrics", timeout=30) as reply:
            found = re.findall(rf"^pixiu_{node.role}_{name}(?:{{[^}}]*}})? (\S+)", reply.read().decode(), re.MULTILINE)
        return sum(map(float, found))

    def stop(self) -> None:
        """End them in good order, those that others need last, and look for traces of bugs."""
        for role in (PROGRAM, *DRAIN_ORDER):
            own = dict.fromkeys(process for name, process in self._processes.items() if self._places[name][1] == role)
            for process in own:
                process.send_signal(signal.SIGTERM)
            for process in own:
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(60)
        for name, process in self._processes.items():
            assert process.returncode == (2 if name in self._refused else 0), (name, process.returncode, self.log(name))
            assert "Traceback" not in self.log(name), self.log(name)

    async def leave_nothing(self) -> None:
        """Remove what the test wrote, for the next one."""
        for root in self._roots:
            await remove(self.zookeeper, root)

    async def running(self, *names: str) -> list[Node]:
        """Their nodes, once all are Running."""
        found: dict[str, Node] = {}

        async def runs(name: str) -> bool:
            node = await self.node(name)
            if node is not None:
                found[name] = node
            return node is not None

        for name in names:
            await until(partial(runs, name), f"{name} Running")
        return [found[name] for name in names]

    async def metric(self, node: Node, name: str) -> float:
        """The sum of a metric over its labels; 0 where there is none."""
        return await asyncio.to_thread(self._metric, node, name)


@pytest.fixture
async def roles(zookeeper_server: EmbeddedZooKeeper, tmp_path: Path) -> AsyncIterator[Roles]:
    """Processes beside the ZooKeeper that tests share, ended with the test."""
    zookeeper = await connected(zookeeper_server)
    found = Roles(tmp_path, zookeeper_server, zookeeper)
    try:
        yield found
    finally:
        try:
            await asyncio.to_thread(found.stop)
        finally:  # else the next test's replicas wait for these ones
            await found.leave_nothing()
            await zookeeper.close()


async def at_least(found: Awaitable[float], least: float) -> bool:
    """For `until`."""
    return await found >= least
