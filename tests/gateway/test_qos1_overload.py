"""Messages of QoS 1 that find no space: their clients are not read from, and nobody is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache

import pytest

from cluster.core.contract import SendRecords, Settled
from cluster.mqtt import codec
from cluster.mqtt.packets import MQTT_5, Connect, Puback, Publish, Side
from gateway import events as ev
from gateway.clients.publishing import MAX_BYTES, ConfirmedPublishers
from gateway.core import Core
from gateway.events import Confirmable
from gateway.mqtt.connection import MQTTConnection
from gateway.mqtt.publishing import MAX_CLIENT_BYTES, MAX_ROUTE_RETRIES
from pixiu.errors import Dropped, InvalidArgument, Overloaded, PixiuError, TopicAway, Unavailable
from pixiu.ids import EndpointID, SnowflakeID
from pixiu.placement.big_rooms import VRooms
from pixiu.wire.record import Kind, encode
from tests.gateway.world import Wire, World, mqtt_client, of, turn
from tests.support.waiting import until


def publish(number: int, size: int = 10, topic: str = "room/42") -> bytes:
    return codec.encode(Publish(topic, bytes(size), 1, packet_id=number))


def acknowledged(world: World, wire: Wire) -> list[int]:
    """Of this turn and those before."""
    world.clients.deliveries.flush()
    return [packet.packet_id for packet in wire.packets() if isinstance(packet, Puback)]


async def test_a_client_is_not_read_from_while_there_is_no_space() -> None:
    world = World()
    world.room = False
    connection, wire = mqtt_client(world)
    connection.data_received(publish(1) + publish(2))
    assert (world.closed_for, wire.reading, world.published) == ([], False, [])
    world.let_in()
    assert [message.packet_id for message in world.published] == [1, 2]
    assert wire.reading
    for message in list(world.published):
        message.resolved(None)
    assert acknowledged(world, wire) == [1, 2]


async def test_one_clients_large_messages_leave_room_for_others() -> None:
    world = World()
    connection, wire = mqtt_client(world)
    size = MAX_CLIENT_BYTES // 3
    for number in range(1, 9):
        connection.data_received(publish(number, size))
    assert sum(len(message.record) for message in world.published) <= MAX_CLIENT_BYTES
    assert not wire.reading
    while len(world.published) < 8:
        before = len(world.published)
        for message in world.published[:before]:
            if message.packet_id not in acknowledged(world, wire):
                message.resolved(None)
        assert len(world.published) > before
    assert [message.packet_id for message in world.published] == list(range(1, 9))
    assert wire.reading


@pytest.mark.parametrize(
    "error", [Unavailable("no broker"), Overloaded("full", 1), Dropped("lost")], ids=lambda error: type(error).__name__
)
async def test_what_is_refused_for_now_goes_again_in_order_and_closes_nobody(error: PixiuError) -> None:
    world = World()
    connection, wire = mqtt_client(world)
    connection.data_received(publish(1) + publish(2))
    first, second = world.published
    second.resolved(error)
    first.resolved(error)
    assert not wire.reading
    await until(lambda: len(world.published) == 4)
    assert [message.packet_id for message in world.published[2:]] == [1, 2]
    assert [message.snowflake for message in world.published[2:]] == [first.snowflake, second.snowflake]
    for message in world.published[2:]:
        message.resolved(None)
    assert (acknowledged(world, wire), wire.reading, world.closed_for) == ([1, 2], True, [])


async def test_what_a_later_message_has_overtaken_is_not_sent_again() -> None:
    world = World()
    connection, wire = mqtt_client(world)
    connection.data_received(publish(1) + publish(2))
    first, second = world.published
    second.resolved(None)
    first.resolved(Dropped("lost"))
    assert acknowledged(world, wire) == [1, 2]
    assert len(world.published) == 2
    assert world.clients.counters.unroutable == 1


async def test_what_a_later_message_overtakes_during_its_pause_is_not_sent_again() -> None:
    world = World()
    connection, wire = mqtt_client(world)
    connection.data_received(publish(1) + publish(2))
    first, second = world.published
    first.resolved(Dropped("lost"))
    second.resolved(None)
    await until(lambda: acknowledged(world, wire) == [1, 2])
    assert (len(world.published), world.clients.counters.unroutable, wire.reading) == (2, 1, True)


async def pause_of_another(world: World) -> None:
    """Wait until a pause that is longer than one of a millisecond, and began later, is over."""
    other, _ = mqtt_client(world, "other")
    other.data_received(publish(9, topic="room/43"))
    message = world.published[-1]
    before = len(world.published)
    message.resolved(Overloaded("full", 50))
    await until(lambda: len(world.published) > before)
    del world.published[before - 1 :]


@pytest.mark.parametrize("accepted", [True, False])
async def test_what_is_sent_again_waits_for_later_messages_that_are_under_way(accepted: bool) -> None:
    world = World()
    connection, wire = mqtt_client(world)
    connection.data_received(publish(1) + publish(2))
    first, second = world.published
    first.resolved(Overloaded("full", 1))
    await pause_of_another(world)
    assert world.published == [first, second], "whether the second is accepted is not known"
    second.resolved(None if accepted else Dropped("lost"))
    if accepted:  # the first would come after it: the client, which was told of no refusal, sends it again when it is back
        await until(lambda: not connection.is_open)
        assert acknowledged(world, wire) == [], "the second may not overtake"
    else:
        await until(lambda: len(world.published) == 4)
    assert world.published[2:] == ([] if accepted else [first, second])
    assert world.clients.counters.unroutable == int(accepted)


async def test_what_finds_no_space_after_its_pause_stays_before_later_messages() -> None:
    world = World()
    connection, _ = mqtt_client(world)
    connection.data_received(publish(1) + publish(2, topic="room/43"))
    first, second = world.published
    world.room = False
    first.resolved(Overloaded("full", 1))
    await until(lambda: bool(world.waiting))
    second.resolved(Dropped("lost"))
    world.let_in()
    await until(lambda: len(world.published) == 4)
    assert world.published[2:] == [first, second]


async def test_what_the_cluster_refuses_for_good_ends_the_connection_and_is_not_acknowledged() -> None:
    """A "yes" would be a lie, and MQTT 3.1.1 has no "no"."""
    world = World()
    connection, wire = mqtt_client(world)
    connection.data_received(publish(1) + publish(2))
    first, second = world.published
    first.resolved(None)
    assert acknowledged(world, wire) == [1]
    second.resolved(InvalidArgument("no"))
    assert acknowledged(world, wire) == [1]
    assert (world.clients.counters.unroutable, world.closed_for) == (1, ["publish_refused"])


class Publishers:
    """Capacity for messages, and what leaves."""

    def __init__(self) -> None:
        self.sent: list[Confirmable] = []
        self.publishers = ConfirmedPublishers(VRooms(1000, 1100), self._step)
        self.told: list[str] = []

    def _step(self, event: ev.Event) -> None:
        assert isinstance(event, ev.PublishConfirmed)
        self.sent += event.messages

    def publish(self, name: str, size: int = MAX_BYTES // 4, key: int = 42) -> bool:
        """A client publishes, or waits."""
        found = self.publishers.admit(key, size, self.waiting(name))
        if found:
            self.publishers.publish([Confirmable(lambda message, error: None, 1, key, bytes(size), SnowflakeID(1))])
        return found

    @cache  # noqa: B019
    def waiting(self, name: str) -> Callable[[], None]:
        """What is called when there may be space: always the same for a client."""
        return lambda: self._again(name)

    def _again(self, name: str) -> None:
        self.told.append(name)
        self.publish(name)

    def resolve(self) -> None:
        """The oldest message is accepted."""
        self.publishers.resolved(ev.Resolved([(self.sent.pop(0), None)]))


async def test_clients_that_find_no_capacity_get_it_in_turn() -> None:
    bench = Publishers()
    assert [bench.publish(f"first {number}") for number in range(4)] == [True] * 4
    assert [bench.publish(name) for name in "abc"] == [False] * 3
    assert bench.publish("of a big room", key=1001), "these have capacity of their own"
    bench.publishers.forget(bench.waiting("b"))
    await asyncio.sleep(0)
    assert bench.told == []
    bench.resolve()
    await asyncio.sleep(0)
    assert bench.told == ["a", "c"], "the last one has found nothing, and waits again"
    bench.resolve()
    await asyncio.sleep(0)
    assert bench.told == ["a", "c", "c"]
    assert len(bench.sent) == 5


async def test_a_message_that_is_alone_always_has_space() -> None:
    assert Publishers().publish("a", 2 * MAX_BYTES)


async def test_a_flood_of_qos_0_costs_its_own_client() -> None:
    world = World()
    connection, wire = mqtt_client(world)
    size = MAX_CLIENT_BYTES // 4
    for _ in range(5):
        connection.data_received(codec.encode(Publish("room/42", bytes(size), 0)))
    assert not wire.reading
    sent = [len(record) for event in of(ev.Publish, world.events) for _, record in event.records]
    assert sum(sent) <= MAX_CLIENT_BYTES + size + 1000
    other, others_wire = mqtt_client(world, "other")
    other.data_received(codec.encode(Publish("room/42", b"x", 0)))
    assert others_wire.reading
    for size in sent:
        world.clients.passed(ev.Passed(connection.id, size))
    assert wire.reading


def test_what_a_client_published_has_passed_when_its_parcel_is_settled_or_dropped() -> None:
    core = Core(instance=3, generation=5)
    record = encode(Kind.ROOM, 42, b"x", 1)
    assert ev.Passed(9, len(record)) in turn(core, ev.Publish([(42, record)], 9)), "there is no proxy"
    core.step(ev.ProxiesChanged((ev.Replica(EndpointID(201), 0),)), 0.0)
    (sent,) = of(SendRecords, turn(core, ev.Publish([(42, record)], 9), ev.Publish([(42, record)], 8)))
    passed = core.step(Settled([(sent.token, False)]), 1.0)
    assert passed == [ev.Passed(9, len(record)), ev.Passed(8, len(record))]


async def test_a_paced_loop_does_not_rest_while_a_client_waits_or_has_just_got_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    hurried: list[str] = []
    monkeypatch.setattr(world.clients, "hurry", lambda: hurried.append("now"))
    connection, wire = mqtt_client(world)
    connection.data_received(codec.encode(Publish("room/42", b"x")))
    assert not hurried
    connection.data_received(publish(1))
    assert len(hurried) == 1
    (message,) = world.published
    message.resolved(None)
    assert len(hurried) == 2
    assert acknowledged(world, wire) == [1]


async def test_acknowledgements_of_a_turn_leave_in_one_write() -> None:
    world = World()
    connection, wire = mqtt_client(world)
    connection.data_received(b"".join(publish(number) for number in range(1, 65)))
    before = len(wire.writes)
    for message in list(world.published):
        message.resolved(None)
    assert len(wire.writes) == before
    assert acknowledged(world, wire) == list(range(1, 65))
    assert len(wire.writes) == before + 1


async def test_a_route_whose_topic_is_away_refuses_in_the_end_so_that_the_client_tries_again() -> None:
    world = World()
    three, wire = mqtt_client(world)
    five = MQTTConnection(world.clients)
    shown = Wire()
    five.connection_made(shown)
    five.data_received(codec.encode(Connect("five", dialect=MQTT_5)))
    for connection, data in ((three, publish(1)), (five, codec.encode(Publish("room/43", b"x", 1, packet_id=2), MQTT_5))):
        connection.data_received(data)
        for _ in range(MAX_ROUTE_RETRIES):
            count = len(world.published)
            world.published[-1].resolved(TopicAway("send it again", 1))
            await until(lambda count=count: len(world.published) > count)  # type: ignore[misc]
        world.published[-1].resolved(TopicAway("send it again", 1))
    world.clients.deliveries.flush()
    assert acknowledged(world, wire) == []
    assert not three.is_open
    packets = codec.Decoder(Side.CLIENT, dialect=MQTT_5).feed(b"".join(shown.writes))
    assert [(each.packet_id, each.code) for each in packets if isinstance(each, Puback)] == [(2, 0x97)]
    assert five.is_open
