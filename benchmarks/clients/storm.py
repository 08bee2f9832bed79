"""How long does it take until all clients are back when a gateway dies, or all connections break, and what do others notice?

So many MQTT clients, in processes of their own and from several loopback addresses, are connected to a few gateways, with one
subscription each. Then

    gateway      one gateway is killed; a supervisor starts it again
    connections  all clients lose their connections at the same moment, as behind a balancer that restarts
    all          all gateways are killed

and all come back at once, as stock clients do: first within a second, then with a wait that doubles from 1 s to 8 s, with
jitter, and each time at any gateway. A client is back when its SUBACK has come. Meanwhile an innocent client publishes with QoS
1 at one gateway to another one at another gateway (not with `all`, where they are victims themselves).

Estimate, written before the first run: a client costs a gateway 0.6 ms (accept, CONNECT, SUBSCRIBE, join), itself 0.3 ms, and
the router and the broker 0.2 ms: 20,000 take 22 CPU seconds, 11 s on two cores. A gateway accepts 1,000 a second after the
first 2,000 (`gateway.connect_rate_per_s`), three of them so 20,000 in 5 s; who is refused waits for 1 to 8 s more. So 20 s for
all, 10 s for one of three gateways; the aim is a minute. The innocent wait behind a turn of the event loop that accepts many:
100 ms at p99 instead of 5. A gateway has 12 KiB a connection.

First run (2 cores, other programs beside it, load 4 to 11), 20,000 clients at three gateways: all back 18.7 s after one gateway
was killed, 88 s after all connections broke, 150 s after all gateways were killed; 8.6 KiB a client; the innocent at p99 10 ms
before, 255 and 917 ms meanwhile, none lost. 58,000 attempts of the second storm ended before their CONNACK: gateways accepted
2,000 a second and gave a quarter of their time to CONNECTs, so that most waited for more than the 5 s that a CONNECT may take,
or were the oldest of 1,000 that wait, were closed, and came again. With room for 20,000 that wait it was worse (1,239 back
after 240 s, load 8 to 30). With a bound of 500 CONNECTs that wait, above which a gateway accepts nobody, the second storm took
63 s, the innocent 438 ms at p99 and 45,000 attempts in vain (load 8). With nothing else on the machine (load 2 to 3.4) all were
back 8 s after one gateway was killed and 55 s after all connections broke, the innocent at p99 5.7 and 7.8 ms before, 83 and 754
meanwhile, none lost; a gateway had 223 MiB at most; 11 and 56 CPU seconds of all servers; 44,000 attempts in vain.

With `--kept` each client has a session that outlives its connection, and is back when CONNACK has session present: its filter is
in effect again. That needs Pi and Xiu, and a read and two writes there (the end, the fence) for each client.

    python -m benchmarks.clients.storm [--clients 20000] [--gateways 3] [--what gateway,connections,all] [--workers 2] [--kept]
        [--set gateway.connect_rate_per_s=1000] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.clients.connection import Connection, Lost, Refused, Session, connect
from benchmarks.clients.random_clients import STORES
from benchmarks.clients.watching import anonymous_mib, cpu_s, percentile
from benchmarks.clusters.growth import tell
from cluster.mqtt.packets import Publish
from tests.support.cluster import LocalCluster, running_cluster
from tests.support.shared_zookeeper import end_shared_server

SHAPE = ("--proxies=1", "--relays=0", "--brokers=1", "--broker-replicas=1", "--routers=1", "--router-replicas=1")
KEPT = ("--relays=1", "--relay-replicas=1", *STORES)
PER_ADDRESS = 5_000
"""Clients of one loopback address."""
RAMP = 200
"""Clients of a worker that connect at one time in the beginning."""
FIRST_S, MOST_S = 1.0, 8.0
"""Wait before the first and before later attempts."""
TOLD_S = 0.5
EACH_S = 0.02
"""Between two innocent messages."""
BEFORE_S, AFTER_S = 10.0, 5.0
LIMIT_S = 240.0
"""Until all are back."""
BOUND_MIB, BOUND_KIB = 256 + 64, 64
"""Memory that a gateway may have: `gateway.memory_bytes` and its own, and so much for each connection."""
INNOCENT = "innocent/beat"


class Clients:
    """The clients of one worker."""

    def __init__(self, first: int, count: int, ports: Sequence[int], kept: bool) -> None:
        self._first, self._count, self._ports, self._kept = first, count, ports, kept
        self._tasks: list[asyncio.Task[None]] = []
        self._open: dict[int, Connection] = {}
        self._gate = asyncio.Semaphore(RAMP)
        self._ramping, self._back_at = True, 0.0
        self.counts: Counter[str] = Counter()

    async def start(self) -> None:
        """Connect all, a few at one time."""
        self._tasks = [asyncio.create_task(self._live(number)) for number in range(self._first, self._first + self._count)]
        while len(self._open) < self._count:
            await asyncio.sleep(TOLD_S)
            self.tell()
        self._ramping = False
        self.counts.clear()

    def cut(self) -> None:
        """Cut all connections."""
        for connection in list(self._open.values()):
            connection.cut()

    def tell(self) -> None:
        """Print how many are there."""
        print(
            json.dumps({"at": time.monotonic(), "back_at": self._back_at, "there": len(self._open), "counts": self.counts}),
            flush=True,
        )

    async def _live(self, number: int) -> None:
        rolls, session = random.Random(number), Session(f"storm-{number}", str(1_000_000 + number))
        source = f"127.0.{1 + number // PER_ADDRESS}.1"
        while True:
            wait_s = FIRST_S
            while (connection := await self._try(session, source, number, rolls)) is None:
                await asyncio.sleep(wait_s * rolls.uniform(0.5, 1.5))
                wait_s = min(2 * wait_s, MOST_S)
            self._open[number], self._back_at = connection, time.monotonic()
            await connection.ended
            del self._open[number]
            self.counts["lost"] += 1
            await asyncio.sleep(rolls.uniform(0.0, FIRST_S))

    async def _try(self, session: Session, source: str, number: int, rolls: random.Random) -> Connection | None:
        async with self._gate if self._ramping else contextlib.nullcontext():
            connection = None
            try:
                address = "127.0.0.1", rolls.choice(self._ports)
                connection = await connect(address, session, clean=not self._kept, keep_alive_s=600, source=source)
                if connection.session_present:
                    return connection
                (code,) = await connection.subscribe([(f"storm/{number % 1000}/{number}", 1)])
                if code >= 0x80:
                    raise Refused(code)
                return connection
            except (Refused, Lost, TimeoutError, OSError) as error:
                what = f"refused with {error.code:#x}" if isinstance(error, Refused) else type(error).__name__
                self.counts[what] += 1
                if connection is not None:
                    connection.cut()
                return None


async def worker(first: int, count: int, ports: list[int], kept: bool) -> None:
    """Run clients until the input ends; a line `cut` cuts all."""
    clients = Clients(first, count, ports, kept)
    await clients.start()
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    reading = asyncio.create_task(reader.readline())
    while True:
        clients.tell()
        done, _ = await asyncio.wait({reading}, timeout=TOLD_S)
        if done:
            line = reading.result().strip()
            if not line:
                return
            clients.counts.clear()
            if line == b"cut":
                clients.cut()
            reading = asyncio.create_task(reader.readline())


class Crowd:
    """The workers, seen from the parent."""

    def __init__(self, processes: Sequence[Process]) -> None:
        self._processes = processes
        self._last: list[dict[str, Any]] = [{"there": 0, "counts": {}} for _ in processes]
        self.least = 0
        """Fewest that were there since `say`."""
        self._tasks = [asyncio.create_task(self._follow(number)) for number in range(len(processes))]

    async def _follow(self, number: int) -> None:
        output = self._processes[number].stdout
        assert output is not None
        while line := await output.readline():
            self._last[number] = json.loads(line)
            self.least = min(self.least, self.there)

    @property
    def back_at(self) -> float:
        """When the last one came back, monotonic seconds."""
        return max(float(each["back_at"]) for each in self._last)

    @property
    def there(self) -> int:
        """Clients that are connected."""
        return sum(each["there"] for each in self._last)

    @property
    def counts(self) -> Counter[str]:
        """What happened since `say`."""
        found: Counter[str] = Counter()
        for each in self._last:
            found.update(each["counts"])
        return found

    async def until(self, clients: int, what: str, after: float = 0.0) -> None:
        """Wait until so many are there, as all workers say later than `after`, monotonic seconds."""
        end = time.monotonic() + LIMIT_S
        while self.there < clients or min(each.get("at", 0.0) for each in self._last) < after:
            if time.monotonic() > end:
                raise RuntimeError(f"{what}: {self.there} of {clients} after {LIMIT_S:.0f} s; {dict(self.counts)}")
            for task in self._tasks:
                if task.done():
                    raise RuntimeError("a worker has ended: what is above says why")
            await asyncio.sleep(0.1)

    def say(self, word: bytes) -> None:
        """Tell the workers to begin a new count, and `cut`."""
        self.least = self.there
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(word + b"\n")


@contextlib.asynccontextmanager
async def crowd(clients: int, workers: int, ports: Sequence[int], kept: bool) -> AsyncIterator[Crowd]:
    """Workers with so many clients, killed afterwards."""
    share = -(-clients // workers)
    processes = []
    try:
        for first in range(0, clients, share):
            words = ("--worker", json.dumps([first, min(share, clients - first), list(ports), kept]))
            processes.append(
                await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "benchmarks.clients.storm", *words, stdin=PIPE, stdout=PIPE, limit=1 << 20
                )
            )
        yield Crowd(processes)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


class Innocent:
    """A client that publishes at one gateway and one that listens at another."""

    def __init__(self) -> None:
        self.took: list[tuple[float, float]] = []
        """(sent, seconds until it came)."""
        self.sent: list[float] = []
        self.failed: Counter[str] = Counter()
        self._task: asyncio.Task[None] | None = None

    async def start(self, here: int, there: int) -> None:
        """Begin."""
        listener = await connect(("127.0.0.1", there), Session("listens", "11"), on_message=self._take, on_end=self._ended)
        await listener.subscribe([(INNOCENT, 1)])
        publisher = await connect(("127.0.0.1", here), Session("sends", "12"), on_end=self._ended)
        self._task = asyncio.create_task(self._send(publisher))

    def _take(self, _: Connection, message: Publish) -> None:
        sent = float(message.payload)
        self.took.append((sent, time.monotonic() - sent))

    def _ended(self, _: Connection) -> None:
        self.failed["lost its connection"] += 1

    async def _send(self, publisher: Connection) -> None:
        while not publisher.ended.done():
            now = time.monotonic()
            self.sent.append(now)
            publisher.publish(INNOCENT, repr(now).encode(), 1).add_done_callback(self._published)
            await asyncio.sleep(EACH_S)

    def _published(self, done: asyncio.Future[None]) -> None:
        if done.exception() is not None:
            self.failed["not acknowledged"] += 1

    def figures(self, begin: float, end: float) -> dict[str, float]:
        """Of what was sent in this time."""
        mine = [took * 1e3 for sent, took in self.took if begin <= sent < end]
        sent = sum(begin <= at < end for at in self.sent)
        return {
            "sent": sent, "missing": sent - len(mine), "p50_ms": round(percentile(mine, 0.5), 1),
            "p99_ms": round(percentile(mine, 0.99), 1), "longest_ms": round(max(mine, default=0.0), 1),
        }  # fmt: skip

    async def stop(self) -> None:
        """End it."""
        if self._task is not None:
            self._task.cancel()


async def storm(what: str, cluster: LocalCluster, clients: Crowd, count: int) -> dict[str, Any]:
    """One storm."""
    gateways = {int(each["mqtt"].rpartition(":")[2]): int(each["pid"]) for each in cluster.processes("gateway")}
    ports = sorted(gateways)
    innocent = Innocent()
    await innocent.start(ports[-1], ports[-2])
    await asyncio.sleep(BEFORE_S)
    before_mib = {port: anonymous_mib(pid) for port, pid in gateways.items()}
    cpu, began = await asyncio.to_thread(cpu_s, cluster), time.monotonic()
    victims = {"gateway": ports[:1], "all": ports}.get(what, [])
    clients.say(b"cut" if what == "connections" else b"count")
    for port in victims:
        os.kill(gateways[port], signal.SIGKILL)
    most_mib = dict(before_mib)
    watched, curve = asyncio.create_task(_watch(cluster, most_mib)), []
    back = asyncio.create_task(clients.until(count, what, began + 2.0))  # by then they have noticed
    while not back.done():
        curve.append((round(time.monotonic() - began, 1), clients.there))
        await asyncio.wait({back}, timeout=2.0)
    back.result()
    took = clients.back_at - began
    end = time.monotonic()
    await asyncio.sleep(AFTER_S)
    watched.cancel()
    await innocent.stop()
    roles = {int(process["pid"]): process["role"] for process in cluster.status()["processes"]}
    spent: Counter[str] = Counter()
    for pid, used in (await asyncio.to_thread(cpu_s, cluster)).items():
        spent[roles.get(pid, "")] += round((used - cpu.get(pid, 0.0)) * 1000)
    bound = BOUND_MIB + BOUND_KIB * count / 1024
    return {
        "fewest": clients.least, "back_s": round(took, 1), "curve": curve, "counts": dict(clients.counts),
        "innocent before": innocent.figures(began - BEFORE_S, began), "innocent during": innocent.figures(began, end),
        "innocent failed": dict(innocent.failed), "server_cpu_s": round(spent.total() / 1000, 1),
        "cpu_ms_a_client": {role: round(used / count, 2) for role, used in spent.most_common()},
        "gateway_mib": {
            str(port): f"{before_mib.get(port, 0.0):.0f} before, {mib:.0f} at most" for port, mib in sorted(most_mib.items())
        },
        "bound_mib": round(bound), "above the bound": [port for port, mib in most_mib.items() if mib > bound],
        "load": round(os.getloadavg()[0], 1),
    }  # fmt: skip


async def _watch(cluster: LocalCluster, most_mib: dict[int, float]) -> None:
    while True:
        with contextlib.suppress(Exception):  # a cluster of which all gateways are away
            for each in await asyncio.to_thread(cluster.processes, "gateway"):
                port = int(each["mqtt"].rpartition(":")[2])
                most_mib[port] = max(most_mib.get(port, 0.0), anonymous_mib(int(each["pid"])))
        await asyncio.sleep(0.5)


async def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All storms on one cluster. Returns the figures."""
    figures: dict[str, Any] = {}
    options = [*SHAPE, f"--gateways={arguments.gateways}", "--set=cluster.topic_rooms=storm=2:256"]
    options += KEPT if arguments.kept else []
    with running_cluster(folder, *options, *(f"--set={each}" for each in arguments.set), layout="separate") as cluster:
        await asyncio.to_thread(cluster.wait_healthy)
        began = time.monotonic()
        pids = [int(each["pid"]) for each in cluster.processes("gateway")]
        empty = sum(map(anonymous_mib, pids))
        async with crowd(arguments.clients, arguments.workers, cluster.mqtt_ports(), arguments.kept) as clients:
            await clients.until(arguments.clients, "the ramp")
            figures["ramp_s"] = round(time.monotonic() - began, 1)
            figures["kib_per_client"] = round((sum(map(anonymous_mib, pids)) - empty) * 1024 / arguments.clients, 1)
            print(f"{arguments.clients} clients in {figures['ramp_s']} s", file=sys.stderr, flush=True)
            for what in arguments.what.split(","):
                figures[what] = await storm(what, cluster, clients, arguments.clients)
                print(what, figures[what], file=sys.stderr, flush=True)
                await asyncio.to_thread(cluster.wait_healthy)
    return figures


