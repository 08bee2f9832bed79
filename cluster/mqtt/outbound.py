"""Everything that is published to one client: what waits, what is sent and not acknowledged, topic aliases, and mail. Pure.

    put ──▶ waiting, of QoS 0 or above ── take, while the window has space ──▶ bytes, and in flight (QoS 1 and 2)
                                                          ▲                        │
                                                          └── PUBACK, PUBCOMP ─────┘

A client that limits packets or takes aliases gets all messages this way, others only those of QoS 1 and 2. Packets are made when
they are sent: the rest of a message's expiry, its packet identifier and its alias are those of that moment,
and what waits holds records that its connections share. Nothing is sent twice within a connection.

A session that outlives its connection gets messages of QoS 1 and 2 from its inbox (`KeptDelivery`). They leave first, with the
identifiers of their places in it. PUBREL to one of QoS 2 waits until the session is stored with its PUBREC.

Source: OASIS MQTT 5.0 sections 3.3.4, 4.3, 4.6 and 4.9; docs/mqtt.md; docs/delivery.md, "Mail to MQTT clients".
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from cluster.core.contract import NEVER
from cluster.mqtt import codec
from cluster.mqtt.codec import encode_publish_parts
from cluster.mqtt.events import (
    CloseReason,
    Effect,
    KeptAcknowledged,
    KeptReceived,
    PacketsAcknowledged,
    Problem,
    Send,
    SendMail,
    SendMessages,
    SharedAcknowledged,
)
from cluster.mqtt.mail import FIRST_KEPT_ID, FIRST_OUTBOUND_ID, LARGEST_WINDOW, Mails, Unacknowledged, packet_ids_of
from cluster.mqtt.packets import MAX_PACKET_ID, MQTT_5, Disconnect, Puback, Pubcomp, Pubrec, Pubrel
from cluster.mqtt.properties import Property
from cluster.mqtt.properties_in_records import carried_by, encoded
from cluster.mqtt.reason_codes import ReasonCode
from cluster.mqtt.terms import NO_LIMIT, Terms
from pixiu.wire.record import FLAGS_AT, Flag, body_bounds

ENTRY_BYTES: Final = 160
"""Bytes counted for a message that waits, beyond its record, for the objects that hold it."""
_PUBLISHED: Final = 1
_PUBLISHED_EXACTLY: Final = 2
_RELEASED: Final = 3
_MAIL: Final = 4
_RECEIVED: Final = 5
"""States of a packet identifier in flight: waits for PUBACK, PUBREC, PUBCOMP, and a mail's PUBACK; and for the session to be stored
with its PUBREC."""
_STATE_BITS: Final = 3


class Delivery(NamedTuple):
    """A message for one client that cannot share its bytes with others."""

    record: bytes
    """The whole record, which has been checked."""
    topic: bytes
    """UTF-8."""
    qos: int
    """The lower one of the published and the granted QoS."""
    retain: bool
    identifiers: tuple[int, ...] = ()
    expires_at_ms: int = 0
    """End of the record's lifetime, Unix milliseconds; 0: it has none. The message's own expiry is in its properties."""
    shared: int = 0
    """Number to acknowledge it by, if it is of a shared subscription and has QoS 1 or 2: `SharedAcknowledged`; 0 otherwise."""
    early: bool = False
    """True if it came before the filter was kept that it is for, so that the session's inbox may have it, too."""


class KeptDelivery(NamedTuple):
    """A message of QoS 1 or 2 from a session's inbox."""

    packet_id: int
    """That of its place in the inbox; see `cluster.mqtt.mail`."""
    delivery: Delivery
    dup: bool
    """True if it may have been sent before."""
    released: bool = False
    """True if the client has answered its PUBLISH by a PUBREC: it gets the PUBREL."""


@dataclass(slots=True)
class OutboundCounters:
    """Messages that clients of MQTT did not get, and filters that they may not have; of all connections."""

    outbound_dropped: int = 0
    """Messages of QoS 0 dropped because too much waited for a client that gets its messages one by one."""
    outbound_too_large: int = 0
    """Messages above a client's maximum packet size."""
    outbound_expired: int = 0
    """Messages whose expiry was over before they could be sent."""
    filters_over_limit: int = 0
    """Filters refused at a limit: of the connection, its session or tenant, or the gateway."""


