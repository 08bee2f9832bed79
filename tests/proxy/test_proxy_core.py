"""The proxy's core: routing, replies in order, failures, malformed batches, order across a change."""

from __future__ import annotations

from cluster.core.contract import NEVER, Settle, Tick
from cluster.links.api import Outcome
from pixiu.ids import EndpointID
from pixiu.placement.partition import rendezvous
from pixiu.wire.record import Flag, Kind, encode
from proxy import events as ev
from proxy.core import CHECKED_RECORDS, Core
from tests.proxy.driver import failures, forward, publish, replies, sends, settle

A, B, C = EndpointID(1001), EndpointID(1002), EndpointID(1003)
BROKERS = ev.BrokersChanged(2, (ev.Replica(A, 0), ev.Replica(B, 1)))


def room(key: int, number: int, type: int = 64) -> bytes:
    return encode(Kind.ROOM, key, b"payload", number, type=type)


def core_with(brokers: ev.BrokersChanged = BROKERS) -> Core:
    core = Core(max_record_bytes=1000)
    core.step(brokers, 0.0)
    core.step(ev.PublisherOpened(1), 0.0)
    return core


def test_records_go_to_the_partition_of_their_key_in_order() -> None:
    records = [room(key, number) for number, key in enumerate([4, 5, 6, 7, 4], 1)]
    made = {send.peer: send.records for send in sends(publish(core_with(), records))}
    assert made == {A: [records[0], records[2], records[4]], B: [records[1], records[3]]}


def test_inside_a_partition_rendezvous_hashing_names_the_replica() -> None:
    core = core_with(ev.BrokersChanged(1, (ev.Replica(A, 0), ev.Replica(B, 0), ev.Replica(C, 0))))
    for key in range(1, 50):
        (send,) = sends(publish(core, [room(key, key)], key))
        assert send.peer == rendezvous(key, [A, B, C])


def test_a_doubted_replica_is_chosen_only_when_there_is_no_other() -> None:
    core = core_with(ev.BrokersChanged(1, (ev.Replica(A, 0, usable=False), ev.Replica(B, 0))))
    assert {send.peer for key in range(1, 30) for send in sends(publish(core, [room(key, key)], key))} == {B}
    core = core_with(ev.BrokersChanged(1, (ev.Replica(A, 0, usable=False),)))
    assert sends(publish(core, [room(1, 1)]))[0].peer == A


def test_a_proxy_that_has_just_started_says_when_to_try_again() -> None:
    (reply,) = publish(core_with(ev.BrokersChanged(0, ())), [room(4, 1), room(5, 2)])
    assert isinstance(reply, ev.Reply)
    (failure,) = reply.failures
    assert (failure.first, failure.last, failure.code) == (1, 2, "UNAVAILABLE")
    assert failure.retry_after_ms > 0


def test_the_first_lane_has_a_parcel_of_its_own() -> None:
    effects = publish(core_with(), [room(4, 1), room(4, 2, type=0)])
    assert [(send.lane, len(send.records)) for send in sends(effects)] == [(0, 1), (1, 1)]


def test_a_position_is_resolved_when_every_broker_has_handled_the_batch() -> None:
    core = core_with()
    first, second = sends(publish(core, [room(4, 1), room(5, 2)]))
    assert settle(core, [first], 0.1) == []
    assert settle(core, [second], 0.2) == [ev.Reply(1, 2, [])]
    assert core.under_way == 0


def test_what_a_publisher_says_will_be_followed_by_more_may_wait() -> None:
    core = core_with()
    for position, more in ((1, True), (2, False)):
        (send,) = sends(core.step(ev.BatchPublished(1, room(4, position), 1, position, more=more), 0.0))
        assert (send.urgent, send.more) == (True, more)


def test_replies_keep_the_order_of_the_stream() -> None:
    core = core_with()
    (first,) = sends(publish(core, [room(4, 1)], 1))
    (second,) = sends(publish(core, [room(5, 2)], 2))
    assert settle(core, [second], 0.1) == []
    assert settle(core, [first], 0.2) == [ev.Reply(1, 2, [])]


