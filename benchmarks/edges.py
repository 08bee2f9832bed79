"""What do clients that read nothing, and connections that never finish their CONNECT, do to everybody else?

One gateway. A busy room (100 messages of 4 KiB a second to 30 members) and beside it ordinary rooms whose messages carry the
time at which they were sent; their latency is measured in turns:

- *all read*: the members of the busy room read what they get.
- *slow readers*: they read nothing; who is disconnected connects again and goes on reading nothing.
- *slow start*: they read, and 300 connections more send nothing, or their CONNECT a byte a second, and come again when they
  are closed.

Estimate before it was run: a member that does not read costs a `put` into its backlog (1 µs) instead of a write (7 µs, more
for 4 KiB), so that the p99 is rather lower. Memory grows by 30 times what a connection may buffer, 2 MiB: 60 MiB. (Wrong:
members of one room wait for the same bytes, which are there once; 2 MiB were measured.) 300 connections that are closed after
5 s and come again are 60 accepts a second of 0.2 ms: 1 % of a core, and 300 sessions of 10 KiB. Aim: no p99 above twice that
of *all read* in the same round.

    python -m benchmarks.edges [--seconds 8] [--rounds 3] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import select
import selectors
import socket
import struct
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import median, quantiles

from rich.console import Console
from rich.table import Table

from benchmarks.harness import Running, cluster
from benchmarks.mqtt_load import connect, subscribe
from comparison.wires import packet, string
from pixiu.mqtt.client_io import MQTTClient

BUSY_ROOM = 1000
BUSY_PER_S = 100
BUSY_BYTES = 4096
MEMBERS = 30
ROOMS = 20
MESSAGES_PER_S = 200
STARTERS = 300
SETTINGS = ["gateway.slow_consumer_timeout_s=2", "gateway.connect_rate_per_s=0"]
"""So that slow readers are disconnected within a turn."""
TURNS = ("all read", "slow readers", "slow start")
FIRST_BYTES = packet(0x10, string("MQTT") + bytes([4, 2]) + struct.pack(">H", 60) + string("never finished"))[:-1]


def member(port: int, number: int) -> socket.socket:
    """A member of the busy room."""
    sock = connect(("127.0.0.1", port), f"busy-{number}-{time.monotonic_ns()}")
    subscribe(sock, f"room/{BUSY_ROOM}")
    sock.setblocking(False)
    return sock


def ready() -> None:
    """Say that all are connected. Elsewhere they have machines of their own: from now on they take what the servers leave."""
    print("ready", flush=True)
    os.nice(19)


def readers(port: int) -> None:
    """Members that read until the input ends."""
    selector, buffer = selectors.DefaultSelector(), bytearray(1 << 16)
    for number in range(MEMBERS):
        selector.register(member(port, number), selectors.EVENT_READ)
    selector.register(sys.stdin, selectors.EVENT_READ)
    ready()
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                print(0)
                return
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.recv_into(buffer)


def slow_readers(port: int) -> None:
    """Members that read nothing until the input ends; prints how often one was disconnected."""
    poll, members, cut = select.epoll(), {}, 0

    def come(number: int) -> None:
        sock = connect(("127.0.0.1", port), f"deaf-{number}-{time.monotonic_ns()}")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(packet(0x82, struct.pack(">H", 1) + string(f"room/{BUSY_ROOM}") + b"\0"))
        members[sock.fileno()] = (number, sock)
        poll.register(sock, 0)  # errors and the end are told all the same

    for number in range(MEMBERS):
        come(number)
    poll.register(sys.stdin, select.EPOLLIN)
    ready()
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == sys.stdin.fileno():
                print(cut)
                return
            number, sock = members.pop(descriptor)
            poll.unregister(descriptor)
            sock.close()
            cut += 1
            come(number)


def slow_starters(port: int) -> None:
    """Connections that never finish their CONNECT, until the input ends; prints how often one was closed."""
    selector, closed = selectors.DefaultSelector(), 0
    sent: dict[socket.socket, int] = {}

    def come() -> None:
        sock = socket.create_connection(("127.0.0.1", port), timeout=20)
        sock.setblocking(False)
        sent[sock] = 0
        selector.register(sock, selectors.EVENT_READ)

    for _ in range(STARTERS):
        come()
    selector.register(sys.stdin, selectors.EVENT_READ)
    ready()
    due = time.monotonic()
    while True:
        for key, _ in selector.select(max(due - time.monotonic(), 0.0)):
            if key.fileobj is sys.stdin:
                print(closed)
                return
            assert isinstance(key.fileobj, socket.socket)
            selector.unregister(key.fileobj)
            key.fileobj.close()
            del sent[key.fileobj]
            closed += 1
            come()
        if time.monotonic() >= due:
            due += 1.0
            for sock, position in list(sent.items())[::2]:
                with contextlib.suppress(OSError):  # closed just now: the selector says so next time
                    sent[sock] = position + sock.send(FIRST_BYTES[position : position + 1])


CROWDS = {"all read": [readers], "slow readers": [slow_readers], "slow start": [readers, slow_starters]}


async def probe(port: int, seconds: float) -> None:
    """Send to the busy room and chat in the ordinary ones for some seconds; print the latencies of these."""
    latencies: list[float] = []

    def heard(_topic: str, payload: bytes) -> None:
        latencies.append(time.perf_counter() - struct.unpack("<d", payload)[0])

    clients = [MQTTClient("127.0.0.1", port, f"listener-{n}", str(900_000 + n), on_message=heard) for n in range(ROOMS)]
    sender, busy = (MQTTClient("127.0.0.1", port, name, name) for name in ("sender", "busy"))
    for client in (*clients, sender, busy):
        await client.connect()
    for number, client in enumerate(clients):
        await client.subscribe([f"room/{number + 1}"])
    start, sent, busy_sent = time.perf_counter(), 0, 0
    while (now := time.perf_counter()) < start + seconds:
        if now >= start + busy_sent / BUSY_PER_S:
            busy.publish(f"room/{BUSY_ROOM}", bytes(BUSY_BYTES))
            busy_sent += 1
        sender.publish(f"room/{sent % ROOMS + 1}", struct.pack("<d", time.perf_counter()))
        sent += 1
        await asyncio.sleep(max(start + sent / MESSAGES_PER_S - time.perf_counter(), 0))
    end = time.perf_counter() + 5
    while len(latencies) < sent and time.perf_counter() < end:
        await asyncio.sleep(0.01)
    for client in (*clients, sender, busy):
        await client.close()
    print(json.dumps({"latencies": latencies, "lost": sent - len(latencies)}))


async def child(*arguments: object) -> Process:
    """This module in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.edges", *map(str, arguments)]
    return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, limit=1 << 24)


