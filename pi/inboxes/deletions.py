"""Entries that a user deleted, for all devices at once: they stay stored for the dedupe window, and nobody reads them. Pure.

    deleted at the floor      the floor passes them
    further on                a range, until the floor reaches it; a device's read lists them with MsgID 0, so that its
                              relay reports a gap there and the cursor passes it

Source: Long connections (history); docs/pi.md.
"""

from __future__ import annotations

from pi.inboxes.inbox import Head
from pi.inboxes.inbox_table import InboxTable
from pi.inboxes.ranges import NO_RANGES, Ranges
from pi.keys import ValueDamaged, deleted_key
from pixiu.wire.inbox_operations import MAX_LANE, Code


class Deletions:
    """The deleted ranges of a state's inboxes."""

    def __init__(self, inboxes: InboxTable) -> None:
        self._inboxes = inboxes

    def of(self, uin: int, lane: int, head: Head) -> Ranges:
        """Return the ranges deleted in an inbox above its floor."""
        if head.deleted is None:
            body = self._inboxes.table.get(deleted_key(uin, lane))
            if body is None:
                text = f"what was deleted in lane {lane} of inbox {uin:016x} is missing; repair this replica from a peer"
                raise ValueDamaged(text, deleted_key(uin, lane))
            head.deleted = Ranges(body)
        return head.deleted

    def delete(self, uin: int, lane: int, first: int, last: int) -> int:
        """Delete the readable part of a range. Returns the number of entries deleted, or `-Code`; the caller must settle the floor
        then."""
        if lane > MAX_LANE or not 0 < first <= last:
            return -Code.INVALID_ARGUMENT
        head = self._inboxes.head(uin, lane)
        first, last = max(first, head.floor + 1), min(last, head.last)
        if first > last:
            return 0
        ranges = Ranges(self.of(uin, lane, head).encode())
        taken = last - first + 1 - ranges.count(first, last)
        if not ranges.add(first, last):
            return -Code.TOO_MANY_DELETIONS
        if taken:
            self._keep(uin, lane, head, ranges)
        return taken

    def raised(self, uin: int, lane: int, head: Head) -> None:
        """Drop ranges below the floor, which rose."""
        ranges = self.of(uin, lane, head)
        if len(ranges):
            rest = Ranges(ranges.encode())
            rest.cut(head.floor)
            self._keep(uin, lane, head, rest)

    def _keep(self, uin: int, lane: int, head: Head, ranges: Ranges) -> None:
        table, key = self._inboxes.table, deleted_key(uin, lane)
        head.deleted = ranges if len(ranges) else NO_RANGES
        if len(ranges):
            table.put(key, ranges.encode())
        else:
            table.delete(key)
        self._inboxes.changed(uin, lane, head)
