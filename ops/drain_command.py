"""`pixiu drain` and `pixiu rolling-restart`: processes leave in order, one after another.

Source: docs/operations.md, "Draining and adding processes".
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Annotated, Final

import typer

from ops.drain_plan import against, by_process, choose, name_of, not_back, restart_order, running_beside
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
Say = Callable[[str, Sequence[Node]], None]

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
    Of a node, a process of several roles, all roles leave.

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
        for process in plan:
            print_text(_text(process))
    if dry_run:
        return
    if not yes:
        if as_json:
            raise InvalidArgument("--json does not ask: add --yes")
        typer.confirm(f"Restart these {len(plan)} processes?", abort=True)
    asyncio.run(_restart(target, plan, force, timeout_s, _says(as_json)))


def _text(roles: Sequence[Node]) -> str:
    """Name a process, with the other roles of a node."""
    first, *others = roles
    beside = f" (pid {first.pid}, with {', '.join(map(name_of, others))})" if others else ""
    return f"{name_of(first)} at {first.address}{beside}"


def _says(as_json: bool) -> Say:
    def say(what: str, roles: Sequence[Node]) -> None:
        first, *others = roles
        value = {
            "event": what,
            "process": name_of(first),
            "with": [name_of(node) for node in others],
            "address": first.address,
            "pid": first.pid,
        }
        print_result(value, f"{_text(roles)} {what.replace('_', ' ')}", as_json=as_json)

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
        for process in by_process(nodes):
            say("drains", process)
            await drain_process(zookeeper, root, process, operator(), timeout_s)
            say("has_left", process)
        return (await data_at(zookeeper, paths.supervisor(root))).decode(errors="replace")


async def drain_process(zookeeper: ZooKeeper, root: str, roles: Sequence[Node], by: str, timeout_s: float) -> None:
    """Ask a process to drain, by the first of its roles, and wait until all of them have left the registry. by: the requester, for
    the process's log.

    Raises `Unavailable` when it does not leave in time, or another command already drains it, `RegistryUnavailable`.
    """
    node, *_ = roles

    async def left() -> list[Node]:
        places = [f"{paths.node_prefix(root, node.role, node.partition)}{node.replica:010d}" for node in roles]
        stats = await asyncio.gather(*map(zookeeper.exists, places))
        return [node for node, stat in zip(roles, stats, strict=True) if stat is not None]

    try:
        async with posted(zookeeper, paths.drain(root, node.endpoint), by):
            there = await polled(left, lambda there: not there, timeout_s, GONE_POLL_S)
    except NodeExists:
        raise Unavailable(f"{node.role} at {node.address} is being drained by another command already") from None
    if there:
        raise Unavailable(
            f"{there[0].role} at {there[0].address} has not left after {timeout_s:g} s: its log says why (pid {node.pid})"
        )


async def _plan(target: str, roles: Sequence[str], force: bool) -> list[list[Node]]:
    """Plan a restart: processes, each with its roles. Raises `InvalidArgument` when there is nothing to restart, or a process
    cannot be spared; `Unavailable` when the cluster is unhealthy already."""
    status = await read_status(target)
    meant = {node.process for node in status.view.nodes if node.role in roles}
    if not meant:
        raise InvalidArgument(f"nothing of {', '.join(roles)} runs that could be restarted")
    if not status.healthy:
        raise Unavailable(f"the cluster is not healthy, and nothing was restarted: {'; '.join(status.problems)}")
    plan = restart_order([node for node in status.view.nodes if node.process in meant], _replicas(status))
    for process in plan:
        _check(status, process, force)
    return plan


async def _restart(target: str, plan: Sequence[Sequence[Node]], force: bool, timeout_s: float, say: Say) -> None:
    async with registry_of(target) as (zookeeper, root):
        for process in plan:
            name = name_of(process[0])
            status = await _until(target, lambda status: status.problems, f"before {name} is restarted", timeout_s)
            if status.view.by_endpoint(process[0].endpoint) is None:
                say("has_left_by_itself", process)
                continue
            _check(status, process, force)
            others = running_beside(status.view, process)
            say("drains", process)
            await drain_process(zookeeper, root, process, operator(), timeout_s)
            start = "; ".join(Lack(node.role, node.partition, 0, 1).start() for node in process)
            late = f"{name} has left and its successor is not back; if nobody starts it: {start}"
            await _until(target, lambda status, process=process, others=others: not_back(status, process, others), late, timeout_s)  # type: ignore[misc]
            say("is_back", process)


async def _until(target: str, wrong: Callable[[ClusterStatus], list[str]], what: str, timeout_s: float) -> ClusterStatus:
    """Wait until no problem is left. Raises `Unavailable` with the remaining ones."""
    status = await polled(lambda: read_status(target), lambda status: not wrong(status), timeout_s, POLL_S)
    if problems := wrong(status):
        raise Unavailable(f"{what}: after {timeout_s:g} s: {'; '.join(problems)}")
    return status
