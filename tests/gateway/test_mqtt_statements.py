"""Statements of MQTT that a gateway's connections, core and wills keep together: what a publisher says is not what a subscriber
gets, client identifiers, order, and wills."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cluster.mqtt import codec
from cluster.mqtt.events import CloseReason
from cluster.mqtt.outbound import Delivery
from cluster.mqtt.packets import MQTT_3_1_1, MQTT_5, Connack, Connect, Dialect, Disconnect, Packet, Publish, Side
from cluster.mqtt.packets import Will as ClientsWill
from cluster.mqtt.properties import Property
from cluster.mqtt.properties_in_records import carried_by, retain_of
from cluster.mqtt.reason_codes import ReasonCode
from cluster.wills.will import Will, WillMessage
from gateway import events as ev
from gateway.mqtt.connection import MQTTConnection
from gateway.wills.events import PublishWill
from gateway.wills.service import WillPublisher
from pixiu.errors import PixiuError
from pixiu.ids import gateway_msg_id
from pixiu.placement.big_rooms import VRooms
from pixiu.placement.topic_rooms import TopicRooms
from pixiu.wire.record import MAX_RECORD_BYTES, Flag, Kind, encode
from tests.gateway.test_filters import client as subscriber
from tests.gateway.test_filters import gateway, wanted
from tests.gateway.test_mqtt5 import retaining
from tests.gateway.world import Wire, World, arrive, of

BOTH = pytest.mark.parametrize("dialect", [MQTT_3_1_1, MQTT_5])


def client(world: World, dialect: Dialect, client_id: str = "phone", **connect: Any) -> tuple[MQTTConnection, Wire]:
    """A client that is connected."""
    connection, wire = MQTTConnection(world.clients), Wire()
    connection.connection_made(wire)
    connection.data_received(codec.encode(Connect(client_id, dialect=dialect, **connect)))
    return connection, wire


def send(connection: MQTTConnection, dialect: Dialect, *packets: Packet) -> None:
    connection.data_received(b"".join(codec.encode(packet, dialect) for packet in packets))


def received(wire: Wire, dialect: Dialect) -> list[Packet]:
    """What the client was sent after its CONNACK."""
    packets = codec.Decoder(Side.CLIENT, dialect=dialect).feed(b"".join(wire.writes))
    assert isinstance(packets[0], Connack)
    return packets[1:]


@BOTH
async def test_dup_of_a_publisher_is_not_passed_on(dialect: Dialect) -> None:
    """MQTT-3.3.1-3 MQTT5-3.3.1-3."""
    world = World()
    publisher, _ = client(world, dialect, "publisher")
    watcher, wire = client(world, dialect)
    send(publisher, dialect, *(Publish("a", b"x", qos, dup=True, packet_id=qos) for qos in (1, 2)))
    records = [message.record for message in world.published]
    assert len(records) == 2
    for record in records:
        delivery = Delivery(record, b"a", 1, False, (), 0)
        world.clients.deliveries.deliver_each(ev.DeliverEach(watcher.id, [delivery]))
    world.clients.deliveries.flush()
    found = [packet for packet in received(wire, dialect) if isinstance(packet, Publish)]
    assert [(packet.qos, packet.dup) for packet in found] == [(1, False)] * 2


@BOTH
async def test_a_message_without_retain_does_not_touch_the_store(dialect: Dialect) -> None:
    """MQTT-3.3.1-12 MQTT5-3.3.1-8, also if it is empty."""
    world = World()
    publisher, _ = client(world, dialect)
    kept = retaining(world.clients)
    for body in (b"", b"xx"):
        send(publisher, dialect, *(Publish("a", body, qos, packet_id=qos and qos + len(body)) for qos in range(3)))
    assert kept == []
    send(publisher, dialect, Publish("a", b"x", retain=True))
    assert len(kept) == 1


@BOTH
async def test_the_client_identifier_tells_connections_apart(dialect: Dialect) -> None:
    """MQTT-3.1.3-2 MQTT5-3.1.3-2; the older connection of the same one is ended: MQTT-3.1.4-2 MQTT5-3.1.4-3."""
    world = World()
    _, older = client(world, dialect, "phone")
    _, other = client(world, dialect, "tablet")
    _, newer = client(world, dialect, "phone")
    assert (older.closed, other.closed, newer.closed) == (True, False, False)
    assert world.closed_for == [CloseReason.TAKEN_OVER.value]
    told = [packet.code for packet in received(older, dialect) if isinstance(packet, Disconnect)]
    assert told == ([ReasonCode.SESSION_TAKEN_OVER] if dialect is MQTT_5 else [])


async def test_the_messages_of_a_client_to_a_topic_keep_their_order() -> None:
    """MQTT-4.6.0-5 MQTT-4.6.0-6 MQTT5-4.6.0-5 MQTT5-4.6.0-6: from a publisher's connection to the brokers, and from them to the
    subscribers of both versions. Brokers keep the order of a sender's messages to a room (docs/promises.md)."""
    world = World()
    publisher, _ = client(world, MQTT_5, "publisher")
    numbers = [b"%02d" % number for number in range(30)]
    for qos in (0, 1):
        world.events.clear()
        world.published.clear()
        packets = [Publish("a", body, qos, packet_id=qos and number) for number, body in enumerate(numbers, 1)]
        send(publisher, MQTT_5, *packets[:7])
        send(publisher, MQTT_5, *packets[7:])
        records = [message.record for message in world.published]
        records += [record for each in of(ev.Publish, world.events) for _, record in each.records]
        assert [record[-2:] for record in records] == numbers
        for dialect in (MQTT_3_1_1, MQTT_5):
            watcher, wire = client(world, dialect, f"watcher-{qos}-{dialect}")
            core = gateway()
            subscriber(core, watcher.id, *wanted("a", qos=qos), dialect=5 if dialect is MQTT_5 else 3)
            for effect in arrive(core, *records[:11]) + arrive(core, *records[11:]):
                if isinstance(effect, ev.Deliver):
                    world.clients.deliveries.deliver(effect)
                elif isinstance(effect, ev.DeliverEach):
                    world.clients.deliveries.deliver_each(effect)
            world.clients.deliveries.flush()
            found = [packet for packet in received(wire, dialect) if isinstance(packet, Publish)]
            assert [packet.payload for packet in found] == numbers
            assert {packet.qos for packet in found} == {qos}


