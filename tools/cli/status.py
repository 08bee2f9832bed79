"""`pixiu status`: every process as the registry and its own HTTP pages show it, and the health of the cluster.

Source: docs/operations.md.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlencode

import typer
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from pixiu.discovery.agreement import spoken
from pixiu.discovery.lacks import NO_LAYOUT, lacks
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.paths import DOUBLED_ROLES, PARTITIONED_ROLES, doubling
from pixiu.discovery.reachable import check_reachable
from pixiu.discovery.target import names_registry, parse_address
from pixiu.discovery.view import View
from pixiu.errors import InvalidArgument, Unavailable
from tools.cli.doublings import DoublingStatus, doublings_of, phase_of, tool_of
from tools.cli.http import TIMEOUT_S, fetch, samples
from tools.cli.output import DEFAULT_TARGET, AsJson, Target, console, guarded, print_json
from tools.cli.replicas import ReplicaStatus, read_replica, replica_problems, replica_table

if TYPE_CHECKING:
    from pixiu.discovery.zookeeper import ZooKeeper

HTTP_AT_ONCE = 32
Pages = tuple[int, bytes, bytes]
"""HTTP status and body of a process's `/health`, and its `/metrics`, empty if not asked for."""


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """One process: its node, and its own report."""

    node: Node
    healthy: bool
    problem: str = ""
    """The reason why it is not healthy, in words."""
    registry_connected: bool | None = None
    lost: int = 0
    """Items that peers sent to it and that did not arrive."""
    queue_drops: int = 0
    refused: int = 0
    """Datagrams and frames that it did not take."""
    replica: ReplicaStatus | None = None
    """The replica, for a process of a replicated partition."""
    silent: bool = False
    """True if it does not answer, or another process answers at its address."""
    unheard: int = 0
    """Peers whose heartbeats it misses."""
    refusals: tuple[str, ...] = ()
    """Reasons why it does not take the registry's layout, and what to do."""
    doubling: str = ""
    """For a leader of Xiu or Pi: the phase of its partition's doubling; empty: none."""
    degraded: str = ""
    """The reason why a running process needs an operator; a replica has its own."""
    insecure: tuple[str, ...] = ()
    """Listeners that its operator opened to everybody."""
    build: str = ""
    """`compiled`, or `plain` with the reason; empty when it is not reported."""

    @property
    def name(self) -> str:
        """The process as people name it."""
        node = self.node
        return f"{node.role} {node.replica}" if node.partition < 0 else f"{node.role} {node.partition}/{node.replica}"


@dataclass(slots=True)
class ClusterStatus:
    """The cluster at one moment."""

    target: str
    view: View
    processes: list[ProcessStatus] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    doublings: list[DoublingStatus] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        """True if nothing is wrong."""
        return not self.problems

    @property
    def insecure(self) -> list[str]:
        """Listeners that an operator left unguarded."""
        return [
            f"{process.name} at {process.node.address}: {listener}" for process in self.processes for listener in process.insecure
        ]


def missing_processes(view: View, dead: frozenset[int] = frozenset()) -> list[str]:
    """Describe processes that the layout requires and that are not Running. `dead`: endpoints that do not answer."""
    if not view.layout.version:
        return [NO_LAYOUT]
    problems = [str(lack) for lack in lacks(view, dead)]
    for role, layout in view.layout.roles.items():
        if layout.next != layout.n:
            under_way = f"{role}: a doubling from {layout.n} to {layout.next} partitions is under way"
            problems.append(f"{under_way}; `pixiu double {role}` goes on with it")
    return problems


def judge(target: str, view: View, processes: list[ProcessStatus]) -> ClusterStatus:
    """Judge the health of the cluster, with its problems; consequences of a fault in other places are not listed."""
    silent = [process for process in processes if process.silent]
    # A process that only misses those that do not answer is healthy.
    processes = [replace(one, problem="") if 0 < one.unheard <= len(silent) else one for one in processes]
    dead = frozenset(int(process.node.endpoint) for process in processes if not process.healthy)
    gone = lost_hosts(processes)
    problems = [f"{host}: none of its {count} processes answers; is the machine down?" for host, count in gone.items()]
    problems += _unhealthy([process for process in processes if not (process.silent and process.node.host in gone)])
    problems += [f"{process.name} at {process.node.address}: {process.degraded}" for process in processes if process.degraded]
    problems += missing_processes(view, dead)
    problems += sorted({text for process in processes for text in process.refusals})
    problems += replica_problems(process.replica for process in processes if process.replica is not None)
    return ClusterStatus(target, view, processes, problems)


