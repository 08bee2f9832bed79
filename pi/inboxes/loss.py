"""Replacement of values that no replica has undamaged, from the rest of the state. Pure.

    chunk            the MsgIDs of its entries are lost: deleted entries, reported to devices as a gap
    head             made again from the chunks: nothing is lost
    deleted ranges   gone: deleted entries can be read again
    cursor           gone: the device gets all stored entries again
    devices          gone with their cursors: each begins again as a new device; notes stay
    note             gone
    hour, writer     made again; gone, until the writer's next request

Every replica does the same, even if its own value is undamaged.

Source: docs/pi.md, "On disk, and failures".
"""

from __future__ import annotations

from typing import Final

from pi.inboxes.chunk import Chunk
from pi.inboxes.deletions import Deletions
from pi.inboxes.inbox import Head, User
from pi.inboxes.inbox_table import InboxTable
from pi.inboxes.ranges import NO_RANGES
from pi.keys import (
    CHUNK_ENTRIES,
    CHUNK_KEY,
    CURSOR_KEY,
    CURSOR_VALUE,
    INBOX_KEY,
    NOTE_VALUE,
    NOTES_LANE,
    TIME_KEY,
    USER_KEY,
    WRITER_KEY,
    chunk_key,
    cursor_key,
    deleted_key,
    note_key,
    time_key,
    user_key,
)
from pixiu.errors import StateDamaged
from pixiu.ids import msg_partition, msg_sequence
from pixiu.wire.inbox_operations import MAX_LANE, MAX_NOTE

ORDER: Final = b"NUCHDKTG"
"""Order in which values are replaced: each may need those before it."""
JUMP: Final = 1 << 20
"""Numbers skipped in an inbox without entries whose head is lost, after the highest one seen by its cursors: no number is given
twice."""
_SIZES: Final = {
    b"U": USER_KEY.size, b"C": CURSOR_KEY.size, b"H": INBOX_KEY.size, b"D": INBOX_KEY.size, b"K": CHUNK_KEY.size,
    b"N": INBOX_KEY.size, b"T": TIME_KEY.size, b"G": WRITER_KEY.size,
}  # fmt: skip
_MAX: Final = (1 << 64) - 1
_ALL: Final = 1 << 62


class Loss:
    """Gives up values of a state."""

    def __init__(self, inboxes: InboxTable, deletions: Deletions) -> None:
        self._inboxes, self._deletions = inboxes, deletions

    def give_up(self, keys: tuple[bytes, ...]) -> list[int]:
        """Replace the values of these keys. Returns 1 for each key that was replaced, 0 for an invalid one."""
        known = [key for key in keys if _SIZES.get(key[:1]) == len(key)]
        self._inboxes.encode()  # replacements are made from values
        for key in sorted(known, key=lambda each: (ORDER.index(each[0]), each)):
            self._give_up(key, frozenset(known))
        return [int(key in known) for key in keys]

    def _give_up(self, key: bytes, lost: frozenset[bytes]) -> None:
        table = self._inboxes.table
        match key[:1]:
            case b"N":
                self._note(key, lost)
            case b"U":
                self._devices(USER_KEY.unpack(key)[1])
            case b"C":
                table.delete(key)
                self._inboxes.forget_user(CURSOR_KEY.unpack(key)[1])
            case b"H":
                _, uin, lane = INBOX_KEY.unpack(key)
                self._head(uin, lane, lost)
            case b"D":
                _, uin, lane = INBOX_KEY.unpack(key)
                head = self._inboxes.head(uin, lane)
                head.deleted = NO_RANGES
                table.delete(key)
                self._inboxes.changed(uin, lane, head)
            case b"K":
                self._chunk(key)
            case b"T":
                table.put(key, b"")
            case _:
                table.delete(key)

    def _devices(self, uin: int) -> None:
        inboxes = self._inboxes
        for key in inboxes.table.keys(cursor_key(uin, 0, 0), cursor_key(uin, 65_535, 255), _ALL):
            inboxes.table.delete(key)
        user = User()
        user.sessions = inboxes.now_s  # above every number given before: there are fewer sessions than seconds
        for key in inboxes.table.keys(note_key(uin, 0), note_key(uin, MAX_NOTE + 1), _ALL):
            user.names |= 1 << key[-1]
            user.generation, user.hour = max(user.generation, self._generation(key)), inboxes.now_s // 3600
            inboxes.table.put(time_key(user.hour, uin, NOTES_LANE), b"")
        inboxes.put_user(uin, user)
        inboxes.forget_user(uin)

    def _generation(self, key: bytes) -> int:
        """The generation of a note; the lowest one if it is broken."""
        try:
            body = self._inboxes.table.get(key)
        except StateDamaged:
            return 1
        return int(NOTE_VALUE.unpack_from(body or bytes(NOTE_VALUE.size))[0])

    def _note(self, key: bytes, lost: frozenset[bytes]) -> None:
        inboxes = self._inboxes
        _, uin, name = INBOX_KEY.unpack(key)
        inboxes.table.delete(key)
        if user_key(uin) not in lost:
            user = inboxes.user(uin)
            user.names &= ~(1 << name)
            inboxes.put_user(uin, user)

    def _head(self, uin: int, lane: int, lost: frozenset[bytes]) -> None:
        table = self._inboxes.table
        head = Head()
        found = table.keys(chunk_key(uin, lane, 1), CHUNK_KEY.pack(b"K", uin, lane, _MAX), _ALL)
        keys = [key for key in found if _is_aligned(key)]
        for key in keys:
            begin = CHUNK_KEY.unpack(key)[3]
            first, head.last = begin, begin + CHUNK_ENTRIES - 1
            if key not in lost:
                chunk = Chunk.decode(begin, key, table.get_raw(key))
                for msg_id, _ in chunk:
                    partition = msg_partition(msg_id)
                    if msg_id:
                        head.highest[partition] = max(head.highest.get(partition, 0), msg_sequence(msg_id))
                first, head.last = chunk.first, chunk.last
            if key == keys[0]:
                head.base = head.floor = first - 1
        if not keys:
            head.last = head.base = head.floor = head.gap = self._seen(uin, lane) + JUMP
        if table.get_raw(deleted_key(uin, lane)) is not None:
            head.deleted = None
        self._inboxes.replace(uin, lane, head)

    def _seen(self, uin: int, lane: int) -> int:
        """The highest InboxSeq that a cursor of the inbox has seen."""
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

    def _chunk(self, key: bytes) -> None:
        inboxes = self._inboxes
        _, uin, lane, begin = CHUNK_KEY.unpack(key)
        head = inboxes.head(uin, lane)
        first, last = max(begin, head.base + 1), min(begin + CHUNK_ENTRIES - 1, head.last)
        if first > last or not _is_aligned(key):
            inboxes.table.delete(key)
            return
        chunk = Chunk(first)
        for _ in range(first, last + 1):
            chunk.append(0, inboxes.now_s)
        inboxes.keep(uin, lane, head, chunk)
        self._deletions.delete(uin, lane, first, last)  # if there are too many ranges already, MsgID 0 has the same effect
        head.oldest_s = 0


def _is_aligned(key: bytes) -> bool:
    """True if a chunk may have this key; else the disk changed it."""
    return int(CHUNK_KEY.unpack(key)[3]) % CHUNK_ENTRIES == 1
