"""The gateway's core: its clients' rooms, what it tells the routers, and the fan-out of what brokers send.

The fan-out joins writes: packets of one channel are made once per message and joined once per turn of the event
loop; a connection gets one write for all of them.

Source: seed 004 §2.5, §5.1; DESIGN sections 9 and 17.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from zlib import crc32

from gateway.events import (
    Closed,
    Confirmed,
    Deliver,
    Effect,
    EndOfTurn,
    Event,
    Fenced,
    FenceReceived,
    HealingReceived,
    Join,
    KeepTraces,
    Leave,
    Opened,
    ProxiesChanged,
    Publish,
    RecordsArrived,
    Replica,
    RoutersChanged,
    SendControl,
    SendDelivered,
    SendRecords,
    Settled,
    Tick,
)
from gateway.feedback import Feedback, absences
from gateway.presence import Presence
from gateway.rooms import Channel, Client, RoomIndex
from gateway.signals import SIGNAL, MemoryTable, Signals, SignalTable
from gateway.traces import Traces
from pixiu.healing import Holder, rule_of
from pixiu.ids import EndpointID, gateway_msg_id
from pixiu.record import HEADER_SIZE, LEAST_SIZE, SIZE_FIELD, Flag, body_bounds
from pixiu.routing import Routes
from pixiu.trace import UNTRACED, Tracer
from pixiu.vrooms import VRooms, with_key
from pixiu.wire.v1 import control_pb2

DEDUPE_GENERATION = 65_536
"""The dedupe set starts a new generation after so many messages; it remembers the last one or two."""
MAX_ANSWERED_A_MESSAGE = 128
"""SnowflakeIDs of delivered signals in one control message, so that it fits a datagram."""
NO_BIG_ROOMS = VRooms()
TOPIC_OR_TRACED = Flag.TOPIC | Flag.TRACED
"""One look at a record's flags tells whether it is to a room and untraced, as nearly all are."""
MAX_HELD_RECORDS = 100_000
"""Published records that wait for a change of proxies; beyond it the oldest are dropped."""


@dataclass(slots=True)
class Counters:
    """What the gateway has done since its start."""

    records_in: int = 0
    deliveries: int = 0
    duplicates: int = 0
    without_members: int = 0
    damaged: int = 0
    batches_malformed: int = 0
    published: int = 0
    publish_dropped: int = 0
    signals_delivered: int = 0
    signals_repeated: int = 0
    """Copies and repeats of what was delivered: dropped, and answered."""


