"""Inboxes, cursors, sessions and devices: what committed entries of the log make of them. Pure, over a table.

Everything is decided here, when an entry is applied, from the state alone, in the order of the log; so every replica gets the
same numbers. Time is the time in the log's entries, and never goes back.

Source: seed 004 §6.2; DESIGN sections 9 ("Mail") and 11 ("Pi").
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Final
from zlib import crc32

from cluster.replication.model import START, Entry, Position
from pi.caches import Cache
from pi.deletions import Deletions
from pi.expiry import PURGE_A_TOUCH, Expiry
from pi.inbox import MAX_DEVICES, Device, Head, User
from pi.keys import (
    CRC,
    CURSOR_VALUE,
    ENTRY_KEY,
    ENTRY_VALUE,
    EPOCH_S,
    INDEX_VALUE,
    META_KEY,
    WRITER_VALUE,
    cursor_key,
    entry_key,
    head_key,
    index_key,
    time_key,
    user_key,
    writer_key,
)
from pi.reading import Read as Read
from pi.reading import Reader
from pi.reading import Refusal as Refusal
from pi.unwritten import Changes, Store, Table
from pixiu.errors import MalformedData, StateDamaged
from pixiu.wire.cursor import Cursor
from pixiu.wire.inbox_operations import (
    ACKNOWLEDGE,
    APPEND,
    DEFAULT_LIMITS,
    DELETE,
    ENTRY_KIND,
    LANE_SHIFT,
    MAX_LANE,
    MAX_RECEIVERS,
    TRIM,
    U64,
    USER_DEVICE,
    Acknowledges,
    AddDevice,
    Appends,
    Clock,
    Code,
    Deletes,
    DropDevices,
    Fanout,
    Limits,
    OpenSessions,
    Operation,
    Trims,
    Writer,
    decode,
)

META: Final = struct.Struct("<BIQIQ13s13s")
META_VERSION: Final = 1
SEEN_STEP_S: Final = 3600
"""A device's time is written again when it is older than this: what depends on it counts in days."""
MAX_HEADS: Final = 200_000
MAX_USERS: Final = 100_000
"""Heads and users kept in memory. Policy: what was not used lately goes; it is in the store."""
_COUNTER: Final = (1 << 48) - 1
_HOUR_S: Final = 3600

Results = list[int]
"""One number for each item of an operation: an InboxSeq, a session or a DeviceID, 0 for done, `-Code` for refused."""


