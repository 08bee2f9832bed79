"""Password files: a line for each user, with an scrypt hash.

    # comment
    alice:7:players,staff:scrypt$16384$8$1$SALT$HASH

User, UIN (0: a service), groups, hash; salt and hash in base64. `pixiu passwd` writes it. Checking a password takes about 50 ms
and 16 MiB on purpose: it is done in threads, a few at a time.

Source: docs/security.md, "Passwords"; RFC 7914.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cluster.trust.identity import Identity, groups_of, uin_of
from pixiu.durable import replace_file
from pixiu.errors import ConfigurationError, InvalidArgument, NotAuthenticated

N: Final = 1 << 14
R: Final = 8
P: Final = 1
SALT_BYTES: Final = 16
HASH_BYTES: Final = 32
MAX_N: Final = 1 << 17
MAX_USERS: Final = 1_000_000
MIN_PASSWORD: Final = 8


@dataclass(frozen=True, slots=True)
class PasswordEntry:
    """One user's line."""

    identity: Identity
    n: int
    r: int
    p: int
    salt: bytes
    hash: bytes

    def fits(self, password: str) -> bool:
        """True if the password is correct. Slow on purpose; not for an event loop."""
        made = _scrypt(password, self.salt, self.n, self.r, self.p)
        return hmac.compare_digest(made, self.hash)


UNKNOWN: Final = PasswordEntry(Identity("", 0), N, R, P, bytes(SALT_BYTES), bytes(HASH_BYTES))
"""Entry to compare an unknown user's password with, so that the duration does not reveal which users exist."""


def read_users(text: str, name: str) -> Mapping[str, PasswordEntry]:
    """Users of a password file. Raises `ConfigurationError` that names the file and the line, but none of its content."""
    users: dict[str, PasswordEntry] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            user, entry = _entry(line)
        except (ValueError, NotAuthenticated):
            raise ConfigurationError(f"{name}, line {number}: must be USER:UIN:GROUPS:HASH, as `pixiu passwd` writes it") from None
        if user in users or len(users) >= MAX_USERS:
            raise ConfigurationError(f"{name}, line {number}: the user is in the file already, or the file has too many users")
        users[user] = entry
    return users


def check(entry: PasswordEntry | None, password: str) -> Identity:
    """Check a password, and return the user's identity. Slow on purpose; not for an event loop. Raises `NotAuthenticated`."""
    if not (entry or UNKNOWN).fits(password) or entry is None:
        raise NotAuthenticated("the user name or the password is wrong")
    return entry.identity


def line_of(user: str, password: str, uin: int, groups: tuple[str, ...] = ()) -> str:
    """A user's line, with a new salt. Raises `InvalidArgument`."""
    for text in (user, *groups):
        if not text or not text.isprintable() or set(text) & set(":,#") or text != text.strip():
            raise InvalidArgument(f"{text!r}: a user and a group have no colon, comma, # or control character, and are not empty")
    if len(password) < MIN_PASSWORD:
        raise InvalidArgument(f"a password has at least {MIN_PASSWORD} characters")
    if uin:
        uin_of(uin)
    salt = secrets.token_bytes(SALT_BYTES)
    encoded = [base64.b64encode(part).decode() for part in (salt, _scrypt(password, salt, N, R, P))]
    return f"{user}:{uin}:{','.join(groups)}:scrypt${N}${R}${P}${encoded[0]}${encoded[1]}"


def put_user(path: Path, user: str, line: str) -> bool:
    """Write a user's line into a file, replacing an earlier one. Returns True if there was one. The file is replaced atomically,
    and nobody else may read it. Raises `ConfigurationError`."""
    try:
        lines = path.read_text().splitlines() if path.exists() else []
        kept = [old for old in lines if old.split(":", 1)[0] != user]
        replace_file(path, "".join(f"{text}\n" for text in (*kept, line)).encode(), mode=stat.S_IRUSR | stat.S_IWUSR)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: cannot be written: {error}") from None
    return len(kept) < len(lines)


def _entry(line: str) -> tuple[str, PasswordEntry]:
    user, uin, groups, hashed = line.split(":")
    kind, *numbers, salt, digest = hashed.split("$")
    n, r, p = map(int, numbers)
    if kind != "scrypt" or not user or not 2 <= n <= MAX_N or n & n - 1 or not 1 <= r <= 32 or not 1 <= p <= 16:
        raise ValueError("no scrypt hash")
    proof = hashlib.blake2b(line.encode(), digest_size=16, person=b"pixiu-user").hexdigest()
    known = groups_of([group for group in groups.split(",") if group])
    identity = Identity(user, uin_of(int(uin) or None), known, by="password", proof=proof)
    return user, PasswordEntry(identity, n, r, p, base64.b64decode(salt, validate=True), base64.b64decode(digest, validate=True))


def _scrypt(password: str, salt: bytes, n: int, r: int, p: int) -> bytes:
    return hashlib.scrypt(password.encode(errors="replace"), salt=salt, n=n, r=r, p=p, dklen=HASH_BYTES, maxmem=256 * r * (n + p))
