"""The live table of `pixiu up`: each process's state and restarts, and each of its roles' records a second; below it the rates of
the whole cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table

from onebox.supervisor import ProcessState
from onebox.up import LocalCluster
from pixiu.discovery.node import Node
from tools.cli.http import fetch, samples

SHOWN: Final = {
    "links_records_received_total": "in",
    "links_records_sent_total": "out",
    "links_lost_items": "lost",
}
FLOWS: Final = {
    "proxy_records_in_total": "sent",
    "proxy_signal_copies_in_total": "copies",
    "gateway_deliveries_total": "deliveries",
    "gateway_signals_delivered_total": "signals",
    "proxy_mail_mails_in_total": "mail_sent",
    "gateway_mail_delivered_total": "mail",
}
"""Metric, prefixed with its role → the rate it counts. Signals reach proxies among the records, in copies."""
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
        """Endpoint → rates a second: in, out, and the names in `FLOWS`; lost: a total."""

    async def read(self, cluster: LocalCluster) -> None:
        """Ask every process; one that does not answer keeps its last rates."""
        await asyncio.gather(*(self._read(node) for node in cluster.nodes()))

    async def _read(self, node: Node) -> None:
        try:
            _, page = await fetch(node.host, node.http_port, "/metrics", 1.0)
        except OSError:
            return
        self.take(node.role, node.endpoint, time.monotonic(), samples(page))

    def take(self, role: str, endpoint: int, now: float, page: Iterable[tuple[str, object, float]]) -> None:
        """Take one process's samples: name, labels, value; `now` is monotonic seconds."""
        counts = dict.fromkeys((*SHOWN.values(), *FLOWS.values()), 0.0)
        for name, _, value in page:
            what = SHOWN.get(name.removeprefix(f"pixiu_{role}_")) or FLOWS.get(name.removeprefix("pixiu_"))
            if what is not None:
                counts[what] += value
        before = self._last.get(endpoint)
        self._last[endpoint] = (now, counts)
        if before is not None and now > before[0]:
            seconds = now - before[0]
            found = {what: max(count - before[1][what], 0.0) / seconds for what, count in counts.items()}
            self.rates[endpoint] = {**found, "lost": counts["lost"]}

    def flow(self) -> str:
        """Format the rates of the whole cluster."""
        total = {what: sum(rates[what] for rates in self.rates.values()) for what in FLOWS.values()}
        return (
            f"messages {max(total['sent'] - total['copies'], 0):,.0f}/s sent, {total['deliveries']:,.0f}/s delivered · "
            f"signals {total['signals']:,.0f}/s delivered · mail {total['mail_sent']:,.0f}/s sent, {total['mail']:,.0f}/s delivered"
        )


def render(cluster: LocalCluster, rates: Rates, until: float | None) -> RenderableType:
    """Render the table; `until`: monotonic seconds at which the cluster ends, None: at Ctrl-C."""
    table = Table(box=None, pad_edge=False)
    for name in ("process", "state", "pid", "restarts", "address", "records in/s", "out/s", "lost"):
        table.add_column(name, justify="left" if name in ("process", "state", "address") else "right")
    for name, record in cluster.core.processes.items():
        child = cluster.children[name]
        state = f"[{COLORS.get(record.state, 'dim')}]{record.state.value}[/]"
        process = (state, str(child.process.pid) if child.process is not None else "", str(record.restarts))
        if len(record.spec.entries) > 1:
            table.add_row(name, *process)
            name, process = "", ("", "", "")
        for entry in record.spec.entries:
            node = child.nodes.get(entry)
            rate = rates.rates.get(node.endpoint, {}) if node is not None else {}
            mqtt = f", MQTT {node.mqtt_port}" if node is not None and node.mqtt_port else ""
            table.add_row(
                name or f"  {entry.name}",
                *process,
                node.address + mqtt if node is not None else "",
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
    return Group(table, rates.flow(), f"[dim]{cluster.target}{note}; {end}[/]")
