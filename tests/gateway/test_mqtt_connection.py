"""What one MQTT client can do to its gateway: small packets in masses, memory, timers, and reading while it is written to."""

from __future__ import annotations

import asyncio
import socket

import pytest

from cluster.mqtt import codec
from cluster.mqtt.events import CloseReason
from cluster.mqtt.packets import Pingresp, Puback, Publish, Suback, Subscribe, Unsubscribe
from cluster.mqtt.terms import SessionLimits
from gateway import events as ev
from gateway.mqtt.connection import MAX_ANSWER_BYTES, SLOW_READ_BYTES_PER_S
from gateway.options import Options
from tests.gateway.world import Wire, World, mqtt_client, of
from tests.support.waiting import until

PINGREQ = b"\xc0\x00"


def answers(wire: Wire) -> int:
    return sum(isinstance(packet, Pingresp) for packet in wire.packets())


async def test_a_storm_of_small_packets_is_worked_off_over_many_turns() -> None:
    world = World()
    connection, wire = mqtt_client(world)
    connection.data_received(PINGREQ * 5000)
    assert answers(wire) <= SessionLimits().max_packets_a_turn
    assert not wire.reading, "nothing more is read meanwhile"
    other, others_wire = mqtt_client(world, "other")
    other.data_received(PINGREQ)
    assert answers(others_wire) == 1
    await until(lambda: answers(wire) == 5000)
    await until(lambda: wire.reading)


async def test_the_answers_of_a_read_are_one_write() -> None:
    connection, wire = mqtt_client(World())
    before = len(wire.writes)
    connection.data_received(PINGREQ * 200)
    assert (len(wire.writes) - before, answers(wire)) == (1, 200)


async def test_subacks_of_one_turn_are_one_write() -> None:
    world = World()
    connection, wire = mqtt_client(world)
    connection.data_received(b"".join(codec.encode(Subscribe(n, ((f"room/{n}", 0),))) for n in range(1, 101)))
    before = len(wire.writes)
    for join in of(ev.Join, world.events):
        world.clients.answer(ev.Answer(join.connection, join.request, True))
    world.clients.deliveries.flush()
    assert len(wire.writes) - before == 1
    assert sum(isinstance(packet, Suback) for packet in wire.packets()) == 100


async def test_what_is_refused_is_said_in_the_suback() -> None:
    world = World()
    connection, wire = mqtt_client(world)
    connection.data_received(codec.encode(Subscribe(5, (("room/42", 0), ("room/43", 0), ("user/9", 0)))))
    (join,) = of(ev.Join, world.events)
    world.clients.answer(ev.Answer(join.connection, 5, True, frozenset({"room/43"})))
    world.clients.deliveries.flush()
    assert [packet.codes for packet in wire.packets() if isinstance(packet, Suback)] == [(0, 0x80, 0x80)]
    assert set(connection._session.subscriptions.filters if connection._session else ()) == {"room/42"}


async def test_a_closing_connection_is_not_written_to() -> None:
    connection, wire = mqtt_client(World())
    wire.closed = True
    before = len(wire.writes)
    connection.data_received(PINGREQ * 100)
    assert len(wire.writes) == before


async def test_a_connection_that_was_lost_in_this_turn_ends_for_what_it_sent_last() -> None:
    """TLS marks its transport as closed at once, and tells the connection in the next turn."""
    world = World()
    connection, wire = mqtt_client(world)
    wire.closed = True
    connection.data_received(b"\xff" * 9)
    assert world.closed_for == ["malformed"]


async def test_many_channels_of_one_turn_are_joined_once() -> None:
    connection, wire = mqtt_client(World())
    before = len(wire.writes)
    for number in range(1000):
        connection.deliver(b"%04d" % number, 1)
    connection.flush()
    assert wire.writes[before:] == [b"".join(b"%04d" % number for number in range(1000))]


async def test_a_client_that_reads_is_not_slow_because_a_delivery_was_large() -> None:
    world = World()
    connection, wire = mqtt_client(world)
    connection.deliver(bytes(1_000_000), 1)
    connection.flush()
    wire.buffered = 600_000
    connection.pause_writing()
    connection.data_received(PINGREQ)
    assert world.closed_for == []


