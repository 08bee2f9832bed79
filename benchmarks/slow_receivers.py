"""What do connections that take mails of 256 KiB and never acknowledge one cost the gateway, the relay, the proxy, and the others?

A whole cluster of one process a role. Slow receivers are MQTT clients of users of their own, in a process of their own, that
subscribe to their mail, read what comes, throw it away and send no PUBACK; who is closed by the gateway comes back. Each is sent
the same number of mails, as fast as a writer in a process of its own is let. An innocent user, with the SDK, gets a mail of 100
bytes ten times a second and acknowledges it: the time from sending to having it, first alone, then while half a gigabyte goes
through the only Xiu, then with nothing but the receivers that do not acknowledge; the first and the last are compared. The memory
(RSS) of every process is read twice a second.

Estimate: a relay sends a device a window of mails at once, and the gateway holds what sockets do not take. The bound is
256 MiB that each of the three may grow by: `gateway.memory_bytes`; of a relay `mail_waiting_mb`, 64, is to be the most of it. The
receivers discard what comes without looking at it, so the servers are what is slow.

On two quiet cores the gateway grew by 19 MiB, the relay by 12, the proxy by 10, and nobody was closed; the innocent's p99 was 9 ms
alone, 201 while it was sent and 12 afterwards; before relays asked what was written (decision 272) 59. On cores with ten times
more to do than they can: 26 to 37, 55 to 112 and 9 to 13 MiB; nearly all were closed for want of a PUBACK, and came back.

    python -m benchmarks.slow_receivers [--connections 1000] [--mails 2] [--kib 256] [--quiet-s 15] [--at-most-s 120]
                                                                   # exit code 1: memory or p99 did not hold
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import resource
import struct
import sys
import time
from functools import partial
from pathlib import Path
from typing import Final

import pixiu
from benchmarks.harness import Running, cluster, cpu_seconds
from comparison.wires import packet, string
from pixiu.cli.http import fetch
from pixiu.errors import PixiuError

MIB: Final = 1 << 20
INNOCENT: Final = 7
FIRST: Final = 1_000_000
"""The UIN of the first slow receiver."""
PAUSE_S: Final = 0.1
LOOK_S: Final = 0.5
AT_ONCE: Final = 100
GROWS_AT_MOST_MIB: Final = 256
SLOWER_AT_MOST: Final = 2.0
BOUNDED: Final = ("gateway", "relay", "proxy")


Times = tuple[float, float, int]


class Deaf(asyncio.Protocol):
    """Takes everything, answers nothing."""

    def __init__(self, uin: int) -> None:
        self._uin, self.taken, self.closed = uin, 0, asyncio.Event()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client ID, clean session off, a user name; then the subscription to the user's mail."""
        assert isinstance(transport, asyncio.Transport)
        flags = bytes([4, 0x80]) + struct.pack(">H", 0)
        transport.write(packet(0x10, string("MQTT") + flags + string(f"deaf-{self._uin}") + string(str(self._uin))))
        transport.write(packet(0x82, struct.pack(">H", 1) + string(f"user/{self._uin}") + b"\1"))

    def data_received(self, data: bytes) -> None:
        """Thrown away."""
        self.taken += len(data)

    def connection_lost(self, error: Exception | None) -> None:
        """It is over."""
        self.closed.set()


def _same(client: Deaf) -> Deaf:
    return client


