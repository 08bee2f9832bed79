"""What inboxes must do, as plainly as it can be said: dicts and lists, nothing bounded, nothing stored."""

from __future__ import annotations

from dataclasses import dataclass, field

from pixiu.wire.inbox_operations import (
    ACKNOWLEDGE,
    APPEND,
    CLEAR,
    DELETE,
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
    Limits,
    Note,
    OpenSessions,
    Operation,
    Trims,
    Writer,
)
from tests.pi.memory import HOUR


@dataclass
class Inbox:
    entries: list[tuple[int, int]] = field(default_factory=list)
    """(MsgID, when) of InboxSeq 1, 2, …: never forgotten here."""
    floor: int = 0
    gap: int = 0
    dropped: int = 0
    deleted: set[int] = field(default_factory=set)


@dataclass
class Device:
    client_id: bytes
    session: int
    seen_s: float
    acknowledged: dict[int, set[int]] = field(default_factory=dict)

    def up_to(self, lane: int) -> int:
        number = 0
        while number + 1 in self.acknowledged.get(lane, ()):
            number += 1
        return number


class Model:
    """One partition."""

    def __init__(self) -> None:
        self.inboxes: dict[tuple[int, int], Inbox] = {}
        self.devices: dict[int, dict[int, Device]] = {}
        self.sessions: dict[int, int] = {}
        self.newest: dict[int, int] = {}
        self.hours: set[tuple[int, int, int]] = set()
        self.generations: dict[int, tuple[int, int]] = {}
        self.limits = Limits()
        self.notes: dict[int, dict[int, tuple[int, bytes]]] = {}
        self.noted: dict[int, tuple[int, int]] = {}
        """UIN → highest generation of a note, and the hour under which the user is listed."""

    def apply(self, operation: Operation, now_s: int, epoch: int) -> list[int]:
        """What each item must be answered with."""
        self.now_s, self.epoch = now_s, epoch
        if isinstance(operation, Appends | Fanout):
            if isinstance(operation, Appends):
                pairs = list(APPEND.iter_unpack(operation.items))
            else:
                pairs = [(operation.msg_id, uin) for (uin,) in U64.iter_unpack(operation.receivers)]
            if self._stale(operation.writer):
                return [-Code.STALE_WRITER] * len(pairs)
            return [self._append(msg_id, uin) for msg_id, uin in pairs]
        if isinstance(operation, Acknowledges):
            return [self._acknowledge(*item) for item in ACKNOWLEDGE.iter_unpack(operation.items)]
        if isinstance(operation, OpenSessions):
            return [self._open(*item) for item in USER_DEVICE.iter_unpack(operation.items)]
        if isinstance(operation, AddDevice):
            return [self._add(operation.uin, operation.client_id)]
        if isinstance(operation, DropDevices):
            return [self._drop(*item) for item in USER_DEVICE.iter_unpack(operation.items)]
        if isinstance(operation, Trims):
            return [self._trim(*item) for item in TRIM.iter_unpack(operation.items)]
        if isinstance(operation, Deletes):
            return [self._delete(*item) for item in DELETE.iter_unpack(operation.items)]
        if isinstance(operation, Note):
            return [self._note(*operation)]
        if isinstance(operation, Clears):
            return [self._clear(*item) for item in CLEAR.iter_unpack(operation.items)]
        assert isinstance(operation, Clock)
        self.limits = operation.limits
        self._expire()
        return [1]

    def inbox(self, uin: int, lane: int) -> Inbox:
        return self.inboxes.setdefault((uin, lane), Inbox())

    def _stale(self, writer: Writer) -> bool:
        if writer.epoch != self.epoch:
            return True
        epoch, generation = self.generations.get(writer.worker, (0, 0))
        if epoch == self.epoch and writer.generation < generation:
            return True
        self.generations[writer.worker] = (self.epoch, writer.generation)
        return False

    def _append(self, msg_id: int, uin: int) -> int:
        lane = (msg_id >> 48 & 0xFF) >> 6
        inbox = self.inbox(uin, lane)
        for number, (there, _) in enumerate(inbox.entries, 1):
            if there == msg_id:
                return number
        if len(inbox.entries) - inbox.floor >= self.limits.cap:
            self._settle(uin, lane)
        if len(inbox.entries) - inbox.floor >= self.limits.cap:
            if self.limits.refuse_full:
                return -Code.INBOX_FULL
            self._raise_floor(uin, lane, len(inbox.entries) - self.limits.cap + 1)
        inbox.entries.append((msg_id, self.now_s))
        self.hours.add((self.now_s // HOUR, uin, lane))
        return len(inbox.entries)

    def read_by_all(self, uin: int, lane: int) -> int:
        counted = [d for d in self.devices.get(uin, {}).values() if self.now_s - d.seen_s < self.limits.device_age_s]
        return min((device.up_to(lane) for device in counted), default=0)

    def _raise_floor(self, uin: int, lane: int, up_to: int) -> None:
        inbox = self.inbox(uin, lane)
        read = max(self.read_by_all(uin, lane), inbox.floor)
        lost = set(range(read + 1, up_to + 1)) - inbox.deleted
        if lost:
            inbox.dropped += len(lost)
            inbox.gap = up_to
        inbox.floor = max(inbox.floor, up_to)
        self._settle(uin, lane)

    def _settle(self, uin: int, lane: int) -> None:
        inbox = self.inbox(uin, lane)
        inbox.floor = max(inbox.floor, self.read_by_all(uin, lane))
        while inbox.floor + 1 in inbox.deleted:
            inbox.floor += 1

    def _device(self, uin: int, number: int) -> Device | None:
        return self.devices.get(uin, {}).get(number)

    def _acknowledge(self, uin: int, number: int, lane: int, session: int, up_to: int, bits: int) -> int:
        device, inbox = self._device(uin, number), self.inbox(uin, lane)
        if device is None:
            return -Code.UNKNOWN_DEVICE
        if session != device.session:
            return -Code.OLD_SESSION if session < device.session else -Code.INVALID_ARGUMENT
        named = set(range(1, up_to + 1)) | {up_to + 1 + bit for bit in range(64) if bits >> bit & 1}
        if max(named, default=0) > len(inbox.entries):
            return -Code.CURSOR_BEYOND_END
        if self.now_s - device.seen_s >= HOUR:
            device.seen_s = self.now_s
        held = device.acknowledged.setdefault(lane, set())
        before = set(held)
        held |= named
        end = device.up_to(lane) + 64
        held.intersection_update(range(1, end + 1))
        if held != before:
            self._settle(uin, lane)
        return 0

    def _open(self, uin: int, number: int) -> int:
        if self._device(uin, number) is None:
            if number:
                return -Code.UNKNOWN_DEVICE
            refused = self._make(uin, 0, b"")
            if refused:
                return refused
        self.sessions[uin] = self.sessions.get(uin, 0) + 1
        device = self.devices[uin][number]
        device.session, device.seen_s = self.sessions[uin], self.now_s
        return device.session

    def _make(self, uin: int, number: int, client_id: bytes) -> int:
        if self.limits.no_space:
            return -Code.DISK_FULL
        devices = self.devices.setdefault(uin, {})
        if len(devices) == 8:
            seen_s, oldest = min((device.seen_s, each) for each, device in devices.items())
            if self.now_s - seen_s < self.limits.device_age_s:
                return -Code.TOO_MANY_DEVICES
            del devices[oldest]
        further = any(self.now_s - device.seen_s < self.limits.device_age_s for device in devices.values())
        devices[number] = Device(client_id, 0, self.now_s)
        if further and self.limits.from_now:
            for lane in range(4):
                devices[number].acknowledged[lane] = set(range(1, len(self.inbox(uin, lane).entries) + 1))
        return 0

    def _add(self, uin: int, client_id: bytes) -> int:
        for number, device in self.devices.get(uin, {}).items():
            if device.client_id[:6] == client_id[:6]:
                if len(client_id) > 6:
                    device.client_id = client_id
                if self.now_s - device.seen_s >= HOUR:
                    device.seen_s = self.now_s
                return number
        number = self.newest.get(uin, 0) + 1 if client_id else 0
        refused = self._make(uin, number, client_id)
        if not refused and number:
            self.newest[uin] = number
        return refused or number

    def _drop(self, uin: int, number: int) -> int:
        if self._device(uin, number) is None:
            return -Code.UNKNOWN_DEVICE
        del self.devices[uin][number]
        for lane in range(4):
            self._settle(uin, lane)
        return 0

    def _trim(self, uin: int, lane: int, up_to: int) -> int:
        inbox = self.inbox(uin, lane)
        up_to = min(up_to, len(inbox.entries))
        if up_to > inbox.floor:
            self._raise_floor(uin, lane, up_to)
        else:
            self._settle(uin, lane)
        return inbox.floor

    def _delete(self, uin: int, lane: int, first: int, last: int) -> int:
        inbox = self.inbox(uin, lane)
        if not 0 < first <= last:
            return -Code.INVALID_ARGUMENT
        gone = set(range(max(first, inbox.floor + 1), min(last, len(inbox.entries)) + 1)) - inbox.deleted
        if gone:
            inbox.deleted |= gone
            self._settle(uin, lane)
        return len(gone)

    def _note(self, uin: int, name: int, generation: int, value: bytes) -> int:
        if name > 7 or not generation:
            return -Code.INVALID_ARGUMENT
        if generation < self.noted.get(uin, (0, 0))[0]:
            return -Code.OLD_SESSION
        notes = self.notes.setdefault(uin, {})
        if value and self.limits.no_space and (name not in notes or len(notes[name][1]) < len(value)):
            return -Code.DISK_FULL
        notes.pop(name, None)
        if value:
            notes[name] = (generation, value)
        self._list(uin, generation)
        return 0

    def _list(self, uin: int, generation: int) -> None:
        hour = self.now_s // HOUR
        self.noted[uin] = (generation, hour)
        self.hours.add((hour, uin, 4))

    def _clear(self, uin: int, generation: int) -> int:
        if not generation:
            return -Code.INVALID_ARGUMENT
        if uin not in self.noted:
            return 0
        if generation < self.noted[uin][0]:
            return -Code.OLD_SESSION
        self.notes.pop(uin, None)
        self.devices.pop(uin, None)
        for lane in range(4):
            inbox = self.inbox(uin, lane)
            inbox.entries = [(0, at_s) for _, at_s in inbox.entries]  # their numbers are not given again, and repeats not known
            inbox.floor, inbox.gap, inbox.deleted = len(inbox.entries), 0, set()
        self._list(uin, generation)
        return 0

    def _end(self, uin: int, hour: int) -> None:
        """Nobody came back."""
        generation, listed = self.noted.get(uin, (0, 0))
        if not generation or listed != hour:
            return
        if any(self.now_s - device.seen_s < self.limits.device_age_s for device in self.devices.get(uin, {}).values()):
            self._list(uin, generation)
            return
        for known in (self.notes, self.noted, self.devices, self.sessions, self.newest):
            known.pop(uin, None)
        for lane in range(4):
            self.inboxes.pop((uin, lane), None)

    def _expire(self) -> None:
        """The near sweep looks at every inbox with an old enough hour; the far one drops what is over its age."""
        near = (self.now_s - self.limits.dedupe_s) // HOUR
        far_s = self.now_s - max(self.limits.age_s, self.limits.dedupe_s)
        self.settled = getattr(self, "settled", 0)
        for hour, uin, lane in sorted(self.hours):
            if self.settled <= hour < near and lane < 4:
                self._settle(uin, lane)
        self.settled = max(self.settled, near)
        for hour, uin, lane in sorted(self.hours):
            if hour < far_s // HOUR:
                self.hours.discard((hour, uin, lane))
                if lane == 4:
                    self._end(uin, hour)
                    continue
                inbox = self.inbox(uin, lane)
                up_to = inbox.floor
                while up_to < len(inbox.entries) and inbox.entries[up_to][1] <= self.now_s - self.limits.age_s:
                    up_to += 1
                if up_to > inbox.floor:
                    self._raise_floor(uin, lane, up_to)
                else:
                    self._settle(uin, lane)

    def readable(self, uin: int, number: int, lane: int, start: int | None, count: int) -> list[tuple[int, int]]:
        """What a read must find."""
        inbox = self.inbox(uin, lane)
        held = self.devices[uin][number].acknowledged.get(lane, set()) if start is None else set(range(1, start + 1))
        found = [
            (seq, 0 if seq in inbox.deleted else msg_id)
            for seq, (msg_id, _) in enumerate(inbox.entries, 1)
            if seq > inbox.floor and seq not in held
        ]
        return found[:count]

    def shown(self, uin: int, lane: int) -> list[tuple[int, int]]:
        """What can be read by somebody."""
        inbox = self.inbox(uin, lane)
        entries = enumerate(inbox.entries, 1)
        return [(seq, msg_id) for seq, (msg_id, _) in entries if seq > inbox.floor and seq not in inbox.deleted]

    def unread(self, uin: int, number: int, lane: int) -> int:
        """What a device could read and has not acknowledged."""
        held = self.devices[uin][number].acknowledged.get(lane, set())
        return sum(seq not in held for seq, _ in self.shown(uin, lane))
