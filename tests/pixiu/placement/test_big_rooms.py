"""Big rooms and their VRooms: PiXiu §2.2.2."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pixiu.ids import MAX_ID
from pixiu.placement.big_rooms import VROOMS, VRooms, vrooms_of
from pixiu.wire.record import Flag, Kind, crc_ok, decode, encode, with_key

BIG = VRooms(100, 110)


def test_a_user_of_a_big_room_is_in_one_of_its_64_vrooms() -> None:
    assert [BIG.room_of_user(100, uin) for uin in (0, 7, 63, 64, 135)] == [6400, 6407, 6463, 6400, 6407]
    assert {BIG.room_of_user(105, uin) for uin in range(1000)} == set(vrooms_of(105))
    assert len(vrooms_of(105)) == VROOMS


def test_other_rooms_are_what_they_are() -> None:
    for room in (1, 99, 110, 6399, 7040, 1 << 62):
        assert not BIG.is_big(room)
        assert not BIG.is_vroom(room)
        assert BIG.room_of_user(room, 7) == room
        assert BIG.shown(room) == room


def test_a_vroom_shows_its_room() -> None:
    assert [BIG.shown(vroom) for vroom in (6400, 6463, 6464, 7039)] == [100, 100, 101, 109]
    assert all(BIG.is_vroom(vroom) and not BIG.is_big(vroom) for vroom in vrooms_of(109))


def test_a_cluster_without_big_rooms_has_none() -> None:
    assert not any(VRooms().is_big(room) or VRooms().is_vroom(room) for room in (0, 1, 64, 1 << 62))


@given(st.binary(max_size=200), st.integers(0, MAX_ID), st.integers(0, MAX_ID), st.sampled_from([0, Flag.TRACED]))
def test_a_copy_differs_in_its_key_alone(body: bytes, key: int, other: int, flags: int) -> None:
    record = encode(Kind.ROOM, key, body, 77, sender=5, flags=flags, extension=b"{}")
    copy = with_key(record, other)
    assert crc_ok(copy)
    assert decode(copy) == decode(record)._replace(key=other)
    assert with_key(copy, key) == record
