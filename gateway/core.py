"""The gateway's core: its clients' rooms, its reports to routers and relays, and the fan-out of messages.

The fan-out joins writes: packets of one channel are made once per message and joined once per turn of the event
loop; a connection gets one write for all of them.

Source: PiXiu §2.5, §5.1; docs/architecture.md, benchmarks/README.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from cluster.core.contract import EndOfTurn, EventTable, RecordsReceived, SendRecords, Settle, Settled, Tick
from cluster.links.api import Outcome
from cluster.membership.events import DigestKeysChanged
from cluster.membership.map.updates import PROVEN_MESSAGES_A_CONTROL, VALUED_MESSAGES_A_CONTROL
from cluster.wire.v1 import control_pb2
from gateway import events as ev
from gateway.confirming import Confirming
from gateway.delivery.dedupe import Dedupe
from gateway.delivery.fan_out import FanOut, publish_packet
from gateway.delivery.mail import MailBook
from gateway.delivery.retained import RetainedDeliveries
from gateway.delivery.shared import SharedDeliveries
from gateway.delivery.signals import SIGNAL, MemoryTable, Signals, SignalTable
from gateway.delivery.system_topics import SystemTopics
from gateway.delivery.traces import Traces
from gateway.joining import MAX_WIDE_ROOMS, Joining
from gateway.membership.devices import DeviceIndex
from gateway.membership.reporter import MembershipReporter
from gateway.membership.rooms import NO_TOPICS, THE_GATEWAY, Channel, Client, RoomIndex
from pixiu.ids import ALL_TOPICS, TOPIC_ROOM, EndpointID, gateway_msg_id
from pixiu.placement.big_rooms import NO_BIG_ROOMS, VRooms
from pixiu.placement.ordered_routes import Routes
from pixiu.placement.topic_rooms import BY_FIRST_LEVEL, TopicRooms
from pixiu.version import __version__
from pixiu.wire.record import (
    FLAGS_AT,
    HEADER_SIZE,
    KEY_AT,
    KIND_AT,
    LIFETIME_AT,
    LIFETIME_HIGH_AT,
    MIN_SIZE,
    SENDER_AT,
    SIZE_FIELD,
    SNOWFLAKE_AT,
    TYPE_AT,
    TYPE_BITS,
    Flag,
    Kind,
    has_expired,
    intact_body,
)
from pixiu.wire.trace import UNTRACED, Tracer
from pixiu.wire.uin_list import take_apart

MAX_ANSWERED_A_MESSAGE = 128
"""SnowflakeIDs of delivered signals in one control message, so that it fits a datagram."""
MOVING = EndpointID(0)
"""In place of the proxy of a key whose records wait."""
TOPIC_OR_TRACED = Flag.TOPIC | Flag.TRACED
"""One test of a record's flags: nearly all records have no topic and no trace."""
SESSION_DEVICE: Final = 1
"""The only device of a session's pseudo-user."""
MAX_HELD_RECORDS = 100_000
"""Published records that wait for a change of proxies; beyond it the oldest are dropped."""
LOAD_TEST = int(Flag.LOAD_TEST)
ROOM = int(Kind.ROOM)
CHAT = int(Kind.CHAT)
ADDRESSED = int(Kind.ADDRESSED)
MALFORMED: Final = Settle(Outcome.MALFORMED)


@dataclass(slots=True)
class Counters:
    """Counts since the start of the gateway."""

    records_in: int = 0
    deliveries: int = 0
    duplicates: int = 0
    without_members: int = 0
    damaged: int = 0
    expired: int = 0
    """Older than their lifetime."""
    load_test_blocked: int = 0
    """Messages of load tests that MQTT clients of a room or topic do not get."""
    batches_malformed: int = 0
    published: int = 0
    publish_dropped: int = 0
    signals_delivered: int = 0
    signals_repeated: int = 0
    """Copies and repeats of delivered signals: dropped, and answered."""


