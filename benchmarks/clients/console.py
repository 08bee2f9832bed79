"""How long does a page of the console take with 20,000 clients and 10,000 topics, and what does the console cost?

A console of a cluster whose clients idle. Pages are asked for one after the other, several rounds; the time of one is that of the
slowest of its requests, which a browser sends together. CPU of the console: with nobody logged in, and while a map is open, which
asks for `map` and `series` every two seconds.

Estimate, written before the first run: the map asks some ten processes for /health, 50 ms. Clients are the first 1,000 of each
gateway, 100 to 200 ms of JSON. A page of 50 topics is cut from an index, 20 ms. 0.5 % of a core with nobody there, 1 % with a map.

Found, with 28 roles: map 70 ms, clients 61, a page of topics 80, plan of a doubling 1.1 s, because it counts the load for a second.
The console uses 0.4 to 0.5 % of a core with nobody there, and 1.0 to 1.4 % with a map.

    python -m benchmarks.clients.console [--clients 20000] [--topics 10000] [--rounds 5] [--seconds 30] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

import pixiu
from benchmarks.clients.storm import crowd
from benchmarks.clients.watching import percentile
from comparison.processes import cpu_seconds
from tests.support.cluster import running_cluster
from tests.support.shared_zookeeper import end_shared_server
from tests.support.waiting import until

PAGES = {
    "map": ("map", "series"),
    "clients": ("clients?sort=backlog&limit=200",),
    "clients, one by its name": ("clients?client=storm-777",),
    "rooms": ("rooms", "retained?filter=%23"),
    "topics": ("topics?limit=50",),
    "topics, in the middle": ("topics?prefix=many.5&limit=50",),
    "one topic": ("topic?name=many.7",),
    "inbox": ("inbox?uin=7",),
    "paths": ("paths",),
    "growth": ("growth",),
    "plan of a doubling": ("growth/plan?role=broker",),
    "plan of moves": ("growth/moves",),
    "bridges": ("bridges",),
    "security": ("security",),
}
AT_ONCE = 64
"""Topics that are created at one time."""
MAP_S = 2.0


@asynccontextmanager
async def console(target: str) -> AsyncIterator[tuple[int, str, str]]:
    """A console; yields its process ID, its URL and the token."""
    command = (sys.executable, "-m", "ops.console", "--target", target, "--port", "0")
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
    assert process.stdout is not None
    try:
        url, token = (await process.stdout.readline()).decode().strip().split("#token=")
        yield process.pid, url, token
    finally:
        process.terminate()
        await process.wait()


async def create(target: str, count: int) -> None:
    """Topics many.0, many.1, …"""
    numbers = iter(range(count))

    async def some(px: pixiu.Client) -> None:
        for number in numbers:
            await px.topics.create(f"many.{number}", parts=1, if_missing=True)

    async with pixiu.connect(target) as px:
        await asyncio.gather(*(some(px) for _ in range(AT_ONCE)))


async def took(session: aiohttp.ClientSession, url: str, requests: Sequence[str]) -> float:
    """Seconds that a page's requests take together. Raises RuntimeError if one is refused."""

    async def ask(request: str) -> None:
        async with session.get(f"{url}api/{request}") as answer:
            text = await answer.text()
            if answer.status != 200:
                raise RuntimeError(f"{request}: {answer.status} {text[:200]}")

    began = time.perf_counter()
    await asyncio.gather(*map(ask, requests))
    return time.perf_counter() - began


async def is_counted(session: aiohttp.ClientSession, url: str) -> bool:
    """True once an admin has counted probes."""
    async with session.get(f"{url}api/paths") as answer:
        return answer.status == 200


async def share(pid: int, seconds: float) -> float:
    """Per cent of a core that a process uses."""
    before, began = cpu_seconds([pid]), time.perf_counter()
    await asyncio.sleep(seconds)
    return 100 * (cpu_seconds([pid]) - before) / (time.perf_counter() - began)


async def look(session: aiohttp.ClientSession, url: str) -> None:
    """What an open map asks for."""
    while True:
        await took(session, url, ("map", f"series?since={int(1e3 * (time.time() - MAP_S))}"))
        await asyncio.sleep(MAP_S)


async def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure all. Returns the figures."""
    figures: dict[str, Any] = {}
    options = (
        "--gateways=2", "--xius=1", "--pis=1", "--topics=12", "--topic-replicas=1", "--set=cluster.topic_rooms=storm=2:256",
        "--set=admin.probe_interval_ms=5000", f"--set=admin.probe_file={folder}/availability.json",
    )  # fmt: skip
    with running_cluster(folder, *options, layout="nodes") as cluster:
        await asyncio.to_thread(cluster.wait_healthy)
        began = time.monotonic()
        await create(cluster.target, arguments.topics)
        figures["topics_created_s"] = round(time.monotonic() - began, 1)
        async with (
            crowd(arguments.clients, 2, cluster.mqtt_ports(), False) as clients,
            console(cluster.target) as (pid, url, token),
        ):
            await clients.until(arguments.clients, "the clients")
            figures["closed_percent"] = round(await share(pid, arguments.seconds), 2)
            async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
                async with session.post(f"{url}api/login", json={"token": token}) as answer:
                    answer.raise_for_status()
                await until(partial(is_counted, session, url), "the first probes")
                figures["pages_ms"] = pages = {}
                for page, requests in PAGES.items():
                    pages[page] = sorted([round(1e3 * await took(session, url, requests)) for _ in range(arguments.rounds)])
                looking = asyncio.create_task(look(session, url))
                figures["map_open_percent"] = round(await share(pid, arguments.seconds), 2)
                looking.cancel()
                await asyncio.wait([looking])
            figures["clients"], figures["load"] = clients.there, round(os.getloadavg()[0], 1)
    return figures


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=20_000)
    parser.add_argument("--topics", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5, help="of each page")
    parser.add_argument("--seconds", type=float, default=30.0, help="for which the console's CPU is measured")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pixiu-console-") as name:
        try:
            figures = asyncio.run(run(arguments, Path(name)))
        finally:
            end_shared_server()
    if arguments.json:
        print(json.dumps(figures))
        return 0
    for page, times in figures.pop("pages_ms").items():
        print(f"{page:26} {percentile(times, 0.5):6.0f} ms, at most {times[-1]:6.0f}")
    print(figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
