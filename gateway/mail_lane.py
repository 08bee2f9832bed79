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
    """See the module."""

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

    def write(self, seq: int, *, releases: bool = False) -> bool:
        """Note an entry above `highest` as written. False when it may not be: it is beyond the window, or behind what is missing.

        releases: everything below it is gone, and waits no longer.
        """
        up_to = self._cursor.up_to
        waiting = up_to < self.highest
        if not releases:
            beyond = waiting and seq > up_to + MAP_BITS
            if beyond:
                self.hold_back(seq)
            if beyond or 0 < self._missing < seq:
                return False
        if releases or not waiting:
            self._cursor = Cursor(seq - 1)
        else:
            between = (1 << (seq - self.highest - 1)) - 1
            self._cursor.bits |= between << (self.highest - up_to)
        self.highest = seq
        if self._missing <= seq:
            self._missing = 0
        return True

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
