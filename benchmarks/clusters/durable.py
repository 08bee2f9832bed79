"""Measure what Xiu and Pi store a second and a CPU second. `pixiu bench --peers --case mail` has mail beside other servers.

Real processes: ZooKeeper and one partition, alone and with two replicas, over its gRPC stream. Every writer is a closed loop: it
sends a window of messages in one request and the next one when all of it is acknowledged. The CPU of all replicas counts, that of
the load does not.

Estimate, written before the first run: a request and its answer cost a server of grpc.aio 0.3 ms of CPU, the load as much, a
sync of the disk 0.2 ms, the second replica a request more. So a Xiu alone at window 1 does 1 500 a second, with two replicas 700;
at windows of 100 the 5 µs of a record in store and log weigh more: 80 000 a CPU second and 60 000 by the clock, half of that
with two replicas. Redis with `appendfsync always` pays one sync a pipeline: 5 000, 80 000, 150 000.

First run (2 shared, loaded cores, python 3.11, a disk with syncs of 0.2 to 2 ms by what else it does), records of 100 bytes, one
writer, windows 1, 100, 1 000, by the clock: a Xiu alone at level persisted 1 070, 88 000, 224 000; two replicas at level
replicated 440, 34 000, 66 000; Redis `always` 1 100 to 4 700, 147 000, 230 000; RabbitMQ 1 900, 17 000, 24 000. With 1 KB and
windows of 1 000: 120 000, 42 000, 55 000, 13 000. A CPU second of both replicas: 770, 53 000, 91 000. Pi appends alone 320 to
1 300, 19 000 to 78 000, 119 000, two replicas 410, 12 000, 68 000. Two replicas are idle for more than half of the time: each batch
waits for two syncs one after the other (segment, then seal) at the follower, and small batches cost a message of gRPC each. Since
decision 282 a batch waits for one: a log alone on a disk with syncs of 2 ms takes 1.9 ms a group, where it took 3.9.

First run of `--restart`: a Xiu with a million messages is read 2.5 s after its start (3.3 s after kill -9), Pi with a million
entries in 100 000 inboxes 2.5 s (3.1 s), of which 2.0 s are the wait before a replica that confirmed an epoch may lead again.

    python -m benchmarks.clusters.durable [--quick] [--seconds 1.2] [--rounds 1] [--writers 1] [--only xiu pi] [--json]
    python -m benchmarks.clusters.durable --restart [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import signal
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import grpc.aio
from rich.console import Console
from rich.table import Table

from benchmarks.clusters.stores import PiCaller, Stores, XiuWriter, stores
from comparison.processes import cpu_seconds
from pixiu.discovery.node import Node
from pixiu.ids import msg_id, snowflake
from pixiu.wire.inbox_operations import ACKNOWLEDGE, APPEND, USER_DEVICE, Acknowledges, Appends, OpenSessions, Writer, encode
from pixiu.wire.record import TYPE_NORMAL, Kind
from pixiu.wire.record import encode as encode_record
from pixiu.wire.v1 import level_pb2, pi_pb2, xiu_pb2, xiu_pb2_grpc

WINDOWS = (1, 100, 1000)
SIZES = (100, 1000)
LEVELS = {
    "accepted": level_pb2.ACCEPTED,
    "persisted": level_pb2.PERSISTED,
    "replicated": level_pb2.REPLICATED,
}
USERS = 1000
LANE = 1
READ_ENTRIES = 10
FILL_USERS, FILL_MESSAGES, FILL_BATCH = 100_000, 1_000_000, 1000
NOISE_BYTES = (1 << 22) - 1
TAKEN_AT_MOST = {1: 8_000, 100: 200_000, 1000: 300_000}
"""Messages a second that are made beforehand, by window; a case ends early when they run out."""

Step = Callable[[], Awaitable[int]]
"""Sends one window. Returns the number of messages, 0 when they have run out."""


@dataclass(frozen=True)
class Case:
    """A row of the tables."""

    operation: str
    size: int
    window: int


@dataclass(frozen=True)
class Rate:
    """Result of one case."""

    per_second: float
    per_cpu: float
    load: float
    """Share of one core that the load itself used."""


Results = dict[str, dict[Case, list[Rate]]]
"""Server → case → its rounds."""


async def measure(seconds: float, pids: Sequence[int], steps: Sequence[Step]) -> Rate:
    """Run every step in a loop of its own; the first window of each is not counted."""
    for step in steps:
        await step()
    cpu, own, began = cpu_seconds(pids), time.process_time(), time.perf_counter()

    async def loop(step: Step) -> int:
        done = 0
        while time.perf_counter() - began < seconds and (count := await step()):
            done += count
        return done

    done = sum(await asyncio.gather(*map(loop, steps)))
    took, used = time.perf_counter() - began, max(cpu_seconds(pids) - cpu, 0.01)
    return Rate(done / took, done / used, (time.process_time() - own) / took)


workers = itertools.count(1)


def mails(count: int, window: int, size: int) -> Iterator[tuple[bytes, int]]:
    """Yield batches of mail with SnowflakeIDs of their own worker, and the number of records in each."""
    worker, start = next(workers), time.time_ns() // 1_000_000 - count // 1024
    noise = random.Random(worker).randbytes(NOISE_BYTES + size)  # bodies of one repeated byte would take almost no space
    for first in range(0, count, window):
        numbers = range(first, min(first + window, count))
        bodies = [noise[at : at + size] for at in (n * size % NOISE_BYTES for n in numbers)]
        ids = [snowflake(start + n // 1024, worker, n % 1024) for n in numbers]
        records = [encode_record(Kind.MAIL, n % 10_000, body, of) for n, body, of in zip(numbers, bodies, ids, strict=True)]
        yield b"".join(records), len(numbers)


async def measure_xiu(running: Stores, name: str, args: argparse.Namespace, results: Results) -> None:
    """Measure every level, size and window."""
    node = await running.leader()
    for (level, number), size, window in itertools.product(LEVELS.items(), SIZES, WINDOWS):
        writers = [XiuWriter(node) for _ in range(args.writers)]
        count = int((args.seconds + 0.2) * TAKEN_AT_MOST[window] / (1 if size < 500 else 3))

        def step(writer: XiuWriter, made: Iterator[tuple[bytes, int]], number: int = number) -> Step:
            async def store() -> int:
                batch, records = next(made, (b"", 0))
                if records:
                    await writer.store(batch, records, number)
                return records

            return store

        steps = [step(writer, iter(list(mails(count // args.writers, window, size)))) for writer in writers]
        rate = await measure(args.seconds, running.pids, steps)
        results.setdefault(name, {}).setdefault(Case(f"store {level}", size, window), []).append(rate)
        for writer in writers:
            await writer.close()


class Inboxes:
    """Common state of the loads of Pi: the users' sessions, and the progress of appends and acknowledgements."""

    def __init__(self, epoch: int, sessions: Sequence[int]) -> None:
        self.epoch, self.sessions = epoch, sessions
        self.appended = self.acknowledged = 0

    @classmethod
    async def open(cls, address: str) -> Inboxes:
        """Open sessions of all users."""
        caller = PiCaller(address)
        reply = await caller.do(OpenSessions(b"".join(USER_DEVICE.pack(uin, 0) for uin in range(1, USERS + 1))))
        await caller.close()
        return cls(reply.epoch, list(reply.results))

    def append(self, caller: PiCaller, window: int) -> Step:
        """Make a step that appends one message to each of `window` users."""
        writer = Writer(next(workers), 1, self.epoch)

        async def step() -> int:
            first, self.appended = self.appended, self.appended + window
            items = [APPEND.pack(msg_id(0, LANE << 6, number + 1), number % USERS + 1) for number in range(first, first + window)]
            await caller.ask(encode([Appends(writer, b"".join(items))]))
            return window

        return step

    def read(self, caller: PiCaller, window: int) -> Step:
        """Make a step that reads the oldest entries of `window` inboxes; it counts entries."""
        reads = [
            pi_pb2.PiRead(uin=uin, lane=LANE, session=self.sessions[uin - 1], start=0, num=READ_ENTRIES)
            for uin in range(1, window + 1)
        ]

        async def step() -> int:
            reply = await caller.ask(reads=reads)
            return sum(len(found.seqs) for found in reply.reads)

        return step

    def acknowledge(self, caller: PiCaller, window: int) -> Step:
        """Make a step that acknowledges the next entry of `window` inboxes, each by an item of its own."""

        async def step() -> int:
            first = self.acknowledged
            if first + window > self.appended - USERS:
                return 0
            self.acknowledged += window
            numbers = range(first, first + window)
            items = [ACKNOWLEDGE.pack(n % USERS + 1, 0, LANE, self.sessions[n % USERS], n // USERS + 1, 0) for n in numbers]
            await caller.ask(encode([Acknowledges(b"".join(items))]))
            return window

        return step


async def measure_pi(running: Stores, name: str, args: argparse.Namespace, results: Results) -> None:
    """Measure append, then read, then acknowledge."""
    node = await running.leader()
    inboxes = await Inboxes.open(node.address)
    made = {"append": inboxes.append, f"read {READ_ENTRIES} each": inboxes.read, "acknowledge": inboxes.acknowledge}
    for (operation, make), window in itertools.product(made.items(), WINDOWS):
        callers = [PiCaller(node.address) for _ in range(args.writers)]
        rate = await measure(args.seconds, running.pids, [make(caller, window) for caller in callers])
        results.setdefault(name, {}).setdefault(Case(operation, 0, window), []).append(rate)
        for caller in callers:
            await caller.close()


async def one_round(args: argparse.Namespace, results: Results) -> None:
    """Measure both stores in turn."""
    for role, run in (("xiu", measure_xiu), ("pi", measure_pi)):
        for replicas in (1, 2) if role in args.only else ():
            async with stores(role, replicas, data=args.data) as running:
                await run(running, f"{role} x{replicas}", args, results)


def rate_of(rates: Sequence[Rate]) -> Rate:
    """Return the median of the rounds."""
    return Rate(*(median(getattr(rate, key) for rate in rates) for key in ("per_second", "per_cpu", "load")))


def table(results: Results) -> Table:
    """Make a table of every case."""
    shown = Table("server", "case", "bytes", "window", "a second", "a CPU second", "load's CPU")
    for server, cases in results.items():
        for case, rates in cases.items():
            rate = rate_of(rates)
            figures = (f"{rate.per_second:,.0f}", f"{rate.per_cpu:,.0f}", f"{rate.load:.0%}")
            shown.add_row(server, case.operation, str(case.size or ""), str(case.window), *figures)
        shown.add_section()
    return shown


async def fill_xiu(node: Node, messages: int) -> int:
    """Store messages of 100 bytes. Returns the sequence of one in the middle."""
    writers = [XiuWriter(node) for _ in range(2)]
    middle = 0

    async def fill(writer: XiuWriter) -> None:
        nonlocal middle
        for number, (batch, count) in enumerate(mails(messages // 2, FILL_BATCH, 100)):
            last = await writer.store(batch, count, level_pb2.REPLICATED)
            if number == messages // FILL_BATCH // 4:
                middle = last

    await asyncio.gather(*map(fill, writers))
    for writer in writers:
        await writer.close()
    return middle


async def fill_pi(address: str, entries: int, users: int) -> int:
    """Append entries to inboxes at random, at least one to every inbox. Returns the user to read."""
    caller, chance = PiCaller(address), random.Random(1)
    reply = await caller.do(OpenSessions(USER_DEVICE.pack(users // 2, 0)))
    writer = Writer(next(workers), 1, reply.epoch)
    for first in range(0, entries, FILL_BATCH):
        numbers = range(first, first + FILL_BATCH)
        to = [number + 1 if number < users else chance.randrange(1, users + 1) for number in numbers]
        items = [APPEND.pack(msg_id(0, LANE << 6, number + 1), uin) for number, uin in zip(numbers, to, strict=True)]
        await caller.do(Appends(writer, b"".join(items)))
    await caller.close()
    return users // 2


async def read_one(role: str, node: Node, what: int) -> bool:
    """Return True if a message from the middle of the store, or an inbox, can be read now."""
    try:
        if role == "xiu":
            async with grpc.aio.insecure_channel(node.address) as channel:
                stub: Any = xiu_pb2_grpc.XiuStub(channel)  # type: ignore[no-untyped-call, unused-ignore]
                reply = await stub.Fetch(xiu_pb2.FetchRequest(msg_ids=[msg_id(0, TYPE_NORMAL, what)]))
            return not reply.codes[0]
        caller = PiCaller(node.address)
        found = (await caller.ask(reads=[pi_pb2.PiRead(uin=what, lane=LANE, session=1, start=0, num=READ_ENTRIES)])).reads[0]
        await caller.close()
        return not found.code and bool(found.seqs)
    except (grpc.aio.AioRpcError, RuntimeError):
        return False


def memory_mib(pid: int) -> tuple[int, int]:
    """Return (resident, resident and not file-backed) MiB of a process."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(lines["VmRSS"].split()[0]) >> 10, int(lines["RssAnon"].split()[0]) >> 10


async def restarts(role: str, args: argparse.Namespace) -> AsyncGenerator[list[str], None]:
    """Yield rows for a full store that is killed or ended in order, and started again."""
    messages, users = (100_000, 10_000) if args.quick else (FILL_MESSAGES, FILL_USERS)
    async with stores(role, 1, data=args.data) as running:
        name, began = f"{role}-0", time.perf_counter()
        leader = await running.leader()
        what = await (fill_xiu(leader, messages) if role == "xiu" else fill_pi(leader.address, messages, users))
        filled = time.perf_counter() - began
        for how, number in (("kill -9", signal.SIGKILL), ("SIGTERM", signal.SIGTERM)):
            resident, _ = memory_mib(running.processes[name].pid)
            running.end(name, number)
            disk = sum(path.stat().st_blocks * 512 for path in (running.folder / name).rglob("*") if path.is_file()) >> 20
            began = time.perf_counter()
            running.start(name)
            node = await running.running(name)
            ready = time.perf_counter() - began
            while not await read_one(role, node, what):
                if time.perf_counter() - began > 120:
                    raise RuntimeError(
                        f"{name} is Running and cannot be read: {(running.folder / f'{name}.log').read_text()[-2000:]}"
                    )
                await asyncio.sleep(0.02)
            read = time.perf_counter() - began
            now, own = memory_mib(running.processes[name].pid)
            held = f"{messages:,} messages" if role == "xiu" else f"{messages:,} entries, {users:,} inboxes"
            yield [role, held, f"{filled:.1f}", how, f"{ready:.2f}", f"{read:.2f}", f"{resident}", f"{now}", f"{own}", f"{disk}"]


async def restart(args: argparse.Namespace) -> Table:
    """Measure restarts of both roles."""
    shown = Table("role", "holds", "filled in s", "ended by", "Running after s", "read after s")
    for column in ("MiB before", "MiB after", "not of files", "MiB on disk"):
        shown.add_column(column)
    for role in ("xiu", "pi"):
        if role in args.only:
            async with contextlib.aclosing(restarts(role, args)) as rows:
                async for row in rows:
                    shown.add_row(*row)
    return shown


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--writers", type=int, default=1, help="streams at a time, each with windows of its own")
    parser.add_argument("--only", nargs="+", choices=("xiu", "pi"), default=("xiu", "pi"))
    parser.add_argument("--data", type=Path, help="a folder on the disk to measure; default: that of temporary files")
    parser.add_argument("--quick", action="store_true", help="0.3 s a case; with --restart a tenth of the data")
    parser.add_argument("--restart", action="store_true", help="how soon a full store serves after its start")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.seconds = 0.3 if args.quick else args.seconds
    console = Console(width=None if sys.stdout.isatty() else 200)
    if args.restart:
        console.print(asyncio.run(restart(args)))
        return 0
    results: Results = {}
    for _ in range(args.rounds):
        asyncio.run(one_round(args, results))
    if args.json:
        flat = [
            vars(case) | {"server": name} | vars(rate_of(rates)) for name, cases in results.items() for case, rates in cases.items()
        ]
        print(json.dumps(flat))
    else:
        console.print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
