"""Queries of presence are paid for, one login has a share of the slots, and each user is asked for once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pixiu.wire.v1 import wire_pb2
from proxy import presence
from proxy.presence import MAX_OF_LOGIN, PresenceService


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
    service = PresenceService(lambda: view)
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
