"""The sending half of a link to one peer: two queues, two carriers, and the order between them.

    records ──► outbox ──┬── small ──► datagrams (window, sequence) ──► UDP
    control ──► outbox ──┴── large ──► frames    (window, sequence) ──► gRPC stream

A large item waits until the datagrams before it are acknowledged (or 100 ms), and what is queued behind it waits until the
stream has acknowledged it, so that one sender's order survives the change of carrier.

Source: docs/links.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from cluster.links.acknowledgement import Acknowledgement
from cluster.links.head import CONTROL, FLAG_STREAM, HEAD_SIZE, RECORDS, Codec, join_control
from cluster.links.options import STREAM, LinkOptions
from cluster.links.outbox import ANY, LARGE, SMALL, Outbox, Run, Settlement
from cluster.links.stats import Counts
from cluster.links.window import Window
from pixiu.ids import EndpointID
from pixiu.wire.record import LINK_LANES

Address = tuple[str, int] | tuple[str, int, int, int]

KIND_RECORDS: Final = 0
KIND_CONTROL: Final = 1
_TYPES: Final = (RECORDS, CONTROL)
SWITCH_WAIT_S: Final = 0.1
"""How long a large item waits for the acknowledgement of the datagrams before it."""
STREAM_WAIT_S: Final = 2.0
"""How long records wait for a stream that is not connected yet."""
CONTROL_WAIT_S: Final = 5.0
"""How long control messages wait; they are never pushed back as records are."""


class Drop:
    """Why items were dropped before they were sent: the keys of `LinkStats.dropped`."""

    PUSH_BACK: Final = "push_back"
    QUEUE_FULL: Final = "queue_full"
    PEER_SUSPECT: Final = "peer_suspect"
    PEER_DEAD: Final = "peer_dead"
    PEER_REMOVED: Final = "peer_removed"
    UNKNOWN_PEER: Final = "unknown_peer"
    TOO_LARGE: Final = "too_large"


def _ignore(_seconds: float) -> None:
    pass


class Outputs:
    """What the core wants sent, in order; the shell takes it after every call."""

    __slots__ = ("datagrams", "frames", "replies", "resets", "streams", "waited")

    def __init__(self) -> None:
        self.datagrams: list[tuple[bytes, Address]] = []
        self.frames: list[tuple[EndpointID, bytes]] = []
        """For the stream that this process opened to the peer."""
        self.replies: list[tuple[EndpointID, bytes]] = []
        """For the stream that the peer opened to this process."""
        self.streams: list[EndpointID] = []
        """Peers to which a stream is wanted."""
        self.resets: list[EndpointID] = []
        """Peers to which the stream hangs: break it."""
        self.waited: Callable[[float], None] = _ignore
        """Told, each time that something leaves for a peer, how long the first of it had waited in the queue, seconds."""


class Sender:
    """What leaves for one peer. All methods are called with the monotonic time in seconds."""

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
        """(token, all handled) of the parcels that were decided; the core hands them on."""
        self.datagram = Window(first_sequence)
        self.stream = Window(first_sequence)
        self.stream_up = False
        self.layout_version = 0
        self._outboxes = (
            Outbox(LINK_LANES, options.max_queue_bytes, self.settled),
            Outbox(1, options.max_queue_bytes, self.settled),
        )
        self._options = options
        self._codec = codec
        self._outputs = outputs
        self._counts = counts
        self._count_drop = count_drop
        self._around = HEAD_SIZE + codec.tag_size
        self._payload = options.mtu_bytes - self._around
        self._push_back_s = options.push_back_ms / 1000
        self._stream_since = 0.0
        self._switch_at = [0.0, 0.0]
        self._by_stream = options.transport == STREAM

    def locate(self, address: Address | None) -> None:
        """Where the peer is; its datagrams' size follows from it."""
        self.address = address
        loopback = address is not None and (address[0].startswith("127.") or address[0] == "::1")
        self._payload = (self._options.loopback_mtu_bytes if loopback else self._options.mtu_bytes) - self._around

    @property
    def busy(self) -> bool:
        """Whether anything waits or is in flight."""
        return bool(self._outboxes[0].bytes or self._outboxes[1].bytes or self.datagram.cost or self.stream.cost)

    @property
    def queued_bytes(self) -> int:
        """What waits, with the cost of queueing it."""
        return self._outboxes[0].bytes + self._outboxes[1].bytes

    def queue_records(self, records: list[bytes], lane: int, token: int, now: float) -> None:
        """Queue a parcel of whole records."""
        self._queue(KIND_RECORDS, records, 0 if lane <= 0 else LINK_LANES - 1, token, now)

    def queue_control(self, messages: list[bytes], token: int, now: float) -> None:
        """Queue serialized control messages."""
        self._queue(KIND_CONTROL, join_control(messages), 0, token, now)

    def _queue(self, kind: int, items: list[bytes], lane: int, token: int, now: float) -> None:
        if not items:
            if token:
                self.settled.append((token, True))
            return
        settlement = Settlement(token) if token else None
        box = self._outboxes[kind]
        size = sum(map(len, items))
        payload = self._payload
        if size <= payload or max(map(len, items)) <= payload:
            box.put(Run(items, size, False, settlement, now), lane)
        elif max(map(len, items)) > self._options.max_record_bytes + (4 if kind else 0):
            self._drop(Drop.TOO_LARGE, len(items))
            if token:
                self.settled.append((token, False))
        else:
            for run in _runs(items, payload, settlement, now):
                box.put(run, lane)
        if box.bytes > box.max_bytes:
            self._drop(Drop.QUEUE_FULL, box.overflow())

    def _drop(self, reason: str, items: int) -> None:
        if items:
            self._counts.queue_drops += items
            self._count_drop(reason, items)

    def pump(self, now: float) -> None:
        """Send what the windows allow, control first, and drop what has waited too long."""
        for kind in (KIND_CONTROL, KIND_RECORDS):
            box = self._outboxes[kind]
            if box.bytes:
                waiting, first = box.bytes, box.head()
                self._pump(kind, box, now)
                if first is not None and box.bytes != waiting:
                    self._outputs.waited(now - first.queued_at)
                self._drop_late(kind, box, now)

    def _pump(self, kind: int, box: Outbox, now: float) -> None:
        while True:
            run = box.head()
            if run is None:
                self._switch_at[kind] = 0.0
                return
            if self._waits_for_stream(kind, run):
                if not self._send_frame(kind, box, now):
                    return
            elif self.stream.in_flight(kind) or not self._send_datagram(kind, box, now):
                return

    def _send_datagram(self, kind: int, box: Outbox, now: float) -> bool:
        address = self.address
        window = self.datagram
        if address is None or not window.may_send(min(box.bytes, self._payload) + self._around, now):
            return False
        self._switch_at[kind] = 0.0
        parts, size, settlements = box.take(self._payload, SMALL)
        data = self._codec.pack(_TYPES[kind], 0, len(parts), window.upcoming[kind], self.layout_version, self.peer, parts)
        self._outputs.datagrams.append((data, address))
        self._sent(kind, window, len(parts), size + self._around, settlements, now)
        return True

    def _send_frame(self, kind: int, box: Outbox, now: float) -> bool:
        if self.datagram.in_flight(kind):
            if not self._switch_at[kind]:
                self._switch_at[kind] = now + SWITCH_WAIT_S
            if now < self._switch_at[kind]:
                return False
        if not self.stream_up:
            self._outputs.streams.append(self.peer)
            return False
        window = self.stream
        room = self._options.stream_frame_bytes - self._around
        if not window.may_send(min(box.bytes, room) + self._around, now):
            return False
        which = ANY if self._by_stream and kind == KIND_RECORDS else LARGE
        parts, size, settlements = box.take(room, which)
        upcoming = window.upcoming[kind]
        frame = self._codec.pack(_TYPES[kind], FLAG_STREAM, len(parts), upcoming, self.layout_version, self.peer, parts)
        self._outputs.frames.append((self.peer, frame))
        self._sent(kind, window, len(parts), size + self._around, settlements, now)
        return True

    def _sent(self, kind: int, window: Window, count: int, size: int, settlements: list[Settlement], now: float) -> None:
        window.sent(kind, count, size, settlements, now)
        counts = self._counts
        counts.datagrams_sent += 1
        counts.bytes_sent += size
        if kind == KIND_RECORDS:
            counts.records_sent += count
        else:
            counts.control_sent += count

    def _waits_for_stream(self, kind: int, run: Run) -> bool:
        return run.large or (self._by_stream and kind == KIND_RECORDS)

    def _drop_at(self, kind: int, run: Run, queued_at: float) -> float:
        """When a run that was queued then has waited too long, `run` being the next one to leave."""
        least = CONTROL_WAIT_S if kind == KIND_CONTROL else self._push_back_s
        if self._waits_for_stream(kind, run):
            if not self.stream_up:
                return queued_at + max(least, STREAM_WAIT_S)
            # What waited for the stream gets the usual time once it is there.
            return max(queued_at, self._stream_since) + least
        return queued_at + least

    def _drop_late(self, kind: int, box: Outbox, now: float) -> None:
        while (run := box.head()) is not None:
            oldest = box.oldest()
            if now < self._drop_at(kind, run, oldest):
                return
            self._drop(Drop.PUSH_BACK, box.drop_older(oldest))

    def acknowledge(self, acknowledgement: Acknowledgement, stream: bool, now: float) -> None:
        """Take the peer's acknowledgement of what it received."""
        window = self.stream if stream else self.datagram
        self._counts.sent_lost += window.acknowledge(acknowledgement[:2], acknowledgement.window, self.settled, now)

    def connected(self, up: bool, now: float) -> None:
        """The stream to the peer is there, or broke: what was in flight on it is not known to have arrived."""
        self.stream_up = up
        self._stream_since = now
        if not up:
            self._counts.sent_lost += self.stream.void(self.settled)

    def expire(self, now: float) -> bool:
        """Give up what has been in flight for 3 s without an acknowledgement. True when the datagrams' window was void."""
        if self.stream.expired(now):
            self._counts.sent_lost += self.stream.void(self.settled)
            self._outputs.resets.append(self.peer)
        if self.datagram.expired(now):
            self._counts.sent_lost += self.datagram.void(self.settled)
            return True
        return False

    def probe_due(self, now: float) -> bool:
        """Whether a heartbeat should reveal a lost tail: nothing is acknowledged, and no datagram left as a probe."""
        if not self.datagram.probe_due(now):
            return False
        self.datagram.probed(now)
        return True

    def suspect(self) -> None:
        """The peer may be gone, and whoever can sends to another one: records that wait for it, or hang in the stream to it,
        would arrive behind later ones. They settle as not handled. Source: docs/promises.md."""
        self._drop(Drop.PEER_SUSPECT, self._outboxes[KIND_RECORDS].clear())
        if self.stream.in_flight(KIND_RECORDS):
            self._counts.sent_lost += self.stream.void(self.settled)
            self._outputs.resets.append(self.peer)

    def fail(self, reason: str) -> None:
        """The peer is dead or removed: everything settles as not handled."""
        for box in self._outboxes:
            self._drop(reason, box.clear())
        self._counts.sent_lost += self.datagram.void(self.settled) + self.stream.void(self.settled)

    def deadline(self, now: float) -> float:
        """When this side must be looked at again; infinity when nothing waits or is in flight."""
        found = min(self.datagram.deadline(True), self.stream.deadline(self._outboxes[0].bytes > 0))
        for kind, box in enumerate(self._outboxes):
            run = box.head()
            if run is not None:
                found = min(found, self._drop_at(kind, run, box.oldest()))
                if self._switch_at[kind] > now:
                    found = min(found, self._switch_at[kind])
        return found


def _runs(items: list[bytes], payload: int, settlement: Settlement | None, now: float) -> list[Run]:
    """A parcel cut where items that fit into a datagram and larger ones meet."""
    runs: list[Run] = []
    start = 0
    while start < len(items):
        large = len(items[start]) > payload
        end = start + 1
        while end < len(items) and (len(items[end]) > payload) is large:
            end += 1
        some = items[start:end]
        runs.append(Run(some, sum(map(len, some)), large, settlement, now))
        start = end
    return runs