def _unhealthy(processes: list[ProcessStatus]) -> list[str]:
    """Describe unhealthy processes; a node that does not answer once, with its roles."""
    found: dict[object, list[ProcessStatus]] = {}
    for process in processes:
        if process.problem:
            found.setdefault(process.node.process if process.silent else process.node.endpoint, []).append(process)
    return [
        f"{first.name} at {first.node.address}"
        + (f" (pid {first.node.pid}, with {', '.join(other.name for other in others)})" if others else "")
        + f": {first.problem}"
        for first, *others in found.values()
    ]


def lost_hosts(processes: list[ProcessStatus]) -> dict[str, int]:
    """Find machines, if there are several, of which no process answers, with the number of their processes."""
    hosts: dict[str, dict[object, bool]] = {}
    for process in processes:
        hosts.setdefault(process.node.host, {})[process.node.process] = process.silent
    return {host: len(silent) for host, silent in hosts.items() if all(silent.values()) and len(silent) > 1 and len(hosts) > 1}


async def ask_gateway(
    target: str, page: str, query: Mapping[str, str], wanted: str, timeout_s: float = TIMEOUT_S
) -> dict[str, Any]:
    """Ask gateways for a page about the whole cluster until one answers with the key `wanted`. Raises `Unavailable`."""
    _, view, _ = await read_registry(target)
    return await ask_one_of(view.of_role("gateway"), page, query, wanted, timeout_s)


async def ask_one_of(
    nodes: Iterable[Node], page: str, query: Mapping[str, str], wanted: str, timeout_s: float = TIMEOUT_S
) -> dict[str, Any]:
    """Ask gateways for a page about the whole cluster until one answers with the key `wanted`. Raises `Unavailable`."""
    problem = "none is registered"
    for node in nodes:
        try:
            _, body = await fetch(node.host, node.http_port, f"{page}?{urlencode(query)}", timeout_s)
            found: dict[str, Any] = json.loads(body)
        except (OSError, ValueError) as error:
            problem = f"{node.host}:{node.http_port}: {error}"
            continue
        if wanted in found:
            return found
        problem = str(found.get("error", "it has no such page"))
    raise Unavailable(f"no gateway answers {page} now ({problem}); look at `pixiu status`")


async def read_registry(target: str) -> tuple[str, View, dict[str, dict[str, object]]]:
    """Read the registry: its address, its view, and by role the tools that double it.

    Raises `RegistryUnavailable`, `InvalidArgument`.
    """
    if not names_registry(target):
        raise InvalidArgument(f"--target {target}: the state of a cluster is in its registry; give zk://HOST:PORT/ROOT")
    check_reachable(target)
    # Imported on use: neither help nor «no cluster» waits for ZooKeeper's client.
    from pixiu.discovery.watcher import Discovery
    from pixiu.discovery.zookeeper import ZooKeeper

    address = parse_address(target)
    zookeeper = ZooKeeper(address, connect_timeout_s=5.0)
    await zookeeper.connect()
    discovery = Discovery(zookeeper, address.root, lambda _view: None)
    try:
        await discovery.start()
        return str(address), discovery.view, await tools_at_work(zookeeper, address.root)
    finally:
        await discovery.close()
        await zookeeper.close()


async def tools_at_work(zookeeper: ZooKeeper, root: str) -> dict[str, dict[str, object]]:
    """Read what doubles a role now, by role. Raises `RegistryUnavailable`."""
    from pixiu.discovery.operations import NoNode

    found: dict[str, dict[str, object]] = {}
    for role in DOUBLED_ROLES:
        with suppress(NoNode):
            if said := tool_of((await zookeeper.get(doubling(root, role)))[0]):
                found[role] = said
    return found


async def read_status(target: str) -> ClusterStatus:
    """Ask the registry, then every process. Raises the errors of `read_registry`."""
    return await ask_processes(*await read_registry(target))


async def ask_processes(
    address: str, view: View, tools: Mapping[str, Mapping[str, object]], *, metrics: bool = True
) -> ClusterStatus:
    """Ask every process of a view. metrics: read what links lost, too, which costs most of the work."""
    slots = asyncio.Semaphore(HTTP_AT_ONCE)

    async def ask(node: Node) -> Pages | str:
        async with slots:
            return await _ask(node, metrics)

    # Parsing takes longer than asking: in between it would use up the time that others have to answer.
    answers = await asyncio.gather(*(ask(node) for node in view.nodes))
    found = judge(address, view, [_status_of(node, answer) for node, answer in zip(view.nodes, answers, strict=True)])
    logs = [(one.node.role, one.node.partition, one.doubling) for one in found.processes if one.doubling]
    found.doublings = doublings_of(view, logs, tools)
    return found


