"""Sessions of the whole cluster, as operators see and remove them, over the production state of Pi."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cluster.wire.v1 import kept_pb2
from gateway.sessions import operating
from gateway.sessions.operating import away, forget
from gateway.sessions.queue import SessionState
from gateway.sessions.states import SessionFilter, SessionNote
from pixiu.errors import PixiuError, Unavailable
from pixiu.ids import session_uin, uin_of_name
from pixiu.wire.inbox_operations import CLEAR, Clears, Note
from tests.pi.memory import Replica
from tests.support.pi import appends, message


class Cluster:
    """Pi, and the routers' entries."""

    def __init__(self) -> None:
        self.pi = Replica()
        self.entries: list[kept_pb2.KeptEntry] = []
        self.broken: PixiuError | None = None
        self.unreadable = 0

    def add(
        self, client: str, uin: int, *, connected: bool = False, ended_s: int = 10, expiry_s: int = 3600, mails: int = 0
    ) -> int:
        """A session whose connection ended so long ago, or was renewed."""
        number, at_ms = session_uin(uin, client), time.time_ns() // 1_000_000 - ended_s * 1000
        note = SessionNote(client, uin, expiry_s, connected, at_ms, [SessionFilter("a/#", 1)])
        self.pi.apply(Note(number, 0, 1, note.encode()))
        self.pi.apply(appends(1, *((message(each), number) for each in range(1, mails + 1))))
        self.entries += [kept_pb2.KeptEntry(room=room, session=number, filter="a/#") for room in (1, 2)]
        return number

    async def listed(self) -> AsyncIterator[list[kept_pb2.KeptEntry]]:
        if self.broken is not None:
            raise self.broken
        for entry in self.entries:
            yield [entry]

    async def read(self, uin: int) -> SessionState:
        if uin == self.unreadable:
            raise Unavailable("not now")
        notes, generation = self.pi.state.notes.of(uin)
        found = [self.pi.state.peek(uin, lane, 0, 0) for lane in range(4)]
        held = {note.name: (note.generation, note.value) for note in notes}
        waiting, dropped = sum(each.unread for each in found), sum(each.dropped for each in found)
        return SessionState(held, generation, (), waiting, dropped, 0 in held)

    async def forget(self, uin: int, client_id: str) -> bool:
        number = session_uin(uin, client_id)
        state = await self.read(number)
        if state.exists:
            self.pi.apply(Clears(CLEAR.pack(number, state.generation + 1)))
        return state.exists

    async def away(self, **query: str) -> list[str]:
        said = await away(self, self, query)
        assert isinstance(said["sessions"], list)
        return [each["client"] for each in said["sessions"]]


async def test_sessions_without_a_connection_are_shown_and_those_with_the_most_come_first() -> None:
    cluster = Cluster()
    cluster.add("idle", 7)
    number = cluster.add("busy", 8, mails=3)
    cluster.add("connected", 9, connected=True)
    cluster.add("lost", 10, connected=True, ended_s=3000, expiry_s=3600, mails=1)  # its gateway died, and nobody renewed it
    cluster.add("over", 11, ended_s=4000)
    assert await cluster.away() == ["busy", "lost", "idle"]
    assert await cluster.away(client="us") == ["busy"]
    assert await cluster.away(limit="1") == ["busy"]
    said: Any = await away(cluster, cluster, {"client": "busy"})
    (shown,) = said["sessions"]
    assert (shown["user"], shown["inbox"], shown["filters"], shown["waiting"], shown["lost"]) == (8, number, 1, 3, 0)
    assert shown["expires_at_ms"] > time.time_ns() // 1_000_000


async def test_what_cannot_be_read_is_said_and_the_rest_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster()
    cluster.unreadable = cluster.add("unreadable", 7)
    cluster.add("fine", 8)
    garbage = session_uin(9, "garbage")
    cluster.pi.apply(Note(garbage, 0, 1, b"\xff"))
    cluster.entries.append(kept_pb2.KeptEntry(session=garbage))
    said: Any = await away(cluster, cluster, {})
    assert said["matching"] == 1
    assert len(said["problems"]) == 2
    monkeypatch.setattr(operating, "MAX_SESSIONS", 2)
    said = await away(cluster, cluster, {})
    assert operating.TOO_MANY in said["problems"]
    cluster.broken = Unavailable("no router")
    assert await away(cluster, cluster, {}) == {"error": "no router"}


async def test_the_sessions_of_a_client_id_are_removed_of_one_user_or_of_all() -> None:
    cluster = Cluster()
    plain = uin_of_name("meter")
    for uin in (plain, 7, 8):
        cluster.add("meter", uin, mails=2, connected=uin == 7)
    cluster.add("other", 7)
    assert await forget(cluster, cluster, cluster, "meter", "8") == (1, "")
    assert await forget(cluster, cluster, cluster, "meter", "8") == (0, "")
    assert await forget(cluster, cluster, cluster, "meter") == (2, "")
    for uin in (plain, 7, 8):
        assert not (await cluster.read(session_uin(uin, "meter"))).waiting
    assert await cluster.away() == ["other"]


async def test_a_session_is_removed_whose_filters_no_router_lists() -> None:
    cluster = Cluster()
    cluster.add("meter", uin_of_name("meter"))
    cluster.broken = Unavailable("no router")
    assert await forget(cluster, cluster, cluster, "meter") == (1, "no router")
