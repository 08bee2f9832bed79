"""`pixiu retained`: retained messages, without what they say.

Source: docs/operations.md, "Retained messages".
"""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import Annotated, Any, Final
from urllib.parse import urlencode

import typer
from rich.table import Table

from pixiu.errors import InvalidArgument, Unavailable
from pixiu.placement.topics import TopicRefusal, parse_filter
from tools.cli.http import fetch
from tools.cli.output import DEFAULT_TARGET, AsJson, Target, console, guarded, print_json, visible
from tools.cli.status import read_registry

MAX_SHOWN: Final = 1000


@guarded
def retained(
    name: Annotated[str, typer.Argument(help="Topic, or MQTT filter.", metavar="FILTER")] = "#",
    target: Target = DEFAULT_TARGET,
    after: Annotated[str, typer.Option(help="Only topics after this one.", metavar="TOPIC")] = "",
    limit: Annotated[int, typer.Option(help="Number of messages shown.", min=1, max=MAX_SHOWN)] = 100,
    as_json: AsJson = False,
) -> None:
    """List retained messages that match a filter, by topic: size, QoS, when each was published and when it expires. To remove one,
    publish an empty message with RETAIN to its topic."""
    if isinstance(parse_filter(name), TopicRefusal):
        raise InvalidArgument(f"{name[:80]!r} is no topic, and no filter of topics")
    said = asyncio.run(_ask(target, {"filter": name, "limit": str(limit), "after": after}))
    if as_json:
        print_json(said)
        return
    table = Table(box=None)
    for column in ("topic", "bytes", "QoS", "published", "expires"):
        table.add_column(column)
    for each in said["retained"]:
        expires = _shown(each["expires_at_ms"]) if each["expires_at_ms"] else ""
        table.add_row(visible(each["topic"]), str(each["bytes"]), str(each["qos"]), _shown(each["published_ms"]), expires)
    console().print(table)
    if said["next"]:
        console().print(f"there may be more: --after {visible(said['next'])}")


def _shown(unix_ms: int) -> str:
    return datetime.fromtimestamp(unix_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


async def _ask(target: str, query: dict[str, str]) -> dict[str, Any]:
    """The answer of the first gateway that gives one; it asks all routers."""
    _, view, _ = await read_registry(target)
    for node in view.of_role("gateway"):
        try:
            status, body = await fetch(node.host, node.http_port, f"/retained?{urlencode(query)}")
            found: dict[str, Any] = json.loads(body)
        except (OSError, ValueError):
            continue
        if status == 200 and "retained" in found:
            return found
    raise Unavailable("no gateway lists retained messages now; look at `pixiu status`")
