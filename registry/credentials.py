"""The file with all logins of a cluster's registry, which only its owner may read.

Source: docs/security.md, "The registry".
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

from pixiu.discovery.access import LOGINS, MAX_PASSWORDS
from pixiu.discovery.login import Login
from pixiu.durable import replace_file
from pixiu.errors import ConfigurationError


def make_credentials(file: Path, *, renew: bool = False, drop: bool = False) -> dict[str, tuple[str, ...]]:
    """Make a file with a login for every role, or add the missing ones to an existing file. Returns the logins.

    Args:
        renew: give every role one more password, before those that it has.
        drop: leave every role its newest password only.

    Raises `ConfigurationError`: the file is invalid or readable by others, or a role already has the maximum of passwords.
    """
    there = Login(file).read() if file.exists() else {}
    made: dict[str, tuple[str, ...]] = {}
    for who in LOGINS:
        passwords = there.get(who, ())
        if renew or not passwords:
            passwords = (secrets.token_hex(32), *passwords)
        made[who] = passwords[:1] if drop else passwords
        if len(made[who]) > MAX_PASSWORDS:
            raise ConfigurationError(f"{file}: {who} has {MAX_PASSWORDS} passwords already: drop the older ones first")
    if made != there:
        write_credentials(file, made)
    return made


def write_credentials(file: Path, logins: Mapping[str, tuple[str, ...]]) -> None:
    """Replace a file of logins atomically. Raises `ConfigurationError`."""
    lines = ["# Logins in the registry: role and password. Give a machine only the lines of its own roles.\n"]
    lines += [f"{who} {password}\n" for who, passwords in logins.items() for password in passwords]
    try:
        replace_file(file, "".join(lines).encode(), mode=0o600)
    except OSError as error:
        raise ConfigurationError(f"registry credentials {file}: cannot be written: {error.strerror}") from None


def read_credentials(file: Path) -> dict[str, tuple[str, ...]]:
    """Read the logins of all roles, an operator's file. Raises `ConfigurationError` when one is missing."""
    found = Login(file).read()
    if missing := [who for who in LOGINS if who not in found]:
        raise ConfigurationError(
            f"registry credentials {file}: has no line for {', '.join(missing)}: give the operator's file, which has all of them"
        )
    return found
