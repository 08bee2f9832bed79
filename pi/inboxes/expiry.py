"""Expiry of inbox entries: acknowledged ones, those over the age limit, those beyond the cap; and of users with notes. Pure.

    floor moves    over entries that every counted device acknowledged and whose history is over; over those that are too old;
                   by a trim; over deleted entries
    base follows   the floor when the dedupe window is over: entries are deleted from the store

Two sweeps go through the hours in which inboxes got entries: the near one at the dedupe window, the far one at the age limit. Each
clock entry of the log advances them by a bounded number of steps.

Source: docs/pi.md (whatever depends on a clock is an entry).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

from pi.inboxes.deletions import Deletions
from pi.inboxes.inbox import Head
from pi.inboxes.inbox_table import Entries, InboxTable
from pi.inboxes.notes import Notes
from pi.keys import NOTES_LANE, TIME_KEY, time_key

PURGE_A_TOUCH: Final = 64
"""Limit of entries that one operation on an inbox looks at."""
SWEEP_ENTRIES: Final = 20_000
"""Limit of entries that one clock entry looks at; the next one continues from there."""
SWEEP_INBOXES: Final = 2000
_HOUR_S: Final = 3600
_PLACE: Final = struct.Struct(">IQB")
BEGINNING: Final = bytes(_PLACE.size)


class Expiry:
    """Drops expired and acknowledged entries of a state's inboxes."""

    def __init__(self, inboxes: InboxTable, deletions: Deletions, notes: Notes) -> None:
        self._inboxes, self._deletions, self._notes = inboxes, deletions, notes
        self.near = BEGINNING
        """Position of the near sweep: hour, UIN, lane."""
        self.far = BEGINNING
        self.stays: Callable[[int], bool] = lambda _uin: True
        """Returns True if a user's inboxes belong to this partition; sweeps skip others."""

    def acknowledged(self, uin: int, lane: int) -> int:
        """Return the InboxSeq up to which every counted device has acknowledged; 0 without one."""
        inboxes = self._inboxes
        devices = inboxes.user(uin).devices
        cursors = [inboxes.cursor(uin, number, device, lane).up_to for number, device in devices.items() if inboxes.counts(device)]
        return min(cursors, default=0)

    def drop(self, uin: int, lane: int, head: Head, up_to: int) -> None:
        """Raise the floor, acknowledged or not. Unacknowledged entries are counted and leave a gap."""
        if up_to <= head.floor:
            return
        unread = max(self.acknowledged(uin, lane), head.floor)
        lost = up_to - unread
        if lost > 0:
            lost -= self._deletions.of(uin, lane, head).count(unread + 1, up_to)
        if lost > 0:
            head.dropped += lost
            head.gap = up_to
            self._inboxes.dropped += lost
        self._raise(uin, lane, head, up_to)

    def _raise(self, uin: int, lane: int, head: Head, floor: int) -> None:
        head.floor = floor
        self._inboxes.changed(uin, lane, head)
        self._deletions.raised(uin, lane, head)

    def settle(self, uin: int, lane: int, head: Head, budget: int) -> int:
        """Advance floor and base over at most `budget` entries. Returns the number of entries looked at."""
        inboxes = self._inboxes
        limits, now_s = inboxes.limits, inboxes.now_s
        read = acknowledged = max(self.acknowledged(uin, lane), head.floor)
        looked = 0
        if limits.history_s:
            read, entries = head.floor, Entries(inboxes, uin, lane, head)
            while read < acknowledged and looked < budget and entries.at(read + 1)[1] + limits.history_s <= now_s:
                read, looked = read + 1, looked + 1
        read = self._deletions.of(uin, lane, head).after(read)
        if read > head.floor:
            self._raise(uin, lane, head, read)
        return looked + self._purge(uin, lane, head, budget - looked)

    def _purge(self, uin: int, lane: int, head: Head, budget: int) -> int:
        inboxes, looked = self._inboxes, 0
        until_s = inboxes.now_s - inboxes.limits.dedupe_s
        if head.oldest_s > until_s:
            # Counted as if it had been looked up: a replica's cached values must not move its sweeps further than others'.
            return int(head.base < head.floor and budget > 0)
        base, oldest_s, entries = head.base, head.oldest_s, Entries(inboxes, uin, lane, head)
        while base < head.floor and looked < budget:
            looked += 1
            oldest_s = entries.at(base + 1)[1]
            if oldest_s > until_s:
                break
            base, oldest_s = base + 1, 0
        head.oldest_s = oldest_s
        if base > head.base:
            inboxes.cut(uin, lane, head, base)
        return looked

    def _expire(self, uin: int, lane: int, head: Head, budget: int) -> int:
        """Drop entries over the age limit."""
        inboxes, looked = self._inboxes, 0
        until_s, up_to, entries = inboxes.now_s - inboxes.limits.age_s, head.floor, Entries(inboxes, uin, lane, head)
        while up_to < head.last and looked < budget and entries.at(up_to + 1)[1] <= until_s:
            up_to, looked = up_to + 1, looked + 1
        self.drop(uin, lane, head, up_to)
        return looked

    def set_back(self, now_s: int) -> None:
        """Set the time back if it is ahead. The sweeps begin again: entries appended meanwhile lie in hours that they have
        passed."""
        if now_s < self._inboxes.now_s:
            self._inboxes.now_s = now_s
            self.near = self.far = BEGINNING

    def sweep(self) -> bool:
        """Advance both sweeps by some steps. Returns True if both came to their ends."""
        limits, now_s = self._inboxes.limits, self._inboxes.now_s
        behind = max(limits.dedupe_s, limits.history_s)
        self.near, near_done = self._sweep(self.near, now_s - behind, far=False)
        self.far, far_done = self._sweep(self.far, now_s - max(limits.age_s, behind), far=True)
        return near_done and far_done

    def _sweep(self, place: bytes, until_s: int, far: bool) -> tuple[bytes, bool]:
        """Sweep from a place on through hours that ended by `until_s`. Returns the new place, and True if the end was reached."""
        inboxes, budget = self._inboxes, SWEEP_ENTRIES
        hours = until_s // _HOUR_S
        if hours <= 0:
            return place, True
        found = inboxes.table.keys(b"T" + place, time_key(hours, 0, 0), SWEEP_INBOXES)
        for key in found:
            _, hour, uin, lane = TIME_KEY.unpack(key)
            if not self.stays(uin):
                place = _after(key)
                continue
            inboxes.table.get(key)  # checks its CRC: no other inbox than the one meant may be touched
            if lane == NOTES_LANE:
                budget -= self._notes.expire(uin, hour) if far else 0
            else:
                head = inboxes.head(uin, lane)
                looked = self._expire(uin, lane, head, budget) if far else 0
                looked += self.settle(uin, lane, head, max(budget - looked, 0))
                budget -= looked
            if budget <= 0:
                return key[1:], False
            place = _after(key)
            if far:
                inboxes.table.delete(key)
        return place, len(found) < SWEEP_INBOXES


def _after(key: bytes) -> bytes:
    """The place after an hour's key."""
    return (int.from_bytes(key[1:], "big") + 1).to_bytes(_PLACE.size, "big")
