"""The login of a client: a fixed token, or one obtained for each connection.

Source: docs/security.md, "Logging in".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Final

from pixiu.errors import InvalidArgument, NotAuthenticated

TOKEN_VARIABLE: Final = "PIXIU_TOKEN"  # noqa: S105 (the name of a variable)
"""The environment variable with the token, for programs that give none."""
MAX_TOKEN_BYTES: Final = 8192
REFUSED_LOGIN: Final = "UNAUTHENTICATED: "
"""Prefix of the reason of a call that was refused for its login."""

Token = str | Callable[[], str]
"""A token, or a function that returns the current one: it is called for each connection and must be quick."""


def authorization(token: Token | None) -> Callable[[], str]:
    """Make a function that returns a call's login; empty without a token. Raises `InvalidArgument` for something that is no
    token."""
    if token is None:
        token = os.environ.get(TOKEN_VARIABLE, "")
    if isinstance(token, str):
        said = _checked(token)
        return lambda: said
    give = token
    return lambda: _checked(give())


def _checked(token: str) -> str:
    if isinstance(token, str):
        token = token.strip("\ufeff \r\n")  # of a file written by an editor
    if not isinstance(token, str) or len(token) > MAX_TOKEN_BYTES or not (token.isascii() and (token.isprintable() or not token)):
        raise InvalidArgument(f"a token is a text of at most {MAX_TOKEN_BYTES} ASCII characters")
    return f"Bearer {token}" if token else ""


def refused_login(reason: str) -> str:
    """The reason why a login was refused, out of the reason why a call failed; empty if it failed for another one."""
    return reason.removeprefix(REFUSED_LOGIN) if reason.startswith(REFUSED_LOGIN) else ""


def raise_for_login(reasons: Iterable[str]) -> None:
    """Raise `NotAuthenticated` when one of the reasons why calls failed is the login: trying again is useless."""
    for reason in reasons:
        if reason.startswith(REFUSED_LOGIN):
            raise NotAuthenticated(reason.removeprefix(REFUSED_LOGIN))
