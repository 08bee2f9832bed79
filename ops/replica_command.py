"""`pixiu add-replica` and `pixiu remove-replica`: change the wanted number of a role's replicas by one.

Source: docs/operations.md, "Draining and adding processes".
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final

import typer

from ops.drain_plan import name_of
from ops.polling import polled
from pixiu.discovery import paths
from pixiu.discovery.lacks import lacks
from pixiu.discovery.node import NodeState
from pixiu.discovery.view import View
from pixiu.errors import Unavailable
from registry.layout import change_replicas
from registry.layout_change import role_text
from registry.mailbox import data_at
from registry.session import read_view, registry_of
from tools.cli.output import DEFAULT_TARGET, AsJson, Target, guarded, print_json, print_text
from tools.cli.status import read_status

TIMEOUT_S: Final = 120.0
POLL_S: Final = 0.5

Role = Annotated[str, typer.Argument(help="proxy, gateway, admin, router, broker, relay, xiu, pi or topic.")]
Timeout = Annotated[float, typer.Option("--timeout", min=1, help="Seconds that `pixiu up` has to do it.")]


@guarded
def add_replica(role: Role, timeout_s: Timeout = TIMEOUT_S, target: Target = DEFAULT_TARGET, as_json: AsJson = False) -> None:
    """Add one replica of each partition of a role, or one proxy, gateway or admin.

    Where `pixiu up` runs the cluster it starts them, and the command returns when they are Running; elsewhere the command says what
    to start.
    """
    _show(role, asyncio.run(_change(target, role, 1, timeout_s)), as_json=as_json)


@guarded
def remove_replica(
    role: Role,
    force: Annotated[bool, typer.Option("--force", help="Do it even while the cluster is not healthy.")] = False,
    timeout_s: Timeout = TIMEOUT_S,
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
) -> None:
    """Remove one replica of each partition of a role, or one proxy, gateway or admin.

    Where `pixiu up` runs the cluster it drains and ends the newest ones, whose data stay in its folder; elsewhere the command says
    what to drain.
    """
    _show(role, asyncio.run(_remove(target, role, timeout_s, force=force)), as_json=as_json)


async def _remove(target: str, role: str, timeout_s: float, *, force: bool) -> dict[str, Any]:
    if not force and not (status := await read_status(target)).healthy:
        raise Unavailable(
            f"the cluster is not healthy, and nothing was changed (--force: change it anyway): {'; '.join(status.problems)}"
        )
    return await _change(target, role, -1, timeout_s)


async def _change(target: str, role: str, by: int, timeout_s: float) -> dict[str, Any]:
    """Change the wanted replicas. Returns the new number, the supervisor that runs the cluster, and the commands left to run by
    hand."""
    async with registry_of(target) as (zookeeper, root):
        wanted = (await change_replicas(zookeeper, root, role, by)).roles[role]
        supervisor = (await data_at(zookeeper, paths.supervisor(root))).decode(errors="replace")

        async def todo() -> list[str]:
            return _todo(await read_view(zookeeper, root), role)

        left = await polled(todo, lambda left: not left, timeout_s if supervisor else 0.0, POLL_S)
    if supervisor and left:
        raise Unavailable(
            f"{role}: {role_text(role, wanted)} wanted, but `pixiu up` has not reached that after {timeout_s:g} s: look at "
            f"its output and its logs. Still to do: {'; '.join(left)}"
        )
    return {"wanted": wanted, "supervisor": supervisor, "do": left}


def _todo(view: View, role: str) -> list[str]:
    """Return commands that bring a role to its layout: what to start, or which of the newest processes to drain."""
    found = [lack.start() for lack in lacks(view) if lack.role == role for _ in range(lack.wanted - lack.running)]
    wanted = view.layout.roles[role].replicas
    places: dict[int, list[str]] = {}
    for node in sorted(view.of_role(role), key=lambda node: node.replica):
        if node.state is not NodeState.DRAINING:
            places.setdefault(node.partition, []).append(f"pixiu drain {name_of(node)}")
    found += [line for lines in places.values() for line in lines[wanted:]]
    leaving = any(node.state is NodeState.DRAINING for node in view.of_role(role))
    return found or (["wait for what is draining"] if leaving else [])


def _show(role: str, said: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(
            {"role": role, "replicas": said["wanted"].replicas, "supervisor": said["supervisor"], "do": said["do"]}, indent=2
        )
        return
    lines = [f"{role}: {role_text(role, said['wanted'])} wanted", *(f"  {line}" for line in said["do"])]
    if said["supervisor"]:
        lines.append(f"done by `pixiu up` on {said['supervisor']}")
    print_text("\n".join(lines))
