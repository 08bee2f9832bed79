"""Counters of links: plain integers, incremented in place, read on demand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from cluster.links.api import PeerState
from pixiu.ids import EndpointID


@dataclass(slots=True)
class Counts:
    """Counters of one link (or of all together). Items are records or control messages."""

    records_sent: int = 0
    records_received: int = 0
    control_sent: int = 0
    control_received: int = 0
    datagrams_sent: int = 0
    """Datagrams and frames with items."""
    datagrams_received: int = 0
    bytes_sent: int = 0
    """Bytes of datagrams and frames with items, heads included."""
    bytes_received: int = 0
    local_batches_sent: int = 0
    """Batches handed over to a role of the same process; their items count as all others."""
    local_batches_received: int = 0
    local_bytes_sent: int = 0
    """Bytes of items in these batches."""
    local_bytes_received: int = 0
    acknowledgements_sent: int = 0
    acknowledgements_received: int = 0
    heartbeats_sent: int = 0
    heartbeats_received: int = 0
    lost: int = 0
    """Items that a peer sent and that did not arrive; decreases when they arrive late."""
    reordered: int = 0
    """Items that arrived late."""
    duplicates: int = 0
    """Items refused because they had arrived before."""
    sent_lost: int = 0
    """Items sent that the peer did not handle, according to its acknowledgements."""
    queue_drops: int = 0
    """Items that were dropped before they were sent: pushed back too long, queue full, peer dead."""

    def add(self, other: Counts) -> None:
        """Add another's counts to these."""
        for name in COUNT_NAMES:
            setattr(self, name, getattr(self, name) + getattr(other, name))


COUNT_NAMES = tuple(one.name for one in fields(Counts))


@dataclass(frozen=True, slots=True)
class PeerStats:
    """One peer as `Endpoint.stats` shows it."""

    role: str
    """Role of the peer; empty for a sender that is not in the view."""
    state: PeerState
    counts: Counts
    rtt_us: int
    """Round-trip time of the last answered heartbeat; 0 before the first."""
    window_bytes: int
    in_flight_bytes: int
    queued_bytes: int


@dataclass(frozen=True, slots=True)
class LinkStats:
    """Counters of a process's links."""

    total: Counts
    """Counters of all links, closed ones included."""
    peers: Mapping[EndpointID, PeerStats]
    refused: Mapping[str, int]
    """Datagrams and frames refused, by reason."""
    dropped: Mapping[str, int]
    """Items dropped before they were sent, by reason."""
    send_errors: Mapping[str, int] = field(default_factory=dict)
    """Failed datagrams by the name of the error number."""
    receive_errors: Mapping[str, int] = field(default_factory=dict)
    items_given_up: int = 0
    """Items of which some fragments arrived, and the rest not in time."""
    kernel_drops: int = 0
    """Datagrams that the kernel dropped because the socket's buffer was full."""
    receive_buffer_bytes: int = 0
    """Buffer size that the kernel granted."""
