"""`pixiu availability`: the share of probes that arrived in the last 30 days, as the leading admin keeps it.

Source: docs/console.md, "Availability".
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table

from pixiu.discovery.node import Node
from pixiu.discovery.view import View
from pixiu.errors import Unavailable
from tools.cli.http import fetch
from tools.cli.output import DEFAULT_TARGET, AsJson, Target, console, guarded, print_json, shown_time, visible
from tools.cli.status import read_registry

SHOWN_PATHS: Final = 20
"""Paths in the table, those with the lowest share; `--json` has all."""
NO_REPORT: Final = "no admin has counted probes: set admin.probe_interval_ms and admin.probe_file, and wait (docs/console.md)"


@guarded
def availability(target: Target = DEFAULT_TARGET, as_json: AsJson = False) -> None:
    """Show the share of probes that arrived in the last 30 days, in total, by day and by path. An admin with
    `probe_interval_ms` makes the probes."""
    found = asyncio.run(_ask(target))
    if as_json:
        print_json(found)
    else:
        console().print(_render(found))


async def _ask(target: str) -> dict[str, Any]:
    _, view, _ = await read_registry(target)
    return await read_availability(view)


async def read_availability(view: View) -> dict[str, Any]:
    """Ask all admins for what they keep, and take the newest. Raises `Unavailable`."""
    if not (admins := view.running("admin")):
        raise Unavailable("no admin is running, and admins keep the availability: `pixiu status` shows what is missing")
    answers = await asyncio.gather(*(_one(node) for node in admins))
    found = [answer for answer in answers if answer]
    if not found:
        raise Unavailable(NO_REPORT)
    newest: dict[str, Any] = max(found, key=lambda report: report["at_s"])
    return newest


async def _one(node: Node) -> dict[str, Any]:
    """The report of an admin; empty if it has none, or does not answer."""
    try:
        status, body = await fetch(node.host, node.http_port, "/availability")
        found = json.loads(body) if status == 200 else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and "at_s" in found else {}


def _render(found: Mapping[str, Any]) -> RenderableType:
    paths = Table(box=None, pad_edge=False)
    for name in ("path", "arrived", "failed", "share"):
        paths.add_column(name, justify="left" if name == "path" else "right")
    for each in found["paths"][:SHOWN_PATHS]:
        paths.add_row(visible(each["path"]), f"{each['arrived']:,}", f"{each['failed']:,}", share_text(each["share"]))
    total = found["total"]
    probes = total["arrived"] + total["failed"]
    shares = f"{share_text(total['share'])} of {probes:,} probes" if probes else "no probes yet"
    head = f"availability, {len(found['days'])} of 30 days: {shares}, as of {shown_time(found['at_s'] * 1000)}"
    return Group(head, "", paths, *(f"alarm: {visible(text)}" for text in found["alarms"]))


def share_text(share: float | None) -> str:
    """A share in percent."""
    return "" if share is None else f"{100 * share:.4f} %"
