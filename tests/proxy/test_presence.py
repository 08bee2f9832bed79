"""Queries of presence are paid for, one login has a share of the slots, and each user is asked for once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cluster.core.turn import Turn
from pixiu.wire.v1 import wire_pb2
from proxy import presence
from proxy.presence import CHECKED_AT_ONCE, MAX_OF_LOGIN, QUERY_BYTES, PresenceService


class Login:
    """A session that notes what it pays."""

    asks = False

    def __init__(self, user: str) -> None:
        self.identity = SimpleNamespace(user=user)
        self.spent, self.open = 0, True

    def spend(self, messages: int, size: int) -> float:
        self.spent += messages
        return 0.0

    def require(self, _action: str, _target: object) -> None: ...

    def close(self) -> None:
        self.open = False


class Call:
    """A call that is refused with a text."""

    async def abort(self, _code: object, text: str) -> None:
        raise PermissionError(text)


async def test_a_login_pays_for_each_user_once_and_has_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    logins, go, asked = list[Login](), asyncio.Event(), list[list[int]]()

    async def enter(*_: Any) -> Login:
        logins.append(Login("eve" if len(logins) <= MAX_OF_LOGIN else "bob"))
        return logins[-1]

    async def answer(uins: list[int]) -> dict[int, int]:
        asked.append(uins)
        await go.wait()
        return dict.fromkeys(uins, 1)

    monkeypatch.setattr(presence, "enter", enter)
    view: Any = None
    service = PresenceService(lambda: view, Turn(time.monotonic, asyncio.get_running_loop().call_soon))
    monkeypatch.setattr(service, "_answer", answer)
    call: Any = Call()
    query = wire_pb2.PresenceRequest(uins=[7] * 1000)
    waiting = [asyncio.create_task(service.Query(query, call)) for _ in range(MAX_OF_LOGIN)]
    await asyncio.sleep(0)
    with pytest.raises(PermissionError, match="queries under way"):
        await service.Query(query, call)
    waiting.append(asyncio.create_task(service.Query(query, call)))
    go.set()
    replies = await asyncio.gather(*waiting)
    assert [len(reply.users) for reply in replies] == [1000] * (MAX_OF_LOGIN + 1)
    assert asked == [[7]] * (MAX_OF_LOGIN + 1)
    assert [login.spent for login in logins] == [*[1] * MAX_OF_LOGIN, 0, 1]
    assert not any(login.open for login in logins)
    assert not service._of_login
    with pytest.raises(PermissionError, match="at most"):
        await service.Query(wire_pb2.PresenceRequest(uins=range(1001)), call)


async def test_a_query_of_many_users_is_checked_in_pieces_of_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queries of a login that were held are let go together: their checks were one turn of 133 ms."""
    pieces: list[int] = []

    async def run(work: Callable[[], Any], size: int) -> Any:
        pieces.append(size)
        return work()

    async def enter(*_: Any) -> Login:
        return Login("eve")

    async def answer(uins: list[int]) -> dict[int, int]:
        return dict.fromkeys(uins, 1)

    monkeypatch.setattr(presence, "enter", enter)
    turn, view, call = cast("Turn", SimpleNamespace(run=run)), cast("Any", None), cast("Any", Call())
    service = PresenceService(lambda: view, turn)
    monkeypatch.setattr(service, "_answer", answer)
    reply = await service.Query(wire_pb2.PresenceRequest(uins=range(1000)), call)
    assert len(reply.users) == 1000
    assert pieces == [QUERY_BYTES * CHECKED_AT_ONCE] * (1000 // CHECKED_AT_ONCE)
