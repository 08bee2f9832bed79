"""The options of a process's links."""

from __future__ import annotations

from dataclasses import dataclass

from pixiu.errors import ConfigurationError
from pixiu.wire.record import HEADER_SIZE, MAX_RECORD_BYTES
from pixiu.wire.uin_list import OVERHEAD as ADDRESSED_OVERHEAD

MIN_MTU_BYTES = 1200
"""An acknowledgement with all its missing ranges and a heartbeat with a full attachment fit into this."""
MAX_MTU_BYTES = 65_000
MAX_FRAME_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class LinkOptions:
    """Behaviour of a process's links. All processes of a cluster should agree.

    Source: docs/links.md.
    """

    mtu_bytes: int = 1400
    """The largest datagram to another machine, head and tag included."""

    loopback_mtu_bytes: int = 8192
    """The largest datagram between loopback addresses."""

    receive_buffer_bytes: int = 8 << 20
    """Socket buffer requested from the kernel; windows are computed from the size that it granted."""

    push_back_ms: int = 200
    """Longest wait of a record for its peer's window before it is dropped, oldest first."""

    heartbeat_interval_ms: int = 1000
    """Time between heartbeats to each peer."""

    suspect_after: int = 2
    """Missed heartbeats after which a peer is suspect."""

    dead_after: int = 4
    """Missed heartbeats after which a peer is dead."""

    max_queue_bytes: int = 16 << 20
    """Limit of what waits for one peer, for records and for control each; above it the oldest records are dropped."""

    max_record_bytes: int = MAX_RECORD_BYTES
    """The largest record or control message; above a datagram's size it goes by stream."""

    stream_frame_bytes: int = 262_144
    """Limit of what is joined in one message of a stream."""

    def validate(self) -> None:
        """Raise `ConfigurationError` that names the first key at fault and the allowed values."""
        bounds = (
            ("mtu_bytes", MIN_MTU_BYTES, MAX_MTU_BYTES),
            ("loopback_mtu_bytes", MIN_MTU_BYTES, MAX_MTU_BYTES),
            ("receive_buffer_bytes", 65_536, 1 << 30),
            ("push_back_ms", 1, 60_000),
            ("heartbeat_interval_ms", 10, 60_000),
            ("suspect_after", 1, 100),
            ("dead_after", 2, 1000),
            ("max_record_bytes", HEADER_SIZE, MAX_RECORD_BYTES + ADDRESSED_OVERHEAD),
            ("max_queue_bytes", 2 * MAX_RECORD_BYTES, 1 << 32),
            ("stream_frame_bytes", MIN_MTU_BYTES, MAX_FRAME_BYTES),
        )
        for key, least, most in bounds:
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise ConfigurationError(f"links.{key} = {value!r}: use a whole number from {least} to {most}")
        if self.dead_after <= self.suspect_after:
            raise ConfigurationError(f"links.dead_after = {self.dead_after}: use more than suspect_after ({self.suspect_after})")
