"""The gateway's core: presence until it is confirmed, fan-out, dedupe, publishing."""

from __future__ import annotations

from gateway.core import Core
from gateway.events import (
    Answer,
    Closed,
    Confirmed,
    Deliver,
    Effect,
    EndOfTurn,
    Join,
    Leave,
    Opened,
    ProxiesChanged,
    Publish,
    RecordsArrived,
    Replica,
    RoutersChanged,
    SendMembership,
    SendRecords,
    Settled,
    Tick,
)
from pixiu.ids import EndpointID, gateway_generation, gateway_instance, topic_room
from pixiu.wire.record import Flag, Kind, encode, with_topic

R1, R2, P1, P2 = EndpointID(101), EndpointID(102), EndpointID(201), EndpointID(202)


def gateway(replicas: tuple[Replica, ...] = (Replica(R1, 0),), partitions: int = 1) -> Core:
    core = Core(instance=3, generation=5)
    core.step(RoutersChanged(partitions, replicas), 0.0)
    core.step(ProxiesChanged((Replica(P1, 0), Replica(P2, 0))), 0.0)
    return core


def turn(core: Core, *events: object, now: float = 1.0) -> list[Effect]:
    effects: list[Effect] = []
    for event in events:
        effects += core.step(event, now)  # type: ignore[arg-type]
    return effects + core.step(EndOfTurn(), now)


def memberships(effects: list[Effect]) -> list[SendMembership]:
    """Without the second times, which nobody waits for."""
    return [effect for effect in effects if isinstance(effect, SendMembership) and effect.token]


def arrive(core: Core, *records: bytes) -> list[Deliver]:
    data = b"".join(records)
    assert core.records_arrived(RecordsArrived(data, 0, len(data), len(records)))
    return [effect for effect in core.step(EndOfTurn(), 2.0) if isinstance(effect, Deliver)]


def room(key: int, number: int, body: bytes = b"hi") -> bytes:
    return encode(Kind.ROOM, key, body, number)


def joined(core: Core, connection: int, uin: int, key: int, packets: bool = True) -> None:
    (send,) = memberships(turn(core, Opened(connection, uin, packets), Join(connection, 1, [(key, None)])))
    core.step(Settled([(send.token, True)]), 1.0)
    assert core.step(Confirmed(send.peer, [m.id for m in send.messages]), 1.0) == [Answer(connection, 1, True)]


def test_a_first_join_is_told_to_the_router_and_answered_when_it_is_confirmed() -> None:
    core = gateway()
    effects = turn(core, Opened(1, 7, True), Join(1, 99, [(42, None)]))
    (send,) = memberships(effects)
    (message,) = send.messages
    assert (send.peer, message.group, message.member, message.login) == (R1, 42, 7, True)
    assert (gateway_instance(message.id), gateway_generation(message.id)) == (3, 5)
    assert core.step(Confirmed(R1, [message.id]), 1.1) == [Answer(1, 99, True)]
    assert core.rooms.presence.unconfirmed == 0


def test_a_second_connection_of_the_user_joins_without_a_message() -> None:
    core = gateway()
    joined(core, 1, 7, 42)
    effects = turn(core, Opened(2, 7, True), Join(2, 5, [(42, None)]))
    assert effects == [Answer(2, 5, True)]
    assert memberships(turn(core, Closed(1, 2))) == []
    (send,) = memberships(turn(core, Closed(2, 2)))
    assert [(m.login, m.reason) for m in send.messages] == [(False, 2)]


def test_leaving_takes_effect_at_once_and_has_a_higher_id() -> None:
    core = gateway()
    joined(core, 1, 7, 42)
    (send,) = memberships(turn(core, Leave(1, [(42, None)])))
    assert [(m.login, m.reason) for m in send.messages] == [(False, 1)]
    assert arrive(core, room(42, 1)) == []
    assert core.counters.without_members == 1


