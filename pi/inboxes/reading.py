"""Reads of inboxes: entries that a device has not acknowledged, pages forward and back, unread counts, devices. Pure.

Reads change nothing.

Source: Long connections (history); docs/delivery.md, docs/pi.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from pi.inboxes.deletions import Deletions
from pi.inboxes.inbox import Device, Head
from pi.inboxes.inbox_table import Entries, InboxTable
from pi.inboxes.notes import NoteFound
from pi.inboxes.ranges import Ranges
from pixiu.wire.cursor import Cursor
from pixiu.wire.inbox_operations import MAX_LANE, Code

MAX_READ: Final = 1000
"""Limit of entries of one read."""


class ReadRefusal(Exception):
    """An error answer, as a code."""

    def __init__(self, code: Code) -> None:
        super().__init__(code.name)
        self.code = code


class DeviceFound(NamedTuple):
    """A device of a user, and its cursor in one lane."""

    number: int
    client_id: bytes
    seen_s: int
    counts: bool
    """True if the inbox waits for it."""
    up_to: int
    bits: int
    unread: int


class Read(NamedTuple):
    """Result of a read."""

    entries: list[tuple[int, int]]
    """(InboxSeq, MsgID). MsgID 0: deleted, for a device that has not acknowledged it."""
    floor: int
    """Entries up to here can no longer be read."""
    gap: int
    """The newest entry dropped before every device had acknowledged it: entries missing up to here were dropped."""
    last: int
    """The newest InboxSeq."""
    dropped: int
    """Total of entries dropped unacknowledged."""
    up_to: int
    """The device has acknowledged everything up to here."""
    unread: int = 0
    """Readable entries that the device has not acknowledged. Without a device: all readable entries."""
    devices: Sequence[DeviceFound] = ()
    """If requested."""
    notes: Sequence[NoteFound] = ()
    """If requested."""
    generation: int = 0
    """With notes: below this one none can be set; 0: there never was one."""


def unread_by(cursor: Cursor, head: Head, deleted: Ranges) -> int:
    """Count the readable entries that a device has not acknowledged, by arithmetic alone."""
    begin = max(cursor.up_to, head.floor)
    if head.last <= begin:
        return 0
    bits = cursor.bits >> (begin - cursor.up_to)
    count = head.last - begin - bits.bit_count()
    for first, last in deleted:
        low, high = max(first, begin + 1), last
        if high >= low:
            # Entries both deleted and acknowledged are subtracted once.
            both = bits >> (low - begin - 1) & (1 << min(high - low + 1, 64)) - 1 if low - begin <= 64 else 0
            count -= high - low + 1 - both.bit_count()
    return count


class Reader:
    """Serves reads of a state's inboxes."""

    def __init__(self, inboxes: InboxTable, deletions: Deletions) -> None:
        self._inboxes, self._deletions = inboxes, deletions

    def peek(
        self, uin: int, lane: int, start: int, count: int, before: int = 0, *, devices: bool = False
    ) -> Read:  # fmt: skip
        """Read entries after `start`, or before `before` with the newest first, without a session. Raises ReadRefusal."""
        if lane > MAX_LANE:
            raise ReadRefusal(Code.INVALID_ARGUMENT)
        head = self._inboxes.head(uin, lane)
        deleted = self._deletions.of(uin, lane, head)
        entries = self._back(uin, lane, before, count) if before else self._forward(uin, lane, start, count)
        found = self._devices(uin, lane, head, deleted) if devices else ()
        everything = unread_by(Cursor(), head, deleted)
        return Read(entries, head.floor, head.gap, head.last, head.dropped, 0, everything, found)

    def read(
        self, uin: int, lane: int, number: int, device: Device, start: int | None, count: int, before: int = 0, *,
        devices: bool = False,
    ) -> Read:  # fmt: skip
        """Read entries after `start`, None: unacknowledged ones; or before `before`, the newest first."""
        inboxes = self._inboxes
        head = inboxes.head(uin, lane)
        deleted = self._deletions.of(uin, lane, head)
        acknowledged = inboxes.cursor(uin, number, device, lane)
        if before:
            entries = self._back(uin, lane, before, count)
        else:
            entries, stored = [], Entries(inboxes, uin, lane, head)
            cursor = acknowledged if start is None else Cursor(min(start, head.last))
            seq, wanted = max(cursor.up_to, head.floor), min(count, MAX_READ)
            while seq < head.last and len(entries) < wanted:
                seq += 1
                if not cursor.has(seq):
                    entries.append((seq, 0 if len(deleted) and deleted.at(seq) else stored.at(seq)[0]))
        unread = unread_by(acknowledged, head, deleted)
        found = self._devices(uin, lane, head, deleted) if devices else ()
        return Read(entries, head.floor, head.gap, head.last, head.dropped, acknowledged.up_to, unread, found)

    def _forward(self, uin: int, lane: int, start: int, count: int) -> list[tuple[int, int]]:
        """Readable entries after a number."""
        inboxes, entries = self._inboxes, list[tuple[int, int]]()
        head = inboxes.head(uin, lane)
        stored = Entries(inboxes, uin, lane, head)
        deleted = self._deletions.of(uin, lane, head)
        seq, wanted = max(start, head.floor), min(count, MAX_READ)
        while len(entries) < wanted:
            seq = deleted.after(seq) + 1
            if seq > head.last:
                break
            entries.append((seq, stored.at(seq)[0]))
        return entries

    def _back(self, uin: int, lane: int, before: int, count: int) -> list[tuple[int, int]]:
        """Readable entries before a number, the newest first."""
        inboxes, entries = self._inboxes, list[tuple[int, int]]()
        head = inboxes.head(uin, lane)
        stored = Entries(inboxes, uin, lane, head)
        deleted = self._deletions.of(uin, lane, head)
        seq, wanted = min(before, head.last + 1) - 1, min(count, MAX_READ)
        while seq > head.floor and len(entries) < wanted:
            if (gone := deleted.at(seq)) is not None:
                seq = gone[0] - 1
                continue
            entries.append((seq, stored.at(seq)[0]))
            seq -= 1
        return entries

    def _devices(self, uin: int, lane: int, head: Head, deleted: Ranges) -> list[DeviceFound]:
        inboxes, found = self._inboxes, []
        for number, device in inboxes.user(uin).devices.items():
            cursor = inboxes.cursor(uin, number, device, lane)
            unread = unread_by(cursor, head, deleted)
            found.append(
                DeviceFound(number, device.client_id, device.seen_s, inboxes.counts(device), cursor.up_to, cursor.bits, unread)
            )
        return found