def test_what_a_broker_did_not_confirm_is_named() -> None:
    core = core_with()
    first, second = sends(publish(core, [room(4, 1), room(4, 2), room(5, 3), room(4, 4)]))
    settle(core, [second], 0.1)
    (reply,) = settle(core, [first], 0.2, handled=False)
    assert isinstance(reply, ev.Reply)
    assert [(failure.first, failure.last, failure.code) for failure in reply.failures] == [(1, 2, "DROPPED"), (4, 4, "DROPPED")]


def test_refusals_are_told_at_once_and_do_not_hold_the_others() -> None:
    core = core_with(ev.BrokersChanged(2, (ev.Replica(A, 0),)))
    effects = publish(core, [room(4, 1), room(5, 2), encode(Kind.MAIL, 4, b"", 3), encode(Kind.ROOM, 4, b"x" * 2000, 4)])
    (send,) = sends(effects)
    assert send.records == [room(4, 1)]
    (reply,) = settle(core, [send], 0.1)
    assert isinstance(reply, ev.Reply)
    assert [(failure.first, failure.code) for failure in reply.failures] == [
        (2, "UNAVAILABLE"),
        (3, "INVALID_ARGUMENT"),
        (4, "RECORD_TOO_LARGE"),
    ]
    assert "partition 1" in reply.failures[0].text


def test_a_signal_to_a_room_is_taken() -> None:
    made = encode(Kind.SIGNAL, 4, b"", 3, flags=Flag.TO_ROOM)
    assert sends(publish(core_with(), [made]))[0].records == [made]


def test_a_malformed_batch_is_dropped_whole() -> None:
    core = core_with()
    batch = room(4, 1) + room(5, 2)
    for data, count in [(batch[:-1], 2), (batch + b"x", 2), (batch, 3), (batch, 1), (b"\xff" * 90, 2), (bytes(90), 1)]:
        effects = core.step(ev.BatchPublished(1, data, count, 1), 0.0)
        assert sends(effects) == []
        assert isinstance(effects[-1], ev.Reply)
        assert effects[-1].failures[0].code == "MALFORMED"
        assert forward(core, data, count) == [Settle(Outcome.MALFORMED)]
    assert sends(publish(core, [room(4, 9)]))[0].records == [room(4, 9)]


def test_nobody_is_number_0() -> None:
    core = core_with()
    wrong = [room(0, 1), encode(Kind.CHAT, 0, b"", 2), encode(Kind.SIGNAL, 0, b"", 3, flags=Flag.TO_ROOM)]
    effects = publish(core, [*wrong, room(4, 4)])
    (send,) = sends(effects)
    assert send.records == [room(4, 4)]
    (reply,) = settle(core, [send], 0.1)
    assert isinstance(reply, ev.Reply)
    assert [(failure.first, failure.last, failure.code) for failure in reply.failures] == [(1, 3, "INVALID_ARGUMENT")]
    assert "RoomID" in reply.failures[0].text


def test_a_wrong_crc_at_the_beginning_of_a_stream_is_refused_and_not_accepted() -> None:
    core = core_with()
    damaged = bytearray(room(4, 2))
    damaged[12] ^= 1
    effects = publish(core, [room(4, 1), bytes(damaged), room(5, 3)])
    assert sends(effects) == []
    (reply,) = effects
    assert isinstance(reply, ev.Reply)
    assert [(failure.first, failure.last, failure.code) for failure in reply.failures] == [(1, 3, "CHECKSUM_WRONG")]
    assert "record 2" in reply.failures[0].text
    traced = encode(Kind.ROOM, 4, b"x", 5, type=64, extension=b"{}")
    assert sends(publish(core, [traced], position=4))[0].records == [traced]
    assert sends(publish(core, [bytes(damaged)], position=CHECKED_RECORDS + 1)), "later ones are not looked at"


def test_records_from_a_gateway_need_no_reply() -> None:
    core = core_with()
    (send,) = sends(forward(core, b"??" + room(4, 1), start=2))
    assert settle(core, [send], 0.1, handled=False) == []
    assert core.counters.records_dropped == 1


def test_a_closed_publisher_is_not_answered() -> None:
    core = core_with()
    (send,) = sends(publish(core, [room(4, 1)]))
    core.step(ev.PublisherClosed(1), 0.1)
    assert settle(core, [send], 0.2) == []
    assert publish(core, [room(4, 2)]) == []


