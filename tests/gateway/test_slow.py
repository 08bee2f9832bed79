"""The timers of slow connections: they run while somebody is behind, and for nobody else."""

from __future__ import annotations

import asyncio

from gateway.connections import Grade
from gateway.slow import SlowConsumers


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
