"""MQTT 5 at a gateway: refusals with reasons, messages one by one, properties in records, retained messages before their PUBACK."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.access.login_guard import LoginGuard
from cluster.core import log
from cluster.mqtt import codec
from cluster.mqtt.events import CloseReason
from cluster.mqtt.outbound import Delivery
from cluster.mqtt.packets import (
    MQTT_5,
    Connack,
    Connect,
    Disconnect,
    Packet,
    Puback,
    Publish,
    Pubrec,
    Pubrel,
    Side,
    Suback,
    Subscribe,
)
from cluster.mqtt.properties import Property
from cluster.mqtt.properties_in_records import carried_by, qos_of, retain_of
from cluster.mqtt.reason_codes import ReasonCode
from cluster.trust.audit import Audit
from gateway import events as ev
from gateway.clients.clients import Clients
from gateway.mqtt.connection import MQTTConnection
from gateway.options import Options
from pixiu.errors import Dropped, NotServed, Offline, PixiuError
from pixiu.wire.record import Kind, decode, encode
from tests.gateway.world import Wire, World, of
from tests.support.logins import Logins
from tests.support.waiting import until


@pytest.fixture
async def logins(tmp_path: Path) -> Logins:
    return Logins(tmp_path)


def client(world: World, connect: Connect | None = None) -> tuple[MQTTConnection, Wire]:
    """A client of MQTT 5 that is connected."""
    connection, wire = MQTTConnection(world.clients), Wire()
    connection.connection_made(wire)
    connection.data_received(codec.encode(connect or Connect("phone", dialect=MQTT_5)))
    return connection, wire


def send(connection: MQTTConnection, *packets: Packet) -> None:
    connection.data_received(b"".join(codec.encode(packet, MQTT_5) for packet in packets))


def received(wire: Wire) -> list[Packet]:
    """What the client was sent after its CONNACK, without reason strings."""
    packets = codec.Decoder(Side.CLIENT, dialect=MQTT_5).feed(b"".join(wire.writes))
    assert isinstance(packets[0], Connack)
    return packets[1:]


def codes(wire: Wire) -> list[tuple[str, int]]:
    return [(type(packet).__name__, getattr(packet, "code", 0)) for packet in received(wire)]


def resolve(world: World, error: PixiuError | None) -> None:
    """Have the brokers answer what was published."""
    published, world.published = world.published, []
    for message in published:
        message.resolved(error)
    world.clients.deliveries.flush()


async def test_properties_qos_and_retain_are_in_the_record() -> None:
    world = World()
    connection, _ = client(world)
    properties: dict[int, object] = {Property.MESSAGE_EXPIRY: 90, Property.USER: (("k", "v"),), Property.CONTENT_TYPE: "text"}
    send(connection, Publish("a/b", b"x", 2, True, False, 7, properties), Publish("a/b", b"y"))
    (confirmable,) = world.published
    record = confirmable.record
    assert (qos_of(record), retain_of(record)) == (2, True)
    carried = carried_by(record)
    assert carried.properties == {Property.CONTENT_TYPE: "text", Property.USER: (("k", "v"),)}
    assert carried.expires_at_ms
    assert decode(record).lifetime_min == 2
    (plain,) = of(ev.Publish, world.events)
    assert (qos_of(plain.records[0][1]), decode(plain.records[0][1]).extension) == (0, b"")


async def test_every_outcome_of_a_message_has_its_reason() -> None:
    for error, code in (
        (None, ReasonCode.SUCCESS),
        (Offline("not connected"), ReasonCode.NO_MATCHING_SUBSCRIBERS),
        (NotServed("too much"), ReasonCode.UNSPECIFIED),
    ):
        world = World()
        connection, wire = client(world)
        send(connection, Publish("a", b"x", 1, packet_id=1), Publish("a", b"x", 2, packet_id=2))
        resolve(world, error)
        assert codes(wire) == [("Puback", code), ("Pubrec", code)]
        assert connection.is_open


async def test_a_message_that_cannot_be_carried_is_refused_alone() -> None:
    world = World()
    connection, wire = client(world)
    large: dict[int, object] = {Property.USER: (("k", "v" * 65_000), ("l", "w" * 65_000))}
    send(connection, Publish("a", b"x", 1, False, False, 1, large), Publish("$x", b"", 1, packet_id=2))
    assert codes(wire) == [("Puback", ReasonCode.QUOTA_EXCEEDED), ("Puback", ReasonCode.TOPIC_NAME_INVALID)]
    assert connection.is_open


async def test_what_may_not_be_published_or_subscribed_to_is_refused_alone(logins: Logins) -> None:
    logins.write_rules('[[rule]]\nallow = ["publish", "subscribe"]\nrooms = ["42"]\n')
    world = World()
    world.clients.guard = guard = LoginGuard(str(logins.file), log.get_logger(), Audit(None))
    token = logins.token("alice", 7).encode()
    connection, wire = client(world, Connect("phone", user_name="alice", password=token, dialect=MQTT_5))
    send(connection, Publish("room/13", b"x", 1, packet_id=1), Publish("room/42", b"x", 1, packet_id=2))
    send(connection, Subscribe(3, (("room/13", 1), ("room/42", 1))))
    (join,) = of(ev.Join, world.events)
    world.clients.answer(ev.Answer(connection.id, join.request, True))
    resolve(world, None)
    found = received(wire)
    assert ("Puback", ReasonCode.NOT_AUTHORISED) in codes(wire)
    assert ("Puback", ReasonCode.SUCCESS) in codes(wire)
    assert [packet.codes for packet in found if isinstance(packet, Suback)] == [(ReasonCode.NOT_AUTHORISED, 1)]
    assert (connection.is_open, world.clients.counters.denied) == (True, 1)
    connection.connection_lost(None)
    await guard.close()


async def test_a_refused_login_of_mqtt_5_has_the_codes_of_mqtt_5(logins: Logins) -> None:
    world = World()
    world.clients.guard = guard = LoginGuard(str(logins.file), log.get_logger(), Audit(None))
    _, wire = client(world, Connect("phone", user_name="alice", password=b"wrong", dialect=MQTT_5))
    await until(lambda: bool(wire.writes))
    (answer,) = codec.Decoder(Side.CLIENT, dialect=MQTT_5).feed(b"".join(wire.writes))
    assert answer == Connack(False, ReasonCode.BAD_USER_NAME_OR_PASSWORD)
    await guard.close()


async def test_messages_one_by_one_wait_for_the_client_and_its_window() -> None:
    world = World(Options(max_unacknowledged=2))
    connection, wire = client(world)
    record = encode(Kind.ROOM, 42, b"x", 1)
    effect = ev.DeliverEach(connection.id, [Delivery(record, b"room/42", 1, False, (), 0)] * 3)
    connection.pause_writing()
    world.clients.deliveries.deliver_each(effect)
    world.clients.deliveries.flush()
    assert received(wire) == []
    assert not connection.takes_more()
    connection.resume_writing()
    first, second = received(wire)
    assert isinstance(first, Publish)
    assert isinstance(second, Publish)
    send(connection, Puback(second.packet_id))
    assert len(received(wire)) == 3
    assert connection.takes_more()


async def test_a_client_that_acknowledges_nothing_is_told_and_closed_and_loses_nothing_in_silence() -> None:
    world = World(Options(max_unacknowledged=1, connection_buffer_bytes=16 << 10))
    connection, wire = client(world)
    record = encode(Kind.ROOM, 42, bytes(1000), 1)
    for qos in (0, 1):
        for _ in range(40):
            world.clients.deliveries.deliver_each(ev.DeliverEach(connection.id, [Delivery(record, b"room/42", qos, False, (), 0)]))
            world.clients.deliveries.flush()
    assert world.closed_for == [CloseReason.QUEUE_FULL.value]
    assert codes(wire)[-1] == ("Disconnect", ReasonCode.QUOTA_EXCEEDED)
    assert world.clients.counters.outbound_dropped == 0, "of QoS 0 nothing waited: it was written"


async def test_messages_of_qos_0_keep_their_order_whether_or_not_others_share_their_bytes() -> None:
    world = World()
    connection, wire = client(world)
    record = encode(Kind.ROOM, 42, b"b", 1)
    shared = codec.encode(Publish("room/42", b"a"), MQTT_5)
    connection.pause_writing()
    for data in (shared, None, shared):
        if data is None:
            world.clients.deliveries.deliver_each(ev.DeliverEach(connection.id, [Delivery(record, b"room/42", 0, False, (), 0)]))
        else:
            world.clients.deliveries.deliver(ev.Deliver((connection.id,), data, 1))
        world.clients.deliveries.flush()
    connection.resume_writing()
    assert [packet.payload for packet in received(wire) if isinstance(packet, Publish)] == [b"a", b"b", b"a"]


async def test_a_retained_message_is_acknowledged_once_it_is_kept_and_published() -> None:
    world = World()
    connection, wire = client(world)
    waiting = retaining(world.clients)
    send(connection, Publish("a", b"x", 1, True, packet_id=1), Publish("a", b"x", 2, True, packet_id=2))
    resolve(world, None)
    assert codes(wire) == []
    waiting.pop(0)(None)
    waiting.pop(0)(NotServed("too many retained messages"))
    world.clients.deliveries.flush()
    assert codes(wire) == [("Puback", ReasonCode.SUCCESS), ("Pubrec", ReasonCode.QUOTA_EXCEEDED)]
    send(connection, Publish("a", b"x", 1, True, packet_id=3))
    waiting.pop(0)(None)
    assert len(codes(wire)) == 2, "kept, and not published yet"
    resolve(world, Dropped("lost"))
    assert len(codes(wire)) == 2, "it is sent again"


async def test_a_malformed_packet_is_counted_by_its_error() -> None:
    world = World()
    connection, wire = client(world)
    connection.data_received(b"\x30\x06\x00\x01a\x02\x0b\x01")
    assert codes(wire) == [("Disconnect", ReasonCode.PROTOCOL_ERROR)]
    assert world.closed_for == [CloseReason.MALFORMED.value]
    assert world.clients.samples()["packets_malformed_total{error}"] == {"identifier_from_client": 1}


async def test_who_is_taken_over_is_told() -> None:
    world = World()
    _, wire = client(world)
    client(world)
    told: dict[int, object] = {Property.REASON_STRING: "the same client connected again"}
    assert received(wire)[-1] == Disconnect(ReasonCode.SESSION_TAKEN_OVER, told)


async def test_mqtt_5_qos_2_to_the_client_has_both_steps() -> None:
    world = World()
    connection, wire = client(world)
    delivery = Delivery(encode(Kind.ROOM, 1, b"x", 1), b"a", 2, False, (), 0, 5)
    world.clients.deliveries.deliver_each(ev.DeliverEach(connection.id, [delivery]))
    world.clients.deliveries.flush()
    (message,) = received(wire)
    assert isinstance(message, Publish)
    send(connection, Pubrec(message.packet_id))
    assert received(wire)[-1] == Pubrel(message.packet_id)
    assert of(ev.SharedAcknowledged, world.events) == [ev.SharedAcknowledged(connection.id, [5])]


def retaining(clients: Clients) -> list[Callable[[PixiuError | None], None]]:
    """What is to be called once messages are kept, in their order."""
    found: list[Callable[[PixiuError | None], None]] = []

    class Retainer:
        def retain(self, record: bytes, topic: str, done: Callable[[PixiuError | None], None]) -> None:
            found.append(done)

    clients._retainer = Retainer()
    return found
