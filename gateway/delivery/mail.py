"""Mail on a gateway: what was written to each connection, and what its client has acknowledged. Pure.

    relay ── MailArrived ──▶ runs: bound to a connection? session? above what was written? ── WriteMail ──▶ client
          ◀── one batch of {UpTo, map} a turn, on the stream of the session's relay ── acknowledgements, any order

A relay's envelopes and records are passed on as they came; only the flag of mail that was sent before may change.

For each connection it keeps the newest session, and for each lane two numbers and a map (`gateway.mail.lane`). Lower sessions are
refused, a higher one starts over. Mail that is not above what was written is dropped and answered with the acknowledged state.

If an entry could not be written, nothing after it goes out before it has come again: an acknowledgement covers everything up to a
number, so a lane may have no holes.

Source: docs/delivery.md; docs/delivery.md, "Rules for gateways".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from cluster.mqtt.mail import lane_of
from cluster.wire.v1 import delivery_pb2
from gateway import events as ev
from gateway.mail.lane import MailLane
from gateway.mail.run import MailRun, read_runs
from pixiu.errors import MalformedData
from pixiu.wire.record import INBOX_LANES

SPARE_DEVICES: Final = 1024
"""A relay may name this number of devices beyond twice the connections that take mail here. Policy: departed ones are forgotten; if
that is not enough, the stream ends."""
MAX_LAST_WORDS: Final = 10_000
"""Acknowledgements of ended connections that wait for a relay's stream. Policy: the oldest is forgotten, its mail sent again."""


class Acknowledgement(NamedTuple):
    """State of a device in a lane, as in `DeviceAcknowledgement`."""

    uin: int
    device: int
    session: int
    lane: int
    up_to: int
    bits: int
    written: int
    """The highest InboxSeq that was written to its connection."""


@dataclass(slots=True)
class MailCounters:
    """Counts of mail since the start."""

    delivered: int = 0
    repeats_dropped: int = 0
    again: int = 0
    """Marked as sent before, because this gateway wrote it to the connection under an earlier session."""
    gaps: int = 0
    """Gap markers, which report lost mail."""
    gaps_untold: int = 0
    """Gap markers for MQTT clients, which cannot be notified of them."""
    sessions_refused: int = 0
    without_connection: int = 0
    """For a device that is not here, or no longer takes mail."""
    held_back: int = 0
    """Beyond the window, or after something that could not be written: it comes again."""
    expired: int = 0
    """Expired mails for MQTT clients: acknowledged in their place. The SDK reports each to its application."""
    load_test_blocked: int = 0
    """Mails of load tests for MQTT clients: acknowledged in their place. The SDK asks its application."""
    damaged: int = 0
    acknowledged: int = 0
    acknowledgements_unknown: int = 0
    """Acknowledgements of mail that was not written to the connection in its session."""


@dataclass(slots=True)
class _Recipient:
    """A connection that gets mail."""

    connection: int
    """Below 0: it gets that of its session's inbox."""
    packets: bool
    uin: int = 0
    device: int = 0
    session: int = 0
    stream: int = 0
    """Of the relay that has the session."""
    lanes: list[MailLane] = field(default_factory=lambda: [MailLane() for _ in range(INBOX_LANES)])
    marked: list[int] = field(default_factory=lambda: [0] * INBOX_LANES)
    """Lane → highest InboxSeq written under earlier sessions."""


@dataclass(slots=True)
class _Stream:
    """State of one relay's delivery stream."""

    relay: int
    devices: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """(UIN, Pi's number) → (key, connect time)."""
    due: dict[tuple[int, int], None] = field(default_factory=dict)
    """(connection, lane) whose acknowledgement is to be sent; at most four for each connection."""
    last_words: deque[Acknowledgement] = field(default_factory=lambda: deque(maxlen=MAX_LAST_WORDS))


def read_batch(batch: delivery_pb2.DeliveryBatch) -> tuple[list[ev.MailDevice], list[MailRun]]:
    """Decode a relay's batch. Raises `MalformedData`: then none of it may be used."""
    if len(batch.deliveries) and not batch.count:
        raise MalformedData("a batch of deliveries says that there are none")
    devices = [ev.MailDevice(one.uin, one.key, one.connect_time, one.device) for one in batch.devices]
    return devices, read_runs(batch.deliveries, batch.count)


