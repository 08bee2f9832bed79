"""A link to one other process: both halves on both carriers, and the peer's liveness."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cluster.links.api import Peer, PeerState
from cluster.links.peer.liveness import Liveness
from cluster.links.peer.outbox import INFINITY
from cluster.links.peer.receiver import Receiver
from cluster.links.peer.sender import Sender
from cluster.links.stats import Counts, PeerStats
from pixiu.ids import EndpointID
from pixiu.placement.link_quality import Heartbeats


class Link:
    """A link to one other process: both halves on both carriers, and the peer's liveness."""

    __slots__ = (
        "attachment",
        "counts",
        "heard_at",
        "heard_counter",
        "heartbeat_at",
        "heartbeat_sent_at",
        "id",
        "introduced",
        "layout_version",
        "liveness",
        "peer",
        "quality",
        "receivers",
        "sender",
    )

    def __init__(self, id_: EndpointID, sender: Sender, counts: Counts, liveness: Liveness) -> None:
        self.id = id_
        self.peer: Peer | None = None
        self.sender = sender
        self.receivers = (Receiver(id_, False), Receiver(id_, True))
        self.counts = counts
        self.liveness = liveness
        self.attachment = b""
        self.heard_at = -INFINITY
        self.heard_counter = 0
        """Highest counter of the peer's heartbeats."""
        self.heartbeat_at = INFINITY
        self.heartbeat_sent_at = -INFINITY
        self.introduced = False
        """True if the peer has answered and knows this process: it takes our data."""
        self.layout_version = 0
        self.quality = Heartbeats()

    def totals(self) -> Counts:
        """A copy of this link's counters, including those of its sequences."""
        counts = Counts()
        counts.add(self.counts)
        counts.lost = sum(one.lost for one in self.receivers)
        counts.reordered = sum(one.reordered for one in self.receivers)
        counts.duplicates = sum(one.duplicates for one in self.receivers)
        return counts

    @property
    def state(self) -> PeerState:
        """State of the peer; `UNKNOWN` if the sender is not in the view."""
        return self.liveness.state if self.peer is not None else PeerState.UNKNOWN

    def stats(self) -> PeerStats:
        """A copy of the peer's statistics."""
        sender = self.sender
        return PeerStats(
            role=self.peer.role if self.peer is not None else "",
            state=self.state,
            counts=self.totals(),
            rtt_us=self.quality.last_us,
            window_bytes=sender.datagram.limit,
            in_flight_bytes=sender.datagram.cost + sender.stream.cost,
            queued_bytes=sender.queued_bytes,
        )


def stats_of(links: Iterable[Link]) -> Iterator[tuple[EndpointID, PeerStats]]:
    """Copies of each link's counters, made as they are taken."""
    for link in links:  # no generator expression: compiled, it would make a list at once
        yield link.id, link.stats()
