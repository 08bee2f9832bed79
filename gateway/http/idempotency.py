"""Answers to requests with an `Idempotency-Key`, so that one that is sent again happens once. Pure.

The memory is of this gateway, for a time, and bounded by user and in all. A request whose outcome is not final (refused for now,
not known) is forgotten, so that it can be tried again.

Source: docs/http.md, "Sent again"; draft-ietf-httpapi-idempotency-key-header.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Final

from gateway.http.answers import Refused, bad
from pixiu.ids import MAX_ID

MAX_KEY: Final = 128
MAX_ENTRIES: Final = 20_000
MAX_OF_USER: Final = 2000
MAX_BYTES: Final = 32 << 20
"""Bytes of remembered answers."""
KEPT_S: Final = 600.0
FINAL: Final = frozenset((200, 400, 404, 409, 413))


@dataclass(slots=True)
class Kept:
    """A request that came, and its answer."""

    fingerprint: bytes
    until: float
    status: int = 0
    """0: not answered yet."""
    body: bytes = b""


class Idempotency:
    """Requests by user and key."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], Kept] = OrderedDict()
        self._of_user: Counter[str] = Counter()
        self._bytes = 0
        self.repeated = 0
        """Requests that were answered from memory."""

    def __len__(self) -> int:
        return len(self._kept)

    def begin(self, user: str, key: str, fingerprint: bytes, now: float) -> Kept | None:
        """Note a request that begins. Returns the answer that it has got already; None: carry it out, then call `end`.

        Raises `Refused`: the key is malformed, was used for another request, or this one is under way.
        """
        if not 0 < len(key) <= MAX_KEY or not (key.isascii() and key.isprintable()):
            raise bad(f"an Idempotency-Key has 1 to {MAX_KEY} printable ASCII characters")
        self._forget_old(now)
        found = self._kept.get((user, key))
        if found is None:
            if self._of_user[user] >= MAX_OF_USER:
                self._forget(next(name for name in self._kept if name[0] == user))
            while len(self._kept) >= MAX_ENTRIES:
                self._forget(next(iter(self._kept)))
            self._kept[user, key] = Kept(fingerprint, now + KEPT_S)
            self._of_user[user] += 1
            return None
        if found.fingerprint != fingerprint:
            raise Refused(422, "KEY_REUSED", "this Idempotency-Key was used for another request")
        if not found.status:
            raise Refused(409, "IN_PROGRESS", "the request with this Idempotency-Key is still under way", 1)
        self.repeated += 1
        return found

    def end(self, user: str, key: str, status: int, body: bytes) -> None:
        """Note the answer of a request that began; 0: there is none."""
        found = self._kept.get((user, key))
        if found is None:
            return
        if status not in FINAL:
            self._forget((user, key))
            return
        found.status, found.body = status, body
        self._bytes += len(body)
        while self._bytes > MAX_BYTES:
            self._forget(next(iter(self._kept)))

    def _forget_old(self, now: float) -> None:
        while self._kept:
            name, kept = next(iter(self._kept.items()))
            if now < kept.until:
                return
            self._forget(name)

    def _forget(self, name: tuple[str, str]) -> None:
        kept = self._kept.pop(name)
        self._bytes -= len(kept.body)
        self._of_user[name[0]] -= 1
        if not self._of_user[name[0]]:
            del self._of_user[name[0]]


def fingerprint_of(*parts: bytes) -> bytes:
    """Digest of a request."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()


def derived_id(user: str, key: str, index: int) -> int:
    """SnowflakeID of the message `index` of a request, the same at every gateway."""
    digest = fingerprint_of(b"pixiu http", user.encode(), key.encode(), index.to_bytes(4, "big"))
    return int.from_bytes(digest[:8], "big") & MAX_ID or 1