@contextlib.asynccontextmanager
async def crowd(function: str, port: int) -> AsyncIterator[Process]:
    """One of the functions above in a process of its own, ready."""
    process = await child("--crowd", function, "--port", port)
    try:
        assert process.stdout is not None
        if await process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"{function} could not connect")
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def resident_mib(pid: int) -> float:
    """Of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


async def turn(running: Running, name: str, seconds: float) -> dict[str, float]:
    """One turn: latencies in milliseconds, and the highest RSS of the gateway."""
    (gateway,), (port,) = running.pids["gateway"], running.mqtt_ports
    async with contextlib.AsyncExitStack() as stack:
        crowds = [await stack.enter_async_context(crowd(function.__name__, port)) for function in CROWDS[name]]
        process = await child("--probe", "--seconds", seconds, "--port", port)
        measuring, highest = asyncio.create_task(process.communicate()), 0.0
        while not measuring.done():
            highest = max(highest, resident_mib(gateway))
            await asyncio.wait([measuring], timeout=0.1)
        found = json.loads(measuring.result()[0])
        closed = [int((await one.communicate(b"end\n"))[0]) for one in crowds]
    cuts = quantiles(found["latencies"], n=100)
    print(name, [round(cuts[i] * 1000, 1) for i in (49, 89, 98)], f"{highest:.0f} MiB", file=sys.stderr)
    return {"p50_ms": cuts[49] * 1000, "p99_ms": cuts[98] * 1000, "rss_mib": highest, "closed": sum(closed), "lost": found["lost"]}


async def measure(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """All turns, the median of each; RSS is the highest."""
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in TURNS}
    async with cluster(settings=SETTINGS) as running:
        await turn(running, "all read", 2.0)  # warms up
        for _ in range(args.rounds):
            for name in TURNS:
                turns[name].append(await turn(running, name, args.seconds))
    found = {name: {key: median(one[key] for one in turns[name]) for key in ("p50_ms", "p99_ms")} for name in TURNS}
    for name, values in found.items():
        # Each against the turn next to it: what else the machine does changes by the minute.
        values["ratio"] = median(one["p99_ms"] / base["p99_ms"] for one, base in zip(turns[name], turns["all read"], strict=True))
        values["rss_mib"] = max(one["rss_mib"] for one in turns[name])
        for key in ("closed", "lost"):
            values[key] = sum(one[key] for one in turns[name])
    return found


def main() -> int:
    """Measure and print. Exit code 1 when a message of an ordinary room was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--crowd", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.probe:
        asyncio.run(probe(args.port, args.seconds))
        return 0
    if args.crowd:
        {function.__name__: function for function in (readers, slow_readers, slow_starters)}[args.crowd](args.port)
        return 0
    found = asyncio.run(measure(args))
    if args.json:
        print(json.dumps(found))
    else:
        table = Table("", "p50", "p99", "ratio of p99", "gateway's RSS", "closed", "lost")
        for name, values in found.items():
            times = [f"{values[key]:.1f} ms" for key in ("p50_ms", "p99_ms")]
            counts = [f"{values[key]:.0f}" for key in ("closed", "lost")]
            table.add_row(name, *times, f"{values['ratio']:.2f}", f"{values['rss_mib']:.0f} MiB", *counts)
        Console().print(table)
    return int(any(values["lost"] for values in found.values()))


if __name__ == "__main__":
    sys.exit(main())
