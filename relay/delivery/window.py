"""One lane of a session: what the device has, what was sent to it, and what may be sent now. Pure.

    ─── cursor.up_to ─── sent ─── reach ─── cursor.up_to + 64 ─── last
        acknowledged              bound of acknowledgements       newest in the inbox

`sent` is `reach` but after a break, when sending begins again behind the cursor.

Source: Long connections (the sliding window); docs/delivery.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from pixiu.wire.cursor import MAP_BITS, Cursor
from relay.delivery import events as ev

WINDOW: Final = MAP_BITS
"""A lane is sent up to so many entries beyond its cursor: what is unacknowledged is always within the cursor's map."""
WINDOW_BYTES: Final = 1 << 20
"""Of records that were sent on a lane and are not acknowledged; no record is larger. So a gateway holds at most so much of a lane
for a connection that does not read."""
CAUTIOUS_BYTES: Final = 64 << 10
"""Instead, or a single record, for a device that let its last connection end without an acknowledgement."""
_WORTH_A_FETCH: Final = WINDOW // 2
_NO_SIZES: Final[list[int]] = []
"""Of all lanes on which nothing is unacknowledged, which most are: never appended to."""


class Plan(NamedTuple):
    """What to send of one lane, in order."""

    lane: int
    items: list[tuple[int, int]]
    """(InboxSeq, MsgID); MsgID 0 for a gap marker."""
    end: int
    """When all of them are sent, the lane is sent up to here."""


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
        """A new session: the inbox is to be read from the stored cursor. cautious: little is sent until `widen`."""
        self.window_bytes = min(CAUTIOUS_BYTES, WINDOW_BYTES) if cautious else WINDOW_BYTES
        """What may be unacknowledged."""
        self.marked = max(self.marked, self.reach)
        self.cursor = Cursor()
        self.sent = self.reach = self.last = self.failures = 0
        self.top = 0
        """The highest InboxSeq that was sent, as a record or a marker."""
        self.asked = self.written = 0
        """`top` when the gateway was asked what it has written, 0: it was not; what it has said since."""
        self.known = False
        """The cursor was read."""
        self.unread = True
        """There may be more than `last`."""
        self.blocked_until = 0.0
        self._base = 0
        self._sizes: list[int] = _NO_SIZES
        """Bytes of the records of InboxSeqs `_base` + 1, `_base` + 2 …, where they were sent and are not acknowledged, else 0."""
        self.bytes_sent = 0
        """Their sum."""
        self._typical = 1
        """Bytes of a record here: of the next one, if it did not fit, else of the last one, or of larger ones before it."""

    def widen(self) -> None:
        """The device acknowledges what it gets."""
        self.window_bytes = WINDOW_BYTES

    @property
    def limit(self) -> int:
        """The highest InboxSeq that the window takes."""
        return self.cursor.up_to + WINDOW

    @property
    def unacknowledged(self) -> bool:
        """Whether something that was sent is not acknowledged."""
        return self.cursor.up_to < self.reach

    @property
    def behind(self) -> bool:
        """Whether the inbox has, or may have, more than was sent."""
        return self.unread or self.last > self.sent

    def worth_a_fetch(self, now: float) -> bool:
        """Whether to read now: everything that is left fits the window, or half of the window is free."""
        if not self.unread and self.last <= self.sent:  # first what most lanes are: caught up
            return False
        room = self.limit - self.sent
        if now < self.blocked_until or room <= 0 or not self.fits(self._typical):
            return False
        return self.unread or room >= _WORTH_A_FETCH or self.last - self.sent <= room

    def fits(self, size: int, before: int = 0) -> bool:
        """Whether a record of so many bytes may be sent now, behind others of so many that are sent with it."""
        sent = self.bytes_sent + before
        return not sent or sent + size <= self.window_bytes

    @property
    def most(self) -> int:
        """How many entries are worth asking for: more would be fetched in vain."""
        return max(1, min(WINDOW, self.limit - self.sent, (self.window_bytes - self.bytes_sent) // self._typical))

    def wait_for_room(self, size: int) -> None:
        """The next record, of so many bytes, does not fit: it is fetched again when it does."""
        self._typical = max(size, self._typical)

    def takes(self, seq: int) -> bool:
        """Whether an entry follows what was sent, and may be sent."""
        return self.known and not self.unread and seq == self.sent + 1 and self.last <= self.sent and seq <= self.limit

    def acknowledge(self, up_to: int, bits: int) -> bool:
        """Take an acknowledgement as far as it is of what was sent. Whether something changed."""
        if up_to >= self.reach:
            up_to, bits = self.reach, 0
        else:
            bits &= (1 << (self.reach - up_to)) - 1
        cursor = self.cursor
        changed = cursor.acknowledge(up_to, bits)
        if cursor.up_to > self.sent:
            self.sent = cursor.up_to
        if changed and self._sizes:
            self._make_room()
        return changed

    def _make_room(self) -> None:
        """What was acknowledged counts no more."""
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
        """Whether the gateway has said that it wrote everything that had been sent when it was asked."""
        return 0 < self.asked <= self.written

    def rewind(self, written: int = 0) -> None:
        """What is neither acknowledged nor among the first so many entries, which were written, is to be redelivered."""
        self.marked = max(self.marked, self.reach)
        self.last = max(self.last, self.reach, self.sent)
        self.sent = max(self.cursor.up_to, min(written, self.top))
        self.top = min(self.top, self.sent)
        self.asked = self.written = 0
        self._sizes = self._sizes[: max(self.sent - self._base, 0)] or _NO_SIZES
        self.bytes_sent = sum(self._sizes)

    def room_for(self, first: int, records: Sequence[bytes], most: int) -> int:
        """How many records from an InboxSeq on may be sent now: up to the first one that does not fit, is not there or has more
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
        """The records from this InboxSeq on were sent."""
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
        """Everything up to here was sent, or need not be."""
        if seq > self.sent:
            self.sent = seq
        if self.sent > self.reach:
            self.reach = self.sent

    def plan(self, lane: int, listing: ev.Listing, asked: int, budget: int) -> Plan:
        """Take what Pi says, and say what of it to send: at most `budget` messages.

        Args:
            asked: how many entries were asked for: fewer mean that there are no more.
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
        """The first read is of what the device has not acknowledged: what is missing in it was."""
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
        """Pass over what cannot be read any more; with a marker where this device misses it.

        A device that has acknowledged nothing yet misses only what was dropped, not what was there before it.
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
