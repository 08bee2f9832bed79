"""Mail from one program to another, stored, delivered and acknowledged, beside RabbitMQ, JetStream and Redis Streams.

One sender, closed loop: a window is sent, then the next one when all of it is confirmed. 100 bytes. Pixiu: SDK, proxy, Xiu, Pi,
relay, gateway, SDK, as real processes with one partition each, alone and with two replicas, level replicated, to 100 users with an
inbox each, who acknowledge every mail. The peers get the easier task of one queue with one consumer: RabbitMQ a durable queue,
persistent messages, publisher confirms; JetStream a stream on files with explicit acknowledgements, which it syncs every two
minutes only; Redis a stream with a group, `appendfsync` always and everysec. The CPU of the servers counts, that of the load does
not; a case ends when all that was sent has been delivered.

First run (2 shared cores, quiet, windows of 1,000), a CPU second: RabbitMQ 45,000, JetStream 131,000, Redis always 257,000,
everysec 301,000; Pixiu 26,000 alone and 22,700 with two replicas: 0.58 and 0.50 of RabbitMQ, 0.20 and 0.17 of JetStream. By the
clock 57,000, 122,000, 102,000, 107,000; 28,500 and 26,500. Sent to confirmed, p50: 17, 7, 9, 9; 32 and 35 ms; to delivered 9, 8,
18, 17; 55 and 58 ms. A mail costs the proxy 5 µs, Xiu 6 (two replicas 7), Pi 6 (12), the relay 10, the gateway 12, of which half
are messages of gRPC with ten mails each. With 20 users, who have 64 each on their way, 14,400 and 16,800: windows are full, and
what comes meanwhile is fetched from Xiu, for 16 to 30 µs a mail.

    python -m benchmarks.mail_chain [--seconds 3] [--window 1000] [--users 100] [--rounds 1]
        [--only pixiu rabbitmq jetstream redis] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import struct
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

import pixiu
from benchmarks import consumers, peers
from benchmarks.consumers import Consumer, late_s
from benchmarks.harness import build, builds, cluster, cpu_seconds, working
from comparison.processes import session_pids

BODY_BYTES = 100
DRAIN_LIMIT_S = 60.0
WARM_S = 0.5
CASES = ("pixiu", "rabbitmq", "jetstream", "redis")
ROLES = ("proxy", "xiu", "pi", "relay", "gateway")

Served = tuple[int, int] | None
Connect = Callable[[int], Awaitable[tuple[peers.Client, Consumer]]]


@dataclass(frozen=True)
class Row:
    """What came out of one case."""

    name: str
    mails: int
    per_second: float
    per_cpu: float
    confirmed_ms: tuple[float, float]
    """p50 and p99 from sending to the confirmation."""
    delivered_ms: tuple[float, float]
    """p50 and p99 from sending to the consumer."""
    cpu_us: dict[str, float] = field(default_factory=dict)
    """CPU microseconds a mail, by role."""


def body() -> bytes:
    """A message that begins with the time at which it is sent."""
    return struct.pack("<d", time.perf_counter()) + bytes(BODY_BYTES - 8)


def shares(times_s: list[float]) -> tuple[float, float]:
    """p50 and p99, milliseconds."""
    found = sorted(times_s)
    return found[len(found) // 2] * 1000, found[len(found) * 99 // 100] * 1000


async def measure(
    send: Callable[[int], Awaitable[None]], delivered: list[float], window: int, seconds: float
) -> tuple[int, float, list[float]]:
    """Send windows for so long and wait until all is delivered. Returns how many, in which time, and how long each window took."""
    began, sent, took = time.perf_counter(), 0, list[float]()
    while (now := time.perf_counter()) < began + seconds:
        await send(window)
        sent += window
        took.append(time.perf_counter() - now)
    async with asyncio.timeout(DRAIN_LIMIT_S):
        while len(delivered) < sent:
            await asyncio.sleep(0.01)
    return sent, time.perf_counter() - began, took


async def measure_peer(name: str, served: Served, connect: Connect, args: argparse.Namespace) -> list[Row]:
    """A peer; nothing where it is not installed."""
    if served is None:
        return []
    port, session = served
    writer, consumer = await connect(port)

    async def send(window: int) -> None:
        await writer.store(writer.prepare([body() for _ in range(window)]), window)

    async with working([asyncio.create_task(consumer.run())]):
        await measure(send, consumer.late_s, args.window, WARM_S)
        consumer.late_s.clear()
        pids = session_pids(session)
        before = cpu_seconds(pids)
        sent, wall, took = await measure(send, consumer.late_s, args.window, args.seconds)
        used = cpu_seconds(pids) - before
    await writer.close()
    return [Row(name, sent, sent / wall, sent / max(used, 0.01), shares(took), shares(consumer.late_s))]


async def measure_pixiu(name: str, replicas: int, args: argparse.Namespace) -> list[Row]:
    """The whole chain."""
    async with cluster(stores=replicas, relays=1) as running, pixiu.connect(running.registry, client="bench") as px:
        delivered: list[float] = []

        async def take(inbox: pixiu.Inbox) -> None:
            async for mail in inbox:
                delivered.append(late_s(mail.payload, time.perf_counter()))
                mail.acknowledge()

        async def send(window: int) -> None:
            for number in range(window):
                writer.send(1 + number % args.users, body())
            await writer.wait_finished()

        async with contextlib.AsyncExitStack() as stack:
            inboxes = [await stack.enter_async_context(px.inbox(uin=uin, device="bench")) for uin in range(1, args.users + 1)]
            writer = await stack.enter_async_context(px.mail_writer())
            await stack.enter_async_context(working([asyncio.create_task(take(inbox)) for inbox in inboxes]))
            await measure(send, delivered, args.window, WARM_S)
            delivered.clear()
            before = {role: cpu_seconds(running.pids[role]) for role in ROLES}
            sent, wall, took = await measure(send, delivered, args.window, args.seconds)
            used = {role: cpu_seconds(running.pids[role]) - before[role] for role in ROLES}
    shown = {role: seconds / sent * 1e6 for role, seconds in used.items()}
    per_cpu = sent / max(sum(used.values()), 0.01)
    return [Row(f"{name} x{replicas}", sent, sent / wall, per_cpu, shares(took), shares(delivered), shown)]


async def run(args: argparse.Namespace) -> list[Row]:
    """All cases that are asked for, one after the other."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if "rabbitmq" in args.only:
            with peers.rabbitmq(folder / "rabbitmq") as served:
                rows += await measure_peer("rabbitmq", served, consumers.connect_rabbitmq, args)
        if "jetstream" in args.only:
            with consumers.nats(folder / "nats") as served:
                rows += await measure_peer("jetstream", served, consumers.connect_nats, args)
        if "redis" in args.only:
            for fsync in ("always", "everysec"):
                with peers.redis(folder / fsync, fsync) as served:
                    rows += await measure_peer(f"redis {fsync}", served, consumers.connect_redis, args)
    if "pixiu" in args.only:
        for replicas, (name, switch) in itertools.product((1, 2), builds() * args.rounds):
            with build(switch):
                rows += await measure_pixiu(name, replicas, args)
    return rows


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--window", type=int, default=1000)
    parser.add_argument("--users", type=int, default=100, help="receivers; each has at most 64 mails on the way")
    parser.add_argument("--rounds", type=int, default=1, help="of Pixiu: the compiled build and plain Python in turn, a row each")
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = asyncio.run(run(args))
    if args.json:
        print(json.dumps([vars(row) for row in rows]))
        return 0
    names = ("mails / s", "mails / CPU s", "confirmed p50", "p99 ms", "delivered p50", "p99 ms", "µs of CPU a mail")
    shown = Table("", *names)
    for row in rows:
        times = [f"{each:.1f}" for each in (*row.confirmed_ms, *row.delivered_ms)]
        cpu = ", ".join(f"{role} {us:.1f}" for role, us in row.cpu_us.items())
        shown.add_row(row.name, f"{row.per_second:,.0f}", f"{row.per_cpu:,.0f}", *times, cpu)
    Console(width=None if sys.stdout.isatty() else 200).print(shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