def problems(figures: dict[str, Any], aim_s: float) -> list[str]:
    """What missed the aims."""
    found = []
    for what, each in figures.items():
        if not isinstance(each, dict):
            continue
        if each["back_s"] > aim_s:
            found.append(f"{what}: all are back after {each['back_s']} s")
        if each["above the bound"]:
            found.append(f"{what}: memory of {each['above the bound']} above {each['bound_mib']} MiB")
        if what != "all" and (each["innocent failed"] or each["innocent during"]["missing"]):
            found.append(f"{what}: innocent {each['innocent failed']}, {each['innocent during']['missing']} missing")
    return found


def main() -> int:
    """Run, and print the results. Returns 1 when an aim was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=20_000)
    parser.add_argument("--gateways", type=int, default=3)
    parser.add_argument("--what", default="gateway,connections,all")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kept", action="store_true", help="sessions that outlive their connections")
    parser.add_argument("--aim-s", type=float, default=60.0)
    parser.add_argument("--set", action="append", default=[], help="setting of the cluster; repeatable")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if arguments.worker:
        asyncio.run(worker(*json.loads(arguments.worker)))
        return 0
    for share in (arguments.clients / arguments.workers, arguments.clients / (arguments.gateways - 1)):
        if share + 200 > most:
            raise SystemExit(f"a process would need {share:.0f} files and may have {most}: more --workers, or more --gateways")
    with tempfile.TemporaryDirectory(prefix="pixiu-storm-") as name:
        try:
            figures = asyncio.run(run(arguments, Path(name)))
        finally:
            end_shared_server()
    return tell(figures, problems(figures, arguments.aim_s), as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