def test_a_lost_message_is_sent_again_the_same() -> None:
    core = gateway()
    (send,) = memberships(turn(core, Opened(1, 7, True), Join(1, 1, [(42, None)])))
    core.step(Settled([(send.token, False)]), 1.0)
    assert memberships(core.step(EndOfTurn(), 1.05)) == []
    due = core.next_deadline()
    assert due is not None
    assert due < 2.0
    (again,) = memberships(turn(core, Tick(), now=due))
    assert again.messages == send.messages


def test_a_message_that_nobody_confirms_is_sent_again() -> None:
    core = gateway()
    (send,) = memberships(turn(core, Opened(1, 7, True), Join(1, 1, [(42, None)])))
    core.step(Settled([(send.token, True)]), 1.0)
    (again,) = memberships(turn(core, Tick(), now=2.1))
    assert again.messages == send.messages


def test_a_dead_routers_messages_go_to_another_at_once() -> None:
    core = gateway((Replica(R1, 0), Replica(R2, 0)))
    (send,) = memberships(turn(core, Opened(1, 7, True), Join(1, 1, [(42, None)])))
    other = R2 if send.peer == R1 else R1
    (again,) = memberships(turn(core, RoutersChanged(1, (Replica(other, 0),)), now=1.1))
    assert (again.peer, again.messages) == (other, send.messages)


def test_a_doubted_routers_messages_go_to_another_at_once() -> None:
    core = gateway((Replica(R1, 0), Replica(R2, 0)))
    (send,) = memberships(turn(core, Opened(1, 7, True), Join(1, 1, [(42, None)])))
    other = R2 if send.peer == R1 else R1
    doubt = tuple(Replica(r, 0, usable=r == other) for r in (R1, R2))
    (again,) = memberships(turn(core, RoutersChanged(1, doubt), now=1.1))
    assert again.peer == other


def test_while_routers_double_both_partitions_must_confirm() -> None:
    core = gateway((Replica(R1, 0), Replica(R2, 1)), partitions=1)
    sent = memberships(turn(core, Opened(1, 7, True), Join(1, 1, [(42, None)])))
    assert {send.peer for send in sent} == {R1, R2}
    number = sent[0].messages[0].id
    assert core.step(Confirmed(R1, [number]), 1.1) == []
    assert core.step(Confirmed(R2, [number]), 1.1) == [Answer(1, 1, True)]


def test_a_client_is_answered_in_the_end_even_without_a_router() -> None:
    core = gateway(())
    assert turn(core, Opened(1, 7, True), Join(1, 1, [(42, None)])) == []
    assert Answer(1, 1, False) in core.step(Tick(), 11.1)
    (send,) = memberships(turn(core, RoutersChanged(1, (Replica(R1, 0),)), now=12.0))
    assert send.messages[0].group == 42


def test_many_joins_share_parcels_that_fit_a_datagram() -> None:
    core = gateway()
    core.step(Opened(1, 7, True), 1.0)
    sent = memberships(turn(core, Join(1, 1, [(key, None) for key in range(1, 101)])))
    assert [len(send.messages) for send in sent] == [32, 32, 32, 4]


def test_a_message_is_one_packet_for_all_and_joined_once_a_turn() -> None:
    core = gateway()
    for connection in (1, 2, 3):
        joined(core, connection, connection, 42)
    (deliver,) = arrive(core, room(42, 1, b"one"), room(42, 2, b"two"))
    assert deliver.connections == (1, 2, 3)
    assert deliver.count == 2
    assert deliver.data == b"0\x0c\x00\x07room/42one" + b"0\x0c\x00\x07room/42two"


def test_records_go_on_as_they_are_to_those_who_want_records() -> None:
    core = gateway()
    joined(core, 1, 7, 42, packets=False)
    (deliver,) = arrive(core, room(42, 1))
    assert (deliver.connections, deliver.data) == ((1,), room(42, 1))


