"""Prove that bridges lose nothing while their processes and the systems at the other end are killed, and measure what they cost.

For each kind: messages of 100 bytes with 50 keys, while the bridge's process is killed (kill -9) three times and the other end
twice (for files: another file takes the folder's place). The judge knows what was sent and what arrived: nothing is missing, order
by key and once where that is promised, and the lag is 0 at the end. The other ends are a webhook of its own process, a folder,
Mosquitto, and Kafka where `PIXIU_BENCH_KAFKA` names a folder with its jars. CPU counts from when a bridge's process runs; its start
is left out.

`--what away`: a webhook is away for `--minutes` while a producer writes: memory of the bridge, and the producer's times.

Estimate: a message costs a bridge 15 µs for the member and the acknowledgement, and what the other end's client takes: webhook
5 µs, files 5, MQTT 40 (paho), Kafka 6; from Kafka 12 µs, from MQTT 60. So 45,000 a CPU second to files and Kafka, 15,000 by MQTT.

    python -m benchmarks.clusters.bridges [--messages 100000] [--what to-kafka from-kafka …] [--minutes 10] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pixiu
from benchmarks.clusters.bridging.ends import ENDS, Hook, Source
from benchmarks.clusters.bridging.judge import Judgement, Promise, judge
from benchmarks.clusters.growth import say
from comparison.processes import cpu_seconds, family_pids, free_port
from tests.support.cluster import LocalCluster, running_cluster
from tests.support.kafka import is_installed
from tests.support.waiting import until
from tools.cli.http import fetch

SHAPE = [f"--{name}=1" for name in ("brokers", "broker-replicas", "routers", "router-replicas", "gateways", "proxies")]
SHAPE += ["--relays=0", "--topics=1", "--topic-replicas=1", "--admins=1"]
KEYS = 50
KILLS = ((0.1, "bridge"), (0.25, "end"), (0.4, "bridge"), (0.6, "end"), (0.8, "bridge"))
"""Share of the messages that have arrived, and what is killed then."""
AWAY_S = 1.0
WAIT_S = 900.0
AHEAD = 20_000
"""Messages that the load is ahead of what arrived: so kills hit a bridge at work."""
AWAY_RATE, AWAY_BYTES, AWAY_BEFORE_S = 500, 1_000, 20.0
AWAY = "away"
PROMISES = {
    "to-files": Promise(ordered=False), "to-kafka-once": Promise(once=True), "from-kafka": Promise(once=True),
}  # fmt: skip


class BridgeProcess:
    """The process of a bridge named `b`, which is killed and started again; its CPU is added up.

    Args:
        folder: for its log and files.
        target: of the cluster.
        table: of the bridge.
    """

    def __init__(self, folder: Path, target: str, table: str) -> None:
        self._folder, self._target = folder, target
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "bridges.toml").write_text(table)
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._before = 0.0
        self.cpu = 0.0

    @property
    def pid(self) -> int:
        """Its process."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start it, and wait until the bridge has begun."""
        self._port = free_port()
        wanted = {"registry": self._target, "bridges": self._folder / "bridges.toml", "data_dir": self._folder / "data",
                  "http_port": self._port, "session_timeout_ms": 4000}  # fmt: skip
        command = [sys.executable, "-m", "bridge"]
        for key, value in wanted.items():
            command += ["--set", f"{key}={value}"]
        with open(self._folder / "log", "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        await until(self._begun, lambda: f"the bridge: {(self._folder / 'log').read_text()[-2000:]}")
        self._before = cpu_seconds([self.pid])

    async def _begun(self) -> bool:
        status = await self.status()
        return bool(status) and status["state"] not in ("not begun", "another process runs it")

    async def status(self) -> dict[str, Any]:
        """What the process says of the bridge; nothing while it cannot."""
        try:
            _, body = await fetch("127.0.0.1", self._port, "/health")
            (found,) = json.loads(body)["service"]["bridges"]
        except (OSError, ValueError, KeyError):
            return {}
        return dict(found)

    def note(self) -> float:
        """CPU seconds of all processes so far, without their starts."""
        now = cpu_seconds([self.pid])
        self.cpu, self._before = self.cpu + now - self._before, now
        return self.cpu

    async def kill(self) -> None:
        """End it as a crash does."""
        assert self._process is not None
        self.note()
        self._process.kill()
        await asyncio.to_thread(self._process.wait)

    async def end(self) -> None:
        """End it in good order."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            await asyncio.to_thread(self._process.wait, 60)


class Case:
    """One kind of bridge, and what was sent and arrived."""

    def __init__(self, name: str, cluster: LocalCluster, px: pixiu.Client, folder: Path, messages: int) -> None:
        self.name, self._cluster, self._px, self._messages = name, cluster, px, messages
        self.end = ENDS[name](folder / "end")
        self._folder = folder
        self.topic = name
        self.to = not name.startswith("from")
        self.sent: dict[str, list[int]] = {}
        self.got = self.end.got
        self._sending = asyncio.Event()
        self._sending.set()
        self._lock = asyncio.Lock()
        self._peer_cpu = self._peer_before = 0.0
        self.bridge: BridgeProcess

    async def run(self) -> dict[str, Any]:
        """Run it. Returns the figures; raises when the judge finds something."""
        await self._px.topics.create(self.topic, parts=4)
        await self.end.start()
        kind = self.name.removesuffix("-once")
        self.bridge = BridgeProcess(
            self._folder, self._cluster.target, f'[b]\nkind = "{kind}"\ntopic = "{self.topic}"\n{self.end.table()}'
        )
        await self.bridge.start()
        await until(self._runs, "the bridge")
        servers = family_pids(self._cluster.supervisor)
        ours, theirs, began = cpu_seconds(servers), self._peer(), time.monotonic()
        try:
            async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
                reading = None if self.to else tasks.create_task(self._read())
                tasks.create_task(self._send())
                await self._kill_in_turn(theirs)
                await until(self._all_arrived, lambda: f"all: {len(set(self.got)):,} of {self._messages:,}", WAIT_S)
                seconds = time.monotonic() - began
                figures = self._figures(seconds, cpu_seconds(servers) - ours)
                with contextlib.suppress(TimeoutError, AssertionError):
                    await until(self._no_lag, "no lag", 60.0)
                if reading is not None:
                    reading.cancel()
            found = judge(self.sent, self.got, PROMISES.get(self.name, Promise()), await self._lag())
        finally:
            await self.bridge.end()
            await self.end.end()
        return self._told(found, figures)

    async def _runs(self) -> bool:
        return (await self.bridge.status()).get("state") == "running"

    async def _kill_in_turn(self, theirs: float) -> None:
        before = theirs
        for share, what in KILLS:
            await until(lambda share=share: self._arrived() >= share * self._messages, f"{share:.0%}", WAIT_S)  # type: ignore[misc]
            say(f"{self.name}: {self._arrived():,} arrived: the {what} is killed")
            if what == "bridge":
                await self.bridge.kill()
                await self.bridge.start()
                continue
            self._sending.clear()
            if not self.to:
                await self._settled()
            self._peer_cpu += self._peer() - before
            await self.end.kill()
            await asyncio.sleep(AWAY_S)
            await self.end.start()
            before = self._peer()
            self._sending.set()
        self._peer_before = before

    async def _settled(self) -> None:
        """What the load has sent to a source survives its kill."""
        async with self._lock:
            await self.end.sent()

    def _peer(self) -> float:
        return cpu_seconds(self.end.pids())

    def _arrived(self) -> int:
        self.end.look()
        return len(self.got)

    def _all_arrived(self) -> bool:
        return self._arrived() >= self._messages and len(set(self.got)) >= self._messages

    async def _no_lag(self) -> bool:
        return await self._lag() == 0

    async def _lag(self) -> int:
        if self.to:
            return sum(each.unacknowledged for each in await self._px.topics.channel_state(self.topic, "bridge-b"))
        return await self.end.lag() + int((await self.bridge.status()).get("waiting", 1))

    async def _send(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            writer = await stack.enter_async_context(self._px.durable_topic(self.topic).writer()) if self.to else None
            for number in range(self._messages):
                key = f"k{number % KEYS}"
                body = b"%0100d" % number
                while number > len(self.got) + AHEAD:
                    await asyncio.sleep(0.01)
                if writer is not None:
                    await writer.send(body, key=key)
                else:
                    assert isinstance(self.end, Source), "it is a target"
                    await self._sending.wait()
                    async with self._lock:
                        await self.end.send(key, number, body)
                self.sent.setdefault(key, []).append(number)
            if writer is None:
                await self.end.sent()

    async def _read(self) -> None:
        async with self._px.durable_topic(self.topic).reader() as reader:
            async for message in reader:
                assert message.key is not None
                self.got.append((message.key.decode().rpartition("/")[2], int(message.body)))

    def _figures(self, seconds: float, servers: float) -> dict[str, Any]:
        bridge, count = self.bridge.note(), self._messages
        peer = self._peer_cpu + self._peer() - self._peer_before
        return {
            "messages": count, "a second": round(count / seconds), "a CPU second of the bridge": round(count / bridge),
            "of all of our servers": round(count / (bridge + servers)),
            "of the other end": round(count / peer) if peer else None,
        }  # fmt: skip

    def _told(self, found: Judgement, figures: dict[str, Any]) -> dict[str, Any]:
        figures = {"what": self.name, **figures, "repeats": found.repeats, "violations": list(found.violations)}
        say("  ".join(f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}" for name, value in figures.items()))
        return figures


def memory_kb(pid: int) -> int:
    """Resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


async def away(cluster: LocalCluster, px: pixiu.Client, folder: Path, minutes: float) -> dict[str, Any]:
    """A webhook is away, and comes back."""
    await px.topics.create(AWAY, parts=4)
    hook = Hook(folder / "end")
    bridge = BridgeProcess(folder, cluster.target, f'[b]\nkind = "to-webhook"\ntopic = "{AWAY}"\n{hook.table()}')
    times: dict[str, list[float]] = {"before": [], "away": [], "after": []}
    phase, ends, sent = "before", asyncio.Event(), dict[str, list[int]]()
    receipts = set[asyncio.Task[None]]()

    async def produce() -> None:
        topic, began, number = px.durable_topic(AWAY), time.monotonic(), 0
        while not ends.is_set():
            if number >= (time.monotonic() - began) * AWAY_RATE:
                await asyncio.sleep(0.002)
                continue
            key = f"k{number % KEYS}"
            receipts.add(task := asyncio.create_task(confirmed(topic, key, number)))
            task.add_done_callback(receipts.discard)
            sent.setdefault(key, []).append(number)
            number += 1

    async def confirmed(topic: Any, key: str, number: int) -> None:
        at, found = time.monotonic(), times[phase]
        await topic.send(b"%0*d" % (AWAY_BYTES, number), key=key)
        found.append(time.monotonic() - at)

    async def no_lag() -> bool:
        hook.look()
        return not sum(each.unacknowledged for each in await px.topics.channel_state(AWAY, "bridge-b"))

    await hook.start()
    await bridge.start()
    producing = asyncio.create_task(produce())
    try:
        await asyncio.sleep(AWAY_BEFORE_S)
        memory, phase = {"before": memory_kb(bridge.pid)}, "away"
        await hook.kill()
        say(f"the webhook is away for {minutes:g} minutes")
        most, end = 0, time.monotonic() + minutes * 60
        while time.monotonic() < end:
            await asyncio.sleep(5.0)
            most = max(most, memory_kb(bridge.pid))
        why = str((await bridge.status()).get("why"))
        memory |= {"most": most, "at the end": memory_kb(bridge.pid)}
        await hook.start()
        phase = "after"
        await asyncio.sleep(AWAY_BEFORE_S)
        ends.set()
        await producing
        await asyncio.gather(*receipts)
        await until(no_lag, "no lag", WAIT_S)
        dead = await px.topics.dead_letters(AWAY, "bridge-b")
    finally:
        ends.set()
        producing.cancel()
        await bridge.end()
        await hook.end()
    hook.look()
    found = judge(sent, hook.got, Promise(), 0)
    violations = [*found.violations, *([f"{len(dead)} dead letters"] if dead else [])]
    p99 = {name: round(sorted(each)[len(each) * 99 // 100] * 1000, 1) for name, each in times.items()}
    figures = {"what": AWAY, "minutes": minutes, "messages": sum(map(len, sent.values())), "bridge's memory, kB": memory,
               "producer's p99, ms": p99, "status": why, "repeats": found.repeats, "violations": violations}  # fmt: skip
    say("  ".join(f"{name} {value}" for name, value in figures.items()))
    return figures


@contextlib.asynccontextmanager
async def surroundings() -> AsyncIterator[tuple[LocalCluster, pixiu.Client, Path]]:
    """A cluster of its own for each case."""
    with tempfile.TemporaryDirectory() as folder, running_cluster(Path(folder), *SHAPE, layout="separate") as cluster:
        await asyncio.to_thread(cluster.wait_healthy)
        async with pixiu.connect(cluster.target) as px:
            yield cluster, px, Path(folder) / "bridge"


async def play(wanted: argparse.Namespace) -> Sequence[Mapping[str, Any]]:
    """Play what is wanted, one kind at a time."""
    found = []
    for name in wanted.what:
        if "kafka" in name and not is_installed():
            say(f"{name}: left out: PIXIU_BENCH_KAFKA names no folder with Kafka")
            continue
        async with surroundings() as (cluster, px, folder):
            if name == AWAY:
                found.append(await away(cluster, px, folder, wanted.minutes))
            else:
                found.append(await Case(name, cluster, px, folder, wanted.messages).run())
    return found


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--what", nargs="+", choices=[*ENDS, AWAY], default=list(ENDS))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--json", action="store_true")
    wanted = parser.parse_args()
    found = asyncio.run(play(wanted))
    if wanted.json:
        print(json.dumps(found))
    return 1 if any(each["violations"] for each in found) else 0


if __name__ == "__main__":
    os.environ.setdefault("PIXIU_COMPILE", "0")
    sys.exit(main())
