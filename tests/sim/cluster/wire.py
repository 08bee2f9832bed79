"""The network of a simulated cluster: datagrams between addresses, and streams, which keep order or break.

Every datagram that carries items and never reaches the process that it is for is noted, so that what links count as
lost can be compared with what was.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from cluster.links.datagrams.head import CONTROL, CONTROL_FRAGMENT, HEAD, RECORD_FRAGMENT, RECORDS
from cluster.links.peer.sender import Address
from pixiu.ids import EndpointID
from tests.sim.network import Network

CONNECT_S = 0.02
RECONNECT_S = 0.3
NARROW_DELAY_S = (0.005, 0.009)
"""No hop takes twice as long as another, and no datagram overtakes another of its pair."""
MAX_DELIVERIES = 100_000
"""Several times what a run has: more is a storm."""
ITEMS = {RECORDS: RECORDS, CONTROL: CONTROL, RECORD_FRAGMENT: RECORDS, CONTROL_FRAGMENT: CONTROL}
"""What carries items, and whose sequence those are of."""


class Host(Protocol):
    """A process as the network sees it."""

    endpoint: EndpointID
    address: tuple[str, int]
    alive: bool

    def datagram(self, data: bytes, source: tuple[str, int]) -> None:
        """A datagram came."""

    def frame(self, data: bytes, stream: Stream) -> None:
        """A frame came on a stream that a peer opened."""

    def answer(self, data: bytes, stream: Stream) -> None:
        """A frame came back on a stream that this process opened."""

    def stream_state(self, peer: EndpointID, up: bool) -> None:
        """A stream that this process opened is there, or broke."""

    def wants_stream(self, peer: EndpointID) -> bool:
        """Whether a stream is still of use."""


@dataclass(eq=False)
class Stream:
    """One connection."""

    source: Host
    target: Host
    speaker: EndpointID | None = None
    """Who speaks, known from the first good frame."""
    broken: bool = False
    last: float = 0.0
    last_back: float = 0.0


class Wire(Network):
    """See the module.

    Args:
        seed: of everything that is random.
        drop: probability that a datagram is lost.
        repeat: that it arrives twice.
        reorder: whether datagrams overtake each other.
    """

    def __init__(self, seed: int, drop: float, repeat: float, reorder: bool) -> None:
        super().__init__(seed, drop, repeat)
        self.reorder = reorder
        self.hosts: dict[tuple[str, int], Host] = {}
        self.cut_ways: Counter[tuple[str, str]] = Counter()
        """(from, to) → the cuts that lie on this way now."""
        self.missing: Counter[tuple[int, int, int]] = Counter()
        """(sender, receiver, type) → items that never arrived there."""
        self._streams: dict[tuple[EndpointID, EndpointID], Stream] = {}
        self._opening: set[tuple[EndpointID, EndpointID]] = set()
        self._latest: dict[tuple[str, str], float] = {}
        self.streams_broken = self.datagrams_lost = 0

    def hop(self) -> float:
        """How long one datagram takes."""
        return self.delay() if self.reorder else self.rng.uniform(*NARROW_DELAY_S)

    def is_cut(self, source: tuple[str, int], target: tuple[str, int]) -> bool:
        """Whether nothing passes from one to the other."""
        return self.cut_ways[source[0], target[0]] > 0

    # --- datagrams

    def send(self, source: Host, peer: EndpointID | None, data: bytes, address: Address) -> None:
        """Send a datagram. `peer`: whom it is for, where it carries items."""
        target = (address[0], address[1])
        copies = 0 if self.is_cut(source.address, target) or self.chance(self.drop) else 2 if self.chance(self.repeat) else 1
        if not copies:
            self.datagrams_lost += 1
            self._miss(source.endpoint, peer, data)
            return
        left = [copies]

        def arrive() -> None:
            left[0] -= 1
            self.deliveries += 1
            assert self.deliveries < MAX_DELIVERIES, "more datagrams than a run can have: something goes round"
            self._note(source.address, target, data)
            host = self.hosts.get(target)
            if host is not None and host.alive and (peer is None or host.endpoint == peer):
                left[0] = -1
                host.datagram(data, source.address)
                return
            if not left[0]:
                self._miss(source.endpoint, peer, data)
            if host is not None and host.alive:
                host.datagram(data, source.address)

        for _ in range(copies):
            when = self.now + self.hop()
            if not self.reorder:
                way = (source.address[0], target[0])
                when = self._latest[way] = max(when, self._latest.get(way, 0.0))
            self.after(when - self.now, arrive)

    def forget(self, data: bytes, receiver: EndpointID) -> None:
        """A datagram that waited in a socket is gone with its process."""
        head = HEAD.unpack_from(data)
        self._miss(EndpointID(head[6]), receiver, data)

    def _miss(self, source: EndpointID, peer: EndpointID | None, data: bytes) -> None:
        if peer is not None and data[3] in ITEMS:
            type_ = ITEMS[data[3]]
            self.missing[source, peer, type_] += HEAD.unpack_from(data)[5] if type_ == data[3] else 1

    def _note(self, source: tuple[str, int], target: tuple[str, int], data: bytes) -> None:
        self._trace.update(b"%r%s>%s" % (self.now, source[0].encode(), target[0].encode()))
        self._trace.update(data)

    # --- streams

    def open(self, source: Host, peer: EndpointID, target: Host | None) -> None:
        """A stream to a peer is wanted."""
        key = (source.endpoint, peer)
        if key in self._opening or key in self._streams:
            return
        self._opening.add(key)

        def connect() -> None:
            self._opening.discard(key)
            if not source.alive or not source.wants_stream(peer):
                return
            if target is None or not target.alive or self._apart(source, target):
                self._opening.add(key)
                self.after(RECONNECT_S, connect)
                return
            self._streams[key] = Stream(source, target)
            source.stream_state(peer, True)

        self.after(CONNECT_S, connect)

    def frame(self, source: Host, peer: EndpointID, data: bytes) -> None:
        """Send on the stream that a process opened."""
        stream = self._streams.get((source.endpoint, peer))
        if stream is None:
            return
        if self._apart(stream.source, stream.target) or self.chance(self.drop / 20):
            self.break_stream(source.endpoint, peer)
            return
        stream.last = max(stream.last, self.now + self.hop())
        self.after(stream.last - self.now, lambda: self._frame(stream, data))

    def _frame(self, stream: Stream, data: bytes) -> None:
        if not stream.broken and stream.target.alive:
            self._note(stream.source.address, stream.target.address, data)
            stream.target.frame(data, stream)

    def reply(self, source: Host, peer: EndpointID, data: bytes) -> None:
        """Send on the stream that a peer opened to this process."""
        stream = self._streams.get((peer, source.endpoint))
        if stream is None:
            return
        stream.last_back = max(stream.last_back, self.now + self.hop())
        self.after(stream.last_back - self.now, lambda: self._answer(stream, data))

    def _answer(self, stream: Stream, data: bytes) -> None:
        if not stream.broken and stream.source.alive:
            self._note(stream.target.address, stream.source.address, data)
            stream.source.answer(data, stream)

    def break_stream(self, source: EndpointID, peer: EndpointID) -> None:
        """End a connection; what was on its way is lost."""
        stream = self._streams.pop((source, peer), None)
        if stream is None:
            return
        stream.broken = True
        self.streams_broken += 1

        def tell() -> None:
            if stream.source.alive:
                stream.source.stream_state(peer, False)
                if stream.source.wants_stream(peer):
                    self.after(RECONNECT_S, lambda: self.open(stream.source, peer, stream.target))

        self.after(CONNECT_S, tell)

    def break_streams_of(self, endpoint: EndpointID) -> None:
        """A process ended."""
        for source, peer in [key for key in self._streams if endpoint in key]:
            self.break_stream(source, peer)

    def _apart(self, one: Host, other: Host) -> bool:
        return self.is_cut(one.address, other.address) or self.is_cut(other.address, one.address)