class Core:
    """Decides; see the module. `step` never raises on what comes from the network.

    Args:
        instance: this gateway's leased number.
        generation: of that number, grown with this start.
        signals: remembers delivered signals; None: as long as this core lives.
        vrooms: the cluster's big rooms.
        tracer: stamps traced records.
    """

    def __init__(
        self,
        *,
        instance: int,
        generation: int,
        signals: SignalTable | None = None,
        vrooms: VRooms = NO_BIG_ROOMS,
        tracer: Tracer = UNTRACED,
    ) -> None:
        self.index = RoomIndex(vrooms)
        self.signals = Signals(signals if signals is not None else MemoryTable())
        self.traces = Traces(tracer)
        self.counters = Counters()
        self._identity = (instance, generation)
        self._counter = 0
        self._token = 0
        self._seen: set[tuple[int, int]] = set()
        self._seen_before: set[tuple[int, int]] = set()
        self._dirty: dict[Channel, None] = {}
        self._proxies: tuple[Replica, ...] = ()
        self._proxy_routes: Routes[EndpointID] = Routes(self._choose_proxy)
        self._partitions_of: dict[EndpointID, int] = {}
        self._held: list[tuple[int, bytes]] = []
        self.presence = Presence(self._next_id, self._next_token)
        self.feedback = Feedback()
        self.holder = Holder(self.presence.own, lambda asked, _: self._as_of() if asked == instance else 0)
        self._handlers: dict[type, Callable[[Event, float], list[Effect]]] = {
            RoutersChanged: self._on_routers,
            ProxiesChanged: self._on_proxies,
            Opened: self._on_opened,
            Closed: self._on_closed,
            Join: self._on_join,
            Leave: self._on_leave,
            Publish: self._on_publish,
            Confirmed: self._on_confirmed,
            HealingReceived: self._on_healing,
            FenceReceived: self._on_fence,
            Settled: self._on_settled,
            EndOfTurn: self._on_end_of_turn,
            Tick: self._on_tick,
        }

    def step(self, event: Event, now: float) -> list[Effect]:
        """Take one event; `now` is monotonic seconds. Returns what to do, in order.

        What must leave (deliveries, gateway messages) leaves at `EndOfTurn`.
        """
        return self._handlers[type(event)](event, now)

    def records_arrived(self, event: RecordsArrived) -> bool:
        """Take a batch from a broker. False when it is malformed: then nothing of it is delivered."""
        records = _split(event.data, event.start, event.end, event.count)
        if records is None:
            self.counters.batches_malformed += 1
            return False
        rooms, seen, before, signal = self.index.rooms, self._seen, self._seen_before, SIGNAL
        self.counters.records_in += len(records)
        for record in records:
            if record[4] == signal:
                if record[5] & Flag.TRACED:
                    self.traces.arrived(record)
                self.signals.take(record)
                continue
            key = int.from_bytes(record[24:32], "little")
            identity = (int.from_bytes(record[16:24], "little"), key)
            if identity in seen or identity in before:
                self.counters.duplicates += 1
                continue
            seen.add(identity)
            bounds = body_bounds(record)
            if bounds is None or crc32(record[HEADER_SIZE : bounds[1]]) != int.from_bytes(record[12:16], "little"):
                self.counters.damaged += 1
                continue
            body = record[bounds[0] : bounds[1]]
            channel = rooms.get(key)
            if record[5] & TOPIC_OR_TRACED:
                if record[5] & Flag.TOPIC:
                    channel = self.index.topics.get(key, {}).get(body[2 : 2 + (body[0] << 8 | body[1])])
                if record[5] & Flag.TRACED and channel is not None:
                    self.traces.take(channel, record)
            if channel is None:
                self.counters.without_members += 1
                if not self.presence.own.gateways(key):
                    self.feedback.note(key)
                continue
            self._dirty[channel] = None
            if channel.packets:
                channel.pending_packets.append(_publish_packet(channel.head, body))
            if channel.records:
                channel.pending_records.append(record)
        if len(seen) >= DEDUPE_GENERATION:
            self._seen_before, self._seen = seen, set()
        return True

    def heartbeat(self, partition: int, partitions: int) -> control_pb2.SubscriptionState:
        """The answer to a router's heartbeat: what is on this gateway of the rooms that it keeps."""
        rule = rule_of(partition, partitions)
        digest = self.holder.digest(rule, self._as_of()) if rule is not None else None
        return control_pb2.SubscriptionState(subscribed=True, digest=digest)

    def next_deadline(self) -> float | None:
        """When `Tick` is due, monotonic seconds; None for never."""
        due = [time for time in (self.presence.next_deadline(), self._proxy_routes.deadline) if time is not None]
        return min(due, default=None)

    def _next_id(self) -> int:
        self._counter += 1
        return gateway_msg_id(*self._identity, self._counter)

    def _as_of(self) -> int:
        """The last GatewayMsgID: `presence.own` is complete up to it."""
        return gateway_msg_id(*self._identity, self._counter)

    def _next_token(self) -> int:
        self._token += 1
        return self._token

    def _choose_proxy(self, key: int) -> EndpointID | None:
        usable = [proxy for proxy in self._proxies if proxy.usable] or list(self._proxies)
        return usable[key % len(usable)].endpoint if usable else None

    def _on_routers(self, event: Event, now: float) -> list[Effect]:
        assert isinstance(event, RoutersChanged)
        self._partitions_of = {replica.endpoint: replica.partition for replica in event.replicas}
        self.presence.set_routers(event.partitions, event.replicas, now)
        return []

    def _on_proxies(self, event: Event, now: float) -> list[Effect]:
        assert isinstance(event, ProxiesChanged)
        known = {proxy.endpoint for proxy in event.proxies}
        gone = [proxy.endpoint for proxy in self._proxies if proxy.endpoint not in known]
        self._proxies = event.proxies
        self._proxy_routes.change(now, gone)
        return []

    def _on_opened(self, event: Event, now: float) -> list[Effect]:
        assert isinstance(event, Opened)
        self.index.clients[event.connection] = Client(event.uin, event.packets)
        return []

    def _on_closed(self, event: Event, now: float) -> list[Effect]:
        assert isinstance(event, Closed)
        client = self.index.clients.get(event.connection)
        if client is not None:
            left = self.index.leave(event.connection, list(client.channels))
            del self.index.clients[event.connection]
            self.presence.forget(event.connection)
            self.presence.change(left, client.uin, False, event.reason, now)
        return []

    def _on_join(self, event: Event, now: float) -> list[Effect]:
        assert isinstance(event, Join)
        client = self.index.clients.get(event.connection)
        if client is None:
            return []
        channels = self.index.channels(event.connection, event.channels)
        entered = self.index.join(event.connection, channels)
        self.presence.change(entered, client.uin, True, 0, now)
        return self.presence.request(event.connection, event.request, {room for room, _ in channels}, client.uin, now)

    def _on_leave(self, event: Event, now: float) -> list[Effect]:
        assert isinstance(event, Leave)
        client = self.index.clients.get(event.connection)
        if client is not None:
            channels = self.index.channels(event.connection, event.channels)
            self.presence.change(self.index.leave(event.connection, channels), client.uin, False, 1, now)
        return []

    def _on_publish(self, event: Event, now: float) -> list[Effect]:
        assert isinstance(event, Publish)
        self._held.extend(event.records)
        if len(self._held) > MAX_HELD_RECORDS:
            self.counters.publish_dropped += len(self._held) - MAX_HELD_RECORDS
            del self._held[:-MAX_HELD_RECORDS]
        return []

    def _on_confirmed(self, event: Event, now: float) -> list[Effect]:
        assert isinstance(event, Confirmed)
        partition = self._partitions_of.get(event.peer)
        return [] if partition is None else self.presence.confirmed(partition, event.ids)

    def _on_healing(self, event: Event, now: float) -> list[Effect]:
        assert isinstance(event, HealingReceived)
        messages = self.holder.answer(event.control)
        return [SendControl(event.peer, messages)] if messages else []

    def _on_fence(self, event: Event, now: float) -> list[Effect]:
        assert isinstance(event, FenceReceived)
        instance, generation = self._identity
        over = gateway_msg_id(instance, generation + 1, 0) <= event.floor <= gateway_msg_id(instance + 1, 0, 0)
        return [Fenced()] if over else []

    def _on_settled(self, event: Event, now: float) -> list[Effect]:
        assert isinstance(event, Settled)
        for token, handled in event.parcels:
            if not self.presence.settled(token, handled, now):
                self._proxy_routes.settled(token)
        return []

    def _on_tick(self, event: Event, now: float) -> list[Effect]:
        self._proxy_routes.expire(now)
        return self.presence.expire(now)

    def _on_end_of_turn(self, event: Event, now: float) -> list[Effect]:
        """Presence first, so that routers know of it before a message that a client sends after it."""
        effects = self.presence.flush(now)
        effects += self._absences(now)
        if self._held and not self._proxy_routes.held:
            effects += self._published()
        answers = self._end_signals() if self.signals else []
        traced = self.traces.finish() if self.traces else []
        effects += self._deliveries()
        if traced:
            effects.append(KeepTraces(traced))
        return effects + answers

    def _end_signals(self) -> list[Effect]:
        """Queue the turn's new signals for their clients. Returns the answers, for after the deliveries."""
        turn = self.signals.end_turn(self._channel_of)
        for channel, record, body in turn.deliver:
            self._dirty[channel] = None
            if record[5] & Flag.TRACED:
                self.traces.take(channel, record)
            if channel.packets:
                channel.pending_packets.append(_publish_packet(channel.head, body))
            if channel.records:
                channel.pending_records.append(record)
        counters = self.counters
        counters.signals_delivered += len(turn.deliver)
        counters.signals_repeated += turn.repeated
        counters.without_members += turn.without_members
        counters.damaged += turn.damaged
        proxies = tuple(proxy.endpoint for proxy in self._proxies)
        return [
            SendDelivered(proxies, turn.answer[start : start + MAX_ANSWERED_A_MESSAGE])
            for start in range(0, len(turn.answer), MAX_ANSWERED_A_MESSAGE)
        ]

    def _channel_of(self, record: bytes, body: bytes) -> Channel | None:
        key = int.from_bytes(record[24:32], "little")
        if record[5] & Flag.TOPIC:
            return self.index.topics.get(key, {}).get(body[2 : 2 + (body[0] << 8 | body[1])])
        return self.index.rooms.get(key)

    def _absences(self, now: float) -> list[Effect]:
        by_router: dict[EndpointID, list[int]] = {}
        for room in self.feedback.due(now):
            # Who joined since the record came has a GatewayMsgID that is higher than what would be said to be absent.
            for router in () if self.presence.own.gateways(room) else self.presence.routers(room):
                by_router.setdefault(router, []).append(room)
        return [SendControl(router, messages) for router, messages in absences(by_router, self._as_of())]

    def _published(self) -> list[Effect]:
        parcels: dict[tuple[EndpointID, int], list[bytes]] = {}
        for key, record in self._held:
            proxy = self._proxy_routes.target(key)
            if proxy is None:
                self.counters.publish_dropped += 1
                continue
            parcels.setdefault((proxy, record[6] >> 6), []).append(record)
        self.counters.published += len(self._held)
        self._held = []
        effects: list[Effect] = []
        for (proxy, lane), records in parcels.items():
            token = self._next_token()
            self._proxy_routes.sent(token, proxy)
            effects.append(SendRecords(proxy, records, lane, token))
        return effects

    def _deliveries(self) -> list[Effect]:
        effects: list[Effect] = []
        for channel in self._dirty:
            if channel.pending_packets:
                if channel.packet_targets is None:
                    channel.packet_targets = tuple(channel.packets)
                effects.append(_deliver(channel, channel.packet_targets, channel.pending_packets))
                self.counters.deliveries += len(channel.packet_targets) * len(channel.pending_packets)
                channel.pending_packets = []
            if channel.pending_records:
                if channel.record_targets is None:
                    channel.record_targets = tuple(channel.records)
                if channel.shown != channel.room:
                    channel.pending_records = [with_key(record, channel.shown) for record in channel.pending_records]
                effects.append(_deliver(channel, channel.record_targets, channel.pending_records))
                self.counters.deliveries += len(channel.record_targets) * len(channel.pending_records)
                channel.pending_records = []
        self._dirty.clear()
        return effects


def _deliver(channel: Channel, targets: tuple[int, ...], pending: list[bytes]) -> Deliver:
    data = b"".join(pending) if len(pending) > 1 else pending[0]
    return Deliver(targets, data, len(pending), channel.shown != channel.room)


def _split(data: bytes, start: int, end: int, count: int) -> list[bytes] | None:
    """The records of a batch; None when it is malformed."""
    records: list[bytes] = []
    for _ in range(count):
        if start + HEADER_SIZE > end:
            return None
        after = start + SIZE_FIELD + int.from_bytes(data[start : start + 4], "little")
        if after < start + SIZE_FIELD + LEAST_SIZE or after > end:
            return None
        records.append(data[start:after])
        start = after
    return records if start == end else None


def _publish_packet(head: bytes, body: bytes) -> bytes:
    """A QoS 0 PUBLISH: `head` (topic length and name; empty where the body begins with them) and the body."""
    size = len(head) + len(body)
    if size < 128:
        return b"0" + bytes((size,)) + head + body
    if size < 16_384:
        return b"0" + bytes((size & 127 | 128, size >> 7)) + head + body
    return b"0" + bytes((size & 127 | 128, size >> 7 & 127 | 128, size >> 14)) + head + body
