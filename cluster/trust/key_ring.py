"""The keys of datagrams. The newest one in use signs and all are accepted, so that keys change while everything runs.

    FOLDER/2.key    in use: the one with the highest number signs        16 to 64 bytes, white space at the end left out
    FOLDER/3.next   accepted but not signing yet: the next key, given to every machine before it is used

Numbers are from 1 to 15. From each key, one key is derived for every pair of roles (HKDF with BLAKE2b, RFC 5869): a datagram that a
gateway signs for a router passes neither as one of a broker nor as one for a relay.

Source: docs/security.md, "Keys of datagrams".
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pixiu.errors import ConfigurationError

MAX_KEY_ID: Final = 15
MIN_BYTES: Final = 16
MAX_BYTES: Final = 64
FILE: Final = re.compile(r"([1-9]|1[0-5])\.(key|next)")
SALT: Final = b"pixiu datagrams 1"
ROLES: Final = ("broker", "gateway", "pi", "proxy", "relay", "router", "xiu", "topic", "admin", "bridge")
"""Roles; the number of a role on the wire is its position here, from 1. New ones are added at the end."""
NUMBER: Final = {role: number for number, role in enumerate(ROLES, 1)}
TAG_SIZE: Final = 16
SHA256_BLOCK: Final = 64
SMALL_BYTES: Final = 2048
"""Largest size for which copying the signed data costs less than a second call."""
INNER: Final = bytes(byte ^ 0x36 for byte in range(256))
OUTER: Final = bytes(byte ^ 0x5C for byte in range(256))
"""Inner and outer pad of an HMAC, as tables for `bytes.translate`."""

assert len(ROLES) < 16


@dataclass(frozen=True)
class KeyRing:
    """Keys by number. `signing` is the number of the key that signs."""

    keys: Mapping[int, bytes] = field(repr=False)
    signing: int

    def derive(self, number: int, sender: str, receiver: str) -> bytes:
        """The 32-byte key with which a process of one role signs for a process of another."""
        extracted = hmac.digest(SALT, self.keys[number], "blake2b")
        info = f"{sender} to {receiver}".encode()
        return hmac.digest(extracted, info + b"\x01", "blake2b")[:32]

    def same_as(self, other: KeyRing) -> bool:
        """True if it holds the same keys."""
        return self.signing == other.signing and dict(self.keys) == dict(other.keys)

    def name(self) -> str:
        """Description for users: the numbers of the keys, never the keys."""
        return f"signs with {self.signing}, accepts {', '.join(map(str, sorted(self.keys)))}"


def read_key_ring(folder: Path, option: str = "key_dir") -> KeyRing:
    """Read the ring in the folder that an option names. Raises ConfigurationError that names the file at fault."""
    keys: dict[int, bytes] = {}
    signing = 0
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise ConfigurationError(
            f"[cluster] {option} = {folder}: cannot be read: {error.strerror}; `pixiu keys add` makes it"
        ) from None
    for path in paths:
        found = FILE.fullmatch(path.name)
        if found is None:
            continue
        number = int(found[1])
        try:
            key = path.read_bytes()[: MAX_BYTES + 64].rstrip()
        except OSError as error:
            raise ConfigurationError(f"[cluster] {option}: {path} cannot be read: {error.strerror}") from None
        if not MIN_BYTES <= len(key) <= MAX_BYTES:
            raise ConfigurationError(f"[cluster] {option}: {path} has {len(key)} bytes: must be {MIN_BYTES} to {MAX_BYTES}")
        if number in keys and found[2] == "next":
            continue
        keys[number] = key
        if found[2] == "key":
            signing = max(signing, number)
    if not signing:
        raise ConfigurationError(f"[cluster] {option} = {folder}: has no key in use, such as 1.key; `pixiu keys add` makes one")
    return KeyRing(keys, signing)


class TagKey:
    """A key that signs datagrams, prepared once: copying a prepared hash is cheaper than keying a new one."""

    __slots__ = ("_inner", "_outer")

    def __init__(self, key: bytes) -> None:
        assert len(key) <= SHA256_BLOCK, "a longer key would have to be hashed first"
        block = key.ljust(SHA256_BLOCK, b"\0")
        self._inner = hashlib.sha256(block.translate(INNER))
        self._outer = hashlib.sha256(block.translate(OUTER))

    def tag(self, data: bytes, destination: bytes) -> bytes:
        """The tag of a datagram: HMAC-SHA256 (RFC 2104), cut to 16 bytes."""
        inner, outer = self._inner.copy(), self._outer.copy()
        if len(data) <= SMALL_BYTES:
            inner.update(data + destination)
        else:
            inner.update(data)
            inner.update(destination)
        outer.update(inner.digest())
        return outer.digest()[:TAG_SIZE]


def tag_keys(ring: KeyRing, own_role: str) -> tuple[dict[str, TagKey], dict[int, TagKey]]:
    """The keys to sign with, by the receiver's role, and to check with, by the byte that names key and sender."""
    sign = {role: TagKey(ring.derive(ring.signing, own_role, role)) for role in ROLES}
    check = {key_byte(number, role): TagKey(ring.derive(number, role, own_role)) for number in ring.keys for role in ROLES}
    return sign, check


def key_byte(number: int, sender: str) -> int:
    """The byte of a head that names the key, in its high half, and the sender's role."""
    return number << 4 | NUMBER[sender]
