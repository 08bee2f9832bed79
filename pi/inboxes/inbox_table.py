"""Inboxes, users and cursors as objects that are kept while used, over values that wait to be written. Pure.

    State ──▶ Expiry ──▶ Deletions ──▶ InboxTable ──▶ Table ──▶ store
          └─▶ Reader ──▶ Deletions

Layers that decide stand above this one and know only what is below them.

Source: docs/pi.md.
"""

from __future__ import annotations

from typing import Final

from pi.inboxes.caches import Cache
from pi.inboxes.chunk import Chunk
from pi.inboxes.inbox import Device, Head, User
from pi.inboxes.unwritten import Changes, Table
from pi.keys import CHUNK_ENTRIES, CURSOR_VALUE, ValueDamaged, chunk_key, cursor_key, head_key, seal, user_key
from pixiu.ids import msg_partition, msg_sequence
from pixiu.wire.cursor import Cursor
from pixiu.wire.inbox_operations import DEFAULT_LIMITS, MAX_LANE, Limits

MAX_HEADS: Final = 200_000
MAX_USERS: Final = 100_000
"""Limits of heads and users kept in memory. Policy: those not used lately are dropped; they are in the store."""
_NOT_KNOWN: Final = 1 << 64


class InboxTable:
    """Heads, users, cursors and entries as objects, cached over the stored values.

    Args:
        table: the values.
        max_heads, max_users: kept in memory.

    Every method raises StateDamaged when a value has a wrong CRC; a chunk raises it when one of its entries is requested.
    """

    def __init__(self, table: Table, max_heads: int = MAX_HEADS, max_users: int = MAX_USERS) -> None:
        self.table = table
        self.now_s = 0
        """The log's time."""
        self.limits: Limits = DEFAULT_LIMITS
        self.dropped = 0
        """Entries dropped unacknowledged, in all inboxes."""
        self.heads: Cache[Head] = Cache(max_heads)
        """By UIN << 2 | lane, as in `dirty`."""
        self.dirty: dict[int, Head] = {}
        """Changed heads that must be encoded: see `encode`."""
        self.freezing: dict[int, Head] = {}
        """Heads that belong to the frozen changes and are not encoded yet. `head` encodes one before it returns it, because its
        caller may change it."""
        self._users: Cache[User] = Cache(max_users)
        self._sizes = max_heads, max_users

    def encode(self) -> None:
        """Encode changed heads, and the chunks with their newest entries."""
        self.encode_frozen(len(self.freezing))
        for key, head in self.dirty.items():
            self._encode(key, head, self.table.changes)
        self.dirty = {}

    def freeze(self) -> None:
        """Move the changed heads to the changes being frozen; `encode_frozen` must follow until it returns False."""
        self.freezing, self.dirty = self.dirty, {}

    def encode_frozen(self, count: int) -> bool:
        """Encode at most so many heads of the frozen changes. Returns True if there are more."""
        frozen = self.table.frozen
        for _ in range(min(count, len(self.freezing))):
            self._encode(*self.freezing.popitem(), frozen)
        return bool(self.freezing)

    def _encode(self, key: int, head: Head, into: Changes) -> None:
        uin, lane, tail = key >> 2, key & 3, head.tail
        stored_under = head_key(uin, lane)
        into[stored_under] = seal(stored_under, head.encode())
        if tail is not None and tail.changed:
            self._store(uin, lane, tail, into)

    def forget_all(self) -> None:
        """Drop all objects, so that they are looked up again; call `encode` first."""
        self.heads, self.dirty, self._users = Cache(self._sizes[0]), {}, Cache(self._sizes[1])

    # --- inboxes

    def head(self, uin: int, lane: int) -> Head:
        """Return an inbox, a new one if there is none."""
        key = uin << 2 | lane
        head = self.heads.get(key) or self.dirty.get(key)
        if key in self.freezing:
            head = self.freezing.pop(key)
            self._encode(key, head, self.table.frozen)
        if head is None:
            body = self.table.get(head_key(uin, lane))
            head = Head() if body is None else Head.decode(body)
        self.heads.put(key, head)
        return head

    def changed(self, uin: int, lane: int, head: Head) -> None:
        """Note that an inbox must be stored again."""
        self.dirty[uin << 2 | lane] = head

    def remove(self, uin: int, lane: int) -> None:
        """Remove the head of an inbox without entries."""
        self.head(uin, lane)  # encodes it if it is being frozen, so that it is not written after this
        self.heads.drop(uin << 2 | lane)
        self.dirty.pop(uin << 2 | lane, None)
        if self.table.get_raw(head_key(uin, lane)) is not None:
            self.table.delete(head_key(uin, lane))

    def replace(self, uin: int, lane: int, head: Head) -> None:
        """Replace an inbox's head."""
        self.heads.put(uin << 2 | lane, head)
        self.changed(uin, lane, head)

    # --- entries

    def chunk(self, uin: int, lane: int, head: Head, seq: int) -> Chunk:
        """Return the chunk that an entry is in. A caller that changes it must `keep` it: it may be a copy."""
        tail = head.tail
        if tail is not None and tail.number == (seq - 1) // CHUNK_ENTRIES:
            return tail
        key = chunk_key(uin, lane, seq)
        return Chunk.decode(seq, key, self.table.get_raw(key))

    def keep(self, uin: int, lane: int, head: Head, chunk: Chunk) -> None:
        """Store a chunk that was changed or replaced."""
        if chunk.number == (head.last - 1) // CHUNK_ENTRIES:
            head.tail, chunk.changed = chunk, True
            self.changed(uin, lane, head)
        else:
            self._store(uin, lane, chunk, self.table.changes)

    def tail(self, uin: int, lane: int, head: Head) -> Chunk:
        """Return the chunk for the next entry. After an append the caller must call `changed` for the head."""
        tail, last = head.tail, head.last
        if tail is not None:
            if last % CHUNK_ENTRIES:
                return tail
            if tail.changed:
                self._store(uin, lane, tail, self.table.changes)
        head.tail = tail = self.chunk(uin, lane, head, last) if last % CHUNK_ENTRIES and head.base < last else Chunk(last + 1)
        return tail

    def cut(self, uin: int, lane: int, head: Head, base: int) -> None:
        """Remove entries up to a new base."""
        table, first, begin = self.table, head.base // CHUNK_ENTRIES, base // CHUNK_ENTRIES
        if base == head.last:
            head.tail = None
            begin = (base - 1) // CHUNK_ENTRIES + 1
        for number in range(first, begin):
            table.delete(chunk_key(uin, lane, number * CHUNK_ENTRIES + 1))
        head.base = base
        if base < head.last and base % CHUNK_ENTRIES:
            chunk = self.chunk(uin, lane, head, base)
            chunk.cut(base)
            self.keep(uin, lane, head, chunk)
        self.changed(uin, lane, head)

    def number_of(self, uin: int, lane: int, msg_id: int) -> int:
        """Return the InboxSeq of a stored MsgID, or 0. Raises StateDamaged."""
        head = self.head(uin, lane)
        return self.find(uin, lane, head, msg_id) if msg_sequence(msg_id) <= head.highest.get(msg_partition(msg_id), -1) else 0

    def find(self, uin: int, lane: int, head: Head, msg_id: int) -> int:
        """Return the InboxSeq of a MsgID that may be in the inbox by its highest counter, or 0; searches from the newest chunk on.
        Raises StateDamaged."""
        seq, partition, counter = head.last, msg_partition(msg_id), msg_sequence(msg_id)
        while seq > head.base:
            chunk = self.chunk(uin, lane, head, seq)
            found = chunk.find(msg_id)
            if found or counter >= chunk.before.get(partition, _NOT_KNOWN):
                return found
            seq = chunk.first - 1
        return 0

    def _store(self, uin: int, lane: int, chunk: Chunk, into: Changes) -> None:
        key = chunk_key(uin, lane, chunk.first)
        into[key] = chunk.encode(key)
        chunk.changed = False

    # --- users and their devices

    def user(self, uin: int) -> User:
        """Return a user, a new one if there is none."""
        user = self._users.get(uin)
        if user is None:
            body = self.table.get(user_key(uin))
            user = User() if body is None else User.decode(body)
            self._users.put(uin, user)
        return user

    def forget_user(self, uin: int) -> None:
        """Drop a user's object, so that it is looked up again."""
        self._users.drop(uin)

    def put_user(self, uin: int, user: User) -> None:
        """Store a user."""
        self.table.put(user_key(uin), user.encode())

    def remove_user(self, uin: int) -> None:
        """Remove a user without devices."""
        self._users.drop(uin)
        self.table.delete(user_key(uin))

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
        """True if an inbox waits for a device."""
        return self.now_s - device.seen_s < self.limits.device_age_s


class Entries:
    """Looks up successive entries of an inbox that does not change meanwhile."""

    __slots__ = ("_chunk", "_head", "_inboxes", "_lane", "_uin")

    def __init__(self, inboxes: InboxTable, uin: int, lane: int, head: Head) -> None:
        self._inboxes, self._uin, self._lane, self._head = inboxes, uin, lane, head
        self._chunk: Chunk | None = head.tail

    def at(self, seq: int) -> tuple[int, int]:
        """(MsgID, append time) of an entry that must be there. Raises StateDamaged."""
        chunk = self._chunk
        if chunk is None or chunk.number != (seq - 1) // CHUNK_ENTRIES:
            self._chunk = chunk = self._inboxes.chunk(self._uin, self._lane, self._head, seq)
        try:
            return chunk.at(seq)
        except IndexError as missing:
            inbox = f"lane {self._lane} of inbox {self._uin:016x}"
            key = chunk_key(self._uin, self._lane, seq)
            raise ValueDamaged(f"entry {seq} of {inbox} is missing; repair this replica from a peer", key) from missing