async def _ask(node: Node, metrics: bool) -> Pages | str:
    """A process's pages, or why there are none."""
    try:
        status, body = await fetch(node.host, node.http_port, "/health")
        page = (await fetch(node.host, node.http_port, "/metrics"))[1] if metrics else b""
    except (OSError, ValueError) as error:
        return str(error) or "no answer in time"
    return status, body, page


def _status_of(node: Node, answer: Pages | str) -> ProcessStatus:
    if isinstance(answer, str):
        why = answer
    else:
        status, body, page = answer
        try:
            said = json.loads(body)
        except ValueError as error:
            why = str(error)
        else:
            return read_pages(node, status, said if isinstance(said, dict) else {}, page)
    return ProcessStatus(node, False, f"does not answer ({why}); was it killed, or does it hang?", silent=True)


def read_pages(node: Node, status: int, said: dict[str, object], page: bytes) -> ProcessStatus:
    """Evaluate a process's /health (status and JSON) and /metrics."""
    problem, unheard = "", 0
    peers = said.get("peers")
    dead_peers = peers.get("dead", 0) if isinstance(peers, dict) else 0
    if said.get("endpoint") != f"{node.endpoint:016x}":
        # The address has a new process; the node of the old one stays until its session ends.
        return ProcessStatus(node, False, "is gone; another process answers at its address", silent=True)
    if status != 200 or said.get("state") != NodeState.RUNNING.value:
        problem = f"is {said.get('state', 'in an unknown state')}"
        if isinstance(waits := said.get("waits_for"), list) and waits:
            problem += f" and waits for {'; '.join(map(str, waits))}"
    elif dead_peers:
        problem, unheard = f"gets no heartbeats from {dead_peers} of its peers", dead_peers
    counts = {"links_lost_items": 0, "links_queue_drops_total": 0, "links_refused_total": 0}
    for name, _, value in samples(page):
        short = name.removeprefix(f"pixiu_{node.role}_")
        if short in counts:
            counts[short] += int(value)
    connected = said.get("registry_connected")
    replica = read_replica(node, said)
    service = said.get("service") if replica is None else None
    refused = said.get("layout_refused")
    return ProcessStatus(
        node,
        not problem or bool(dead_peers),
        problem,
        connected if isinstance(connected, bool) else None,
        counts["links_lost_items"],
        counts["links_queue_drops_total"],
        counts["links_refused_total"],
        replica,
        unheard=unheard,
        refusals=tuple(map(str, refused.values())) if isinstance(refused, dict) else (),
        doubling=phase_of(said),
        degraded=str(service.get("degraded") or "") if isinstance(service, dict) else "",
        insecure=tuple(map(str, insecure)) if isinstance(insecure := said.get("insecure_listeners"), list) else (),
        build=str(said.get("build", "")),
    )


def status_json(status: ClusterStatus, now_ms: int) -> dict[str, object]:
    """The status as JSON values; `now_ms` is Unix milliseconds."""
    layout = status.view.layout
    return {
        "healthy": status.healthy,
        "protocol": spoken(status.view.nodes),
        "problems": status.problems,
        "doublings": [one.json() for one in status.doublings],
        "insecure": status.insecure,
        "registry": status.target,
        "layout": {
            "version": layout.version,
            **{
                role: {"n": found.n, "next": found.next, "replicas": found.replicas} for role, found in sorted(layout.roles.items())
            },
        },
        "processes": [
            {
                "role": process.node.role,
                "partition": process.node.partition,
                "replica": process.node.replica,
                "state": process.node.state.value,
                "healthy": process.healthy,
                "problem": process.problem or process.degraded,
                "address": process.node.address,
                "client_address": process.node.client_address,
                "http": f"http://{process.node.host}:{process.node.http_port}",
                "mqtt": f"{process.node.mqtt_host}:{process.node.mqtt_port}" if process.node.mqtt_port else "",
                "pid": process.node.pid,
                "endpoint": f"{process.node.endpoint:016x}",
                "instance": process.node.instance,
                "version": process.node.version,
                "build": process.build,
                "protocol": [process.node.protocol_min, process.node.protocol_max],
                "age_s": max(now_ms - process.node.started_ms, 0) // 1000,
                "registry_connected": process.registry_connected,
                "links": {"lost": process.lost, "queue_drops": process.queue_drops, "refused": process.refused},
                **({"replication": process.replica.json()} if process.replica is not None else {}),
            }
            for process in status.processes
        ],
    }