def test_a_joining_replica_gets_its_rooms_only_after_the_old_one_has_handled_what_it_got() -> None:
    core = core_with(ev.BrokersChanged(1, (ev.Replica(A, 0),)))
    moving = next(key for key in range(1, 100) if rendezvous(key, [A, B]) == B)
    (before,) = sends(publish(core, [room(moving, 1)], 1))
    core.step(ev.BrokersChanged(1, (ev.Replica(A, 0), ev.Replica(B, 0))), 0.1)
    assert publish(core, [room(moving, 2)], 2, now=0.1) == []
    effects = settle(core, [before], 0.15)
    assert [(send.peer, send.records) for send in sends(effects)] == [(B, [room(moving, 2)])]


def test_a_change_does_not_wait_for_ever_nor_for_the_dead() -> None:
    core = core_with(ev.BrokersChanged(1, (ev.Replica(A, 0),)))
    moving = next(key for key in range(1, 100) if rendezvous(key, [A, B]) == B)
    publish(core, [room(moving, 1)], 1)
    core.step(ev.BrokersChanged(1, (ev.Replica(A, 0), ev.Replica(B, 0))), 1.0)
    assert publish(core, [room(moving, 2)], 2, now=1.0) == []
    deadline = core.next_deadline()
    assert deadline != NEVER
    assert len(sends(core.step(Tick(), deadline))) == 1
    core.step(ev.BrokersChanged(1, (ev.Replica(C, 0),)), 2.0)
    assert sends(publish(core, [room(4, 3)], 3, now=2.0))[0].peer == C


def keys_of(*replicas: EndpointID) -> dict[EndpointID, int]:
    """A key for each of these replicas."""
    return {replica: next(key for key in range(2, 1000, 2) if rendezvous(key, replicas) == replica) for replica in replicas}


def test_the_same_view_again_holds_nothing() -> None:
    """A gateway that comes or goes is a view of the registry too."""
    core = core_with(ev.BrokersChanged(1, (ev.Replica(A, 0),)))
    publish(core, [room(4, 1)], 1)
    core.step(ev.BrokersChanged(1, (ev.Replica(A, 0),)), 0.1)
    core.step(ev.RelaysChanged(0, ()), 0.1)
    assert [send.peer for send in sends(publish(core, [room(4, 2)], 2, now=0.1))] == [A]
    assert core.counters.batches_held == 0


def test_a_joining_replica_holds_only_the_rooms_that_it_takes() -> None:
    core = core_with(ev.BrokersChanged(1, (ev.Replica(A, 0), ev.Replica(B, 0))))
    stays, moves = keys_of(A, B, C)[A], keys_of(A, B, C)[C]
    before = sends(publish(core, [room(key, key) for key in (stays, moves)], 1))
    core.step(ev.BrokersChanged(1, (ev.Replica(A, 0), ev.Replica(B, 0), ev.Replica(C, 0))), 0.1)
    mixed = publish(core, [room(stays, 1001), room(moves, 1002)], 3, now=0.1)
    assert [(send.peer, send.records) for send in sends(mixed)] == [(A, [room(stays, 1001)])]
    again = publish(core, [room(moves, 1003)], 5, now=0.1)
    assert again == []
    released = settle(core, before, 0.15)
    assert [(send.peer, send.records) for send in sends(released)] == [(C, [room(moves, 1002)]), (C, [room(moves, 1003)])]
    effects = settle(core, [*sends(mixed), *sends(released)], 0.2)
    assert [reply.up_to for reply in (*replies(released), *replies(effects))] == [2, 5], "positions resolve in order"


def test_a_change_in_one_partition_holds_nothing_in_another() -> None:
    core = core_with(BROKERS)
    publish(core, [room(4, 1), room(5, 2)], 1)
    core.step(ev.BrokersChanged(2, (ev.Replica(A, 0), ev.Replica(B, 1), ev.Replica(C, 0))), 0.1)
    assert [send.peer for send in sends(publish(core, [room(5, 3)], 3, now=0.1))] == [B]


def test_a_replica_that_is_doubted_is_not_waited_for() -> None:
    core = core_with(ev.BrokersChanged(1, (ev.Replica(A, 0), ev.Replica(B, 0))))
    keys = keys_of(A, B)
    publish(core, [room(keys[A], 1), room(keys[B], 2)], 1)
    core.step(ev.BrokersChanged(1, (ev.Replica(A, 0, usable=False), ev.Replica(B, 0))), 0.1)
    found = sends(publish(core, [room(keys[A], 3), room(keys[B], 4)], 3, now=0.1))
    assert [(send.peer, len(send.records)) for send in found] == [(B, 2)]


