"""Items of up to sixteen datagrams: each fragment in a datagram of its own, the item handled when all are there."""

from __future__ import annotations

from itertools import permutations

import pytest

from cluster.links.datagrams.fragments import HELD_S, MAX_FRAGMENTS, MAX_GIVEN_UP, MAX_HELD_BYTES, Reassembly, cut
from cluster.links.datagrams.head import RECORD_FRAGMENT, DatagramRefusal
from pixiu.ids import EndpointID
from tests.cluster.links.test_switch import pair
from tests.cluster.links.world import World, make_record

ALICE, BOB = EndpointID(1), EndpointID(2)
ITEM = bytes(range(256)) * 10


def take(held: Reassembly, parts: list[bytes], at: int, sequence: int = 100, now: float = 0.0) -> bytes | str | None:
    return held.take(ALICE, RECORD_FRAGMENT, sequence + at, len(parts), parts[at], now)


def test_an_item_is_whole_when_its_last_fragment_came_in_any_order() -> None:
    parts = cut(ITEM, 1000)
    assert [len(part) for part in parts] == [1000, 1000, 566]
    for order in permutations(range(3)):
        held = Reassembly()
        assert [take(held, parts, at) for at in order] == [None, None, ITEM]


def test_items_of_several_senders_and_types_are_kept_apart() -> None:
    parts, held = cut(ITEM, 1000), Reassembly()
    keys = [(sender, type_) for sender in (ALICE, BOB) for type_ in (5, 6)]
    for at in range(3):
        found = [held.take(sender, type_, 7 + at, 3, parts[at], 0.0) for sender, type_ in keys]
        assert found == [ITEM if at == 2 else None] * 4


@pytest.mark.parametrize(
    ("sequence", "count", "body"),
    [
        (5, 1, b"\0\0x"),
        (5, 0, b"\0\0x"),
        (50, MAX_FRAGMENTS + 1, b"\0\0x"),
        (5, 2, b"\2\0x"),
        (5, 2, b"\0\0"),
        (1, 2, b"\1\0x"),
    ],
)
def test_a_malformed_fragment_is_refused(sequence: int, count: int, body: bytes) -> None:
    held = Reassembly()
    assert held.take(ALICE, RECORD_FRAGMENT, sequence, count, body, 0.0) == DatagramRefusal.MALFORMED_FRAGMENT


def test_a_fragment_that_names_another_count_is_refused() -> None:
    parts, held = cut(ITEM, 1000), Reassembly()
    take(held, parts, 0)
    assert held.take(ALICE, RECORD_FRAGMENT, 101, 4, parts[1], 0.0) == DatagramRefusal.MALFORMED_FRAGMENT


def test_unfinished_items_are_given_up_after_a_while() -> None:
    parts, held = cut(ITEM, 1000), Reassembly()
    take(held, parts, 0)
    take(held, parts, 0, sequence=200, now=HELD_S)
    assert held.given_up == 1


def test_late_fragments_of_an_item_that_was_given_up_are_refused() -> None:
    """They must not make a new item that is never whole: with all fragments acknowledged its sender would believe it handled."""
    parts, held = cut(ITEM, 1000), Reassembly()
    assert [take(held, parts, at) for at in (0, 1)] == [None, None]
    take(held, parts, 0, sequence=200, now=HELD_S)
    assert take(held, parts, 2, now=HELD_S) == DatagramRefusal.LATE_FRAGMENT
    assert take(held, parts, 2, now=2 * HELD_S) is None, "by then its sender has given it up"


def test_what_was_given_up_is_remembered_up_to_a_number() -> None:
    held, part = Reassembly(), b"\0\0x"
    for sequence in range(1, MAX_GIVEN_UP + 3):
        held.take(ALICE, RECORD_FRAGMENT, sequence, 2, part, 0.0)
    held.take(BOB, RECORD_FRAGMENT, 1, 2, part, HELD_S)
    assert held.given_up == MAX_GIVEN_UP + 2
    found = [held.take(ALICE, RECORD_FRAGMENT, sequence + 1, 2, b"\1\0x", HELD_S) for sequence in (1, 2, 3, MAX_GIVEN_UP + 2)]
    assert found == [None, None, DatagramRefusal.LATE_FRAGMENT, DatagramRefusal.LATE_FRAGMENT]


def test_unfinished_items_are_bounded_in_bytes() -> None:
    held, part = Reassembly(), b"\0\0" + bytes(60_000)
    for sequence in range(1, 1000):
        held.take(ALICE, RECORD_FRAGMENT, sequence, 2, part, 0.0)
    kept = 999 - held.given_up
    assert MAX_HELD_BYTES - 120_000 < kept * 60_000 <= MAX_HELD_BYTES + 60_000
    assert held.take(ALICE, RECORD_FRAGMENT, 1000, 2, b"\1\0x", 0.0) == part[2:] + b"x", "the newest are kept"


def test_a_record_of_several_datagrams_needs_no_stream_and_overtakes_nothing(world: World) -> None:
    alice, bob, _ = pair(world)
    sizes = {1: 140, 2: 20_000, 3: 140, 4: 130_000, 5: 140}
    alice.send(bob, [make_record(number, size) for number, size in sizes.items()], token=1)
    world.advance(0.1)
    assert bob.handler.records == [make_record(number, size) for number, size in sizes.items()]
    assert alice.handler.settled == [(1, True)]
    assert alice.core.outputs.streams == []
    for counts in (alice.core.stats().total.records_sent, bob.core.stats().total.records_received):
        assert counts == 5


def test_a_control_message_of_several_datagrams_arrives_in_order(world: World) -> None:
    alice, bob, _ = pair(world)
    alice.control(bob, [b"a", b"b" * 50_000, b"c"], token=1)
    world.settle()
    assert bob.handler.control == [b"a", b"b" * 50_000, b"c"]
    assert alice.handler.settled == [(1, True)]


def test_a_lost_fragment_loses_its_record_and_no_other(world: World) -> None:
    alice, bob, _ = pair(world)
    for token, size in ((1, 20_000), (2, 20_000), (3, 140)):
        alice.send(bob, [make_record(token, size)], token=token)
    alice.turn()
    assert [data[3] for data, _ in alice.sent] == [5] * 6 + [1]
    del alice.sent[4]
    world.settle()
    world.advance(1.5)
    assert bob.handler.keys() == [1, 3]
    assert sorted(alice.handler.settled) == [(1, True), (2, False), (3, True)]
    assert bob.core.stats().total.lost == 1


def test_a_record_whose_last_fragment_comes_late_is_handled_late(world: World) -> None:
    alice, bob, _ = pair(world)
    alice.send(bob, [make_record(1, 20_000), make_record(2)], token=1)
    alice.turn()
    late = alice.sent.pop(1)
    world.deliver()
    assert bob.handler.keys() == [2]
    alice.sent.append(late)
    world.settle()
    assert bob.handler.keys() == [2, 1]
    assert alice.handler.settled == [(1, False)], "it was acknowledged as missing before"


def test_a_record_that_the_role_refuses_settles_as_not_handled(world: World) -> None:
    alice, bob, _ = pair(world)
    bob.handler.accept = False
    alice.send(bob, [make_record(1, 20_000)], token=1)
    world.settle()
    assert alice.handler.settled == [(1, False)]
    assert bob.core.stats().refused == {"malformed_records": 1}
