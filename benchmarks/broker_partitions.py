"""What a message costs the servers when a role has more partitions: `python -m benchmarks.broker_partitions`.

The same load, by the clock, through 1, 2, 4 and 8 broker partitions of one replica each: one back end sends to 64 rooms, a client
in a process of its own is in all of them. CPU time of all servers, and of brokers alone, less what they use in the same time
without a message.

Estimate, written before the first run: a proxy's batch of a turn is divided among the brokers, so that each gets a smaller one:
at 2,000 messages a second in turns of 20 ms, 40 messages are one datagram to one broker, or 8 of five. A datagram costs each
side about 60 µs, a message 3 µs: 3 + 2 × 60 / 40 = 6 µs a hop with one broker, and 3 + 2 × 60 / 5 = 27 µs with eight. So it is
*not* flat where batches are small; where they stay full (a publisher that is faster than the turns) it is.

First run: see the figures in docs/doubling.md, "Measured". What explains them is printed beside them: messages in a batch as
brokers and the gateway get them, and batches a second that all brokers get; what all processes use without a message, which is
subtracted; and how often the brokers' processes were woken for it. `--rate 0` sends as fast as answers come, `--flight` messages at
once: with as many for each partition batches stay full. `--receivers` processes share the rooms among them, so that a flood is read
as fast as it comes.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pixiu
from benchmarks.harness import Running, cluster, cpu_seconds
from pixiu.cli.http import fetch

ROOMS = 64
TURN_S = 0.02
IDLE_S = 5.0
QUIET_S = 3.0
"""When nothing has come for so long, nothing comes any more."""
FLIGHT = 1024
"""Messages at once, at `--rate 0`, unless `--flight` says another number."""
BODY = b"x" * 100
WAIT_S = 60.0


class Load(NamedTuple):
    """What is sent, and who gets it."""

    rate: int
    """Messages a second; 0: as fast as answers come."""
    flight: int
    """Messages at once, then."""
    receivers: int


async def batches(running: Running) -> dict[str, tuple[float, float]]:
    """Role → (records, batches) that its processes got from peers so far."""
    found: dict[str, tuple[float, float]] = {}
    for role in ("broker", "gateway"):
        sums = [0.0, 0.0]
        for port in running.http_ports[role]:
            _, page = await fetch("127.0.0.1", port, "/metrics")
            for line in page.decode().splitlines():
                for at, name in enumerate(("sum", "count")):
                    if line.startswith(f"pixiu_received_batch_records_{name}"):
                        sums[at] += float(line.split()[-1])
        found[role] = (sums[0], sums[1])
    return found


def switches(pids: list[int]) -> int:
    """How often these processes waited for something, and were woken."""
    texts = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
    return sum(int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0]) for text in texts)


async def take(registry: str, receiver: int, receivers: int) -> None:
    """A receiver of its own process: says when it is in its rooms and, for each line of the input, how many messages came."""
    got = 0
    rooms = range(1 + receiver, ROOMS + 1, receivers)
    async with pixiu.connect(registry, connect_timeout_s=WAIT_S) as px, px.subscribe(rooms=rooms) as messages:

        async def count() -> None:
            nonlocal got
            async for _ in messages:
                got += 1

        counting = asyncio.create_task(count())
        print("joined", flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(got, flush=True)
        counting.cancel()
        await asyncio.gather(counting, return_exceptions=True)


@asynccontextmanager
async def receiving(registry: str, receivers: int) -> AsyncIterator[list[Process]]:
    """Processes that are in all rooms together."""
    command = (sys.executable, "-m", "benchmarks.broker_partitions", "--receivers", str(receivers), "--take", registry)
    found = [
        await asyncio.create_subprocess_exec(*command, "--receiver", str(number), stdin=PIPE, stdout=PIPE)
        for number in range(receivers)
    ]
    try:
        for process in found:
            assert process.stdout is not None
            assert await process.stdout.readline() == b"joined\n"
        yield found
    finally:
        for process in found:
            assert process.stdin is not None
            process.stdin.close()
        await asyncio.gather(*(process.wait() for process in found))


async def arrived(found: list[Process]) -> int:
    """How many messages they have."""
    total = 0
    for process in found:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"\n")
        total += int(await process.stdout.readline())
    return total


async def drive(running: Running, load: Load, seconds: float) -> tuple[int, int]:
    """Send at a pace, or as fast as answers come; (messages sent, messages received)."""
    async with (
        receiving(running.registry, load.receivers) as receivers,
        pixiu.connect(running.registry, publish_timeout_s=WAIT_S) as px,
    ):
        sent, began = 0, time.monotonic()
        while (now := time.monotonic() - began) < seconds:
            for _ in range(int(now * load.rate) - sent if load.rate else load.flight):
                px.room(sent % ROOMS + 1).send_soon(BODY)
                sent += 1
            await (asyncio.sleep(TURN_S) if load.rate else px.flush())
        await px.flush()
        got, before = 0, -1
        while before < got < sent:  # at most once: what a full queue has dropped does not come
            before = got
            await asyncio.sleep(QUIET_S)
            got = await arrived(receivers)
    return sent, got


async def measure(partitions: int, load: Load, seconds: float) -> tuple[float, str]:
    """µs of CPU of all servers a message, and the line that says so."""
    async with cluster(brokers=partitions) as running:
        await drive(running, load, 1.0)
        groups = (running.servers, running.pids["broker"])
        before = [cpu_seconds(pids) for pids in groups]
        await asyncio.sleep(IDLE_S)
        idle = [(cpu_seconds(pids) - spent) / IDLE_S for pids, spent in zip(groups, before, strict=True)]
        before, had, woken = [cpu_seconds(pids) for pids in groups], await batches(running), switches(running.pids["broker"])
        began = time.monotonic()
        sent, arrived = await drive(running, load, seconds)
        took = time.monotonic() - began
        used = [cpu_seconds(pids) - spent - base * took for pids, spent, base in zip(groups, before, idle, strict=True)]
        woken, has = switches(running.pids["broker"]) - woken, await batches(running)
    whole, brokers = used[0] / sent * 1e6, used[1] / sent * 1e6
    got = {role: (has[role][0] - had[role][0], has[role][1] - had[role][1]) for role in has}
    a_batch = {role: records / max(count, 1) for role, (records, count) in got.items()}
    return whole, (
        f"{brokers:5.1f} in brokers; {a_batch['broker']:.1f} messages a batch at brokers, {a_batch['gateway']:.1f} at the gateway; "
        f"{got['broker'][1] / took:,.0f} batches/s and {woken / took:,.0f} wake-ups/s of brokers; idle {idle[0]:.1%} of a core in "
        f"all servers, {idle[1] / partitions:.2%} in each broker; {sent:,} messages, {sent - arrived:,} of them lost"
    )


def main() -> None:
    """Print a line for each number of partitions."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=int, default=2000)
    parser.add_argument("--flight", type=int, default=FLIGHT, help="messages at once, at --rate 0")
    parser.add_argument("--receivers", type=int, default=1, help="processes of receivers")
    parser.add_argument("--take", metavar="REGISTRY", help=argparse.SUPPRESS)
    parser.add_argument("--receiver", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--partitions", type=int, nargs="*", default=[1, 2, 4, 8])
    wanted = parser.parse_args()
    if wanted.take:
        asyncio.run(take(wanted.take, wanted.receiver, wanted.receivers))
        return
    load = Load(wanted.rate, wanted.flight, wanted.receivers)
    first = 0.0
    for partitions in wanted.partitions:
        whole, text = asyncio.run(measure(partitions, load, wanted.seconds))
        first = first or whole
        print(
            f"{partitions} broker partition(s): {whole:6.1f} µs of CPU a message in all servers ({whole / first - 1:+.0%}), {text}",
            flush=True,
        )


if __name__ == "__main__":
    main()
