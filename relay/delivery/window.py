"""One lane of a session: the device's acknowledgements, what was sent, and what may be sent now. Pure.

    ─── cursor.up_to ─── sent ─── reach ─── cursor.up_to + 64 ─── last
        acknowledged              bound of acknowledgements       newest in the inbox

`sent` equals `reach`, except after a break, when sending begins again after the cursor.

Source: Long connections (the sliding window); docs/delivery.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from pixiu.wire.cursor import MAP_BITS, Cursor
from relay.delivery import events as ev

WINDOW: Final = MAP_BITS
"""Limit of entries sent beyond the cursor: unacknowledged entries are always within the cursor's map."""
WINDOW_BYTES: Final = 1 << 20
"""Size limit of unacknowledged records of a lane; no record is larger. It bounds what a gateway holds of a lane for a connection
that does not read."""
CAUTIOUS_BYTES: Final = 64 << 10
"""The limit, or a single record, for a device whose last connection ended without an acknowledgement."""
_WORTH_A_FETCH: Final = WINDOW // 2
_NO_SIZES: Final[list[int]] = []
"""Shared by all lanes without unacknowledged records, the great majority: never appended to."""


class Plan(NamedTuple):
    """Entries of one lane to send, in order."""

    lane: int
    items: list[tuple[int, int]]
    """(InboxSeq, MsgID); MsgID 0 for a gap marker."""
    end: int
    """The lane is sent up to here when all of them are."""