def test_a_long_packet_has_a_long_length() -> None:
    core = gateway()
    joined(core, 1, 7, 42)
    (deliver,) = arrive(core, room(42, 1, b"x" * 20_000))
    assert deliver.data[:4] == b"0" + bytes([0xA9, 0x9C, 0x01])
    assert len(deliver.data) - 4 == 0xA9 & 127 | (0x9C & 127) << 7 | 1 << 14


def test_a_message_is_delivered_once() -> None:
    core = gateway()
    joined(core, 1, 7, 42)
    assert len(arrive(core, room(42, 1), room(42, 1))) == 1
    assert arrive(core, room(42, 1)) == []
    assert core.counters.duplicates == 2
    assert core.counters.deliveries == 1


def test_the_dedupe_set_is_bounded_and_remembers_a_generation() -> None:
    core = gateway()
    joined(core, 1, 7, 42)
    for start in range(0, 200_000, 50):
        arrive(core, *(room(42, number) for number in range(start + 1, start + 51)))
    assert len(core._seen) + len(core._seen_before) <= 2 * 65_536 + 100
    assert arrive(core, room(42, 140_000)) == []


def test_damaged_and_malformed_input_is_counted_and_dropped() -> None:
    core = gateway()
    joined(core, 1, 7, 42)
    damaged = bytearray(room(42, 1))
    damaged[-1] ^= 1
    assert arrive(core, bytes(damaged)) == []
    assert core.counters.damaged == 1
    for data, count in [(room(42, 2)[:-1], 1), (room(42, 2), 2), (bytes(100), 1), (b"\xff" * 100, 2)]:
        assert not core.records_arrived(RecordsArrived(data, 0, len(data), count))
    assert core.counters.batches_malformed == 4
    assert len(arrive(core, room(42, 3))) == 1


def test_a_free_topic_reaches_only_its_own_subscribers() -> None:
    core = gateway()
    key = topic_room("home/a")
    turn(core, Opened(1, 7, True), Join(1, 1, [(key, b"home/a")]), Opened(2, 8, True), Join(2, 1, [(key, b"home/b")]))
    (deliver,) = arrive(core, encode(Kind.ROOM, key, with_topic("home/a", b"x"), 1, flags=Flag.TOPIC))
    assert deliver.connections == (1,)
    assert deliver.data == b"0\x09\x00\x06home/ax"


def test_two_topics_of_one_room_are_one_presence() -> None:
    core = gateway()
    key = topic_room("home/a")
    sent = memberships(turn(core, Opened(1, 7, True), Join(1, 1, [(key, b"home/a"), (key, b"home/b")])))
    assert [len(send.messages) for send in sent] == [1]
    assert memberships(turn(core, Leave(1, [(key, b"home/a")]))) == []
    assert len(memberships(turn(core, Leave(1, [(key, b"home/b")])))) == 1


def test_published_records_go_to_the_keys_proxy_in_order() -> None:
    core = gateway()
    records = [(key, room(key, number)) for number, key in enumerate([2, 3, 4, 5], 1)]
    sent = [effect for effect in turn(core, Publish(records)) if isinstance(effect, SendRecords)]
    assert {send.peer: send.records for send in sent} == {P1: [room(2, 1), room(4, 3)], P2: [room(3, 2), room(5, 4)]}


def test_a_change_of_proxies_keeps_order() -> None:
    core = gateway()
    (send,) = [e for e in turn(core, Publish([(3, room(3, 1))])) if isinstance(e, SendRecords)]
    core.step(ProxiesChanged((Replica(P1, 0), Replica(P2, 0), Replica(R1, 0))), 1.1)
    assert turn(core, Publish([(3, room(3, 2))]), now=1.1) == []
    core.step(Settled([(send.token, True)]), 1.15)
    (after,) = [e for e in core.step(EndOfTurn(), 1.15) if isinstance(e, SendRecords)]
    assert after.records == [room(3, 2)]