_Published = tuple[int, bytes, int]
"""Key, record, connection."""


class Core(EventTable[ev.Effect]):
    """Decides; see the module. `step` never raises on what comes from the network. Deliveries and gateway messages leave at
    `EndOfTurn`.

    Args:
        instance: this gateway's leased number.
        generation: of that number, grown with this start.
        signals: remembers delivered signals; None: only while this core lives.
        vrooms: the cluster's big rooms.
        topics: the rooms of free topics.
        max_wide_rooms: rooms that one connection's filters with wildcards may span, beyond one each.
        through_relays: room messages come through relays, so a join takes effect only when they know the user.
        tracer: stamps traced records.
        jitter, is_crowd: see `MembershipReporter`.
        uniform: gives numbers in [0, 1).
        unix_ms: clock for lifetimes, Unix milliseconds; it agrees only roughly with that of the senders' IDs.
        ticket_of: user → login ticket for reports to relays; None: there are none.
    """

    def __init__(
        self,
        *,
        instance: int,
        generation: int,
        signals: SignalTable | None = None,
        vrooms: VRooms = NO_BIG_ROOMS,
        topics: TopicRooms = BY_FIRST_LEVEL,
        max_wide_rooms: int = MAX_WIDE_ROOMS,
        through_relays: bool = False,
        tracer: Tracer = UNTRACED,
        jitter: Callable[[], float] = lambda: 0.0,
        is_crowd: Callable[[], bool] = lambda: False,
        unix_ms: Callable[[], int] = lambda: 0,
        ticket_of: Callable[[int], bytes] | None = None,
        uniform: Callable[[], float] = lambda: 0.0,
    ) -> None:
        super().__init__()
        self._unix_ms = unix_ms
        self.index = RoomIndex(vrooms, topics, users_everywhere=through_relays)
        self.signals = Signals(signals if signals is not None else MemoryTable())
        self.traces = Traces(tracer)
        self.counters = Counters()
        self._identity = (instance, generation)
        self._counter = 0
        self._token = 0
        self.dedupe = Dedupe()
        self.fan_out = FanOut(unix_ms)
        self.retained = RetainedDeliveries(self.index, self.fan_out)
        self.shared = SharedDeliveries(self.index, self.fan_out)
        self._proxies: tuple[ev.Replica, ...] = ()
        self._proxy_routes: Routes[EndpointID] = Routes(self._choose_proxy, MOVING)
        self._held: list[_Published] = []
        """Records that clients published in this turn."""
        self._moving: list[_Published] = []
        """Published records that wait because their key moves to another proxy."""
        self._from: dict[int, dict[int, int]] = {}
        """Token of a parcel to a proxy → the connections that it came from, with the bytes of each."""
        self.confirming = Confirming(self._next_token, vrooms, uniform)
        reporter = partial(MembershipReporter, instance, self._as_of, self._next_token, jitter=jitter, is_crowd=is_crowd)
        self.rooms = reporter()
        parcel = VALUED_MESSAGES_A_CONTROL if ticket_of is None else PROVEN_MESSAGES_A_CONTROL
        self.users = reporter(few_members=0, parcel=parcel, ticket_of=ticket_of)
        self.devices = DeviceIndex(self._next_id)
        devices = self.devices
        self.mail = MailBook(devices.mail_target, lambda: devices.mail_connections, self._speaks_mqtt, unix_ms)
        self.joining = Joining(
            self.index, self.rooms, self.users, devices, self.mail, self.retained, self._next_id,
            through_relays=through_relays, max_wide_rooms=max_wide_rooms,
        )  # fmt: skip
        said: dict[str, Callable[[], object]] = {
            "version": lambda: __version__,
            "clients/connected": lambda: len(self.index.clients),
            "messages/sent": lambda: self.counters.deliveries,
            "subscriptions/count": lambda: sum(len(client.filters) for client in self.index.clients.values()),
        }
        self.system = SystemTopics(self.index, self.fan_out, said, unix_ms)
        self._enter_events()

    def _enter_events(self) -> None:
        self.on(RecordsReceived, self._on_records)
        self.on(EndOfTurn, self._on_end_of_turn)
        self.on(ev.Publish, self._on_publish)
        self.on(ev.PublishConfirmed, self._on_publish_confirmed)
        self.on(ev.BatchResolved, self.confirming.resolved)
        self.on(Settled, self._on_settled)
        self.on(Tick, self._on_tick)
        self.on(ev.RoutersChanged, self._on_routers)
        self.on(ev.RelaysChanged, self._on_relays)
        self.on(ev.ProxiesChanged, self._on_proxies)
        self.on(ev.Opened, self._on_opened)
        self.on(ev.Closed, self._on_closed)
        self.on(ev.Join, self.joining.join)
        self.on(ev.Leave, self.joining.leave)
        self.on(ev.SharedAcknowledged, self._on_shared_acknowledged)
        self.on(ev.RetainedFound, self._on_retained_found)
        self.on(ev.RetainedFetched, self._on_retained_fetched)
        self.on(ev.Confirmed, self._on_confirmed)
        self.on(ev.Replaced, self._on_replaced)
        self.on(ev.HealingReceived, self._on_healing)
        self.on(ev.FenceReceived, self._on_fence)
        self.on(DigestKeysChanged, self._on_digest_keys)
        self.on(ev.MailStreamOpened, self.mail.opened)
        self.on(ev.MailStreamClosed, self.mail.ended)
        self.on(ev.MailArrived, self.mail.arrived)
        self.on(ev.MailAcknowledged, self.mail.acknowledged)
        self.on(ev.PacketsAcknowledged, self.mail.packets_acknowledged)

    def _on_digest_keys(self, event: DigestKeysChanged, now: float, out: list[ev.Effect]) -> None:
        for reporter in (self.rooms, self.users):
            reporter.own.set_digest_keys(event.keys)

    def heartbeat(
        self, partition: int, partitions: int, *, relay: bool | None = False, key: int = 0
    ) -> control_pb2.SubscriptionState:
        """Answer a router's or relay's heartbeat with the state of the rooms or users that it keeps, as they are on this gateway,
        by the digest key that it names.

        `relay` None: it may be either. No digest is sent, because it would take one of the other role for a complete list.
        """
        if relay is None:
            return control_pb2.SubscriptionState(subscribed=True)
        return control_pb2.SubscriptionState(
            subscribed=True, digest=(self.users if relay else self.rooms).digest(partition, partitions, key)
        )

    def next_deadline(self) -> float:
        """Time at which `Tick` is due, monotonic seconds; `NEVER` when nothing waits."""
        if self.joining.leaving:
            return 0.0
        deadline = min(self.confirming.next_deadline(), self._proxy_routes.deadline, self.joining.leave_at)
        if self.index.system:
            deadline = min(deadline, self.system.next_deadline())
        for reporter in (self.rooms, self.users):
            if reporter.waits:
                deadline = min(deadline, reporter.next_deadline())
        return deadline

    def samples(self) -> dict[str, object]:
        """Samples for metrics, besides `counters` and those of `mail`."""
        return {
            "presences": self.index.presences,
            "presences_unconfirmed": self.rooms.unconfirmed,
            "devices": len(self.devices),
            "devices_unconfirmed": self.users.unconfirmed,
            "mail_connections": self.devices.mail_connections - len(self.confirming.sessions),  # without sessions' inboxes
            "mail_unacknowledged": self.mail.unacknowledged,
            "signals_dropped_total": self.signals.overflows,
            "dedupe_messages": len(self.dedupe),
            "dedupe_forgotten_early_total": self.dedupe.forgotten_early,
            "traces_left_out_total": self.traces.left_out,
            "confirmed_unresolved": self.confirming.unresolved,
            "confirmed_batches_total": self.confirming.batches,
            "confirmed_batches_lost_total": self.confirming.lost,
            "filters_with_wildcards": len(self.index.wild),
            "shared_unacknowledged": self.shared.unacknowledged,
            "shared_delivered_total": self.shared.delivered,
            "shared_given_again_total": self.shared.given_again,
            "shared_returned_total": self.shared.returned,
            "retained_delivered_total": self.retained.delivered,
            "retained_fetches": len(self.retained),
            **self.rooms.samples(""),
            **self.users.samples("devices_"),
        }

    @property
    def unconfirmed(self) -> int:
        """Number of reports that some partition has not confirmed."""
        return self.rooms.unconfirmed + self.users.unconfirmed + len(self.joining.leaving)

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
        return _proxy_of(key, self._proxies)

    def _on_records(self, event: RecordsReceived, now: float, out: list[ev.Effect]) -> None:
        """Take a batch from a broker or a relay; of a malformed one nothing is delivered."""
        records = _split(event.data, event.start, event.end, event.count)
        if records is None:
            self.counters.batches_malformed += 1
            out.append(MALFORMED)
            return
        rooms, users, room, chat, signal, addressed = self.index.rooms, self.index.users, ROOM, CHAT, SIGNAL, ADDRESSED
        self.dedupe.turn(now)
        seen, before, dirty = self.dedupe.current, self.dedupe.before, self.fan_out.dirty
        from_bytes = int.from_bytes
        self.counters.records_in += len(records)
        route, topics = self.index.route if len(self.index.wild) else None, self.index.topics
        watch = self.retained.watch if self.retained.watches else None
        for record in records:
            kind = record[KIND_AT]
            if kind == addressed:
                found = self._take_shared(event.peer, record)
                if found is None:
                    continue
                record, kind = found, found[KIND_AT]
            if kind == signal:
                if (record[LIFETIME_AT] or record[LIFETIME_HIGH_AT]) and has_expired(record, 0, self._unix_ms()):
                    self.counters.expired += 1
                    continue
                if record[FLAGS_AT] & Flag.TRACED:
                    self.traces.arrived(record)
                self.signals.take(record)
                continue
            identity = record[SNOWFLAKE_AT:SENDER_AT]
            if identity in seen or identity in before:
                seen.add(identity)
                self.counters.duplicates += 1
                continue
            body = intact_body(record)
            if body is None:
                self.counters.damaged += 1
                continue
            key = from_bytes(record[KEY_AT:SENDER_AT], "little")
            flags = record[FLAGS_AT]
            if not flags & TOPIC_OR_TRACED:
                channel = rooms.get(key) if kind == room else users.get(key) if kind == chat else None
            else:
                if flags & Flag.TOPIC:
                    name = body[2 : 2 + (body[0] << 8 | body[1])]
                    channel = topics.get(key, NO_TOPICS).get(name) if route is None else route(key, name)
                else:
                    channel = rooms.get(key) if kind == room else users.get(key) if kind == chat else None
                if flags & Flag.TRACED and channel is not None:
                    self.traces.take(channel, record)
            if channel is None:
                self._without_members(kind, key)
                continue
            if (record[LIFETIME_AT] or record[LIFETIME_HIGH_AT]) and has_expired(record, 0, self._unix_ms()):
                self.counters.expired += 1
                continue
            # Only whole and delivered records count: a damaged copy, or one for nobody, is no reason to drop the next.
            seen.add(identity)
            if watch is not None:
                channel = watch(channel, record, body, self._unix_ms())
            if flags & LOAD_TEST:
                self._queue_load_test(channel, record)
                continue
            dirty[channel] = None
            if channel.packets:
                channel.pending_packets.append(publish_packet(channel.head, body))
            if channel.records:
                channel.pending_records.append(record)
            if channel.others:
                self.fan_out.queue_others(channel, record, body)

    def _without_members(self, kind: int, key: int) -> None:
        self.counters.without_members += 1
        if kind != ROOM:
            self.users.missing(key)
        elif key < TOPIC_ROOM or not self.rooms.own.gateways(ALL_TOPICS):
            self.rooms.missing(key)

    def _queue_load_test(self, channel: Channel, record: bytes) -> None:
        """Queue a message of a load test: clients of MQTT cannot say whether they want it, and do not get it."""
        if channel.packets or channel.others:
            self.counters.load_test_blocked += 1
        if channel.records:
            self.fan_out.dirty[channel] = None
            channel.pending_records.append(record)

    def _take_shared(self, broker: EndpointID, record: bytes) -> bytes | None:
        """Give a message to the groups that a broker names. Returns the record if it is for the others here, too."""
        found = take_apart(record, 0, len(record))
        body = intact_body(found[1]) if found is not None else None
        if found is None or body is None:
            self.counters.damaged += 1
            return None
        groups, inner = found
        if has_expired(inner, 0, self._unix_ms()):
            self.counters.expired += 1
            return inner if THE_GATEWAY in groups else None
        for group in groups:
            if group == THE_GATEWAY:
                continue
            identity = inner[SNOWFLAKE_AT:KEY_AT] + group.to_bytes(8, "little")
            if identity in self.dedupe.current or identity in self.dedupe.before:
                self.dedupe.current.add(identity)
                self.counters.duplicates += 1
            elif self.shared.take(broker, group, inner, body):
                self.dedupe.current.add(identity)
        return inner if THE_GATEWAY in groups else None

    def _on_routers(self, event: ev.RoutersChanged, now: float, out: list[ev.Effect]) -> None:
        self.system.begin(now)
        self.rooms.set_replicas(event.partitions, event.replicas, now)

    def _on_relays(self, event: ev.RelaysChanged, now: float, out: list[ev.Effect]) -> None:
        self.users.set_replicas(event.partitions, event.replicas, now)

    def _on_proxies(self, event: ev.ProxiesChanged, now: float, out: list[ev.Effect]) -> None:
        self.confirming.set_proxies(event.proxies)
        old, self._proxies = self._proxies, event.proxies
        if old != event.proxies:
            usable = {proxy.endpoint for proxy in event.proxies if proxy.usable}
            gone = [proxy.endpoint for proxy in old if proxy.endpoint not in usable]
            self._proxy_routes.change(now, lambda key: _proxy_of(key, old), gone=gone)

    def _on_opened(self, event: ev.Opened, now: float, out: list[ev.Effect]) -> None:
        self.index.clients[event.connection] = Client(
            event.uin, event.dialect, exact=event.exact, credit=event.credit, inside=event.inside
        )  # fmt: skip
        if event.device:
            opened = self.devices.opened(
                event.connection, event.uin, event.device, event.device_class, event.wall_ms, login=event.login, name=event.name
            )
            self.users.announce(opened, now)
        if event.session:
            self.confirming.sessions[event.connection] = event.session
            opened = self.devices.opened(
                -event.connection, event.session, SESSION_DEVICE, 0, event.wall_ms, login=False, name=event.name
            )
            self.users.announce(self.devices.join(-event.connection, mail=True) or opened, now)

    def _speaks_mqtt(self, connection: int) -> bool:
        return self.index.clients[abs(connection)].packets

    def _on_closed(self, event: ev.Closed, now: float, out: list[ev.Effect]) -> None:
        client = self.joining.client(event.connection)
        if client is None:
            return
        self.joining.closed(event, client)
        self.shared.closed(event.connection)
        self.users.announce(self.devices.closed(event.connection, event.reason), now)
        out += self.mail.closed(event.connection)
        if self.confirming.sessions.pop(event.connection, 0):
            self.users.announce(self.devices.closed(-event.connection, event.reason), now)
            out += self.mail.closed(-event.connection)

    def _on_shared_acknowledged(self, event: ev.SharedAcknowledged, now: float, out: list[ev.Effect]) -> None:
        self.shared.acknowledged(event.connection, event.numbers)

    def _on_retained_found(self, event: ev.RetainedFound, now: float, out: list[ev.Effect]) -> None:
        self.retained.found(event, self._unix_ms())

    def _on_retained_fetched(self, event: ev.RetainedFetched, now: float, out: list[ev.Effect]) -> None:
        self.retained.fetched(event)

    def _on_publish_confirmed(self, event: ev.PublishConfirmed, now: float, out: list[ev.Effect]) -> None:
        self.system.received += len(event.messages)
        if self.index.without_own:
            for message in event.messages:
                self.fan_out.own.put(message.record, message.sender.connection)
        self.confirming.offered(event, now, out)

    def _on_publish(self, event: ev.Publish, now: float, out: list[ev.Effect]) -> None:
        self.system.received += len(event.records)
        if self.index.without_own:
            for _, record in event.records:
                self.fan_out.own.put(record, event.connection)
        self._held.extend((key, record, event.connection) for key, record in event.records)
        over = len(self._held) + len(self._moving) - MAX_HELD_RECORDS
        if over > 0:
            self.counters.publish_dropped += over
            waiting = self._moving + self._held
            self._moving, self._held = [], waiting[over:]
            out += _passed(waiting[:over])

    def _on_confirmed(self, event: ev.Confirmed, now: float, out: list[ev.Effect]) -> None:
        said = [reports for reports in (self.rooms, self.users) if reports.reports_to(event.peer)]
        if any(reports.message(number) is not None for reports in said for number in event.stale):
            # The newest state that this run reported of a member is not the newest known: no client may rely on it.
            out.append(ev.Fenced())
        if not self.users.reports_to(event.peer):
            self.joining.answered(self.rooms.confirmed(event.peer, event.ids), now, out)
            self.joining.answered(self.rooms.refused(event.peer, event.refused, now), now, out)
            return
        for number, time in event.newer:
            change = self.users.message(number)
            if change is not None:
                self.users.announce(self.devices.overtaken(change, time), now)
        told = [change for number in event.ids if (change := self.users.message(number)) is not None]
        answers = self.users.confirmed(event.peer, event.ids)
        for change in told:
            # While relays double, two partitions are informed, one of which may not know the user's other devices.
            if self.users.message(change.id) is None:
                self.devices.confirmed(change)
        self.joining.answered(answers, now, out, users=True)
        self.joining.answered(self.users.refused(event.peer, event.refused, now), now, out, users=True)

    def _on_replaced(self, event: ev.Replaced, now: float, out: list[ev.Effect]) -> None:
        connections = self.devices.replaced(event.uin, event.key, event.connect_time)
        out += [ev.Disconnect(abs(connection), event.reason) for connection in connections]

    def _on_healing(self, event: ev.HealingReceived, now: float, out: list[ev.Effect]) -> None:
        if event.relay is not None:
            out += (self.users if event.relay else self.rooms).answer(event.peer, event.control)

    def _on_fence(self, event: ev.FenceReceived, now: float, out: list[ev.Effect]) -> None:
        instance, generation = self._identity
        if gateway_msg_id(instance, generation + 1, 0) <= event.floor <= gateway_msg_id(instance + 1, 0, 0):
            out.append(ev.Fenced())

    def _on_settled(self, event: Settled, now: float, out: list[ev.Effect]) -> None:
        for token, handled in event.parcels:
            if self.confirming.settled(token, handled, now):
                continue
            if not any(reports.settled(token, handled, now) for reports in (self.rooms, self.users)):
                self._proxy_routes.settled(token)
                out += [ev.Passed(connection, size) for connection, size in self._from.pop(token, {}).items()]

    def _on_tick(self, event: Tick, now: float, out: list[ev.Effect]) -> None:
        self._proxy_routes.expire(now)
        self.confirming.expire(now)
        self.joining.answered(self.rooms.expire(now), now, out)
        self.joining.answered(self.users.expire(now), now, out, users=True)

    def _on_end_of_turn(self, event: EndOfTurn, now: float, out: list[ev.Effect]) -> None:
        """Send membership first, so that routers know it before a message that the client sends after it."""
        if self.joining.leaving:
            self.joining.leave_some(now)
        if self.joining.leave_at <= now:
            self.joining.leave_wide(now)
        for reporter in (self.rooms, self.users):
            if reporter.waits:
                out += reporter.flush(now)
        if self._moving and not self._proxy_routes.held:
            self._moving, self._held = [], self._moving + self._held
        if self._held:
            self._send_published(out)
        if self.confirming.unresolved:
            self.confirming.flush(now, out)
        answers = self._end_signals() if self.signals.waiting else []
        traced = self.traces.finish() if self.traces.waiting else []
        if self.index.system:
            self.system.note(now)
            self.system.flush(now)
        if self.fan_out.dirty or self.fan_out.waits:
            self.counters.deliveries += self.fan_out.deliver(out)
        if traced:
            out.append(ev.KeepTraces(traced))
        out += answers
        if self.shared.waits:
            out += self.shared.flush()

    def _end_signals(self) -> list[ev.SendDelivered]:
        """Queue the turn's new signals for their clients. Returns the answers to send after the deliveries."""
        turn = self.signals.end_turn(self._channel_of)
        for channel, record, body in turn.deliver:
            if record[FLAGS_AT] & Flag.TRACED:
                self.traces.take(channel, record)
            if record[FLAGS_AT] & LOAD_TEST:
                self._queue_load_test(channel, record)
            else:
                self.fan_out.queue(channel, record, body)
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
        key = int.from_bytes(record[KEY_AT:SENDER_AT], "little")
        if record[FLAGS_AT] & Flag.TOPIC:
            return self.index.route(key, body[2 : 2 + (body[0] << 8 | body[1])])
        return self.index.rooms.get(key) if record[FLAGS_AT] & Flag.TO_ROOM else self.index.users.get(key)

    def _send_published(self, out: list[ev.Effect]) -> None:
        parcels: dict[tuple[EndpointID, int], list[_Published]] = {}
        dropped: list[_Published] = []
        for published in self._held:
            key, record, _ = published
            proxy = self._proxy_routes.target(key)
            if proxy is None:
                self.counters.publish_dropped += 1
                dropped.append(published)
                continue
            if proxy == MOVING:
                self._moving.append(published)
                continue
            self.counters.published += 1
            parcels.setdefault((proxy, record[TYPE_AT] >> TYPE_BITS), []).append(published)
        self._held = []
        for (proxy, lane), parcel in parcels.items():
            token = self._next_token()
            self._proxy_routes.sent(token, proxy)
            self._from[token] = _bytes_of(parcel)
            out.append(SendRecords(proxy, [record for _, record, _ in parcel], lane, token))
        out += _passed(dropped)


def _proxy_of(key: int, proxies: tuple[ev.Replica, ...]) -> EndpointID | None:
    usable = [proxy for proxy in proxies if proxy.usable] or list(proxies)
    return usable[key % len(usable)].endpoint if usable else None


def _bytes_of(published: list[_Published]) -> dict[int, int]:
    """Connection → bytes of these records that it published."""
    found: dict[int, int] = {}
    for _, record, connection in published:
        found[connection] = found.get(connection, 0) + len(record)
    return found


def _passed(published: list[_Published]) -> list[ev.Passed]:
    return [ev.Passed(connection, size) for connection, size in _bytes_of(published).items()]


def _split(data: bytes, start: int, end: int, count: int) -> list[bytes] | None:
    """Split a batch into records; None if it is malformed."""
    records: list[bytes] = []
    for _ in range(count):
        if start + HEADER_SIZE > end:
            return None
        after = start + SIZE_FIELD + int.from_bytes(data[start : start + SIZE_FIELD], "little")
        if after < start + SIZE_FIELD + MIN_SIZE or after > end:
            return None
        records.append(data[start:after])
        start = after
    return records if start == end else None
