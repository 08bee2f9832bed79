"""Signals in the gateway's core: once, answered each time, and the same after a restart with the same table."""

from __future__ import annotations

from collections.abc import Sequence

from gateway import events as ev
from gateway.core import MAX_ANSWERED_A_MESSAGE, Core
from gateway.delivery.signals import MAX_SIGNALS_A_TURN, Identity, MemoryTable, SignalTable
from pixiu.ids import EndpointID, topic_room
from pixiu.wire.record import Flag, Kind, encode, with_topic
from tests.gateway.world import arrive, hand_over, of, turn
from tests.support.builds import plain_only
from tests.support.filters import names, wants

P1, P2 = EndpointID(201), EndpointID(202)


class Transactions(MemoryTable):
    """Counts what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def add(self, identities: Sequence[Identity]) -> list[bool]:
        self.asked.append(len(identities))
        return super().add(identities)


def gateway(table: SignalTable | None = None, rooms: Sequence[int] = (42,), packets: bool = True) -> Core:
    core = Core(instance=3, generation=5, signals=table)
    core.step(ev.ProxiesChanged((ev.Replica(P1, 0), ev.Replica(P2, 0, usable=False))), 0.0)
    core.step(ev.Opened(1, 7, 3 * packets), 0.0)
    core.step(ev.Join(1, 1, wants(*(room for room in rooms))), 0.0)
    turn(core, now=0.0)
    return core


def signal(number: int, key: int = 42, flags: int = Flag.TO_ROOM, body: bytes = b"go") -> bytes:
    return encode(Kind.SIGNAL, key, body, number, flags=flags)


def answered(effects: list[ev.Effect]) -> list[int]:
    return [number for effect in of(ev.SendDelivered, effects) for number in effect.signals]


def test_the_first_copy_is_delivered_and_every_proxy_is_told_after_it() -> None:
    core = gateway()
    deliver, told = arrive(core, signal(5), signal(5), signal(5))
    assert deliver == ev.Deliver((1,), b"0\x0b\x00\x07room/42go", 1)
    assert told == ev.SendDelivered((P1, P2), [5])
    assert (core.counters.signals_delivered, core.counters.signals_repeated) == (1, 2)


def test_a_later_copy_is_not_delivered_and_answered_again() -> None:
    core = gateway()
    arrive(core, signal(5))
    assert arrive(core, signal(5)) == [ev.SendDelivered((P1, P2), [5])]


def test_subscribers_of_records_get_the_record() -> None:
    deliver = arrive(gateway(packets=False), signal(5))[0]
    assert deliver == ev.Deliver((1,), signal(5), 1)


def test_after_a_restart_with_the_same_table_nothing_is_delivered_again() -> None:
    table = MemoryTable()
    arrive(gateway(table), signal(5))
    again = gateway(table)
    effects = arrive(again, signal(5), signal(6))
    assert [effect.count for effect in of(ev.Deliver, effects)] == [1]
    assert answered(effects) == [5, 6]
    assert len(arrive(gateway(MemoryTable()), signal(5))) == 2, "without the table it would be"


def test_without_members_nothing_is_answered_nor_remembered() -> None:
    core = gateway()
    assert arrive(core, signal(5, key=43)) == []
    assert core.counters.without_members == 1
    core.step(ev.Join(1, 2, wants(43)), 1.0)
    assert answered(arrive(core, signal(5, key=43))) == [5]
    core.step(ev.Leave(1, names(43)), 1.0)
    assert answered(arrive(core, signal(5, key=43))) == []


def test_a_damaged_copy_does_not_stop_a_sound_one() -> None:
    core = gateway()
    damaged = bytearray(signal(5))
    damaged[-1] ^= 1
    assert arrive(core, bytes(damaged)) == []
    assert core.counters.damaged == 1
    assert answered(arrive(core, signal(5))) == [5]


def test_the_same_id_in_another_room_or_key_space_is_another_signal() -> None:
    core = gateway(rooms=(42, 43))
    derived = Flag.TO_ROOM | Flag.DERIVED_ID
    effects = arrive(core, signal(5), signal(5, key=43), signal(5, flags=derived))
    assert sum(effect.count for effect in of(ev.Deliver, effects)) == 3


@plain_only
def test_a_turn_is_one_transaction_and_room_messages_cost_none() -> None:
    table = Transactions()
    core = gateway(table)
    arrive(core, signal(1), signal(2), signal(1), encode(Kind.ROOM, 42, b"hi", 3))
    arrive(core, encode(Kind.ROOM, 42, b"hi", 4))
    arrive(core, signal(9, key=99))
    assert table.asked == [3]


def test_a_room_message_and_a_signal_of_one_turn_are_one_write() -> None:
    effects = arrive(gateway(), encode(Kind.ROOM, 42, b"hi", 3), signal(4))
    assert [effect.count for effect in of(ev.Deliver, effects)] == [2]


def test_a_signal_on_a_topic_reaches_its_subscribers() -> None:
    key = topic_room("home/a")
    core = gateway()
    core.step(ev.Join(1, 2, wants("home/a")), 0.0)
    topic = Flag.TO_ROOM | Flag.TOPIC
    assert answered(arrive(core, signal(5, key, topic, with_topic("home/a", b"x")))) == [5]
    assert answered(arrive(core, signal(6, key, topic, with_topic("home/b", b"x")))) == []


def test_answers_fit_datagrams() -> None:
    effects = arrive(gateway(), *(signal(number) for number in range(1, 301)))
    sizes = [len(effect.signals) for effect in of(ev.SendDelivered, effects)]
    assert sizes == [MAX_ANSWERED_A_MESSAGE, MAX_ANSWERED_A_MESSAGE, 300 - 2 * MAX_ANSWERED_A_MESSAGE]


def test_a_turn_takes_a_bounded_number_of_signals() -> None:
    core = gateway()
    record = signal(5)
    for _ in range(MAX_SIGNALS_A_TURN + 7):
        hand_over(core, record)
    assert (len(core.signals.waiting), core.signals.overflows) == (MAX_SIGNALS_A_TURN, 7)


def test_the_table_in_memory_is_bounded_and_remembers_a_generation() -> None:
    table = MemoryTable(generation=100)
    for start in range(0, 1000, 10):
        table.add([(number, 1) for number in range(start, start + 10)])
        assert len(table) <= 200
    assert table.add([(number, 1) for number in range(900, 1000)]) == [False] * 100
    assert table.add([(5, 1), (5, 1)]) == [True, False]
