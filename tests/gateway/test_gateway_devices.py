"""The gateway's core: devices are told to the relays, and messages to users reach their connections."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.core.contract import SendControl, Settled, Tick
from cluster.membership.map.anti_entropy import Puller
from cluster.membership.map.devices import Devices, connection_of, device_key
from cluster.membership.map.digest import bucket_of
from cluster.membership.map.updates import Update
from cluster.wire.v1 import control_pb2
from gateway import events as ev
from gateway.core import Core
from gateway.membership.hybrid_clock import COUNT_BITS
from pixiu.ids import EndpointID, gateway_generation, gateway_instance
from pixiu.wire.record import Flag, Kind, encode
from tests.gateway.world import arrive, fan_out, of, turn
from tests.support.filters import wants

ROUTER, R1, R2 = EndpointID(101), EndpointID(201), EndpointID(202)
WALL_MS = 1_700_000_000_000
KEY = device_key(1, 9)


def gateway(relays: tuple[ev.Replica, ...] = (ev.Replica(R1, 0),), partitions: int = 1) -> Core:
    core = Core(instance=3, generation=5)
    core.step(ev.RoutersChanged(1, (ev.Replica(ROUTER, 0),)), 0.0)
    core.step(ev.RelaysChanged(partitions, relays), 0.0)
    return core


def opened(connection: int, uin: int = 7, device: int = 1, packets: bool = True, wall_ms: int = WALL_MS) -> ev.Opened:
    return ev.Opened(connection, uin, 3 * packets, device, 9, wall_ms)


def to_relays(effects: list[ev.Effect]) -> list[ev.SendMembership]:
    return [effect for effect in of(ev.SendMembership, effects) if effect.peer != ROUTER]


def said(effects: list[ev.Effect]) -> list[Update]:
    return [message for effect in to_relays(effects) for message in effect.messages]


def pair(change: Update) -> tuple[int, int]:
    return change.group, change.member


def confirmed(core: Core, changes: list[Update], newer: dict[int, int] | None = None, peer: EndpointID = R1) -> list[ev.Effect]:
    event = ev.Confirmed(peer, [change.id for change in changes], list((newer or {}).items()))
    return turn(core, event, now=1.5)


def chat(uin: int, number: int, body: bytes = b"hi") -> bytes:
    return encode(Kind.CHAT, uin, body, number)


def test_a_device_that_connects_is_told_with_its_connect_time() -> None:
    core = gateway()
    (change,) = said(turn(core, opened(1)))
    assert (gateway_instance(change.id), gateway_generation(change.id)) == (3, 5)
    assert change[1:] == (7, KEY, True, 0, WALL_MS << COUNT_BITS << 3 | 1, "", b"")
    assert core.unconfirmed == 1
    assert confirmed(core, [change]) == []
    assert core.unconfirmed == 0


def test_a_relay_is_told_the_name_of_a_device_when_it_takes_mail() -> None:
    core = gateway()
    (here,) = said(turn(core, replace(opened(1), name="phone")))
    (takes,) = said(turn(core, ev.Join(1, 1, [], mail=True)))
    assert (here.name, takes.name) == ("", "phone")


def test_it_is_said_again_until_a_relay_confirms_it() -> None:
    core = gateway((ev.Replica(R1, 0), ev.Replica(R2, 0)))
    (first,) = to_relays(turn(core, opened(1)))
    again = turn(core, Settled([(first.token, False)]), now=1.2) + turn(core, Tick(), now=1.4)
    assert said(again) == first.messages
    other = R2 if first.peer == R1 else R1
    effects = turn(core, ev.RelaysChanged(1, (ev.Replica(other, 0),)), now=1.6)
    assert [e.peer for e in to_relays(effects)] == [other]
    assert said(turn(core, Tick(), now=3.0)) == first.messages


def test_the_last_connection_of_a_device_disconnects_it() -> None:
    core = gateway()
    first = said(turn(core, opened(1)))
    second = said(turn(core, opened(2)))
    assert connection_of(second[0]).connect_time > connection_of(first[0]).connect_time
    assert said(turn(core, ev.Closed(1, 2))) == []
    (gone,) = said(turn(core, ev.Closed(2, 2)))
    assert (gone.login, gone.reason, pair(gone)) == (False, 2, (7, KEY))
    assert len(core.devices) == 0


def test_devices_of_a_user_are_told_apart() -> None:
    core = gateway()
    changes = said(turn(core, opened(1, device=1), opened(2, device=2), opened(3, uin=8, device=1)))
    assert [pair(change) for change in changes] == [(7, KEY), (7, device_key(2, 9)), (8, KEY)]


def test_a_connection_that_wants_messages_says_so_with_the_old_connect_time() -> None:
    core = gateway()
    before = said(turn(core, opened(1)))
    confirmed(core, before)
    effects = turn(core, ev.Join(1, 50, [], chat=True))
    (change,) = said(effects)
    assert connection_of(change)[2:] == (connection_of(before[0]).connect_time, True, True, False)
    assert change.id > before[0].id
    assert not of(ev.Answer, effects)
    assert confirmed(core, [change]) == [ev.Answer(1, 50, True)]


@pytest.mark.parametrize("routers_first", [True, False])
def test_a_join_of_rooms_and_the_user_is_answered_when_routers_and_relays_know(routers_first: bool) -> None:
    core = gateway()
    confirmed(core, said(turn(core, opened(1))))
    effects = turn(core, ev.Join(1, 50, wants(42), chat=True))
    (member,) = [m for e in of(ev.SendMembership, effects) if e.peer == ROUTER for m in e.messages]
    by_router = ev.Confirmed(ROUTER, [member.id])
    by_relay = ev.Confirmed(R1, [change.id for change in said(effects)])
    first, second = (by_router, by_relay) if routers_first else (by_relay, by_router)
    assert turn(core, first) == []
    assert turn(core, second) == [ev.Answer(1, 50, True)]


def test_a_join_that_no_relay_confirms_is_answered_as_unknown_in_the_end() -> None:
    core = gateway(())
    turn(core, opened(1))
    effects = turn(core, ev.Join(1, 50, [], chat=True))
    assert said(effects) == []
    assert of(ev.Answer, turn(core, Tick(), now=60.0)) == [ev.Answer(1, 50, False)]


def test_messages_reach_every_connection_of_the_user_that_wants_them_once() -> None:
    core = gateway()
    turn(core, opened(1), opened(2, device=2), opened(3, packets=False), opened(4, device=3), opened(5, uin=8))
    turn(core, *[ev.Join(n, 1, [], chat=True) for n in (1, 2, 3, 5)])
    record = chat(7, 1)
    found = {deliver.connections: deliver.data for deliver in fan_out(core, record, record)}
    assert found == {(1, 2): b"0\x0a\x00\x06user/7hi", (3,): record}
    assert fan_out(core, chat(9, 2)) == []
    assert core.counters.without_members == 1


def test_a_user_and_a_room_of_the_same_number_are_two() -> None:
    core = gateway()
    turn(core, opened(1), opened(2, uin=8), ev.Join(1, 1, [], chat=True), ev.Join(2, 1, wants(7)))
    room = encode(Kind.ROOM, 7, b"room", 2, flags=Flag.TO_ROOM)
    deliveries = fan_out(core, chat(7, 1, b"user"), room)
    assert {d.connections: d.data for d in deliveries} == {(1,): b"0\x0c\x00\x06user/7user", (2,): b"0\x0c\x00\x06room/7room"}


def test_a_signal_goes_where_its_flag_says() -> None:
    core = gateway()
    turn(core, opened(1), opened(2, uin=8), ev.Join(1, 1, [], chat=True), ev.Join(2, 1, wants(7)))
    assert fan_out(core, encode(Kind.SIGNAL, 7, b"s", 1))[0].connections == (1,)
    assert fan_out(core, encode(Kind.SIGNAL, 7, b"s", 2, flags=Flag.TO_ROOM))[0].connections == (2,)
    assert fan_out(core, encode(Kind.MAIL, 7, b"s", 3)) == []


def test_nothing_comes_after_unsubscribing_or_closing() -> None:
    core = gateway()
    turn(core, opened(1), opened(2), ev.Join(1, 1, [], chat=True), ev.Join(2, 1, [], chat=True))
    assert said(turn(core, ev.Leave(1, [], chat=True))) == []
    assert [d.connections for d in fan_out(core, chat(7, 1))] == [(2,)]
    (change,) = said(turn(core, ev.Closed(2, 1), now=2.5))
    assert (change.login, connection_of(change).chat) == (True, False)
    assert fan_out(core, chat(7, 2)) == []
    assert core.index.users == {}


def test_a_new_connection_that_a_relay_knows_a_newer_one_of_is_said_once_more_above_it() -> None:
    core = gateway()
    first = said(turn(core, opened(1), ev.Join(1, 50, [], chat=True)))
    ahead = (WALL_MS + 5_000) << COUNT_BITS
    effects = confirmed(core, first, {first[0].id: ahead})
    (again,) = said(effects)
    assert connection_of(again).connect_time == ahead + 1
    assert not of(ev.Answer, effects)
    # Once: what is above it now is a connection that came later.
    assert confirmed(core, [again], {again.id: ahead + 100}) == [ev.Answer(1, 50, True)]
    assert connection_of(said(turn(core, opened(2, device=2)))[0]).connect_time > ahead


def test_while_relays_double_the_one_that_knows_of_a_newer_connection_is_heard_also_after_the_other() -> None:
    core = gateway((ev.Replica(R1, 1), ev.Replica(R2, 3)), partitions=2)
    first = said(turn(core, opened(1)))
    assert said(confirmed(core, first[:1], peer=R2)) == []
    ahead = (WALL_MS + 5_000) << COUNT_BITS
    again = said(confirmed(core, first[:1], {first[0].id: ahead}, peer=R1))
    assert {connection_of(change).connect_time for change in again} == {ahead + 1}


def test_what_is_no_new_connection_never_raises_its_connect_time() -> None:
    core = gateway()
    confirmed(core, said(turn(core, opened(1))))
    refresh = said(turn(core, ev.Join(1, 50, [], chat=True)))
    effects = confirmed(core, refresh, {refresh[0].id: (WALL_MS + 5_000) << COUNT_BITS})
    assert said(effects) == []
    assert effects == [ev.Answer(1, 50, True)]


def test_without_relays_what_is_here_is_noted_and_relays_that_come_find_it() -> None:
    core = gateway((), partitions=0)
    assert said(turn(core, opened(1), opened(2, uin=8), opened(3, uin=9), ev.Closed(3, 1))) == []
    assert core.unconfirmed == 0
    turn(core, ev.RelaysChanged(2, (ev.Replica(R1, 0), ev.Replica(R2, 1))), now=2.0)
    assert [core.heartbeat(partition, 2, relay=True).digest.count for partition in (0, 1)] == [1, 1]
    assert core.heartbeat(0, 1).digest.count == 0  # of rooms
    core.step(ev.Closed(1, 1), 3.0)
    assert [core.heartbeat(partition, 2, relay=True).digest.count for partition in (0, 1)] == [1, 0]


def test_a_relay_that_lists_what_is_here_gets_it_with_connect_times() -> None:
    core = gateway()
    turn(core, opened(1))
    relay = Devices()
    request = control_pb2.ListingRequest(partition=0, partitions=1, instance=3)
    request.buckets.add(bucket=bucket_of(7))
    (answer,) = core.step(ev.HealingReceived(R1, control_pb2.Control(listing_request=request), relay=True), 2.0)
    assert isinstance(answer, SendControl)
    keeper = Puller(relay, 1.0)
    for message in answer.messages:
        keeper.take(EndpointID(1), control_pb2.Control.FromString(message), 2.0, own_word=True)
    assert [(c.key, c.connect_time) for c in relay.connections(7)] == [(KEY, WALL_MS << COUNT_BITS)]


def test_a_message_for_a_user_who_is_not_here_is_told_to_the_relay_once_a_second() -> None:
    core = gateway()
    turn(core, opened(1))
    # User 7 is here, and takes no messages.
    (told,) = of(SendControl, arrive(core, chat(9, 1), chat(7, 2)))
    (message,) = told.messages
    assert (told.peer, list(control_pb2.Control.FromString(message).absence.rooms)) == (R1, [9])


def test_a_connection_that_a_newer_login_replaced_is_ended_and_one_that_came_later_is_not() -> None:
    core = gateway()
    first = connection_of(said(turn(core, opened(1)))[0])
    assert core.step(ev.Replaced(7, KEY, first.connect_time, 5), 2.0) == [ev.Disconnect(1, 5)]
    turn(core, opened(2))
    assert core.step(ev.Replaced(7, KEY, first.connect_time, 5), 2.0) == []
    assert core.step(ev.Replaced(8, KEY, first.connect_time, 5), 2.0) == []


def test_a_connection_that_is_no_device_is_told_to_nobody() -> None:
    core = gateway()
    assert said(turn(core, opened(1, device=0))) == []
    assert len(core.devices) == 0
    assert said(turn(core, ev.Closed(1, 1))) == []
