"""Show or write the layout: how many partitions and replicas every role has. Needs the registry alone, no running process.

Source: docs/operations.md, "Several machines".
"""

from __future__ import annotations

import asyncio
from collections.abc import Container
from typing import Annotated, Any, Final

import typer
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from pixiu.discovery.lacks import NO_LAYOUT, Lack, lacks
from pixiu.discovery.paths import ROLES, UNPARTITIONED_ROLES
from pixiu.discovery.view import Layout, RoleLayout, View
from registry.guarding import guard_first
from registry.layout import read_layout, set_layout
from registry.layout_change import Change, changed_layout, changes, parse_wanted
from registry.session import registry_of
from tools.cli.output import DEFAULT_TARGET, AsJson, Target, console, guarded, print_json, print_text
from tools.cli.status import read_status

layout = typer.Typer(name="layout", help=(__doc__ or "").split("\n\n")[0], no_args_is_help=True)
EXIT_NO_LAYOUT: Final = 1
EXAMPLE: Final = "pixiu layout set router=2x2 broker=2x2 relay=2x2 xiu=1x3 pi=1x3 topic=1x3 proxy=2 gateway=2 admin=2"


@layout.command()
@guarded
def show(target: Target = DEFAULT_TARGET, as_json: AsJson = False) -> None:
    """Show the layout, which of its processes are Running and answer, and how to start those that are missing. Exit code 1: there
    is no layout."""
    found = asyncio.run(read_status(target))
    view, gone = found.view, frozenset(int(process.node.endpoint) for process in found.processes if process.silent)
    if as_json:
        print_json(layout_json(target, view.layout, lacks(view, gone)), indent=2)
    else:
        console().print(render(target, view, gone))
    if not view.layout.version:
        raise typer.Exit(EXIT_NO_LAYOUT)


@layout.command("set")
@guarded
def set_(
    roles: Annotated[
        list[str],
        typer.Argument(
            help="ROLE=PARTITIONSxREPLICAS, such as broker=2x3; ROLE=PROCESSES of proxy, gateway and admin.", metavar="ROLE=N"
        ),
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change, and change nothing.")] = False,
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
) -> None:
    """Add roles to the layout, or change how many replicas are wanted of existing ones; roles that are not named stay as they are.

    Of an existing role the number of partitions changes by `pixiu double` alone; topic gets further groups here. Nothing is started
    or ended, except by a `pixiu up` that runs the cluster: it follows the wanted groups and replicas of its roles.
    """
    before, after = asyncio.run(_set(target, parse_wanted(roles), dry_run=dry_run))
    made = changes(before, after)
    if as_json:
        said = {"dry_run": dry_run, "changes": [change_json(change) for change in made], **layout_json(target, after)}
        print_json(said, indent=2)
        return
    for change in made:
        print_text(f"{change}{'  (not written)' if dry_run else ''}")
    end = "nothing changes" if not made else f"would become version {before.version + 1}" if dry_run else f"version {after.version}"
    print_text(f"layout of {target}: {end}")


async def _set(target: str, wanted: dict[str, RoleLayout], *, dry_run: bool) -> tuple[Layout, Layout]:
    async with registry_of(target) as (zookeeper, root):
        if dry_run:
            before = await read_layout(zookeeper, root) or Layout()
            return before, changed_layout(before, wanted)
        await guard_first(zookeeper, root)
        return await set_layout(zookeeper, root, wanted)


def role_json(found: RoleLayout) -> dict[str, int]:
    """A role of the layout as JSON values."""
    return {"n": found.n, "next": found.next, "replicas": found.replicas}


def change_json(change: Change) -> dict[str, Any]:
    """A change as JSON values."""
    before = role_json(change.before) if change.before is not None else None
    return {"role": change.role, "before": before, "after": role_json(change.after)}


def layout_json(target: str, found: Layout, missing: list[Lack] | None = None) -> dict[str, Any]:
    """Return the layout as JSON values, with the missing processes if they are known."""
    said: dict[str, Any] = {
        "registry": target,
        "cluster": found.cluster or None,
        "version": found.version,
        "roles": {role: role_json(one) for role, one in sorted(found.roles.items())},
    }
    if missing is not None:
        said["missing"] = [
            {"role": lack.role, "partition": lack.partition, "running": lack.running, "wanted": lack.wanted} for lack in missing
        ]
    return said


def render(target: str, view: View, gone: Container[int] = ()) -> RenderableType:
    """Render the layout as a table, and below it the missing processes. gone: endpoints that are registered and do not answer."""
    if not view.layout.version:
        return f"{escape(target)}: {NO_LAYOUT}, such as\n  {EXAMPLE}"
    table = Table(box=None, pad_edge=False)
    for name in ("role", "partitions", "replicas", "Running"):
        table.add_column(name, justify="left" if name in ("role", "Running") else "right")
    for role in (role for role in ROLES if role in view.layout.roles):
        found = view.layout.roles[role]
        whole = role in UNPARTITIONED_ROLES
        nodes = [view.running(role)] if whole else [view.replicas(role, number) for number in range(found.n)]
        running = [sum(node.endpoint not in gone for node in each) for each in nodes]
        partitions = "" if whole else str(found.n) if found.n == found.next else f"{found.n} → {found.next}"
        table.add_row(role, partitions, str(found.replicas), " ".join(map(str, running)))
    missing = [
        f"  {escape(str(lack))}{_where(view, lack, gone)}; start: {escape(lack.start(target))}" for lack in lacks(view, gone)
    ]
    head = f"{escape(target)}  layout version {view.layout.version}  cluster {view.layout.cluster}"
    return Group(head, table, *missing)


def _where(view: View, lack: Lack, gone: Container[int]) -> str:
    """Name the machines of missing processes, as far as the registry still knows them."""
    nodes = view.running(lack.role) if lack.partition < 0 else view.replicas(lack.role, lack.partition)
    hosts = sorted({node.host for node in nodes if node.endpoint in gone})
    return f", lost at {escape(', '.join(hosts))}" if hosts else ""
