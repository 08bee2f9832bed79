"""Replicas as processes: what was acknowledged stays, whatever happens to them.

The times from a kill to the next acknowledgement are printed; the aim is the session timeout and two seconds.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from onebox.embedded import EmbeddedZooKeeper
from tests.support.replicas import Make, Replicas, Writers, making
from tests.support.waiting import until


@pytest.fixture
async def make(zookeeper_server: EmbeddedZooKeeper, tmp_path: Path) -> AsyncIterator[Make]:
    async with making(zookeeper_server, tmp_path) as start:
        yield start


@pytest.fixture
async def make_at(own_server: EmbeddedZooKeeper, tmp_path: Path) -> AsyncIterator[Make]:
    """Beside a server that the test may kill."""
    async with making(own_server, tmp_path) as start:
        yield start


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


async def test_an_outage_of_zookeeper_stops_nothing_while_all_replicas_live(make_at: Make, own_server: EmbeddedZooKeeper) -> None:
    replicas = await make_at("a", "b")
    async with Writers(replicas) as writers:
        await writers.wait_more(100)
        leader = await replicas.wait_leader()
        await asyncio.to_thread(own_server.kill)
        await writers.wait_more(200)
        await asyncio.to_thread(own_server.start)
        await writers.wait_more(200)
        assert (await replicas.status(leader))["state"] == "Leading"
    writers.check(await replicas.wait_equal("a", "b"))


async def test_sessions_that_end_make_new_incarnations(make_at: Make, own_server: EmbeddedZooKeeper) -> None:
    replicas = await make_at("a", "b")
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
