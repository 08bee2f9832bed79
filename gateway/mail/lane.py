"""One lane of a connection's mail, under one session: what was written, and what of it is acknowledged. Pure.

    ─── up_to ───┬── written, some of it acknowledged: `bits` ──┬── highest
     acknowledged                  at most 64                   nothing written above

Numbers between two written entries were acknowledged before this session, or never existed: they count as acknowledged.

Source: docs/delivery.md, docs/operations.md.
"""

from __future__ import annotations

from cluster.mqtt.mail import seq_from
from pixiu.wire.cursor import MAP_BITS, Cursor


class MailLane:
    """Written and acknowledged entries in one lane of a connection."""

    __slots__ = ("_cursor", "_missing", "highest")

    def __init__(self) -> None:
        self.highest = 0
        """The highest InboxSeq that was written."""
        self._cursor = Cursor()
        self._missing = 0
        """Lowest InboxSeq that came and was not written; nothing above it is written before it has come again."""

    @property
    def up_to(self) -> int:
        """Everything up to here is acknowledged."""
        return self._cursor.up_to

    @property
    def bits(self) -> int:
        """Bit i: `up_to` + 1 + i is acknowledged too."""
        return self._cursor.bits

    @property
    def unacknowledged(self) -> int:
        """Number of written entries that are not acknowledged."""
        return self.highest - self._cursor.up_to - self._cursor.bits.bit_count()

    def write(self, first: int, count: int = 1, *, releases: bool = False) -> int:
        """Note `count` entries from `first` on, which is above `highest`, as written. Returns how many may be written: none after a
        missing one, or beyond the window.

        releases: everything below the first is gone, and is not waited for.
        """
        if not releases and 0 < self._missing < first:
            return 0
        up_to = self._cursor.up_to
        waiting = up_to < self.highest and not releases
        written = max(0, min(count, (up_to if waiting else first - 1) + MAP_BITS - first + 1))
        if written:
            if waiting:
                between = (1 << (first - self.highest - 1)) - 1
                self._cursor.bits |= between << (self.highest - up_to)
            else:
                self._cursor = Cursor(first - 1)
            self.highest = first + written - 1
            if self._missing <= self.highest:
                self._missing = 0
        if written < count:
            self.hold_back(first + written)
        return written

    def hold_back(self, seq: int) -> None:
        """Note that an entry above `highest` is not written: it must come again first."""
        self._missing = min(self._missing or seq, seq)

    def acknowledge(self, first: int, last: int) -> tuple[int, bool]:
        """Acknowledge a range. Returns the number of entries that were not acknowledged before, and whether all were written."""
        known = last <= self.highest
        up_to = self._cursor.up_to
        low, high = max(first, up_to + 1), min(last, self.highest)
        if low > high:
            return 0, known
        before = self.unacknowledged
        self._cursor.acknowledge(up_to, ((1 << (high - low + 1)) - 1) << (low - up_to - 1))
        return before - self.unacknowledged, known

    def seq_of(self, packet_id: int) -> int:
        """InboxSeq that waits, or may wait, under an MQTT packet identifier of this lane; 0: none."""
        seq = seq_from(packet_id, self._cursor.up_to + 1)
        return seq if seq <= self.highest else 0
