"""The driver of cores: effects in order, what a link hands over answered by a value, turns, timers, tasks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from cluster.core.contract import END_OF_TURN, NEVER, TICK, EndOfTurn, EventTable, RecordsReceived, Settle, Tick
from cluster.core.role import RoleShell, totals
from cluster.core.runner import Runner
from cluster.links.api import Outcome
from pixiu.ids import EndpointID

BATCH = RecordsReceived(EndpointID(1), b"abc", 0, 3, 1)


@dataclass(frozen=True, slots=True)
class Said:
    """Something to write down."""

    text: str


Event = RecordsReceived | Tick | EndOfTurn | Said
Effect = Said | Settle


class Core:
    """Says what came; a batch that begins with `b` is malformed."""

    def __init__(self) -> None:
        self.deadline = NEVER
        self._events: EventTable[Effect] = EventTable()
        self._events.on(RecordsReceived, self._on_records)
        self._events.on(Tick, self._on_tick)
        self._events.on(EndOfTurn, self._on_end_of_turn)
        self._events.on(Said, self._on_said)

    def step(self, event: Event, now: float) -> list[Effect]:
        return self._events.step(event, now)

    def next_deadline(self) -> float:
        return self.deadline

    def _on_records(self, event: RecordsReceived, now: float, out: list[Effect]) -> None:
        if event.data.startswith(b"b"):
            out.append(Settle(Outcome.MALFORMED))
            return
        out.append(Said(f"{event.count} records"))

    def _on_tick(self, event: Tick, now: float, out: list[Effect]) -> None:
        self.deadline = NEVER
        out.append(Said("tick"))

    def _on_end_of_turn(self, event: EndOfTurn, now: float, out: list[Effect]) -> None:
        out.append(Said("end"))

    def _on_said(self, event: Said, now: float, out: list[Effect]) -> None:
        out += [Said(f"{event.text} {number}") for number in (1, 2)]


def runner(core: Core, heard: list[str], *, turns: bool = False) -> Runner[Event, Effect]:
    found: Runner[Event, Effect] = Runner(
        core, asyncio.get_running_loop().time, tick=TICK, end_of_turn=END_OF_TURN if turns else None
    )
    found.effects.on(Said, lambda effect: heard.append(effect.text))
    return found


async def test_effects_are_performed_in_order() -> None:
    heard: list[str] = []
    runner(Core(), heard).step(Said("a"))
    assert heard == ["a 1", "a 2"]


async def test_what_comes_of_an_effect_is_taken_behind_all_effects_before_it() -> None:
    heard: list[str] = []
    found: Runner[Event, Effect] = Runner(Core(), asyncio.get_running_loop().time)

    def say(effect: Said) -> None:
        if effect.text == "a 1":
            found.step(Said("b"))
        heard.append(effect.text)

    found.effects.on(Said, say)
    found.step(Said("a"))
    assert heard == ["a 1", "a 2", "b 1", "b 2"]


async def test_what_a_link_hands_over_is_answered_by_a_value() -> None:
    heard: list[str] = []
    found = runner(Core(), heard)
    assert found.take(BATCH) is Outcome.TAKEN
    assert found.take(RecordsReceived(EndpointID(1), b"bad", 0, 3, 1)) is Outcome.MALFORMED
    assert found.take(BATCH) is Outcome.TAKEN, "an outcome is of its own step"
    found.core = None
    assert found.take(BATCH) is Outcome.NOT_TAKEN


async def test_the_end_of_the_turn_comes_once_for_all_that_came_in_it() -> None:
    heard: list[str] = []
    found = runner(Core(), heard, turns=True)
    found.take(BATCH)
    found.take(BATCH)
    assert heard == ["1 records", "1 records"]
    await asyncio.sleep(0)
    assert heard[2:] == ["end"]
    await asyncio.sleep(0)
    assert heard[2:] == ["end"]


@pytest.mark.parametrize("turns", [False, True])
async def test_the_timer_rings_at_the_cores_deadline_and_not_after_the_end(turns: bool) -> None:
    heard: list[str] = []
    core = Core()
    found = runner(core, heard, turns=turns)
    core.deadline = asyncio.get_running_loop().time() + 0.01
    found.take(BATCH)
    async with asyncio.timeout(10):
        while "tick" not in heard:
            await asyncio.sleep(0.005)
    core.deadline = asyncio.get_running_loop().time()
    found.take(BATCH)
    found.stop()
    said = len(heard)
    await asyncio.sleep(0.02)
    assert len(heard) == said
    assert found.take(BATCH) is Outcome.NOT_TAKEN


async def test_an_overdue_deadline_is_not_put_off_by_events_that_keep_coming() -> None:
    loop, said = asyncio.get_running_loop(), list[str]()
    core = Core()
    runner: Runner[Event, Effect] = Runner(core, loop.time, tick=TICK)
    runner.effects.on(Said, lambda effect: said.append(effect.text))
    core.deadline = loop.time() - 1.0
    end = loop.time() + 5.0
    while "tick" not in said and loop.time() < end:
        runner.step(BATCH)
        await asyncio.sleep(0)
    assert "tick" in said


async def test_records_that_move_no_deadline_set_no_timer() -> None:
    loop, said = asyncio.get_running_loop(), list[str]()
    core = Core()
    runner: Runner[Event, Effect] = Runner(core, loop.time, tick=TICK)
    runner.effects.on(Said, lambda effect: said.append(effect.text))
    core.deadline = loop.time()
    assert runner.take(BATCH, timed=False) is Outcome.TAKEN
    await asyncio.sleep(0.05)
    assert said == ["1 records"]


async def test_what_is_flushed_once_is_flushed_behind_all_effects_of_a_step() -> None:
    heard: list[str] = []
    found: Runner[Event, Effect] = Runner(Core(), lambda: 0.0, performed=lambda: heard.append("flush"))
    found.effects.on(Said, lambda effect: heard.append(effect.text))
    found.step(Said("a"))
    assert heard == ["a 1", "a 2", "flush"]


def test_an_event_that_nobody_entered_is_a_bug() -> None:
    table: EventTable[Said] = EventTable()
    with pytest.raises(KeyError):
        table.step(TICK, 0.0)


async def test_a_task_that_fails_ends_the_process_and_others_end_with_the_shell() -> None:
    crashes: list[BaseException] = []
    done: list[str] = []
    shell = RoleShell(crashes.append)

    async def fail() -> None:
        raise ValueError("broken")

    shell.spawn(fail())
    shell.every(0.001, lambda: done.append("again"))
    async with asyncio.timeout(10):
        while not crashes or len(done) < 3:
            await asyncio.sleep(0.001)
    await shell.cancel_tasks()
    said = len(done)
    await asyncio.sleep(0.01)
    assert len(done) == said
    assert [str(error) for error in crashes] == ["broken"]


async def test_a_role_that_expects_nothing_by_links_calls_it_malformed() -> None:
    shell = RoleShell(lambda error: None)
    assert shell.on_records(EndpointID(1), b"", 0, 0, 0) is Outcome.MALFORMED
    assert shell.on_control(EndpointID(1), []) is Outcome.MALFORMED
    assert shell.on_heartbeat(EndpointID(1), False, b"x") == b""


def test_counters_become_totals() -> None:
    assert totals({"sent": 3}, "mail_") == {"mail_sent_total": 3}
    assert totals(Said("x")) == {"text_total": "x"}


async def test_what_is_handed_over_while_effects_are_performed_is_a_bug_and_not_a_wrong_answer() -> None:
    found: Runner[Event, Effect] = Runner(Core(), lambda: 0.0)
    found.effects.on(Said, lambda effect: found.take(BATCH) and None)
    with pytest.raises(AssertionError, match="answered now"):
        found.step(Said("a"))
