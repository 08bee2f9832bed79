"""Values that the pages show: those that `--json` of the commands prints, a page at a time.

Source: docs/console.md, "Requests".
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from ops.bridges.commands import bridges_of
from ops.console.cluster import Cluster
from ops.console.inputs import MAX_FILTER, Inputs
from ops.console.series import series_json
from ops.doubling.double_command import planned
from pixiu.client.stores.pages import LANES
from pixiu.discovery.node import Node
from pixiu.discovery.topics import MAX_NUMBER
from pixiu.errors import InvalidArgument, Unavailable
from pixiu.placement.topics import TopicRefusal, parse_filter
from pixiu.wire.filters import parse
from tools.cli.http import fetch
from tools.cli.inbox_tables import dead_letter_json, lane_json, unread_json
from tools.cli.rates import hottest
from tools.cli.sessions import Sort, ask_sessions
from tools.cli.status import ask_one_of, status_json
from tools.cli.top import HOT
from tools.probe.availability_command import read_availability
from tools.topics import tables
from tools.topics.channels import dead_json, dead_letters
from tools.topics.data import start_of, stored
from tools.topics.moves import plan_json

PAGE: Final = 50
MAX_PAGE: Final = 200
MAX_SESSIONS: Final = 1_000
"""Clients that a gateway shows; those that follow are found by searching."""
MAX_HOT: Final = 20
PEEK_S: Final = 10.0
"""Time for which a peek looks for messages that its filter selects, seconds."""
NO_GATEWAY: Final = "no gateway is running: `pixiu status` shows what is"
NO_PROCESS: Final = "no process of the cluster is running: `pixiu status` shows what is"
GUARDED: Final = (
    "access_logins", "access_refused", "access_denied", "access_expired", "access_kicked", "access_revoked", "links_refused",
)  # fmt: skip
"""Counters of logins and refusals, without `_total`."""

Read = Callable[[Cluster, Inputs], Awaitable[Mapping[str, Any]]]


async def map_(cluster: Cluster, _: Inputs) -> Mapping[str, Any]:
    """The state of every process, as `pixiu status --json`."""
    return status_json(await cluster.status.get(), time.time_ns() // 1_000_000)


async def series(cluster: Cluster, inputs: Inputs) -> Mapping[str, Any]:
    """The moments of the last hour after one, Unix ms."""
    return series_json(cluster.series.since(inputs.number("since", 0)))


async def clients(cluster: Cluster, inputs: Inputs) -> Mapping[str, Any]:
    """Clients of all gateways, as `pixiu sessions --json`."""
    offset, limit = inputs.number("offset", 0, 0, MAX_SESSIONS), inputs.number("limit", PAGE, 1, MAX_PAGE)
    if offset + limit > MAX_SESSIONS:
        raise InvalidArgument(f"the first {MAX_SESSIONS} clients are shown; search for others")
    query = {name: inputs.text(name, "") for name in ("client", "user", "address")}
    query |= {"sort": inputs.one_of("sort", tuple(Sort)), "limit": str(offset + limit)}
    if not (gateways := cluster.view.running("gateway")):
        raise Unavailable(NO_GATEWAY)
    found = await ask_sessions(gateways, query)
    return {**found, "sessions": found["sessions"][offset:], "offset": offset}


async def rooms(cluster: Cluster, _: Inputs) -> Mapping[str, Any]:
    """The hottest rooms and users, as `pixiu top`."""
    nodes = {what: cluster.view.running(role) for what, role in HOT.items()}
    if not any(nodes.values()):
        raise Unavailable(NO_PROCESS)
    pages = {what: await asyncio.gather(*(_page(node, "/hot") for node in found)) for what, found in nodes.items()}
    return {what: [{"key": key, "per_s": rate} for key, rate in hottest(pages[what], what, MAX_HOT)] for what in HOT}


async def retained(cluster: Cluster, inputs: Inputs) -> Mapping[str, Any]:
    """Retained messages without what they say, as `pixiu retained --json`."""
    name = inputs.text("filter", "#") or "#"
    if isinstance(parse_filter(name), TopicRefusal):
        raise InvalidArgument(f"{name!r} is no topic, and no filter of topics")
    query = {"filter": name, "limit": str(inputs.number("limit", PAGE, 1, MAX_PAGE)), "after": inputs.text("after", "")}
    return await ask_one_of(cluster.view.running("gateway"), "/retained", query, "retained")


async def inbox(cluster: Cluster, inputs: Inputs) -> Mapping[str, Any]:
    """Lanes and devices of a user, as `pixiu inbox devices --json`."""
    uin = inputs.number("uin", least=1)
    async with cluster.inboxes.use() as view:
        return {"uin": uin, "lanes": [unread_json(each) for each in await view.unread(uin, LANES)]}


async def inbox_entries(cluster: Cluster, inputs: Inputs) -> Mapping[str, Any]:
    """Entries of a user's inbox with their messages, the newest first, as `pixiu inbox list --json`."""
    uin, lane = inputs.number("uin", least=1), inputs.number("lane", 1, 0, 1)
    before = inputs.number("before", 0)
    async with cluster.inboxes.use() as view:
        found = await view.page(uin, (lane,), before=before or view.NEWEST, count=PAGE)
        return {"uin": uin, "lanes": [lane_json(each) for each in found]}


async def inbox_dead(cluster: Cluster, inputs: Inputs) -> Mapping[str, Any]:
    """Dead letters of a user, as `pixiu inbox dead --json`."""
    uin = inputs.number("uin", least=1)
    async with cluster.inboxes.use() as view:
        return {"uin": uin, "dead_letters": [dead_letter_json(each) for each in await view.dead_letters(uin, count=PAGE)]}


