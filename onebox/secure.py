"""Files that `pixiu up --secure` makes before the processes start: a key, rules and a token, all in its data folder.

Source: docs/security.md, "On one machine".
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pixiu.errors import ConfigurationError

PRIVATE_UMASK: Final = 0o077
"""Only the owner may read the files of a cluster on one machine."""
FOLDER: Final = "secure"
LISTENERS: Final = "listeners"
"""Folder below the data folder with the certificates shown to clients, and `ca.pem`, which clients trust."""


def make_secure(data: Path, replay: str, roles: Sequence[str]) -> tuple[str, ...]:
    """Make the missing files, and a new token. Returns the settings to run with. `replay`: the log to play.
    `roles`: those that have clients.

    Raises `ConfigurationError`.
    """
    if replay:
        raise ConfigurationError("--secure: the log is of many users, who have no tokens; leave out --replay")
    from cluster.access.minting import make_demo  # most runs do not need it

    return make_demo(data / FOLDER, roles)


def with_login(tries: Sequence[str], data: Path) -> list[str]:
    """Return the lines that `pixiu up` shows to try, for a cluster that requires a login: first the authority and the token."""
    with_token = [line.replace("-t room/42", '--cafile "$PIXIU_CA" -u demo -P "$PIXIU_TOKEN" -t room/42') for line in tries]
    authority, token = data.resolve() / LISTENERS / "ca.pem", data.resolve() / FOLDER / "token"
    return [f"export PIXIU_CA={authority}", f"export PIXIU_TOKEN=$(cat {token})", *with_token]
