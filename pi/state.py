"""Inboxes, cursors, sessions and devices, as made by committed entries of the log. Pure, over a table.

Everything is decided here, when an entry is applied, from the state alone, in the order of the log; so every replica assigns the
same numbers. Time is the time in the log's entries, and never goes back.

Source: PiXiu §6.2; docs/architecture.md, "A mail is sent", docs/pi.md.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, Final, ParamSpec

from cluster.replication.model import CLOCK, START, Entry, EntryKind, Position
from cluster.store.doubling.copied import DOUBLING_KEY
from cluster.store.doubling.phases import DOUBLING_KIND
from pi.doubling import PiCopying
from pi.early import EARLY_KIND, Early, TakenOtherwise, early_of
from pi.inboxes.chunk import ENTRY
from pi.inboxes.deletions import Deletions
from pi.inboxes.expiry import BEGINNING, PURGE_A_TOUCH, Expiry
from pi.inboxes.inbox import MAX_DEVICES, Device, Head, User
from pi.inboxes.inbox_table import MAX_HEADS, MAX_USERS, InboxTable
from pi.inboxes.loss import Loss
from pi.inboxes.notes import Notes
from pi.inboxes.reading import Read as Read
from pi.inboxes.reading import Reader
from pi.inboxes.reading import ReadRefusal as ReadRefusal
from pi.inboxes.unwritten import Changes, Store, Table
from pi.keys import CHUNK_ENTRIES, EPOCH_S, META_KEY, META_VERSION, WRITER_VALUE, time_key, writer_key
from pixiu.errors import MalformedData, StateDamaged
from pixiu.ids import MAX_MSG_SEQUENCE
from pixiu.wire.cursor import Cursor
from pixiu.wire.inbox_operations import (
    ACKNOWLEDGE,
    APPEND,
    CLEAR,
    DELETE,
    DEVICE_ID_BYTES,
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
    Clears,
    Clock,
    Code,
    Deletes,
    DropDevices,
    Fanout,
    GiveUp,
    Limits,
    Note,
    OpenSessions,
    Operation,
    Trims,
    Writer,
    decode,
)

META: Final = struct.Struct("<BIQIQ13s13s")
EARLY: Final = struct.Struct("<Q")
"""Last field stored with the position: see `State.early`."""
SEEN_STEP_S: Final = 3600
"""Age at which a device's time is written again, seconds: everything that depends on it counts in days."""
_HOUR_S: Final = 3600
Arguments = ParamSpec("Arguments")

Results = list[int]
"""One number for each item of an operation: an InboxSeq, a session or a DeviceID, 0 for done, `-Code` for refused."""


def _result(what: Callable[Arguments, int], *arguments: Arguments.args, **named: Arguments.kwargs) -> int:
    try:
        return what(*arguments, **named)
    except ReadRefusal as refusal:
        return -refusal.code


