"""The gateway's core: its clients' rooms, what it tells routers and relays, and the fan-out of what it is sent.

The fan-out joins writes: packets of one channel are made once per message and joined once per turn of the event
loop; a connection gets one write for all of them.

Source: PiXiu §2.5, §5.1; docs/architecture.md, benchmarks/README.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cluster.links.api import Outcome
from cluster.membership.lww_map import VALUED_MESSAGES_A_CONTROL, Update
from cluster.runtime.contract import NEVER, EndOfTurn, EventTable, RecordsReceived, SendRecords, Settle, Settled, Tick
from gateway import events as ev
from gateway.devices import DeviceIndex
from gateway.mail import MailBook
from gateway.membership_reporter import MembershipReporter
from gateway.rooms import Channel, Client, RoomIndex
from gateway.signals import SIGNAL, MemoryTable, Signals, SignalTable
from gateway.traces import Traces
from pixiu.ids import EndpointID, gateway_msg_id
from pixiu.placement.big_rooms import VRooms, with_key
from pixiu.placement.ordered_routes import Routes
from pixiu.wire.record import HEADER_SIZE, IDENTITY, IDENTITY_AT, MIN_SIZE, SIZE_FIELD, Flag, Kind, intact_body
from pixiu.wire.trace import UNTRACED, Tracer
from pixiu.wire.v1 import control_pb2

DEDUPE_GENERATION = 65_536
"""The dedupe set starts a new generation after so many messages; it remembers the last one or two."""
MAX_ANSWERED_A_MESSAGE = 128
"""SnowflakeIDs of delivered signals in one control message, so that it fits a datagram."""
NO_BIG_ROOMS = VRooms()
TOPIC_OR_TRACED = Flag.TOPIC | Flag.TRACED
"""One look at a record's flags tells whether it is to no topic and untraced, as nearly all are."""
MAX_HELD_RECORDS = 100_000
"""Published records that wait for a change of proxies; beyond it the oldest are dropped."""
ROOM = int(Kind.ROOM)
CHAT = int(Kind.CHAT)
MALFORMED: Final = Settle(Outcome.MALFORMED)


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
        through_relays: rooms' messages come through relays, so that a join has taken effect when those know the user.
        tracer: stamps traced records.
    """

    def __init__(
        self,
        *,
        instance: int,
        generation: int,
        signals: SignalTable | None = None,
        vrooms: VRooms = NO_BIG_ROOMS,
        through_relays: bool = False,
        tracer: Tracer = UNTRACED,
    ) -> None:
        self.index = RoomIndex(vrooms)
        self._through_relays = through_relays
        self.signals = Signals(signals if signals is not None else MemoryTable())
        self.traces = Traces(tracer)
        self.counters = Counters()
        self._identity = (instance, generation)
        self._counter = 0
        self._token = 0
        self._seen: set[tuple[int, int]] = set()
        self._seen_before: set[tuple[int, int]] = set()
        self._dirty: dict[Channel, None] = {}
        self._proxies: tuple[ev.Replica, ...] = ()
        self._proxy_routes: Routes[EndpointID] = Routes(self._choose_proxy)
        self._held: list[tuple[int, bytes]] = []
        self.rooms = MembershipReporter(instance, self._as_of, self._next_token)
        self.users = MembershipReporter(instance, self._as_of, self._next_token, few_members=0, parcel=VALUED_MESSAGES_A_CONTROL)
        self.devices = DeviceIndex(self._next_id)
        devices = self.devices
        self.mail = MailBook(devices.mail_target, lambda: devices.mail_connections, self._speaks_mqtt)
        self._halves: dict[int, dict[int, bool | None]] = {}
        """Connection → request that routers and relays both have to confirm → what the first of them said."""
        self._table = self._event_table()

    def _event_table(self) -> EventTable[ev.Effect]:
        table: EventTable[ev.Effect] = EventTable()
        table.on(RecordsReceived, self._on_records)
        table.on(EndOfTurn, self._on_end_of_turn)
        table.on(ev.Publish, self._on_publish)
        table.on(Settled, self._on_settled)
        table.on(Tick, self._on_tick)
        table.on(ev.RoutersChanged, self._on_routers)
        table.on(ev.RelaysChanged, self._on_relays)
        table.on(ev.ProxiesChanged, self._on_proxies)
        table.on(ev.Opened, self._on_opened)
        table.on(ev.Closed, self._on_closed)
        table.on(ev.Join, self._on_join)
        table.on(ev.Leave, self._on_leave)
        table.on(ev.Confirmed, self._on_confirmed)
        table.on(ev.Replaced, self._on_replaced)
        table.on(ev.HealingReceived, self._on_healing)
        table.on(ev.FenceReceived, self._on_fence)
        table.on(ev.MailStreamOpened, self.mail.opened)
        table.on(ev.MailStreamClosed, self.mail.ended)
        table.on(ev.MailArrived, self.mail.arrived)
        table.on(ev.MailAcknowledged, self.mail.acknowledged)
        table.on(ev.PacketsAcknowledged, self.mail.packets_acknowledged)
        return table

    def step(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """Take one event; `now` is monotonic seconds. Returns what to do, in order.

        What must leave (deliveries, gateway messages) leaves at `EndOfTurn`.
        """
        return self._table.step(event, now)

    def heartbeat(self, partition: int, partitions: int, *, relay: bool | None = False) -> control_pb2.SubscriptionState:
        """The answer to a router's or relay's heartbeat: what is on this gateway of the rooms or users that it keeps.

        `relay` None: it may be either; of what the other keeps it would believe that it is all there is.
        """
        if relay is None:
            return control_pb2.SubscriptionState(subscribed=True)
        return control_pb2.SubscriptionState(
            subscribed=True, digest=(self.users if relay else self.rooms).digest(partition, partitions)
        )

    def next_deadline(self) -> float:
        """When `Tick` is due, monotonic seconds; `NEVER` when nothing waits."""
        routes = self._proxy_routes.deadline
        return min(self.rooms.next_deadline(), self.users.next_deadline(), NEVER if routes is None else routes)

    def samples(self) -> dict[str, object]:
        """Samples for metrics, beside `counters` and those of `mail`."""
        return {
            "presences": self.index.presences,
            "presences_unconfirmed": self.rooms.unconfirmed,
            "devices": len(self.devices),
            "devices_unconfirmed": self.users.unconfirmed,
            "mail_connections": self.devices.mail_connections,
            "mail_unacknowledged": self.mail.unacknowledged,
            "signals_dropped_total": self.signals.overflows,
            "traces_left_out_total": self.traces.left_out,
            **self.rooms.samples(""),
            **self.users.samples("devices_"),
        }

    @property
    def unconfirmed(self) -> int:
        """What was said and some partition has not confirmed."""
        return self.rooms.unconfirmed + self.users.unconfirmed

    def _next_id(self) -> int:
        self._counter += 1
        return gateway_msg_id(*self._identity, self._counter)

    def _as_of(self) -> int:
        """The last GatewayMsgID: what `rooms` and `users` hold is complete up to it."""
        return gateway_msg_id(*self._identity, self._counter)

    def _next_token(self) -> int:
        self._token += 1
        return self._token

    def _choose_proxy(self, key: int) -> EndpointID | None:
        usable = [proxy for proxy in self._proxies if proxy.usable] or list(self._proxies)
        return usable[key % len(usable)].endpoint if usable else None

    def _on_records(self, event: RecordsReceived, now: float, out: list[ev.Effect]) -> None:
        """A batch from a broker or a relay; of a malformed one nothing is delivered."""
        records = _split(event.data, event.start, event.end, event.count)
        if records is None:
            self.counters.batches_malformed += 1
            out.append(MALFORMED)
            return
        rooms, users, room, chat, signal = self.index.rooms, self.index.users, ROOM, CHAT, SIGNAL
        seen, before = self._seen, self._seen_before
        identity_of = IDENTITY.unpack_from
        self.counters.records_in += len(records)
        for record in records:
            kind = record[4]
            if kind == signal:
                if record[5] & Flag.TRACED:
                    self.traces.arrived(record)
                self.signals.take(record)
                continue
            identity = identity_of(record, IDENTITY_AT)
            if identity in seen or identity in before:
                self.counters.duplicates += 1
                continue
            seen.add(identity)
            body = intact_body(record)
            if body is None:
                self.counters.damaged += 1
                continue
            key = identity[1]
            if not record[5] & TOPIC_OR_TRACED:
                channel = rooms.get(key) if kind == room else users.get(key) if kind == chat else None
            else:
                if record[5] & Flag.TOPIC:
                    channel = self.index.topics.get(key, {}).get(body[2 : 2 + (body[0] << 8 | body[1])])
                else:
                    channel = rooms.get(key) if kind == room else users.get(key) if kind == chat else None
                if record[5] & Flag.TRACED and channel is not None:
                    self.traces.take(channel, record)
            if channel is None:
                self.counters.without_members += 1
                (self.rooms if kind == room else self.users).missing(key)
                continue
            self._dirty[channel] = None
            if channel.packets:
                channel.pending_packets.append(_publish_packet(channel.head, body))
            if channel.records:
                channel.pending_records.append(record)
        if len(seen) >= DEDUPE_GENERATION:
            self._seen_before, self._seen = seen, set()

    def _on_routers(self, event: ev.RoutersChanged, now: float, out: list[ev.Effect]) -> None:
        self.rooms.set_replicas(event.partitions, event.replicas, now)

    def _on_relays(self, event: ev.RelaysChanged, now: float, out: list[ev.Effect]) -> None:
        self.users.set_replicas(event.partitions, event.replicas, now)

    def _on_proxies(self, event: ev.ProxiesChanged, now: float, out: list[ev.Effect]) -> None:
        known = {proxy.endpoint for proxy in event.proxies}
        gone = [proxy.endpoint for proxy in self._proxies if proxy.endpoint not in known]
        self._proxies = event.proxies
        self._proxy_routes.change(now, gone)

    def _on_opened(self, event: ev.Opened, now: float, out: list[ev.Effect]) -> None:
        self.index.clients[event.connection] = Client(event.uin, event.packets)
        if event.device:
            opened = self.devices.opened(
                event.connection, event.uin, event.device, event.device_class, event.wall_ms, login=event.login, name=event.name
            )
            self.users.announce(opened, now)

    def _speaks_mqtt(self, connection: int) -> bool:
        return self.index.clients[connection].packets

    def _say_rooms(self, rooms: list[int], uin: int, login: bool, reason: int, now: float) -> None:
        self.rooms.announce([Update(self._next_id(), room, uin, login, reason) for room in rooms], now)

    def _on_closed(self, event: ev.Closed, now: float, out: list[ev.Effect]) -> None:
        client = self.index.clients.get(event.connection)
        if client is None:
            return
        left = self.index.leave(event.connection, list(client.channels))
        self.index.leave_user(event.connection)
        del self.index.clients[event.connection]
        self.rooms.forget(event.connection)
        self.users.forget(event.connection)
        self._halves.pop(event.connection, None)
        self._say_rooms(left, client.uin, False, event.reason, now)
        self.users.announce(self.devices.closed(event.connection, event.reason), now)
        out += self.mail.closed(event.connection)

    def _on_join(self, event: ev.Join, now: float, out: list[ev.Effect]) -> None:
        client = self.index.clients.get(event.connection)
        if client is None:
            return
        channels = self.index.channels(event.connection, event.channels)
        self._say_rooms(self.index.join(event.connection, channels), client.uin, True, 0, now)
        pairs = {(room, client.uin) for room, _ in channels}
        to_user = event.chat or event.mail
        if not to_user and not self._through_relays:
            out += self.rooms.request(event.connection, event.request, pairs, now)
            return
        if event.chat:
            self.index.join_user(event.connection)
        if to_user:
            # A device has one inbox: the older one is told, as it is by a relay where it is at another gateway.
            older = self.devices.older(event.connection) if event.mail and not self.devices.takes_mail(event.connection) else []
            out += [ev.Disconnect(connection, control_pb2.REASON_MOVED) for connection in older]
            self.users.announce(self.devices.join(event.connection, chat=event.chat, mail=event.mail), now)
        self._halves.setdefault(event.connection, {})[event.request] = None
        devices = self.devices.pairs(event.connection)
        out += self._answered(self.rooms.request(event.connection, event.request, pairs, now))
        out += self._answered(self.users.request(event.connection, event.request, devices, now))

    def _answered(self, answers: list[ev.Answer]) -> list[ev.Answer]:
        """Answers that may go out: one that needs both routers and relays goes with the second."""
        if not self._halves:
            return answers
        found: list[ev.Answer] = []
        for answer in answers:
            halves = self._halves.get(answer.connection, {})
            if answer.request not in halves:
                found.append(answer)
            elif halves[answer.request] is None:
                halves[answer.request] = answer.known
            else:
                found.append(ev.Answer(answer.connection, answer.request, bool(halves.pop(answer.request)) and answer.known))
                if not halves:
                    del self._halves[answer.connection]
        return found

    def _on_leave(self, event: ev.Leave, now: float, out: list[ev.Effect]) -> None:
        client = self.index.clients.get(event.connection)
        if client is None:
            return
        channels = self.index.channels(event.connection, event.channels)
        self._say_rooms(self.index.leave(event.connection, channels), client.uin, False, 1, now)
        if event.chat:
            self.index.leave_user(event.connection)
        self.users.announce(self.devices.leave(event.connection, chat=event.chat, mail=event.mail), now)
        if event.mail:
            out += self.mail.closed(event.connection)

    def _on_publish(self, event: ev.Publish, now: float, out: list[ev.Effect]) -> None:
        self._held.extend(event.records)
        if len(self._held) > MAX_HELD_RECORDS:
            self.counters.publish_dropped += len(self._held) - MAX_HELD_RECORDS
            del self._held[:-MAX_HELD_RECORDS]

    def _on_confirmed(self, event: ev.Confirmed, now: float, out: list[ev.Effect]) -> None:
        if not self.users.reports_to(event.peer):
            out += self._answered(self.rooms.confirmed(event.peer, event.ids))
            return
        for number, time in event.newer:
            change = self.users.message(number)
            if change is not None:
                self.users.announce(self.devices.overtaken(change, time), now)
        told = [change for number in event.ids if (change := self.users.message(number)) is not None]
        answers = self.users.confirmed(event.peer, event.ids)
        for change in told:
            # While relays double two partitions are told, of which one may not know the user's other devices.
            if self.users.message(change.id) is None:
                self.devices.confirmed(change)
        out += self._answered(answers)

    def _on_replaced(self, event: ev.Replaced, now: float, out: list[ev.Effect]) -> None:
        connections = self.devices.replaced(event.uin, event.key, event.connect_time)
        out += [ev.Disconnect(connection, event.reason) for connection in connections]

    def _on_healing(self, event: ev.HealingReceived, now: float, out: list[ev.Effect]) -> None:
        if event.relay is not None:
            out += (self.users if event.relay else self.rooms).answer(event.peer, event.control)

    def _on_fence(self, event: ev.FenceReceived, now: float, out: list[ev.Effect]) -> None:
        instance, generation = self._identity
        if gateway_msg_id(instance, generation + 1, 0) <= event.floor <= gateway_msg_id(instance + 1, 0, 0):
            out.append(ev.Fenced())

    def _on_settled(self, event: Settled, now: float, out: list[ev.Effect]) -> None:
        for token, handled in event.parcels:
            if not any(reports.settled(token, handled, now) for reports in (self.rooms, self.users)):
                self._proxy_routes.settled(token)

    def _on_tick(self, event: Tick, now: float, out: list[ev.Effect]) -> None:
        self._proxy_routes.expire(now)
        out += self._answered(self.rooms.expire(now))
        out += self._answered(self.users.expire(now))

    def _on_end_of_turn(self, event: EndOfTurn, now: float, out: list[ev.Effect]) -> None:
        """Membership first, so that routers know of it before a message that a client sends after it."""
        out += self.rooms.flush(now)
        out += self.users.flush(now)
        if self._held and not self._proxy_routes.held:
            self._send_published(out)
        answers = self._end_signals() if self.signals else []
        traced = self.traces.finish() if self.traces else []
        self._deliver(out)
        if traced:
            out.append(ev.KeepTraces(traced))
        out += answers

    def _end_signals(self) -> list[ev.SendDelivered]:
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
            ev.SendDelivered(proxies, turn.answer[start : start + MAX_ANSWERED_A_MESSAGE])
            for start in range(0, len(turn.answer), MAX_ANSWERED_A_MESSAGE)
        ]

    def _channel_of(self, record: bytes, body: bytes) -> Channel | None:
        key = int.from_bytes(record[24:32], "little")
        if record[5] & Flag.TOPIC:
            return self.index.topics.get(key, {}).get(body[2 : 2 + (body[0] << 8 | body[1])])
        return self.index.rooms.get(key) if record[5] & Flag.TO_ROOM else self.index.users.get(key)

    def _send_published(self, out: list[ev.Effect]) -> None:
        parcels: dict[tuple[EndpointID, int], list[bytes]] = {}
        for key, record in self._held:
            proxy = self._proxy_routes.target(key)
            if proxy is None:
                self.counters.publish_dropped += 1
                continue
            parcels.setdefault((proxy, record[6] >> 6), []).append(record)
        self.counters.published += len(self._held)
        self._held = []
        for (proxy, lane), records in parcels.items():
            token = self._next_token()
            self._proxy_routes.sent(token, proxy)
            out.append(SendRecords(proxy, records, lane, token))

    def _deliver(self, out: list[ev.Effect]) -> None:
        for channel in self._dirty:
            if channel.pending_packets:
                if channel.packet_targets is None:
                    channel.packet_targets = tuple(channel.packets)
                out.append(_delivery(channel, channel.packet_targets, channel.pending_packets))
                self.counters.deliveries += len(channel.packet_targets) * len(channel.pending_packets)
                channel.pending_packets = []
            if channel.pending_records:
                if channel.record_targets is None:
                    channel.record_targets = tuple(channel.records)
                if channel.shown != channel.room:
                    channel.pending_records = [with_key(record, channel.shown) for record in channel.pending_records]
                out.append(_delivery(channel, channel.record_targets, channel.pending_records))
                self.counters.deliveries += len(channel.record_targets) * len(channel.pending_records)
                channel.pending_records = []
        self._dirty.clear()


def _delivery(channel: Channel, targets: tuple[int, ...], pending: list[bytes]) -> ev.Deliver:
    data = b"".join(pending) if len(pending) > 1 else pending[0]
    return ev.Deliver(targets, data, len(pending), channel.shown != channel.room)


def _split(data: bytes, start: int, end: int, count: int) -> list[bytes] | None:
    """The records of a batch; None when it is malformed."""
    records: list[bytes] = []
    for _ in range(count):
        if start + HEADER_SIZE > end:
            return None
        after = start + SIZE_FIELD + int.from_bytes(data[start : start + 4], "little")
        if after < start + SIZE_FIELD + MIN_SIZE or after > end:
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