class Outbound:
    """Messages of topics to one client, and the packet identifiers that wait for its acknowledgement.

    max_bytes: bytes that may wait. The oldest messages of QoS 0 are dropped first.
    """

    __slots__ = (
        "_aliases", "_bytes", "_counters", "_flight", "_kept", "_mails", "_max_bytes", "_next_id", "_number", "_plain", "_terms",
        "_waiting", "left_out", "since",
    )  # fmt: skip

    def __init__(self, terms: Terms, max_bytes: int, counters: OutboundCounters) -> None:
        self._terms, self._max_bytes, self._counters = terms, max_bytes, counters
        self._waiting: deque[tuple[int, Delivery]] = deque()
        """(place among all, message) of QoS 1 and 2."""
        self._plain: deque[tuple[int, Delivery]] = deque()
        """Of QoS 0."""
        self._mails: deque[tuple[int, bytes]] = deque()
        """(packet identifier, packet) of mail that the client's receive maximum holds back."""
        self._kept: deque[KeptDelivery] | None = None
        """Of a session's inbox."""
        self.left_out: list[int] | None = None
        """Identifiers of these whose messages were over or too large when they could be sent, until they are reported."""
        self._number = 0
        self._bytes = 0
        self._flight: dict[int, int] = {}
        """Packet identifier → its state, and above these bits the number of a shared subscription's message."""
        self._next_id = FIRST_OUTBOUND_ID
        self._aliases: OrderedDict[bytes, int] = OrderedDict()
        """Topic → alias; the least recently used first."""
        self.since: float | None = None
        """Time at which the client last acknowledged something, or since which it could; None: nothing is in flight."""

    @property
    def inflight(self) -> int:
        """Number of packet identifiers that wait for an acknowledgement."""
        return len(self._flight)

    @property
    def mails(self) -> int:
        """Number of mails that the client's receive maximum holds back."""
        return len(self._mails)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the messages that wait."""
        return self._bytes

    @property
    def is_ready(self) -> bool:
        """True if `take` would return something."""
        if self._plain:
            return True
        space = len(self._flight) < self._terms.receive_maximum
        return space and bool(self._mails or self._kept or (self._waiting and len(self._flight) < self._terms.window))

    def put(self, messages: Iterable[Delivery]) -> bool:
        """Have messages wait. False if more bytes of QoS 1 and 2 wait than may: the connection must end."""
        for message in messages:
            self._number += 1
            self._bytes += _size_of(message)
            (self._waiting if message.qos else self._plain).append((self._number, message))
        while self._bytes > self._max_bytes and self._plain:
            self._bytes -= _size_of(self._plain.popleft()[1])
            self._counters.outbound_dropped += 1
        # One message may always wait, however large it is.
        return self._bytes <= self._max_bytes or len(self._waiting) <= 1

    def put_mail(self, packets: Sequence[tuple[int, bytes]], *, anew: bool) -> None:
        """Have mail wait: (packet identifier, packet). `anew`: discard what waits of an older session."""
        if anew:
            self._mails.clear()
        self._mails.extend(packets)

    def put_kept(self, messages: Iterable[KeptDelivery], *, anew: bool) -> bool:
        """Have messages of a session's inbox wait, but those that are in flight. `anew`: discard what waits. False if too many
        wait: the connection must end."""
        if self._kept is None or anew:
            self._kept = deque()
        self._kept.extend(message for message in messages if message.packet_id not in self._flight)
        return len(self._kept) <= LARGEST_WINDOW

    def release(self, packet_id: int) -> bool:
        """Note that the session is stored with a PUBREC. False if nothing waits for that."""
        if self._flight.get(packet_id) != _RECEIVED:
            return False
        self._flight[packet_id] = _RELEASED
        return True

    def take(self, max_bytes: int, now: float, now_ms: int) -> bytes:
        """Make packets of about `max_bytes`, at least one if any may leave. now: monotonic seconds; now_ms: Unix milliseconds."""
        packets: list[bytes] = []
        size = 0
        before = len(self._flight)
        terms = self._terms
        while size < max_bytes:
            inflight = len(self._flight)
            if self._mails and inflight < terms.receive_maximum:
                packet_id, packet = self._mails.popleft()
                self._flight[packet_id] = _MAIL
            elif self._kept and inflight < terms.receive_maximum:
                packet = self._begin_kept(self._kept.popleft(), now_ms)
            else:
                waiting = self._waiting if self._waiting and inflight < terms.window else self._plain
                if not waiting:
                    break
                if waiting is self._waiting and self._plain and self._plain[0][0] < waiting[0][0]:
                    waiting = self._plain
                message = waiting.popleft()[1]
                self._bytes -= _size_of(message)
                packet = self.packet(message, now_ms)
            if packet:
                packets.append(packet)
                size += len(packet)
        if not before and self._flight:
            self.since = now
        return b"".join(packets)

    def _begin_kept(self, message: KeptDelivery, now_ms: int) -> bytes:
        packet_id, delivery, dup, released = message
        if released:
            self._flight[packet_id] = _RELEASED
            return pubrel(packet_id, self._terms, known=True)
        packet = self.packet(delivery, now_ms, packet_id, dup=dup)
        if not packet:
            if self.left_out is None:
                self.left_out = []
            self.left_out.append(packet_id)
        return packet

    def packet(self, message: Delivery, now_ms: int, packet_id: int = 0, *, dup: bool = False) -> bytes:
        """Make the PUBLISH of a message that is sent now; empty if it is left out. packet_id: 0: a free one, where it has any."""
        record, topic, qos, retain, identifiers, expires_at_ms, shared, _ = message
        terms, counters = self._terms, self._counters
        bounds = body_bounds(record)
        carried = carried_by(record)
        expires_at_ms = carried.expires_at_ms or expires_at_ms
        if bounds is None or (expires_at_ms and expires_at_ms <= now_ms):
            counters.outbound_expired += 1
            return b""
        begin, end = bounds
        if record[FLAGS_AT] & Flag.TOPIC:
            begin += 2 + (record[begin] << 8 | record[begin + 1])
        prefix, properties, alias = len(topic).to_bytes(2, "big") + topic, b"", 0
        if terms.dialect is MQTT_5:
            if terms.aliases:
                known = topic in self._aliases
                alias = self._alias(topic)
                prefix = b"\0\0" if known else prefix
            properties = encoded(carried._replace(expires_at_ms=expires_at_ms), now_ms, identifiers, alias)
        if qos and not packet_id:
            packet_id = self._free_id()
        packet = encode_publish_parts(prefix, record[begin:end], qos, packet_id, retain=retain, properties=properties, dup=dup)
        if len(packet) > terms.max_packet_bytes:
            counters.outbound_too_large += 1
            if alias and prefix != b"\0\0":
                # The client does not know the alias: no topic has it until it is given again.
                del self._aliases[topic]
                nobody = b"\0" + alias.to_bytes(2, "big")
                self._aliases[nobody] = alias
                self._aliases.move_to_end(nobody, last=False)
            return b""
        if qos:
            self._flight[packet_id] = shared << _STATE_BITS | (_PUBLISHED if qos == 1 else _PUBLISHED_EXACTLY)
        return packet

    def _alias(self, topic: bytes) -> int:
        """The alias of a topic; a topic that has none takes the one that was used least recently."""
        aliases = self._aliases
        alias = aliases.get(topic, 0)
        if alias:
            aliases.move_to_end(topic)
            return alias
        alias = len(aliases) + 1 if len(aliases) < self._terms.aliases else aliases.popitem(last=False)[1]
        aliases[topic] = alias
        return alias

    def _free_id(self) -> int:
        """The next identifier that is not in flight: there are many more than a window has."""
        packet_id = self._next_id
        while packet_id in self._flight:
            packet_id = packet_id + 1 if packet_id < MAX_PACKET_ID else FIRST_OUTBOUND_ID
        self._next_id = packet_id + 1 if packet_id < MAX_PACKET_ID else FIRST_OUTBOUND_ID
        return packet_id

    # ------------------------------------------------------------------------------------------ acknowledgements

    def is_released(self, packet_id: int) -> bool:
        """True if the PUBREL of a message was sent."""
        return self._flight.get(packet_id) == _RELEASED

    def acknowledge(self, packet_id: int, now: float) -> int:
        """Take a PUBACK. Returns the number of a shared subscription's message; 0: none, or nothing waits for it."""
        return self._end(packet_id, (_PUBLISHED, _MAIL), now)

    def receive(self, packet_id: int, now: float, *, failed: bool) -> tuple[bool, int]:
        """Take a PUBREC. Returns whether the identifier is known, and a number as `acknowledge` does. A failure frees it."""
        value = self._flight.get(packet_id, 0)
        state = value & (1 << _STATE_BITS) - 1
        if state not in (_PUBLISHED_EXACTLY, _RELEASED, _RECEIVED):
            return False, 0
        if failed:
            return True, self._end(packet_id, (state,), now)
        self._flight[packet_id] = _RELEASED if state == _RELEASED or not is_kept(packet_id) else _RECEIVED
        self.since = now
        return True, value >> _STATE_BITS

    def complete(self, packet_id: int, now: float) -> bool:
        """Take a PUBCOMP. False if nothing waits for it."""
        before = len(self._flight)
        self._end(packet_id, (_RELEASED,), now)
        return len(self._flight) < before

    def _end(self, packet_id: int, states: tuple[int, ...], now: float) -> int:
        value = self._flight.get(packet_id, 0)
        if value & (1 << _STATE_BITS) - 1 not in states:
            return 0
        del self._flight[packet_id]
        self.since = now if self._flight else None
        return value >> _STATE_BITS


