"""Proof of a gateway to a proxy that it is one: by a key of the cluster, never by a name. Pure.

    authorization: PixiuProcess ROLE.ENDPOINT.UNIX_SECONDS.TAG        TAG: keyed BLAKE2b of the text before it

Source: docs/security.md, "Gateways at proxies".
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

SCHEME: Final = "PixiuProcess"
VALID_S: Final = 60.0
"""Greatest difference between a proof's time and the present at which it is accepted, seconds."""
TAG_BYTES: Final = 32
PERSON: Final = b"pixiu-process"


def prove(key: bytes, role: str, endpoint: int, now: float) -> str:
    """A proof for one call, made now (Unix seconds)."""
    said = f"{role}.{endpoint:016x}.{int(now)}"
    return f"{SCHEME} {said}.{_tag(key, said)}"


def proven(key: bytes | None, header: str, now: float) -> str | None:
    """Role that a proof proves; None if it is invalid or out of its time. `key` None: nothing is accepted."""
    scheme, _, proof = header.partition(" ")
    said, _, tag = proof.rpartition(".")
    parts = said.split(".")
    if key is None or scheme != SCHEME or len(parts) != 3 or not hmac.compare_digest(tag.encode(), _tag(key, said).encode()):
        return None
    time = parts[2]
    return parts[0] if time.isascii() and time.isdecimal() and abs(now - int(time)) <= VALID_S else None


def _tag(key: bytes, said: str) -> str:
    return hashlib.blake2b(said.encode(), key=key, person=PERSON, digest_size=TAG_BYTES).hexdigest()
