"""`pixiu routes check|test|status`: routes between topics of MQTT, rooms and durable topics.

Source: docs/routes.md.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.table import Table

import pixiu
from cluster.routes.routes import Routes, read_routes
from pixiu.discovery.node import Node
from pixiu.errors import UnknownTopic
from registry.session import read_view, registry_of
from tools.cli.http import fetch
from tools.cli.output import DEFAULT_TARGET, AsJson, Target, console, guarded, print_json, print_text

SUMMED: Final = ("stored", "repeated", "refused", "stopped", "waiting")
routes = typer.Typer(
    name="routes", no_args_is_help=True, help="Routes between topics of MQTT, rooms and durable topics."
)  # fmt: skip
File = Annotated[Path, typer.Argument(metavar="FILE", help="The file of routes.")]


@routes.command("check")
@guarded
def check(
    file: File,
    offline: Annotated[bool, typer.Option("--offline", help="Read the file only; do not look for the durable topics.")] = False,
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
) -> None:
    """Check a file of routes: what is wrong, what is never used, loops, durable topics that are missing. Exit code 1: some are."""
    found = read_routes(file)
    missing = [] if offline else asyncio.run(_missing(target, found))
    if as_json:
        print_json({"routes": [_shown(found, each.name) for each in found.routes], "missing": missing}, indent=2)
    else:
        for each in found.routes:
            options = each.options
            takes = options.filter or ", ".join(f"room/{room}" for room in options.rooms)
            print_text(f"{each.name}: {takes + ' → ' + options.topic + ', ' if takes else ''}{each.case}")
        for topic in missing:
            print_text(f"! there is no durable topic {topic}: pixiu topic create {topic}")
    if missing:
        raise typer.Exit(1)


@routes.command("test")
@guarded
def try_topic(
    file: File,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="A topic of MQTT as the cluster names it, or room/N.")],
    as_json: AsJson = False,
) -> None:
    """Say what becomes of a message: the route that takes it, its durable topic, key and slot, and how clients get it."""
    taken = read_routes(file).test(topic)
    if taken is None or not taken.route.options.topic:
        print_json({"topic": topic, "route": None}) if as_json else print_text(
            f"{topic}: no route takes it; clients get it at once"
        )
        return
    options = taken.route.options
    key = None if taken.key is None else taken.key.decode(errors="replace")
    if as_json:
        print_json({
            "topic": topic, "route": taken.route.name, "durable_topic": options.topic, "key": key, "slot": taken.slot,
            "clients": options.clients or None,
        })  # fmt: skip
        return
    clients = {"": "clients do not get it", options.topic: f"clients get it from {options.topic}, in the order of the log"}.get(
        options.clients, f"clients get what is in {options.clients}"
    )
    where = "without a key" if key is None else f"key {key}, slot {taken.slot}"
    print_text(f"{topic}: route {taken.route.name}, durable topic {options.topic}, {where}; {clients}")


@routes.command("status")
@guarded
def status(target: Target = DEFAULT_TARGET, as_json: AsJson = False) -> None:
    """Show each route: what proxies stored and refused since they began, and what it lacks. Exit code 1: one does not get on."""
    found, silent = asyncio.run(_statuses(target))
    if as_json:
        print_json(found, indent=2)
    else:
        table = Table(box=None, pad_edge=False)
        for title in ("route", "takes", "durable topic", "clients get", "stored", "repeated", "refused", "waiting", ""):
            table.add_column(title, overflow="fold")
        for each in found:
            numbers = [f"{each[field]:,}" for field in ("stored", "repeated", "refused", "waiting")]
            table.add_row(each["name"], each["takes"], each["topic"], each["clients"], *numbers, each["why"])
        console().print(table)
        if not found and not silent:
            print_text("no proxy has routes: give proxies a file, proxy.routes (docs/routes.md)")
        for line in silent:
            print_text(f"! {line}")
    if silent or any(each["why"] for each in found):
        raise typer.Exit(1)


def _shown(found: Routes, name: str) -> dict[str, Any]:
    each = found.by_name[name]
    options = each.options
    takes = options.filter or ", ".join(f"room/{room}" for room in options.rooms)
    return {"name": name, "takes": takes, "topic": options.topic, "clients": options.clients, "case": each.case}


async def _missing(target: str, found: Routes) -> list[str]:
    names = dict.fromkeys(name for each in found.routes for name in (each.options.topic, each.options.clients) if name)
    missing = list[str]()
    async with pixiu.connect(target, client="pixiu-routes") as px:
        for name in names:
            try:
                await px.topics.describe(name)
            except UnknownTopic:
                missing.append(name)
    return missing


async def _statuses(target: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The routes of all proxies, numbers added up, and a line for each proxy that does not answer."""
    async with registry_of(target) as (zookeeper, root):
        nodes = (await read_view(zookeeper, root)).running("proxy")
    answers = await asyncio.gather(*(_ask(node) for node in nodes))
    return merged([each for each in answers if not isinstance(each, str)]), [each for each in answers if isinstance(each, str)]


def merged(answers: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The routes of all proxies by name, numbers added up. One that some proxies do not have is named."""
    found = dict[str, dict[str, Any]]()
    for each in (each for routes_ in answers for each in routes_):
        other = found.setdefault(each["name"], {**each, "proxies": 0, **dict.fromkeys(SUMMED, 0)})
        other["proxies"] += 1
        for field in SUMMED:
            other[field] += each[field]
        other["why"] = other["why"] or each["why"]
    for each in found.values():
        if each["proxies"] < len(answers):
            each["why"] = each["why"] or "some proxies do not have it: give all the same file"
    return list(found.values())


async def _ask(node: Node) -> list[dict[str, Any]] | str:
    try:
        _, body = await fetch(node.host, node.http_port, "/health")
        found: list[dict[str, Any]] = json.loads(body)["service"]["routes"]
    except (OSError, ValueError, KeyError) as error:
        return f"the proxy at {node.address} does not answer: {error}"
    return found
