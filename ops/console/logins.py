"""Logins of the console: a cookie for a browser that has shown a token, and the right to change something.

    token ──▶ the secret of this run, or the cluster's access file ──▶ session ──▶ cookie, HttpOnly and SameSite=Strict

Source: docs/console.md, "Who may do what".
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from cluster.access.login_guard import LoginGuard
from cluster.trust.identity import Credentials
from pixiu.errors import NotAllowed, NotAuthenticated

SESSION_S: Final = 12 * 3600.0
MAX_SESSIONS: Final = 1_000
"""Sessions at one time. Policy: the oldest ends."""
MAX_TOKEN: Final = 8_192
"""Characters of a token or secret."""
SECRET_BYTES: Final = 32
CLIENT: Final = "pixiu-console"


@dataclass(frozen=True, slots=True)
class Session:
    """A browser that has logged in."""

    user: str
    may_change: bool
    until_s: float
    """Unix seconds."""


ANYBODY: Final = Session("", False, float("inf"))
"""Session of everybody at a console without logins: it shows, and changes nothing."""


class Logins:
    """The sessions of a console.

    Args:
        secret: the token of whoever started the console, who may change everything; empty: there is none.
        guard: checks the tokens of the cluster's users; None: there are none.
        group: users in this group may change something.
        viewers: users in this group may look. Others have no login: a page shows the inbox of every user.
    """

    def __init__(
        self,
        secret: str,
        guard: LoginGuard | None,
        group: str,
        viewers: str,
        *,
        operator: str,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._secret, self._guard, self._operator, self._wall_s = secret, guard, operator, wall_s
        self._group, self._viewers = group, viewers
        self._sessions: dict[str, Session] = {}

    @property
    def required(self) -> bool:
        """True if a login is needed to see anything."""
        return bool(self._secret) or self._guard is not None

    async def log_in(self, token: str, address: str) -> tuple[str, Session]:
        """Begin a session. Returns its cookie. Raises `NotAuthenticated`, `NotAllowed`, `Overloaded`."""
        if not token or len(token) > MAX_TOKEN:
            raise NotAuthenticated(f"a token has 1 to {MAX_TOKEN} characters")
        now = self._wall_s()
        if self._secret and hmac.compare_digest(token.encode(), self._secret.encode()):
            session = Session(self._operator, True, now + SESSION_S)
        elif self._guard is not None:
            identity = await self._guard.check(Credentials("", token, CLIENT, address))
            may_change = self._group in identity.groups
            if not may_change and self._viewers not in identity.groups:
                raise NotAllowed(f"the console is for users in the groups {self._viewers} and {self._group} of the access file")
            session = Session(identity.user, may_change, min(now + SESSION_S, identity.expires_at))
        else:
            raise NotAuthenticated("this is not the token that `pixiu console` printed")
        cookie = secrets.token_urlsafe(SECRET_BYTES)
        while len(self._sessions) >= MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        self._sessions[cookie] = session
        return cookie, session

    def session(self, cookie: str) -> Session | None:
        """The session of a cookie; None: there is none, or it has ended."""
        if not self.required:
            return ANYBODY
        found = self._sessions.get(cookie)
        if found is not None and found.until_s <= self._wall_s():
            del self._sessions[cookie]
            return None
        return found

    def log_out(self, cookie: str) -> None:
        """End a session."""
        self._sessions.pop(cookie, None)
