"""Big rooms in the gateway: users join a VRoom, get its copies, and see the RoomID (PiXiu §2.2.2)."""

from __future__ import annotations

from gateway import events as ev
from gateway.core import Core
from pixiu.ids import EndpointID
from pixiu.placement.big_rooms import VROOMS, VRooms, vrooms_of
from pixiu.wire.record import Kind, decode, encode, with_key
from tests.gateway.world import fan_out, turn, updates
from tests.support.filters import names, wants

BIG = 1000


def gateway() -> Core:
    core = Core(instance=3, generation=5, vrooms=VRooms(BIG, BIG + 10))
    core.step(ev.RoutersChanged(1, (ev.Replica(EndpointID(101), 0),)), 0.0)
    return core


def told(effects: list[ev.Effect]) -> list[tuple[int, int, bool]]:
    return [(update.group, update.member, update.login) for update in updates(effects)]


def copies(record: bytes, room: int = BIG) -> list[bytes]:
    return [with_key(record, vroom) for vroom in vrooms_of(room)]


def test_a_user_joins_and_leaves_the_vroom_of_the_user() -> None:
    core = gateway()
    assert told(turn(core, ev.Opened(1, 135, 3), ev.Join(1, 1, wants(BIG, 42)))) == [
        (BIG * VROOMS + 7, 135, True),
        (42, 135, True),
    ]
    assert told(turn(core, ev.Leave(1, names(BIG)))) == [(BIG * VROOMS + 7, 135, False)]


def test_leaving_by_closing_leaves_the_vroom() -> None:
    core = gateway()
    turn(core, ev.Opened(1, 64, 3), ev.Join(1, 1, wants(BIG)))
    assert told(turn(core, ev.Closed(1, 2))) == [(BIG * VROOMS, 64, False)]
    assert core.index.rooms == {}


def test_each_member_gets_one_copy_under_the_rooms_own_name() -> None:
    core = gateway()
    for connection, uin in enumerate(range(500, 700), 1):
        turn(core, ev.Opened(connection, uin, 3), ev.Join(connection, 1, wants(BIG)))
    delivered = fan_out(core, *copies(encode(Kind.ROOM, BIG, b"hello", 77)))
    assert sorted(number for deliver in delivered for number in deliver.connections) == list(range(1, 201))
    assert {deliver.data for deliver in delivered} == {b"0\x10\x00\x09room/1000hello"}
    assert core.counters.duplicates == 0


def test_the_same_message_again_is_dropped_for_each_vroom() -> None:
    core = gateway()
    turn(core, ev.Opened(1, 5, 3), ev.Join(1, 1, wants(BIG)), ev.Opened(2, 6, 3), ev.Join(2, 1, wants(BIG)))
    record = encode(Kind.ROOM, BIG, b"hello", 77)
    assert len(fan_out(core, copies(record)[5])) == 1
    assert fan_out(core, copies(record)[5]) == []
    assert [deliver.connections for deliver in fan_out(core, *copies(record))] == [(2,)]


def test_records_show_the_room_id() -> None:
    core = gateway()
    turn(core, ev.Opened(1, 9, 0), ev.Join(1, 1, wants(BIG + 3)), ev.Opened(2, 9, 0), ev.Join(2, 1, wants(42)))
    record = encode(Kind.ROOM, BIG + 3, b"hello", 77, sender=4)
    (deliver,) = fan_out(core, *copies(record, BIG + 3))
    assert (deliver.connections, deliver.data) == ((1,), record)
    ordinary = encode(Kind.ROOM, 42, b"hello", 78)
    (deliver,) = fan_out(core, ordinary)
    assert decode(deliver.data).key == 42


def test_a_room_next_to_the_range_is_an_ordinary_one() -> None:
    core = gateway()
    assert told(turn(core, ev.Opened(1, 135, 3), ev.Join(1, 1, wants(BIG + 10, BIG - 1)))) == [
        (BIG + 10, 135, True),
        (BIG - 1, 135, True),
    ]
