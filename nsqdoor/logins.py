"""Clients of the cluster on behalf of NSQ's clients: one for each login, kept while it is used.

    AUTH secret ──▶ token of the cluster ──▶ pixiu.Client ──▶ proxies and leaders, which check rules, rates and quotas

Without AUTH all share the listener's own client, with the login of `PIXIU_TOKEN`.

Source: docs/nsq.md, "Logins".
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from typing import Final

import pixiu
from nsqdoor.topics import Topics
from pixiu.errors import NotAllowed, NotAuthenticated, Overloaded, PixiuError

CHECK: Final = "nsq-login-check"
"""Prefix of topics that is listed to see if a login is taken."""
CLOSE_S: Final = 5.0


class Login:
    """A login and its client."""

    def __init__(self, key: bytes, token: str | None) -> None:
        self.key, self.token = key, token
        self.users = 0
        """Connections and requests that use it."""
        self.topics: Topics
        self.opening: asyncio.Task[None] | None = None
        self.client: pixiu.Client | None = None

    @property
    def px(self) -> pixiu.Client:
        """The client, while the login is used."""
        assert self.client is not None
        return self.client


class Logins:
    """The clients; see the module.

    Args:
        target: the cluster.
        most: clients at one time. Policy: those that nobody uses make way, others are refused.
    """

    def __init__(self, target: str, most: int) -> None:
        self._target, self._most = target, most
        self._logins: dict[bytes, Login] = {}

    def __len__(self) -> int:
        return len(self._logins)

    async def use(self, token: str | None) -> Login:
        """Use the client of a token, or the listener's own (None), until `leave`. Raises `NotAuthenticated`, `Overloaded` and
        what connecting raises."""
        # Tokens are not kept as keys: whoever sees this process's memory by an error's text sees no login.
        key = hashlib.sha256(token.encode()).digest() if token is not None else b""
        found = self._logins.get(key)
        if found is None:
            await self._make_way()
            found = self._logins[key] = Login(key, token)
        found.users += 1
        try:
            if found.opening is None:
                found.opening = asyncio.get_running_loop().create_task(self._open(found), name="nsq-login")
            await asyncio.shield(found.opening)
        except BaseException:
            self.leave(found)
            if found.opening is not None and found.opening.done():
                self._logins.pop(key, None)
            raise
        return found

    def leave(self, login: Login) -> None:
        """Stop using a client. It stays for the next one, until another login needs its place."""
        login.users -= 1

    async def close(self) -> None:
        """Close all clients."""
        logins, self._logins = list(self._logins.values()), {}
        await asyncio.gather(*map(_close, logins), return_exceptions=True)

    async def _make_way(self) -> None:
        if len(self._logins) < self._most:
            return
        idle = next((login for login in self._logins.values() if not login.users and login.key), None)
        if idle is None:
            raise Overloaded(f"{self._most} logins use this listener (max_logins)", 5_000)
        del self._logins[idle.key]
        await _close(idle)

    async def _open(self, login: Login) -> None:
        client = pixiu.connect(self._target, client="nsq", token=login.token, on_failure=lambda _failure: None)
        await client.open()
        try:
            if login.token is not None:
                with contextlib.suppress(NotAllowed):
                    await client.topics.list(CHECK)
        except NotAuthenticated:
            await client.close()
            raise
        login.client, login.topics = client, Topics(client)


async def _close(login: Login) -> None:
    if login.opening is not None:
        login.opening.cancel()
        await asyncio.gather(login.opening, return_exceptions=True)
    client, login.client = login.client, None
    if client is not None:
        with contextlib.suppress(PixiuError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await client.close()
