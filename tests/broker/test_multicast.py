"""Rooms' messages through relays: lists of users before the record, one relay a partition, taken apart again."""

from __future__ import annotations

import pytest

from broker.fanout import Routed
from broker.multicast import AddressedFanout, Relays, Way
from cluster.core.contract import SendRecords
from cluster.core.parcels import Target
from cluster.membership.events import Effect
from pixiu.ids import EndpointID
from pixiu.wire.record import HEADER_SIZE, ROUTE, Flag, Kind, encode
from pixiu.wire.trace import Hop, Stamp, Tracer, as_traced, stamps_of
from pixiu.wire.uin_list import MAX_UINS, OVERHEAD, address, take_apart, uin_list

EVEN, ODD, SPARE = EndpointID(1), EndpointID(2), EndpointID(3)


def room(key: int, number: int, lane: int = 1, kind: Kind = Kind.ROOM) -> bytes:
    return encode(kind, key, b"hello", number, flags=Flag.TO_ROOM, type=lane << 6)


def test_a_record_is_taken_out_as_it_was_put_in() -> None:
    record = room(42, 7, lane=0)
    data = b"before" + address(record, uin_list([5, 1 << 62])) + b"after"
    assert take_apart(data, 6, len(data) - 5) == ((5, 1 << 62), record)
    size, kind, flags, type_, number, key = ROUTE.unpack_from(data, 6)
    assert (size + 4, kind, flags, type_ >> 6, number, key) == (len(data) - 11, Kind.ADDRESSED, 0, 0, 7, 42)
    assert len(address(record, uin_list(range(MAX_UINS)))) == OVERHEAD + len(record)


@pytest.mark.parametrize("cut", [10, HEADER_SIZE, HEADER_SIZE + 4, HEADER_SIZE + 20, -1])
def test_what_is_cut_short_is_malformed(cut: int) -> None:
    data = address(room(42, 7), uin_list([5]))[:cut]
    assert take_apart(data, 0, len(data)) is None


@pytest.mark.parametrize(
    "data",
    [
        address(room(42, 7), uin_list([])),
        address(room(42, 7), uin_list(range(MAX_UINS + 1))),
        address(encode(Kind.CHAT, 42, b"", 7), uin_list([5])),
        address(address(room(42, 7), uin_list([5])), uin_list([5])),
        address(room(42, 7), (1 << 31).to_bytes(4, "little") + bytes(8)),
    ],
)
def test_what_no_broker_sends_is_malformed(data: bytes) -> None:
    assert take_apart(data, 0, len(data)) is None


def fanout(members: dict[int, list[int]], relays: Relays) -> AddressedFanout:
    def ways(key: int) -> tuple[Way, ...]:
        return relays.ways(key, members.get(key, []))

    return AddressedFanout(ways, lambda key: key < 1000, lambda key: Target(SPARE) if key < 2000 else None)


def two_partitions() -> Relays:
    relays = Relays()
    relays.change(2, [(EVEN, 0), (ODD, 1)])
    return relays


def route(made: AddressedFanout, data: bytes, count: int = 1) -> tuple[Routed, list[SendRecords]]:
    out: list[Effect] = []
    routed = made.route(data, 0, len(data), count, out)
    return routed, [effect for effect in out if isinstance(effect, SendRecords)]


def sent(
    made: AddressedFanout, data: bytes, count: int = 1
) -> dict[tuple[EndpointID, int], list[tuple[tuple[int, ...], bytes] | None]]:
    routed, parcels = route(made, data, count)
    assert routed is Routed.TAKEN
    assert settle(made, *(parcel.token for parcel in parcels)) == []
    return {(p.peer, p.lane): [take_apart(r, 0, len(r)) for r in p.records] for p in parcels}


def test_each_partition_of_users_gets_one_copy_with_its_users() -> None:
    made = fanout({42: [2, 3, 4, 2], 43: [5]}, two_partitions())
    first, second, urgent = room(42, 1), room(43, 2), room(42, 3, lane=0)
    data = first + second + urgent
    assert sent(made, data, 3) == {
        (EVEN, 0): [((2, 4), urgent)],
        (EVEN, 1): [((2, 4), first)],
        (ODD, 0): [((3,), urgent)],
        (ODD, 1): [((3,), first), ((5,), second)],
    }


def test_many_members_take_several_lists() -> None:
    relays = Relays()
    relays.change(1, [(EVEN, 0)])
    made = fanout({42: list(range(1, 2 * MAX_UINS + 2))}, relays)
    found = sent(made, room(42, 1))
    assert [len(one[0]) for one in found[EVEN, 1] if one] == [MAX_UINS, MAX_UINS, 1]


def test_lists_are_kept_until_members_or_relays_change() -> None:
    members, relays = {42: [2]}, two_partitions()
    made, record = fanout(members, relays), room(42, 1)
    for expected in ([2], [2]):
        assert sent(made, record) == {(EVEN, 1): [((expected[0],), record)]}
        members[42] = [4]
    made.forget([42])
    assert sent(made, record) == {(EVEN, 1): [((4,), record)]}
    relays.change(1, [(SPARE, 0)])
    made.forget_all()
    assert sent(made, record) == {(SPARE, 1): [((4,), record)]}


