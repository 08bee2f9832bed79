"""Roles as processes of their own beside an embedded ZooKeeper, each with its own options and root."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.paths import DEFAULT_ROOT, node_directory, replica_of
from pixiu.discovery.view import RoleLayout
from pixiu.discovery.zookeeper import NoNode, ZooKeeper
from registry.embedded import EmbeddedZooKeeper
from registry.layout import ensure_layout
from tests.support.cluster import wait_for

PROJECT = Path(__file__).resolve().parents[2]
SETTINGS = {"log_format": "json", "session_timeout_ms": "4000", "cluster.heartbeat_interval_ms": "250"}


class Roles:
    """Starts and ends them. Used from a thread's point of view: `zookeeper` is for the test's own reads and writes."""

    def __init__(self, folder: Path, server: EmbeddedZooKeeper, zookeeper: ZooKeeper) -> None:
        self.folder, self.server, self.zookeeper = folder, server, zookeeper
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._places: dict[str, tuple[str, str, int]] = {}

    def target(self, root: str = DEFAULT_ROOT) -> str:
        """What a client connects to."""
        return f"zk://{self.server.address}{root}"

    async def layout(self, root: str = DEFAULT_ROOT, **partitions: int) -> None:
        """Write a cluster's first layout."""
        await ensure_layout(self.zookeeper, root, {role: RoleLayout(n, n, 1) for role, n in partitions.items()})

    def start(self, name: str, root: str = DEFAULT_ROOT, *, deaf: bool = False, partition: int = -1, **settings: object) -> None:
        """Start a process; its role is the name up to the first "-". `deaf`: without watches and, nearly, without polls."""
        role = name.partition("-")[0]
        wanted = SETTINGS | {"registry": self.target(root), "data_dir": str(self.folder / name)}
        wanted |= {"partition": str(partition)} if partition >= 0 else {}
        wanted |= {"poll_interval_s": "3600"} if deaf else {}
        wanted |= {"mqtt_port": "0", "signal_table_dir": str(self.folder)} if role == "gateway" else {}
        wanted |= {key.replace("cluster_", "cluster."): str(value) for key, value in settings.items()}
        program = [str(PROJECT / "tests/support/deaf_role.py"), role] if deaf else ["-m", role]
        arguments = [part for key, value in wanted.items() for part in ("--set", f"{key}={value}")]
        with open(self.folder / f"{name}.log", "ab") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, *program, *arguments],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=PROJECT, env=os.environ | {"PYTHONPATH": str(PROJECT)},
            )  # fmt: skip
        self._places[name] = (root, role, partition)

    def log(self, name: str) -> str:
        """What a process logged."""
        return (self.folder / f"{name}.log").read_text()

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

    def metric(self, node: Node, name: str) -> float:
        """The sum of a metric over its labels; 0 where there is none."""
        with urllib.request.urlopen(f"http://{node.host}:{node.http_port}/metrics", timeout=30) as reply:
            found = re.findall(rf"^pixiu_{node.role}_{name}(?:{{[^}}]*}})? (\S+)", reply.read().decode(), re.MULTILINE)
        return sum(map(float, found))

    def stop(self) -> None:
        """End them in good order, those that others need last, and look for traces of bugs."""
        for role in ("proxy", "gateway", "broker", "router"):
            own = [process for name, process in self._processes.items() if self._places[name][1] == role]
            for process in own:
                process.send_signal(signal.SIGTERM)
            for process in own:
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(60)
        for name, process in self._processes.items():
            assert process.returncode == 0, self.log(name)
            assert "Traceback" not in self.log(name), self.log(name)


__all__ = ["Roles", "wait_for"]
