"""What links count: plain integers, added to in place, read when somebody asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from cluster.links.api import PeerState
from pixiu.ids import EndpointID


@dataclass(slots=True)
class Counts:
    """What one link has counted (or all together). Items are records or control messages."""

    records_sent: int = 0
    records_received: int = 0
    control_sent: int = 0
    control_received: int = 0
    datagrams_sent: int = 0
    """Datagrams and frames with items."""
    datagrams_received: int = 0
    bytes_sent: int = 0
    """Of datagrams and frames with items, heads included."""
    bytes_received: int = 0
    acknowledgements_sent: int = 0
    acknowledgements_received: int = 0
    heartbeats_sent: int = 0
    heartbeats_received: int = 0
    lost: int = 0
    """Items that a peer sent and that did not arrive; goes down when they arrive late."""
    reordered: int = 0
    """Items that arrived late."""
    duplicates: int = 0
    """Items refused because they had arrived before."""
    sent_lost: int = 0
    """Items sent that the peer did not handle, as far as its acknowledgements say."""
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
    """Empty for a sender that is not in the view."""
    state: PeerState
    counts: Counts
    rtt_us: int
    """Of the last heartbeat that was answered; 0 before the first."""
    window_bytes: int
    in_flight_bytes: int
    queued_bytes: int


@dataclass(frozen=True, slots=True)
class LinkStats:
    """What the links of a process have counted."""

    total: Counts
    """All links, those that are gone included."""
    peers: Mapping[EndpointID, PeerStats]
    refused: Mapping[str, int]
    """What came in and was not taken, by reason (datagrams and frames)."""
    dropped: Mapping[str, int]
    """What was to be sent and was dropped before, by reason (items)."""
    send_errors: Mapping[str, int] = field(default_factory=dict)
    """By the name of the error number (datagrams)."""
    receive_errors: Mapping[str, int] = field(default_factory=dict)
    items_given_up: int = 0
    """Items of which some fragments came, and the rest not in time."""
    kernel_drops: int = 0
    """Datagrams that the kernel dropped because the socket's buffer was full."""
    receive_buffer_bytes: int = 0
    """What the kernel gave."""
