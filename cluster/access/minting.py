"""Makes keys and tokens, for people without an issuer of their own: `pixiu token`, `pixiu up --secure`.

Source: docs/security.md, "Tokens".
"""

from __future__ import annotations

import json
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from pixiu.durable import replace_file
from pixiu.errors import ConfigurationError

KEYS: Final = "keys.json"
DEMO: Final = """# Who may do what: docs/security.md. It is read again when it changes.
[jwt]
keys = "keys.json"
audience = "pixiu"

[[rule]]
allow = ["publish", "subscribe", "signal", "mail", "presence", "produce", "consume", "channel", "topics"]
groups = ["demo"]
"""
DEMO_USER: Final = ("demo", 7, ("demo",))
DAY_S: Final = 86_400.0


def key_of(path: Path) -> ed25519.Ed25519PrivateKey:
    """The private key in a file; if missing, it is made and added to the key set `keys.json` in the same folder.

    Raises `ConfigurationError`.
    """
    try:
        if path.exists():
            found = serialization.load_pem_private_key(path.read_bytes(), password=None)
            if not isinstance(found, ed25519.Ed25519PrivateKey):
                raise ConfigurationError(f"{path}: must be an Ed25519 key")
            return found
        key = ed25519.Ed25519PrivateKey.generate()
        _publish(path.with_name(KEYS), key)
        where = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        write_private(path, key.private_bytes(*where))
        return key
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigurationError(f"{path}: no private key can be read or written there: {error}") from None


def _publish(path: Path, key: ed25519.Ed25519PrivateKey) -> None:
    """Add the public half of a key to a key set, which is replaced atomically. Raises `ConfigurationError`, `OSError`,
    `ValueError`."""
    found = json.loads(path.read_bytes()) if path.exists() else {"keys": []}
    if not isinstance(found, dict) or not isinstance(found.get("keys"), list):
        raise ConfigurationError(f"{path}: is not a key set (a JWKS), so a new key cannot be added to it")
    replace_file(path, (json.dumps({**found, "keys": [*found["keys"], public_of(key)]}, indent=1) + "\n").encode())


def public_of(key: ed25519.Ed25519PrivateKey) -> dict[str, Any]:
    """The public half of a key in the form of a key set; its name is derived from itself."""
    found: dict[str, Any] = jwt.get_algorithm_by_name("EdDSA").to_jwk(key.public_key(), as_dict=True)
    return {**found, "kid": str(found["x"])[:8], "alg": "EdDSA", "use": "sig"}


def token(
    key: ed25519.Ed25519PrivateKey,
    user: str,
    uin: int,
    groups: tuple[str, ...] = (),
    *,
    lasts_s: float = 3600,
    audience: str = "pixiu",
    more: Mapping[str, str] | None = None,
) -> str:
    """Make a token of a user, or of a service (UIN 0), valid for `lasts_s` seconds from now. `more`: claims of its own."""
    now = int(time.time())
    claims: dict[str, Any] = {"sub": user, "groups": list(groups), "aud": audience, "iat": now, "exp": now + int(lasts_s)}
    if uin:
        claims["uin"] = uin
    claims = {**(more or {}), **claims}
    return jwt.encode(claims, key, algorithm="EdDSA", headers={"kid": public_of(key)["kid"]})


def write_private(path: Path, data: bytes) -> None:
    """Write a file that nobody else may read. Raises `OSError`."""
    replace_file(path, data, mode=stat.S_IRUSR | stat.S_IWUSR)


def make_demo(folder: Path, roles: Sequence[str]) -> tuple[str, ...]:
    """Create the files that `pixiu up --secure` needs in a folder, if missing, and a token for user 7 that is valid for a day,
    `token`.

    Returns the settings to run it with, for the roles that have clients. Raises `ConfigurationError`.
    """
    folder = folder.resolve()
    key = key_of(folder / "jwt.pem")
    try:
        if not (folder / "access.toml").exists():
            (folder / "access.toml").write_text(DEMO)
        write_private(folder / "token", token(key, *DEMO_USER, lasts_s=DAY_S).encode())
    except OSError as error:
        raise ConfigurationError(f"{folder}: cannot be written: {error.strerror}") from None
    access = folder / "access.toml"
    return tuple(f"{role}.access_file={access}" for role in roles)
