"""Publish permissions of a login: each record of a batch is checked, and its sender is set to the login's user. Pure.

A forbidden record gets the kind `NOT_ALLOWED` or `NOT_LENT`, which the cores refuse like any other unsupported kind: its position
fails, the others go on. The header is outside of a record's CRC, so both changes leave the body unchanged.

Source: docs/security.md, "What is checked where".
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from cluster.access.login_guard import LoginSession
from cluster.access.rules import MAIL as MAY_MAIL
from cluster.access.rules import PUBLISH, Target
from cluster.access.rules import SIGNAL as MAY_SIGNAL
from cluster.trust.loans import WORKER_MASK, Lent
from pixiu.ids import MAX_ROOM
from pixiu.placement.topics import resolve
from pixiu.wire.record import CHAT, HEADER_SIZE, KIND_AT, MAIL, MIN_SIZE, SENDER_AT, SIGNAL, SIZE_FIELD, Flag

HEAD: Final = struct.Struct("<IBB2xHHxxxxQQQ")
"""size, kind, flags, extension length, lifetime, SnowflakeID, key, sender. Source: docs/protocol.md, "Record"."""
SENDER: Final = struct.Struct("<Q")
NOT_ALLOWED: Final = 0
"""Kind of a record that its publisher may not publish; no real kind."""
NOT_ALLOWED_TEXT: Final = "this login may not publish it (`pixiu acl test` says which rule decides)"
NOT_LENT: Final = 255
"""Kind of a record whose SnowflakeID is not of a worker number that its publisher was lent; no real kind."""
NOT_LENT_TEXT: Final = (
    "its SnowflakeID is not of a worker number that this login was lent and has proved, or is a derived one, which "
    'only services and logins that may `impersonate` may use (docs/security.md, "IDs of messages")'
)
NOT_SHOWN: Final = 254
"""Kind of a gateway's record for a sender of whom it has shown no login ticket; no real kind."""
NOT_SHOWN_TEXT: Final = 'its gateway has shown no login ticket of its sender (docs/security.md, "Login tickets")'
REFUSALS: Final = {NOT_ALLOWED: NOT_ALLOWED_TEXT, NOT_LENT: NOT_LENT_TEXT, NOT_SHOWN: NOT_SHOWN_TEXT}
NO_REFUSAL: Final = -1
DERIVED_ID: Final = int(Flag.DERIVED_ID)

assert HEAD.size == HEADER_SIZE


class Access(Protocol):
    """A login, as far as batches need it: `cluster.access.login_guard.LoginSession`."""

    def allows(self, action: str, target: Target) -> bool:
        """True if the login may do it."""


class Foreseeing:
    """Notes the actions of a batch, for callbacks that are asked first: `permitted(batch, count, Foreseeing(session), None)`."""

    def __init__(self, session: LoginSession) -> None:
        self._foresee = session.foresee

    def allows(self, action: str, target: Target) -> bool:
        """Note the action, and allow it."""
        self._foresee(action, target)
        return True


def permitted(
    data: bytes,
    count: int,
    access: Access,
    uin: int | None,
    more: Mapping[int, Sequence[int]] | None = None,
    lent: Lent | None = None,
) -> bytes:
    """Return a batch as its publisher may publish it.

    Args:
        data: `count` records end to end; a malformed rest is left to the core that routes it.
        uin: of the login, set as every record's sender; None: senders are left as they are.
        more: index of a mail → its further receivers.
        lent: the IDs that its publisher may use; None: any.
    """
    changed: bytearray | None = None
    unpack, end, at = HEAD.unpack_from, len(data), 0
    worker, low, high = (lent.worker, lent.low, lent.high) if lent is not None else (0, 0, 0)
    for index in range(count):
        if at + HEADER_SIZE > end:
            break
        size, kind, flags, extension, _, snowflake, key, sender = unpack(data, at)
        after = at + SIZE_FIELD + size
        if size < MIN_SIZE or after > end:
            break
        wrong_sender = uin is not None and sender != uin
        allowed = _is_allowed(data, at, after, kind, flags, extension, key, access) and (
            not more or all(access.allows(MAY_MAIL, -other) for other in more.get(index, ()))
        )
        refused = NO_REFUSAL if allowed else NOT_ALLOWED
        if (
            lent is not None
            and (flags & DERIVED_ID or snowflake & WORKER_MASK != worker or not low <= snowflake < high)
            and not (lent.may_derive if flags & DERIVED_ID else lent.covers(snowflake))
        ):
            lent.refused += 1
            refused = NOT_LENT
        if wrong_sender or refused != NO_REFUSAL:
            if changed is None:
                changed = bytearray(data)
            if wrong_sender:
                SENDER.pack_into(changed, at + SENDER_AT, uin)
            if refused != NO_REFUSAL:
                changed[at + KIND_AT] = refused
        at = after
    return data if changed is None else bytes(changed)


def _is_allowed(data: bytes, at: int, end: int, kind: int, flags: int, extension: int, key: int, access: Access) -> bool:
    if kind == MAIL:
        return access.allows(MAY_MAIL, -key)
    action = MAY_SIGNAL if kind == SIGNAL else PUBLISH
    if kind == CHAT or (kind == SIGNAL and not flags & Flag.TO_ROOM):
        return access.allows(action, -key)
    if not flags & Flag.TOPIC:
        # Rooms above this belong to free topics, whose messages name the topic.
        return key <= MAX_ROOM and access.allows(action, key)
    start = at + HEADER_SIZE + extension
    length = int.from_bytes(data[start : start + 2], "big")
    if start + 2 + length > end:
        return False
    try:
        topic = data[start + 2 : start + 2 + length].decode()
    except UnicodeDecodeError:
        return False
    return resolve(topic) == key and access.allows(action, topic)
