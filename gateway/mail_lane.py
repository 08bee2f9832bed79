"""One lane of the mail of a connection, under one session: what was written, and what of it is acknowledged. Pure.

    ─── up_to ───┬── written, some of it acknowledged: `bits` ──┬── highest
     acknowledged                  at most 64                   nothing written above

What lies between two entries that were written was acknowledged before this session, or never was: it counts as acknowledged.

Source: docs/delivery.md, docs/operations.md.
"""

from __future__ import annotations

from pixiu.mqtt.mail import seq_from
from pixiu.wire.cursor import MAP_BITS, Cursor


class MailLane:
    """What was written and acknowledged in one lane of a connection."""

    __slots__ = ("_cursor", "_missing", "highest")

    def __init__(self) -> None:
        self.highest = 0
        """The highest InboxSeq that was written."""
        self._cursor = Cursor()
        self._missing = 0
        """An InboxSeq that came and was not written: nothing above it is before it has come again."""

    @property
    def up_to(self) -> int:
        """Everything up to here is acknowledged."""
        return self._cursor.up_to

    @property
    def bits(self) -> int:
        """Bit i: `up_to` + 1 + i, too."""
        return self._cursor.bits

    @property
    def unacknowledged(self) -> int:
        """How many entries wait for the client."""
        return self.highest - self._cursor.up_to - self._cursor.bits.bit_count()

    def write(self, first: int, count: int = 1, *, releases: bool = False) -> int:
        """Note so many entries from one above `highest` on as written. How many of them may be: none behind what is missing, or
        beyond the window.

        releases: everything below the first is gone, and waits no longer.
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
        """An entry above `highest` is not written: it must come again first."""
        self._missing = min(self._missing or seq, seq)

    def acknowledge(self, first: int, last: int) -> tuple[int, bool]:
        """The client has got these. How many it had not acknowledged before, and whether all were written."""
        known = last <= self.highest
        up_to = self._cursor.up_to
        low, high = max(first, up_to + 1), min(last, self.highest)
        if low > high:
            return 0, known
        before = self.unacknowledged
        self._cursor.acknowledge(up_to, ((1 << (high - low + 1)) - 1) << (low - up_to - 1))
        return before - self.unacknowledged, known

    def seq_of(self, packet_id: int) -> int:
        """The InboxSeq that waits, or may wait, under an MQTT packet identifier of this lane; 0: none."""
        seq = seq_from(packet_id, self._cursor.up_to + 1)
        return seq if seq <= self.highest else 0
