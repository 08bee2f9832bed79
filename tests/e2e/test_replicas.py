"""Replicas as processes: what was acknowledged stays, whatever happens to them.

The times from a kill to the next acknowledgement are printed; the aim is the session timeout and two seconds.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from onebox.embedded import EmbeddedZooKeeper
from tests.support.replicas import Replicas, Writers
from tests.support.waiting import until
from tests.support.zookeeper import connected

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


async def test_a_leader_that_hangs_is_replaced_and_follows_when_it_is_back(make: Make) -> None:
    replicas = await make("a", "b", "c")
    async with Writers(replicas) as writers:
        await writers.wait_more(100)
        hung = await replicas.wait_leader()
        led = (await replicas.status(hung))["epoch"]
        replicas.send_signal(hung, signal.SIGSTOP)
        waited = await writers.wait_more()
        await replicas.wait_leader(hung)
        replicas.send_signal(hung, signal.SIGCONT)
        await replicas.wait_in_sync(3)
        # It follows. Beside a load a session may end, and then anybody is elected, also who hung before.
        assert (await replicas.status(await replicas.wait_leader()))["epoch"] > led
        await writers.wait_more()
    print(f"\nfrom a leader that hangs to the next acknowledgement: {waited:.2f} s")
    writers.check(await replicas.wait_equal("a", "b", "c"))


async def test_an_outage_of_zookeeper_stops_nothing_while_all_replicas_live(make: Make, own_server: EmbeddedZooKeeper) -> None:
    replicas = await make("a", "b")
    async with Writers(replicas) as writers:
        await writers.wait_more(100)
        leader = await replicas.wait_leader()
        await asyncio.to_thread(own_server.kill)
        await writers.wait_more(200)
        await asyncio.to_thread(own_server.start)
        await writers.wait_more(200)
        assert (await replicas.status(leader))["state"] == "Leading"
    writers.check(await replicas.wait_equal("a", "b"))


async def test_sessions_that_end_make_new_incarnations(make: Make, own_server: EmbeddedZooKeeper) -> None:
    replicas = await make("a", "b")
    async with Writers(replicas) as writers:
        await writers.wait_more(100)
        before = await incarnations(replicas)
        await asyncio.to_thread(own_server.kill)
        await asyncio.sleep(1)
        # ZooKeeper is back while no client is, for longer than the sessions last.
        for name in ("a", "b"):
            replicas.send_signal(name, signal.SIGSTOP)
        await asyncio.to_thread(own_server.start)
        await asyncio.sleep(4)
        for name in ("a", "b"):
            replicas.send_signal(name, signal.SIGCONT)
        await writers.wait_more(100)

        async def renewed() -> bool:
            return all(now > before[name] for name, now in (await incarnations(replicas)).items())

        await until(renewed, "new incarnations")
        await replicas.wait_in_sync(2)
    writers.check(await replicas.wait_equal("a", "b"))


async def incarnations(replicas: Replicas) -> dict[str, int]:
    """Of every replica."""
    return {name: (await replicas.status(name)).get("incarnation", 0) for name in replicas.live()}
