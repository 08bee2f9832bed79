"""The gateway's core: devices are told to the relays, and messages to users reach their connections."""

from __future__ import annotations

import pytest

from gateway.core import Core
from gateway.events import (
    Answer,
    Closed,
    Confirmed,
    Deliver,
    DevicesConfirmed,
    Effect,
    EndOfTurn,
    Join,
    Leave,
    Opened,
    RecordsArrived,
    RelaysChanged,
    Replica,
    RoutersChanged,
    SendDevices,
    SendMembership,
    Settled,
    Tick,
)
from pixiu.devices import DeviceChange
from pixiu.hybridclock import COUNT_BITS
from pixiu.ids import EndpointID, gateway_generation, gateway_instance
from pixiu.record import Flag, Kind, encode

ROUTER, R1, R2 = EndpointID(101), EndpointID(201), EndpointID(202)
WALL_MS = 1_700_000_000_000


def gateway(relays: tuple[Replica, ...] = (Replica(R1, 0),), partitions: int = 1) -> Core:
    core = Core(instance=3, generation=5)
    core.step(RoutersChanged(1, (Replica(ROUTER, 0),)), 0.0)
    core.step(RelaysChanged(partitions, relays), 0.0)
    return core


def turn(core: Core, *events: object, now: float = 1.0) -> list[Effect]:
    effects: list[Effect] = []
    for event in events:
        effects += core.step(event, now)  # type: ignore[arg-type]
    return effects + core.step(EndOfTurn(), now)


def opened(connection: int, uin: int = 7, device: int = 1, packets: bool = True, wall_ms: int = WALL_MS) -> Opened:
    return Opened(connection, uin, packets, device, 9, wall_ms)


def said(effects: list[Effect]) -> list[DeviceChange]:
    return [message for effect in effects if isinstance(effect, SendDevices) for message in effect.messages]


def confirmed(core: Core, changes: list[DeviceChange], newer: dict[int, int] | None = None, peer: EndpointID = R1) -> list[Effect]:
    event = DevicesConfirmed(peer, [change.id for change in changes], list((newer or {}).items()))
    return turn(core, event, now=1.5)


def chat(uin: int, number: int, body: bytes = b"hi") -> bytes:
    return encode(Kind.CHAT, uin, body, number)


def arrive(core: Core, *records: bytes) -> list[Deliver]:
    data = b"".join(records)
    assert core.records_arrived(RecordsArrived(data, 0, len(data), len(records)))
    return [effect for effect in core.step(EndOfTurn(), 2.0) if isinstance(effect, Deliver)]


def test_a_device_that_connects_is_told_with_its_connect_time() -> None:
    core = gateway()
    (change,) = said(turn(core, opened(1)))
    assert (gateway_instance(change.id), gateway_generation(change.id)) == (3, 5)
    assert change[1:] == (7, 1, True, 0, WALL_MS << COUNT_BITS, 9, False)
    assert core.unconfirmed == 1
    assert confirmed(core, [change]) == []
    assert core.unconfirmed == 0


def test_it_is_said_again_until_a_relay_confirms_it() -> None:
    core = gateway((Replica(R1, 0), Replica(R2, 0)))
    (first,) = [e for e in turn(core, opened(1)) if isinstance(e, SendDevices)]
    again = turn(core, Settled([(first.token, False)]), now=1.2) + turn(core, Tick(), now=1.4)
    assert said(again) == first.messages
    other = R2 if first.peer == R1 else R1
    effects = turn(core, RelaysChanged(1, (Replica(other, 0),)), now=1.6)
    assert [e.peer for e in effects if isinstance(e, SendDevices)] == [other]
    assert said(turn(core, Tick(), now=3.0)) == first.messages


def test_the_last_connection_of_a_device_disconnects_it() -> None:
    core = gateway()
    first = said(turn(core, opened(1)))
    second = said(turn(core, opened(2)))
    assert second[0].connect_time > first[0].connect_time
    assert said(turn(core, Closed(1, 2))) == []
    (gone,) = said(turn(core, Closed(2, 2)))
    assert (gone.online, gone.reason, gone.pair) == (False, 2, (7, 1))
    assert len(core.devices) == 0


def test_devices_of_a_user_are_told_apart() -> None:
    core = gateway()
    changes = said(turn(core, opened(1, device=1), opened(2, device=2), opened(3, uin=8, device=1)))
    assert [change.pair for change in changes] == [(7, 1), (7, 2), (8, 1)]


def test_a_connection_that_wants_messages_says_so_with_the_old_connect_time() -> None:
    core = gateway()
    before = said(turn(core, opened(1)))
    confirmed(core, before)
    effects = turn(core, Join(1, 50, [], chat=True))
    (change,) = said(effects)
    assert (change.chat, change.connect_time) == (True, before[0].connect_time)
    assert change.id > before[0].id
    assert not [e for e in effects if isinstance(e, Answer)]
    assert confirmed(core, [change]) == [Answer(1, 50, True)]


@pytest.mark.parametrize("routers_first", [True, False])
def test_a_join_of_rooms_and_the_user_is_answered_when_routers_and_relays_know(routers_first: bool) -> None:
    core = gateway()
    confirmed(core, said(turn(core, opened(1))))
    effects = turn(core, Join(1, 50, [(42, None)], chat=True))
    (member,) = [m for e in effects if isinstance(e, SendMembership) for m in e.messages]
    by_router = Confirmed(ROUTER, [member.id])
    by_relay = DevicesConfirmed(R1, [change.id for change in said(effects)], [])
    first, second = (by_router, by_relay) if routers_first else (by_relay, by_router)
    assert turn(core, first) == []
    assert turn(core, second) == [Answer(1, 50, True)]