class State:
    """The inboxes of one partition, from committed operations.

    Args:
        store: opened.
        max_heads, max_users: kept in memory.

    Every method raises StateDamaged when a value has a wrong CRC; after one from `apply` the state must not be used.
    """

    copying_type: ClassVar[type[PiCopying]] = PiCopying

    def __init__(self, store: Store, max_heads: int = MAX_HEADS, max_users: int = MAX_USERS) -> None:
        self.table = Table(store)
        self.inboxes = InboxTable(self.table, max_heads, max_users)
        self.applied = START
        """The last entry of the log in the state."""
        self.damaged_entries = 0
        """Skipped entries of the log that no version of this program wrote."""
        self.early = 0
        """Counter of the last entry that was taken before one that it names."""
        self.given_up = 0
        """Counter of the last entry at which, or before which, values were given up since this state was loaded; 0: none."""
        self._epoch = 0
        self._broken_writers: dict[int, StateDamaged] = {}
        """Writers that cannot be read; at most one for each worker."""
        self._writers: dict[int, tuple[int, int]] = {}
        """Worker → (epoch, highest generation)."""
        self._deletions = Deletions(self.inboxes)
        self.notes = Notes(self.inboxes)
        self._expiry = Expiry(self.inboxes, self._deletions, self.notes)
        self._reader = Reader(self.inboxes, self._deletions)
        self._loss = Loss(self.inboxes, self._deletions)
        self.copying = self.copying_type(
            self.inboxes, learn=self._apply_own, take_time=self._take_time, take_row=self._take_row, reset=self._reset
        )
        self._expiry.stays = self.copying.stays
        self._load()

    def _load(self) -> None:
        meta = self.table.get(META_KEY)
        if meta is None:
            return
        self.applied, self.inboxes.dropped = self._take_meta(meta)
        self.early = EARLY.unpack_from(meta, len(meta) - EARLY.size)[0]
        for key in self.table.keys(writer_key(0), b"H", 1 << 16):
            worker = int.from_bytes(key[1:], "big")
            try:
                body = self.table.get(key)
            except StateDamaged as damage:  # it affects only that writer's next request
                self._broken_writers[worker] = damage
                continue
            assert body is not None
            self._writers[worker] = WRITER_VALUE.unpack(body)

    def _take_meta(self, meta: bytes) -> tuple[Position, int]:
        """Load time, limits and sweeps; return the applied position, and the number of dropped entries."""
        version, epoch, counter, self.inboxes.now_s, dropped, near, far = META.unpack_from(meta)
        if version != META_VERSION:
            raise StateDamaged(f"the state has version {version}, this program reads {META_VERSION}")
        self.inboxes.limits = Limits.decode(meta[META.size : -EARLY.size])
        self._expiry.near, self._expiry.far = near, far
        return Position(epoch, counter), dropped

    def _take_row(self, key: bytes, body: bytes) -> None:
        """Take a parent's row that belongs to no user, in a child."""
        if key == META_KEY:
            self._take_meta(body)
        elif key[:1] == b"G":
            self._writers[int.from_bytes(key[1:], "big")] = WRITER_VALUE.unpack(body)
            self.table.put(key, body)

    def _reset(self) -> None:
        """Clear what is in memory: a child begins again."""
        self._writers.clear()
        self._broken_writers.clear()
        self.inboxes.forget_all()
        self.inboxes.now_s, self._expiry.near, self._expiry.far = 0, BEGINNING, BEGINNING

    # --- transactions

    def freeze(self) -> Changes:
        """Return all changes since the last call, with the applied position, for one transaction of the store."""
        changes = self.begin_freeze()
        self.inboxes.encode_frozen(len(self.inboxes.freezing))
        return changes

    def begin_freeze(self) -> Changes:
        """Return the same changes, without the heads that `inboxes.encode_frozen` adds before they are written. Entries may be
        applied meanwhile."""
        self._put_meta()
        self.inboxes.freeze()
        return self.table.freeze()

    def unstored(self) -> Changes:
        """Copy all changes that no finished transaction has brought into the store."""
        self.inboxes.encode()
        self._put_meta()
        return {**self.table.frozen, **self.table.changes}

    def _put_meta(self) -> None:
        inboxes, sweeps = self.inboxes, self._expiry
        meta = META.pack(META_VERSION, *self.applied, inboxes.now_s, inboxes.dropped, sweeps.near, sweeps.far)
        self.table.put(META_KEY, meta + inboxes.limits.encode() + EARLY.pack(self.early))

    @property
    def unwritten(self) -> int:
        """Changes that wait for a transaction; a large value counts more."""
        return len(self.table.changes) + self.table.kib + len(self.inboxes.dirty)

    # --- applying

    def apply(self, entries: Sequence[Entry]) -> list[list[Results]]:
        """Apply committed entries that follow `applied`. Returns for each entry the results of each of its operations."""
        found: list[list[Results]] = []
        for entry in entries:
            if entry.counter != self.applied.counter + 1:
                raise ValueError(f"{entry.position} does not follow {self.applied}")
            found.append(self._apply_one(entry))
            self.applied = Position(entry.epoch, entry.counter)
        return found

    def _apply_one(self, entry: Entry) -> list[Results]:
        if entry.kind == DOUBLING_KIND:
            return self._apply_doubling(entry)
        if entry.kind == EARLY_KIND:
            return self._apply_early(entry)
        return [] if self.copying.learning else self._apply_own(entry)

    def _apply_early(self, entry: Entry) -> list[Results]:
        """Check that its values were given up before the entry that it names; else this state differs from others."""
        try:
            early = early_of(entry)
        except MalformedData:
            self.damaged_entries += 1
            return []
        if self.early < entry.counter:
            raise TakenOtherwise(early)
        if not self.copying.learning:
            self._take_time(entry)
        return []

    def take_early(self, early: Early) -> None:
        """Give up values before the next entry. Raises StateDamaged: as `apply`."""
        self._give_up(early.keys)
        self.early = early.at

    def _give_up(self, keys: tuple[bytes, ...]) -> Results:
        self.given_up = self.applied.counter + 1
        for key in keys:
            if key[:1] == b"G":
                worker = int.from_bytes(key[1:], "big")
                self._writers.pop(worker, None)
                self._broken_writers.pop(worker, None)
            elif key == DOUBLING_KEY:
                self.table.put(key, self.copying.record.encode())
        return self._loss.give_up(keys)

    def _apply_doubling(self, entry: Entry) -> list[Results]:
        try:
            done = self.copying.apply(entry)
        except MalformedData:
            self.damaged_entries += 1
            return []
        if not self.copying.learning:
            self._take_time(entry)
        return [[int(done)]]

    def _take_time(self, entry: Entry) -> None:
        self.inboxes.now_s = max(self.inboxes.now_s, min(entry.at_us // 1_000_000 - EPOCH_S, 0xFFFF_FFFF))

    def _apply_own(self, entry: Entry) -> list[Results]:
        self._epoch = entry.epoch
        self._take_time(entry)
        if entry.kind == EntryKind.SET_CLOCK and len(entry.payload) == CLOCK.size:
            self._expiry.set_back(max(CLOCK.unpack(entry.payload)[0] // 1_000_000 - EPOCH_S, 0))
        if entry.kind != ENTRY_KIND:
            return []
        try:
            operations = decode(entry.payload)
        except MalformedData:
            self.damaged_entries += 1
            return []
        return [self._apply_operation(operation) for operation in operations]

    def _apply_operation(self, operation: Operation) -> Results:
        match operation:
            case Appends():
                return self._appends(operation)
            case Fanout():
                return self._fanout(operation)
            case Acknowledges(items):
                return [_result(self._acknowledge, *item) for item in ACKNOWLEDGE.iter_unpack(items)]
            case OpenSessions(items):
                return [_result(self._open_session, *item) for item in USER_DEVICE.iter_unpack(items)]
            case AddDevice(uin, client_id):
                return [_result(self._device_of, uin, client_id)]
            case DropDevices(items):
                return [_result(self._drop_device, *item) for item in USER_DEVICE.iter_unpack(items)]
            case Trims(items):
                return [self._trim(*item) for item in TRIM.iter_unpack(items)]
            case Deletes(items):
                return [self._delete(*item) for item in DELETE.iter_unpack(items)]
            case Note(uin, name, generation, value):
                return [self.notes.set(uin, name, generation, value)]
            case Clears(items):
                return [self.notes.clear(*item) for item in CLEAR.iter_unpack(items)]
            case Clock(limits):
                self.inboxes.limits = limits
                return [int(self.copying.holds or self._expiry.sweep())]
            case GiveUp(keys):
                return self._give_up(keys)

    def _refuses(self, writer: Writer) -> bool:
        """True if a newer stream of its writer replaced this stream of appends."""
        worker, generation, epoch = writer
        if epoch != self._epoch:
            return True
        if self._broken_writers and worker in self._broken_writers:
            raise self._broken_writers[worker]
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

    def _insert(self, pairs: Iterable[tuple[int, int]]) -> Results:
        """Append (MsgID, UIN) pairs: the hot path."""
        found: Results = []
        inboxes = self.inboxes
        heads, dirty, freezing, pack = inboxes.heads.young, inboxes.dirty, inboxes.freezing, ENTRY.pack
        now_s, cap, hour = inboxes.now_s, inboxes.limits.cap, inboxes.now_s // _HOUR_S
        for msg_id, uin in pairs:
            lane = msg_id >> LANE_SHIFT & 3
            key = uin << 2 | lane
            head = heads.get(key)
            if head is None or key in freezing:
                head = inboxes.head(uin, lane)
                heads = inboxes.heads.young
            partition, counter = msg_id >> 56, msg_id & MAX_MSG_SEQUENCE
            if counter > head.highest.get(partition, -1):
                highest = counter
            else:
                stored = inboxes.find(uin, lane, head, msg_id)
                if stored:
                    found.append(stored)
                    continue
                highest = head.highest[partition]
            if head.last - head.floor >= cap and not self._make_space(uin, lane, head):
                found.append(-Code.INBOX_FULL)
                continue
            tail = head.tail
            if tail is None or not head.last % CHUNK_ENTRIES:
                tail = inboxes.tail(uin, lane, head)
            if partition not in tail.before:
                tail.before[partition] = head.highest.get(partition, -1) + 1
            head.highest[partition] = highest
            head.last = seq = head.last + 1
            tail.entries += pack(msg_id, now_s)
            tail.changed = True
            dirty[key] = head
            if head.hour != hour:
                head.hour = hour
                self.table.put(time_key(hour, uin, lane), b"")
            found.append(seq)
        return found

    def _make_space(self, uin: int, lane: int, head: Head) -> bool:
        """Return True if an inbox at its cap takes one more entry: its oldest goes, unless it is set to refuse."""
        self._expiry.settle(uin, lane, head, PURGE_A_TOUCH)
        if head.last - head.floor < self.inboxes.limits.cap:
            return True
        if self.inboxes.limits.refuse_full:
            return False
        self._expiry.drop(uin, lane, head, head.last - self.inboxes.limits.cap + 1)
        self._expiry.settle(uin, lane, head, PURGE_A_TOUCH)
        return True

    # --- devices

    def _acknowledge(self, uin: int, number: int, lane: int, session: int, up_to: int, bits: int) -> int:
        user, device = self._session(uin, number, lane, session)
        head = self.inboxes.head(uin, lane)
        if up_to + bits.bit_length() > head.last:
            raise ReadRefusal(Code.CURSOR_BEYOND_END)
        self._seen(uin, user, device)
        cursor = self.inboxes.cursor(uin, number, device, lane)
        if cursor.acknowledge(up_to, bits):
            self.inboxes.put_cursor(uin, number, lane, cursor)
            self._expiry.settle(uin, lane, head, PURGE_A_TOUCH)
        return 0

    def _session(self, uin: int, number: int, lane: int, session: int) -> tuple[User, Device]:
        """Return the device of a request. Raises ReadRefusal."""
        user = self.inboxes.user(uin)
        device = user.devices.get(number)
        if device is None:
            raise ReadRefusal(Code.UNKNOWN_DEVICE)
        if session < device.session:
            raise ReadRefusal(Code.OLD_SESSION)
        if session > device.session or lane > MAX_LANE:
            raise ReadRefusal(Code.INVALID_ARGUMENT)
        return user, device

    def _seen(self, uin: int, user: User, device: Device) -> None:
        if self.inboxes.now_s - device.seen_s >= SEEN_STEP_S:
            device.seen_s = self.inboxes.now_s
            self.inboxes.put_user(uin, user)

    def _open_session(self, uin: int, number: int) -> int:
        user = self.inboxes.user(uin)
        if number not in user.devices:
            if number:
                raise ReadRefusal(Code.UNKNOWN_DEVICE)
            self._add(uin, user, 0, b"")
        device = user.devices[number]
        user.sessions += 1
        device.session, device.seen_s = user.sessions, self.inboxes.now_s
        self.inboxes.put_user(uin, user)
        return user.sessions

    def _device_of(self, uin: int, client_id: bytes) -> int:
        """Return the number of a device. Its name follows its DeviceID; a client_id without a name keeps the device's name."""
        user = self.inboxes.user(uin)
        for number, device in user.devices.items():
            if device.client_id[:DEVICE_ID_BYTES] == client_id[:DEVICE_ID_BYTES]:
                if len(client_id) > DEVICE_ID_BYTES and device.client_id != client_id:
                    device.client_id = client_id
                    self.inboxes.put_user(uin, user)
                self._seen(uin, user, device)
                return number
        number = user.free_number() if client_id else 0
        self._add(uin, user, number, client_id)
        user.newest = number or user.newest
        self.inboxes.put_user(uin, user)
        return number

    def _add(self, uin: int, user: User, number: int, client_id: bytes) -> None:
        """Add a device; one not seen for long is replaced if there are too many. Raises ReadRefusal."""
        if self.inboxes.limits.no_space:
            raise ReadRefusal(Code.DISK_FULL)
        if len(user.devices) >= MAX_DEVICES:
            oldest = min(user.devices, key=lambda each: (user.devices[each].seen_s, each))
            if self.inboxes.counts(user.devices[oldest]):
                raise ReadRefusal(Code.TOO_MANY_DEVICES)
            self._forget(uin, user, oldest)
        further = any(self.inboxes.counts(device) for device in user.devices.values())
        user.devices[number] = device = Device(0, self.inboxes.now_s, client_id)
        if further and self.inboxes.limits.from_now:
            self._begin_at_the_end(uin, number, device)

    def _begin_at_the_end(self, uin: int, number: int, device: Device) -> None:
        """Begin at the end of the inboxes: another device has, or gets, their entries. A user's first device gets them in any
        case."""
        for lane in range(MAX_LANE + 1):
            if last := self.inboxes.head(uin, lane).last:
                device.cursors[lane] = cursor = Cursor(last)
                self.inboxes.put_cursor(uin, number, lane, cursor)

    def _drop_device(self, uin: int, number: int) -> int:
        user = self.inboxes.user(uin)
        if number not in user.devices:
            raise ReadRefusal(Code.UNKNOWN_DEVICE)
        self._forget(uin, user, number)
        self.inboxes.put_user(uin, user)
        for lane in range(MAX_LANE + 1):
            self._expiry.settle(uin, lane, self.inboxes.head(uin, lane), PURGE_A_TOUCH)
        return 0

    def _forget(self, uin: int, user: User, number: int) -> None:
        del user.devices[number]
        self.inboxes.forget_cursors(uin, number)

    # --- time

    def _trim(self, uin: int, lane: int, up_to: int) -> int:
        if lane > MAX_LANE:
            return -Code.INVALID_ARGUMENT
        head = self.inboxes.head(uin, lane)
        self._expiry.drop(uin, lane, head, min(up_to, head.last))
        self._expiry.settle(uin, lane, head, PURGE_A_TOUCH)
        return head.floor

    def _delete(self, uin: int, lane: int, first: int, last: int) -> int:
        found = self._deletions.delete(uin, lane, first, last)
        if found > 0:
            self._expiry.settle(uin, lane, self.inboxes.head(uin, lane), PURGE_A_TOUCH)
        return found

    # --- reading

    def peek(
        self, uin: int, lane: int, start: int, count: int, before: int = 0, *, devices: bool = False
    ) -> Read:  # fmt: skip
        """Read entries after `start`, or before `before` with the newest first, without a session. Raises ReadRefusal."""
        return self._reader.peek(uin, lane, start, count, before, devices=devices)

    def read(
        self, uin: int, number: int, lane: int, session: int, start: int | None, count: int, before: int = 0, *,
        devices: bool = False,
    ) -> Read:  # fmt: skip
        """Read entries after `start`, None: unacknowledged ones; or before `before`. Raises ReadRefusal."""
        _, device = self._session(uin, number, lane, session)
        return self._reader.read(uin, lane, number, device, start, count, before, devices=devices)
