"""The gateway's core: presence until it is confirmed, fan-out, dedupe, publishing."""

from __future__ import annotations

import pytest

from cluster.core.contract import SendRecords, Settled, Tick
from cluster.links.api import Outcome
from gateway import events as ev
from gateway.core import Core
from gateway.delivery.dedupe import Dedupe
from pixiu.ids import EndpointID, gateway_generation, gateway_instance, snowflake, topic_room
from pixiu.wire.record import Flag, Kind, encode, with_topic
from tests.gateway.world import arrive, fan_out, hand_over, memberships, of, turn
from tests.support.filters import names, wants

R1, R2, P1, P2 = EndpointID(101), EndpointID(102), EndpointID(201), EndpointID(202)


def gateway(replicas: tuple[ev.Replica, ...] = (ev.Replica(R1, 0),), partitions: int = 1) -> Core:
    core = Core(instance=3, generation=5)
    core.step(ev.RoutersChanged(partitions, replicas), 0.0)
    core.step(ev.ProxiesChanged((ev.Replica(P1, 0), ev.Replica(P2, 0))), 0.0)
    return core


def room(key: int, number: int, body: bytes = b"hi") -> bytes:
    return encode(Kind.ROOM, key, body, number)


def joined(core: Core, connection: int, uin: int, key: int, packets: bool = True) -> None:
    (send,) = memberships(turn(core, ev.Opened(connection, uin, 3 * packets), ev.Join(connection, 1, wants(key))))
    core.step(Settled([(send.token, True)]), 1.0)
    assert core.step(ev.Confirmed(send.peer, [m.id for m in send.messages]), 1.0) == [ev.Answer(connection, 1, True)]


def test_a_first_join_is_told_to_the_router_and_answered_when_it_is_confirmed() -> None:
    core = gateway()
    effects = turn(core, ev.Opened(1, 7, 3), ev.Join(1, 99, wants(42)))
    (send,) = memberships(effects)
    (message,) = send.messages
    assert (send.peer, message.group, message.member, message.login) == (R1, 42, 7, True)
    assert (gateway_instance(message.id), gateway_generation(message.id)) == (3, 5)
    assert core.step(ev.Confirmed(R1, [message.id]), 1.1) == [ev.Answer(1, 99, True)]
    assert core.rooms.unconfirmed == 0


def test_a_second_connection_of_the_user_joins_without_a_message() -> None:
    core = gateway()
    joined(core, 1, 7, 42)
    effects = turn(core, ev.Opened(2, 7, 3), ev.Join(2, 5, wants(42)))
    assert effects == [ev.Answer(2, 5, True)]
    assert memberships(turn(core, ev.Closed(1, 2))) == []
    (send,) = memberships(turn(core, ev.Closed(2, 2)))
    assert [(m.login, m.reason) for m in send.messages] == [(False, 2)]


def test_leaving_takes_effect_at_once_and_has_a_higher_id() -> None:
    core = gateway()
    joined(core, 1, 7, 42)
    (send,) = memberships(turn(core, ev.Leave(1, names(42))))
    assert [(m.login, m.reason) for m in send.messages] == [(False, 1)]
    assert fan_out(core, room(42, 1)) == []
    assert core.counters.without_members == 1


def test_a_lost_message_is_sent_again_the_same() -> None:
    core = gateway()
    (send,) = memberships(turn(core, ev.Opened(1, 7, 3), ev.Join(1, 1, wants(42))))
    core.step(Settled([(send.token, False)]), 1.0)
    assert memberships(turn(core, now=1.05)) == []
    due = core.next_deadline()
    assert due < 2.0
    (again,) = memberships(turn(core, Tick(), now=due))
    assert again.messages == send.messages


def test_a_message_that_nobody_confirms_is_sent_again() -> None:
    core = gateway()
    (send,) = memberships(turn(core, ev.Opened(1, 7, 3), ev.Join(1, 1, wants(42))))
    core.step(Settled([(send.token, True)]), 1.0)
    (again,) = memberships(turn(core, Tick(), now=2.1))
    assert again.messages == send.messages


