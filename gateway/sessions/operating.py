"""Sessions that outlive their connections, of the whole cluster, for operators: those without a connection, and how one is removed.

    routers: kept filters ─▶ sessions ─▶ Pi: whose they are, what waits for them

A session all of whose filters have QoS 0 keeps nothing, and is not listed.

Source: docs/operations.md, "Clients of gateways".
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final, NamedTuple, Protocol

from cluster.wire.v1 import kept_pb2
from gateway.sessions.queue import SessionState
from gateway.sessions.session import is_over, renewal_s
from gateway.sessions.states import NoteName, SessionNote
from pixiu.errors import MalformedData, PixiuError
from pixiu.ids import uin_of_name

MAX_SESSIONS: Final = 200_000
"""Limit of sessions that one request looks at. Policy: others are left out, and the answer says so."""
MAX_SHOWN: Final = 1000
READS: Final = 500
"""Sessions that are read at a time."""
TOO_MANY: Final = f"the routers keep filters of more than {MAX_SESSIONS:,} sessions; the others were left out"
LATE: Final = 2
"""Renewals of a connected session that are left out before it counts as away: its gateway died."""


class KeptEntries(Protocol):
    """Lists kept filters; see `cluster.routers.kept_client.KeptClient`."""

    def listed(self) -> AsyncIterator[list[kept_pb2.KeptEntry]]:
        """Yield entries in slices. Raises `Unavailable`."""


class Reads(Protocol):
    """Reads sessions; see `gateway.sessions.store.SessionStore`."""

    async def read(self, uin: int) -> SessionState:
        """Read a session's state. Raises `PixiuError`."""


class Forgets(Protocol):
    """Removes sessions; see `gateway.sessions.service.Sessions`."""

    async def forget(self, uin: int, client_id: str) -> bool:
        """Remove a session. Returns False if there is none. Raises `PixiuError`."""


class Known(NamedTuple):
    """A session that Pi has."""

    number: int
    note: SessionNote
    state: SessionState


async def known(kept: KeptEntries, store: Reads, problems: list[str]) -> AsyncIterator[list[Known]]:
    """Yield the sessions that keep filters, some at a time. What was left out is added to `problems`. Raises `PixiuError`."""
    numbers: dict[int, None] = {}
    async for entries in kept.listed():
        numbers.update({entry.session: None for entry in entries if not entry.removed})
        if len(numbers) > MAX_SESSIONS:
            problems.append(TOO_MANY)
            break
    wanted = list(numbers)[:MAX_SESSIONS]
    for start in range(0, len(wanted), READS):
        part = wanted[start : start + READS]
        states = await asyncio.gather(*(store.read(number) for number in part), return_exceptions=True)
        found: list[Known] = []
        for number, state in zip(part, states, strict=True):
            if isinstance(state, SessionState):
                value = state.notes.get(NoteName.SESSION, (0, b""))[1]
                try:
                    found += [Known(number, SessionNote.decode(value), state)] if value else []
                except MalformedData as error:
                    problems.append(f"session {number:016x}: {error}")
            elif isinstance(state, PixiuError):
                problems.append(f"session {number:016x}: {state}")
            else:
                raise state
        yield found


async def forget(sessions: Forgets, kept: KeptEntries, store: Reads, client: str, user: str = "") -> tuple[int, str]:
    """Remove the sessions of a client ID, of one user or of all who have one. Returns their number, and what went wrong.

    user: a name or a UIN; empty: any.
    """
    uin, problems, count = uin_of_name(user or client), list[str](), 0
    try:
        count += await sessions.forget(uin, client)  # at once, and also if it keeps no filter
        async for part in known(kept, store, problems):
            for _, note, _ in part:
                if note.client_id == client and (not user or note.uin == uin):
                    count += await sessions.forget(note.uin, client)
    except PixiuError as error:
        problems.append(str(error))
    return count, "; ".join(problems[:3])


async def away(kept: KeptEntries, store: Reads, query: Mapping[str, str]) -> dict[str, object]:
    """The JSON of /sessions?away=1: sessions without a connection, those with the most messages first. `query`: `client`, a part
    of the client IDs to show; `limit`."""
    wanted, limit = query.get("client", ""), query.get("limit", "")
    most = min(int(limit), MAX_SHOWN) if limit.isdecimal() else MAX_SHOWN
    now_ms, problems, shown = time.time_ns() // 1_000_000, list[str](), list[dict[str, Any]]()
    matching = 0
    try:
        async for part in known(kept, store, problems):
            found = [_shown(each) for each in part if wanted in each.note.client_id and _is_away(each.note, now_ms)]
            matching += len(found)
            shown = sorted([*shown, *found], key=lambda each: (-each["waiting"], each["client"]))[:most]
    except PixiuError as error:
        return {"error": str(error)}
    return {"matching": matching, "sessions": shown, "problems": problems[:3]}


def _is_away(note: SessionNote, now_ms: int) -> bool:
    late = note.connected and now_ms >= note.ended_at_ms + LATE * renewal_s(note.expiry_s) * 1000
    return (late or not note.connected) and not is_over(note, now_ms)


def _shown(each: Known) -> dict[str, Any]:
    note, state = each.note, each.state
    return {
        "client": note.client_id, "user": note.uin, "inbox": each.number, "filters": len(note.filters), "waiting": state.waiting,
        "lost": state.dropped, "expires_at_ms": note.ended_at_ms + note.expiry_s * 1000,
    }  # fmt: skip
