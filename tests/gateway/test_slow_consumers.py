"""The timers of slow connections: they run while somebody is behind, and for nobody else."""

from __future__ import annotations

import asyncio

import pytest

from gateway.clients.backlog import Backlog, Grade
from gateway.clients.slow_consumers import CHECK_S, SlowConsumers


class Connection:
    """A slow connection that a test steers."""

    def __init__(self, number: int) -> None:
        self.id = number
        self.grade = Grade.PROMPT
        self.caught_up = asyncio.Event()
        self.checked = asyncio.Event()

    def catch_up(self) -> None:
        self.caught_up.set()

    def check(self, now: float) -> Grade:
        self.checked.set()
        return self.grade


async def test_who_is_behind_is_looked_at_and_counted_by_grade() -> None:
    slow = SlowConsumers(asyncio.get_running_loop().time)
    first, second = Connection(1), Connection(2)
    first.grade = Grade.STALLED
    for connection in (first, second):
        slow.add(connection)
        slow.add(connection)
    assert slow.counts() == {"prompt": 2, "batched": 0, "stalled": 0}
    await asyncio.wait_for(first.checked.wait(), 30)
    await asyncio.wait_for(second.checked.wait(), 30)
    assert slow.counts() == {"prompt": 1, "batched": 0, "stalled": 1}
    assert slow.entered == {Grade.PROMPT: 2, Grade.BATCHED: 0, Grade.STALLED: 1}
    slow.discard(first)
    assert slow.counts() == {"prompt": 1, "batched": 0, "stalled": 0}
    slow.close()


async def test_the_time_for_which_the_loop_was_late_is_not_counted() -> None:
    """A gateway without CPU for a minute: its clock of slow clients goes on by what is left until the next look, no more."""
    at = 100.0
    slow = SlowConsumers(lambda: at)
    assert slow.now() == 100.0
    at = 160.0
    assert slow.now() == 160.0, "nobody is behind: nothing is measured"
    backlog = Backlog(1000, patience_s=10.0)
    connection = Connection(1)
    backlog.leaving(slow.now())
    slow.add(connection)
    at = 220.0
    assert slow.now() == 160.0 + CHECK_S
    assert backlog.put(b"message", 1, slow.now()), "a healthy client was given up"
    assert backlog.grade(slow.now()) is Grade.BATCHED
    await asyncio.wait_for(connection.checked.wait(), 30)
    assert slow.now() == 160.0 + CHECK_S, "the clock jumped when the loop came back"
    at = 220.1
    assert slow.now() == pytest.approx(160.1 + CHECK_S)
    slow.close()


async def test_who_stays_behind_while_the_loop_turns_is_given_up() -> None:
    at = 0.0
    slow = SlowConsumers(lambda: at)
    backlog = Backlog(1000, patience_s=10.0)
    connection = Connection(1)
    backlog.leaving(slow.now())
    slow.add(connection)
    patient = []
    for _ in range(50):
        at = slow.now() + CHECK_S
        slow._look()
        patient.append(backlog.patient(slow.now()))
    slow.close()
    assert patient.index(False) * CHECK_S == pytest.approx(11.0, abs=2 * CHECK_S), "a second until it is stalled, then its patience"


async def test_who_catches_up_in_batches_is_called_and_who_is_gone_is_not() -> None:
    slow = SlowConsumers(asyncio.get_running_loop().time)
    first, second = Connection(1), Connection(2)
    for connection in (first, second):
        slow.add(connection)
        slow.catch_up_in_a_batch(connection)
    slow.discard(first)
    await asyncio.wait_for(second.caught_up.wait(), 30)
    assert not first.caught_up.is_set()
    slow.close()


async def test_a_connection_that_its_check_ends_is_forgotten() -> None:
    slow = SlowConsumers(asyncio.get_running_loop().time)
    connection = Connection(1)
    check = connection.check

    def end(now: float) -> Grade:
        slow.discard(connection)
        return check(now)

    connection.check = end  # type: ignore[method-assign]
    slow.add(connection)
    await asyncio.wait_for(connection.checked.wait(), 30)
    assert slow.counts() == {"prompt": 0, "batched": 0, "stalled": 0}
    slow.close()
