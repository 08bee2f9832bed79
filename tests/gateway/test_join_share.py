"""Who joins much waits in one line, and nobody else does."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from cluster.core.reading_gate import Hold
from cluster.mqtt import codec
from cluster.mqtt.packets import Pingresp, Publish, Suback, Subscribe, Unsubscribe
from gateway import events as ev
from gateway.clients.join_share import LONG_HOLD_S, MAX_DOUBLINGS, MAX_WAIT_S, JoinRate, JoinShare
from gateway.grpc.subscriber import SubscriberService, _Stream
from gateway.mqtt.subscribing import JOINS_A_STEP
from gateway.options import Options
from pixiu.errors import Overloaded
from pixiu.wire.v1 import wire_pb2
from tests.gateway.world import World, mqtt_client, of
from tests.support.waiting import until

ALONE = Options(client_joins_free=10, joins_per_s=10)


def rate(share: JoinShare, free: int = 10, now: float = 0.0) -> JoinRate:
    return JoinRate(share, 0.0, 1.0, free, now)


def subscribe(number: int, count: int) -> bytes:
    return codec.encode(Subscribe(number, tuple((f"room/{number * 1000 + n}", 0) for n in range(1, count + 1))))


def test_the_first_joins_of_everybody_are_free() -> None:
    share = JoinShare(1.0, 10**9, 0.0)
    assert [rate(share).wait_s(10, 0.0) for _ in range(1000)] == [0.0] * 1000


def test_who_wants_more_waits_for_those_before() -> None:
    share = JoinShare(100.0, 10**9, 0.0)
    clients = [rate(share) for _ in range(5)]
    waits = [client.wait_s(110, 0.0) for client in clients]
    assert waits[1:] == [pytest.approx(max(0.0, at - 1), abs=1e-5) for at in range(1, 5)]
    assert rate(share).wait_s(10, 0.0) == 0.0, "a client that comes waits for none of them"


def test_a_line_that_is_too_long_is_not_joined() -> None:
    share = JoinShare(10.0, 10**9, 0.0)
    assert rate(share).wait_s(1000, 0.0) == 0.0
    assert rate(share).wait_s(30, 0.0) is None
    assert share.refused == 30
    later = 980 / 10 - MAX_WAIT_S + 0.1
    assert rate(share, now=later).wait_s(30, later) == pytest.approx(MAX_WAIT_S - 0.1)


def test_what_would_be_refused_is_known_before_it_is_asked_for() -> None:
    share = JoinShare(10.0, 2000, 0.0)
    assert not rate(share).is_vain(1000, 0.0)
    assert rate(share).wait_s(1000, 0.0) == 0.0
    client = rate(share)
    assert client.is_vain(11, 0.0)
    assert not client.is_vain(10, 0.0), "its few are free"
    client.refuse(300)
    assert (share.refused, client.refusal_hold_s(1.0)) == (300, LONG_HOLD_S)
    share.subscriptions = 1990
    assert rate(share).is_vain(11, 1e6), "all hold too many"


def test_who_is_refused_again_is_not_read_from_for_twice_as_long() -> None:
    share = JoinShare(10.0, 10**9, 0.0)
    assert rate(share).wait_s(1000, 0.0) == 0.0
    client = rate(share)
    for at in range(MAX_DOUBLINGS + 2):
        assert client.wait_s(30, float(at)) is None
        longest = LONG_HOLD_S * 2 ** min(at, MAX_DOUBLINGS)
        assert (client.refusal_hold_s(0.0), client.refusal_hold_s(1.0)) == (longest / 4, longest)
        assert client.wait_s(1, float(at + 1)) == 0.0, "what is free does not make it begin anew"
    assert client.wait_s(1000, 90.0) is not None
    assert client.wait_s(1000, 90.0) is None
    assert client.refusal_hold_s(1.0) == LONG_HOLD_S


def test_leaves_and_what_is_asked_for_in_vain_take_of_the_share() -> None:
    share = JoinShare(10.0, 10**9, 0.0)
    assert rate(share).hold_s(10, 0.0) == 0.0
    assert rate(share).hold_s(25, 0.0) == pytest.approx(0.5)
    assert rate(share).wait_s(11, 0.0) == pytest.approx(0.5)
    assert rate(share).hold_s(10_000, 0.0) == LONG_HOLD_S


def test_free_joins_come_back() -> None:
    share = JoinShare(1.0, 10**9, 0.0)
    client = rate(share)
    assert client.wait_s(12, 0.0) == 0.0
    assert client.wait_s(1, 0.0) == pytest.approx(1.0)
    assert client.wait_s(5, 5.0) == 0.0


def test_when_all_hold_too_many_there_are_the_few_of_each() -> None:
    share = JoinShare(0.0, 100, 0.0)
    big, app = rate(share), rate(share)
    big.has_now(95)
    assert big.wait_s(6, 0.0) is None
    assert big.wait_s(5, 0.0) == 0.0
    assert app.wait_s(10, 0.0) == 0.0
    app.has_now(10)
    assert app.wait_s(1, 0.0) is None
    big.has_now(0)
    assert (share.subscriptions, app.wait_s(1, 0.0)) == (10, 0.0)


def test_without_a_limit_nobody_waits() -> None:
    assert rate(JoinShare(0.0, 10**9, 0.0)).wait_s(10**6, 0.0) == 0.0


def test_another_rate_holds_from_now_on() -> None:
    share = JoinShare(1.0, 10**9, 0.0)
    assert rate(share).wait_s(1000, 0.0) == 0.0
    share.set_rate(1000.0, 1.0)
    assert rate(share).wait_s(100, 1.0) == 0.0


async def test_a_client_that_joins_much_waits_and_others_do_not() -> None:
    world = World(ALONE, now=100.0)
    first, _ = mqtt_client(world, "first")
    second, wire = mqtt_client(world, "second")
    first.data_received(subscribe(1, 21))  # ten are free, ten are the share's second, one is owed
    second.data_received(subscribe(2, 11) + codec.encode(Publish("room/7", b"x")) + b"\xc0\x00")
    assert [join.connection for join in of(ev.Join, world.events)] == [first.id]
    assert not of(ev.Publish, world.events), "what it says next waits behind it"
    assert not wire.reading
    app, _ = mqtt_client(world, "app")
    app.data_received(subscribe(3, 10))
    assert [join.connection for join in of(ev.Join, world.events)] == [first.id, app.id]
    await until(lambda: len(of(ev.Join, world.events)) == 3)
    await until(lambda: bool(of(ev.Publish, world.events)))
    world.now = 101.0
    second._timeout()
    await until(lambda: any(isinstance(packet, Pingresp) for packet in wire.packets()))
    assert wire.reading
    assert world.closed_for == []


async def test_who_goes_leaves_the_line() -> None:
    world = World(ALONE, now=100.0)
    greedy, _ = mqtt_client(world, "greedy")
    greedy.data_received(subscribe(1, 60))
    waits, _ = mqtt_client(world, "waits")
    waits.data_received(codec.encode(Publish("room/7", b"x")) + subscribe(2, 60) + codec.encode(Publish("room/8", b"x")))
    waits.connection_lost(None)
    assert [join.connection for join in of(ev.Join, world.events)] == [greedy.id]
    assert len(of(ev.Publish, world.events)) == 2, "what it published before it went is passed on"
    assert [closed.connection for closed in of(ev.Closed, world.events)] == [waits.id]


async def test_beyond_the_line_filters_are_refused_and_the_client_stays() -> None:
    world = World(ALONE, now=100.0)
    greedy, _ = mqtt_client(world, "greedy")
    greedy.data_received(subscribe(1, 500))
    await until(lambda: not greedy.gate.holds(Hold.TURN))  # its second half
    late, wire = mqtt_client(world, "late")
    late.data_received(subscribe(2, 30))
    assert [packet.codes for packet in wire.packets() if isinstance(packet, Suback)] == [(0x80,) * 30]
    assert not wire.reading
    assert world.closed_for == []
    assert world.clients.samples()["joins_over_share_total"] == 30
    world.now = 100.1 + LONG_HOLD_S
    late._timeout()
    assert wire.reading
    late.data_received(codec.encode(Unsubscribe(3, ("room/2001",))))
    assert not of(ev.Leave, world.events), "it has none of them"


async def test_a_long_subscribe_beyond_the_line_is_refused_without_a_look_at_its_filters() -> None:
    world = World(ALONE, now=100.0)
    greedy, _ = mqtt_client(world, "greedy")
    greedy.data_received(subscribe(1, 500))
    await until(lambda: not greedy.gate.holds(Hold.TURN))  # its second half
    late, wire = mqtt_client(world, "late")
    late.data_received(subscribe(2, 900))
    await until(lambda: any(isinstance(packet, Suback) for packet in wire.packets()))
    assert [packet.codes for packet in wire.packets() if isinstance(packet, Suback)] == [(0x80,) * 900]
    assert not wire.reading
    assert world.clients.samples()["joins_over_share_total"] == 900
    assert {join.connection for join in of(ev.Join, world.events)} <= {greedy.id}


async def test_what_a_connection_holds_is_counted_until_it_goes() -> None:
    world = World(now=100.0)
    connection, _ = mqtt_client(world)
    connection.data_received(subscribe(1, 30) + codec.encode(Unsubscribe(2, ("room/1001", "room/1002", "room/9"))))
    assert world.clients.samples()["subscriptions"] == 28
    connection.connection_lost(None)
    assert world.clients.samples()["subscriptions"] == 0


async def test_the_share_changes_while_clients_are_there() -> None:
    world = World(ALONE, now=100.0)
    greedy, _ = mqtt_client(world, "greedy")
    greedy.data_received(subscribe(1, 500))
    await until(lambda: not greedy.gate.holds(Hold.TURN))  # its second half
    world.clients.set_options(replace(ALONE, joins_per_s=1000, max_all_subscriptions=540))
    other, _ = mqtt_client(world, "other")
    other.data_received(subscribe(2, 40))
    assert {join.connection for join in of(ev.Join, world.events)} == {greedy.id, other.id}
    third, wire = mqtt_client(world, "third")
    third.data_received(subscribe(3, 11))
    assert [packet.codes for packet in wire.packets() if isinstance(packet, Suback)] == [(0x80,) * 11]


async def test_a_stream_waits_in_the_same_line() -> None:
    world = World(ALONE, now=100.0)
    service, first, second = SubscriberService(world.clients), _Stream(world.clients, ""), _Stream(world.clients, "")

    def asks(number: int, count: int) -> wire_pb2.SubscribeRequest:
        return wire_pb2.SubscribeRequest(request=number, join_rooms=range(1, count + 1))

    assert service._take(first, asks(1, 21)) is None
    pause = service._take(second, asks(2, 11))
    assert pause is not None
    assert [join.request for join in of(ev.Join, world.events)] == [1]
    await pause
    assert [join.request for join in of(ev.Join, world.events)] == [1, 2]
    waits = service._take(first, asks(3, 900))
    assert asyncio.iscoroutine(waits)
    waits.close()
    refused = service._take(second, asks(4, 30))
    assert asyncio.iscoroutine(refused)
    refused.close()
    replies = [reply for reply in iter(second.give, None) if reply.error_code]
    assert [(reply.request, reply.error_code) for reply in replies] == [(4, Overloaded.code)]


async def test_what_no_room_carries_holds_its_client_by_its_bytes() -> None:
    world = World(now=100.0)
    connection, wire = mqtt_client(world)
    connection.data_received(codec.encode(Publish("$a", b"x")) * 100)
    assert wire.reading
    connection.data_received(codec.encode(Publish("t" * 65_535, b"x")))
    assert not wire.reading
    assert (world.closed_for, world.clients.counters.unroutable) == ([], 101)
    assert not of(ev.Publish, world.events)
    world.now = 101.1
    connection._timeout()
    assert wire.reading


async def test_a_subscribe_of_many_filters_is_joined_in_steps_and_answered_once() -> None:
    world = World(Options(client_joins_free=1000), now=100.0)
    connection, wire = mqtt_client(world)
    many = 3 * JOINS_A_STEP - 10
    connection.data_received(subscribe(1, many))
    assert [len(join.channels) for join in of(ev.Join, world.events)] == [JOINS_A_STEP]
    gone = f"room/{1000 + many}"
    connection.data_received(codec.encode(Unsubscribe(2, (gone,))))
    await until(lambda: len(of(ev.Join, world.events)) == 3)
    joins = of(ev.Join, world.events)
    assert [len(join.channels) for join in joins] == [JOINS_A_STEP, JOINS_A_STEP, JOINS_A_STEP - 11], "it has left one meanwhile"
    refused = joins[1].channels[0].filter
    for join in reversed(joins):
        assert not any(isinstance(packet, Suback) for packet in wire.packets())
        world.clients.answer(
            ev.Answer(join.connection, join.request, True, frozenset({refused} & {wanted.filter for wanted in join.channels}))
        )
    world.clients.deliveries.flush()
    (suback,) = [packet for packet in wire.packets() if isinstance(packet, Suback)]
    assert (suback.packet_id, suback.codes.count(0x80), len(suback.codes)) == (1, 1, many)


async def test_who_goes_joins_no_more_steps() -> None:
    world = World(Options(client_joins_free=1000), now=100.0)
    connection, _ = mqtt_client(world)
    connection.data_received(subscribe(1, 3 * JOINS_A_STEP))
    connection.connection_lost(None)
    await until(lambda: world.clients.turn.waiting == 0)
    assert len(of(ev.Join, world.events)) == 1