def _size_of(message: Delivery) -> int:
    return len(message.record) + len(message.topic) + ENTRY_BYTES


FULL: Final = Problem(CloseReason.QUEUE_FULL, "more bytes of QoS 1 and 2 wait for the client than may")
OVERRUN: Final = Problem(
    CloseReason.MAIL_OVERRUN, f"more than {LARGEST_WINDOW} mails wait for this client: it acknowledges what it has not read"
)


class Sending:
    """Messages of topics and mail to one client. max_bytes: of messages of topics that may wait.

    Effects are appended to the list that a method gets. A `Problem` that is returned ends the connection.
    """

    __slots__ = ("_counters", "_mail", "_terms", "outbound", "takes_mail")

    def __init__(self, terms: Terms, max_bytes: int, counters: OutboundCounters) -> None:
        self._terms, self._counters = terms, counters
        self.outbound = Outbound(terms, max_bytes, counters)
        self._mail = Unacknowledged(terms.dialect)
        self.takes_mail = False

    def deliver(self, messages: Iterable[Delivery], now_ms: int, effects: list[Effect]) -> Problem | None:
        """Have messages of topics wait; `outbound` makes packets of them. Those of QoS 0 to a client that gets shared bytes as well
        become packets at once, so that their order is kept."""
        waiting: list[Delivery] = []
        packets: list[bytes] = []
        limited = self._terms.limited
        for message in messages:
            if message.qos or limited:
                waiting.append(message)
            elif packet := self.outbound.packet(message, now_ms):
                packets.append(packet)
        if packets:
            effects.append(SendMessages(b"".join(packets), len(packets)))
        return FULL if waiting and not self.outbound.put(waiting) else None

    def send_mail(self, topic: str, mails: Sequence[Mails], now: float, effects: list[Effect], *, anew: bool) -> Problem | None:
        """Send mail, at once unless the client limits what it receives."""
        self.takes_mail = True
        terms = self._terms
        packets = self._mail.send(topic, mails, now, anew=anew)
        limited = terms.receive_maximum < LARGEST_WINDOW + terms.window
        if not limited and terms.max_packet_bytes == NO_LIMIT:
            effects.append(SendMail(packets, anew))
            return None
        pairs = list(zip(packet_ids_of(mails), packets, strict=True))
        large = [packet_id for packet_id, packet in pairs if len(packet) > terms.max_packet_bytes]
        if large:
            # As if the client had taken it [MQTT-3.1.2-25].
            self._counters.outbound_too_large += len(large)
            for packet_id in large:
                self._mail.acknowledge(packet_id, now)
            effects.append(PacketsAcknowledged(large))
            pairs = [pair for pair in pairs if len(pair[1]) <= terms.max_packet_bytes]
        if not limited:
            effects.append(SendMail([packet for _, packet in pairs], anew))
            return None
        self.outbound.put_mail(pairs, anew=anew)
        return OVERRUN if self.outbound.mails > LARGEST_WINDOW else None

    def send_kept(self, messages: Iterable[KeptDelivery], *, anew: bool) -> Problem | None:
        """Send messages of a session's inbox, as far as the client's receive maximum allows."""
        return None if self.outbound.put_kept(messages, anew=anew) else OVERRUN

    def release(self, packet_id: int, effects: list[Effect]) -> None:
        """Send the PUBREL of a message from a session's inbox, which is stored with its PUBREC."""
        if self.outbound.release(packet_id):
            effects.append(Send(pubrel(packet_id, self._terms, known=True)))

    def acknowledge(self, packet: Puback, now: float, effects: list[Effect]) -> None:
        """Take a PUBACK."""
        packet_id = packet.packet_id
        inflight = self.outbound.inflight
        shared = self.outbound.acknowledge(packet_id, now)
        if packet_id >= FIRST_OUTBOUND_ID:
            _report(shared, effects)
        elif packet_id >= FIRST_KEPT_ID:
            if self.outbound.inflight < inflight:
                _report_kept(packet_id, effects)
        elif self.takes_mail:
            self._mail.acknowledge(packet_id, now)
            last = effects[-1] if effects else None
            if type(last) is PacketsAcknowledged:
                last.packet_ids.append(packet_id)
            else:
                effects.append(PacketsAcknowledged([packet_id]))

    def receive(self, packet: Pubrec, now: float, effects: list[Effect]) -> None:
        """Take a PUBREC, and answer it unless it reports a failure."""
        failed = packet.code >= ReasonCode.UNSPECIFIED
        known, shared = self.outbound.receive(packet.packet_id, now, failed=failed)
        _report(shared, effects)
        if known and is_kept(packet.packet_id):
            if failed:
                _report_kept(packet.packet_id, effects)
                return
            if not self.outbound.is_released(packet.packet_id):
                effects.append(KeptReceived(packet.packet_id))
                return
        if not failed:
            effects.append(Send(pubrel(packet.packet_id, self._terms, known=known)))

    def complete(self, packet: Pubcomp, now: float, effects: list[Effect]) -> None:
        """Take a PUBCOMP."""
        if self.outbound.complete(packet.packet_id, now) and is_kept(packet.packet_id):
            _report_kept(packet.packet_id, effects)

    def deadlines(self, timeout_s: float) -> tuple[float, float]:
        """Times by which the client has to acknowledge mail, and messages of topics, by the clock of the calls."""
        mail = self._mail.since if self.takes_mail else None
        since = self.outbound.since
        return (NEVER if mail is None else mail + timeout_s), (NEVER if since is None else since + timeout_s)


