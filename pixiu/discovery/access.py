"""Permissions in the registry: one table of paths and logins. Pure.

A login is a role with a password (ZooKeeper's scheme `digest`). `ROOT/access` holds the digests of all logins. If it exists, every
new node gets its access list from the table; if not, the registry is open to everybody.

    r read it and list its children    w write it    c create children    d delete children

An operator may do everything everywhere, and change access lists.

Source: docs/security.md, "The registry".
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from pixiu.discovery.node import json_object
from pixiu.discovery.paths import MAX_TOPIC_NAME, PARTITIONED_ROLES, ROLES, STORES
from pixiu.errors import ConfigurationError, MalformedData

OPERATOR: Final = "operator"
PIPELINE: Final = "pipeline"
CLIENT: Final = "client"
NSQ: Final = "nsq"
"""Listeners for NSQ's clients."""
LOGINS: Final = (*ROLES, OPERATOR, PIPELINE, CLIENT, NSQ)
"""Names that can log in."""
OWN: Final = "its own role"
"""Placeholder in the table for the role that the path names."""
ALL: Final = "rwcda"
MIN_PASSWORD: Final = 32
"""Minimum length, characters. A digest is one round of SHA-1 that every process can read, so passwords must not be guessable."""
MAX_PASSWORDS: Final = 4
"""Limit of passwords of one role, while they are being changed."""
MAX_ACCESS_BYTES: Final = 16_384

EQUAL: Final = ("proxy", "gateway")
"""Roles without partitions that clients look for in the registry."""

_EVERYBODY: Final = (*ROLES, PIPELINE, CLIENT, NSQ)
_LINE = re.compile(r"([a-z]+)[ \t]+([!-~]+)", re.ASCII)
_PARTS: Final = {
    "{equal}": f"(?P<role>{'|'.join(EQUAL)})",
    "{role}": f"(?P<role>{'|'.join(PARTITIONED_ROLES)})",
    "{store}": f"(?P<role>{'|'.join(STORES)})",
    "{name}": f"[A-Za-z0-9._-]{{1,{MAX_TOPIC_NAME}}}",
    "{p}": "[0-9]+",
    "{k}": "[0-9]+",
    "{endpoint}": "[0-9a-f]{16}",
    "…": "[0-9]*",
}


class PathRule(NamedTuple):
    """The use of a path, and its permissions."""

    path: str
    """Path below the root. `{equal}`: proxy, gateway; `{role}`: one with partitions; `{store}`: xiu, pi, topic; `…`:
    ZooKeeper's sequence."""
    grants: Mapping[str, str]
    """Login, or `OWN` → its permissions."""
    directory: bool = False
    """True if the node must exist before processes start, because they may not create it."""


def _all(what: str, *who: str) -> dict[str, str]:
    return dict.fromkeys(who, what)


RULES: Final = (
    PathRule("", _all("r", *_EVERYBODY)),
    PathRule("/access", _all("r", *_EVERYBODY)),
    PathRule("/layout", _all("r", *_EVERYBODY)),
    PathRule("/settings", _all("r", *ROLES)),
    PathRule("/settings_changes", {}),
    PathRule("/supervisor", {}),
    PathRule("/doctor…", {}),
    PathRule("/drain", {}, directory=True),
    PathRule("/drain/{endpoint}", _all("r", *ROLES)),
    PathRule("/kick", _all("r", "gateway", "proxy"), directory=True),
    PathRule("/kick/r…", _all("r", "gateway", "proxy")),
    PathRule("/revoke", _all("rcd", "gateway"), directory=True),
    PathRule("/revoke/r…", _all("r", "gateway")),
    PathRule("/worker", _all("rc", "gateway", "proxy"), directory=True),
    PathRule("/worker/{k}", _all("rw", "gateway", "proxy")),
    PathRule("/instance", _all("rc", "gateway"), directory=True),
    PathRule("/instance/{k}", _all("r", *ROLES) | {"gateway": "rwcd"}),
    PathRule("/instance/{k}/holder", _all("r", *ROLES)),
    PathRule("/{equal}", _all("r", *ROLES, CLIENT) | {OWN: "rcd"}, directory=True),
    PathRule("/{equal}/changes", _all("r", *ROLES, CLIENT) | {OWN: "rw"}, directory=True),
    PathRule("/{equal}/n…", _all("r", *ROLES, CLIENT) | {OWN: "rw"}),
    PathRule("/admin", _all("r", *ROLES) | {"admin": "rcd"}, directory=True),
    PathRule("/admin/changes", _all("r", *ROLES) | {"admin": "rw"}, directory=True),
    PathRule("/admin/leader", _all("r", "proxy") | {"admin": "rw"}),
    PathRule("/admin/epoch", _all("r", "proxy") | {"admin": "rw"}),
    PathRule("/admin/n…", _all("r", *ROLES) | {"admin": "rw"}),
    PathRule("/bridge", _all("r", *ROLES) | {"bridge": "rcd"}, directory=True),
    PathRule("/bridge/changes", _all("r", *ROLES) | {"bridge": "rw"}, directory=True),
    PathRule("/bridge/n…", _all("r", *ROLES) | {"bridge": "rw"}),
    PathRule("/topics", _all("r", "proxy", "topic") | {"admin": "rwcd"}, directory=True),
    PathRule("/topics/{name}", _all("r", "proxy", "topic") | {"admin": "rw"}),
    PathRule("/nsq", _all("r", NSQ), directory=True),
    PathRule("/nsq/listeners", {NSQ: "rcd"}, directory=True),
    PathRule("/nsq/listeners/n…", {NSQ: "rw"}),
    PathRule("/nsq/migration", {NSQ: "r"}, directory=True),
    PathRule("/nsq/migration/{name}", {NSQ: "r"}),
    PathRule("/{store}", _all("r", *ROLES, PIPELINE), directory=True),
    PathRule("/{role}", _all("r", *ROLES), directory=True),
    PathRule("/{store}/changes", _all("r", *ROLES, PIPELINE) | {OWN: "rw"}, directory=True),
    PathRule("/{role}/changes", _all("r", *ROLES) | {OWN: "rw"}, directory=True),
    PathRule("/{role}/partition_num", _all("r", *ROLES)),
    PathRule("/{role}/doubling", {}),
    PathRule("/{role}/doublings", {}),
    PathRule("/{store}/partition{p}", _all("r", *ROLES, PIPELINE) | {OWN: "rcd"}),
    PathRule("/{store}/partition{p}/n…", _all("r", *ROLES, PIPELINE) | {OWN: "rw"}),
    PathRule("/topic/partition{p}/state", {"topic": "rw", "proxy": "r", "admin": "r"}),
    PathRule("/{store}/partition{p}/state", {OWN: "rw"}),
    PathRule("/{role}/partition{p}", _all("r", *ROLES) | {OWN: "rcd"}),
    PathRule("/{role}/partition{p}/n…", _all("r", *ROLES) | {OWN: "rw"}),
)  # fmt: skip
"""Rules of paths: the first match applies. Other paths belong to the operator."""