async def topics(cluster: Cluster, inputs: Inputs) -> Mapping[str, Any]:
    """Topics by name, a page at a time, without their parts."""
    prefix, after = inputs.text("prefix", ""), inputs.text("after", "")
    limit, deleted = inputs.number("limit", PAGE, 1, MAX_PAGE), inputs.flag("deleted")
    async with cluster.topics.use() as opened:
        reply = await opened.page(prefix, after, deleted=deleted, limit=limit)
    shown = [_topic_row(tables.topic_json(each)) for each in reply.topics]
    return {"topics": shown, "next": shown[-1]["name"] if reply.more else ""}


def _topic_row(topic: dict[str, Any]) -> dict[str, Any]:
    """A topic without what only its own page shows."""
    states = [part["state"] for part in topic.pop("parts")]
    topic.pop("groups")
    names = [channel["name"] for channel in topic.pop("channels")]
    return {**topic, "open": sum(state != "sealed" for state in states), "sealed": states.count("sealed"), "channels": names}


async def topic(cluster: Cluster, inputs: Inputs) -> Mapping[str, Any]:
    """A topic with its parts, channels and lags, as `pixiu topic show --json`."""
    async with cluster.topics.use() as opened:
        return tables.shown_json(await opened.show(inputs.text("name")))


async def topic_messages(cluster: Cluster, inputs: Inputs) -> Mapping[str, Any]:
    """Messages of a topic from a place on that a filter selects, as `pixiu topic read --json`."""
    name, start, count = inputs.text("name"), inputs.text("from", "start") or "start", inputs.number("count", PAGE, 1, MAX_PAGE)
    part, text = inputs.number("part", 0, 0, MAX_NUMBER), inputs.text("filter", "", MAX_FILTER)
    parts, filter_ = [part] if part else None, parse(text) if text else None
    where, found, late = start_of(start, parts), list[dict[str, Any]](), False
    async with cluster.topics.use() as opened:
        try:
            async with asyncio.timeout(PEEK_S):
                async for line in stored(opened, name, where, parts, filter_):
                    found.append(line.json())
                    if len(found) == count:
                        break
        except TimeoutError:
            late = True
    return {"topic": name, "messages": found, "late": late}


async def topic_dead(cluster: Cluster, inputs: Inputs) -> Mapping[str, Any]:
    """Dead letters of a channel without what they say, as `pixiu topic dead --json`."""
    name, channel, after = inputs.text("name"), inputs.text("channel"), inputs.number("after", 0)
    async with cluster.topics.use() as opened:
        found = await dead_letters(opened, name, channel, None, PAGE, after)
    return {"topic": name, "channel": channel, "dead": [dead_json(each) for each in found]}


async def paths(cluster: Cluster, _: Inputs) -> Mapping[str, Any]:
    """The share of probes that arrived, by path and in total, as `pixiu availability --json`."""
    return await read_availability(cluster.view)


async def growth(cluster: Cluster, _: Inputs) -> Mapping[str, Any]:
    """The layout and the doublings under way."""
    said = status_json(await cluster.status.get(), 0)
    return {"layout": said["layout"], "doublings": said["doublings"]}


async def growth_plan(cluster: Cluster, inputs: Inputs) -> Mapping[str, Any]:
    """The plan of a doubling with its forecast, as `pixiu double ROLE --dry-run --json`."""
    return await planned(cluster.target, inputs.text("role", most=16))


async def moves_plan(cluster: Cluster, _: Inputs) -> Mapping[str, Any]:
    """The moves of parts that would even the groups out, as `pixiu topic rebalance --dry-run --json`."""
    async with cluster.topics.use() as opened:
        return plan_json(await opened.plan())


async def bridges(cluster: Cluster, _: Inputs) -> Mapping[str, Any]:
    """Bridges of all processes, as `pixiu bridge status --json`."""
    found = await bridges_of(cluster.target)
    return {"bridges": list(found.found.values()), "silent": found.silent, "warnings": found.warnings}


async def security(cluster: Cluster, _: Inputs) -> Mapping[str, Any]:
    """Listeners that are not guarded, and what was refused since each process began."""
    status = await cluster.status.get()
    shown = []
    for process in status.processes:
        reading = cluster.readings.get(int(process.node.endpoint))
        counts = {} if reading is None or reading.counts is None else reading.counts
        numbers = {name: int(counts[f"{name}_total"]) for name in GUARDED if f"{name}_total" in counts}
        shown.append(
            {"name": process.name, "address": process.node.address, "client_address": process.node.client_address, **numbers}
        )
    return {"insecure": status.insecure, "processes": shown}


async def _page(node: Node, path: str) -> dict[str, Any]:
    """A page of a process; empty if it does not answer."""
    try:
        status, body = await fetch(node.host, node.http_port, path)
        found = json.loads(body) if status == 200 else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


OPEN: Final[Mapping[str, Read]] = {
    "map": map_, "series": series, "clients": clients, "rooms": rooms, "retained": retained, "inbox": inbox, "topics": topics,
    "topic": topic, "topic/dead": topic_dead, "paths": paths, "growth": growth, "growth/plan": growth_plan,
    "growth/moves": moves_plan, "bridges": bridges, "security": security,
}  # fmt: skip
"""Path below /api/ → what answers it, for whoever may look."""
CONTENTS: Final[Mapping[str, Read]] = {
    "inbox/entries": inbox_entries, "inbox/dead": inbox_dead, "topic/messages": topic_messages,
}  # fmt: skip
"""The same for what messages say, which is for operators."""