def test_a_dead_routers_messages_go_to_another_at_once() -> None:
    core = gateway((ev.Replica(R1, 0), ev.Replica(R2, 0)))
    (send,) = memberships(turn(core, ev.Opened(1, 7, 3), ev.Join(1, 1, wants(42))))
    other = R2 if send.peer == R1 else R1
    (again,) = memberships(turn(core, ev.RoutersChanged(1, (ev.Replica(other, 0),)), now=1.1))
    assert (again.peer, again.messages) == (other, send.messages)


def test_a_doubted_routers_messages_go_to_another_at_once() -> None:
    core = gateway((ev.Replica(R1, 0), ev.Replica(R2, 0)))
    (send,) = memberships(turn(core, ev.Opened(1, 7, 3), ev.Join(1, 1, wants(42))))
    other = R2 if send.peer == R1 else R1
    doubt = tuple(ev.Replica(r, 0, usable=r == other) for r in (R1, R2))
    (again,) = memberships(turn(core, ev.RoutersChanged(1, doubt), now=1.1))
    assert again.peer == other


def test_while_routers_double_both_partitions_must_confirm() -> None:
    core = gateway((ev.Replica(R1, 0), ev.Replica(R2, 1)), partitions=1)
    sent = memberships(turn(core, ev.Opened(1, 7, 3), ev.Join(1, 1, wants(42))))
    assert {send.peer for send in sent} == {R1, R2}
    number = sent[0].messages[0].id
    assert core.step(ev.Confirmed(R1, [number]), 1.1) == []
    assert core.step(ev.Confirmed(R2, [number]), 1.1) == [ev.Answer(1, 1, True)]


def test_a_client_is_answered_in_the_end_even_without_a_router() -> None:
    core = gateway(())
    assert turn(core, ev.Opened(1, 7, 3), ev.Join(1, 1, wants(42))) == []
    assert ev.Answer(1, 1, False) in core.step(Tick(), 11.1)
    (send,) = memberships(turn(core, ev.RoutersChanged(1, (ev.Replica(R1, 0),)), now=12.0))
    assert send.messages[0].group == 42


def test_many_joins_share_parcels_that_fit_a_datagram() -> None:
    core = gateway()
    core.step(ev.Opened(1, 7, 3), 1.0)
    sent = memberships(turn(core, ev.Join(1, 1, wants(*(key for key in range(1, 101))))))
    assert [len(send.messages) for send in sent] == [32, 32, 32, 4]


def test_a_message_is_one_packet_for_all_and_joined_once_a_turn() -> None:
    core = gateway()
    for connection in (1, 2, 3):
        joined(core, connection, connection, 42)
    (deliver,) = fan_out(core, room(42, 1, b"one"), room(42, 2, b"two"))
    assert deliver.connections == (1, 2, 3)
    assert deliver.count == 2
    assert deliver.data == b"0\x0c\x00\x07room/42one" + b"0\x0c\x00\x07room/42two"


def test_records_go_on_as_they_are_to_those_who_want_records() -> None:
    core = gateway()
    joined(core, 1, 7, 42, packets=False)
    (deliver,) = fan_out(core, room(42, 1))
    assert (deliver.connections, deliver.data) == ((1,), room(42, 1))


def test_a_long_packet_has_a_long_length() -> None:
    core = gateway()
    joined(core, 1, 7, 42)
    (deliver,) = fan_out(core, room(42, 1, b"x" * 20_000))
    assert deliver.data[:4] == b"0" + bytes([0xA9, 0x9C, 0x01])
    assert len(deliver.data) - 4 == 0xA9 & 127 | (0x9C & 127) << 7 | 1 << 14


def test_a_message_is_delivered_once() -> None:
    core = gateway()
    joined(core, 1, 7, 42)
    assert len(fan_out(core, room(42, 1), room(42, 1))) == 1
    assert fan_out(core, room(42, 1)) == []
    assert core.counters.duplicates == 2
    assert core.counters.deliveries == 1


