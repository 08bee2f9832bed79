"""Keys, tokens and an access file for tests."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Final

import jwt
from cryptography.hazmat.primitives.asymmetric import ed25519

from cluster.access.login_guard import LoginGuard
from cluster.access.passwords import line_of
from cluster.trust.identity import Credentials
from cluster.trust.key_folder import add_key, use_key
from tests.support.waiting import until

RULES: Final = """
[[rule]]
deny = ["publish", "subscribe"]
groups = ["players"]
rooms = ["13"]

[[rule]]
allow = ["publish", "subscribe", "signal"]
groups = ["players"]
rooms = ["1-100"]
topics = ["games/{uin}/#", "news/+"]

[[rule]]
allow = ["publish", "mail", "presence"]
groups = ["players"]
uins = ["1-100"]

[[rule]]
allow = ["publish", "mail", "presence", "impersonate"]
groups = ["services"]
"""


class Logins:
    """An access file in a folder, and tokens for it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file, self.keys = folder, folder / "access.toml", folder / "keys"
        self.key = ed25519.Ed25519PrivateKey.generate()
        self.other = ed25519.Ed25519PrivateKey.generate()
        self.ticket_keys = folder / "ticket_keys"
        for keys in (self.keys, self.ticket_keys):
            add_key(keys)
            use_key(keys)
        self.write_keys()
        (folder / "users").write_text(line_of("carol", "carols-password", 9, ("players",)) + "\n")
        self.write_rules(RULES)

    def write_keys(self) -> None:
        """The key set, with the key of now."""
        public = jwt.get_algorithm_by_name("EdDSA").to_jwk(self.key.public_key(), as_dict=True)
        (self.folder / "keys.json").write_text(json.dumps({"keys": [{**public, "kid": "1"}]}))

    def write_rules(self, rules: str) -> None:
        """The access file, put there at once."""
        new = self.folder / "new"
        new.write_text(f'[jwt]\nkeys = "keys.json"\n[password]\nfile = "users"\n{rules}')
        new.replace(self.file)

    def token(self, user: str, uin: int | None, *groups: str, lasts_s: float = 600, key: Any = None, **claims: Any) -> str:
        """A signed token."""
        said = {"sub": user, "uin": uin, "groups": list(groups), "aud": "pixiu", "exp": time.time() + lasts_s, **claims}
        return jwt.encode(
            {name: value for name, value in said.items() if value is not None},
            key or self.key,
            algorithm="EdDSA",
            headers={"kid": "1"},
        )

    def settings(self) -> dict[str, str]:
        """What a cluster is to be told."""
        files = {f"{role}.access_file": str(self.file) for role in ("proxy", "gateway", "topic")}
        return {"cluster.key_dir": str(self.keys)} | files


def login(secret: str = "pass-phrase", user: str = "zoe", address: str = "10.0.0.9") -> Credentials:
    """Credentials that a client shows."""
    return Credentials(user, secret, "phone", address)


async def all_visited(guard: LoginGuard) -> None:
    """Wait until all sessions that a change concerns were visited."""
    await until(lambda: not guard.samples()["access_sessions_to_visit"])
