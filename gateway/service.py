"""The gateway's shell: its listeners, its links, and the timers around the core.

Source: seed 004 §2.5, §5.1.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import random
import time
from collections import OrderedDict
from dataclasses import asdict, replace

from google.protobuf.message import DecodeError

from gateway.connections import Connection
from gateway.core import Core
from gateway.events import (
    Answer,
    Closed,
    Confirmed,
    Deliver,
    DevicesConfirmed,
    Effect,
    EndOfTurn,
    Event,
    Join,
    Leave,
    Opened,
    ProxiesChanged,
    Publish,
    RecordsArrived,
    RelaysChanged,
    Replica,
    RoutersChanged,
    SendDevices,
    SendMembership,
    SendRecords,
    Settled,
    Tick,
)
from gateway.identity import Identity
from gateway.mqtt import Confirmable, MQTTConnection
from gateway.options import Options
from gateway.publishing import ConfirmedPublisher
from gateway.subscriber import SubscriberService
from pixiu.devices import encode_devices
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.view import View
from pixiu.errors import ConfigurationError, Draining, Overloaded, Unavailable
from pixiu.ids import EndpointID, SnowflakeID
from pixiu.links.api import Peer, PeerState
from pixiu.mqtt.events import CloseReason
from pixiu.mqtt.server import SessionLimits
from pixiu.runtime.context import Context
from pixiu.wire.v1 import control_pb2, wire_pb2_grpc

MAX_REMEMBERED_CLIENTS = 10_000
"""Clients whose unacknowledged message IDs are kept after their connection ended; the oldest go first."""
DRAIN_POLL_S = 0.05
LISTEN_BACKLOG = 1024


class Service:
    """Runs one `gateway.core.Core`."""

    def __init__(self, context: Context[Options]) -> None:
        self.options = context.options
        self.limits = SessionLimits(max_subscriptions=context.options.max_subscriptions)
        self.max_record_bytes = context.cluster.max_record_bytes
        self._context = context
        self._core: Core | None = None
        self._identity = Identity(context.zookeeper, context.root, f"{context.endpoint_id:016x}", self._instance_lost)
        self._publisher = ConfirmedPublisher(f"gateway-{context.endpoint_id:016x}")
        self._connections: dict[int, Connection] = {}
        self._admitted = 0
        self._numbers = itertools.count(1)
        self._by_client: dict[str, MQTTConnection] = {}
        self._remembered: OrderedDict[str, dict[int, SnowflakeID]] = OrderedDict()
        self._server: asyncio.Server | None = None
        self._turn: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._draining = False
        self._closed_by_reason: dict[str, int] = {}
        self._counts = {"slow_consumer_dropped": 0, "unroutable": 0, "subscriptions_unconfirmed": 0, "chat_offline": 0}
        wire_pb2_grpc.add_SubscriberServicer_to_server(SubscriberService(self), context.server)
        context.metrics.collect_from(self._samples)

    # What the runtime calls.

    async def prepare(self, node: Node) -> Node:
        """Lease the numbers, and listen for MQTT clients, so that the node can say where."""
        found = await self._identity.acquire()
        self._core = Core(instance=found.instance, generation=found.generation)
        port = await self._listen()
        return replace(node, instance=found.instance, generation=found.generation, mqtt_host=self.options.mqtt_host, mqtt_port=port)

    async def start(self) -> None:
        """Take clients."""
        assert self._server is not None
        await self._server.start_serving()

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
        for handle in (self._turn, self._timer):
            if handle is not None:
                handle.cancel()
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections.values()):
            connection.close("the gateway has stopped")
        await self._publisher.close()
        await self._identity.release()

    def health(self) -> dict[str, object]:
        """Clients and what is not confirmed yet."""
        core = self._core
        return {
            "connections": len(self._connections),
            "presences": core.index.presences if core else 0,
            "devices": len(core.devices) if core else 0,
            "unconfirmed": core.unconfirmed if core else 0,
        }

    def on_view(self, view: View) -> None:
        """Heartbeat every router, relay and proxy; send to those that are Running."""
        nodes = (*view.of_role("router"), *view.of_role("relay"), *view.of_role("proxy"))
        self._context.links.set_peers(Peer(node.endpoint, node.role, node.host, node.port) for node in nodes)
        self._publisher.set_proxies(tuple(f"{node.host}:{node.port}" for node in view.running("proxy")))
        self._peers_changed()

    # What the links call.

    def on_records(self, peer: EndpointID, data: bytes, start: int, end: int, count: int) -> bool:
        """A broker or a relay sent messages."""
        self._end_turn_soon()
        return self._core is not None and self._core.records_arrived(RecordsArrived(data, start, end, count))

    def on_control(self, peer: EndpointID, messages: list[bytes]) -> bool:
        """A router or a relay confirms."""
        for message in messages:
            control = control_pb2.Control()
            try:
                control.ParseFromString(message)
            except DecodeError:
                return False
            if control.HasField("gateway_confirm"):
                self._step(Confirmed(peer, list(control.gateway_confirm.ids)))
            elif control.HasField("relay_confirm"):
                confirm = control.relay_confirm
                newer = [(found.id, found.connect_time) for found in confirm.newer]
                self._step(DevicesConfirmed(peer, list(confirm.ids), newer))
        return True

    def on_settled(self, peer: EndpointID, settled: list[tuple[int, bool]]) -> None:
        """Routers and proxies handled parcels, or lost them."""
        self._step(Settled(settled))

    def on_peer_state(self, peer: EndpointID, state: PeerState) -> None:
        """A router, relay or proxy is doubted, dead, or back."""
        self._peers_changed()

    def on_heartbeat(self, peer: EndpointID, reply: bool, attachment: bytes) -> bytes:
        """Nothing to add."""
        return b""

    # What the protocols call.

    def now(self) -> float:
        """Monotonic seconds."""
        return self._context.now()

    def admit(self) -> int:
        """A number for a new connection. Raises `Overloaded` or `Draining`."""
        if self._draining:
            raise Draining("this gateway is going; connect to another one")
        if self._admitted >= self.options.max_connections:
            text = f"this gateway has {self.options.max_connections} connections (gateway.max_connections); use another one"
            raise Overloaded(text, retry_after_ms=1_000)
        self._admitted += 1
        return next(self._numbers)

    def opened(self, connection: Connection, uin: int, device: int, device_class: int) -> None:
        """A client said who it is."""
        self._connections[connection.id] = connection
        wall_ms = time.time_ns() // 1_000_000
        self._step(Opened(connection.id, uin, isinstance(connection, MQTTConnection), device, device_class, wall_ms))

    @property
    def serves_users(self) -> bool:
        """Whether the cluster has relays, so that messages to users can come."""
        return "relay" in self._context.view.layout.roles

    def closed(self, connection: Connection, reason: int) -> None:
        """An admitted client is gone."""
        self._admitted -= 1
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

    def join(self, connection: Connection, request: int, channels: list[tuple[int, bytes | None]], chat: bool = False) -> None:
        """A client subscribes."""
        self._step(Join(connection.id, request, channels, chat))

    def leave(self, connection: Connection, channels: list[tuple[int, bytes | None]], chat: bool = False) -> None:
        """A client unsubscribes."""
        self._step(Leave(connection.id, channels, chat))

    def publish(self, records: list[tuple[int, bytes]]) -> None:
        """Messages of QoS 0: (key, record)."""
        self._step(Publish(records))

    def publish_confirmed(self, message: Confirmable) -> None:
        """A message of QoS 1. Raises `Overloaded` or `Unavailable`."""
        self._publisher.publish(message)

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

    async def _listen(self) -> int:
        host, port = self.options.mqtt_host, self.options.mqtt_port
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                lambda: MQTTConnection(self), host, port, backlog=LISTEN_BACKLOG, start_serving=False
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                text = f"gateway.mqtt_port: {host}:{port} is taken by another process; choose another port, or 0 for any"
                raise ConfigurationError(text) from None
            raise Unavailable(f"gateway.mqtt_host: cannot listen on {host}:{port}: {error.strerror}") from None
        return int(self._server.sockets[0].getsockname()[1])

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
        now = self.now()
        self._perform(self._core.step(EndOfTurn(), now))
        deadline = self._core.next_deadline()
        if deadline is not None and (self._timer is None or self._timer.when() > deadline):
            if self._timer is not None:
                self._timer.cancel()
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(deadline - now, 0.001), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._step(Tick())

    def _perform(self, effects: list[Effect]) -> None:
        links = self._context.links
        written: dict[int, Connection] = {}
        for effect in effects:
            if isinstance(effect, Deliver):
                connections = self._connections
                for number in effect.connections:
                    connection = connections.get(number)
                    if connection is not None:
                        connection.deliver(effect.data, effect.count)
                        written[number] = connection
            elif isinstance(effect, SendRecords):
                links.send_records(effect.peer, effect.records, effect.lane, effect.token)
            elif isinstance(effect, SendMembership):
                links.send_control(effect.peer, [_control(effect)], effect.token)
            elif isinstance(effect, SendDevices):
                links.send_control(effect.peer, encode_devices(effect.messages), effect.token)
            elif isinstance(effect, Answer):
                self._answer(effect)
        for connection in written.values():
            connection.flush()

    def _answer(self, effect: Answer) -> None:
        if not effect.known:
            self._counts["subscriptions_unconfirmed"] += 1
        connection = self._connections.get(effect.connection)
        if connection is not None:
            connection.answer(effect.request, effect.known)

    def _samples(self) -> dict[str, object]:
        samples: dict[str, object] = {f"{name}_total": value for name, value in self._counts.items()}
        samples["connections"] = len(self._connections)
        samples["connections_closed_total{reason}"] = dict(self._closed_by_reason)
        if self._core is not None:
            samples |= {f"{name}_total": value for name, value in asdict(self._core.counters).items()}
            samples["presences"] = self._core.index.presences
            samples["presences_unconfirmed"] = self._core.presence.unconfirmed
            samples["gateway_messages_resent_total"] = self._core.presence.resent
            samples["devices"] = len(self._core.devices)
            samples["devices_unconfirmed"] = self._core.device_presence.unconfirmed
            samples["relay_messages_resent_total"] = self._core.device_presence.resent
        return samples


def _control(effect: SendMembership) -> bytes:
    messages = [
        control_pb2.GatewayMessage(
            id=message.id,
            room=message.room,
            uin=message.uin,
            action=control_pb2.ACTION_LOGIN if message.login else control_pb2.ACTION_LOGOUT,
            reason=message.reason,  # type: ignore[arg-type]  # a number of the enumeration
        )
        for message in effect.messages
    ]
    return control_pb2.Control(gateway_messages=control_pb2.GatewayMessages(messages=messages)).SerializeToString()
