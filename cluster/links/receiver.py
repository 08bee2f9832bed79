"""The receiving half of a link on one carrier: what came from one sender, and when to acknowledge it.

Source: docs/links.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from cluster.links.acknowledgement import encode
from cluster.links.head import ACKNOWLEDGEMENT, FLAG_STREAM, FLAG_TRUNCATED, Codec
from cluster.links.sequence import Tracker
from cluster.links.window import INITIAL_BYTES
from pixiu.ids import EndpointID

ACK_DATAGRAMS: Final = 64
ACK_INTERVAL_S: Final = 0.010
ACTIVE_S: Final = 1.0
"""A sender counts as active for so long after its last data."""
ACTIVE_CHECK_S: Final = 0.25
STREAM_WINDOW_BYTES: Final = 4 << 20
"""What the active senders share on streams; gRPC's own flow control stands behind it."""


class Receiver:
    """One sender on one carrier.

    An acknowledgement leaves at the end of a turn: at once for control and where somebody waits for it, after 64 datagrams or
    half of the window that the sender was told, and else when the last one was 10 ms ago, so that a single datagram on an
    idle link is acknowledged at once and a busy link pays for 100 a second.
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
        """As the sender counts them in its window."""
        self.window = INITIAL_BYTES
        """What the sender was told last, bytes."""
        self.urgent = False
        self.acknowledged_at = float("-inf")
        self.data_at = float("-inf")
        self.active = False
        """Whether it counts as an active sender, whose windows share the buffer."""
        self.heard = 0
        """The highest counter of the peer's acknowledgements on this carrier."""

    def due(self, now: float) -> bool:
        """Whether an acknowledgement should leave at the end of this turn."""
        return (
            self.urgent
            or self.unacknowledged >= ACK_DATAGRAMS
            or 2 * self.unacknowledged_bytes >= self.window
            or now - self.acknowledged_at >= ACK_INTERVAL_S
        )

    def acknowledgement(self, codec: Codec, counter: int, layout_version: int, window: int, now: float) -> bytes:
        """The acknowledgement to send now."""
        self.unacknowledged = self.unacknowledged_bytes = 0
        self.window = window
        self.urgent = False
        self.acknowledged_at = now
        body, ranges, cut = encode(self.records, self.control, window)
        flags = (FLAG_STREAM if self.stream else 0) | (FLAG_TRUNCATED if cut else 0)
        return codec.pack(ACKNOWLEDGEMENT, flags, ranges, counter, layout_version, self.sender, [body])

    @property
    def lost(self) -> int:
        """Items that are missing."""
        return self.records.lost + self.control.lost

    @property
    def reordered(self) -> int:
        """Items that came late."""
        return self.records.reordered + self.control.reordered

    @property
    def duplicates(self) -> int:
        """Items that came before."""
        return self.records.duplicates + self.control.duplicates


class Shares:
    """The window of each sender: half the receive buffer, divided by those that are active."""

    def __init__(self, receive_buffer_bytes: int) -> None:
        self.receive_buffer_bytes = receive_buffer_bytes
        """What the kernel gave."""
        self._active = 0
        self._counted_at = float("-inf")

    def window(self, receiver: Receiver, everybody: Iterable[Receiver], now: float) -> int:
        """The window to tell a sender, in bytes. `everybody` is counted anew four times a second; who is new counts at once."""
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
