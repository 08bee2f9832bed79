"""`pixiu sessions`: clients of all gateways, those with the most work first.

Source: docs/operations.md, "Clients of gateways".
"""

from __future__ import annotations

import asyncio
import heapq
import json
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Annotated, Any, Final
from urllib.parse import urlencode

import typer
from rich.table import Table

from pixiu.discovery.node import Node
from pixiu.errors import Unavailable
from tools.cli.http import fetch
from tools.cli.output import DEFAULT_TARGET, AsJson, Target, console, guarded, print_json, print_text, shown_time, visible
from tools.cli.status import ask_gateway, read_registry

MAX_SHOWN: Final = 1000
AWAY_S: Final = 120.0
"""Time limit of a gateway that asks routers and stores for all sessions, seconds."""


class Sort(StrEnum):
    """Number by which sessions are sorted."""

    BACKLOG = "backlog"
    INFLIGHT = "inflight"
    DROPPED = "dropped"


@guarded
def sessions(
    target: Target = DEFAULT_TARGET,
    client: Annotated[str, typer.Option(help="Only clients whose ID contains this.", metavar="TEXT")] = "",
    user: Annotated[str, typer.Option(help="Only clients of this user.", metavar="UIN")] = "",
    address: Annotated[str, typer.Option(help="Only clients of MQTT whose address begins with this.", metavar="ADDRESS")] = "",
    sort: Annotated[Sort, typer.Option(help="Largest first.")] = Sort.BACKLOG,
    limit: Annotated[int, typer.Option(help="Number of clients shown.", min=1, max=MAX_SHOWN)] = 20,
    away: Annotated[bool, typer.Option("--away", help="Sessions of MQTT that have outlived their connections instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """List clients of gateways: bytes that wait for each, messages that it has not acknowledged, messages dropped for it, and
    why it is not read from. `pixiu kick --client ID` ends one; with --forget it removes what has outlived its connection, too."""
    if away:
        query = {"away": "1", "client": client, "limit": str(limit)}
        _show_away(asyncio.run(ask_gateway(target, "/sessions", query, "problems", AWAY_S)), as_json)
        return
    query = {"client": client, "user": user, "address": address, "sort": sort.value, "limit": str(limit)}
    found = asyncio.run(_ask(target, query))
    shown, silent = found["sessions"], found["silent"]
    if as_json:
        print_json({"sessions": shown, "silent": silent})
    else:
        table = Table(box=None)
        for name in ("client", "user", "address", "gateway", "protocol", "backlog", "in flight", "dropped", "not read from, s"):
            table.add_column(name)
        for each in shown:
            held = ", ".join(f"{reason} {seconds:.1f}" for reason, seconds in each["held_s"].items())
            numbers = [str(each[name]) for name in ("backlog", "inflight", "dropped")]
            named = (visible(each["client"]), str(each["user"]), each["address"], each["gateway"], each["protocol"])
            table.add_row(*named, *numbers, held)
        console().print(table)
    if silent:
        raise Unavailable(f"gateways that do not answer: {', '.join(silent)}; look at `pixiu status`")


def _show_away(said: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(said)
        return
    table = Table(box=None)
    for name in ("client", "user", "filters", "waiting", "lost", "expires"):
        table.add_column(name)
    for each in said["sessions"]:
        numbers = [str(each[name]) for name in ("user", "filters", "waiting", "lost")]
        table.add_row(visible(each["client"]), *numbers, shown_time(each["expires_at_ms"]))
    console().print(table)
    if len(said["sessions"]) < said["matching"]:
        print_text(f"{said['matching']} sessions are away: --limit shows more")
    for problem in said["problems"]:
        print_text(visible(problem))


async def _ask(target: str, query: dict[str, str]) -> dict[str, Any]:
    _, view, _ = await read_registry(target)
    return await ask_sessions(view.of_role("gateway"), query)


async def ask_sessions(gateways: Iterable[Node], query: Mapping[str, str]) -> dict[str, Any]:
    """Sessions of these gateways, those with the most work first; how many match, and the gateways that do not answer."""
    nodes = list(gateways)
    answers = await asyncio.gather(*(_one(node, query) for node in nodes))
    found = [session for answer in answers if answer is not None for session in answer["sessions"]]
    shown = heapq.nlargest(int(query["limit"]), found, key=lambda each: (each[query["sort"]], -each["id"]))
    return {
        "sessions": shown,
        "connections": sum(answer["connections"] for answer in answers if answer is not None),
        "matching": sum(answer["matching"] for answer in answers if answer is not None),
        "silent": [f"{node.host}:{node.http_port}" for node, answer in zip(nodes, answers, strict=True) if answer is None],
    }


async def _one(node: Node, query: Mapping[str, str]) -> dict[str, Any] | None:
    """The page of a gateway; None: it does not answer."""
    try:
        _, body = await fetch(node.host, node.http_port, f"/sessions?{urlencode(query)}")
        found: dict[str, Any] = json.loads(body)
        sessions = [{**session, "gateway": f"{node.host}:{node.mqtt_port}"} for session in found["sessions"]]
        return {**found, "sessions": sessions}
    except (OSError, ValueError, KeyError):
        return None
