"""`pixiu tenants`: what each tenant uses at all gateways, and what was dropped and refused.

Source: docs/tenants.md, "Seeing it".
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final

import typer
from rich.table import Table

from pixiu.discovery.node import Node
from pixiu.errors import Unavailable
from tools.cli.http import fetch
from tools.cli.output import DEFAULT_TARGET, AsJson, Target, console, guarded, print_json, print_text, visible
from tools.cli.status import read_registry

STAGES: Final = ("none", "no_qos_0", "refused")
OF_CLUSTER: Final = ("retained", "kept")
"""Counts of the whole cluster, which each gateway has."""
SUMS: Final = (
    "sessions", "subscriptions", "messages_in", "bytes_in", "messages_out", "bytes_out", "dropped_in", "dropped_out",
    "refused_messages", "refused_sessions", "refused_subscriptions", "refused_kept",
)  # fmt: skip
RATES: Final = ("messages_in", "bytes_in", "messages_out", "bytes_out")


@guarded
def tenants(
    target: Target = DEFAULT_TARGET,
    interval_s: Annotated[float, typer.Option("--interval", help="Seconds over which rates are measured.", min=0.1, max=60)] = 1.0,
    as_json: AsJson = False,
) -> None:
    """List the tenants of the cluster: sessions and those that outlive their connections (kept), subscriptions, rates, what was
    dropped and refused, and what overloaded gateways take from them now. Those that use the most come first."""
    found, silent = asyncio.run(_measure(target, interval_s))
    shown = sorted(found, key=lambda each: (-each["messages_in_per_s"] - each["messages_out_per_s"], each["tenant"]))
    if as_json:
        print_json({"tenants": shown, "silent": silent})
    elif not shown and not silent:
        print_text("this cluster has no tenants: give its gateways an access file with tables [tenant.NAME]")
    else:
        console().print(_table(shown))
    if silent:
        raise Unavailable(f"gateways that do not answer: {', '.join(silent)}; look at `pixiu status`")


def _table(shown: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None)
    for name in ("tenant", "sessions", "kept", "filters", "in/s", "out/s", "retained", "dropped", "refused", "overload"):
        table.add_column(name)
    for each in shown:
        refused = sum(each[name] for name in SUMS if name.startswith("refused"))
        table.add_row(
            visible(each["tenant"]), str(each["sessions"]), _of(each, "kept"), str(each["subscriptions"]),
            f"{each['messages_in_per_s']:.0f}", f"{each['messages_out_per_s']:.0f}", _of(each, "retained"),
            str(each["dropped_in"] + each["dropped_out"]),
            str(refused), "" if each["stage"] == STAGES[0] else each["stage"].replace("_", " "),
        )  # fmt: skip
    return table


def _of(each: Mapping[str, Any], name: str) -> str:
    """A count of the cluster, with the most that is allowed."""
    most = each[f"max_{name}"]
    return f"{each[name]}/{most}" if most else str(each[name])


async def _measure(target: str, interval_s: float) -> tuple[list[dict[str, Any]], list[str]]:
    """Tenants with their rates, and the gateways that do not answer."""
    _, view, _ = await read_registry(target)
    nodes = list(view.of_role("gateway"))
    began = time.monotonic()
    before, _ = await _ask(nodes)
    await asyncio.sleep(interval_s)
    passed_s = time.monotonic() - began
    after, silent = await _ask(nodes)
    for name, each in after.items():
        earlier = before.get(name, each)
        for rate in RATES:
            each[f"{rate}_per_s"] = round(max(each[rate] - earlier[rate], 0) / passed_s, 1)
    return list(after.values()), silent


async def _ask(nodes: Sequence[Node]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    answers = await asyncio.gather(*map(_one, nodes))
    silent = [f"{node.host}:{node.http_port}" for node, answer in zip(nodes, answers, strict=True) if answer is None]
    return added(answer for answer in answers if answer is not None), silent


def added(answers: Iterable[Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Tenants of several gateways, by name: sums, the highest stage and the highest counts of the cluster."""
    found: dict[str, dict[str, Any]] = {}
    for each in (tenant for answer in answers for tenant in answer):
        total = found.setdefault(each["tenant"], {**each, **dict.fromkeys((*SUMS, *OF_CLUSTER), 0), "stage": STAGES[0]})
        for name in SUMS:
            total[name] += each[name]
        for name in OF_CLUSTER:
            total[name] = max(total[name], each[name])
        total["stage"] = max(total["stage"], each["stage"], key=STAGES.index)
    return found


async def _one(node: Node) -> list[dict[str, Any]] | None:
    """Tenants of a gateway; none where nobody logs in. None: it does not answer."""
    try:
        status, body = await fetch(node.host, node.http_port, "/tenants")
        found: list[dict[str, Any]] = json.loads(body)["tenants"] if status == 200 else []
    except (OSError, ValueError, KeyError):
        return None
    return found