class Lane:
    """Cursor, window and gaps of one lane of a session."""

    __slots__ = (
        "_base", "_sizes", "_typical", "asked", "blocked_until", "bytes_sent", "cursor", "failures", "known", "last", "marked",
        "reach", "sent", "top", "unread", "window_bytes", "written",
    )  # fmt: skip

    def __init__(self) -> None:
        self.marked = 0
        """Sent up to here under an earlier session of this relay."""
        self.reach = 0
        self.open()

    def open(self, *, cautious: bool = False) -> None:
        """Begin a new session: the inbox must be read from the stored cursor. cautious: little is sent until `widen`."""
        self.window_bytes = min(CAUTIOUS_BYTES, WINDOW_BYTES) if cautious else WINDOW_BYTES
        """Limit of unacknowledged bytes."""
        self.marked = max(self.marked, self.reach)
        self.cursor = Cursor()
        self.sent = self.reach = self.last = self.failures = 0
        self.top = 0
        """The highest InboxSeq sent, as a record or a marker."""
        self.asked = self.written = 0
        """`asked`: `top` when the gateway was asked up to where it has written, 0: it was not. `written`: its latest answer."""
        self.known = False
        """True if the cursor was read."""
        self.unread = True
        """True if there may be more than `last`."""
        self.blocked_until = 0.0
        self._base = 0
        self._sizes: list[int] = _NO_SIZES
        """Bytes of the records of InboxSeqs `_base` + 1, `_base` + 2 …; 0 if not sent, or acknowledged."""
        self.bytes_sent = 0
        """Their sum."""
        self._typical = 1
        """Bytes of a record here: the next one's if it did not fit, else the last one's, or a decaying maximum."""

    def widen(self) -> None:
        """Use the full window: the device acknowledges what it gets."""
        self.window_bytes = WINDOW_BYTES

    @property
    def limit(self) -> int:
        """The highest InboxSeq within the window."""
        return self.cursor.up_to + WINDOW

    @property
    def unacknowledged(self) -> bool:
        """True if something sent is not acknowledged."""
        return self.cursor.up_to < self.reach

    @property
    def behind(self) -> bool:
        """True if the inbox has, or may have, more than was sent."""
        return self.unread or self.last > self.sent

    def worth_a_fetch(self, now: float) -> bool:
        """True if a read is due: the rest of the inbox fits the window, or half of the window is free."""
        if not self.unread and self.last <= self.sent:  # first the most frequent case: caught up
            return False
        room = self.limit - self.sent
        if now < self.blocked_until or room <= 0 or not self.fits(self._typical):
            return False
        return self.unread or room >= _WORTH_A_FETCH or self.last - self.sent <= room

    def fits(self, size: int, before: int = 0) -> bool:
        """True if a record of this size may be sent now, after others of `before` bytes that are sent with it."""
        sent = self.bytes_sent + before
        return not sent or sent + size <= self.window_bytes

    @property
    def most(self) -> int:
        """Number of entries worth requesting: more would be fetched in vain."""
        return max(1, min(WINDOW, self.limit - self.sent, (self.window_bytes - self.bytes_sent) // self._typical))

    def wait_for_room(self, size: int) -> None:
        """Note that the next record, of this size, does not fit: it is fetched again when it does."""
        self._typical = max(size, self._typical)

    def takes(self, seq: int) -> bool:
        """True if an entry is the next after those sent, and may be sent."""
        return self.known and not self.unread and seq == self.sent + 1 and self.last <= self.sent and seq <= self.limit

    def acknowledge(self, up_to: int, bits: int) -> bool:
        """Apply an acknowledgement, limited to what was sent. Returns True if something changed."""
        if up_to >= self.reach:
            up_to, bits = self.reach, 0
        else:
            bits &= (1 << (self.reach - up_to)) - 1
        cursor = self.cursor
        changed = cursor.acknowledge(up_to, bits)
        if cursor.up_to > self.sent:
            self.sent = cursor.up_to
        if changed and self._sizes:
            self._make_space()
        return changed

    def _make_space(self) -> None:
        """Release the space of acknowledged records."""
        sizes, up_to, bits = self._sizes, self.cursor.up_to, self.cursor.bits
        if up_to > self._base:
            freed = up_to - self._base
            if freed >= len(sizes):
                self.bytes_sent, self._base, self._sizes = 0, up_to, _NO_SIZES
                return
            self.bytes_sent -= sum(sizes[:freed])
            del sizes[:freed]
            self._base = up_to
        while bits:
            highest = bits.bit_length() - 1
            bits ^= 1 << highest
            index = up_to + highest - self._base
            if 0 <= index < len(sizes):
                self.bytes_sent -= sizes[index]
                sizes[index] = 0

    @property
    def all_written(self) -> bool:
        """True if the gateway has reported that it wrote everything sent before it was asked."""
        return 0 < self.asked <= self.written

    def rewind(self, written: int = 0) -> None:
        """Prepare redelivery of entries that are neither acknowledged nor up to `written`."""
        self.marked = max(self.marked, self.reach)
        self.last = max(self.last, self.reach, self.sent)
        self.sent = max(self.cursor.up_to, min(written, self.top))
        self.top = min(self.top, self.sent)
        self.asked = self.written = 0
        self._sizes = self._sizes[: max(self.sent - self._base, 0)] or _NO_SIZES
        self.bytes_sent = sum(self._sizes)

    def room_for(self, first: int, records: Sequence[bytes], most: int) -> int:
        """Number of records from an InboxSeq on that may be sent now: up to the first one that does not fit, is missing or has more
        than `most` bytes."""
        count, room, sent = 0, self.cursor.up_to + WINDOW - first + 1, self.bytes_sent
        for record in records:
            size = len(record)
            if count >= room or not 0 < size <= most or (sent and sent + size > self.window_bytes):
                break
            sent += size
            count += 1
        return count

    def sent_records(self, first: int, records: Sequence[bytes]) -> None:
        """Note that the records from this InboxSeq on were sent."""
        sizes = self._sizes
        if not sizes:
            self._base = first - 1
            sizes = self._sizes = []
        elif first != self._base + len(sizes) + 1:
            sizes += [0] * (first - 1 - self._base - len(sizes))
        typical, sent = self._typical, self.bytes_sent
        for record in records:
            size = len(record)
            sizes.append(size)
            sent += size
            typical = typical * 3 // 4
            if size > typical:
                typical = size
        self._typical, self.bytes_sent = typical, sent
        self.top = first + len(records) - 1
        self.sent_up_to(self.top)

    def sent_up_to(self, seq: int) -> None:
        """Note that everything up to here was sent, or need not be."""
        if seq > self.sent:
            self.sent = seq
        if self.sent > self.reach:
            self.reach = self.sent

    def plan(self, lane: int, listing: ev.Listing, asked: int, budget: int) -> Plan:
        """Take Pi's listing; choose the entries to send, with at most `budget` messages.

        Args:
            asked: number of entries requested: fewer mean that there are no more.
        """
        self.unread, self.last = False, max(self.last, listing.last)
        entries = listing.entries
        end = listing.last if len(entries) < asked else max((seq for seq, _ in entries), default=listing.last)
        if not self.known:
            self._learn(listing, end)
        items = self._skip(listing) if listing.floor > self.sent else []
        for seq, msg_id in entries:
            if seq <= self.sent or self.cursor.has(seq):
                continue
            if seq > self.limit or budget <= 0:
                end = seq - 1
                break
            items.append((seq, msg_id))
            budget -= 1
        return Plan(lane, items, end)

    def _learn(self, listing: ev.Listing, end: int) -> None:
        """Derive the cursor from the first read, of unacknowledged entries: missing ones were acknowledged."""
        self.known = True
        self.cursor.up_to, self.cursor.bits = listing.up_to, 0
        self.sent = listing.up_to
        first, last = max(listing.up_to, listing.floor) + 1, min(end, self.limit)
        if last < first:
            return
        there = {seq for seq, _ in listing.entries}
        bits = 0
        for seq in range(first, last + 1):
            if seq not in there:
                bits |= 1 << (seq - listing.up_to - 1)
        self.cursor.acknowledge(listing.up_to, bits)

    def _skip(self, listing: ev.Listing) -> list[tuple[int, int]]:
        """Skip entries that cannot be read any more; with a marker if this device misses them.

        A device that has acknowledged nothing yet misses only dropped entries, not those from before it.
        """
        floor = listing.floor
        if not self.cursor.up_to and listing.gap <= self.sent:
            self.cursor.acknowledge(floor, 0)
            self.sent = max(floor, self.cursor.up_to)
            return []
        missed = floor
        while missed > self.sent and self.cursor.has(missed):
            missed -= 1
        if missed == self.sent:
            return []
        self.cursor.acknowledge(missed - 1, 0)
        self.sent = missed - 1
        return [(missed, 0)]
