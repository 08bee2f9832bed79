"""`pixiu drain` and `pixiu rolling-restart`: processes leave in order, one after another.

Source: docs/operations.md, "Draining and adding processes".
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Annotated, Final

import typer

from ops.drain_plan import against, choose, name_of, not_back, restart_order, running_beside
from ops.polling import polled
from pixiu.discovery import paths
from pixiu.discovery.lacks import Lack
from pixiu.discovery.node import Node
from pixiu.discovery.operations import NodeExists
from pixiu.discovery.paths import ROLES
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.errors import InvalidArgument, Unavailable
from registry.mailbox import data_at, posted
from registry.session import registry_of
from tools.cli.output import DEFAULT_TARGET, AsJson, Target, Yes, guarded, operator, print_result, print_text
from tools.cli.replicas import ReplicaStatus
from tools.cli.status import ClusterStatus, read_status

TIMEOUT_S: Final = 120.0
POLL_S: Final = 1.0
GONE_POLL_S: Final = 0.2
Say = Callable[[str, Node], None]

Timeout = Annotated[float, typer.Option("--timeout", min=1, help="Seconds that each process has to drain.")]
Force = Annotated[bool, typer.Option("--force", help="Drain even where no other process could take over.")]


@guarded
def drain(
    processes: Annotated[
        list[str],
        typer.Argument(help="ROLE/REPLICA, ROLE/PARTITION/REPLICA, HOST:PORT, or a HOST: all on it.", metavar="PROCESS"),
    ],
    force: Force = False,
    timeout_s: Timeout = TIMEOUT_S,
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
) -> None:
    """Drain processes as on SIGTERM: they hand over what they have, move their clients and leave. Returns when they have left.

    Whatever supervises them may start them again: `pixiu up` does; `pixiu remove-replica` ends one of its processes for good.
    """
    supervisor = asyncio.run(_drain(target, processes, force, timeout_s, _says(as_json)))
    if supervisor and not as_json:
        print_text(f"`pixiu up` on {supervisor} starts again what it ran")


@guarded
def rolling_restart(
    roles: Annotated[list[str] | None, typer.Option("--role", help="Only this role; may be repeated.", metavar="ROLE")] = None,
    yes: Yes = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the order, and do nothing.")] = False,
    force: Force = False,
    timeout_s: Timeout = TIMEOUT_S,
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
) -> None:
    """Drain every process, one after another, each only when the one before is back and the cluster is healthy.

    `pixiu up` starts them again; elsewhere systemd or whatever supervises them must do so after exit code 0 too.
    """
    for role in roles or ():
        if role not in ROLES:
            raise InvalidArgument(f"--role {role}: must be one of {', '.join(ROLES)}")
    plan = asyncio.run(_plan(target, roles or ROLES, force))
    if dry_run or not (yes or as_json):
        for node in plan:
            print_text(f"{name_of(node)} at {node.address}")
    if dry_run:
        return
    if not yes:
        if as_json:
            raise InvalidArgument("--json does not ask: add --yes")
        typer.confirm(f"Restart these {len(plan)} processes?", abort=True)
    asyncio.run(_restart(target, plan, force, timeout_s, _says(as_json)))


def _says(as_json: bool) -> Say:
    def say(what: str, node: Node) -> None:
        value = {"event": what, "process": name_of(node), "address": node.address, "pid": node.pid}
        print_result(value, f"{name_of(node)} at {node.address} {what.replace('_', ' ')}", as_json=as_json)

    return say


def _replicas(status: ClusterStatus) -> dict[int, ReplicaStatus]:
    return {process.node.endpoint: process.replica for process in status.processes if process.replica is not None}


def _check(status: ClusterStatus, leaving: Sequence[Node], force: bool) -> None:
    problems = against(status.view, leaving, _replicas(status))
    if problems and not force:
        raise InvalidArgument(f"{'; '.join(problems)}: start another one first, or add --force")


async def _drain(target: str, words: Sequence[str], force: bool, timeout_s: float, say: Say) -> str:
    status = await read_status(target)
    nodes = choose(status.view, words)
    _check(status, nodes, force)
    async with registry_of(target) as (zookeeper, root):
        for node in nodes:
            say("drains", node)
            await drain_process(zookeeper, root, node, operator(), timeout_s)
            say("has_left", node)
        return (await data_at(zookeeper, paths.supervisor(root))).decode(errors="replace")


async def drain_process(zookeeper: ZooKeeper, root: str, node: Node, by: str, timeout_s: float) -> None:
    """Ask a process to drain, and wait until it has left the registry. by: the requester, for the process's log.

    Raises `Unavailable` when it does not leave in time, or another command already drains it, `RegistryUnavailable`.
    """
    place = f"{paths.node_prefix(root, node.role, node.partition)}{node.replica:010d}"
    try:
        async with posted(zookeeper, paths.drain(root, node.endpoint), by):
            there = await polled(lambda: zookeeper.exists(place), lambda stat: stat is None, timeout_s, GONE_POLL_S)
    except NodeExists:
        raise Unavailable(f"{node.role} at {node.address} is being drained by another command already") from None
    if there is not None:
        raise Unavailable(f"{node.role} at {node.address} has not left after {timeout_s:g} s: its log says why (pid {node.pid})")


async def _plan(target: str, roles: Sequence[str], force: bool) -> list[Node]:
    """Plan a restart. Raises `InvalidArgument` when there is nothing to restart, or a process cannot be spared; `Unavailable`
    when the cluster is unhealthy already."""
    status = await read_status(target)
    nodes = [node for node in status.view.nodes if node.role in roles]
    if not nodes:
        raise InvalidArgument(f"nothing of {', '.join(roles)} runs that could be restarted")
    if not status.healthy:
        raise Unavailable(f"the cluster is not healthy, and nothing was restarted: {'; '.join(status.problems)}")
    for node in nodes:
        _check(status, [node], force)
    return restart_order(nodes, _replicas(status))


async def _restart(target: str, plan: Sequence[Node], force: bool, timeout_s: float, say: Say) -> None:
    async with registry_of(target) as (zookeeper, root):
        for node in plan:
            status = await _until(target, lambda status: status.problems, f"before {name_of(node)} is restarted", timeout_s)
            if status.view.by_endpoint(node.endpoint) is None:
                say("has_left_by_itself", node)
                continue
            _check(status, [node], force)
            others = running_beside(status.view, node)
            say("drains", node)
            await drain_process(zookeeper, root, node, operator(), timeout_s)
            start = Lack(node.role, node.partition, 0, 1).start()
            late = f"{name_of(node)} has left and its successor is not back; if nobody starts it: {start}"
            await _until(target, lambda status, node=node, others=others: not_back(status, node, others), late, timeout_s)  # type: ignore[misc]
            say("is_back", node)


async def _until(target: str, wrong: Callable[[ClusterStatus], list[str]], what: str, timeout_s: float) -> ClusterStatus:
    """Wait until no problem is left. Raises `Unavailable` with the remaining ones."""
    status = await polled(lambda: read_status(target), lambda status: not wrong(status), timeout_s, POLL_S)
    if problems := wrong(status):
        raise Unavailable(f"{what}: after {timeout_s:g} s: {'; '.join(problems)}")
    return status