def prometheus_targets(view: View) -> list[dict[str, object]]:
    """List every process's HTTP port as targets of Prometheus's file_sd and http_sd, a group for each role."""
    roles: dict[str, list[str]] = {}
    for node in view.nodes:
        host = f"[{node.host}]" if ":" in node.host else node.host
        roles.setdefault(node.role, []).append(f"{host}:{node.http_port}")
    return [{"targets": sorted(found), "labels": {"__meta_pixiu_role": role}} for role, found in sorted(roles.items())]


def builds(status: ClusterStatus) -> str:
    """Describe the builds that the processes run: `compiled`, `plain`, or the number of each."""
    counts = Counter(process.build.partition(" ")[0] for process in status.processes if process.build)
    return ", ".join(f"{count} {build}" for build, count in sorted(counts.items())) if len(counts) > 1 else "".join(counts)


def age_text(seconds: int) -> str:
    """Format seconds for people: 12 s, 3 min, 5 h, 2 d."""
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds // unit} {name}"
    return f"{seconds // 86_400} d"


def render(status: ClusterStatus, now_ms: int | None = None) -> RenderableType:
    """Show the status as tables."""
    now_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    layout = status.view.layout
    said = ", ".join(
        f"{role} {found.n} × {found.replicas}" if role in PARTITIONED_ROLES else f"{role} {found.replicas}"
        for role, found in sorted(layout.roles.items())
    )
    table = Table(box=None, pad_edge=False)
    for name in ("role", "partition", "replica", "state", "health", "address", "clients", "mqtt", "pid", "age", "lost", "drops"):
        table.add_column(name, justify="right" if name in ("partition", "replica", "pid", "age", "lost", "drops") else "left")
    for process in status.processes:
        node = process.node
        table.add_row(
            node.role,
            "" if node.partition < 0 else str(node.partition),
            str(node.replica),
            node.state.value,
            "[green]ok[/]" if process.healthy and not process.problem and not process.degraded else "[red]bad[/]",
            escape(node.address),
            escape(node.client_address),
            f"{node.mqtt_host}:{node.mqtt_port}" if node.mqtt_port else "",
            str(node.pid),
            age_text(max(now_ms - node.started_ms, 0) // 1000),
            f"{process.lost:,}",
            f"{process.queue_drops:,}",
        )
    verdict = "[green]✓ healthy[/]" if status.healthy else "[red]✗ not healthy[/]"
    protocol, newest = spoken(status.view.nodes), max((node.protocol_max for node in status.view.nodes), default=0)
    upgrading = f" (some processes speak {newest}: an upgrade is under way)" if newest > protocol else ""
    head = f"{escape(status.target)}  layout version {layout.version}: {said or 'none'}  protocol {protocol}{upgrading}"
    head += f"  build {build}" if (build := builds(status)) else ""
    replicas = replica_table(process.replica for process in status.processes if process.replica is not None)
    tables = [table, "", replicas] if replicas is not None else [table]
    head = "\n".join([head, *(escape(one.text()) for one in status.doublings)])
    problems = [f"  [red]{escape(problem)}[/]" for problem in status.problems]
    insecure = [f"  [yellow]not guarded: {escape(listener)}[/]" for listener in status.insecure]
    return Group(head, "", *tables, "", verdict, *problems, *insecure)


@guarded
def status(
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
    prometheus_sd: Annotated[
        bool,
        typer.Option(
            "--prometheus-sd", help="Print the targets that Prometheus scrapes, in the format of its file_sd and http_sd, and exit."
        ),
    ] = False,
) -> None:
    """Show every process of a cluster and whether all is well. Exit code 0: healthy, 1: not, 2: unreachable."""
    if prometheus_sd:
        print_json(prometheus_targets(asyncio.run(read_registry(target))[1]), indent=2)
        return
    found = asyncio.run(read_status(target))
    if as_json:
        print_json(status_json(found, time.time_ns() // 1_000_000), indent=2)
    else:
        console().print(render(found))
    if not found.healthy:
        raise typer.Exit(1)
