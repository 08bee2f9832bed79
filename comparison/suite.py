"""Runs every server in turn, round by round, on the same work.

    for each round: for each server, each time beginning with another: start it, run cases, end it

A load runs in a process of its own. The measured CPU is that of all processes of a server, from when the load has connected and
warmed up until everything is delivered; for Pixiu that of `pixiu up` and all that it starts, ZooKeeper included.

Source: docs/performance.md, "Beside others".
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from comparison.cases import Case, Kind
from comparison.ours import build, builds, options, up
from comparison.processes import cpu_seconds, machine_seconds, memory_bytes, session_pids, switches
from comparison.results import OURS, Looked, Results, Sample, sample_of
from comparison.servers import PEERS, Peer
from pixiu.errors import Unavailable

LOAD_LIMIT_S: Final = 120.0
"""Time in addition to the seconds of the case: to connect, and to receive late messages."""
ALONE: Final[Set[Kind]] = {"idle", "mail"}
"""Kinds of cases that need a server that nobody has used: rest, and mail, which leaves users and their sessions behind."""
SETTLE_S: Final = 2.0
"""Time after a start that is no rest yet."""


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
    start_s: float = 0.0
    """Time from its start until it was ready."""


def order(names: Sequence[str], number: int) -> list[str]:
    """Return the order of a round: each round begins with another one."""
    at = number % len(names) if names else 0
    return [*names[at:], *names[:at]]


def look(target: Target, *load: int) -> Looked:
    """Read what the server, the load's process and the machine have used by now."""
    kinds = target.pids()
    pids = [pid for some in kinds.values() for pid in some]
    used, memory, waited = {name: cpu_seconds(some) for name, some in kinds.items()}, memory_bytes(pids), switches(pids)
    return Looked(used, machine_seconds(), cpu_seconds(load), memory, time.monotonic(), len(pids), waited)


def load_command(case: Case, target: Target, seconds: float) -> list[str]:
    """Return the command line of a load."""
    if module := {"mail": "comparison.mail_load", "topics": "comparison.topics.load"}.get(case.kind):
        return [sys.executable, "-m", module, case.name, str(target.port), target.wire, str(seconds), target.proxies]
    return [sys.executable, "-m", "comparison.load", case.name, str(target.port), target.wire, target.topic, str(seconds)]


async def rest(case: Case, target: Target, seconds: float) -> Sample:
    """Measure a server that nobody uses."""
    await asyncio.sleep(SETTLE_S)
    before = look(target)
    await asyncio.sleep(seconds)
    return replace(sample_of(case, {}, before, look(target)), start_s=target.start_s)


async def measure(case: Case, target: Target, seconds: float) -> Sample:
    """Run one case against one server. Raises Unavailable with the load's errors when it failed."""
    if case.kind == "idle":
        return await rest(case, target, seconds)
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
async def ours(name: str, switch: str, kind: Kind, layout: str) -> AsyncIterator[Target]:
    """Run a cluster for cases of this kind."""
    with build(switch):
        async with up(options(kind, layout)) as running:
            yield Target(name, running.mqtt_port, running.pids, proxies=running.proxies, start_s=running.start_s)


@contextlib.asynccontextmanager
async def theirs(peer: Peer) -> AsyncIterator[Target]:
    """Run one server of another kind."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        with peer.start(Path(folder) / peer.name) as (port, session):
            start_s = time.monotonic() - began
            yield Target(peer.name, port, lambda: {peer.name: session_pids(session)}, peer.wire, peer.topic, start_s=start_s)


async def run_one(
    name: str, cases: Sequence[Case], number: int, seconds: float, layout: str, results: Results, say: Callable[[str], None]
) -> None:
    """Run all cases of a server once, in one start of it but for those in `ALONE`."""
    switches = dict(builds())
    able = [case for case in cases if name in switches or (can := PEERS[name].cases) is None or case.name in can]
    together = [case for case in able if case.kind not in {*ALONE, "topics"}]
    topics = [case for case in able if case.kind == "topics"]
    for part in (*([case] for case in able if case.kind in ALONE), *(some for some in (together, topics) if some)):
        starting = ours(name, switches[name], part[0].kind, layout) if name in switches else theirs(PEERS[name])
        async with starting as target:
            for case in part:
                say(f"{name}: {case.title}, {case.size}")
                sample = await measure(case, target, seconds)
                results[case.name].setdefault(name, []).append(replace(sample, round=number))


async def run(
    cases: Sequence[Case], servers: Sequence[str], rounds: int, seconds: float, layout: str, say: Callable[[str], None]
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
                await run_one(name, cases, number, seconds, layout, results, say_more)
            except (Unavailable, RuntimeError, OSError) as error:
                failures.append(f"round {number}: {name}: {error}")
                say(failures[-1])
    return results, failures
