"""Pi's own part in the copying of a partition: its keys, what of its entries concerns a child, its sweeps. Pure.

Source: docs/doubling.md.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import ClassVar, Final

from cluster.replication.model import Entry
from cluster.store.doubling.copied import DOUBLING_KEY
from cluster.store.doubling.copying import Copying
from cluster.store.doubling.phases import Doubling
from pi.early import EARLY_KIND
from pi.inboxes.inbox_table import InboxTable
from pi.keys import INBOX_KEY, META_KEY, uin_of, unseal
from pixiu.errors import MalformedData
from pixiu.wire.inbox_operations import (
    ACKNOWLEDGE,
    APPEND,
    CLEAR,
    DELETE,
    ENTRY_KIND,
    FANOUT_HEAD,
    HEAD,
    TRIM,
    U64,
    USER_DEVICE,
    WRITER,
    GiveUp,
    Op,
    decode,
    encode,
    spans,
)

_CLOCK: Final = bytes((Op.CLOCK,))


class PiCopying(Copying):
    """Applies a doubling's entries to inboxes.

    Args:
        inboxes: of the state.
        learn: applies an entry of the parent as if it were the state's own.
        take_time: advances the state's time to an entry's.
        take_row: takes a value of the parent that belongs to no user.
        reset: forgets everything in memory.
    """

    SPACES: ClassVar[bytes] = b"TKICDHNU"
    """The sweeps find inboxes by T, so nothing else of an inbox may be deleted before it. Nothing is stored under I any more."""
    KEPT: ClassVar[tuple[bytes, ...]] = (META_KEY, DOUBLING_KEY)

    def __init__(
        self,
        inboxes: InboxTable,
        *,
        learn: Callable[[Entry], object],
        take_time: Callable[[Entry], None],
        take_row: Callable[[bytes, bytes], None],
        reset: Callable[[], None],
    ) -> None:
        super().__init__(inboxes.table)
        self._inboxes = inboxes
        self._apply_own, self._time, self._row, self._forget_all = learn, take_time, take_row, reset

    @property
    def now_s(self) -> int:
        """See `Copying`."""
        return self._inboxes.now_s

    def user_of(self, key: bytes) -> int | None:
        """See `Copying`."""
        return uin_of(key)

    def body_of(self, key: bytes, value: bytes) -> bytes:
        """See `Copying`."""
        return unseal(key, value)

    def of_child(self, kind: int, payload: bytes, doubling: Doubling) -> bytes:
        """See `Copying`."""
        return of_child(kind, payload, doubling)

    def _learn(self, entry: Entry) -> bool:
        if entry.kind == EARLY_KIND:
            return False
        self._apply_own(entry)
        return self.holds or entry.kind != ENTRY_KIND or entry.payload[:1] != _CLOCK  # else sweeps went on without this child

    def _take_time(self, entry: Entry) -> None:
        self._time(entry)

    def _take_row(self, key: bytes, body: bytes) -> None:
        self._row(key, body)

    def _reset(self) -> None:
        self._forget_all()

    def _settle(self) -> None:
        self._inboxes.encode()

    def _forget(self, key: bytes, user: int) -> None:
        if key[:1] == b"H":
            self._inboxes.heads.drop(user << 2 | INBOX_KEY.unpack(key)[2])
        elif key[:1] in b"UC":
            self._inboxes.forget_user(user)


# --- the parts of an entry that concern a child


_USERS: Final = {
    int(Op.ACKNOWLEDGES): (0, ACKNOWLEDGE, 0), int(Op.OPEN_SESSIONS): (0, USER_DEVICE, 0),
    int(Op.DROP_DEVICES): (0, USER_DEVICE, 0), int(Op.TRIMS): (0, TRIM, 0), int(Op.DELETES): (0, DELETE, 0),
    int(Op.ADD_DEVICE): (0, None, 0), int(Op.NOTE): (0, None, 0), int(Op.CLEARS): (0, CLEAR, 0),
    int(Op.APPENDS): (WRITER.size, APPEND, 8), int(Op.FANOUT): (FANOUT_HEAD, U64, 0),
}  # fmt: skip
"""By operation: bytes before its items, the format of an item, offset of the UIN in it."""
_WRITERS: Final = (int(Op.APPENDS), int(Op.FANOUT))
"""Operations that show which of a writer's streams is the newest; the child needs them even if none of their items move."""


def of_child(kind: int, payload: bytes, doubling: Doubling) -> bytes:
    """Operations of a parent's entry, without users that stay. Malformed operations change nothing on either side."""
    if kind != ENTRY_KIND:
        return b""
    try:
        found = spans(payload)
    except MalformedData:
        return payload
    parts: list[bytes] = []
    for op, begin, end in found:
        form = _USERS.get(op)
        if op == Op.GIVE_UP:
            parts.append(_keys_of_child(payload[begin - HEAD.size : end], doubling))
        elif form is None:
            parts.append(payload[begin - HEAD.size : end])
        else:
            body = _items_of_child(payload, begin, end, form, doubling)
            if body or op in _WRITERS:
                parts.append(HEAD.pack(op, len(body)) + body)
    return b"".join(parts)


def _items_of_child(
    payload: bytes, begin: int, end: int, form: tuple[int, struct.Struct | None, int], doubling: Doubling
) -> bytes:  # fmt: skip
    head, item, uin_at = form
    count, own = doubling.partitions, doubling.partition
    first = begin + head
    size = item.size if item is not None else end - first
    starts = [
        at for at in range(first, end, size or 1) if U64.unpack_from(payload, at + uin_at)[0] % count == own
    ] if end > first else []  # fmt: skip
    return payload[begin:first] + b"".join([payload[at : at + size] for at in starts])


def _keys_of_child(operation: bytes, doubling: Doubling) -> bytes:
    try:
        (given_up,) = decode(operation)
    except MalformedData:
        return operation
    assert isinstance(given_up, GiveUp)
    keys = tuple(key for key in given_up.keys if (uin := uin_of(key)) is None or doubling.moves(uin))
    return encode([GiveUp(keys)]) if keys else b""
