"""A folder of datagrams' keys: add one that is accepted, use it, drop the ones before it (`cluster.trust.key_ring`).

Source: docs/security.md, "Keys of datagrams", "Login tickets".
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path

from cluster.trust.key_ring import FILE, MAX_KEY_ID
from pixiu.durable import make_directory, replace_file, sync_directory
from pixiu.errors import ConfigurationError


def _found(folder: Path) -> dict[str, list[int]]:
    try:
        if not folder.exists():
            make_directory(folder.parent)
            folder.mkdir(exist_ok=True, mode=0o700)
            sync_directory(folder.parent)
        matches = [FILE.fullmatch(path.name) for path in folder.iterdir()]
    except OSError as error:
        raise ConfigurationError(f"{folder}: cannot be used: {error.strerror}") from None
    return {kind: sorted(int(found[1]) for found in matches if found and found[2] == kind) for kind in ("key", "next")}


@contextlib.contextmanager
def _changing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"{folder}: cannot be changed: {error.strerror}") from None


def add_key(folder: Path) -> Path:
    """Make the next key, which is accepted but does not sign yet. Raises ConfigurationError."""
    found = _found(folder)
    if found["next"]:
        raise ConfigurationError(f"{folder} has {found['next'][0]}.next already: give it to every machine, then `pixiu keys use`")
    taken = found["key"]
    number = max(taken, default=0) + 1
    if number > MAX_KEY_ID:
        raise ConfigurationError(f"{folder}: {MAX_KEY_ID} is the last number: end all processes and begin again with 1.key")
    path = folder / f"{number}.next"
    with _changing(folder):
        replace_file(path, secrets.token_hex(32).encode(), mode=0o600)  # never half a key
    return path


def use_key(folder: Path) -> Path:
    """Sign with the next key from now on. Raises ConfigurationError: there is none."""
    found = _found(folder)["next"]
    if not found:
        raise ConfigurationError(f"{folder} has no next key: `pixiu keys add` makes one")
    path = folder / f"{found[0]}.key"
    with _changing(folder):
        (folder / f"{found[0]}.next").rename(path)
        sync_directory(folder)
    return path


def in_use_s(folder: Path, now_s: float) -> float:
    """Seconds since the newest key of this folder came into use here. Raises ConfigurationError: none is in use."""
    found = _found(folder)["key"]
    if not found:
        raise ConfigurationError(f"{folder} has no key in use: `pixiu keys add`, then `pixiu keys use`")
    with _changing(folder):
        return now_s - (folder / f"{found[-1]}.key").stat().st_ctime


def drop_keys(folder: Path) -> list[Path]:
    """Remove every key but the newest in use, and the next one. Raises ConfigurationError."""
    gone = [folder / f"{number}.key" for number in _found(folder)["key"][:-1]]
    with _changing(folder):
        for path in gone:
            path.unlink()
        sync_directory(folder)
    return gone