def delivered(core: Core, now: float, *records: bytes) -> int:
    """How many deliveries a batch at this time makes."""
    return sum(deliver.count for deliver in of(ev.Deliver, arrive(core, *records, now=now)))


@pytest.mark.slow
def test_a_repeat_is_known_for_15_seconds_whatever_came_meanwhile() -> None:
    """Repeats come up to ten seconds late; a set of so many messages had forgotten them at 13,000 a second."""
    core = gateway()
    joined(core, 1, 7, 42)
    assert delivered(core, 100.0, room(42, 1)) == 1
    for start in range(0, 240_000, 20_000):
        delivered(core, 101.0 + start / 20_000, *(room(42, number, b"") for number in range(start + 2, start + 20_002)))
    assert delivered(core, 114.9, room(42, 1)) == 0
    assert delivered(core, 1000.0, room(42, 999_999)) == 1
    assert len(core.dedupe) == 1, "what is older than two windows is forgotten"


def test_a_repeat_is_known_for_five_minutes_where_few_messages_come_and_as_long_again() -> None:
    """A publisher with a session was away for twenty seconds, and its second repeat came after one that was dropped."""
    core = gateway()
    joined(core, 1, 7, 42)
    assert delivered(core, 100.0, room(42, 1), room(42, 2)) == 2
    for now in range(110, 700, 10):
        assert delivered(core, float(now), room(42, now)) == 1
        assert delivered(core, float(now), room(42, 1)) == 0, now
    assert delivered(core, 700.0, room(42, 2)) == 1


def test_the_dedupe_is_bounded_and_says_what_it_forgets_early() -> None:
    dedupe = Dedupe(max_messages=10)
    for number in range(100):
        dedupe.turn(1.0)
        dedupe.current.add(bytes((number,)))
    assert len(dedupe) <= 20
    assert dedupe.forgotten_early == 80


def test_a_damaged_copy_does_not_hide_the_good_one() -> None:
    core = gateway()
    joined(core, 1, 7, 42)
    damaged = bytearray(room(42, 1))
    damaged[-1] ^= 1
    assert delivered(core, 2.0, bytes(damaged)) == 0
    assert delivered(core, 2.1, room(42, 1)) == 1
    assert delivered(core, 2.2, room(42, 1)) == 0


def test_what_came_before_anybody_joined_does_not_hide_its_repeat() -> None:
    core = gateway()
    assert delivered(core, 2.0, room(42, 1)) == 0
    joined(core, 1, 7, 42)
    assert delivered(core, 2.1, room(42, 1)) == 1


def test_damaged_and_malformed_input_is_counted_and_dropped() -> None:
    core = gateway()
    joined(core, 1, 7, 42)
    damaged = bytearray(room(42, 1))
    damaged[-1] ^= 1
    assert fan_out(core, bytes(damaged)) == []
    assert core.counters.damaged == 1
    for data, count in [(room(42, 2)[:-1], 1), (room(42, 2), 2), (bytes(100), 1), (b"\xff" * 100, 2)]:
        assert hand_over(core, data, count) is Outcome.MALFORMED
    assert core.counters.batches_malformed == 4
    assert len(fan_out(core, room(42, 3))) == 1


def test_a_free_topic_reaches_only_its_own_subscribers() -> None:
    core = gateway()
    key = topic_room("home/a")
    turn(core, ev.Opened(1, 7, 3), ev.Join(1, 1, wants("home/a")), ev.Opened(2, 8, 3), ev.Join(2, 1, wants("home/b")))
    (deliver,) = fan_out(core, encode(Kind.ROOM, key, with_topic("home/a", b"x"), 1, flags=Flag.TOPIC))
    assert deliver.connections == (1,)
    assert deliver.data == b"0\x09\x00\x06home/ax"


def test_two_topics_of_one_room_are_one_presence() -> None:
    core = gateway()
    sent = memberships(turn(core, ev.Opened(1, 7, 3), ev.Join(1, 1, wants("home/a", "home/b"))))
    assert [len(send.messages) for send in sent] == [1]
    assert memberships(turn(core, ev.Leave(1, names("home/a")))) == []
    assert len(memberships(turn(core, ev.Leave(1, names("home/b"))))) == 1


