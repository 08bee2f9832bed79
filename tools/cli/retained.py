"""`pixiu retained`: retained messages, without what they say.

Source: docs/operations.md, "Retained messages".
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Final

import typer
from rich.table import Table

from pixiu.errors import InvalidArgument
from pixiu.placement.topics import TopicRefusal, parse_filter
from tools.cli.output import DEFAULT_TARGET, AsJson, Target, console, guarded, print_json, shown_time, visible
from tools.cli.status import ask_gateway

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
    said = asyncio.run(ask_gateway(target, "/retained", {"filter": name, "limit": str(limit), "after": after}, "retained"))
    if as_json:
        print_json(said)
        return
    table = Table(box=None)
    for column in ("topic", "bytes", "QoS", "published", "expires"):
        table.add_column(column)
    for each in said["retained"]:
        expires = shown_time(each["expires_at_ms"]) if each["expires_at_ms"] else ""
        table.add_row(visible(each["topic"]), str(each["bytes"]), str(each["qos"]), shown_time(each["published_ms"]), expires)
    console().print(table)
    if said["next"]:
        console().print(f"there may be more: --after {visible(said['next'])}")
