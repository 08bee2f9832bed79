"""The sending half of a link to one peer: selects the carrier of each item, and controls the rate.

    records, control ──► outbox ──► datagrams (window, sequence) ──► UDP      alone, joined, or in up to 16 fragments
                    └──► outbox ──► frames    (window, sequence) ──► framed stream      larger items

A larger item takes its *order* with it (records of the same key; all control messages): other items of that order go by stream too,
so that they stay in order. Everything else continues by datagrams, and waits for nothing.

Source: docs/links.md, "Sizes".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from cluster.links.datagrams.acknowledgement import Acknowledgement
from cluster.links.datagrams.fragments import INDEX_SIZE, MAX_FRAGMENTS, cut
from cluster.links.datagrams.head import (
    CONTROL,
    CONTROL_FRAGMENT,
    FLAG_STREAM,
    FLAG_URGENT,
    HEAD_SIZE,
    RECORD_FRAGMENT,
    RECORDS,
    Codec,
    join_control,
)
from cluster.links.options import LinkOptions
from cluster.links.peer.outbox import INFINITY, ItemRun, Outbox, Settlement, close
from cluster.links.peer.switch import Switch, order_of
from cluster.links.peer.window import Window
from cluster.links.stats import Counts
from pixiu.ids import EndpointID
from pixiu.wire.record import LINK_LANES

Address = tuple[str, int] | tuple[str, int, int, int]

KIND_RECORDS: Final = 0
KIND_CONTROL: Final = 1
_TYPES: Final = (RECORDS, CONTROL)
_FRAGMENTS: Final = (RECORD_FRAGMENT, CONTROL_FRAGMENT)
STREAM_WAIT_S: Final = 2.0
"""Longest wait of records for a stream that is not connected yet, seconds."""
CONTROL_WAIT_S: Final = 5.0
"""Longest wait of control messages, seconds; they are never pushed back as records are."""


class Drop:
    """Reasons why items were dropped before they were sent: the keys of `LinkStats.dropped`."""

    PUSH_BACK: Final = "push_back"
    NO_STREAM: Final = "no_stream"
    """Too large for datagrams, and the peer's stream did not come up the last time that it was waited for."""
    QUEUE_FULL: Final = "queue_full"
    PEER_SUSPECT: Final = "peer_suspect"
    PEER_DEAD: Final = "peer_dead"
    PEER_REMOVED: Final = "peer_removed"
    UNKNOWN_PEER: Final = "unknown_peer"
    TOO_LARGE: Final = "too_large"
    LINK_RAISED: Final = "link_raised"


def _ignore(_seconds: float) -> None:
    pass


class Outputs:
    """Output of the core, in order; the shell takes it after every call."""

    __slots__ = ("datagrams", "frames", "replies", "resets", "streams", "waited")

    def __init__(self) -> None:
        self.datagrams: list[tuple[bytes, Address]] = []
        self.frames: list[tuple[EndpointID, bytes]] = []
        """Frames for the stream that this process opened to the peer."""
        self.replies: list[tuple[EndpointID, bytes]] = []
        """Frames for the stream that the peer opened to this process."""
        self.streams: list[EndpointID] = []
        """Peers to which a stream is needed."""
        self.resets: list[EndpointID] = []
        """Peers whose stream hangs and must be broken."""
        self.waited: Callable[[float], None] = _ignore
        """Called whenever data leaves for a peer, with the time that its first item had waited in the queue, seconds."""