async def receive(ports: list[int], connections: int) -> None:
    """All slow receivers, until the process is ended; a line a second: open connections, MiB taken, how many were closed."""
    taken = closed = opened = 0
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        nonlocal taken, closed, opened
        while True:
            client = Deaf(FIRST + number)
            connect = asyncio.get_running_loop().create_connection
            with contextlib.suppress(OSError):
                async with slots:
                    await connect(partial(_same, client), "127.0.0.1", ports[number % len(ports)])
                    await asyncio.sleep(0.05)
                opened += 1
                before = 0
                while not client.closed.is_set():
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(client.closed.wait(), 1.0)
                    taken, before = taken + client.taken - before, client.taken
                opened -= 1
                closed += 1
            await asyncio.sleep(1.0)

    tasks = [asyncio.create_task(one(number)) for number in range(connections)]
    while not any(task.done() for task in tasks):
        print(opened, taken // MIB, closed, flush=True)
        await asyncio.sleep(1.0)


async def send(registry: str, connections: int, mails: int, kib: int) -> None:
    """So many to each; prints how many were confirmed."""
    async with pixiu.connect(registry, client="bulk") as px, px.mail_writer() as writer:
        body, receipts = bytes(kib << 10), []
        for number in range(connections * mails):
            await writer.room()
            receipts.append(writer.send(FIRST + number % connections, body))
        with contextlib.suppress(PixiuError):
            await writer.wait_finished()
        print(len(receipts) - writer.counters.failed, writer.counters.failed, flush=True)


def resident_mib(running: Running) -> dict[str, float]:
    """Of the largest process of each role. Raises RuntimeError with the role whose process has ended."""
    page, found = os.sysconf("SC_PAGE_SIZE"), dict[str, float]()
    for role, pids in running.pids.items():
        try:
            found[role] = max(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page / MIB for pid in pids)
        except FileNotFoundError:
            raise RuntimeError(f"a {role} ended") from None
    return found


def used_cpu(running: Running) -> dict[str, float]:
    """Seconds of CPU so far, by role."""
    return {role: cpu_seconds(pids) for role, pids in running.pids.items()}


def share(before: dict[str, float], after: dict[str, float], seconds: float) -> str:
    """Percent of a core that each role used in between."""
    return ", ".join(f"{role} {100 * (after[role] - before[role]) / seconds:.0f} %" for role in sorted(before))


async def why_closed(running: Running) -> str:
    """How many connections gateways have closed, by reason."""
    pages = [(await fetch("127.0.0.1", port, "/metrics", 30.0))[1].decode() for port in running.http_ports["gateway"]]
    return "; ".join(line for page in pages for line in page.splitlines() if "connections_closed_total{" in line)


class Innocent:
    """The user who acknowledges."""

    def __init__(self) -> None:
        self.took: list[float] = []
        self.sent = 0

    async def take(self, inbox: pixiu.Inbox) -> None:
        """For ever."""
        async for mail in inbox:
            self.took.append(time.perf_counter() - struct.unpack_from("<d", mail.payload)[0])
            mail.acknowledge()

    async def write(self, writer: pixiu.MailWriter) -> None:
        """For ever."""
        while True:
            await writer.room()
            writer.send(INNOCENT, struct.pack("<d", time.perf_counter()) + bytes(92))
            self.sent += 1
            await asyncio.sleep(PAUSE_S)

    def told(self) -> Times:
        """p50 and p99, ms, and how many mails; then anew."""
        found, self.took = sorted(self.took), []
        return (found[len(found) // 2] * 1000, found[len(found) * 99 // 100] * 1000, len(found)) if found else (0.0, 0.0, 0)


async def child(*arguments: str) -> asyncio.subprocess.Process:
    """This program as a load."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.slow_receivers", *arguments, stdout=asyncio.subprocess.PIPE
    )


async def meanwhile(
    running: Running, args: argparse.Namespace, most: dict[str, float], innocent: Innocent
) -> tuple[str, str, Times, str]:
    """The slow receivers and their mail.

    What they and the writer said last, the innocent's times until all was sent, and the CPU of each role afterwards.
    """
    heard, sent = "0 0 0", ""
    ports = [f"--port={port}" for port in running.mqtt_ports]
    receivers = await child("--receive", *ports, f"--connections={args.connections}")
    writer: asyncio.subprocess.Process | None = None
    assert receivers.stdout is not None
    end = time.monotonic() + args.at_most_s
    try:
        while time.monotonic() < end and not sent:
            with contextlib.suppress(TimeoutError):
                heard = (await asyncio.wait_for(receivers.stdout.readline(), 2.0)).decode().strip() or heard
            if writer is None and int(heard.split()[0]) >= args.connections:
                load = [f"--connections={args.connections}", f"--mails={args.mails}", f"--kib={args.kib}"]
                writer = await child(f"--send={running.registry}", *load)
            for role, mib in resident_mib(running).items():
                most[role] = max(most.get(role, 0.0), mib)
            if writer is not None and writer.stdout is not None:
                with contextlib.suppress(TimeoutError):
                    sent = (await asyncio.wait_for(writer.stdout.readline(), LOOK_S)).decode().strip()
                    end = min(end, time.monotonic() + 1)
        sending = innocent.told()
        settle, used = time.monotonic() + args.quiet_s, used_cpu(running)
        while time.monotonic() < settle:
            heard = (await receivers.stdout.readline()).decode().strip() or heard
            for role, mib in resident_mib(running).items():
                most[role] = max(most.get(role, 0.0), mib)
        print("closed:", await why_closed(running) or "nobody")
        cost = share(used, used_cpu(running), args.quiet_s)
    finally:
        for process in (receivers, writer):
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()
    return heard, sent, sending, cost


async def slow_receivers(args: argparse.Namespace) -> bool:
    """Whether it held."""
    innocent = Innocent()
    async with cluster(stores=1, relays=1) as running, pixiu.connect(running.registry, client="innocent") as px:  # noqa: SIM117
        async with px.inbox(uin=INNOCENT, device="bench") as inbox, px.mail_writer() as writer:
            tasks = [asyncio.create_task(innocent.take(inbox)), asyncio.create_task(innocent.write(writer))]
            try:
                await asyncio.sleep(3.0)
                innocent.told()
                used = used_cpu(running)
                await asyncio.sleep(args.quiet_s)
                before, alone, cost_alone = resident_mib(running), innocent.told(), share(used, used_cpu(running), args.quiet_s)
                most = dict(before)
                heard, sent, sending, cost_loud = await meanwhile(running, args, most, innocent)
                loud = innocent.told()
            finally:
                for task in tasks:
                    task.cancel()
                done = await asyncio.gather(*tasks, return_exceptions=True)
    opened, taken, closed = heard.split()
    print(
        f"sent (confirmed, failed): {sent or 'not all in time'}; {opened} connections, {taken} MiB taken by them, {closed} closed"
    )
    for role in sorted(before):
        bound = f" of {GROWS_AT_MOST_MIB}" if role in BOUNDED else ""
        print(f"{role:8} {before[role]:6.0f} MiB before, {most[role]:6.0f} at most: grew by {most[role] - before[role]:.0f}{bound}")
    for name, (p50, p99, count) in (("alone", alone), ("while it is sent", sending), ("afterwards, with the slow", loud)):
        print(f"the innocent, {name}: p50 {p50:.1f} ms, p99 {p99:.1f} ms, {count} mails")
    print(f"CPU alone: {cost_alone}\nCPU afterwards: {cost_loud}")
    failed = [str(each) for each in done if isinstance(each, Exception)]
    print("\n".join(failed))
    grew = max(most[role] - before[role] for role in BOUNDED)
    return not failed and grew <= GROWS_AT_MOST_MIB and 0 < loud[1] <= SLOWER_AT_MOST * alone[1]


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--mails", type=int, default=2, help="to each")
    parser.add_argument("--kib", type=int, default=256)
    parser.add_argument("--quiet-s", type=float, default=15.0, help="how long the innocent is alone, and watched at the end")
    parser.add_argument("--at-most-s", type=float, default=120.0, help="for connecting and sending")
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, action="append", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--send", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if args.receive:
        asyncio.run(receive(args.port, args.connections))
        return 0
    if args.send:
        asyncio.run(send(args.send, args.connections, args.mails, args.kib))
        return 0
    held = asyncio.run(slow_receivers(args))
    print("held" if held else "did not hold")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
