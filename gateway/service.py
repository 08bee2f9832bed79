"""The gateway's shell: its listeners, its links, and the timers around the core.

Source: seed 004 §2.5, §5.1.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import random
import socket
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from google.protobuf.message import DecodeError

from cluster.links.api import Outcome, Peer, PeerState
from cluster.membership.anti_entropy import is_anti_entropy
from cluster.membership.digest import Digest, Rule
from cluster.membership.lww_map import encode_messages
from cluster.runtime.context import Context
from cluster.runtime.tracing import tracer_of
from gateway.admission import Admission
from gateway.backlog import Connection, Pending
from gateway.core import Core
from gateway.events import (
    AcknowledgementsDue,
    Answer,
    Closed,
    Confirmed,
    Deliver,
    Disconnect,
    Effect,
    EndMailStream,
    EndOfTurn,
    Event,
    Fenced,
    FenceReceived,
    HealingReceived,
    Join,
    KeepTraces,
    Leave,
    MailAcknowledged,
    Opened,
    PacketsAcknowledged,
    ProxiesChanged,
    Publish,
    RecordsArrived,
    RelaysChanged,
    Replaced,
    Replica,
    RoutersChanged,
    SendControl,
    SendDelivered,
    SendMembership,
    SendRecords,
    Settled,
    Tick,
    WriteMail,
)
from gateway.identity import Identity
from gateway.mail_streams import MailDeliveryService
from gateway.mqtt import Confirmable, MQTTConnection
from gateway.options import Options
from gateway.paced_fanout import PatientDeliveries
from gateway.publishing import ConfirmedPublisher
from gateway.rates import PublishRates, Rates
from gateway.signal_table import SharedTable, folder_name, open_table
from gateway.signals import SignalTable
from gateway.slow_consumers import SlowConsumers
from gateway.subscriber import SubscriberService
from gateway.trace_files import TraceWriter, open_traces
from pixiu.discovery.node import Node, NodeState, gateway_publisher
from pixiu.discovery.view import View
from pixiu.errors import ConfigurationError, Draining, Overloaded, Unavailable
from pixiu.ids import EndpointID, SnowflakeID
from pixiu.mqtt.events import CloseReason
from pixiu.mqtt.server import SessionLimits
from pixiu.placement.big_rooms import VRooms
from pixiu.rpc.deadline_timer import DeadlineTimer
from pixiu.wire.trace import Hop
from pixiu.wire.v1 import control_pb2, delivery_pb2_grpc, wire_pb2_grpc

MAX_REMEMBERED_CLIENTS = 10_000
"""Clients whose unacknowledged message IDs are kept after their connection ended; the oldest go first."""
DRAIN_POLL_S = 0.05
SIGNAL_TABLE_IN_MEMORY = "signal_table_in_memory"
ACCEPTS_A_TURN = 16
"""About a millisecond, in which nobody else is served."""
LISTEN_BACKLOG = 1024
"""Connections that the kernel keeps until they are accepted."""
RETRY_SPREAD_S = 1.0
"""Clients that are refused are told to come again after half to one and a half times this, at least."""


class Service:
    """Runs one `gateway.core.Core`."""

    def __init__(self, context: Context[Options]) -> None:
        self.options = context.options
        self.limits = SessionLimits(max_subscriptions=context.options.max_subscriptions)
        self.max_record_bytes = context.cluster.max_record_bytes
        self._context = context
        self._core: Core | None = None
        self._identity = Identity(context.zookeeper, context.root, f"{context.endpoint_id:016x}", self._instance_lost)
        self.vrooms = VRooms(*context.cluster.big_rooms)
        # Acceptance in a big room takes long, and a stream's answers keep their order: it has a stream of its own.
        name = gateway_publisher(context.endpoint_id)
        self._publisher, self._big_publisher = ConfirmedPublisher(name), ConfirmedPublisher(name)
        self._connections: dict[int, Connection] = {}
        options = context.options
        self._admission = Admission(
            rate_per_s=options.connect_rate_per_s,
            burst=options.connect_burst,
            max_pending=options.max_pending_connections,
            max_connections=options.max_connections,
            now=context.now(),
        )
        self._pending: dict[int, Pending] = {}
        self.slow = SlowConsumers(context.now)
        self.rates = PublishRates(
            Rates(
                client_messages_per_s=options.client_messages_per_s,
                client_bytes_per_s=options.client_bytes_per_s,
                room_messages_per_s=options.room_messages_per_s,
                room_bytes_per_s=options.room_bytes_per_s,
                burst_s=options.limit_burst_s,
            )
        )
        self._numbers = itertools.count(1)
        self._by_client: dict[str, MQTTConnection] = {}
        self._remembered: OrderedDict[str, dict[int, SnowflakeID]] = OrderedDict()
        self._server: asyncio.Server | None = None
        self._turn: asyncio.Handle | None = None
        self._alarm = DeadlineTimer(self._tick, least_s=0.001)
        self._patient = PatientDeliveries(self._write, asyncio.get_running_loop().call_later, self.count_dropped)
        self._draining = False
        self._signal_table: SharedTable | None = None
        self._signal_problem = ""
        self._tracer = tracer_of(context, Hop.GATEWAY)
        self._traces: TraceWriter | None = None
        self._closed_by_reason: dict[str, int] = {}
        self._counts = {"slow_consumer_dropped": 0, "unroutable": 0, "subscriptions_unconfirmed": 0, "chat_offline": 0}
        wire_pb2_grpc.add_SubscriberServicer_to_server(SubscriberService(self), context.server)
        self._mail = MailDeliveryService(lambda: self._core, self._step, context.log)
        delivery_pb2_grpc.add_MailDeliveryServicer_to_server(self._mail, context.server)
        context.metrics.collect_from(self._samples)

    # What the runtime calls.

    async def prepare(self, node: Node) -> Node:
        """Lease the numbers, and listen for MQTT clients, so that the node can say where."""
        found = await self._identity.acquire()
        port = await self._listen()
        table = self._open_signal_table(port)
        options, name = self.options, f"{self._context.endpoint_id:016x}"
        self._traces = open_traces(options.trace_dir, name, options.trace_file_mb, options.trace_files, options.trace_file_s)
        self._core = Core(
            instance=found.instance,
            generation=found.generation,
            signals=table,
            vrooms=self.vrooms,
            through_relays=self._context.cluster.fanout == "relay",
            tracer=self._tracer,
        )
        return replace(node, instance=found.instance, generation=found.generation, mqtt_host=self.options.mqtt_host, mqtt_port=port)

    async def start(self) -> None:
        """Take clients."""
        assert self._server is not None
        await self._server.start_serving()
        for listener in self._server.sockets:
            with socket.socket(fileno=os.dup(listener.fileno())) as sock:
                sock.listen(LISTEN_BACKLOG)

    async def drain(self) -> None:
        """Move the clients elsewhere, spread over `drain_jitter_s`, and tell the routers that they left."""
        self._draining = True
        if self._server is not None:
            self._server.close()
        loop = asyncio.get_running_loop()
        for connection in list(self._connections.values()):
            connection.announce()
            text = "the gateway is going; connect to another one"
            # Who can be told leaves by itself in the first half, after it has found another gateway.
            loop.call_later(random.uniform(0.5, 1.0) * self.options.drain_jitter_s, connection.close, text)
        while self._connections or (self._core is not None and self._core.unconfirmed):
            await asyncio.sleep(DRAIN_POLL_S)

    async def stop(self) -> None:
        """Close what is left."""
        self._alarm.cancel()
        if self._turn is not None:
            self._turn.cancel()
        if self._server is not None:
            self._server.close()
        self.slow.close()
        self._mail.stop()
        for connection in list(self._connections.values()):
            connection.close("the gateway has stopped")
        await asyncio.gather(self._publisher.close(), self._big_publisher.close())
        if self._traces is not None:
            await self._traces.close()
        if self._signal_table is not None:
            # A gateway that ends in good order has moved its clients; one that crashed will be back for them.
            self._signal_table.close(remove=self._draining or not self._signal_table.count())
        await self._identity.release()

    def health(self) -> dict[str, object]:
        """Clients and what is not confirmed yet."""
        core = self._core
        return {
            "connections": len(self._connections),
            "presences": core.index.presences if core else 0,
            "devices": len(core.devices) if core else 0,
            "members_digests": self._digests("router"),
            "devices_digests": self._digests("relay") if self.serves_users else {},
            "unconfirmed": core.unconfirmed if core else 0,
            "mail": {"streams": core.mail.streams, "unacknowledged": core.mail.unacknowledged} if core else None,
            "degraded": self._degraded() or None,
        }

    def _digests(self, role: str) -> dict[str, str]:
        """By partition of routers or relays: what their maps, and brokers', say of this gateway when they are equal to it."""
        partitions = self._context.view.layout.partitions(role)
        core = self._core
        sums = (core.rooms if role == "router" else core.users).presence.own.digest if core is not None else Digest()
        return {str(partition): str(sums.total(Rule(partition, partitions))) for partition in range(partitions)}

    def on_view(self, view: View) -> None:
        """Heartbeat every router, relay and proxy; send to those that are Running."""
        nodes = (*view.of_role("router"), *view.of_role("relay"), *view.of_role("proxy"))
        self._context.links.set_peers(Peer(node.endpoint, node.role, node.host, node.port) for node in nodes)
        for publisher in (self._publisher, self._big_publisher):
            publisher.set_proxies(tuple(f"{node.host}:{node.port}" for node in view.running("proxy")))
        self._peers_changed()

    # What the links call.

    def on_records(self, peer: EndpointID, data: bytes, start: int, end: int, count: int) -> Outcome:
        """A broker or a relay sent messages."""
        self._end_turn_soon()
        if self._core is None:
            return Outcome.NOT_TAKEN
        return Outcome.TAKEN if self._core.records_arrived(RecordsArrived(data, start, end, count)) else Outcome.MALFORMED

    def on_control(self, peer: EndpointID, messages: list[bytes]) -> Outcome:
        """A router or relay confirms, asks what is here, knows a newer layout, or refuses this generation; a relay ends a login."""
        for message in messages:
            control = control_pb2.Control()
            try:
                control.ParseFromString(message)
            except DecodeError:
                return Outcome.MALFORMED
            if control.HasField("gateway_confirm"):
                newer = [(found.id, found.connect_time) for found in control.gateway_confirm.newer]
                self._step(Confirmed(peer, list(control.gateway_confirm.ids), newer))
            elif control.HasField("device_replaced"):
                found = control.device_replaced
                self._step(Replaced(found.uin, found.device, found.connect_time, found.reason))
            elif is_anti_entropy(control):
                self._step(HealingReceived(peer, control, self._is_relay(peer)))
            elif control.HasField("fenced"):
                self._step(FenceReceived(peer, control.fenced.floor))
            elif control.HasField("layout_notice"):
                self._context.layout_noticed(control.layout_notice.version)
        return Outcome.TAKEN

    def on_settled(self, peer: EndpointID, settled: list[tuple[int, bool]]) -> None:
        """Routers and proxies handled parcels, or lost them."""
        self._step(Settled(settled))

    def on_peer_state(self, peer: EndpointID, state: PeerState) -> None:
        """A router, relay or proxy is doubted, dead, or back."""
        self._peers_changed()

    def on_heartbeat(self, peer: EndpointID, reply: bool, attachment: bytes) -> bytes:
        """A router or relay asks what is on this gateway."""
        if reply or not attachment or self._core is None:
            return b""
        try:
            rule = control_pb2.BrokerSubscription.FromString(attachment)
        except DecodeError:
            return b""
        return self._core.heartbeat(rule.partition, rule.partitions, relay=self._is_relay(peer)).SerializeToString()

    # What the protocols call.

    def now(self) -> float:
        """Monotonic seconds."""
        return self._context.now()

    def arrived(self, connection: Pending) -> int:
        """A number for a new connection, which has not said who it is yet. An older one may have to go for it."""
        number = next(self._numbers)
        self._pending[number] = connection
        oldest = self._admission.arrived(number)
        if oldest is not None:
            self._pending.pop(oldest).evict()
        return number

    def admit(self, connection: Pending) -> None:
        """A client says who it is. Raises `Overloaded` or `Draining`."""
        if self._draining:
            raise Draining("this gateway is going; connect to another one")
        wait_s = self._admission.connect(connection.id, self.now())
        if wait_s:
            # Who comes again must not come together.
            retry_ms = int(random.uniform(0.5, 1.5) * max(wait_s, RETRY_SPREAD_S) * 1000)
            text = "too many clients connect to this gateway, or are connected (gateway.connect_rate_per_s, max_connections)"
            raise Overloaded(f"{text}; use another one, or come again in {retry_ms} ms", retry_ms)
        self._pending.pop(connection.id, None)

    def opened(self, connection: Connection, uin: int, device: int, device_class: int, login: bool = True) -> None:
        """A client said who it is."""
        if not login and self._context.cluster.fanout != "relay":
            device = 0
        self._connections[connection.id] = connection
        wall_ms = time.time_ns() // 1_000_000
        self._step(Opened(connection.id, uin, isinstance(connection, MQTTConnection), device, device_class, wall_ms, login))

    @property
    def endpoint(self) -> int:
        """This gateway's endpoint ID."""
        return self._context.endpoint_id

    @property
    def serves_users(self) -> bool:
        """Whether the cluster has relays, so that messages to users can come."""
        return "relay" in self._context.view.layout.roles

    @property
    def serves_mail(self) -> bool:
        """Whether mail can come: the cluster keeps inboxes, too."""
        return self.serves_users and "pi" in self._context.view.layout.roles

    def closed(self, connection: Pending, reason: int) -> None:
        """A connection is gone."""
        self._admission.gone(connection.id)
        self._pending.pop(connection.id, None)
        if self._connections.pop(connection.id, None) is not None:
            self._step(Closed(connection.id, reason))

    def take_over(self, client_id: str, connection: MQTTConnection) -> dict[int, SnowflakeID]:
        """An older connection of the client ID ends. Returns the IDs of its unacknowledged messages by packet ID."""
        older = self._by_client.pop(client_id, None)
        if older is not None:
            older.end(CloseReason.TAKEN_OVER, "the same client connected again")
        self._by_client[client_id] = connection
        return self._remembered.pop(client_id, {})

    def gone(self, client_id: str, connection: MQTTConnection, unacknowledged: dict[int, SnowflakeID]) -> None:
        """The connection of a client ID ended."""
        if self._by_client.get(client_id) is connection:
            del self._by_client[client_id]
        if unacknowledged:
            self._remembered[client_id] = dict(unacknowledged)
            while len(self._remembered) > MAX_REMEMBERED_CLIENTS:
                self._remembered.popitem(last=False)

    def join(
        self, connection: Connection, request: int, channels: list[tuple[int, bytes | None]], chat: bool = False, mail: bool = False
    ) -> None:
        """A client subscribes."""
        self._step(Join(connection.id, request, channels, chat, mail))

    def leave(
        self, connection: Connection, channels: list[tuple[int, bytes | None]], chat: bool = False, mail: bool = False
    ) -> None:
        """A client unsubscribes."""
        self._step(Leave(connection.id, channels, chat, mail))

    def mail_acknowledged(self, connection: Connection, ranges: Sequence[tuple[int, int, int]]) -> None:
        """A client has got mail: (lane, first, last)."""
        self._step(MailAcknowledged(connection.id, ranges))

    def packets_acknowledged(self, connection: Connection, packet_ids: Sequence[int]) -> None:
        """An MQTT client has got mail, by packet identifiers."""
        self._step(PacketsAcknowledged(connection.id, packet_ids))

    def publish(self, records: list[tuple[int, bytes]]) -> None:
        """Messages of QoS 0: (key, record)."""
        self._step(Publish(records))

    def publish_confirmed(self, message: Confirmable) -> None:
        """A message of QoS 1. Raises `Overloaded` or `Unavailable`."""
        (self._big_publisher if self.vrooms.is_big(message.key) else self._publisher).publish(message)

    def next_snowflake(self) -> SnowflakeID:
        """A new message's ID. Raises `LeaseExpired`."""
        return self._identity.snowflakes.next()

    def count_dropped(self, messages: int) -> None:
        """Messages were dropped for a slow client."""
        self._counts["slow_consumer_dropped"] += messages

    def count_unroutable(self, messages: int) -> None:
        """Published messages that could not be passed on."""
        self._counts["unroutable"] += messages

    def count_offline(self) -> None:
        """A client's message of QoS 1 went to a user who is not there."""
        self._counts["chat_offline"] += 1

    def count_closed(self, reason: CloseReason) -> None:
        """A connection ended for this reason."""
        self._closed_by_reason[reason.value] = self._closed_by_reason.get(reason.value, 0) + 1

    # Inside.

    def _open_signal_table(self, mqtt_port: int) -> SignalTable:
        options = self.options
        name = options.signal_table_name or folder_name(self._context.root, options.mqtt_host, mqtt_port)
        table, self._signal_problem = open_table(Path(options.signal_table_dir), name, options.signal_table_mb << 20)
        if isinstance(table, SharedTable):
            self._signal_table = table
        else:
            self._context.log.warning(SIGNAL_TABLE_IN_MEMORY, text=self._signal_problem)
        return table

    def _degraded(self) -> str:
        problem = self._signal_problem or (self._signal_table.problem if self._signal_table is not None else "")
        return problem or (self._traces.problem if self._traces is not None else "")

    async def _listen(self) -> int:
        host, port = self.options.mqtt_host, self.options.mqtt_port
        loop = asyncio.get_running_loop()
        try:
            # The backlog is also how many connections asyncio accepts in a turn, while nobody else is served.
            self._server = await loop.create_server(
                lambda: MQTTConnection(self), host, port, backlog=ACCEPTS_A_TURN, start_serving=False
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                text = f"gateway.mqtt_port: {host}:{port} is taken by another process; choose another port, or 0 for any"
                raise ConfigurationError(text) from None
            raise Unavailable(f"gateway.mqtt_host: cannot listen on {host}:{port}: {error.strerror}") from None
        return int(self._server.sockets[0].getsockname()[1])

    def _is_relay(self, peer: EndpointID) -> bool | None:
        """None: it is not in the view, or not yet."""
        node = self._context.view.by_endpoint(peer)
        return node.role == "relay" if node is not None else None

    def _peers_changed(self) -> None:
        view = self._context.view
        self._step(RoutersChanged(view.layout.partitions("router"), self._replicas(view, "router")))
        partitions = view.layout.partitions("relay") if self.serves_users else 0
        self._step(RelaysChanged(partitions, self._replicas(view, "relay") if partitions else ()))
        self._step(ProxiesChanged(tuple(replace(proxy, partition=0) for proxy in self._replicas(view, "proxy"))))

    def _replicas(self, view: View, role: str) -> tuple[Replica, ...]:
        """Those to send to, in the order of their registration; one that drains, or is doubted, only for want of another."""
        found: list[Replica] = []
        for node in view.of_role(role):
            state = self._context.links.state(node.endpoint)
            if node.state is not NodeState.INIT and state is not PeerState.DEAD:
                usable = node.state is NodeState.RUNNING and state is not PeerState.SUSPECT
                found.append(Replica(node.endpoint, node.partition, usable))
        return tuple(found)

    def _instance_lost(self) -> None:
        text = "another gateway took this instance while ZooKeeper had lost our session; start again"
        self._context.crash(Unavailable(text))

    def _step(self, event: Event) -> None:
        if self._core is not None:
            self._perform(self._core.step(event, self.now()))
            self._end_turn_soon()

    def _end_turn_soon(self) -> None:
        if self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._turn = None
        if self._core is None:
            return
        self._perform(self._core.step(EndOfTurn(), self.now()))
        self._alarm.set(self._core.next_deadline())

    def _tick(self) -> None:
        self._step(Tick())

    def _perform(self, effects: list[Effect]) -> None:
        links = self._context.links
        written: dict[int, Connection] = {}
        for effect in effects:
            if isinstance(effect, Deliver) and effect.patient:
                self._patient.put(effect)
            elif isinstance(effect, Deliver):
                connections = self._connections
                for number in effect.connections:
                    connection = connections.get(number)
                    if connection is not None:
                        connection.deliver(effect.data, effect.count)
                        written[number] = connection
            elif isinstance(effect, SendRecords):
                links.send_records(effect.peer, effect.records, effect.lane, effect.token)
            elif isinstance(effect, SendMembership):
                links.send_control(effect.peer, encode_messages(effect.messages), effect.token)
            elif isinstance(effect, SendDelivered):
                answer = control_pb2.Control(signals_delivered=control_pb2.SignalsDelivered(ids=effect.signals))
                for peer in effect.peers:
                    links.send_control(peer, [answer.SerializeToString()])
            elif isinstance(effect, SendControl):
                links.send_control(effect.peer, effect.messages)
            elif isinstance(effect, KeepTraces):
                if self._traces is not None:
                    self._traces.put(effect.records)
            elif isinstance(effect, Answer):
                self._answer(effect)
            elif isinstance(effect, Disconnect):
                self._replaced(effect)
            elif isinstance(effect, WriteMail):
                self._write_mail(effect)
            elif isinstance(effect, AcknowledgementsDue | EndMailStream):
                self._mail.perform(effect)
            elif isinstance(effect, Fenced):
                self._fenced()
        for connection in written.values():
            connection.flush()

    def _write(self, number: int, data: bytes, count: int) -> None:
        connection = self._connections.get(number)
        if connection is not None:
            connection.deliver(data, count)
            connection.flush()

    def _write_mail(self, effect: WriteMail) -> None:
        connection = self._connections.get(effect.connection)
        if connection is not None:
            connection.deliver_mail(effect.deliveries, effect.anew)

    def _replaced(self, effect: Disconnect) -> None:
        moved = effect.reason == control_pb2.REASON_MOVED
        connection = self._connections.get(effect.connection)
        # Who leaves a gateway that drains is there twice for a moment.
        if connection is not None and not (moved and self._draining):
            connection.replaced(moved)

    def _fenced(self) -> None:
        text = (
            "a router or relay took this gateway for dead, because its lease was gone and its heartbeats were silent, and refuses "
            "what it says: it ends, and its clients connect again; start it again"
        )
        self._context.crash(Unavailable(text))

    def _answer(self, effect: Answer) -> None:
        if not effect.known:
            self._counts["subscriptions_unconfirmed"] += 1
        connection = self._connections.get(effect.connection)
        if connection is not None:
            connection.answer(effect.request, effect.known)

    def _samples(self) -> dict[str, object]:
        samples: dict[str, object] = {f"{name}_total": value for name, value in self._counts.items()}
        samples["connections"] = len(self._connections)
        table = self._signal_table
        samples["signal_table_shared"] = int(table is not None and not table.problem)
        samples |= self._mail.samples()
        samples["connections_pending"] = self._admission.pending
        samples["connections_evicted_total"] = self._admission.evicted
        samples["connections_refused_total"] = self._admission.refused
        samples["connections_behind{grade}"] = self.slow.counts()
        samples["connections_behind_total{grade}"] = {grade.value: count for grade, count in self.slow.entered.items()}
        samples["publish_over_rate_dropped_total"] = self.rates.dropped
        samples["publish_over_rate_held_total"] = self.rates.held
        samples["connections_closed_total{reason}"] = dict(self._closed_by_reason)
        if self._core is not None:
            samples |= {f"{name}_total": value for name, value in asdict(self._core.counters).items()}
            samples |= {f"mail_{name}_total": value for name, value in asdict(self._core.mail.counters).items()}
            samples["mail_unacknowledged"] = self._core.mail.unacknowledged
            samples["mail_connections"] = self._core.devices.mail_connections
            samples["presences"] = self._core.index.presences
            samples["signals_dropped_total"] = self._core.signals.overflows
            samples["presences_unconfirmed"] = self._core.rooms.presence.unconfirmed
            for name, reports in (("", self._core.rooms), ("devices_", self._core.users)):
                samples[f"{name}gateway_messages_resent_total"] = reports.presence.resent
                samples[f"{name}gateway_messages_sent_twice_total"] = reports.presence.sent_twice
                samples[f"{name}listing_pages_sent_total"] = reports.source.pages_sent
                samples[f"{name}feedback_said_total"] = reports.feedback.said
                samples[f"{name}feedback_left_out_total"] = reports.feedback.left_out
            samples["devices"] = len(self._core.devices)
            samples["devices_unconfirmed"] = self._core.users.presence.unconfirmed
            samples["traces_left_out_total"] = self._core.traces.left_out
        if self._traces is not None:
            samples |= self._traces.samples()
        return samples
