"""The page /retained of a gateway: retained messages that match a filter, without what they say.

Source: docs/operations.md, "Retained messages".
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from cluster.mqtt.properties_in_records import qos_of
from gateway.retained.client import Listed
from pixiu.errors import PixiuError
from pixiu.ids import snowflake_time_ms
from pixiu.placement.topics import TopicRefusal, parse_filter
from pixiu.wire.record import KEY_AT, SNOWFLAKE_AT

MAX_SHOWN: Final = 1000


async def retained(
    listing: Callable[[str, int, str], Awaitable[tuple[list[Listed], str]]], query: Mapping[str, str]
) -> dict[str, object]:  # fmt: skip
    """The JSON of /retained. `query`: `filter`; `limit`; `after`, the topic above which to begin."""
    name, after = query.get("filter", "#"), query.get("after", "")
    limit = int(query["limit"]) if query.get("limit", "").isdecimal() else MAX_SHOWN
    if isinstance(parse_filter(name), TopicRefusal):
        return {"error": "no topic, and no filter of topics"}
    try:
        found, end = await listing(name, max(min(limit, MAX_SHOWN), 1), after)
    except PixiuError as error:
        return {"error": str(error)}
    return {"retained": [_shown(each) for each in found], "next": end}


def _shown(listed: Listed) -> dict[str, object]:
    published = snowflake_time_ms(int.from_bytes(listed.record[SNOWFLAKE_AT:KEY_AT], "little"))
    return {
        "topic": listed.topic, "bytes": len(listed.record), "qos": qos_of(listed.record), "published_ms": published,
        "expires_at_ms": listed.expires_at_ms,
    }  # fmt: skip
