"""`pixiu config get|set|unset|history`: settings that can change while the cluster runs, kept in the registry and watched by
every process.

Source: docs/operations.md, "Change a setting while all runs".
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer
from rich.markup import escape
from rich.table import Table

from cluster.settings.fields import field_docs, show
from cluster.settings.live_settings import ALL, CLUSTER, LIVE, Settings, live_keys, live_names, spec_of, value_of
from cluster.settings.options import ClusterOptions, RoleOptions
from ops.polling import polled
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.paths import ROLES
from pixiu.discovery.view import View
from pixiu.errors import InvalidArgument
from registry.session import read_view, registry_of
from registry.settings import change_settings, read_changes, read_settings
from tools.cli.http import fetch
from tools.cli.output import DEFAULT_TARGET, AsJson, Target, console, guarded, operator, print_json, print_text

AT_ONCE: Final = 32
POLL_S: Final = 0.1

config = typer.Typer(name="config", no_args_is_help=True, help="Settings that can change while the cluster runs.")

Names = Annotated[list[str], typer.Argument(metavar="NAME…", help="Such as proxy.room_messages_per_s or all.log_level.")]
Pairs = Annotated[list[str], typer.Argument(metavar="NAME=VALUE…", help="Such as proxy.room_messages_per_s=500.")]
Wait = Annotated[float, typer.Option("--timeout", min=0, help="Seconds that processes have to apply it.")]


def options_types() -> dict[str, type]:
    """Return the options class of every table: the cluster's, those of all roles, and each role's."""
    roles: dict[str, type] = {role: importlib.import_module(f"{role}.options").Options for role in ROLES}
    return {CLUSTER: ClusterOptions, ALL: RoleOptions, **roles}


@dataclass(frozen=True, slots=True)
class Taken:
    """Settings that one process reports."""

    node: Node
    version: int
    """Version that the process uses; -1: it does not answer."""
    refused: Mapping[str, str]


@config.command("get")
@guarded
def get(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME…]", help="Settings to show. Default: all.")] = None,
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
) -> None:
    """Show which settings can change while the cluster runs, and which are set. Exit code 1: a process has not applied them."""
    types = options_types()
    for name in names or ():
        spec_of(name, types)
    settings, taken = asyncio.run(_get(target))
    _show(settings, taken, list(names or live_names()), types, as_json=as_json)
    if behind(taken, settings.version):
        raise typer.Exit(1)


@config.command("set")
@guarded
def set_(pairs: Pairs, timeout_s: Wait = 10.0, target: Target = DEFAULT_TARGET, as_json: AsJson = False) -> None:
    """Set values for the whole cluster, at once; they survive restarts. Exit code 1: a process has not applied them."""
    wanted: dict[str, Any] = {}
    types = options_types()
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise InvalidArgument(f"{show(pair)}: give NAME=VALUE, as in proxy.room_messages_per_s=500")
        wanted[name] = value_of(name, text, types)
    _change(target, wanted, timeout_s, as_json=as_json)


@config.command("unset")
@guarded
def unset(names: Names, timeout_s: Wait = 10.0, target: Target = DEFAULT_TARGET, as_json: AsJson = False) -> None:
    """Unset values: each process uses its own configuration again."""
    types = options_types()
    for name in names:
        spec_of(name, types)
    _change(target, dict.fromkeys(names), timeout_s, as_json=as_json)


@config.command("history")
@guarded
def history(target: Target = DEFAULT_TARGET, as_json: AsJson = False) -> None:
    """List the last hundred changes: who changed what and when, newest last."""
    lines = asyncio.run(_history(target))
    if as_json:
        print_json(lines, indent=2)
        return
    for line in lines:
        what = ", ".join(f"{name} {'unset' if value is None else f'= {show(value)}'}" for name, value in line["settings"].items())
        print_text(f"{line['time']}  {line['operator']}  version {line['version']}: {what}")


async def _history(target: str) -> list[dict[str, Any]]:
    async with registry_of(target) as (zookeeper, root):
        return await read_changes(zookeeper, root)


async def _get(target: str) -> tuple[Settings, list[Taken]]:
    async with registry_of(target) as (zookeeper, root):
        settings, view = await read_settings(zookeeper, root), await read_view(zookeeper, root)
    return settings, await ask(view)


def _change(target: str, wanted: Mapping[str, Any], timeout_s: float, *, as_json: bool) -> None:
    settings, differs, taken = asyncio.run(_changed(target, wanted, timeout_s))
    late = behind(taken, settings.version)
    if as_json:
        print_json({"version": settings.version, "changed": differs, "processes": len(taken), "behind": late}, indent=2)
    else:
        for name, value in differs.items():
            said = "as each process is configured" if value is None else show(value)
            print_text(f"{name} = {said}")
        done = f"version {settings.version}: {len(taken) - len(late)} of {len(taken)} processes use it"
        console().print(done if differs else f"nothing to change; {done}", highlight=False)
        for text in late:
            print_text(f"! {text}")
    if late:
        raise typer.Exit(1)


async def _changed(target: str, wanted: Mapping[str, Any], timeout_s: float) -> tuple[Settings, dict[str, Any], list[Taken]]:
    async with registry_of(target) as (zookeeper, root):
        settings, differs = await change_settings(zookeeper, root, wanted, operator())

        async def taken() -> list[Taken]:
            return await ask(await read_view(zookeeper, root))

        return settings, differs, await polled(taken, lambda taken: not behind(taken, settings.version), timeout_s, POLL_S)


def behind(taken: list[Taken], version: int) -> list[str]:
    """Describe the processes that do not use this version of the settings, or refuse a part of it."""
    said = []
    for one in taken:
        who = f"{one.node.role} at {one.node.address}"
        if one.version < 0 and version:
            said.append(f"{who} does not report which settings it uses: is it dead?")
        elif 0 <= one.version < version:
            said.append(f"{who} uses version {one.version} of the settings: does its ZooKeeper server lag?")
        said += [f"{who} refuses {name}: {why}" for name, why in one.refused.items() if one.version >= version]
    return said


async def ask(view: View) -> list[Taken]:
    """Ask every Running process which settings it uses."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(node: Node) -> Taken:
        async with slots:
            try:
                _, body = await fetch(node.host, node.http_port, "/health")
                said = json.loads(body)["settings"]
                return Taken(node, int(said["version"]), dict(said["refused"]))
            except (OSError, ValueError, TypeError, KeyError):
                return Taken(node, -1, {})

    return list(await asyncio.gather(*(one(node) for node in view.nodes if node.state is NodeState.RUNNING)))


