"""How a client says who it is: a token, given or made anew for each connection.

Source: docs/security.md, "Logging in".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Final

from pixiu.errors import InvalidArgument, NotAuthenticated

TOKEN_VARIABLE: Final = "PIXIU_TOKEN"  # noqa: S105 (the name of a variable)
"""The environment's variable with the token of a program that gives none."""
MAX_TOKEN_BYTES: Final = 8192
REFUSED_LOGIN: Final = "UNAUTHENTICATED: "
"""How the reason of a call begins that was refused for its login."""

Token = str | Callable[[], str]
"""A token, or what gives the one of now: called for each connection, must be quick."""


def authorization(token: Token | None) -> Callable[[], str]:
    """Makes what a call says of who calls; nothing without a token. Raises `InvalidArgument` for what is no token."""
    if token is None:
        token = os.environ.get(TOKEN_VARIABLE, "")
    if isinstance(token, str):
        said = _checked(token)
        return lambda: said
    give = token
    return lambda: _checked(give())


def _checked(token: str) -> str:
    if isinstance(token, str):
        token = token.strip("\ufeff \r\n")  # of a file from an editor
    if not isinstance(token, str) or len(token) > MAX_TOKEN_BYTES or not (token.isascii() and (token.isprintable() or not token)):
        raise InvalidArgument(f"a token is a text of at most {MAX_TOKEN_BYTES} ASCII characters")
    return f"Bearer {token}" if token else ""


def refused_login(reason: str) -> str:
    """Why a login was refused, where a call failed for this reason; empty: it failed for another one."""
    return reason.removeprefix(REFUSED_LOGIN) if reason.startswith(REFUSED_LOGIN) else ""


def raise_for_login(reasons: Iterable[str]) -> None:
    """Raises `NotAuthenticated` when one of the reasons why calls failed is the login: trying again changes nothing."""
    for reason in reasons:
        if reason.startswith(REFUSED_LOGIN):
            raise NotAuthenticated(reason.removeprefix(REFUSED_LOGIN))
