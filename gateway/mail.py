"""Mail on a gateway: what was written to which connection, and what its client has acknowledged. Pure.

    relay ── MailArrived ──▶ bound to a connection? session? above what was written? ── WriteMail ──▶ client
          ◀── one batch of {UpTo, map} a turn, on the stream of the session's relay ── acknowledgements, any order

A relay's envelopes and records are passed on as they came; only the flag for what was sent before may change.

For each connection it keeps the newest session, and for each lane two numbers and a map (`gateway.mail_lane`). Lower sessions are
refused, a higher one starts anew, what is not above what was written is dropped and answered with what is acknowledged.

Nothing behind what could not be written goes out before that has come again: an acknowledgement speaks of everything up to a
number, so a lane may have no holes.

Source: docs/delivery.md; docs/delivery.md, "Rules for gateways".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from gateway import events as ev
from gateway.mail_lane import MailLane
from pixiu.errors import MalformedData
from pixiu.mqtt.mail import lane_of
from pixiu.wire.envelope import ENVELOPE_SIZE, GAP, REDELIVERED, Envelope, envelopes
from pixiu.wire.record import INBOX_LANES, MAX_RECORD_BYTES, intact_body
from pixiu.wire.v1 import delivery_pb2

SPARE_DEVICES: Final = 1024
"""A relay may name twice as many devices as connections take mail here, and so many more. Policy: those that are gone are
forgotten; when that is not enough, the stream ends."""
MAX_LAST_WORDS: Final = 10_000
"""Acknowledgements of connections that have ended which wait for a relay's stream. Policy: the oldest is forgotten; what it
spoke of is sent again."""


class Acknowledgement(NamedTuple):
    """What a device has got of a lane, as `DeviceAcknowledgement` has it."""

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
    """What was done with mail since the start."""

    delivered: int = 0
    repeats_dropped: int = 0
    again: int = 0
    """Marked as sent before, because this gateway wrote it to the connection under an earlier session."""
    gaps: int = 0
    """Gap markers, which tell that something is gone."""
    gaps_untold: int = 0
    """Of them those for MQTT clients, which have no word for it."""
    sessions_refused: int = 0
    without_connection: int = 0
    """For a device that is not here, or no longer takes mail."""
    held_back: int = 0
    """Beyond the window, or behind what could not be written: it comes again."""
    damaged: int = 0
    acknowledged: int = 0
    acknowledgements_unknown: int = 0
    """Of what was not written to the connection in its session."""


@dataclass(slots=True)
class _Recipient:
    """A connection that gets mail."""

    connection: int
    packets: bool
    uin: int = 0
    device: int = 0
    session: int = 0
    stream: int = 0
    """Of the relay whose session it is."""
    lanes: list[MailLane] = field(default_factory=lambda: [MailLane() for _ in range(INBOX_LANES)])
    marked: list[int] = field(default_factory=lambda: [0] * INBOX_LANES)
    """Lane → written up to here under earlier sessions."""


@dataclass(slots=True)
class _Stream:
    """State of one relay's delivery stream."""

    relay: int
    devices: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """(UIN, Pi's number) → (key, connect time)."""
    due: dict[tuple[int, int], None] = field(default_factory=dict)
    """(connection, lane) whose acknowledgement is to leave; at most four for each connection."""
    last_words: deque[Acknowledgement] = field(default_factory=lambda: deque(maxlen=MAX_LAST_WORDS))


def read_batch(batch: delivery_pb2.DeliveryBatch) -> tuple[list[ev.MailDevice], list[Envelope]]:
    """What a relay sent. Raises `MalformedData`: then nothing of it is to be believed."""
    if len(batch.deliveries) and not batch.count:
        raise MalformedData("a batch of deliveries says that there are none")
    found = envelopes(batch.deliveries, batch.count)
    for item in found:
        if item.lane >= INBOX_LANES or not item.session or not item.seq:
            raise MalformedData(f"an envelope names lane {item.lane}, session {item.session}, InboxSeq {item.seq}")
        if len(item.data) > ENVELOPE_SIZE + MAX_RECORD_BYTES:
            raise MalformedData(f"a record has {len(item.data) - ENVELOPE_SIZE} bytes, and may have {MAX_RECORD_BYTES}")
    return [ev.MailDevice(one.uin, one.key, one.connect_time, one.device) for one in batch.devices], found


