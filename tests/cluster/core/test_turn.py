"""What many clients say at once is worked off over many turns of the event loop, and who says little does not wait for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from cluster.core.turn import CROWD, NEW_S, PACED_S, REST_S, TURN_S, Newcomers, PacedLine, Turn
from cluster.mqtt import codec
from cluster.mqtt.packets import Publish
from gateway import events as ev
from tests.gateway.world import World, mqtt_client, of
from tests.support.waiting import until


class Clock:
    """Turns by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.next: list[Callable[[], None]] = []
        self.turn = Turn(lambda: self.now, self.next.append)

    def work(self, seconds: float) -> None:
        began, self.now = self.now, self.now + seconds
        self.turn.spend(began)

    def pass_turn(self) -> None:
        calls, self.next = self.next, []
        self.turn._next_turn = self.next.append
        for call in calls:
            call()


def test_a_turn_has_a_bound_and_the_next_one_too() -> None:
    clock, done = Clock(), list[int]()
    assert clock.turn.has_time
    clock.work(TURN_S)
    assert not clock.turn.has_time

    def work(number: int) -> None:
        done.append(number)
        clock.work(0.4 * TURN_S)

    for number in range(6):
        clock.turn.later(partial(work, number))
    clock.pass_turn()
    assert done == [0, 1, 2]
    clock.pass_turn()
    assert done == [0, 1, 2, 3, 4, 5]
    assert clock.turn.waiting == 0
    clock.pass_turn()
    assert clock.turn.has_time
    assert clock.next == []


def test_little_work_costs_no_turn_of_its_own() -> None:
    clock = Clock()
    clock.work(TURN_S / 10)
    assert clock.next == []


def test_who_comes_again_from_the_line_waits_for_the_next_turn() -> None:
    clock, times = Clock(), list[int]()

    def again() -> None:
        times.append(len(times))
        if len(times) < 3:
            clock.turn.later(again)

    clock.turn.later(again)
    for turn in range(1, 4):
        clock.pass_turn()
        assert len(times) == turn


async def test_large_reads_of_many_clients_wait_and_small_ones_do_not() -> None:
    world = World(now=100.0)
    clock = 100.0

    def now() -> float:
        nonlocal clock
        clock += TURN_S / 4
        return clock

    world.clients.turn = Turn(now, world.clients.turn._next_turn)
    flood = codec.encode(Publish("room/42", bytes(2000)))
    loud = [mqtt_client(world, f"loud-{number}") for number in range(20)]
    quiet, wire = mqtt_client(world, "quiet")
    await until(lambda: quiet.client_id and all(connection.client_id for connection, _ in loud))
    await until(lambda: world.clients.turn.has_time)
    for connection, _ in loud:
        connection.data_received(flood)
    said = len(of(ev.Publish, world.events))
    assert 1 <= said < 20
    waiting = [wire for _, wire in loud if not wire.reading]
    assert len(waiting) == 20 - said, "who waits is not read from"
    quiet.data_received(codec.encode(Publish("room/43", b"x")))
    assert wire.reading
    assert len(of(ev.Publish, world.events)) == said + 1
    await until(lambda: len(of(ev.Publish, world.events)) == 21)
    await until(lambda: all(wire.reading for _, wire in loud))
    assert world.clients.turn.waiting == 0


async def test_what_waits_for_a_turn_counts_as_memory_and_goes_with_its_connection() -> None:
    world = World()
    connection, _ = mqtt_client(world)
    world.clients.turn._spent_s = 2 * TURN_S
    connection.data_received(codec.encode(Publish("room/42", bytes(100_000))))
    assert world.clients.memory.bytes >= 100_000
    connection.connection_lost(None)
    assert world.clients.memory.bytes == 0
    await until(lambda: world.clients.turn.waiting == 0)
    assert not of(ev.Publish, world.events)


def test_a_paced_line_works_for_a_while_and_rests_for_longer() -> None:
    now, done, asked = 0.0, list[int](), list[tuple[float, Callable[[], None]]]()
    line = PacedLine(lambda: now, lambda seconds, call: asked.append((seconds, call)))

    def work(number: int) -> None:
        nonlocal now
        now += 0.4 * PACED_S
        done.append(number)

    for number in range(4):
        line.later(partial(work, number))
    ((wait_s, call),) = asked
    assert (wait_s, line.waiting) == (0.0, 4), "asked for once"
    call()
    assert done == [0, 1, 2]
    wait_s, call = asked[-1]
    assert wait_s == pytest.approx(1.2 * REST_S), "as much longer as it worked"
    line.later(partial(work, 4))
    call()
    assert done == [0, 1, 2, 3, 4]
    assert len(asked) == 2, "an empty line does not ask"
    line.later(partial(work, 5))
    assert asked[-1][0] == 0.0


def test_what_is_begun_goes_on_before_what_is_not() -> None:
    calls = list[Callable[[], None]]()
    for line in (PacedLine(lambda: 0.0, lambda _, call: calls.append(call)), Turn(lambda: 0.0, calls.append)):
        done = list[int]()
        line.later(partial(done.append, 1))
        line.later(partial(done.append, 2))
        line.later(partial(done.append, 3), first=True)
        calls.pop()()
        assert done == [3, 1, 2]


def test_many_who_came_within_a_while_are_a_crowd() -> None:
    now = 10.0
    newcomers = Newcomers(lambda: now)
    for _ in range(CROWD):
        assert newcomers.arrived() == 10.0 + NEW_S
    assert not newcomers.is_crowd()
    now = 11.0
    newcomers.arrived()
    assert newcomers.is_crowd()
    now = 10.0 + NEW_S
    assert not newcomers.is_crowd()


async def test_who_comes_in_a_crowd_is_paced_and_who_was_there_is_not() -> None:
    world = World()
    there, _ = mqtt_client(world, "there")
    there._new_until = 0.0
    alone, _ = mqtt_client(world, "alone")
    flood = codec.encode(Publish("room/42", bytes(2000)))
    alone.data_received(flood)
    assert len(of(ev.Publish, world.events)) == 1, "one is no crowd"
    for _ in range(CROWD):
        world.clients.newcomers.arrived()
    late, wire = mqtt_client(world, "late")
    assert late.client_id is None
    alone.data_received(flood)
    assert world.clients.paced.waiting == 2
    assert not wire.reading
    assert len(of(ev.Publish, world.events)) == 1
    there.data_received(flood)
    there.data_received(codec.encode(Publish("room/43", b"x")))
    assert len(of(ev.Publish, world.events)) == 3
    await until(lambda: len(of(ev.Publish, world.events)) == 4 and late.client_id == "late")
    assert wire.reading
    assert world.clients.paced.waiting == 0
