"""Do durable topics keep their promises while processes die, and while they are resized; how long does a slot pause?

A whole cluster as `pixiu up --separate` runs it: two groups with two replicas each, two admins, two proxies. Writers with names and
members of two channels, `any` and `ordered`, are processes of their own (`topic_worker.py`). What they saw is judged by
`tests/history/topics.py` beside what a reader gets in the end.

    faults   for N rounds some victims are killed (SIGKILL) or stopped for some seconds (SIGSTOP): a leader, a follower, a whole
             group, an admin, a proxy, writers or members; with --power the power of a replica or of a whole group is cut
             (`power.py`); in every other round the topic is split, merged or moved at the same moment
    resize   while messages flow: 4 → 16 → 4 parts, and a move of every part
    holes    a leader is killed while a channel has a hole at every second of its messages
    scale    so many parts and channels in one process
    delays   so many messages that are not due, others behind them that are, and a kill of their leader
    filters  a channel of which a filter wants 1 %, beside one without
    store    writers while the object store fails for N minutes, and is away for N minutes; what it has is read (needs fsspec)

Estimate: nothing confirmed is lost, nothing acknowledged comes again, and each key is in order; a slot pauses for two commits, a
write to the registry and a description: 50 ms on two free cores.

    python -m benchmarks.clusters.topics [--what faults,resize,holes,scale,delays,filters,store] [--rounds 40] [--victims 1]
        [--power] [--seed 1] [--rate 20000] [--keys 16] [--messages 2000000] [--parts 1000] [--channels 1000] [--delayed 10000000]
        [--filtered 1000000] [--minutes 10] [--store-rate 500] [--keep DIR] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pixiu
from benchmarks.clusters import power, topic_scale, topic_store
from benchmarks.clusters.growth import folder_of, say
from tests.history.topics import CONFIRMED, GIVEN, Note, Stored, Verdict, judge, parse
from tests.support.cluster import LocalCluster, running_cluster
from tests.support.interposed import compiled
from tests.support.shared_zookeeper import end_shared_server

ORDERS = "orders"
CHANNELS = {"any": False, "ordered": True}
MEMBERS, WRITERS, KEYS = 3, 2, 8
TIMEOUT_S = 15.0
"""For which a member may keep a message."""
STOP_S = (2.0, 8.0)
"""Shortest and longest stop."""
HEALTHY_EVERY = 5
"""Rounds after which the cluster may heal."""
PAUSE_S = (0.5, 3.0)
"""Shortest and longest time between two rounds."""
LATE_NS = int((STOP_S[1] + 2 * TIMEOUT_S) * 1e9)
DRAIN_S = 240.0
VICTIMS = ("leader", "follower", "leader", "group", "admin", "proxy", "writers", "members")
POWERLESS = ("replica", "power", "power")
"""Victims besides: the power of one replica, and of a whole group."""
GROUPS, REPLICAS = 2, 2
SHAPE = [f"--{name}=1" for name in ("brokers", "broker-replicas", "routers", "router-replicas", "gateways")]
SHAPE += ["--relays=0", "--proxies=2", "--admins=2", f"--topics={GROUPS}", f"--topic-replicas={REPLICAS}"]
NAMES = [f"topic-{group}-{replica}" for group in range(GROUPS) for replica in range(REPLICAS)]


@dataclass
class Findings:
    """Results of all runs."""

    figures: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class Workers:
    """The processes of writers and members of a run.

    Args:
        cluster: that they use.
        options: of all, beside their own.
    """

    def __init__(self, cluster: LocalCluster, topic: str, pace: float, keys: int, quick: bool = False) -> None:
        self._cluster, self._topic, self._pace, self._keys, self._quick = cluster, topic, pace, keys, quick
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._log = (cluster.folder / f"{topic}-workers.log").open("ab")

    def file(self, name: str) -> Path:
        """The notes of a process."""
        return self._cluster.folder / f"{self._topic}-{name}.notes"

    def start(self, name: str) -> None:
        """Start `writers-N` or `members-N`; one that was killed goes on in the same file."""
        if name in self.running and self.running[name].poll() is None:
            return  # struck twice in one round
        what, number = name.split("-")
        command = [sys.executable, "-m", "benchmarks.clusters.topic_worker", what, self._cluster.target, self._topic]
        command += [str(self.file(name)), "--name", name, "--keys", str(self._keys), "--pace", str(self._pace)]
        command += ["--numbers", f"{2 * int(number) + 1},{2 * int(number) + 2}"] + ["--quick"] * self._quick
        if self._quick:
            command += ["--channels", "ordered"]
        self.running[name] = subprocess.Popen(command, stdout=self._log, stderr=self._log)

    def start_all(self, members: int = MEMBERS) -> None:
        """Start all writers and members."""
        for number in range(WRITERS):
            self.start(f"writers-{number}")
        for number in range(members):
            self.start(f"members-{number}")

    async def end(self, what: str) -> None:
        """End writers or members as they like; what a writer has sent is confirmed before."""
        mine = [process for name, process in self.running.items() if name.startswith(what)]
        for process in mine:
            process.terminate()
        for process in mine:
            await asyncio.to_thread(process.wait, DRAIN_S)

    def kill_all(self) -> None:
        """End what still runs."""
        for process in self.running.values():
            if process.poll() is None:
                process.kill()
                process.wait()
        self._log.close()

    def notes(self) -> list[Note]:
        """Everything that was noted."""
        return [note for name in self.running for note in parse(self.file(name).read_text())]


class Run:
    """One cluster, one topic, its writers and members.

    Args:
        cluster: that runs.
        px: a client.
        workers: of the topic.
        rolls: decides.
        disks: of replicas by name, if their power can be cut.
    """

    def __init__(
        self, cluster: LocalCluster, px: pixiu.Client, workers: Workers, topic: str, rolls: random.Random,
        disks: Mapping[str, power.Disk] | None = None,
    ) -> None:  # fmt: skip
        self._cluster, self._px, self._workers, self._topic, self._rolls = cluster, px, workers, topic, rolls
        self._disks = disks or {}
        self._victims: list[str] = []
        self.counts: dict[str, int] = defaultdict(int)
        self._resumed: list[asyncio.Task[None]] = []
        self._cutting = asyncio.Lock()

    # --- faults

    async def rounds(self, count: int, victims: int) -> None:
        """Break so many things at once in each round."""
        for number in range(count):
            work = [self._strike_one() for _ in range(victims)]
            if number % 2:
                work.append(self._resize())
            await asyncio.gather(*work)
            await asyncio.sleep(self._rolls.uniform(*PAUSE_S))
            if number % HEALTHY_EVERY == HEALTHY_EVERY - 1:
                await self.heal()
                say(f"after {number + 1} rounds: {dict(self.counts)}")
        await self.heal()

    async def heal(self) -> None:
        """Let what was stopped go on, and wait until the cluster is healthy."""
        await asyncio.gather(*self._resumed)
        self._resumed.clear()
        await asyncio.to_thread(self._cluster.wait_healthy)

    async def _strike_one(self) -> None:
        if not self._victims:
            everything = VICTIMS + POWERLESS * bool(self._disks)
            self._victims = self._rolls.sample(everything, len(everything))
        victim = self._victims.pop()
        if victim in POWERLESS:
            await self._cut_power(victim)
        else:
            await self._strike(victim, stops=self._rolls.random() < 0.4)

    async def _cut_power(self, victim: str) -> None:
        group = self._rolls.randrange(GROUPS)
        names = [name for name in NAMES if name.startswith(f"topic-{group}-")]
        names = [self._rolls.choice(names)] if victim == "replica" else names
        say(f"power cut of {names}")
        async with self._cutting:
            disks = [self._disks[name] for name in names]
            await asyncio.to_thread(power.cut, disks, self._cluster.supervisor, random.Random(self._rolls.getrandbits(32)))
        self.counts["power cuts of replicas"] += len(names)

    async def _strike(self, victim: str, *, stops: bool) -> None:
        pids, names = await asyncio.to_thread(self._pids, victim)
        say(f"{'stop' if stops else 'kill'} {victim} {pids}")
        for pid in pids:
            self.counts[f"{'stops' if stops else 'kills'} of {victim}"] += 1
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP if stops else signal.SIGKILL)
        if stops:
            self._resumed.append(asyncio.create_task(self._go_on(pids)))
            return
        for name in names:
            await asyncio.to_thread(self._workers.running[name].wait)
            self._workers.start(name)

    async def _go_on(self, pids: Sequence[int]) -> None:
        await asyncio.sleep(random.uniform(*STOP_S))
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _pids(self, victim: str) -> tuple[list[int], list[str]]:
        """Processes to strike, and which of them are workers."""
        if victim in ("writers", "members"):
            name = self._rolls.choice([each for each in self._workers.running if each.startswith(victim)])
            return [self._workers.running[name].pid], [name]
        role = victim if victim in ("admin", "proxy") else "topic"
        found = self._cluster.processes(role)
        if role == "topic":
            group = self._rolls.randrange(GROUPS)
            found = [each for each in found if each["partition"] == group and each.get("replication")]
            if victim != "group":
                leads = [each for each in found if each["replication"]["member"] == each["replication"]["leader"]]
                found = leads if victim == "leader" else [each for each in found if each not in leads]
        if victim != "group":
            found = [self._rolls.choice(found)] if found else []
        return [int(each["pid"]) for each in found], []

    # --- resizes

    async def _resize(self) -> None:
        info = await self._px.topics.describe(self._topic)
        parts = sorted(info.open_parts, key=lambda part: part.low)
        if len(parts) >= 8:
            at = self._rolls.randrange(len(parts) - 2)
            await self.change([part.number for part in parts[at : at + 3]])
        else:
            part = self._rolls.choice(parts)
            bounds = [(part.low + part.high) // 2] if self._rolls.random() < 0.6 else []
            await self.change([part.number], bounds, [] if bounds else [1 - part.group])

    async def change(self, parts: Sequence[int], bounds: Sequence[int] = (), groups: Sequence[int] = ()) -> None:
        """Resize; an admin that was killed may have done it, or may not."""
        try:
            await self._px.topics.resize(self._topic, parts, bounds=bounds, groups=groups)
            self.counts["resizes"] += 1
        except pixiu.PixiuError as error:
            self.counts[f"resizes with {error.code}"] += 1

    # --- the end

    async def verdict(self, channels: dict[str, bool]) -> tuple[Verdict, list[Note]]:
        """End writers, drain the channels, read everything and compare."""
        await self._workers.end("writers")
        say("writers have ended")
        topic = self._px.durable_topic(self._topic)
        try:
            async with asyncio.timeout(DRAIN_S):
                while await self._unacknowledged(channels):
                    await asyncio.sleep(0.5)
        except TimeoutError:
            raise RuntimeError(f"channels do not get everything: {await self._left(channels)}") from None
        await self._workers.end("members")
        say("channels have everything")
        state = await self._px.topics.channel_state(self._topic, next(iter(channels)))
        total = sum(part.end for part in state)
        stored = []
        async with asyncio.timeout(DRAIN_S), topic.reader(load_test="pass") as reader:
            for _ in range(total):
                message = await anext(reader)
                writer, number, key = map(int, message.body.split(b" ", 3)[:3])
                stored.append(Stored(message.part, message.offset, writer, number, key))
        info = await self._px.topics.describe(self._topic)
        notes = self._workers.notes()
        parents = {part.number: part.parents for part in info.parts}
        verdict = judge(notes, stored, parents, channels, LATE_NS)
        for part in await self._px.topics.channel_state(self._topic):
            if part.dead or part.lost:
                verdict.violation("dead or lost", part)
        return verdict, notes

    async def _unacknowledged(self, channels: dict[str, bool]) -> int:
        try:
            parts = [part for name in channels for part in await self._px.topics.channel_state(self._topic, name)]
        except pixiu.PixiuError:
            return -1
        return sum(part.unacknowledged for part in parts)

    async def _left(self, channels: dict[str, bool]) -> list[object]:
        """What channels wait for, and which workers still run."""
        found: list[object] = [name for name, process in self._workers.running.items() if process.poll() is None]
        with contextlib.suppress(pixiu.PixiuError):
            for name in channels:
                found += [part for part in await self._px.topics.channel_state(self._topic, name) if part.unacknowledged]
        return found


async def faults(arguments: argparse.Namespace, folder: Path, findings: Findings) -> None:
    """Kill and stop processes, and cut their power, for so many rounds."""
    with contextlib.ExitStack() as stack:
        disks = stack.enter_context(power.disks(folder, NAMES)) if arguments.power else {}
        if arguments.no_syncs:  # before the first process is begun
            os.environ["LD_PRELOAD"] = str(compiled(power.NO_SYNCS, folder, "no-syncs"))
        cluster = stack.enter_context(running_cluster(folder, *SHAPE, layout="separate"))
        await asyncio.to_thread(cluster.wait_healthy)
        async with pixiu.connect(cluster.target) as px:
            await px.topics.create(ORDERS, parts=4)
            for name, ordered in CHANNELS.items():
                await px.topics.set_channel(ORDERS, name, ordered=ordered, max_attempts=10_000, timeout_s=TIMEOUT_S)
            workers = Workers(cluster, ORDERS, arguments.pace, KEYS)
            workers.start_all()
            run = Run(cluster, px, workers, ORDERS, random.Random(arguments.seed), disks)
            try:
                await asyncio.sleep(5.0)
                await run.rounds(arguments.rounds, arguments.victims)
                verdict, _ = await run.verdict(CHANNELS)
            finally:
                workers.kill_all()
    findings.figures["faults"] = {**run.counts, **verdict.counts}
    findings.problems += verdict.violations


async def resize(arguments: argparse.Namespace, folder: Path, findings: Findings) -> None:
    """Split, merge and move while messages flow."""
    keys = arguments.keys
    with running_cluster(folder, *SHAPE, layout="separate") as cluster:
        await asyncio.to_thread(cluster.wait_healthy)
        async with pixiu.connect(cluster.target) as px:
            await px.topics.create(ORDERS, parts=4)
            await px.topics.set_channel(ORDERS, "ordered", ordered=True, max_attempts=10_000, timeout_s=60.0)
            workers = Workers(cluster, ORDERS, arguments.rate / (2 * WRITERS), keys, quick=True)
            workers.start_all(members=arguments.members)
            run = Run(cluster, px, workers, ORDERS, random.Random(arguments.seed))
            spans: dict[str, tuple[int, int]] = {}
            try:
                await asyncio.sleep(5.0)
                for name, step in (("quiet", None), ("4 → 16", _split), ("16 → 4", _merge), ("moves", _move)):
                    spans[name] = await _timed(step, run, px)
                    say(f"{name}: {(spans[name][1] - spans[name][0]) / 1e9:.1f} s")
                verdict, notes = await run.verdict({"ordered": True})
            finally:
                workers.kill_all()
    findings.figures["resize"] = {**run.counts, **verdict.counts} | {
        name: _pauses(notes, span, keys) for name, span in spans.items()
    }
    findings.problems += verdict.violations


Step = Callable[[Run, pixiu.Client], Any]


async def _timed(step: Step | None, run: Run, px: pixiu.Client) -> tuple[int, int]:
    began = time.monotonic_ns()
    if step is not None:
        await step(run, px)
    await asyncio.sleep(5.0)
    return began, time.monotonic_ns()


async def _split(run: Run, px: pixiu.Client) -> None:
    for part in (await px.topics.describe(ORDERS)).open_parts:
        size = (part.high - part.low) // 4
        await run.change([part.number], [part.low + size * each for each in (1, 2, 3)])


async def _merge(run: Run, px: pixiu.Client) -> None:
    parts = sorted((await px.topics.describe(ORDERS)).open_parts, key=lambda part: part.low)
    for at in range(0, len(parts), 4):
        await run.change([part.number for part in parts[at : at + 4]])


async def _move(run: Run, px: pixiu.Client) -> None:
    for part in (await px.topics.describe(ORDERS)).open_parts:
        await run.change([part.number], groups=[1 - part.group])


def _pauses(notes: Sequence[Note], span: tuple[int, int], keys: int) -> dict[str, float]:
    """Rates, and pauses of slots, ms: the longest time between two confirmations, and two deliveries, of a key."""
    figures: dict[str, float] = {"s": round((span[1] - span[0]) / 1e9, 1)}
    for kind, what in ((CONFIRMED, "confirmed"), (GIVEN, "given")):
        longest: dict[tuple[int, int], float] = defaultdict(float)
        last: dict[tuple[int, int], int] = {}
        mine = sorted(note for note in notes if note.kind == kind and span[0] <= note.at_ns <= span[1])
        for note in mine:
            key = note.writer, note.number % keys
            longest[key] = max(longest[key], (note.at_ns - last.get(key, note.at_ns)) / 1e6)
            last[key] = note.at_ns
        figures[f"{what} a second"] = round(len(mine) * 1e9 / (span[1] - span[0]))
        if longest:
            figures[f"{what}, pause ms, median"] = round(statistics.median(longest.values()), 1)
            figures[f"{what}, pause ms, longest"] = round(max(longest.values()), 1)
    return figures


RUNS = {
    "faults": faults, "resize": resize, "holes": topic_scale.holes, "scale": topic_scale.scale, "delays": topic_scale.delays,
    "filters": topic_scale.filters, "store": topic_store.store,
}  # fmt: skip


def main() -> int:
    """Run, and print the results. Returns 1 when a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", default=tuple(RUNS), type=lambda text: tuple(text.split(",")))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--victims", type=int, default=1, help="faults: victims of a round")
    parser.add_argument("--power", action="store_true", help="faults: cut the power of replicas, too; needs root")
    parser.add_argument("--no-syncs", action="store_true", help="faults: replicas sync nothing, so that power cuts must be noticed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pace", type=float, default=100.0, help="faults: messages a second of each writer")
    parser.add_argument("--rate", type=float, default=20_000.0, help="resize: messages a second of all writers")
    parser.add_argument("--keys", type=int, default=16, help="resize: of each writer; the fewer, the finer pauses are seen")
    parser.add_argument("--members", type=int, default=1, help="resize: processes of members")
    parser.add_argument("--messages", type=int, default=2_000_000, help="holes")
    parser.add_argument("--parts", type=int, default=1_000, help="scale")
    parser.add_argument("--channels", type=int, default=1_000, help="scale")
    parser.add_argument("--delayed", type=int, default=10_000_000, help="delays: messages that are not due")
    parser.add_argument("--filtered", type=int, default=1_000_000, help="filters: messages")
    parser.add_argument("--minutes", type=float, default=10.0, help="store: of each phase")
    parser.add_argument("--store-rate", type=float, default=500.0, help="store: messages of 1,000 bytes a second")
    parser.add_argument("--keep", default="", help="keep logs and notes in this folder")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    findings = Findings()
    for what in arguments.what:
        with folder_of(arguments.keep) as folder:
            try:
                asyncio.run(RUNS[what](arguments, folder, findings))
            except (AssertionError, TimeoutError, pixiu.PixiuError) as error:
                findings.problems.append(f"{what}: {error!r}")
            finally:
                end_shared_server()
    if arguments.json:
        print(json.dumps({"figures": findings.figures, "problems": findings.problems}, ensure_ascii=False))
    else:
        for what, figures in findings.figures.items():
            print(what, *(f"    {name}: {value}" for name, value in figures.items()), sep="\n")
        print(*findings.problems, sep="\n")
    return 1 if findings.problems else 0


if __name__ == "__main__":
    sys.exit(main())
