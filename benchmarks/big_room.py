"""What does a room with 20,000 members do to everybody else?

A big room of 20,000 MQTT connections on two gateways (they read and count, nothing else), and beside it ordinary rooms
whose messages carry the time at which they were sent. Their latency is measured in turns: the big room silent, the big
room with traffic; and, to see what the pace is for, once more with all 64 copies let out at once.

Estimate before it was run: a copy to one VRoom is 156 writes in each gateway, at 7 µs about 1.1 ms in which the gateway
does nothing else. At 250 VRooms a second that happens every 4 ms for a quarter of a second after each message. An
ordinary message passes two gateways and two hops; its p99 without traffic is 3 to 5 ms on two cores, and with it about
2 ms more: 1.5 times. Without the pace a message to the big room stops both gateways for 70 ms, and the p99 is 15 times
as high. Aim: not more than twice.

    python -m benchmarks.big_room [--members 20000] [--seconds 10] [--rounds 3] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import selectors
import socket
import struct
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from statistics import median, quantiles

from rich.console import Console
from rich.table import Table

from benchmarks.harness import Running, cluster
from comparison.load import exactly
from comparison.wires import packet, string
from pixiu.mqtt.client_io import MQTTClient

ROOM = 1000
PACE = 100
ROOMS = 20
"""Ordinary rooms, of one member each."""
MESSAGES_PER_S = 200
"""To the ordinary rooms together."""
BIG_PER_S = 2
"""Messages to the big room."""
CROWDS = 2
"""Processes that the members live in."""
GROUP = 250
"""Members that connect at a time."""
SETTINGS = [f"cluster.big_rooms=[{ROOM},{ROOM + 1}]", "gateway.connect_rate_per_s=0"]
PAYLOAD = b"x" * 100


def crowd(ports: list[int], first: int, count: int) -> None:
    """Be `count` members: connect, say so, count the messages until the input ends, and say how many came to each."""
    members: list[socket.socket] = []
    name = string(f"room/{ROOM}")
    for start in range(first, first + count, GROUP):
        group = []
        for uin in range(start, min(start + GROUP, first + count)):
            sock = socket.create_connection(("127.0.0.1", ports[uin % len(ports)]), timeout=60)
            hello = string("MQTT") + bytes([4, 0x82]) + struct.pack(">H", 0) + string(f"crowd-{uin}") + string(str(uin))
            sock.sendall(packet(0x10, hello) + packet(0x82, struct.pack(">H", 1) + name + b"\0"))
            group.append(sock)
        for sock in group:
            if exactly(sock, 9) != b"\x20\x02\x00\x00\x90\x03\x00\x01\x00":
                raise ConnectionError("a member was refused")
            sock.setblocking(False)
        members += group
    # Elsewhere members have machines of their own: here they take what the servers leave. Not before they are connected: without
    # CPU between its connection and its CONNECT a member is closed by the gateway (connect_timeout).
    os.nice(19)
    selector = selectors.DefaultSelector()
    for sock in members:
        selector.register(sock, selectors.EVENT_READ)
    selector.register(sys.stdin, selectors.EVENT_READ)
    print("ready", flush=True)
    buffer, received = bytearray(1 << 16), 0
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                print(received // len(packet(0x30, name + PAYLOAD)))
                return
            assert isinstance(key.fileobj, socket.socket)
            received += key.fileobj.recv_into(buffer)


async def probe(ports: list[int], seconds: float, big: bool) -> None:
    """Chat in the ordinary rooms for some seconds; print the latencies and how much was sent to the big room."""
    latencies: list[float] = []

    def heard(topic: str, payload: bytes) -> None:
        latencies.append(time.perf_counter() - struct.unpack("<d", payload)[0])

    clients = [MQTTClient("127.0.0.1", ports[0], f"listener-{n}", str(900_000 + n), on_message=heard) for n in range(ROOMS)]
    sender = MQTTClient("127.0.0.1", ports[-1], "sender", "900100")
    for client in (*clients, sender):
        await client.connect()
    for number, client in enumerate(clients):
        await client.subscribe([f"room/{number + 1}"])
    start, sent, big_sent = time.perf_counter(), 0, 0
    while (now := time.perf_counter()) < start + seconds:
        if big and now >= start + big_sent / BIG_PER_S:
            sender.publish(f"room/{ROOM}", PAYLOAD)
            big_sent += 1
        sender.publish(f"room/{sent % ROOMS + 1}", struct.pack("<d", time.perf_counter()))
        sent += 1
        await asyncio.sleep(max(start + sent / MESSAGES_PER_S - time.perf_counter(), 0))
    end = time.perf_counter() + 5
    while len(latencies) < sent and time.perf_counter() < end:
        await asyncio.sleep(0.01)
    for client in (*clients, sender):
        await client.close()
    print(json.dumps({"latencies": latencies, "lost": sent - len(latencies), "big": big_sent}))


async def child(*arguments: object) -> Process:
    """This module in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.big_room", *map(str, arguments)]
    return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, limit=1 << 24)


