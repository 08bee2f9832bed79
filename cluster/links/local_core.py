"""The links of one role: calls to the roles of the same process, datagrams and streams to all others. Pure.

Source: docs/links.md, "Inside a process".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import chain

from cluster.links.api import LinkHandler, Peer, PeerState
from cluster.links.link import HELD_BYTES, LinkCore
from cluster.links.local import PERFECT, LocalPort, LocalSwitch
from cluster.links.options import LinkOptions
from cluster.links.pauses import Pauses
from cluster.links.peer.outbox import INFINITY
from cluster.links.peer.sender import KIND_CONTROL, KIND_RECORDS, Address
from cluster.links.refusals import no_warning
from cluster.links.stats import LinkStats, PeerStats
from cluster.trust.key_ring import KeyRing
from pixiu.ids import EndpointID
from pixiu.placement.link_quality import Quality


class LocalCore(LinkCore):
    """A `LinkCore` that knows the roles of its process."""

    def __init__(
        self,
        endpoint: EndpointID,
        options: LinkOptions,
        handler: LinkHandler,
        switch: LocalSwitch,
        *,
        layout_version: Callable[[], int] = lambda: 0,
        on_warning: Callable[..., None] = no_warning,
        knows: Callable[[EndpointID], bool] = lambda _id: True,
        ring: KeyRing | None = None,
        role: str = "",
    ) -> None:
        """Create the core, as `LinkCore` does. `switch`: of the process; the shell attaches the port when it starts."""
        super().__init__(
            endpoint, options, handler, layout_version=layout_version, on_warning=on_warning, knows=knows, ring=ring, role=role
        )
        self.pauses = Pauses(options)
        self.port = LocalPort(switch, endpoint, role, options, handler, layout_version, self.refusals, self.dropped, self.outputs)

    def set_peers(self, peers: Mapping[EndpointID, tuple[Peer, Address | None]], now: float) -> None:
        """Set the peers, as `LinkCore.set_peers`."""
        local = self.port.set_peers(peers, now)
        super().set_peers({id_: peer for id_, peer in peers.items() if id_ not in local} if local else peers, now)

    def state(self, id_: EndpointID) -> PeerState:
        """State of a peer."""
        return self.port.peers.get(id_) or super().state(id_)

    def quality(self, id_: EndpointID) -> Quality:
        """Quality of a peer's answers to heartbeats."""
        return PERFECT if id_ in self.port.peers else super().quality(id_)

    def layout_of(self, id_: EndpointID) -> int:
        """The layout version of a peer in this process, or in the last datagram of another one."""
        other = self.port.switch.ports.get(id_)
        return other.layout_version() if other is not None else super().layout_of(id_)

    def role_of(self, id_: EndpointID) -> str:
        """The role of a process that is in this one; empty for all others."""
        other = self.port.switch.ports.get(id_)
        return other.role if other is not None else ""

    def set_attachment(self, id_: EndpointID, attachment: bytes, now: float) -> None:
        """Set the attachment of heartbeats to a peer, as `LinkCore.set_attachment`."""
        super().set_attachment(id_, attachment, now)
        if id_ in self.port.peers:
            self.port.set_attachment(id_, attachment)

    def send_records(
        self, id_: EndpointID, records: list[bytes], lane: int, token: int, now: float, urgent: bool = False, more: bool = False
    ) -> None:
        """Queue a parcel of whole records, as `LinkCore.send_records`."""
        if self.port.send(id_, KIND_RECORDS, records, 0 if lane <= 0 else 1, token, now):
            if more or self._held_until != -INFINITY:
                self.hold(more, now)
        else:
            super().send_records(id_, records, lane, token, now, urgent, more)

    def send_control(self, id_: EndpointID, messages: list[bytes], token: int, now: float) -> None:
        """Queue serialized control messages, as `LinkCore.send_control`."""
        if not self.port.send(id_, KIND_CONTROL, messages, 0, token, now):
            super().send_control(id_, messages, token, now)

    def flush(self, now: float, every: bool = False) -> None:
        """Send queued data, as `LinkCore.flush`; what is for this process leaves with the next `LocalSwitch.work`."""
        if self.port.queued:
            self.port.flush(0 if every or now >= self._held_until else HELD_BYTES)
        super().flush(now, every)

    def flush_locally(self) -> bool:
        """Flush what is for this process if nothing else was queued, as in most turns of a role whose peers are here. Returns False
        if something may have been: call `flush`."""
        if self._busy or self._held_until != -INFINITY or self._changed or self._states or self._orphans:
            return False
        if self.port.queued:
            self.port.flush(0)
        return True

    def poll(self, now: float) -> None:
        """Perform everything due, as `LinkCore.poll`."""
        self.port.poll(now)
        super().poll(now)

    def next_deadline(self) -> float:
        """Time at which `poll` is due, as `LinkCore.next_deadline`."""
        return min(super().next_deadline(), self.port.beat_at)

    def close_port(self, now: float) -> None:
        """Leave the switch: settle what it has not handed over as not handled."""
        self.port.switch.detach(self.port, now)

    def stats_by_peer(self) -> tuple[LinkStats, Iterator[tuple[EndpointID, PeerStats]]]:
        """Counters, as `LinkCore.stats_by_peer`."""
        stats, peers = super().stats_by_peer()
        stats.total.add(self.port.gone)
        return stats, chain(peers, self.port.stats())

    def peer_states(self) -> Counter[PeerState]:
        """Number of peers in each state."""
        return super().peer_states() + Counter(self.port.peers.values())