async def test_user_properties_of_a_will_keep_their_order() -> None:
    """MQTT5-3.1.3-10."""
    for user in ((("z", "1"), ("a", "2"), ("m", "3")), (("z", "1"), ("a", "2"), ("z", "3"))):
        world = World()
        client(world, MQTT_5, will=ClientsWill("gone", b"bye", 1, False, {Property.USER: user}))
        (asked,) = of(ev.SetWill, world.events)
        extension = asked.message.extension
        record = encode(Kind.ROOM, 1, b"", 1, flags=Flag.TO_ROOM, extension=extension)
        assert carried_by(record).properties == {Property.USER: user}


async def test_a_will_whose_properties_no_record_carries_is_refused() -> None:
    """MQTT5-3.1.4-2."""
    world = World()
    will = ClientsWill("gone", b"bye", 1, False, {Property.USER: (("k", '"' * 30_000),) * 2})
    connection, wire = client(world, MQTT_5, will=will)
    (answer,) = codec.Decoder(Side.CLIENT, dialect=MQTT_5).feed(b"".join(wire.writes))
    assert isinstance(answer, Connack)
    assert answer.code == ReasonCode.PACKET_TOO_LARGE
    assert not connection.is_open
    assert of(ev.SetWill, world.events) == []


async def test_a_will_is_retained_as_it_says() -> None:
    """MQTT-3.1.2-16 MQTT5-3.1.2-14, and MQTT-3.1.2-17 MQTT5-3.1.2-15."""
    world, kept = World(), list[str]()

    class Retainer:
        def retain(self, record: bytes, topic: str, done: Callable[[PixiuError | None], None]) -> None:
            kept.append(topic)
            done(None)

    publisher = WillPublisher(lambda: 0.0, world, TopicRooms(""), VRooms(), MAX_RECORD_BYTES, Retainer())  # type: ignore[arg-type]
    for number, retain in enumerate((False, True), 1):
        will = Will(gateway_msg_id(9, 1, number), 7, 5, 0, WillMessage("gone", b"bye", 1, retain))
        publisher._publish(PublishWill(will, number))
        assert kept == ["gone"] * retain
        assert [retain_of(message.record) for message in world.published] == [False, True][:number]
