"""Collects the data for `ops.doubling.forecast` from the processes of a role: load, hot keys, memory, disk, commit times.

Source: docs/doubling.md, "What the plan says".
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ops.doubling.forecast import (
    KEYS,
    STORED,
    Load,
    Plan,
    Replica,
    forecast,
    load_warnings,
    machines,
    pause,
    replica_warnings,
    room_problems,
)
from pixiu.discovery.node import Node
from pixiu.discovery.view import View
from tools.cli.http import fetch, samples
from tools.cli.rates import FLOWS_IN, quantile

AT_ONCE: Final = 32
BETWEEN_S: Final = 1.0
"""Interval between two readings of values that only counters give."""
MAX_HOT: Final = 20


@dataclass(slots=True)
class Page:
    """Answer of one process."""

    node: Node
    counts: Mapping[str, float] = field(default_factory=dict)
    """Name without the role's prefix → the sum over its labels."""
    commits: Mapping[float, float] = field(default_factory=dict)
    """Upper bound in seconds → number of commits that took no longer, since the start of the process."""
    resident_bytes: int | None = None
    hot: Mapping[str, object] = field(default_factory=dict)
    at: float = 0.0


async def read_plan(view: View, role: str, *, here: bool) -> Plan:
    """Ask every process of a role, and forecast. here: `pixiu up` starts the new replicas on the machine of the old ones, so
    that missing capacity there is a problem and not a warning. Processes that do not answer are named in `Plan.unknown`."""
    layout = view.layout.roles[role]
    nodes = [node for node in view.of_role(role) if node.partition < layout.next]
    slots = asyncio.Semaphore(AT_ONCE)

    async def ask(node: Node) -> Page | None:
        async with slots:
            try:
                return await _read(node)
            except (OSError, ValueError):
                return None

    first = await asyncio.gather(*(ask(node) for node in nodes))
    await asyncio.sleep(BETWEEN_S)
    found = dict(zip(nodes, await asyncio.gather(*(ask(node) for node in nodes)), strict=True))
    before = {node: page for node, page in zip(nodes, first, strict=True) if page is not None}
    pages = [page for page in found.values() if page is not None]
    running = {p: len(view.replicas(role, p)) for p in range(layout.n, 2 * layout.n)}
    room = machines(layout.n, (_replica(page) for page in pages), running)
    loads = _loads(role, [page for page in pages if page.node.partition < layout.n], before)
    forecasts = forecast(layout.n, loads)
    held = {page.node.partition: page.counts.get("members", 0.0) for page in pages if page.node.partition < layout.n}
    changes = sum(_grown(pages, before, ("membership_applied_total",), every=False).values())
    tight = room_problems(room)
    warnings = [*load_warnings(role, forecasts), *replica_warnings(role, forecasts, int(sum(held.values())), changes)]
    rates = _counted(role, pages, before)
    parents = {page.node.partition: page for page in pages if page.node.partition < layout.n}
    return Plan(
        role,
        forecasts,
        room,
        pause(role, _commit_s(pages), max(rates.values(), default=0.0)),
        sum(int(page.counts.get("store_bytes", 0)) for page in parents.values()) if role == "pi" else 0,
        tuple(f"{node.role} at {node.address}" for node, page in found.items() if page is None),
        tuple(tight if here else ()),
        (*(() if here else tight), *warnings),
    )


async def _read(node: Node) -> Page:
    """Read a process's pages. Raises OSError, ValueError when it does not answer properly."""
    _, body = await fetch(node.host, node.http_port, "/metrics")
    page = Page(node, at=time.monotonic())
    prefix = f"pixiu_{node.role}_"
    counts: defaultdict[str, float] = defaultdict(float)
    commits: defaultdict[float, float] = defaultdict(float)
    for name, labels, value in samples(body):
        if name.startswith(prefix):
            counts[name.removeprefix(prefix)] += value
        elif name == "pixiu_commit_seconds_bucket":
            commits[float(labels["le"])] += value
        elif name == "process_resident_memory_bytes":
            page.resident_bytes = int(value)
    page.counts, page.commits = counts, commits
    status, body = await fetch(node.host, node.http_port, "/hot")
    said = json.loads(body) if status == 200 else {}
    page.hot = said if isinstance(said, dict) else {}
    return page


def _replica(page: Page) -> Replica:
    def count(name: str) -> int | None:
        return int(page.counts[name]) if name in page.counts else None

    return Replica(
        page.node.host,
        page.node.partition,
        count("machine_memory_available_bytes"),
        count("data_dir_free_bytes"),
        page.resident_bytes,
        count("store_bytes") or 0,
    )


def _loads(role: str, pages: list[Page], before: Mapping[Node, Page]) -> dict[int, Load]:
    """Return each partition's load from /hot, or from counters where no keys are counted."""
    what = KEYS[role]
    total: defaultdict[int, float] = defaultdict(float)
    hot: defaultdict[int, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
    for page in pages:
        per_s, keys = page.hot.get("per_s"), page.hot.get(what)
        said = per_s.get(what) if isinstance(per_s, dict) else None
        total[page.node.partition] += said if isinstance(said, int | float) else 0.0
        for entry in keys if isinstance(keys, list) else ():
            key, rate = (entry.get("key"), entry.get("per_s")) if isinstance(entry, dict) else (None, None)
            if isinstance(key, int) and isinstance(rate, int | float):
                hot[page.node.partition][key] += rate
    if role not in STORED and not any(total.values()):
        return {partition: Load(per_s) for partition, per_s in _counted(role, pages, before).items()}
    return {
        partition: Load(per_s, sorted(hot[partition].items(), key=lambda one: -one[1])[:MAX_HOT])
        for partition, per_s in total.items()
    }


def _counted(role: str, pages: list[Page], before: Mapping[Node, Page]) -> dict[int, float]:
    """Return each partition's rate a second from the role's own counters between the two readings; for a store the entries of
    its log."""
    return _grown(pages, before, FLOWS_IN.get(role, ("links_records_received_total",)), every=role not in STORED)


def _grown(pages: list[Page], before: Mapping[Node, Page], names: Sequence[str], *, every: bool) -> dict[int, float]:
    """Return the growth of counters a second for each partition: of all replicas together, or with every=False of the busiest
    one."""
    found: defaultdict[int, float] = defaultdict(float)
    for page in pages:
        old = before.get(page.node)
        if old is None or page.at <= old.at:
            continue
        grown = sum(max(page.counts.get(name, 0.0) - old.counts.get(name, 0.0), 0.0) for name in names)
        rate, partition = grown / (page.at - old.at), page.node.partition
        found[partition] = found[partition] + rate if every else max(found[partition], rate)
    return found


def _commit_s(pages: list[Page]) -> float | None:
    buckets: defaultdict[float, float] = defaultdict(float)
    for page in pages:
        for bound, count in page.commits.items():
            buckets[bound] += count
    return quantile(buckets, 0.99)
