"""What is known of inboxes, users and cursors: objects kept while they are used, over values that wait to be written. Pure.

    State ──▶ Expiry ──▶ Deletions ──▶ InboxTable ──▶ Table ──▶ store
          └─▶ Reader ──▶ Deletions

Everything that decides stands above this and knows only what is below it.

Source: docs/pi.md.
"""

from __future__ import annotations

from typing import Final

from pi.caches import Cache
from pi.inbox import Device, Head, User
from pi.keys import CURSOR_VALUE, ENTRY_VALUE, INDEX_VALUE, cursor_key, entry_key, head_key, index_key, user_key
from pi.unwritten import Table
from pixiu.errors import StateDamaged
from pixiu.wire.cursor import Cursor
from pixiu.wire.inbox_operations import DEFAULT_LIMITS, MAX_LANE, Limits

MAX_HEADS: Final = 200_000
MAX_USERS: Final = 100_000
"""Heads and users kept in memory. Policy: what was not used lately goes; it is in the store."""


class InboxTable:
    """Heads, users, cursors and entries as objects, cached over the stored values.

    Args:
        table: the values.
        max_heads, max_users: kept in memory.

    Raises StateDamaged from every method when a value has a wrong CRC, or is missing.
    """

    def __init__(self, table: Table, max_heads: int = MAX_HEADS, max_users: int = MAX_USERS) -> None:
        self.table = table
        self.now_s = 0
        """The log's time."""
        self.limits: Limits = DEFAULT_LIMITS
        self.dropped = 0
        """Entries that went unacknowledged, in all inboxes."""
        self.heads: Cache[Head] = Cache(max_heads)
        """By UIN << 2 | lane, as `dirty`."""
        self.dirty: dict[int, Head] = {}
        """Heads that are to become values again: see `encode`."""
        self._users: Cache[User] = Cache(max_users)
        self._sizes = max_heads, max_users

    def encode(self) -> None:
        """Turn heads that changed into values."""
        for key, head in self.dirty.items():
            self.table.put(head_key(key >> 2, key & 3), head.encode())
        self.dirty = {}

    def forget_all(self) -> None:
        """Everything is looked up again; `encode` comes first."""
        self.heads, self.dirty, self._users = Cache(self._sizes[0]), {}, Cache(self._sizes[1])

    # --- inboxes

    def head(self, uin: int, lane: int) -> Head:
        """An inbox; a new one where there is none."""
        key = uin << 2 | lane
        head = self.heads.get(key) or self.dirty.get(key)
        if head is None:
            body = self.table.get(head_key(uin, lane))
            head = Head() if body is None else Head.decode(body)
        self.heads.put(key, head)
        return head

    def changed(self, uin: int, lane: int, head: Head) -> None:
        """An inbox is to be stored again."""
        self.dirty[uin << 2 | lane] = head

    def entry(self, uin: int, lane: int, seq: int) -> tuple[int, int]:
        """(MsgID, when it was appended) of an entry that must be there."""
        body = self.table.get(entry_key(uin, lane, seq))
        if body is None:
            raise StateDamaged(f"entry {seq} of lane {lane} of inbox {uin:016x} is missing; repair this replica from a peer")
        found: tuple[int, int] = ENTRY_VALUE.unpack(body)
        return found

    def number_of(self, uin: int, lane: int, msg_id: int) -> int:
        """The InboxSeq of a MsgID that is stored, or 0."""
        body = self.table.get(index_key(uin, lane, msg_id))
        return 0 if body is None else int(INDEX_VALUE.unpack(body)[0])

    def replace(self, uin: int, lane: int, head: Head) -> None:
        """Another head takes an inbox's place."""
        self.heads.put(uin << 2 | lane, head)
        self.changed(uin, lane, head)

    # --- users and their devices

    def user(self, uin: int) -> User:
        """A user; a new one where there is none."""
        user = self._users.get(uin)
        if user is None:
            body = self.table.get(user_key(uin))
            user = User() if body is None else User.decode(body)
            self._users.put(uin, user)
        return user

    def forget_user(self, uin: int) -> None:
        """What is known of a user is looked up again."""
        self._users.drop(uin)

    def put_user(self, uin: int, user: User) -> None:
        """Store a user."""
        self.table.put(user_key(uin), user.encode())

    def cursor(self, uin: int, number: int, device: Device, lane: int) -> Cursor:
        """A device's cursor."""
        cursor = device.cursors.get(lane)
        if cursor is None:
            body = self.table.get(cursor_key(uin, number, lane))
            cursor = device.cursors[lane] = Cursor() if body is None else Cursor(*CURSOR_VALUE.unpack(body))
        return cursor

    def put_cursor(self, uin: int, number: int, lane: int, cursor: Cursor) -> None:
        """Store a device's cursor."""
        self.table.put(cursor_key(uin, number, lane), CURSOR_VALUE.pack(cursor.up_to, cursor.bits))

    def forget_cursors(self, uin: int, number: int) -> None:
        """Remove a device's cursors."""
        for lane in range(MAX_LANE + 1):
            key = cursor_key(uin, number, lane)
            if self.table.get_raw(key) is not None:
                self.table.delete(key)

    def counts(self, device: Device) -> bool:
        """Whether an inbox waits for a device."""
        return self.now_s - device.seen_s < self.limits.device_age_s
