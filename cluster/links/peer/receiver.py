"""The receiving half of a link on one carrier: the data received from one sender, and when to acknowledge it.

Source: docs/links.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from cluster.links.datagrams.acknowledgement import encode
from cluster.links.datagrams.head import ACKNOWLEDGEMENT, FLAG_STREAM, FLAG_TRUNCATED, Codec
from cluster.links.datagrams.sequence import Tracker
from cluster.links.peer.window import INITIAL_BYTES
from pixiu.ids import EndpointID

ACK_DATAGRAMS: Final = 64
ACK_INTERVAL_S: Final = 0.010
ACTIVE_S: Final = 1.0
"""Time after its last data for which a sender counts as active, seconds."""
ACTIVE_CHECK_S: Final = 0.25
STREAM_WINDOW_BYTES: Final = 4 << 20
"""Bytes that the active senders share on streams, in addition to gRPC's own flow control."""


class Receiver:
    """One sender on one carrier.

    An acknowledgement leaves at the end of a turn: at once for control and for urgent data, after 64 datagrams or half of the
    window that was reported to the sender, and otherwise if the last one was 10 ms ago. So a single datagram on an idle link is
    acknowledged at once, and a busy link pays for 100 a second.
    """

    __slots__ = (
        "acknowledged_at",
        "active",
        "control",
        "data_at",
        "heard",
        "records",
        "sender",
        "stream",
        "unacknowledged",
        "unacknowledged_bytes",
        "urgent",
        "window",
    )

    def __init__(self, sender: EndpointID, stream: bool) -> None:
        self.sender = sender
        self.stream = stream
        self.records = Tracker()
        self.control = Tracker()
        self.unacknowledged = 0
        self.unacknowledged_bytes = 0
        """Unacknowledged bytes as the sender counts them in its window."""
        self.window = INITIAL_BYTES
        """Window last reported to the sender, bytes."""
        self.urgent = False
        self.acknowledged_at = float("-inf")
        self.data_at = float("-inf")
        self.active = False
        """True if it counts as an active sender; active senders' windows share the buffer."""
        self.heard = 0
        """Highest counter of the peer's acknowledgements on this carrier."""

    def due(self, now: float) -> bool:
        """True if an acknowledgement should leave at the end of this turn."""
        return (
            self.urgent
            or self.unacknowledged >= ACK_DATAGRAMS
            or 2 * self.unacknowledged_bytes >= self.window
            or now - self.acknowledged_at >= ACK_INTERVAL_S
        )

    def acknowledgement(self, codec: Codec, counter: int, layout_version: int, window: int, now: float) -> bytes:
        """Make the acknowledgement to send now."""
        self.unacknowledged = self.unacknowledged_bytes = 0
        self.window = window
        self.urgent = False
        self.acknowledged_at = now
        body, ranges, cut = encode(self.records, self.control, window)
        flags = (FLAG_STREAM if self.stream else 0) | (FLAG_TRUNCATED if cut else 0)
        return codec.pack(ACKNOWLEDGEMENT, flags, ranges, counter, layout_version, self.sender, [body])

    @property
    def lost(self) -> int:
        """Number of missing items."""
        return self.records.lost + self.control.lost

    @property
    def reordered(self) -> int:
        """Number of late items."""
        return self.records.reordered + self.control.reordered

    @property
    def duplicates(self) -> int:
        """Number of repeated items."""
        return self.records.duplicates + self.control.duplicates


class Shares:
    """The window of each sender: half the receive buffer, divided by the number of active senders."""

    def __init__(self, receive_buffer_bytes: int) -> None:
        self.receive_buffer_bytes = receive_buffer_bytes
        """Buffer size that the kernel granted."""
        self._active = 0
        self._counted_at = float("-inf")

    def window(self, receiver: Receiver, everybody: Iterable[Receiver], now: float) -> int:
        """The window to report to a sender, in bytes. Active senders are counted four times a second; a new one counts at once."""
        if now - self._counted_at >= ACTIVE_CHECK_S:
            self._counted_at = now
            self._active = 0
            for one in everybody:
                one.active = now - one.data_at < ACTIVE_S
                self._active += one.active
        if not receiver.active:
            receiver.active = True
            self._active += 1
        return (STREAM_WINDOW_BYTES if receiver.stream else self.receive_buffer_bytes // 2) // self._active
