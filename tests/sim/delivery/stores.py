"""Pi and Xiu: Pi is its production state, applied to at once; Xiu is a dict that can be late, and can lose."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pi.state import ReadRefusal
from pixiu.wire.inbox_operations import (
    ACKNOWLEDGE,
    TRIM,
    U64,
    USER_DEVICE,
    Acknowledges,
    AddDevice,
    Clock,
    Code,
    Limits,
    OpenSessions,
    Trims,
)
from pixiu.wire.record import Kind, encode
from relay.delivery import events as ev
from tests.pi.memory import START_S, Replica
from tests.support.pi import appends, message

_FAILURES = {
    Code.OLD_SESSION: ev.Failure.FENCED,
    Code.UNKNOWN_DEVICE: ev.Failure.REFUSED,
    Code.INVALID_ARGUMENT: ev.Failure.REFUSED,
}


def _failure(code: int) -> ev.Failure:
    return _FAILURES.get(Code(code), ev.Failure.LATER)


class Pi:
    """Inboxes of all users."""

    def __init__(self, cap: int, fencing: bool) -> None:
        self._fencing = fencing
        self.replica = Replica()
        self.replica.apply(Clock(Limits(cap=cap)))
        self.down_until = 0.0

    def at(self, now: float) -> None:
        """The log's time."""
        self.replica.now_s = START_S + now

    def append(self, uins: Sequence[int], msg_id: int) -> list[int]:
        """One message for many; their InboxSeqs."""
        return self.replica.apply(appends(self.replica.epoch, *((msg_id, uin) for uin in uins)))[0]

    def add_device(self, uin: int, name: bytes) -> int:
        """The device's number."""
        return self.replica.apply(AddDevice(uin, name))[0][0]

    def trim(self, uin: int, lane: int, up_to: int) -> None:
        """Entries go, acknowledged or not."""
        self.replica.apply(Trims(TRIM.pack(uin, lane, up_to)))

    def open(self, uin: int, device: int) -> int | ev.Failure:
        """A session number; the one there is where a fault is put back."""
        there = self.replica.state.inboxes.user(uin).devices.get(device)
        if not self._fencing and there is not None and there.session:
            return there.session
        result = self.replica.apply(OpenSessions(USER_DEVICE.pack(uin, device)))[0][0]
        return result if result > 0 else _failure(-result)

    def acknowledge(self, item: ev.Acknowledgement) -> ev.Failure | None:
        """One cursor."""
        packed = ACKNOWLEDGE.pack(item.uin, item.device, item.lane, item.session, item.up_to, item.bits)
        result = self.replica.apply(Acknowledges(packed))[0][0]
        return None if not result else _failure(-result)

    def read(self, asked: ev.Asked, session: int, reads: Sequence[ev.Read]) -> list[ev.Listing] | ev.Failure:
        """Some lanes."""
        found = []
        for read in reads:
            try:
                answer = self.replica.state.read(asked.uin, asked.device, read.lane, session, read.start, read.num)
            except ReadRefusal as refusal:
                return _failure(refusal.code)
            found.append(ev.Listing(answer.entries, answer.floor, answer.gap, answer.last, answer.up_to))
        return found

    def has(self, uin: int, device: int, lane: int, seq: int) -> bool:
        """Whether a device has acknowledged an entry."""
        state = self.replica.state
        return state.inboxes.cursor(uin, device, state.inboxes.user(uin).devices[device], lane).has(seq)

    def up_to(self, uin: int, device: int, lane: int) -> int:
        """A device's cursor."""
        state = self.replica.state
        return state.inboxes.cursor(uin, device, state.inboxes.user(uin).devices[device], lane).up_to

    def session(self, uin: int, device: int) -> int:
        """A device's newest session."""
        return self.replica.state.inboxes.user(uin).devices[device].session

    def floor(self, uin: int, lane: int) -> int:
        """Up to where an inbox cannot be read."""
        return self.replica.state.inboxes.head(uin, lane).floor

    def last(self, uin: int, lane: int) -> int:
        """An inbox's newest entry."""
        return self.replica.state.inboxes.head(uin, lane).last


class Xiu:
    """All messages."""

    def __init__(self, rng: random.Random) -> None:
        self.records: dict[int, bytes] = {}
        self.late: dict[int, float] = {}
        """MsgID → when it can be fetched."""
        self.gone: set[int] = set()
        self.down_until = 0.0
        self._rng = rng
        self._count = 0

    def store(self, uin: int, lane: int, size: int) -> tuple[int, bytes]:
        """A new message."""
        self._count += 1
        msg_id = message(self._count, lane)
        record = encode(Kind.MAIL, uin, U64.pack(self._count) + bytes(size), self._count, type=lane << 6)
        self.records[msg_id] = record
        return msg_id, record

    def fetch(self, msg_ids: Sequence[int], now: float, faults: bool) -> list[bytes | ev.Missing]:
        """Records; now and then fewer than were asked for."""
        found: list[bytes | ev.Missing] = []
        for msg_id in msg_ids:
            if found and faults and self._rng.random() < 0.03:
                break
            if msg_id in self.gone:
                found.append(ev.Missing.GONE)
            elif self.late.get(msg_id, 0.0) > now:
                found.append(ev.Missing.NOT_YET)
            elif faults and self._rng.random() < 0.01:
                found.append(ev.Missing.LATER)
            else:
                found.append(self.records[msg_id])
        return found
