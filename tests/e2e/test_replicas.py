"""Replicas as processes: what was acknowledged stays, whatever happens to them.

The times from a kill to the next acknowledgement are printed; the aim is the session timeout and two seconds.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from registry.embedded import EmbeddedZooKeeper
from tests.support.replicas import Replicas, Writers
from tests.support.zookeeper import connected

ROUNDS = int(os.environ.get("PIXIU_KILL_ROUNDS", "4"))
Make = Callable[..., Awaitable[Replicas]]


@pytest.fixture
async def make(own_server: EmbeddedZooKeeper, tmp_path: Path) -> AsyncIterator[Make]:
    """Starts replicas by name, and ends them with the test."""
    made: list[Replicas] = []

    async def start(*names: str, **settings: object) -> Replicas:
        replicas = Replicas(tmp_path, own_server, **settings)  # type: ignore[arg-type]
        made.append(replicas)
        zookeeper = await connected(own_server)
        await replicas.layout(zookeeper)
        await zookeeper.close()
        replicas.start(*names)
        if names:
            await replicas.wait_in_sync(len(names))
        return replicas

    try:
        yield start
    finally:
        for replicas in made:
            await asyncio.to_thread(replicas.stop)


async def test_a_leader_that_is_killed_again_and_again_loses_nothing(make: Make) -> None:
    replicas = await make("a", "b")
    times = []
    async with Writers(replicas) as writers:
        await writers.wait_more(100)
        for _ in range(ROUNDS):
            leader = await replicas.wait_leader()
            replicas.send_signal(leader, signal.SIGKILL)
            times.append(await writers.wait_more(50))
            replicas.start(leader)
            await replicas.wait_in_sync(2)
            await writers.wait_more(50)
    print(
        f"\nfrom a kill to the next acknowledgement: {', '.join(f'{t:.2f} s' for t in times)}; writes {len(writers.acknowledged)}"
    )
    writers.check(await replicas.wait_equal("a", "b"))
