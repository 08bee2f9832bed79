"""Runs every server in turn, round by round, on the same work.

    for each round: for each server, each time beginning with another: start it, run every case, end it

A load runs in a process of its own. The measured CPU is that of all processes of a server, from when the load has connected and
warmed up until everything is delivered; for Pixiu that of every role, and of ZooKeeper.

Source: docs/performance.md, "Beside others".
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from comparison.cases import Case
from comparison.ours import build, builds, cluster
from comparison.processes import cpu_seconds, machine_seconds, memory_bytes, session_pids
from comparison.results import OURS, Looked, Results, Sample, sample_of
from comparison.servers import PEERS, Peer
from pixiu.errors import Unavailable

LOAD_LIMIT_S: Final = 120.0
"""Time in addition to the seconds of the case: to connect, and to receive late messages."""
REPLICAS: Final = 2
"""Replicas of Xiu and Pi for mail."""


@dataclass(frozen=True, slots=True)
class Target:
    """A running server."""

    name: str
    port: int
    pids: Callable[[], Mapping[str, Sequence[int]]]
    """Its processes, by kind."""
    wire: str = "mqtt"
    topic: str = "room/{}"
    proxies: str = ""


def order(names: Sequence[str], number: int) -> list[str]:
    """Return the order of a round: each round begins with another one."""
    at = number % len(names) if names else 0
    return [*names[at:], *names[:at]]


def look(target: Target, load: int) -> Looked:
    """Read what the server, the load and the machine have used by now."""
    pids = target.pids()
    used = {name: cpu_seconds(some) for name, some in pids.items()}
    memory = sum(map(memory_bytes, pids.values()))
    return Looked(used, machine_seconds(), cpu_seconds([load]), memory, time.monotonic())


def load_command(case: Case, target: Target, seconds: float) -> list[str]:
    """Return the command line of a load."""
    if case.kind == "mail":
        return [
            sys.executable,
            "-m",
            "comparison.mail_load",
            case.name,
            str(target.port),
            target.wire,
            str(seconds),
            target.proxies,
        ]
    return [sys.executable, "-m", "comparison.load", case.name, str(target.port), target.wire, target.topic, str(seconds)]


async def measure(case: Case, target: Target, seconds: float) -> Sample:
    """Run one case against one server. Raises Unavailable with the load's errors when it failed."""
    process = await asyncio.create_subprocess_exec(
        *load_command(case, target, seconds),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(seconds + LOAD_LIMIT_S):
            if await process.stdout.readline():
                before = look(target, process.pid)
                process.stdin.write(b"\n")
                if line := await process.stdout.readline():
                    return sample_of(case, json.loads(line), before, look(target, process.pid))
            said = (await process.stderr.read()).decode(errors="replace").strip()
            why = said.splitlines()[-1] if said else "it said nothing"
            raise Unavailable(f"the load of {case.name} at {target.name} failed: {why}")
    finally:
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5):
                await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()


@contextlib.asynccontextmanager
async def ours(name: str, switch: str, mail: bool) -> AsyncIterator[Target]:
    """Run a proxy, a broker, a router and a gateway; for mail also a relay and replicas of Xiu and Pi."""
    with build(switch):
        async with cluster(stores=REPLICAS if mail else 0, relays=int(mail)) as running:
            yield Target(name, running.mqtt_ports[0], lambda: running.everything, proxies=running.proxies)


@contextlib.asynccontextmanager
async def theirs(peer: Peer) -> AsyncIterator[Target]:
    """Run one server of another kind."""
    with tempfile.TemporaryDirectory() as folder, peer.start(Path(folder) / peer.name) as (port, session):
        yield Target(peer.name, port, lambda: {peer.name: session_pids(session)}, peer.wire, peer.topic)


async def run_one(
    name: str, cases: Sequence[Case], number: int, seconds: float, results: Results, say: Callable[[str], None]
) -> None:
    """Run all cases of a server once. Pixiu restarts for mail, with the additional roles."""
    switches = dict(builds())
    able = [case for case in cases if name in switches or (can := PEERS[name].cases) is None or case.name in can]
    parts = [[case for case in able if (case.kind == "mail") is mail] for mail in (False, True)] if name in switches else [able]
    for part in filter(None, parts):
        starting = ours(name, switches[name], part[0].kind == "mail") if name in switches else theirs(PEERS[name])
        async with starting as target:
            for case in part:
                say(f"{name}: {case.title}, {case.size}")
                sample = await measure(case, target, seconds)
                results[case.name].setdefault(name, []).append(replace(sample, round=number))


async def run(
    cases: Sequence[Case], servers: Sequence[str], rounds: int, seconds: float, say: Callable[[str], None]
) -> tuple[Results, list[str]]:
    """Run all rounds. Returns the results, and the failures. A server that fails is left out for the rest of its round."""
    results: Results = {case.name: {} for case in cases}
    names = [name for server in servers for name in (dict(builds()) if server == OURS else [server])]
    failures: list[str] = []
    for number in range(1, rounds + 1):
        for name in order(names, number - 1):

            def say_more(text: str, number: int = number) -> None:
                say(f"round {number}/{rounds}, {text}")

            try:
                await run_one(name, cases, number, seconds, results, say_more)
            except (Unavailable, RuntimeError, OSError) as error:
                failures.append(f"round {number}: {name}: {error}")
                say(failures[-1])
    return results, failures