def test_a_change_of_relays_holds_no_rooms() -> None:
    core = core_with(ev.BrokersChanged(1, (ev.Replica(A, 0),)))
    core.step(ev.RelaysChanged(1, (ev.Replica(C, 0),)), 0.0)
    publish(core, [room(4, 1), encode(Kind.CHAT, 4, b"x", 2)], 1)
    core.step(ev.RelaysChanged(1, (ev.Replica(B, 0),)), 0.1)
    assert [send.peer for send in sends(publish(core, [room(4, 3)], 3, now=0.1))] == [A]


def test_a_second_change_while_the_first_one_waits_keeps_the_order() -> None:
    core = core_with(ev.BrokersChanged(1, (ev.Replica(A, 0),)))
    moves = next(key for key in range(1, 1000) if (rendezvous(key, [A, B]), rendezvous(key, [A, B, C])) == (B, C))
    before = sends(publish(core, [room(moves, 1)], 1))
    core.step(ev.BrokersChanged(1, (ev.Replica(A, 0), ev.Replica(B, 0))), 0.1)
    assert publish(core, [room(moves, 2)], 2, now=0.1) == []
    core.step(ev.BrokersChanged(1, (ev.Replica(A, 0), ev.Replica(B, 0), ev.Replica(C, 0))), 0.11)
    assert publish(core, [room(moves, 3)], 3, now=0.12) == [], "although it would not move from B"
    released = sends(settle(core, before, 0.15))
    assert [(send.peer, send.records) for send in released] == [(C, [room(moves, 2)]), (C, [room(moves, 3)])]


def test_what_waited_is_refused_when_its_partition_has_gone() -> None:
    core = core_with(ev.BrokersChanged(1, (ev.Replica(A, 0),)))
    moves = keys_of(A, B)[B]
    (before,) = sends(publish(core, [room(moves, 1)], 1))
    core.step(ev.BrokersChanged(1, (ev.Replica(A, 0), ev.Replica(B, 0))), 0.1)
    publish(core, [room(moves, 2)], 2, now=0.1)
    effects = core.step(ev.BrokersChanged(1, ()), 0.11)
    assert failures(effects) == []
    assert failures(settle(core, [before], 0.12)) == [(2, 2, "UNAVAILABLE")]


def weighted(weight: float) -> ev.BrokersChanged:
    return ev.BrokersChanged(1, (ev.Replica(A, 0), ev.Replica(B, 0, weight=weight)))


def test_a_replica_of_less_weight_gets_fewer_rooms_and_only_those_move() -> None:
    before, after = core_with(weighted(1.0)), core_with(weighted(0.25))
    moved = {}
    for key in range(1, 2000):
        (one,), (other,) = (sends(publish(core, [room(key, key)], key)) for core in (before, after))
        if one.peer != other.peer:
            moved[key] = one.peer, other.peer
    assert set(moved.values()) == {(B, A)}
    assert 500 < len(moved) < 700, "it had a half, and has a fifth"


def test_a_change_of_weight_waits_for_what_is_under_way() -> None:
    core = core_with(weighted(1.0))
    key = next(
        key
        for key in range(1, 100)
        if rendezvous(key, [A, B]) == B and sends(publish(core_with(weighted(0.25)), [room(key, 1)]))[0].peer == A
    )
    (first,) = sends(publish(core, [room(key, 1)]))
    assert first.peer == B
    core.step(weighted(0.25), 0.0)
    assert sends(publish(core, [room(key, 2)], 2)) == []
    assert [send.peer for send in sends(settle(core, [first], 0.01))] == [A]


def test_a_doubted_replica_is_not_chosen_whatever_it_weighs() -> None:
    replicas = ev.Replica(A, 0, usable=False), ev.Replica(B, 0, weight=0.25), ev.Replica(C, 0, weight=0.5)
    core = core_with(ev.BrokersChanged(1, replicas))
    assert {send.peer for key in range(1, 60) for send in sends(publish(core, [room(key, key)], key))} == {B, C}