def pubrel(packet_id: int, terms: Terms, *, known: bool) -> bytes:
    """Encode the answer to a PUBREC. known: it answers a message of this connection."""
    code = ReasonCode.SUCCESS if known or terms.dialect is not MQTT_5 else ReasonCode.PACKET_ID_NOT_FOUND
    return codec.encode(Pubrel(packet_id, code), terms.dialect)


def is_kept(packet_id: int) -> bool:
    """True for the identifiers of messages from a session's inbox."""
    return FIRST_KEPT_ID <= packet_id < FIRST_OUTBOUND_ID


def _report_kept(packet_id: int, effects: list[Effect]) -> None:
    last = effects[-1] if effects else None
    if type(last) is KeptAcknowledged:
        last.packet_ids.append(packet_id)
    else:
        effects.append(KeptAcknowledged([packet_id]))


def _report(number: int, effects: list[Effect]) -> None:
    if not number:
        return
    last = effects[-1] if effects else None
    if type(last) is SharedAcknowledged:
        last.numbers.append(number)
    else:
        effects.append(SharedAcknowledged([number]))


def disconnect(terms: Terms, problem: Problem, code: ReasonCode) -> bytes:
    """Encode the DISCONNECT for a client of MQTT 5, with a reason string if its packets may be large enough."""
    properties: dict[int, object] = {Property.REASON_STRING: problem.text}
    if problem.server_reference:
        properties[Property.SERVER_REFERENCE] = problem.server_reference
    data = codec.encode(Disconnect(code, properties), MQTT_5)
    return data if len(data) <= terms.max_packet_bytes else codec.encode(Disconnect(code), MQTT_5)
