"""The live table of `pixiu up`: each process's state, restarts and records a second."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table

from pixiu.cli.http import fetch, samples
from pixiu.discovery.node import Node
from registry.supervisor import ProcessState
from registry.up import LocalCluster

SHOWN: Final = {
    "links_records_received_total": "in",
    "links_records_sent_total": "out",
    "links_lost_items": "lost",
}
COLORS: Final = {
    ProcessState.RUNNING: "green",
    ProcessState.STARTING: "yellow",
    ProcessState.WAITING: "yellow",
    ProcessState.BACKOFF: "red",
}


class Rates:
    """Records a second of each process, from two readings of its /metrics."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[float, dict[str, float]]] = {}
        self.rates: dict[int, dict[str, float]] = {}
        """Endpoint → {in, out: a second; lost: in all}."""

    async def read(self, cluster: LocalCluster) -> None:
        """Ask every process; one that does not answer keeps its last rates."""
        nodes = [child.node for child in cluster.children.values() if child.node is not None]
        await asyncio.gather(*(self._read(node) for node in nodes))

    async def _read(self, node: Node) -> None:
        try:
            _, page = await fetch(node.host, node.http_port, "/metrics", 1.0)
        except OSError:
            return
        now, counts = time.monotonic(), dict.fromkeys(SHOWN.values(), 0.0)
        for name, _, value in samples(page):
            what = SHOWN.get(name.removeprefix(f"pixiu_{node.role}_"))
            if what is not None:
                counts[what] += value
        before = self._last.get(node.endpoint)
        self._last[node.endpoint] = (now, counts)
        if before is not None and now > before[0]:
            seconds = now - before[0]
            found = {what: max(counts[what] - before[1][what], 0.0) / seconds for what in ("in", "out")}
            self.rates[node.endpoint] = {**found, "lost": counts["lost"]}


def render(cluster: LocalCluster, rates: Rates, until: float | None) -> RenderableType:
    """The table now; `until`: monotonic seconds at which the cluster ends, None: at Ctrl-C."""
    table = Table(box=None, pad_edge=False)
    for name in ("process", "state", "pid", "address", "restarts", "records in/s", "out/s", "lost"):
        table.add_column(name, justify="left" if name in ("process", "state", "address") else "right")
    for name, record in cluster.core.processes.items():
        child = cluster.children[name]
        node = child.node
        rate = rates.rates.get(node.endpoint, {}) if node is not None else {}
        mqtt = f", MQTT {node.mqtt_port}" if node is not None and node.mqtt_port else ""
        table.add_row(
            name,
            f"[{COLORS.get(record.state, 'dim')}]{record.state.value}[/]",
            str(child.process.pid) if child.process is not None else "",
            node.address + mqtt if node is not None else "",
            str(record.restarts),
            f"{rate.get('in', 0):,.0f}",
            f"{rate.get('out', 0):,.0f}",
            f"{rate.get('lost', 0):,.0f}",
        )
    end = "Ctrl-C ends it" if until is None else f"ends in {max(until - time.monotonic(), 0):.0f} s"
    note = ""
    if cluster.zookeeper is not None:
        note = f"; ZooKeeper at {cluster.zookeeper.address}" + (
            f": {cluster.zookeeper.problem}" if cluster.zookeeper.problem else ""
        )
    return Group(table, f"[dim]{cluster.target}{note}; {end}[/]")