@contextlib.asynccontextmanager
async def crowds(ports: list[int], members: int) -> AsyncIterator[list[Process]]:
    """All members, connected."""
    share = members // CROWDS
    found = [await child("--crowd", 1 + n * share, "--members", share, "--ports", *ports) for n in range(CROWDS)]
    try:
        for process in found:
            assert process.stdout is not None
            if await process.stdout.readline() != b"ready\n":
                raise RuntimeError("the members could not connect")
        yield found
    finally:
        for process in found:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def phase(running: Running, seconds: float, big: bool) -> dict[str, float]:
    """One turn: p50 and p99 of the ordinary rooms in milliseconds."""
    process = await child("--probe", int(big), "--seconds", seconds, "--ports", *running.mqtt_ports)
    output, _ = await process.communicate()
    found = json.loads(output)
    cuts = quantiles(found["latencies"], n=100)
    print(("busy" if big else "silent"), [round(cuts[i] * 1000, 1) for i in (49, 89, 98)], file=sys.stderr)
    return {"p50_ms": cuts[49] * 1000, "p99_ms": cuts[98] * 1000, "lost": found["lost"], "big": found["big"]}


async def measure(args: argparse.Namespace, vrooms_per_s: int) -> dict[str, float]:
    """Turns with and without traffic in the big room, at one pace."""
    turns: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    settings = [*SETTINGS, f"proxy.big_room_vrooms_per_s={vrooms_per_s}"]
    async with cluster(gateways=2, brokers=2, settings=settings) as running, crowds(running.mqtt_ports, args.members) as members:
        warm = await phase(running, 4.0, True)  # the first messages touch memory that nobody has used for a while
        for _ in range(args.rounds):
            for big in (False, True):
                turns[big].append(await phase(running, args.seconds, big))
        await asyncio.sleep(2.0)
        counts = [int((await process.communicate(b"end\n"))[0]) for process in members]
    found = {
        f"{name}_{'busy' if big else 'silent'}": median(turn[name] for turn in turns[big])
        for name in ("p50_ms", "p99_ms")
        for big in (False, True)
    }
    sent = sum(turn["big"] for turn in turns[True]) + warm["big"]
    found["ratio"] = found["p99_ms_busy"] / found["p99_ms_silent"]
    found["lost"] = sum(turn["lost"] for both in turns.values() for turn in both)
    found["big_lost"] = sent * (args.members // CROWDS * CROWDS) - sum(counts)
    return found


def main() -> int:
    """Measure and print. Exit code 1 when anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pace", type=int, nargs="+", default=[PACE, 1_000_000], help="VRooms a second")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--crowd", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--probe", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ports", type=int, nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.crowd:
        crowd(args.ports, args.crowd, args.members)
        return 0
    if args.probe is not None:
        asyncio.run(probe(args.ports, args.seconds, bool(args.probe)))
        return 0
    results = {pace: asyncio.run(measure(args, pace)) for pace in args.pace}
    if args.json:
        print(json.dumps(results))
    else:
        table = Table(
            "VRooms / s", "p50 silent", "p50 busy", "p99 silent", "p99 busy", "ratio of p99", "lost", "lost in the big room"
        )
        for pace, found in results.items():
            times = [f"{found[key]:.1f} ms" for key in ("p50_ms_silent", "p50_ms_busy", "p99_ms_silent", "p99_ms_busy")]
            table.add_row(f"{pace:,}", *times, f"{found['ratio']:.2f}", f"{found['lost']:.0f}", f"{found['big_lost']:.0f}")
        Console().print(table)
    return int(any(found["lost"] or found["big_lost"] for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
