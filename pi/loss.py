"""Values that no replica has whole: what is made of the rest of the state in their place. Pure.

    entry            its MsgID is lost: a deleted entry, which devices are told of as a gap
    index            made again from the entries; without its entry nobody needs it
    head             made again from the entries and the keys of the index: nothing is lost
    deleted ranges   gone: what was deleted can be read again
    cursor           gone: the device gets again what is stored
    devices          gone with their cursors: each begins again as a new device
    hour, writer     made again; gone, until the writer's next request

Every replica does the same with it, whether its own value is broken or not.

Source: docs/pi.md, "On disk, and failures".
"""

from __future__ import annotations

from typing import Final

from pi.deletions import Deletions
from pi.inbox import Head, User
from pi.inbox_table import InboxTable
from pi.keys import (
    CURSOR_KEY,
    CURSOR_VALUE,
    ENTRY_KEY,
    ENTRY_VALUE,
    INBOX_KEY,
    INDEX_VALUE,
    TIME_KEY,
    USER_KEY,
    WRITER_KEY,
    cursor_key,
    deleted_key,
    entry_key,
    index_key,
)
from pi.ranges import NO_RANGES
from pixiu.errors import StateDamaged
from pixiu.wire.inbox_operations import MAX_LANE

ORDER: Final = b"UCHDEITG"
"""Each of these may need those before it to be whole."""
JUMP: Final = 1 << 20
"""An inbox without entries whose head is lost goes on so far behind what its cursors have seen: no number is given twice."""
_SIZES: Final = {
    b"U": USER_KEY.size, b"C": CURSOR_KEY.size, b"H": INBOX_KEY.size, b"D": INBOX_KEY.size, b"E": ENTRY_KEY.size,
    b"I": ENTRY_KEY.size, b"T": TIME_KEY.size, b"G": WRITER_KEY.size,
}  # fmt: skip
_COUNTER: Final = (1 << 48) - 1
_MAX: Final = (1 << 64) - 1
_ALL: Final = 1 << 62


class Loss:
    """Gives up values of a state."""

    def __init__(self, inboxes: InboxTable, deletions: Deletions) -> None:
        self._inboxes, self._deletions = inboxes, deletions

    def give_up(self, keys: tuple[bytes, ...]) -> list[int]:
        """Put something whole in the place of the values of these keys. 1 for each that is done, 0 for one that is no key."""
        known = [key for key in keys if _SIZES.get(key[:1]) == len(key)]
        for key in sorted(known, key=lambda each: (ORDER.index(each[0]), each)):
            self._give_up(key)
        return [int(key in known) for key in keys]

    def _give_up(self, key: bytes) -> None:
        table = self._inboxes.table
        match key[:1]:
            case b"U":
                self._devices(USER_KEY.unpack(key)[1])
            case b"C":
                table.delete(key)
                self._inboxes.forget_user(CURSOR_KEY.unpack(key)[1])
            case b"H":
                self._head(*INBOX_KEY.unpack(key)[1:])
            case b"D":
                _, uin, lane = INBOX_KEY.unpack(key)
                head = self._inboxes.head(uin, lane)
                head.deleted = NO_RANGES
                table.delete(key)
                self._inboxes.changed(uin, lane, head)
            case b"E":
                self._entry(*ENTRY_KEY.unpack(key)[1:])
            case b"I":
                self._index(*ENTRY_KEY.unpack(key)[1:])
            case b"T":
                table.put(key, b"")
            case _:
                table.delete(key)

    def _devices(self, uin: int) -> None:
        inboxes = self._inboxes
        for key in inboxes.table.keys(cursor_key(uin, 0, 0), cursor_key(uin, 65_535, 255), _ALL):
            inboxes.table.delete(key)
        user = User()
        user.sessions = inboxes.now_s  # above every number that was given: sessions are fewer than seconds
        inboxes.put_user(uin, user)
        inboxes.forget_user(uin)

    def _head(self, uin: int, lane: int) -> None:
        table = self._inboxes.table
        head = Head()
        entries = [ENTRY_KEY.unpack(key)[3] for key in self._keys(b"E", uin, lane)]
        if entries:
            head.last = max(entries)
            head.base = head.floor = min(entries) - 1
        else:
            head.last = head.base = head.floor = head.gap = self._seen(uin, lane) + JUMP
        for key in self._keys(b"I", uin, lane):
            msg_id = ENTRY_KEY.unpack(key)[3]
            partition = msg_id >> 56
            head.highest[partition] = max(head.highest.get(partition, 0), msg_id & _COUNTER)
        if table.get_raw(deleted_key(uin, lane)) is not None:
            head.deleted = None
        self._inboxes.replace(uin, lane, head)

    def _seen(self, uin: int, lane: int) -> int:
        """The furthest place that a cursor has come to."""
        table, seen = self._inboxes.table, 0
        for key in table.keys(cursor_key(uin, 0, 0), cursor_key(uin, 65_535, MAX_LANE + 1), _ALL):
            if key[-1] != lane:
                continue
            try:
                body = table.get(key)
            except StateDamaged:
                continue
            up_to, bits = CURSOR_VALUE.unpack(body or bytes(CURSOR_VALUE.size))
            seen = max(seen, up_to + bits.bit_length())
        return seen

    def _keys(self, space: bytes, uin: int, lane: int) -> list[bytes]:
        return self._inboxes.table.keys(ENTRY_KEY.pack(space, uin, lane, 0), ENTRY_KEY.pack(space, uin, lane, _MAX), _ALL)

    def _entry(self, uin: int, lane: int, seq: int) -> None:
        table = self._inboxes.table
        for key in self._keys(b"I", uin, lane):
            try:
                body = table.get(key)
            except StateDamaged:
                continue
            if body is not None and INDEX_VALUE.unpack(body)[0] == seq:
                table.delete(key)
        head = self._inboxes.head(uin, lane)
        if not head.base < seq <= head.last:
            table.delete(entry_key(uin, lane, seq))
            return
        table.put(entry_key(uin, lane, seq), ENTRY_VALUE.pack(0, self._inboxes.now_s))
        self._deletions.delete(uin, lane, seq, seq)  # where there are too many ranges already, MsgID 0 says the same
        head.oldest_s = 0

    def _index(self, uin: int, lane: int, msg_id: int) -> None:
        table, key = self._inboxes.table, index_key(uin, lane, msg_id)
        table.delete(key)
        for place in self._keys(b"E", uin, lane):
            try:
                body = table.get(place)
            except StateDamaged:
                continue
            if body is not None and ENTRY_VALUE.unpack(body)[0] == msg_id:
                table.put(key, INDEX_VALUE.pack(ENTRY_KEY.unpack(place)[3]))
