"""The page /sessions of a gateway: its clients, those with the most work first, or those of a client ID, user or address.
And what waits for all of them together, for metrics.

Source: docs/operations.md, "Clients of gateways".
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from gateway.clients.clients import ClientSession

MAX_SHOWN: Final = 1000
SLICE: Final = 1000
"""Clients that are looked at in one turn of the event loop."""
LOAD_S: Final = 15.0
"""Interval at which `Load` looks at all clients, seconds."""
SORTS: Final = ("backlog", "inflight", "dropped")


async def sessions(connections: Callable[[], Sequence[ClientSession]], query: Mapping[str, str]) -> dict[str, object]:
    """The JSON of /sessions. `query`: `client`, a part of the client IDs to show; `user`, a UIN; `address`, the beginning of
    addresses; `sort`, of `SORTS`; `limit`."""
    client, user, address = query.get("client", ""), query.get("user", ""), query.get("address", "")
    sort = query.get("sort", SORTS[0])
    limit = int(query["limit"]) if query.get("limit", "").isdecimal() else MAX_SHOWN
    limit, sort = min(limit, MAX_SHOWN), sort if sort in SORTS else SORTS[0]
    everybody = connections()
    found: list[dict[str, Any]] = []
    matching = 0
    for start in range(0, len(everybody), SLICE):
        part = [
            shown
            for session in everybody[start : start + SLICE]
            if client in (shown := session.shown())["client"]
            and (not user or user == str(shown["user"]))
            and (not address or shown["address"].startswith(address))
        ]
        matching += len(part)
        found = heapq.nlargest(limit, [*found, *part], key=lambda shown: (shown[sort], -shown["id"]))
        await asyncio.sleep(0)
    return {"connections": len(everybody), "matching": matching, "sessions": found}


class Load:
    """Sums over all clients, as of the last look."""

    def __init__(self) -> None:
        self._found: dict[str, object] = {}

    async def look(self, everybody: Sequence[ClientSession]) -> None:
        """Look at all clients, a slice in a turn."""
        waiting = inflight = behind = unacknowledged = 0
        for start in range(0, len(everybody), SLICE):
            for session in everybody[start : start + SLICE]:
                shown = session.shown()
                waiting += shown["backlog"]
                inflight += shown["inflight"]
                behind += shown["backlog"] > 0
                unacknowledged += shown["inflight"] > 0
            await asyncio.sleep(0)
        self._found = {
            "clients_backlog_bytes": waiting, "clients_inflight": inflight, "clients_with_backlog": behind,
            "clients_with_inflight": unacknowledged,
        }  # fmt: skip

    def samples(self) -> dict[str, object]:
        """Samples for metrics; none before the first look."""
        return self._found