async def test_a_client_that_does_not_read_its_answers_is_closed() -> None:
    world = World()
    connection, wire = mqtt_client(world)
    wire.buffered = 1
    connection.pause_writing()
    for _ in range(MAX_ANSWER_BYTES // 400 + 2):
        if connection.is_open:
            connection.data_received(PINGREQ * 200)
    assert world.closed_for == [CloseReason.SLOW_CONSUMER.value]


async def test_a_timer_moves_when_a_deadline_comes_earlier() -> None:
    """The keep-alive of a second was seen only when the time for a CONNECT was over."""
    connection, _ = mqtt_client(World(now=100.0), keep_alive_s=1)
    assert connection._timer_at == 101.5


async def test_an_unfinished_packet_has_an_end_without_a_keep_alive() -> None:
    world = World(now=100.0)
    connection, _ = mqtt_client(world)
    connection.data_received(codec.encode(Publish("room/42", bytes(10_000), 0))[:-1])
    world.now = 100.0 + SessionLimits().packet_timeout_s
    connection._timeout()
    assert world.closed_for == [CloseReason.PACKET_UNFINISHED.value]


@pytest.mark.parametrize("options", [Options(memory_bytes=4 << 20), Options(address_memory_bytes=4 << 20)], ids=["all", "address"])
async def test_unfinished_packets_have_one_bound_and_the_largest_go(options: Options) -> None:
    world = World(options)
    unfinished = codec.encode(Publish("room/42", bytes(1_000_000), 0))
    sizes = [900_000, 100_000, 800_000, 700_000, 950_000, 600_000, 990_000, 500_000]
    clients = [mqtt_client(world, f"hostile {number}") for number in range(len(sizes))]
    innocent, wire = mqtt_client(world, "innocent")
    for (connection, _), size in zip(clients, sizes, strict=True):
        connection.data_received(unfinished[:size])
        innocent.data_received(PINGREQ)
    assert world.clients.memory.bytes <= 4 << 20
    assert set(world.closed_for) == {CloseReason.MEMORY.value}
    assert [size for (connection, _), size in zip(clients, sizes, strict=True) if not connection.is_open] == [950_000, 990_000]
    assert (innocent.is_open, answers(wire)) == (True, len(sizes))
    for connection, _ in clients:
        connection.connection_lost(None)
    assert world.clients.memory.bytes == 0


@pytest.mark.parametrize("options", [Options(memory_bytes=4 << 20), Options(address_memory_bytes=4 << 20)], ids=["all", "address"])
async def test_where_unfinished_packets_have_little_room_left_they_are_read_slowly(options: Options) -> None:
    world = World(options, now=100.0)
    unfinished = codec.encode(Publish("room/42", bytes(1_000_000), 0))
    clients = [mqtt_client(world, f"hostile {number}") for number in range(4)]
    for connection, _ in clients[:3]:
        connection.data_received(unfinished[:990_000])
    assert [wire.reading for _, wire in clients] == [True] * 4
    innocent, innocents_wire = mqtt_client(world, "innocent")
    last, wire = clients[3]
    last.data_received(unfinished[:300_000])
    assert not wire.reading
    innocent.data_received(PINGREQ + codec.encode(Publish("room/42", bytes(60_000), 0)))
    assert innocents_wire.reading, "what is finished is not held up"
    innocent.data_received(PINGREQ * 3000)
    await until(lambda: answers(innocents_wire) == 3001)
    await until(lambda: innocents_wire.reading, "reading, as what is finished and waits for the next turns is not held up either")
    world.now = 100.0 + 300_000 / SLOW_READ_BYTES_PER_S + 0.1
    last._timeout()
    assert wire.reading
    last.data_received(unfinished[300_000:])
    assert (wire.reading, world.closed_for) == (True, []), "nobody was thrown out, and its message has come"


async def test_the_filters_of_a_connection_have_a_bound_of_bytes() -> None:
    world = World()
    connection, wire = mqtt_client(world)
    limit = SessionLimits().max_filter_bytes
    for number in range(1, 21):
        connection.data_received(codec.encode(Subscribe(number, ((f"{number:02}/" + "x" * 4000, 0),))))
    joined = of(ev.Join, world.events)
    assert len(joined) == limit // 4003
    refused = [packet for packet in wire.packets() if isinstance(packet, Suback)]
    assert [packet.codes for packet in refused] == [(0x80,)] * (20 - len(joined))


async def test_a_puback_that_answers_nothing_is_ignored() -> None:
    world = World()
    connection, wire = mqtt_client(world)
    connection.data_received(codec.encode(Puback(77)) + PINGREQ)
    assert (world.closed_for, answers(wire)) == ([], 1)


async def test_the_kernel_asks_whether_a_silent_client_is_there() -> None:
    _, wire = mqtt_client(World())
    assert wire.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1


async def test_what_waits_while_reading_is_held_is_taken_when_it_goes_on() -> None:
    world = World()
    world.room = False
    connection, wire = mqtt_client(world)
    connection.data_received(codec.encode(Publish("room/42", b"x", 1, packet_id=1)) + PINGREQ * 600)
    await asyncio.sleep(0)
    held = answers(wire)
    assert held < 600
    world.let_in()
    await until(lambda: answers(wire) == 600)


async def test_who_joins_and_leaves_without_end_is_not_read_from_for_a_while() -> None:
    world = World(Options(client_joins_per_s=10, client_joins_burst=20), now=100.0)
    connection, wire = mqtt_client(world)
    churn = [codec.encode(Subscribe(1, (("room/42", 0),))), codec.encode(Unsubscribe(2, ("room/42",)))]
    for turn in range(40):
        if not wire.reading:
            break
        connection.data_received(churn[turn % 2])
        world.clients.answer(ev.Answer(connection.id, 1, True))
    assert 20 <= turn <= 21
    assert world.closed_for == []
    other, others_wire = mqtt_client(world, "other")
    other.data_received(churn[0])
    assert others_wire.reading
    world.now = 101.0
    connection._timeout()
    assert wire.reading


@pytest.mark.parametrize(
    "packet",
    [Subscribe(1, tuple((f"$SYS/{number}", 0) for number in range(30))), Unsubscribe(1, tuple(f"a/{n}" for n in range(30)))],
)
async def test_filters_that_are_refused_or_not_there_have_the_same_rate(packet: Subscribe | Unsubscribe) -> None:
    world = World(Options(client_joins_per_s=10, client_joins_burst=20), now=100.0)
    connection, wire = mqtt_client(world)
    connection.data_received(codec.encode(packet))
    assert not wire.reading
    assert world.closed_for == []
    world.now = 101.1
    connection._timeout()
    assert wire.reading