def _show(settings: Settings, taken: list[Taken], names: list[str], types: Mapping[str, type], *, as_json: bool) -> None:
    late = behind(taken, settings.version)
    if as_json:
        said = {}
        for name in names:
            spec = spec_of(name, types)
            said[name] = {"set": settings.values.get(name), "default": spec.default, "allowed": spec.describe()}
        print_json({"version": settings.version, "settings": said, "processes": len(taken), "behind": late}, indent=2)
        return
    table = Table(box=None, pad_edge=False)
    for title in ("setting", "set to", "default", "allowed", ""):
        table.add_column(title, overflow="fold")
    docs = {name: field_docs(types[name]) for name in LIVE}
    shown = [name for name in names if name in settings.values or name.partition(".")[2] in LIVE.get(name.partition(".")[0], ())]
    for name in shown or names:
        own, _, key = name.partition(".")
        spec = spec_of(name, types)
        value = f"[bold]{escape(show(settings.values[name]))}[/]" if name in settings.values else "[dim]as configured[/]"
        table.add_row(escape(name), value, escape(show(spec.default)), escape(spec.describe()), escape(docs[own].get(key, "")))
    console().print(table)
    if shown and len(shown) < len(names):
        roles = [role for role in LIVE if role not in (CLUSTER, ALL)]
        console().print(f"Of one role alone: {', '.join(f'ROLE.{key}' for key in live_keys(ALL))} ({', '.join(roles)})")
    console().print(f"version {settings.version}: {len(taken) - len(late)} of {len(taken)} processes use it", highlight=False)
    for text in late:
        print_text(f"! {text}")