class State:
    """A partition's inboxes.

    Args:
        store: opened.
        max_heads, max_users: kept in memory.

    Raises StateDamaged from every method when a value has a wrong CRC; after one from `apply` the state must not be used.
    """

    def __init__(self, store: Store, max_heads: int = MAX_HEADS, max_users: int = MAX_USERS) -> None:
        self.table = Table(store)
        self.applied = START
        """The last entry of the log that is in the state."""
        self.now_s = 0
        """The log's time."""
        self.limits: Limits = DEFAULT_LIMITS
        self.dropped = 0
        """Entries that went unacknowledged, in all inboxes."""
        self.damaged_entries = 0
        """Entries of the log that no version of this program wrote: passed over."""
        self._heads: Cache[Head] = Cache(max_heads)
        self._dirty: dict[int, Head] = {}
        self._users: Cache[User] = Cache(max_users)
        self._writers: dict[int, tuple[int, int]] = {}
        """Worker → (epoch, highest generation)."""
        self.expiry = Expiry(self)
        self.deletions = Deletions(self)
        self._reader = Reader(self)
        self._handlers: dict[type[Any], Callable[[Any], Results]] = {
            Appends: self._appends,
            Fanout: self._fanout,
            Acknowledges: self._acknowledges,
            OpenSessions: self._open_sessions,
            AddDevice: self._add_device,
            DropDevices: self._drop_devices,
            Trims: self._trims,
            Deletes: self._deletes,
            Clock: self._clock,
        }
        self._load()

    def _load(self) -> None:
        meta = self.table.get(META_KEY)
        if meta is None:
            return
        version, epoch, counter, self.now_s, self.dropped, near, far = META.unpack_from(meta)
        if version != META_VERSION:
            raise StateDamaged(f"the state has version {version}, this program reads {META_VERSION}")
        self.applied = Position(epoch, counter)
        self.limits = Limits.decode(meta[META.size :])
        self.expiry.near, self.expiry.far = near, far
        for key in self.table.keys(writer_key(0), b"H", 1 << 16):
            body = self.table.get(key)
            assert body is not None
            self._writers[int.from_bytes(key[1:], "big")] = WRITER_VALUE.unpack(body)

    # --- transactions

    def freeze(self) -> Changes:
        """Everything that changed since the last time, with the applied position, for one transaction of the store."""
        self._encode()
        return self.table.freeze()

    def unstored(self) -> Changes:
        """A copy of everything that a transaction has not brought into the store, or may be bringing there just now."""
        self._encode()
        return {**self.table.frozen, **self.table.changes}

    def _encode(self) -> None:
        """What is kept as objects becomes values."""
        for key, head in self._dirty.items():
            self.table.put(head_key(key >> 2, key & 3), head.encode())
        self._dirty = {}
        meta = META.pack(META_VERSION, *self.applied, self.now_s, self.dropped, self.expiry.near, self.expiry.far)
        self.table.put(META_KEY, meta + self.limits.encode())

    @property
    def unwritten(self) -> int:
        """Changes that wait for a transaction."""
        return len(self.table.changes) + len(self._dirty)

    # --- applying

    def apply(self, entries: Sequence[Entry]) -> list[list[Results]]:
        """Take committed entries that follow `applied`. For each, the results of each of its operations."""
        found: list[list[Results]] = []
        for entry in entries:
            if entry.counter != self.applied.counter + 1:
                raise ValueError(f"{entry.position} does not follow {self.applied}")
            found.append(self._apply_one(entry))
            self.applied = Position(entry.epoch, entry.counter)
        return found

    def _apply_one(self, entry: Entry) -> list[Results]:
        self._epoch = entry.epoch
        self.now_s = max(self.now_s, min(entry.at_us // 1_000_000 - EPOCH_S, 0xFFFF_FFFF))
        if entry.kind != ENTRY_KIND:
            return []
        try:
            operations: list[Operation] = decode(entry.payload)
        except MalformedData:
            self.damaged_entries += 1
            return []
        return [self._handlers[type(operation)](operation) for operation in operations]

    def _refuses(self, writer: Writer) -> bool:
        """Whether a stream of appends is no longer its writer's."""
        worker, generation, epoch = writer
        if epoch != self._epoch:
            return True
        known = self._writers.get(worker)
        if known is not None and known[0] == epoch and generation <= known[1]:
            return generation < known[1]
        self._writers[worker] = (epoch, generation)
        self.table.put(writer_key(worker), WRITER_VALUE.pack(epoch, generation))
        return False

    def _appends(self, operation: Appends) -> Results:
        if self._refuses(operation.writer):
            return [-Code.STALE_WRITER] * (len(operation.items) // APPEND.size)
        return self._insert(APPEND.iter_unpack(operation.items))

    def _fanout(self, operation: Fanout) -> Results:
        count = len(operation.receivers) // U64.size
        if self._refuses(operation.writer):
            return [-Code.STALE_WRITER] * count
        if count > MAX_RECEIVERS:
            return [-Code.TOO_MANY_RECEIVERS] * count
        msg_id = operation.msg_id
        return self._insert((msg_id, uin) for (uin,) in U64.iter_unpack(operation.receivers))

    def _insert(self, pairs: Any) -> Results:
        """The hot path: (MsgID, UIN) of each append."""
        found: Results = []
        heads, dirty, changes = self._heads.young, self._dirty, self.table.changes
        pack_key, pack_value, pack_index, pack_crc = ENTRY_KEY.pack, ENTRY_VALUE.pack, INDEX_VALUE.pack, CRC.pack
        now_s, cap, hour = self.now_s, self.limits.cap, self.now_s // _HOUR_S
        for msg_id, uin in pairs:
            lane = msg_id >> LANE_SHIFT & 3
            key = uin << 2 | lane
            head = heads.get(key)
            if head is None:
                head = self.head(uin, lane)
                heads = self._heads.young
            partition, counter = msg_id >> 56, msg_id & _COUNTER
            if counter > head.highest.get(partition, -1):
                highest = counter
            else:
                stored = self._number_of(uin, lane, msg_id)
                if stored:
                    found.append(stored)
                    continue
                highest = head.highest[partition]
            if head.last - head.floor >= cap and not self._make_room(uin, lane, head):
                found.append(-Code.INBOX_FULL)
                continue
            head.highest[partition] = highest
            head.last = seq = head.last + 1
            dirty[key] = head
            entry, index = pack_key(b"E", uin, lane, seq), pack_key(b"I", uin, lane, msg_id)
            value = pack_value(msg_id, now_s)
            changes[entry] = value + pack_crc(crc32(entry + value))
            value = pack_index(seq)
            changes[index] = value + pack_crc(crc32(index + value))
            if head.hour != hour:
                head.hour = hour
                self.table.put(time_key(hour, uin, lane), b"")
            found.append(seq)
        return found

    def _make_room(self, uin: int, lane: int, head: Head) -> bool:
        """Whether an inbox at its cap takes one more: its oldest goes, unless it is to refuse."""
        self.expiry.settle(uin, lane, head, PURGE_A_TOUCH)
        if head.last - head.floor < self.limits.cap:
            return True
        if self.limits.refuse_full:
            return False
        self.expiry.drop(uin, lane, head, head.last - self.limits.cap + 1)
        self.expiry.settle(uin, lane, head, PURGE_A_TOUCH)
        return True

    def _number_of(self, uin: int, lane: int, msg_id: int) -> int:
        """The InboxSeq of a MsgID that is stored, or 0."""
        body = self.table.get(index_key(uin, lane, msg_id))
        return 0 if body is None else int(INDEX_VALUE.unpack(body)[0])

    # --- devices

    def _acknowledges(self, operation: Acknowledges) -> Results:
        return [self._code(self._acknowledge, *item) for item in ACKNOWLEDGE.iter_unpack(operation.items)]

    @staticmethod
    def _code(what: Callable[..., int], *arguments: Any) -> int:
        try:
            return what(*arguments)
        except Refusal as refusal:
            return -refusal.code

    def _acknowledge(self, uin: int, number: int, lane: int, session: int, up_to: int, bits: int) -> int:
        user, device = self._session(uin, number, lane, session)
        head = self.head(uin, lane)
        if up_to + bits.bit_length() > head.last:
            raise Refusal(Code.CURSOR_BEYOND_END)
        self._seen(uin, user, device)
        cursor = self.cursor(uin, number, device, lane)
        if cursor.acknowledge(up_to, bits):
            self.table.put(cursor_key(uin, number, lane), CURSOR_VALUE.pack(cursor.up_to, cursor.bits))
            self.expiry.settle(uin, lane, head, PURGE_A_TOUCH)
        return 0

    def _session(self, uin: int, number: int, lane: int, session: int) -> tuple[User, Device]:
        """The device of a request. Raises Refusal."""
        user = self.user(uin)
        device = user.devices.get(number)
        if device is None:
            raise Refusal(Code.UNKNOWN_DEVICE)
        if session < device.session:
            raise Refusal(Code.OLD_SESSION)
        if session > device.session or lane > MAX_LANE:
            raise Refusal(Code.INVALID_ARGUMENT)
        return user, device

    def _seen(self, uin: int, user: User, device: Device) -> None:
        if self.now_s - device.seen_s >= SEEN_STEP_S:
            device.seen_s = self.now_s
            self._put_user(uin, user)

    def _open_sessions(self, operation: OpenSessions) -> Results:
        return [self._code(self._open_session, *item) for item in USER_DEVICE.iter_unpack(operation.items)]

    def _open_session(self, uin: int, number: int) -> int:
        user = self.user(uin)
        if number not in user.devices:
            if number:
                raise Refusal(Code.UNKNOWN_DEVICE)
            self._add(uin, user, 0, b"")
        device = user.devices[number]
        user.sessions += 1
        device.session, device.seen_s = user.sessions, self.now_s
        self._put_user(uin, user)
        return user.sessions

    def _add_device(self, operation: AddDevice) -> Results:
        return [self._code(self._device_of, operation.uin, operation.client_id)]

    def _device_of(self, uin: int, client_id: bytes) -> int:
        user = self.user(uin)
        for number, device in user.devices.items():
            if device.client_id == client_id:
                self._seen(uin, user, device)
                return number
        number = user.free_number() if client_id else 0
        self._add(uin, user, number, client_id)
        user.newest = number or user.newest
        self._put_user(uin, user)
        return number

    def _add(self, uin: int, user: User, number: int, client_id: bytes) -> None:
        """Room for one more: a device that was not seen for long makes it. Raises Refusal."""
        if len(user.devices) >= MAX_DEVICES:
            oldest = min(user.devices, key=lambda each: (user.devices[each].seen_s, each))
            if self.counts(user.devices[oldest]):
                raise Refusal(Code.TOO_MANY_DEVICES)
            self._forget(uin, user, oldest)
        further = any(self.counts(device) for device in user.devices.values())
        user.devices[number] = device = Device(0, self.now_s, client_id)
        if further and self.limits.from_now:
            self._begin_at_the_end(uin, number, device)

    def _begin_at_the_end(self, uin: int, number: int, device: Device) -> None:
        """Somebody else has, or gets, what is in the inboxes; a user's first device gets it in any case."""
        for lane in range(MAX_LANE + 1):
            if last := self.head(uin, lane).last:
                device.cursors[lane] = Cursor(last)
                self.table.put(cursor_key(uin, number, lane), CURSOR_VALUE.pack(last, 0))

    def _drop_devices(self, operation: DropDevices) -> Results:
        return [self._code(self._drop_device, *item) for item in USER_DEVICE.iter_unpack(operation.items)]

    def _drop_device(self, uin: int, number: int) -> int:
        user = self.user(uin)
        if number not in user.devices:
            raise Refusal(Code.UNKNOWN_DEVICE)
        self._forget(uin, user, number)
        self._put_user(uin, user)
        for lane in range(MAX_LANE + 1):
            self.expiry.settle(uin, lane, self.head(uin, lane), PURGE_A_TOUCH)
        return 0

    def _forget(self, uin: int, user: User, number: int) -> None:
        del user.devices[number]
        for lane in range(MAX_LANE + 1):
            key = cursor_key(uin, number, lane)
            if self.table.get_raw(key) is not None:
                self.table.delete(key)

    def counts(self, device: Device) -> bool:
        """Whether an inbox waits for a device."""
        return self.now_s - device.seen_s < self.limits.device_age_s

    # --- time

    def _trims(self, operation: Trims) -> Results:
        return [self._trim(*item) for item in TRIM.iter_unpack(operation.items)]

    def _trim(self, uin: int, lane: int, up_to: int) -> int:
        if lane > MAX_LANE:
            return -Code.INVALID_ARGUMENT
        head = self.head(uin, lane)
        self.expiry.drop(uin, lane, head, min(up_to, head.last))
        self.expiry.settle(uin, lane, head, PURGE_A_TOUCH)
        return head.floor

    def _deletes(self, operation: Deletes) -> Results:
        return [self._delete(*item) for item in DELETE.iter_unpack(operation.items)]

    def _delete(self, uin: int, lane: int, first: int, last: int) -> int:
        found = self.deletions.delete(uin, lane, first, last)
        if found > 0:
            self.expiry.settle(uin, lane, self.head(uin, lane), PURGE_A_TOUCH)
        return found

    def _clock(self, operation: Clock) -> Results:
        self.limits = operation.limits
        return [int(self.expiry.sweep())]

    # --- values

    def head(self, uin: int, lane: int) -> Head:
        """An inbox; a new one where there is none."""
        key = uin << 2 | lane
        head = self._heads.get(key) or self._dirty.get(key)
        if head is None:
            body = self.table.get(head_key(uin, lane))
            head = Head() if body is None else Head.decode(body)
        self._heads.put(key, head)
        return head

    def changed(self, uin: int, lane: int, head: Head) -> None:
        """An inbox is to be stored again."""
        self._dirty[uin << 2 | lane] = head

    def user(self, uin: int) -> User:
        """A user; a new one where there is none."""
        user = self._users.get(uin)
        if user is None:
            body = self.table.get(user_key(uin))
            user = User() if body is None else User.decode(body)
            self._users.put(uin, user)
        return user

    def _put_user(self, uin: int, user: User) -> None:
        self.table.put(user_key(uin), user.encode())

    def cursor(self, uin: int, number: int, device: Device, lane: int) -> Cursor:
        """A device's cursor."""
        cursor = device.cursors.get(lane)
        if cursor is None:
            body = self.table.get(cursor_key(uin, number, lane))
            cursor = device.cursors[lane] = Cursor() if body is None else Cursor(*CURSOR_VALUE.unpack(body))
        return cursor

    def entry(self, uin: int, lane: int, seq: int) -> tuple[int, int]:
        """(MsgID, when it was appended) of an entry that must be there."""
        body = self.table.get(entry_key(uin, lane, seq))
        if body is None:
            raise StateDamaged(f"entry {seq} of lane {lane} of inbox {uin:016x} is missing; repair this replica from a peer")
        found: tuple[int, int] = ENTRY_VALUE.unpack(body)
        return found

    # --- reading

    def peek(
        self, uin: int, lane: int, start: int, count: int, before: int = 0, *, devices: bool = False
    ) -> Read:  # fmt: skip
        """Entries after `start`, or before `before` with the newest first, for whoever looks. Raises Refusal."""
        return self._reader.peek(uin, lane, start, count, before, devices=devices)

    def read(
        self, uin: int, number: int, lane: int, session: int, start: int | None, count: int, before: int = 0, *,
        devices: bool = False,
    ) -> Read:  # fmt: skip
        """Entries after `start`, None: what the device has not acknowledged; or before `before`. Raises Refusal."""
        _, device = self._session(uin, number, lane, session)
        return self._reader.read(uin, lane, number, device, start, count, before, devices=devices)
