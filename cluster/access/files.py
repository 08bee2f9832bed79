"""The access file and the files that it names, read again when they have changed.

A changed file is taken when it did not change between two checks: half of a file that is being written may be valid too, with half
of the users in it.

Source: docs/security.md, "The access file".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from cluster.access import certificates, passwords, tokens
from cluster.access.rules import AccessRule
from cluster.access.settings import AccessSettings, parse, parse_rules
from cluster.settings.options import read_bounded

MAX_FILE_BYTES: Final = 64 << 20
Stamp = tuple[int, int, int]
"""Version of a file: differs after every write."""
Proof = tuple[str, str]
"""Authenticator and its proof with which somebody has logged in (`Identity.by`, `Identity.proof`)."""
Made = TypeVar("Made")


class Files:
    """The access file and the files that it names, read once. Args: before: the result of the last successful read."""

    def __init__(self, path: Path, before: Files | None = None) -> None:
        self.path, self._before = path, before
        self._parsed: dict[tuple[str, Path], tuple[Stamp, Any]] = {}
        self.stamps: dict[Path, Stamp] = {}
        """Version of each file before it was read: a later write counts as a change. Includes invalid files."""
        self.settings = AccessSettings()
        self.keys: tuple[tokens.Key, ...] = ()
        self.users: Mapping[str, passwords.PasswordEntry] = {}
        self.revoked: frozenset[int] = frozenset()
        self.tenant_rules: dict[str, tuple[AccessRule, ...]] = {}
        """Tenant with a file of rules → these."""
        self.gone: frozenset[Proof] = frozenset()
        """Proofs that were valid before and no longer are. An empty proof means all proofs of this authenticator."""

    def read_rules(self) -> None:
        """Read the access file and the rules of tenants alone. Blocking. Raises `ConfigurationError`."""
        self.settings = self._parse("access", self.path, lambda data, name: parse(data.decode(errors="replace"), name))
        for tenant, of in self.settings.tenants.items():
            if of.rules:
                self.tenant_rules[tenant] = self._parse("rules", self.path.parent / of.rules, self._rules)

    def read(self) -> None:
        """Read the files; unchanged ones are not parsed again. Blocking. Raises `ConfigurationError`."""
        self.read_rules()
        folder = self.path.parent
        if self.settings.keys:
            self.keys = self._parse("keys", folder / self.settings.keys, tokens.read_keys)
        if self.settings.users:
            path = folder / self.settings.users
            self.users = self._parse("users", path, lambda data, name: passwords.read_users(data.decode(errors="replace"), name))
        if self.settings.certificate is not None and self.settings.certificate.revoked:
            self.revoked = self._parse("revoked", folder / self.settings.certificate.revoked, certificates.read_revoked)
        if self._before is not None:
            self.gone = frozenset(self._gone_since(self._before))
        self._before = None

    def _rules(self, data: bytes, name: str) -> tuple[AccessRule, ...]:
        return parse_rules(data.decode(errors="replace"), name, self.settings.callbacks)

    def stood_still(self) -> bool:
        """True if no file has changed since it was read."""
        return all(stamp_of(path) == stamp for path, stamp in self.stamps.items())

    def _gone_since(self, before: Files) -> set[Proof]:
        gone = {("jwt", key.fingerprint) for key in before.keys} - {("jwt", key.fingerprint) for key in self.keys}
        if before.users is not self.users:
            good = {entry.identity.proof for entry in self.users.values()}
            gone |= {("password", entry.identity.proof) for entry in before.users.values() if entry.identity.proof not in good}
        gone |= {("certificate", f"{serial:x}") for serial in self.revoked - before.revoked}
        for by, was, stays in (
            ("certificate", before.settings.certificate, self.settings.certificate),
            ("callback", before.settings.callback, self.settings.callback),
        ):
            if was is not None and stays is None:
                gone.add((by, ""))
        return gone

    def _parse(self, kind: str, path: Path, parse_: Callable[[bytes, str], Made]) -> Made:
        self.stamps[path] = stamp = stamp_of(path)
        found = self._before._parsed.get((kind, path)) if self._before is not None else None
        if found is None or found[0] != stamp:
            found = stamp, parse_(read_bounded(path, MAX_FILE_BYTES), str(path))
        self._parsed[kind, path] = found
        made: Made = found[1]
        return made


def stamp_of(path: Path) -> Stamp:
    """Version of a file, different for another file or other contents. Zeros if there is none."""
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0)
    return found.st_mtime_ns, found.st_size, found.st_ino
