"""Our own cluster, with few processes on this machine, and its builds.

Source: docs/performance.md, "Beside others".
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.core.compiled import SWITCH, build_of_new_process
from onebox.grouping import Grouping
from onebox.up import LocalCluster, UpOptions


@dataclass(frozen=True)
class Running:
    """A running cluster: the process IDs and ports by role."""

    registry: str
    pids: dict[str, list[int]]
    ports: dict[str, list[int]]
    endpoints: dict[str, list[int]]
    mqtt_ports: list[int]
    http_ports: dict[str, list[int]]
    zookeeper: int = 0
    """Process ID of the registry's server."""
    proxies: str = ""
    """Addresses for programs to connect to."""

    @property
    def everything(self) -> dict[str, list[int]]:
        """The processes of every role, and ZooKeeper."""
        return {**self.pids, "zookeeper": [self.zookeeper]}


@contextlib.asynccontextmanager
async def cluster(
    *,
    gateways: int = 1,
    stores: int = 0,
    relays: int = 0,
    settings: Sequence[str] = (),
) -> AsyncIterator[Running]:
    """Run a cluster on this machine, removed afterwards: one proxy, router and broker. `stores`: replicas of one partition each
    of Xiu and Pi, or none."""
    with tempfile.TemporaryDirectory() as folder:
        options = UpOptions(
            grouping=Grouping.SEPARATE,
            proxies=1, gateways=gateways, brokers=1, broker_replicas=1, routers=1, router_replicas=1, relays=relays,
            mqtt_port=0, zookeeper_port=0, data=Path(folder), settings=tuple(settings),
            xius=min(stores, 1), xiu_replicas=max(stores, 1), pis=min(stores, 1), pi_replicas=max(stores, 1),
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
                local.zookeeper.pid if local.zookeeper is not None else 0,
                ",".join(local.addresses()["proxies"]),
            )
        finally:
            await local.stop()


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