class MailBook:
    """The mail of all connections. Methods that take an event are handlers of the gateway's core.

    Args:
        target: (UIN, key, connect time) → the connection that gets the mail of the device; 0: none.
        takers: gives the number of connections that take mail, and of inboxes of sessions.
        packets: True if a connection speaks MQTT.
        unix_ms: clock for lifetimes, Unix milliseconds.
    """

    def __init__(
        self,
        target: Callable[[int, int, int], int],
        takers: Callable[[], int],
        packets: Callable[[int], bool],
        unix_ms: Callable[[], int],
    ) -> None:
        self._target, self._takers, self._packets, self._unix_ms = target, takers, packets, unix_ms
        self._recipients: dict[int, _Recipient] = {}
        self._streams: dict[int, _Stream] = {}
        self.counters = MailCounters()
        self.unacknowledged = 0
        """Entries written, and neither acknowledged nor given up."""

    @property
    def streams(self) -> int:
        """Number of relays that have a stream."""
        return len(self._streams)

    # --- relays

    def opened(self, event: ev.MailStreamOpened, now: float, out: list[ev.Effect]) -> None:
        """Add the stream of a relay that identified itself. An older stream of it ends: the relay has evidently lost that."""
        older = [number for number, stream in self._streams.items() if stream.relay == event.relay]
        for number in older:
            del self._streams[number]
        self._streams[event.stream] = _Stream(event.relay)
        out += [ev.EndMailStream(number, "this relay opened another stream") for number in older]

    def ended(self, event: ev.MailStreamClosed, now: float, out: list[ev.Effect]) -> None:
        """Remove a relay's stream and the devices that it named. What was written stays written."""
        self._streams.pop(event.stream, None)

    def arrived(self, event: ev.MailArrived, now: float, out: list[ev.Effect]) -> None:
        """Take a relay's batch."""
        stream = self._streams.get(event.stream)
        if stream is None:
            return
        if not self._bind(stream, event.devices):
            del self._streams[event.stream]
            text = "a stream of deliveries names more devices than take mail here"
            out.append(ev.EndMailStream(event.stream, text, at_fault=True))
            return
        writes: dict[int, ev.WriteMail] = {}
        asked: tuple[int, int] | None = None
        recipient: _Recipient | None = None
        for run in event.runs:
            if (run.uin, run.device) != asked:
                asked = run.uin, run.device
                recipient = self._recipient(stream, asked)
            if recipient is None:
                self.counters.without_connection += run.count
            else:
                self._take(recipient, event.stream, run, writes)
        out += [write for write in writes.values() if write.runs or write.anew]
        for lane in event.asked:
            recipient = self._recipient(stream, (lane.uin, lane.device))
            if recipient is not None and recipient.session == lane.session and 0 <= lane.lane < INBOX_LANES:
                recipient.stream = event.stream
                self._soon(recipient, lane.lane)
        out += self._due(event.stream)

    def take_acknowledgements(self, number: int, most: int) -> list[Acknowledgement]:
        """Take the acknowledgements to send on a stream now."""
        stream = self._streams.get(number)
        if stream is None:
            return []
        found = [stream.last_words.popleft() for _ in range(min(most, len(stream.last_words)))]
        while stream.due and len(found) < most:
            connection, lane = next(iter(stream.due))
            del stream.due[connection, lane]
            recipient = self._recipients.get(connection)
            if recipient is not None and recipient.stream == number:
                found.append(_acknowledgement(recipient, lane))
        return found

    # --- clients

    def acknowledged(self, event: ev.MailAcknowledged, now: float, out: list[ev.Effect]) -> None:
        """Take a client's acknowledgements: (lane, first, last), in any order."""
        recipient = self._recipients.get(event.connection)
        if recipient is None:
            self.counters.acknowledgements_unknown += len(event.ranges)
            return
        for lane, first, last in event.ranges:
            self._acknowledge(recipient, lane, first, last)
        out += self._due(recipient.stream)

    def packets_acknowledged(self, event: ev.PacketsAcknowledged, now: float, out: list[ev.Effect]) -> None:
        """Take a client's PUBACKs of these packets of QoS 1."""
        recipient = self._recipients.get(event.connection)
        if recipient is None:
            self.counters.acknowledgements_unknown += len(event.packet_ids)
            return
        for first, count in consecutive(event.packet_ids):
            lane = lane_of(first)
            if lane >= INBOX_LANES:
                self.counters.acknowledgements_unknown += count
                continue
            for index in range(count):
                seq = recipient.lanes[lane].seq_of(first + index)
                if seq:
                    self._acknowledge(recipient, lane, seq, seq + count - index - 1)
                    break
                self.counters.acknowledgements_unknown += 1
        out += self._due(recipient.stream)

    def closed(self, connection: int) -> list[ev.AcknowledgementsDue]:
        """Remove a connection that ended or takes no more mail. Its client's last acknowledgements are still reported."""
        recipient = self._recipients.pop(connection, None)
        if recipient is None:
            return []
        self.unacknowledged -= sum(lane.unacknowledged for lane in recipient.lanes)
        stream = self._streams.get(recipient.stream)
        if stream is None:
            return []
        for lane in range(INBOX_LANES):
            if (connection, lane) in stream.due:
                del stream.due[connection, lane]
                stream.last_words.append(_acknowledgement(recipient, lane))
        return self._due(recipient.stream)

    # --- inside

    def _bind(self, stream: _Stream, devices: Sequence[ev.MailDevice]) -> bool:
        """Bind a stream's devices to connections. Returns False if the relay names too many."""
        for uin, key, connect_time, device in devices:
            stream.devices.pop((uin, device), None)
            if self._target(uin, key, connect_time):
                stream.devices[uin, device] = key, connect_time
        most = 2 * self._takers() + SPARE_DEVICES
        if len(stream.devices) <= most:
            return True
        for (uin, device), (key, connect_time) in list(stream.devices.items()):
            if not self._target(uin, key, connect_time):
                del stream.devices[uin, device]
        return len(stream.devices) <= most

    def _recipient(self, stream: _Stream, device: tuple[int, int]) -> _Recipient | None:
        bound = stream.devices.get(device)
        connection = self._target(device[0], *bound) if bound is not None else 0
        if not connection:
            return None
        found = self._recipients.get(connection)
        if found is None:
            found = self._recipients[connection] = _Recipient(connection, self._packets(connection))
        return found

    def _take(self, recipient: _Recipient, stream: int, run: MailRun, writes: dict[int, ev.WriteMail]) -> None:
        counters, connection = self.counters, recipient.connection
        if run.session > recipient.session:
            self._start(recipient, run)
            writes[connection] = ev.WriteMail(connection, [], True)
        elif run.session < recipient.session or run.device != recipient.device:
            counters.sessions_refused += run.count
            return
        recipient.stream = stream
        lane = recipient.lanes[run.lane]
        if run.first <= lane.highest:
            known = min(run.last, lane.highest) - run.first + 1
            counters.repeats_dropped += known
            self._soon(recipient, run.lane)
            if known == run.count:
                return
            run = run.part(known, run.count)
        if run.damaged:
            counters.damaged += 1
            lane.hold_back(run.first)
            return
        before = lane.unacknowledged
        written = lane.write(run.first, run.count, releases=run.dropped)
        counters.held_back += run.count - written
        if not written:
            return
        self.unacknowledged += lane.unacknowledged - before
        if run.gap:
            counters.gaps += 1
            if recipient.packets:
                counters.gaps_untold += 1
                self._acknowledge(recipient, run.lane, run.first, run.first)
                if connection > 0:
                    return
        parts = [run.part(0, written)]
        if recipient.packets and not run.gap:
            parts, over = parts[0].without_expired(self._unix_ms())
            counters.expired += len(over)
            kept = list[MailRun]()
            for part in parts:
                left, marked = part.without_load_tests()
                kept += left
                over += marked
                counters.load_test_blocked += len(marked)
            parts = kept
            for seq in over:
                self._acknowledge(recipient, run.lane, seq, seq)
        if not run.gap:
            counters.delivered += sum(part.count for part in parts)
        for part in parts:
            write = writes.get(connection)
            if write is None:
                write = writes[connection] = ev.WriteMail(connection, [], False)
            write.runs.extend(self._mark(recipient, part))

    def _mark(self, recipient: _Recipient, run: MailRun) -> list[MailRun]:
        """Split a run so that the part written under an earlier session is marked as sent before."""
        marked = recipient.marked[run.lane]
        if run.first > marked or run.gap or run.redelivered:
            return [run]
        again = min(run.last, marked) - run.first + 1
        self.counters.again += again
        first = run.part(0, again).marked()
        return [first] if again == run.count else [first, run.part(again, run.count)]

    def _start(self, recipient: _Recipient, run: MailRun) -> None:
        """Start over with a higher session."""
        self.unacknowledged -= sum(lane.unacknowledged for lane in recipient.lanes)
        recipient.marked = [max(pair) for pair in zip(recipient.marked, (lane.highest for lane in recipient.lanes), strict=True)]
        recipient.lanes = [MailLane() for _ in range(INBOX_LANES)]
        recipient.uin, recipient.device, recipient.session = run.uin, run.device, run.session

    def _acknowledge(self, recipient: _Recipient, lane: int, first: int, last: int) -> None:
        number, known = recipient.lanes[lane].acknowledge(first, last)
        self.counters.acknowledgements_unknown += not known
        if number:
            self.counters.acknowledged += number
            self.unacknowledged -= number
            self._soon(recipient, lane)

    def _soon(self, recipient: _Recipient, lane: int) -> None:
        stream = self._streams.get(recipient.stream)
        if stream is not None:  # otherwise the relay opens another one, and sends again what it does not know of
            stream.due[recipient.connection, lane] = None

    def _due(self, number: int) -> list[ev.AcknowledgementsDue]:
        stream = self._streams.get(number)
        return [ev.AcknowledgementsDue(number)] if stream is not None and (stream.due or stream.last_words) else []


def _acknowledgement(recipient: _Recipient, number: int) -> Acknowledgement:
    lane = recipient.lanes[number]
    return Acknowledgement(recipient.uin, recipient.device, recipient.session, number, lane.up_to, lane.bits, lane.highest)


def consecutive(packet_ids: Sequence[int]) -> list[tuple[int, int]]:
    """(first, count) of consecutive identifiers in one lane."""
    found: list[tuple[int, int]] = []
    first = count = 0
    for packet_id in packet_ids:
        if count and packet_id == first + count and lane_of(packet_id) == lane_of(first):
            count += 1
            continue
        if count:
            found.append((first, count))
        first, count = packet_id, 1
    if count:
        found.append((first, count))
    return found
