"""What a role sees of its links: peers, what arrives, what is sent.

A link carries batches of records and control messages to one peer, over datagrams or a stream. The role names
peers by their endpoint ID (63 random bits, new with every start of a process).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from pixiu.ids import EndpointID
from pixiu.placement.link_quality import Quality


class PeerState(Enum):
    """What heartbeats say of a peer (docs/links.md)."""

    UNKNOWN = "unknown"
    """New; nothing heard yet. Counts as usable for the first seconds."""
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


class Outcome(Enum):
    """What became of a batch or of control messages that a link handed over."""

    TAKEN = "taken"
    NOT_TAKEN = "not_taken"
    """Some of it could not be handled: the sender's parcel settles as not handled, and it may send elsewhere."""
    MALFORMED = "malformed"
    """Dropped whole and counted; the sender's parcel settles as not handled."""


class LinkHandler(Protocol):
    """What a role's shell gives to its links. Called in the event loop; must not raise and must not block."""

    def on_records(self, peer: EndpointID, data: bytes, start: int, end: int, count: int) -> Outcome:
        """`count` records lie in data[start:end]."""

    def on_control(self, peer: EndpointID, messages: list[bytes]) -> Outcome:
        """Serialized `Control` messages; MALFORMED when one does not parse."""

    def on_settled(self, peer: EndpointID, settled: list[tuple[int, bool]]) -> None:
        """What became of parcels that were sent with a token: (token, True) when the peer has handled all of it,
        (token, False) when some of it was lost, dropped or the peer is dead."""

    def on_peer_state(self, peer: EndpointID, state: PeerState) -> None:
        """A peer's state changed."""

    def on_heartbeat(self, peer: EndpointID, reply: bool, attachment: bytes) -> bytes:
        """A heartbeat (or the reply to ours) with the peer's attachment. Returns the attachment of our reply
        (ignored where `reply` is True)."""


class Links(Protocol):
    """The links of one process. Implemented by `cluster.links.endpoint.Endpoint`."""

    def set_peers(self, peers: Iterable[Peer]) -> None:
        """Whom to heartbeat and to be able to send to; the links of others are closed, their parcels settle as False."""

    def set_attachment(self, peer: EndpointID, attachment: bytes) -> None:
        """What the heartbeats to this peer carry, at most 512 bytes. Sends a heartbeat at once when it changed."""

    def send_records(
        self,
        peer: EndpointID,
        records: list[bytes],
        lane: int = 1,
        token: int = 0,
        urgent: bool = False,
        more: bool = False,
    ) -> None:
        """Queue a parcel of whole records; leaves at the end of the event-loop turn. With a token other than 0,
        `on_settled` tells once what became of it (also when it cannot be queued at all); `urgent`: somebody waits for that, so
        that the peer acknowledges at once. `more`: other parcels follow at once, so that this one may wait for them, for 20 ms
        at most, until 64 KiB wait for the peer or fill its window, or a parcel without `more` is queued for any peer."""

    def send_control(self, peer: EndpointID, messages: list[bytes], token: int = 0) -> None:
        """The same for serialized `Control` messages. They never wait behind records."""

    def in_turn(self, act: Callable[[], None]) -> None:
        """Call this now; what it sends leaves when it returns, together, and not with the next turn of the event loop."""

    def at_end_of_input(self, act: Callable[[], None]) -> bool:
        """While what came is being handed over: call this when all of it was, once, before what was sent meanwhile leaves. False at
        any other time: nothing is called."""

    def state(self, peer: EndpointID) -> PeerState:
        """What is known of a peer; UNKNOWN for one that was never set."""

    def quality(self, peer: EndpointID) -> Quality:
        """How well a peer answers heartbeats, over the last few; `UNMEASURED` for one that was never set."""
