"""A small MQTT server over `ServerSession`, for tests with real sockets: every connection sees the same rooms."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from cluster.core.contract import NEVER
from cluster.core.reading_gate import ReadingGate
from cluster.mqtt.events import (
    Close,
    CloseReason,
    Connected,
    Effect,
    PublishMessages,
    Send,
    SendMessages,
    SubscribeFilters,
    UnsubscribeFilters,
)
from cluster.mqtt.outbound import Delivery
from cluster.mqtt.packets import Connect
from cluster.mqtt.reason_codes import ReasonCode
from cluster.mqtt.server import ServerSession, accept_all
from cluster.mqtt.terms import SessionLimits
from pixiu.ids import RoomID
from pixiu.wire.record import Flag, Kind, encode, with_topic


class Hub:
    """Who is connected, who subscribed to what, and why connections ended."""

    def __init__(self) -> None:
        self.port = 0
        self.limits = SessionLimits()
        self.admit: Callable[[Connect], ReasonCode] = accept_all
        self.connections: list[HubConnection] = []
        self.members: dict[str, dict[HubConnection, int]] = {}
        """Filter → connections and the QoS that they were granted."""
        self.connected: list[Connected] = []
        self.closed: list[CloseReason] = []
        self.confirm = True
        """Whether subscriptions and messages of QoS 1 are answered at once."""


class HubConnection(asyncio.Protocol):
    """One connection: carries out the session's effects."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        gate = ReadingGate(self._turned)
        self.session = ServerSession(self._loop.time(), f"assigned-{len(hub.connections)}", hub.limits, hub.admit, gate=gate)
        self.transport: asyncio.Transport | None = None
        hub.connections.append(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._arm()

    def data_received(self, data: bytes) -> None:
        self.perform(self.session.receive(data, self._loop.time()))
        while self.session.has_more:
            self.perform(self.session.receive(b"", self._loop.time()))

    def _turned(self, reads: bool) -> None:
        assert self.transport is not None
        (self.transport.resume_reading if reads else self.transport.pause_reading)()

    def connection_lost(self, error: Exception | None) -> None:
        self.perform(self.session.connection_lost(self._loop.time()))

    def perform(self, effects: list[Effect]) -> None:
        """Carry out effects in order."""
        assert self.transport is not None
        for effect in effects:
            match effect:
                case Send(data) | SendMessages(data):
                    self.transport.write(data)
                case Connected():
                    self._hub.connected.append(effect)
                case SubscribeFilters(packet_id, filters):
                    for wanted in filters:
                        self._hub.members.setdefault(wanted.filter, {})[self] = wanted.qos
                    if self._hub.confirm:
                        self.perform(self.session.subscription_confirmed(packet_id, self._loop.time()))
                case UnsubscribeFilters(filters):
                    for name in filters:
                        self._hub.members[name].pop(self, None)
                case PublishMessages(messages):
                    self._publish(effect)
                    accepted = [message.packet_id for _, message in messages if message.qos]
                    if self._hub.confirm:
                        self.perform(self.session.publish_accepted(accepted, self._loop.time()))
                case Close(reason):
                    self._hub.closed.append(reason)
                    for members in self._hub.members.values():
                        members.pop(self, None)
                    self.transport.close()
        self.send_on()
        self._arm()

    def send_on(self) -> None:
        """Write what may leave."""
        while self.transport is not None and self.session.has_outgoing:
            self.transport.write(self.session.outgoing(65536, self._loop.time(), 0))

    def _publish(self, effect: PublishMessages) -> None:
        for room, message in effect.messages:
            assert isinstance(room, int)
            assert RoomID(room) == room
            body = with_topic(message.topic, message.payload)
            record = encode(Kind.ROOM, room, body, 1, flags=Flag.TO_ROOM | Flag.TOPIC)
            for member, granted in self._hub.members.get(message.topic, {}).items():
                delivery = Delivery(record, message.topic.encode(), min(message.qos, granted), False)
                member.perform(member.session.deliver([delivery], self._loop.time(), 0))

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        deadline = self.session.next_deadline()
        self._timer = None if deadline == NEVER else self._loop.call_at(deadline, self._fire)

    def _fire(self) -> None:
        self.perform(self.session.timeout(self._loop.time()))


@pytest.fixture
async def hub() -> AsyncIterator[Hub]:
    """A running server on a free port."""
    state = Hub()
    server = await asyncio.get_running_loop().create_server(lambda: HubConnection(state), "127.0.0.1", 0)
    state.port = server.sockets[0].getsockname()[1]
    yield state
    server.close()
    for connection in state.connections:
        if connection.transport is not None:
            connection.transport.abort()
    await server.wait_closed()
