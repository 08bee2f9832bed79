"""The interface between a role and its links: peers, received data, sent data.

A link carries batches of records and control messages to one peer, over datagrams or a stream. The role names peers by their
endpoint ID (63 random bits, new with every start of a process).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from pixiu.ids import EndpointID
from pixiu.placement.link_quality import Quality


class PeerState(Enum):
    """State of a peer according to heartbeats (docs/links.md)."""

    UNKNOWN = "unknown"
    """New; nothing received yet. Counts as usable for the first seconds."""
    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Peer:
    """A process that this one sends to."""

    id: EndpointID
    role: str
    host: str
    port: int
    stream_port: int = 0
    """Port of framed streams; 0: none is known, so nothing too large for datagrams can be sent to it."""

    @property
    def endpoint(self) -> EndpointID:
        """The same as `id`: a peer can be reached by framed streams."""
        return self.id


class Outcome(Enum):
    """Outcome of a batch or of control messages that a link handed over."""

    TAKEN = "taken"
    ANSWERED = "answered"
    """Taken, and the role has an answer for it or it was one: the acknowledgement of control messages is in no hurry."""
    NOT_TAKEN = "not_taken"
    """Some of it could not be handled: the sender's parcel settles as not handled, and the sender may try elsewhere."""
    MALFORMED = "malformed"
    """Dropped completely and counted; the sender's parcel settles as not handled."""


class LinkHandler(Protocol):
    """Callbacks of a role's shell for its links. Called in the event loop; must not raise and must not block."""

    def on_records(self, peer: EndpointID, data: bytes, start: int, end: int, count: int) -> Outcome:
        """Handle `count` records in data[start:end]."""

    def on_control(self, peer: EndpointID, messages: list[bytes]) -> Outcome:
        """Handle serialized `Control` messages; MALFORMED if one does not parse."""

    def on_settled(self, peer: EndpointID, settled: list[tuple[int, bool]]) -> None:
        """Learn the outcome of parcels sent with a token: (token, True) if the peer has handled all of it, (token, False) if some
        of it was lost or dropped, or the peer is dead."""

    def on_peer_state(self, peer: EndpointID, state: PeerState) -> None:
        """Learn the new state of a peer."""

    def on_heartbeat(self, peer: EndpointID, reply: bool, attachment: bytes) -> bytes:
        """Handle a heartbeat (or the reply to ours) with the peer's attachment. Returns the attachment of our reply, which is
        ignored if `reply` is True."""


class Links(Protocol):
    """The links of one process. Implemented by `cluster.links.endpoint.Endpoint`."""

    late: bool
    """True while what is handed over came by datagrams during a pause of this process that was so long that its peers suspected it:
    senders may have sent later messages to others."""

    def set_peers(self, peers: Iterable[Peer]) -> None:
        """Set the peers to heartbeat and send to; links to all others are closed, and their parcels settle as False."""

    def set_attachment(self, peer: EndpointID, attachment: bytes) -> None:
        """Set the attachment of heartbeats to this peer, at most 512 bytes. Sends a heartbeat at once if it changed."""

    def send_records(
        self,
        peer: EndpointID,
        records: list[bytes],
        lane: int = 1,
        token: int = 0,
        urgent: bool = False,
        more: bool = False,
    ) -> None:
        """Queue a parcel of whole records; it leaves at the end of the event-loop turn.

        With a token other than 0, `on_settled` reports the parcel's outcome once, even if it cannot be queued at all. `urgent`:
        somebody waits for the outcome, so the peer acknowledges at once. `more`: other parcels follow at once, so this one may wait
        for them; at most for 20 ms, and only until 64 KiB wait for the peer or fill its window, or a parcel without `more` is
        queued for any peer."""

    def send_control(self, peer: EndpointID, messages: list[bytes], token: int = 0) -> None:
        """Queue serialized `Control` messages in the same way. They never wait for records."""

    def in_turn(self, act: Callable[[], None]) -> None:
        """Call this now. Everything that it sends leaves together when it returns, not in the next turn of the event loop."""

    def at_end_of_input(self, act: Callable[[], None]) -> bool:
        """While received data is being handed over, call this once after all of it and before the data sent meanwhile leaves. At
        any other time return False and call nothing."""

    def state(self, peer: EndpointID) -> PeerState:
        """State of a peer; UNKNOWN if it was never set."""

    def quality(self, peer: EndpointID) -> Quality:
        """Quality of a peer's answers to the last few heartbeats; `UNMEASURED` if it was never set."""