def test_published_records_go_to_the_keys_proxy_in_order() -> None:
    core = gateway()
    records = [(key, room(key, number)) for number, key in enumerate([2, 3, 4, 5], 1)]
    sent = of(SendRecords, turn(core, ev.Publish(records)))
    assert {send.peer: send.records for send in sent} == {P1: [room(2, 1), room(4, 3)], P2: [room(3, 2), room(5, 4)]}


def test_a_change_of_proxies_keeps_order() -> None:
    core = gateway()
    (send,) = of(SendRecords, turn(core, ev.Publish([(3, room(3, 1))])))
    core.step(ev.ProxiesChanged((ev.Replica(P1, 0), ev.Replica(P2, 0), ev.Replica(R1, 0))), 1.1)
    assert turn(core, ev.Publish([(3, room(3, 2))]), now=1.1) == []
    core.step(Settled([(send.token, True)]), 1.15)
    (after,) = of(SendRecords, turn(core, now=1.15))
    assert after.records == [room(3, 2)]


def test_the_same_proxies_again_hold_nothing_and_others_hold_only_what_moves() -> None:
    core = gateway()
    P3 = EndpointID(203)
    stays, moves = 6, 4  # of two and of three proxies: 6 the first one, 4 the first and the second
    (before,) = of(SendRecords, turn(core, ev.Publish([(moves, room(moves, 1)), (stays, room(stays, 2))])))
    core.step(ev.ProxiesChanged((ev.Replica(P1, 0), ev.Replica(P2, 0))), 1.1)
    assert len(of(SendRecords, turn(core, ev.Publish([(moves, room(moves, 3))]), now=1.1))) == 1
    core.step(ev.ProxiesChanged((ev.Replica(P1, 0), ev.Replica(P2, 0), ev.Replica(P3, 0))), 1.2)
    (sent,) = of(SendRecords, turn(core, ev.Publish([(moves, room(moves, 4)), (stays, room(stays, 5))]), now=1.2))
    assert (sent.peer, sent.records) == (P1, [room(stays, 5)])
    (late,) = of(SendRecords, turn(core, Tick(), now=1.4))
    assert (late.peer, late.records) == (P2, [room(moves, 4)])
    assert before.peer == P1


@pytest.mark.parametrize(("age_ms", "lifetime_min", "deliveries"), [(59_000, 1, 1), (61_000, 1, 0), (10_000_000, 0, 1)])
def test_a_message_that_is_older_than_its_lifetime_is_not_delivered(age_ms: int, lifetime_min: int, deliveries: int) -> None:
    sent_ms = 1_800_000_000_000
    core = Core(instance=3, generation=5, unix_ms=lambda: sent_ms + age_ms)
    core.step(ev.RoutersChanged(1, (ev.Replica(R1, 0),)), 0.0)
    joined(core, 1, 7, 42)
    record = encode(Kind.ROOM, 42, b"hi", snowflake(sent_ms, 1, 1), lifetime_min=lifetime_min)
    assert len(fan_out(core, record)) == deliveries
    assert core.counters.expired == 1 - deliveries


def test_messages_of_load_tests_do_not_come_to_mqtt_clients() -> None:
    core = gateway()
    joined(core, 1, 7, 42)
    joined(core, 2, 8, 42, packets=False)
    marked = encode(Kind.ROOM, 42, b"load", 1, flags=Flag.TO_ROOM | Flag.LOAD_TEST)
    assert [each.connections for each in fan_out(core, marked)] == [(2,)]
    signal = encode(Kind.SIGNAL, 42, b"load", 2, flags=Flag.TO_ROOM | Flag.LOAD_TEST)
    assert [each.connections for each in fan_out(core, signal)] == [(2,)]
    assert core.counters.load_test_blocked == 2
    assert {each.connections for each in fan_out(core, room(42, 3))} == {(1,), (2,)}