def test_users_without_a_relay_are_left_out_and_counted() -> None:
    relays = Relays()
    relays.change(2, [(EVEN, 0)])
    made, record = fanout({42: [2, 3]}, relays), room(42, 1)
    assert sent(made, record) == {(EVEN, 1): [((2,), record)]}
    assert relays.lacking == 1


def test_other_partitions_rooms_are_passed_on_as_they_are_and_nonsense_is_counted() -> None:
    made = fanout({}, two_partitions())
    moved, lost, chat = room(1500, 1), room(2500, 2), encode(Kind.CHAT, 42, b"", 3)
    data = moved + lost + chat + room(42, 4)
    routed, parcels = route(made, data, 4)
    assert ([(p.peer, p.records) for p in parcels], routed) == ([(SPARE, [moved])], Routed.UNROUTABLE)
    assert route(made, moved)[0] is Routed.PASSED_ON
    counters = made.counters
    assert (counters.records_unroutable, counters.records_wrong_kind, counters.records_without_members) == (1, 1, 1)
    assert route(made, data[:-1], 4) == (Routed.MALFORMED, [])
    assert counters.batches_malformed == 1


def settle(made: AddressedFanout, *tokens: int) -> list[tuple[EndpointID, bytes]]:
    """The records that leave because these parcels were handled."""
    out: list[Effect] = []
    made.settled([(token, True) for token in tokens], out)
    return [(p.peer, inside(r)) for p in out if isinstance(p, SendRecords) for r in p.records]


def inside(record: bytes) -> bytes:
    found = take_apart(record, 0, len(record))
    assert found is not None
    return found[1]


def test_a_message_by_a_new_way_waits_for_those_before_it_and_no_other_room_does() -> None:
    """A gateway that both ways lead to would give the second to its clients before the first."""
    members = {42: [2], 43: [5]}
    made = fanout(members, two_partitions())
    first, second, third, other = room(42, 1), room(42, 2), room(42, 3), room(43, 4)
    _, (parcel,) = route(made, first)
    members[42] = [2, 3]
    made.forget([42])
    _, (elsewhere,) = route(made, second + other, 2)
    assert (elsewhere.peer, inside(elsewhere.records[0])) == (ODD, other)
    members[42] = [2, 3, 4]
    made.forget([42, 44])
    assert route(made, third) == (Routed.TAKEN, [])
    assert settle(made, elsewhere.token) == []
    assert settle(made, parcel.token) == [(EVEN, second), (EVEN, third), (ODD, second), (ODD, third)]
    _, parcels = route(made, first)
    assert [p.peer for p in parcels] == [EVEN, ODD]
    counters = made.counters
    assert (counters.records_in, counters.copies_out) == (5, 8)


def test_a_change_of_members_while_nothing_is_under_way_delays_nothing() -> None:
    members = {42: [2]}
    made = fanout(members, two_partitions())
    _, (parcel,) = route(made, room(42, 1))
    assert settle(made, parcel.token) == []
    members[42] = [2, 3]
    made.forget([42])
    assert len(route(made, room(42, 2))[1]) == 2


def test_when_relays_change_every_room_waits_but_signals_do_not() -> None:
    relays = two_partitions()
    made = fanout({42: [2], 43: [5]}, relays)
    _, parcels = route(made, room(42, 1) + room(43, 2), 2)
    relays.change(2, [(SPARE, 0), (ODD, 1)])
    made.forget_all()
    assert route(made, room(42, 3) + room(43, 4), 2) == (Routed.TAKEN, [])
    _, (urgent,) = route(made, room(42, 5, kind=Kind.SIGNAL))
    assert urgent.peer == SPARE
    assert settle(made, parcels[0].token) == []
    assert settle(made, parcels[1].token) == [(SPARE, room(42, 3)), (ODD, room(43, 4))]


def test_of_a_malformed_batch_nothing_waits_and_too_much_that_waits_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    members = {42: [2]}
    made = fanout(members, two_partitions())
    route(made, room(42, 1))
    made.forget([42])
    assert route(made, room(42, 2)) == (Routed.TAKEN, [])
    assert route(made, room(42, 3) + b"nonsense", 2) == (Routed.MALFORMED, [])
    monkeypatch.setattr("broker.barriers.MAX_WAITING_RECORDS", 1)
    _, (parcel,) = route(made, room(42, 4))
    assert [inside(record) for record in parcel.records] == [room(42, 2), room(42, 4)]


def test_a_traced_record_is_stamped_inside_its_list_of_users() -> None:
    relay = Target(EndpointID(7))
    tracer = Tracer(Hop.BROKER, lambda: 100, replica=lambda: 6)
    fanout = AddressedFanout(lambda _: ((relay, uin_list([5])),), lambda _: True, lambda _: None, tracer)
    plain = encode(Kind.ROOM, 42, b"hello", 1, flags=Flag.TO_ROOM)
    batch = plain + as_traced(plain)
    _, (parcel,) = route(fanout, batch, 2)
    first, second = (take_apart(record, 0, len(record)) for record in parcel.records)
    assert first is not None
    assert second is not None
    assert first[1] == plain
    assert stamps_of(second[1]) == [Stamp(Hop.BROKER, 0, 6, 100, 100)]
