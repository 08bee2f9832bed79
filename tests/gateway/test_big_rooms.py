"""Big rooms in the gateway: users join a VRoom, get its copies, and see the RoomID (seed 004 §2.2.2)."""

from __future__ import annotations

from gateway.core import Core
from gateway.events import (
    Closed,
    Deliver,
    Effect,
    EndOfTurn,
    Event,
    Join,
    Leave,
    Opened,
    RecordsArrived,
    Replica,
    RoutersChanged,
    SendMembership,
)
from pixiu.ids import EndpointID
from pixiu.placement.big_rooms import VROOMS, VRooms, vrooms_of, with_key
from pixiu.wire.record import Kind, decode, encode

BIG = 1000


def gateway() -> Core:
    core = Core(instance=3, generation=5, vrooms=VRooms(BIG, BIG + 10))
    core.step(RoutersChanged(1, (Replica(EndpointID(101), 0),)), 0.0)
    return core


def turn(core: Core, *events: Event) -> list[Effect]:
    effects: list[Effect] = []
    for event in (*events, EndOfTurn()):
        effects += core.step(event, 1.0)
    return effects


def told(effects: list[Effect]) -> list[tuple[int, int, bool]]:
    return [(m.group, m.member, m.login) for effect in effects if isinstance(effect, SendMembership) for m in effect.messages]


def arrive(core: Core, *records: bytes) -> list[Deliver]:
    data = b"".join(records)
    assert core.records_arrived(RecordsArrived(data, 0, len(data), len(records)))
    return [effect for effect in core.step(EndOfTurn(), 2.0) if isinstance(effect, Deliver)]


def copies(record: bytes, room: int = BIG) -> list[bytes]:
    return [with_key(record, vroom) for vroom in vrooms_of(room)]


def test_a_user_joins_and_leaves_the_vroom_of_the_user() -> None:
    core = gateway()
    assert told(turn(core, Opened(1, 135, True), Join(1, 1, [(BIG, None), (42, None)]))) == [
        (BIG * VROOMS + 7, 135, True),
        (42, 135, True),
    ]
    assert told(turn(core, Leave(1, [(BIG, None)]))) == [(BIG * VROOMS + 7, 135, False)]


def test_leaving_by_closing_leaves_the_vroom() -> None:
    core = gateway()
    turn(core, Opened(1, 64, True), Join(1, 1, [(BIG, None)]))
    assert told(turn(core, Closed(1, 2))) == [(BIG * VROOMS, 64, False)]
    assert core.index.rooms == {}


def test_each_member_gets_one_copy_under_the_rooms_own_name() -> None:
    core = gateway()
    for connection, uin in enumerate(range(500, 700), 1):
        turn(core, Opened(connection, uin, True), Join(connection, 1, [(BIG, None)]))
    delivered = arrive(core, *copies(encode(Kind.ROOM, BIG, b"hello", 77)))
    assert sorted(number for deliver in delivered for number in deliver.connections) == list(range(1, 201))
    assert {deliver.data for deliver in delivered} == {b"0\x10\x00\x09room/1000hello"}
    assert core.counters.duplicates == 0


def test_the_same_message_again_is_dropped_for_each_vroom() -> None:
    core = gateway()
    turn(core, Opened(1, 5, True), Join(1, 1, [(BIG, None)]), Opened(2, 6, True), Join(2, 1, [(BIG, None)]))
    record = encode(Kind.ROOM, BIG, b"hello", 77)
    assert len(arrive(core, copies(record)[5])) == 1
    assert arrive(core, copies(record)[5]) == []
    assert [deliver.connections for deliver in arrive(core, *copies(record))] == [(2,)]


def test_records_show_the_room_id() -> None:
    core = gateway()
    turn(core, Opened(1, 9, False), Join(1, 1, [(BIG + 3, None)]), Opened(2, 9, False), Join(2, 1, [(42, None)]))
    record = encode(Kind.ROOM, BIG + 3, b"hello", 77, sender=4)
    (deliver,) = arrive(core, *copies(record, BIG + 3))
    assert (deliver.connections, deliver.data) == ((1,), record)
    ordinary = encode(Kind.ROOM, 42, b"hello", 78)
    (deliver,) = arrive(core, ordinary)
    assert decode(deliver.data).key == 42


def test_a_room_next_to_the_range_is_an_ordinary_one() -> None:
    core = gateway()
    assert told(turn(core, Opened(1, 135, True), Join(1, 1, [(BIG + 10, None), (BIG - 1, None)]))) == [
        (BIG + 10, 135, True),
        (BIG - 1, 135, True),
    ]