class Sender:
    """The sending half for one peer. All methods are called with the monotonic time in seconds."""

    __slots__ = (
        "_around",
        "_boxes",
        "_codec",
        "_count_drop",
        "_counts",
        "_max_bytes",
        "_options",
        "_outputs",
        "_payload",
        "_push_back_s",
        "_stream_missed",
        "_stream_since",
        "_streamed",
        "_switches",
        "address",
        "asks",
        "datagram",
        "layout_version",
        "peer",
        "settled",
        "stream",
        "stream_up",
    )

    def __init__(
        self,
        peer: EndpointID,
        options: LinkOptions,
        codec: Codec,
        outputs: Outputs,
        counts: Counts,
        count_drop: Callable[[str, int], None],
        first_sequence: int,
    ) -> None:
        self.peer = peer
        self.address: Address | None = None
        self.settled: list[tuple[int, bool]] = []
        """(token, all handled) of settled parcels; the core passes them on."""
        self.datagram = Window(first_sequence)
        self.stream = Window(first_sequence)
        self.stream_up = False
        self.layout_version = 0
        self.asks = False
        """True if a heartbeat should ask the peer for an acknowledgement, because the stream waits for it."""
        self._boxes = (Outbox(LINK_LANES, self.settled), Outbox(1, self.settled))
        """Items that wait for datagrams: records, control."""
        self._streamed = (Outbox(LINK_LANES, self.settled), Outbox(1, self.settled))
        """Items that wait for the stream: records, control."""
        self._switches = (Switch(), Switch())
        self._max_bytes = options.max_queue_bytes
        self._options = options
        self._codec = codec
        self._outputs = outputs
        self._counts = counts
        self._count_drop = count_drop
        self._around = HEAD_SIZE + codec.tag_size
        self._payload = options.mtu_bytes - self._around
        self._push_back_s = options.push_back_ms / 1000
        self._stream_since = 0.0
        self._stream_missed = False
        """True if the stream was waited for in vain and has not been connected since."""

    def locate(self, address: Address | None) -> None:
        """Set the address of the peer, which determines the size of its datagrams."""
        self.address = address
        loopback = address is not None and (address[0].startswith("127.") or address[0] == "::1")
        self._payload = (self._options.loopback_mtu_bytes if loopback else self._options.mtu_bytes) - self._around

    @property
    def busy(self) -> bool:
        """True if anything waits or is in flight."""
        return bool(self.datagram.cost or self.stream.cost or self.queued_bytes)

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait, including the cost of queueing."""
        (records, control), (streamed, large_control) = self._boxes, self._streamed
        return records.bytes + control.bytes + streamed.bytes + large_control.bytes

    def queue_records(self, records: list[bytes], lane: int, token: int, now: float, urgent: bool = False) -> None:
        """Queue a parcel of whole records."""
        self._queue(KIND_RECORDS, records, 0 if lane <= 0 else LINK_LANES - 1, token, now, urgent)

    def queue_control(self, messages: list[bytes], token: int, now: float) -> None:
        """Queue serialized control messages."""
        self._queue(KIND_CONTROL, join_control(messages), 0, token, now)

    def _queue(self, kind: int, items: list[bytes], lane: int, token: int, now: float, urgent: bool = False) -> None:
        if not items:
            if token:
                self.settled.append((token, True))
            return
        size = sum(map(len, items))
        largest = size if size <= self._payload else max(map(len, items))
        if largest > self._options.max_record_bytes + (4 if kind else 0):
            self._drop(Drop.TOO_LARGE, len(items))
            if token:
                self.settled.append((token, False))
            return
        settlement = Settlement(token, urgent) if token else None
        box, streamed, switch = self._boxes[kind], self._streamed[kind], self._switches[kind]
        if switch.orders and not streamed.bytes and not self.stream.in_flight(kind):
            switch.leave(now)
        if largest <= self._payload and not switch.orders:
            box.put(ItemRun(items, size, settlement, now), lane)
        else:
            self._sort(kind, items, lane, settlement, now)
        if box.bytes + streamed.bytes > self._max_bytes:
            first, second = (box, streamed) if box.oldest() <= streamed.oldest() else (streamed, box)
            dropped = first.overflow(self._max_bytes - second.bytes)
            self._drop(Drop.QUEUE_FULL, dropped + second.overflow(self._max_bytes - first.bytes))

    def _sort(self, kind: int, items: list[bytes], lane: int, settlement: Settlement | None, now: float) -> None:
        """Queue the items of a parcel, each for its carrier."""
        box, streamed, switch = self._boxes[kind], self._streamed[kind], self._switches[kind]
        payload = self._payload
        fragmented = MAX_FRAGMENTS * (payload - INDEX_SIZE)
        # The parcel must not be decided before all of it is queued.
        if settlement is not None:
            settlement.open += 1
        run: list[bytes] = []
        target = box
        for item in items:
            order = order_of(item) if kind == KIND_RECORDS else 0
            size = len(item)
            to = streamed if size > fragmented or order in switch.orders else box
            if run and (to is not target or (to is box and size > payload)):
                target.put(ItemRun(run, sum(map(len, run)), settlement, now), lane)
                run = []
            target = to
            if size > fragmented:
                if self._stream_missed and not self.stream_up:
                    self._outputs.streams.append(self.peer)
                    self._drop(Drop.NO_STREAM, 1)
                    if settlement is not None:
                        settlement.failed = True
                    continue
                switch.enter(order, box.number, now)
            if to is box and size > payload:
                parts = cut(item, payload)
                box.put(ItemRun(parts, sum(map(len, parts)), settlement, now, fragments=True), lane)
            else:
                run.append(item)
        if run:
            target.put(ItemRun(run, sum(map(len, run)), settlement, now), lane)
        if settlement is not None:
            close(settlement, True, self.settled)

    def _drop(self, reason: str, items: int) -> None:
        if items:
            self._counts.queue_drops += items
            self._count_drop(reason, items)

    def pump(self, now: float, least: int = 0) -> None:
        """Send what the windows allow, control first, and drop items that have waited too long. Fewer than `least` bytes of records
        wait for more, unless they fill the window; items for the stream do not wait."""
        if least:
            least = min(least, self.datagram.limit - self.datagram.cost)
        for kind in (KIND_CONTROL, KIND_RECORDS):
            box, streamed = self._boxes[kind], self._streamed[kind]
            waiting = box.bytes
            if waiting and (waiting >= least or kind == KIND_CONTROL):
                oldest = box.oldest()
                while box.bytes and self._send_datagram(kind, box, now):
                    pass
                if box.bytes != waiting:
                    self._outputs.waited(now - oldest)
                if box.bytes:
                    self._drop_late(box, self._least(kind), now)
            waiting = streamed.bytes
            if waiting:
                oldest = streamed.oldest()
                if self._may_stream(kind, now):
                    while streamed.bytes and self._send_frame(kind, streamed, now):
                        pass
                if streamed.bytes != waiting:
                    self._outputs.waited(now - oldest)
                self._drop_late_streamed(kind, streamed, now)

    def _may_stream(self, kind: int, now: float) -> bool:
        datagram, switch = self.datagram, self._switches[kind]
        if switch.may_stream(self._boxes[kind].first_number(), datagram.upcoming[kind], datagram.first_in_flight(kind), now):
            return True
        self.asks = switch.asks() or self.asks
        return False

    def _send_datagram(self, kind: int, box: Outbox, now: float) -> bool:
        address = self.address
        window = self.datagram
        payload, around = self._payload, self._around
        if address is None or not window.may_send(min(box.bytes, payload) + around, now):
            return False
        parts, size, settlements, fragments, last = box.take(payload)
        size += around
        data = self._codec.pack(
            _FRAGMENTS[kind] if fragments else _TYPES[kind],
            self._urgency(settlements) if settlements else 0,
            fragments or len(parts),
            window.upcoming[kind],
            self.layout_version,
            self.peer,
            parts,
        )
        self._outputs.datagrams.append((data, address))
        window.sent(kind, len(parts), size, settlements, now)
        self._sent(kind, last if fragments else len(parts), size)
        return True

    def _send_frame(self, kind: int, box: Outbox, now: float) -> bool:
        if not self.stream_up:
            self._outputs.streams.append(self.peer)
            return False
        window = self.stream
        room = self._options.stream_frame_bytes - self._around
        if not window.may_send(min(box.bytes, room) + self._around, now):
            return False
        parts, size, settlements, _, _ = box.take(room)
        flags, upcoming = FLAG_STREAM | self._urgency(settlements), window.upcoming[kind]
        frame = self._codec.pack(_TYPES[kind], flags, len(parts), upcoming, self.layout_version, self.peer, parts)
        self._outputs.frames.append((self.peer, frame))
        window.sent(kind, len(parts), size + self._around, settlements, now)
        self._sent(kind, len(parts), size + self._around)
        return True

    def _urgency(self, settlements: list[Settlement]) -> int:
        for settlement in settlements:
            if settlement.urgent:
                return FLAG_URGENT
        return 0

    def _sent(self, kind: int, items: int, size: int) -> None:
        counts = self._counts
        counts.datagrams_sent += 1
        counts.bytes_sent += size
        if kind == KIND_RECORDS:
            counts.records_sent += items
        else:
            counts.control_sent += items

    def _least(self, kind: int) -> float:
        return CONTROL_WAIT_S if kind == KIND_CONTROL else self._push_back_s

    def _drop_late(self, box: Outbox, wait_s: float, now: float) -> None:
        while box.bytes and now >= (oldest := box.oldest()) + wait_s:
            self._drop(Drop.PUSH_BACK, box.drop_older(oldest))

    def _drop_streamed_at(self, kind: int, box: Outbox) -> float:
        """Time at which the first item for the stream has waited too long."""
        least = self._least(kind)
        if self.stream_up:
            # Items that waited for the stream get the usual time once it is connected.
            return max(box.oldest(), self._stream_since) + least
        return box.oldest() + max(least, STREAM_WAIT_S)

    def _drop_late_streamed(self, kind: int, box: Outbox, now: float) -> None:
        while box.bytes and now >= self._drop_streamed_at(kind, box):
            self._drop(Drop.PUSH_BACK, box.drop_older(box.oldest()))
            if not self.stream_up:
                # Small items shall not wait any longer for a stream that does not come up.
                self._stream_missed = True
                self._drop(Drop.PUSH_BACK, box.clear())
                self._switches[kind].reset()

    def acknowledge(self, acknowledgement: Acknowledgement, stream: bool, now: float) -> None:
        """Handle the peer's acknowledgement."""
        window = self.stream if stream else self.datagram
        self._counts.sent_lost += window.acknowledge(acknowledgement[:2], acknowledgement.window, self.settled, now)

    def connected(self, up: bool, now: float) -> None:
        """Note that the stream to the peer was connected or broke: data in flight on it may not have arrived."""
        self.stream_up = up
        self._stream_since = now
        self._stream_missed = False
        if not up:
            self._counts.sent_lost += self.stream.void(self.settled)

    def expire(self, now: float) -> bool:
        """Give up data that has been in flight for 3 s without an acknowledgement. True if the datagrams' window was void."""
        if self.stream.expired(now):
            self._counts.sent_lost += self.stream.void(self.settled)
            self._outputs.resets.append(self.peer)
        if self.datagram.expired(now):
            self._counts.sent_lost += self.datagram.void(self.settled)
            return True
        return False

    def probe_due(self, now: float) -> bool:
        """True if a heartbeat should reveal a lost tail: nothing is acknowledged, and no datagram left as a probe."""
        if not self.datagram.probe_due(now):
            return False
        self.datagram.probed(now)
        return True

    def suspect(self) -> None:
        """Settle waiting records as not handled: the peer may be gone, and senders that can use another one. Records that wait for
        this peer, or hang in the stream to it, would arrive after later ones. Source: docs/promises.md."""
        self._drop(Drop.PEER_SUSPECT, self._boxes[KIND_RECORDS].clear() + self._streamed[KIND_RECORDS].clear())
        if self.stream.in_flight(KIND_RECORDS):
            self._counts.sent_lost += self.stream.void(self.settled)
            self._outputs.resets.append(self.peer)

    def fail(self, reason: str) -> None:
        """Settle everything as not handled: the peer is dead or removed."""
        for box in (*self._boxes, *self._streamed):
            self._drop(reason, box.clear())
        self._counts.sent_lost += self.datagram.void(self.settled) + self.stream.void(self.settled)

    def deadline(self, now: float) -> float:
        """Time at which this side needs attention again; infinity if it is not `busy`."""
        found = self.datagram.deadline(True)
        (records, control), (streamed, large_control) = self._boxes, self._streamed
        if records.bytes:
            found = min(found, records.oldest() + self._push_back_s)
        if control.bytes:
            found = min(found, control.oldest() + CONTROL_WAIT_S)
        if streamed.bytes or large_control.bytes or self.stream.cost:
            found = min(found, self._stream_deadline(now))
        return found

    def _stream_deadline(self, now: float) -> float:
        found = self.stream.deadline(self._streamed[KIND_RECORDS].bytes > 0)
        for kind in (KIND_RECORDS, KIND_CONTROL):
            streamed = self._streamed[kind]
            if streamed.bytes:
                until = self._switches[kind].until
                found = min(found, self._drop_streamed_at(kind, streamed), until if until > now else INFINITY)
        return found