class MailBook:
    """The mail of all connections. Methods that take an event are handlers of the gateway's core.

    Args:
        target: (UIN, key, connect time) → the connection that gets the mail of the device; 0: there is none.
        takers: how many connections take mail.
        packets: whether a connection speaks MQTT.
    """

    def __init__(self, target: Callable[[int, int, int], int], takers: Callable[[], int], packets: Callable[[int], bool]) -> None:
        self._target, self._takers, self._packets = target, takers, packets
        self._recipients: dict[int, _Recipient] = {}
        self._streams: dict[int, _Stream] = {}
        self.counters = MailCounters()
        self.unacknowledged = 0
        """Written, and neither acknowledged nor given up."""

    @property
    def streams(self) -> int:
        """How many relays have a stream."""
        return len(self._streams)

    # --- relays

    def opened(self, event: ev.MailStreamOpened, now: float, out: list[ev.Effect]) -> None:
        """A relay has said who it is. An older stream of it ends: it would not open another one if it still had that."""
        older = [number for number, stream in self._streams.items() if stream.relay == event.relay]
        for number in older:
            del self._streams[number]
        self._streams[event.stream] = _Stream(event.relay)
        out += [ev.EndMailStream(number, "this relay opened another stream") for number in older]

    def ended(self, event: ev.MailStreamClosed, now: float, out: list[ev.Effect]) -> None:
        """A relay's stream is gone, with all that it said of devices. What was written stays written."""
        self._streams.pop(event.stream, None)

    def arrived(self, event: ev.MailArrived, now: float, out: list[ev.Effect]) -> None:
        """A batch of a relay."""
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
        for item in event.deliveries:
            if (item.uin, item.device) != asked:
                asked = item.uin, item.device
                recipient = self._recipient(stream, asked)
            if recipient is None:
                self.counters.without_connection += 1
            else:
                self._take(recipient, event.stream, item, writes)
        out += [write for write in writes.values() if write.deliveries or write.anew]
        for lane in event.asked:
            recipient = self._recipient(stream, (lane.uin, lane.device))
            if recipient is not None and recipient.session == lane.session and 0 <= lane.lane < INBOX_LANES:
                recipient.stream = event.stream
                self._soon(recipient, lane.lane)
        out += self._due(event.stream)

    def take_acknowledgements(self, number: int, most: int) -> list[Acknowledgement]:
        """What is to leave on a stream now."""
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
        """A client has got these: (lane, first, last), in any order."""
        recipient = self._recipients.get(event.connection)
        if recipient is None:
            self.counters.acknowledgements_unknown += len(event.ranges)
            return
        for lane, first, last in event.ranges:
            self._acknowledge(recipient, lane, first, last)
        out += self._due(recipient.stream)

    def packets_acknowledged(self, event: ev.PacketsAcknowledged, now: float, out: list[ev.Effect]) -> None:
        """A client answered these packets of QoS 1."""
        recipient = self._recipients.get(event.connection)
        for packet_id in event.packet_ids:
            lane = lane_of(packet_id)
            seq = recipient.lanes[lane].seq_of(packet_id) if recipient is not None else 0
            if recipient is None or not seq:
                self.counters.acknowledgements_unknown += 1
            else:
                self._acknowledge(recipient, lane, seq, seq)
        if recipient is not None:
            out += self._due(recipient.stream)

    def closed(self, connection: int) -> list[ev.AcknowledgementsDue]:
        """A connection is gone, or takes no mail any more. What its client acknowledged last is still told."""
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
        """Note which connections a relay means. False when it names too many."""
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

    def _take(self, recipient: _Recipient, stream: int, item: Envelope, writes: dict[int, ev.WriteMail]) -> None:
        counters, connection = self.counters, recipient.connection
        if item.session > recipient.session:
            self._start(recipient, item)
            writes[connection] = ev.WriteMail(connection, [], True)
        elif item.session < recipient.session or item.device != recipient.device:
            counters.sessions_refused += 1
            return
        recipient.stream = stream
        lane = recipient.lanes[item.lane]
        if item.seq <= lane.highest:
            counters.repeats_dropped += 1
            self._soon(recipient, item.lane)
            return
        gap = bool(item.flags & GAP)
        if not gap and intact_body(item.data[ENVELOPE_SIZE:]) is None:
            counters.damaged += 1
            lane.hold_back(item.seq)
            return
        before = lane.unacknowledged
        # A marker without a MsgID is of what the inbox dropped: nothing below it will come again.
        if not lane.write(item.seq, releases=gap and not item.msg_id):
            counters.held_back += 1
            return
        self.unacknowledged += lane.unacknowledged - before
        counters.gaps += gap
        if gap and recipient.packets:
            counters.gaps_untold += 1
            self._acknowledge(recipient, item.lane, item.seq, item.seq)
            return
        if not gap and item.seq <= recipient.marked[item.lane] and not item.flags & REDELIVERED:
            counters.again += 1
            item = item.redelivered()
        counters.delivered += not gap
        write = writes.get(connection)
        if write is None:
            write = writes[connection] = ev.WriteMail(connection, [], False)
        write.deliveries.append(item)

    def _start(self, recipient: _Recipient, item: Envelope) -> None:
        """A higher session: begin anew."""
        self.unacknowledged -= sum(lane.unacknowledged for lane in recipient.lanes)
        recipient.marked = [max(pair) for pair in zip(recipient.marked, (lane.highest for lane in recipient.lanes), strict=True)]
        recipient.lanes = [MailLane() for _ in range(INBOX_LANES)]
        recipient.uin, recipient.device, recipient.session = item.uin, item.device, item.session

    def _acknowledge(self, recipient: _Recipient, lane: int, first: int, last: int) -> None:
        number, known = recipient.lanes[lane].acknowledge(first, last)
        self.counters.acknowledgements_unknown += not known
        if number:
            self.counters.acknowledged += number
            self.unacknowledged -= number
            self._soon(recipient, lane)

    def _soon(self, recipient: _Recipient, lane: int) -> None:
        stream = self._streams.get(recipient.stream)
        if stream is not None:  # else the relay opens another one, and sends again what it does not know of
            stream.due[recipient.connection, lane] = None

    def _due(self, number: int) -> list[ev.AcknowledgementsDue]:
        stream = self._streams.get(number)
        return [ev.AcknowledgementsDue(number)] if stream is not None and (stream.due or stream.last_words) else []


def _acknowledgement(recipient: _Recipient, number: int) -> Acknowledgement:
    lane = recipient.lanes[number]
    return Acknowledgement(recipient.uin, recipient.device, recipient.session, number, lane.up_to, lane.bits, lane.highest)