def _pattern(path: str) -> re.Pattern[str]:
    text = re.escape(path)
    for name, pattern in _PARTS.items():
        text = text.replace(re.escape(name), pattern)
    return re.compile(text, re.ASCII)


_PATTERNS: Final = tuple((_pattern(rule.path), rule) for rule in RULES)


def rule_of(path: str) -> tuple[PathRule | None, str]:
    """Find the rule of a path below the root (empty: the root itself), and the role in it; empty: none."""
    for pattern, rule in _PATTERNS:
        found = pattern.fullmatch(path)
        if found is not None:
            return rule, found.groupdict().get("role") or ""
    return None, ""


def grants_of(path: str) -> dict[str, str]:
    """Login → permissions on a node below the root; the sequence may be missing. Logins without permissions are left out."""
    rule, role = rule_of(path)
    found = {} if rule is None else {who: what for who, what in rule.grants.items() if who != OWN}
    if rule is not None and role and OWN in rule.grants:
        found[role] = rule.grants[OWN]
    return found | {OPERATOR: ALL}


def directories() -> list[str]:
    """Directories below the root that must exist before processes start."""
    found = []
    for rule in RULES:
        if rule.directory:
            roles = EQUAL if "{equal}" in rule.path else STORES if "{store}" in rule.path else PARTITIONED_ROLES
            found += [re.sub(r"\{\w+\}", role, rule.path) for role in (roles if "{" in rule.path else ("",))]
    return list(dict.fromkeys(found))


def digest_of(login: str, password: str) -> str:
    """Make ZooKeeper's digest of a login: `role:base64`."""
    made = hashlib.sha1(f"{login}:{password}".encode(), usedforsecurity=False).digest()
    return f"{login}:{base64.b64encode(made).decode()}"


def parse_credentials(text: str, where: str) -> dict[str, tuple[str, ...]]:
    """Parse a file of logins: a line for each, role and password; several of a role while passwords are changed, the newest first.

    Raises `ConfigurationError`.
    """
    found: dict[str, tuple[str, ...]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        parts = _LINE.fullmatch(line.strip())
        if parts is None or parts[1] not in LOGINS:
            raise ConfigurationError(f"{where}, line {number}: must be a role ({', '.join(LOGINS)}) and its password")
        if len(parts[2]) < MIN_PASSWORD:
            raise ConfigurationError(f"{where}, line {number}: the password of {parts[1]} has fewer than {MIN_PASSWORD} characters")
        found[parts[1]] = (*found.get(parts[1], ()), parts[2])
        if len(found[parts[1]]) > MAX_PASSWORDS:
            raise ConfigurationError(f"{where}: {parts[1]} has more than {MAX_PASSWORDS} passwords")
    if not found:
        raise ConfigurationError(f"{where}: has no login; `pixiu registry credentials` makes such a file")
    return found


@dataclass(frozen=True, slots=True)
class Access:
    """The digests of all logins, as stored in `ROOT/access`."""

    digests: Mapping[str, tuple[str, ...]]

    def to_json(self) -> bytes:
        """Encode the data of the node."""
        return json.dumps({"logins": {who: list(found) for who, found in sorted(self.digests.items())}}, indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Access:
        """Decode the data of the node. Raises `MalformedData`."""
        fields = json_object(data, MAX_ACCESS_BYTES, "the registry's logins").get("logins")
        if not isinstance(fields, dict) or not all(
            isinstance(found, list) and all(isinstance(one, str) and one.startswith(f"{who}:") for one in found)
            for who, found in fields.items()
        ):
            raise MalformedData("the registry's logins must be lists of digests by role")
        return cls({who: tuple(found) for who, found in fields.items()})

    @classmethod
    def of(cls, credentials: Mapping[str, tuple[str, ...]]) -> Access:
        """Compute the digests of passwords."""
        return cls({who: tuple(digest_of(who, one) for one in passwords) for who, passwords in credentials.items()})

    def acl_of(self, path: str) -> list[tuple[str, str]]:
        """Access list of a node below the root: (digest, permissions), sorted."""
        return sorted((digest, what) for who, what in grants_of(path).items() for digest in self.digests.get(who, ()))