def test_a_join_that_no_relay_confirms_is_answered_as_unknown_in_the_end() -> None:
    core = gateway(())
    turn(core, opened(1))
    effects = turn(core, Join(1, 50, [], chat=True))
    assert said(effects) == []
    assert [e for e in turn(core, Tick(), now=60.0) if isinstance(e, Answer)] == [Answer(1, 50, False)]


def test_messages_reach_every_connection_of_the_user_that_wants_them_once() -> None:
    core = gateway()
    turn(core, opened(1), opened(2, device=2), opened(3, packets=False), opened(4, device=3), opened(5, uin=8))
    turn(core, *[Join(n, 1, [], chat=True) for n in (1, 2, 3, 5)])
    record = chat(7, 1)
    found = {deliver.connections: deliver.data for deliver in arrive(core, record, record)}
    assert found == {(1, 2): b"0\x0a\x00\x06user/7hi", (3,): record}
    assert arrive(core, chat(9, 2)) == []
    assert core.counters.without_members == 1


def test_a_user_and_a_room_of_the_same_number_are_two() -> None:
    core = gateway()
    turn(core, opened(1), opened(2, uin=8), Join(1, 1, [], chat=True), Join(2, 1, [(7, None)]))
    room = encode(Kind.ROOM, 7, b"room", 2, flags=Flag.TO_ROOM)
    deliveries = arrive(core, chat(7, 1, b"user"), room)
    assert {d.connections: d.data for d in deliveries} == {(1,): b"0\x0c\x00\x06user/7user", (2,): b"0\x0c\x00\x06room/7room"}


def test_a_signal_goes_where_its_flag_says() -> None:
    core = gateway()
    turn(core, opened(1), opened(2, uin=8), Join(1, 1, [], chat=True), Join(2, 1, [(7, None)]))
    assert arrive(core, encode(Kind.SIGNAL, 7, b"s", 1))[0].connections == (1,)
    assert arrive(core, encode(Kind.SIGNAL, 7, b"s", 2, flags=Flag.TO_ROOM))[0].connections == (2,)
    assert arrive(core, encode(Kind.MAIL, 7, b"s", 3)) == []


def test_nothing_comes_after_unsubscribing_or_closing() -> None:
    core = gateway()
    turn(core, opened(1), opened(2), Join(1, 1, [], chat=True), Join(2, 1, [], chat=True))
    assert said(turn(core, Leave(1, [], chat=True))) == []
    assert [d.connections for d in arrive(core, chat(7, 1))] == [(2,)]
    (change,) = said(turn(core, Closed(2, 1)))
    assert (change.online, change.chat) == (True, False)
    assert arrive(core, chat(7, 2)) == []
    assert core.index.users == {}


def test_a_new_connection_that_a_relay_knows_a_newer_one_of_is_said_once_more_above_it() -> None:
    core = gateway()
    first = said(turn(core, opened(1), Join(1, 50, [], chat=True)))
    ahead = (WALL_MS + 5_000) << COUNT_BITS
    effects = confirmed(core, first, {first[0].id: ahead})
    (again,) = said(effects)
    assert again.connect_time == ahead + 1
    assert not [e for e in effects if isinstance(e, Answer)]
    # Once: what is above it now is a connection that came later.
    assert confirmed(core, [again], {again.id: ahead + 100}) == [Answer(1, 50, True)]
    assert said(turn(core, opened(2, device=2)))[0].connect_time > ahead


def test_what_is_no_new_connection_never_raises_its_connect_time() -> None:
    core = gateway()
    confirmed(core, said(turn(core, opened(1))))
    refresh = said(turn(core, Join(1, 50, [], chat=True)))
    effects = confirmed(core, refresh, {refresh[0].id: (WALL_MS + 5_000) << COUNT_BITS})
    assert said(effects) == []
    assert effects == [Answer(1, 50, True)]


def test_a_cluster_without_relays_is_told_nothing_and_relays_that_come_are_told_everything() -> None:
    core = gateway((), partitions=0)
    assert said(turn(core, opened(1), opened(2, uin=8), opened(3, uin=9), Closed(3, 1))) == []
    assert core.unconfirmed == 0
    effects = turn(core, RelaysChanged(2, (Replica(R1, 0), Replica(R2, 1))), now=2.0)
    assert {(e.peer, m.uin) for e in effects if isinstance(e, SendDevices) for m in e.messages} == {(R1, 8), (R2, 7)}


def test_relays_that_were_all_gone_are_told_what_they_serve_again() -> None:
    core = gateway((Replica(R1, 0), Replica(R2, 1)), partitions=2)
    before = said(turn(core, opened(1), opened(2, uin=8)))
    confirmed(core, before[:1] if before[0].uin == 8 else before[1:])
    confirmed(core, [change for change in before if change.uin == 7], peer=R2)
    assert said(turn(core, RelaysChanged(2, (Replica(R1, 0),)), now=3.0)) == []
    (again,) = said(turn(core, RelaysChanged(2, (Replica(R1, 0), Replica(EndpointID(203), 1))), now=4.0))
    old = next(change for change in before if change.uin == 7)
    assert (again.uin, again.connect_time) == (7, old.connect_time)
    assert again.id > old.id
