"""Login tickets: a proxy's word that a user has logged in at one run of a gateway, valid until a time. Pure.

    offset  type  field                       a ticket, little-endian
    0       u32   until, Unix seconds
    4       16 B  keyed BLAKE2b of the UIN (u64), the gateway's run (u32) and `until`

Proxies sign with keys that gateways do not have, and proxies and relays check.

Source: docs/security.md, "Login tickets".
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Iterator
from struct import Struct
from typing import Final

PURPOSE: Final = ("proxy", "login tickets")
"""Purpose of the keys derived from the ring (`cluster.trust.followed_keys.keys_of`)."""
SIGNED: Final = Struct("<QII")
UNTIL: Final = Struct("<I")
TAG_BYTES: Final = 16
TICKET_BYTES: Final = UNTIL.size + TAG_BYTES
SHOWN: Final = Struct(f"<Q{TICKET_BYTES}s")
"""A user's ticket as a gateway shows it to a proxy."""
PERSON: Final = b"pixiu-ticket"
MAX_TICKET_S: Final = 86_400
"""Longest time for which a ticket is valid, seconds."""
GRACE_S: Final = 60
"""A gateway ends sessions by this time before their tickets end, seconds: clocks of machines may differ by it."""

assert SIGNED.size == 16


def sign(key: bytes, uin: int, run: int, until: int) -> bytes:
    """Sign a ticket. run: of the gateway, see `pixiu.ids.gateway_run`. until: Unix seconds."""
    return UNTIL.pack(until) + _tag(key, uin, run, until)


def signer(keys: Iterable[bytes], ticket: bytes, uin: int, run: int, now: float) -> bytes | None:
    """The key that signed a ticket for this user at this run; None if it is not valid now (Unix seconds)."""
    if len(ticket) != TICKET_BYTES:
        return None
    (until,) = UNTIL.unpack_from(ticket)
    if not now < until <= now + MAX_TICKET_S + 2 * GRACE_S:
        return None
    tag = ticket[UNTIL.size :]
    return next((key for key in keys if hmac.compare_digest(tag, _tag(key, uin, run, until))), None)


def until_of(ticket: bytes) -> int:
    """Unix seconds at which a ticket of the right length ends."""
    return int(UNTIL.unpack_from(ticket)[0])


def shown_of(data: bytes) -> Iterator[tuple[int, bytes]] | None:
    """(UIN, ticket) of each that a gateway shows; None if the length is wrong."""
    return None if len(data) % SHOWN.size else SHOWN.iter_unpack(data)


def _tag(key: bytes, uin: int, run: int, until: int) -> bytes:
    return hashlib.blake2b(SIGNED.pack(uin, run, until), key=key, person=PERSON, digest_size=TAG_BYTES).digest()
