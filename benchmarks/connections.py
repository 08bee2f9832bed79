"""What connections cost: CPU of each role for one that connects and subscribes, and the gateway's memory while it stays.

    python -m benchmarks.connections [--count 5000] [--leavers 5000] [--replicas 1] [--json]

A router, a broker and a gateway, or several replicas of the first two; clients of one process connect, subscribe to a room of
ten each and stay, a hundred at a time. First `count` come to an idle cluster, then as many again, then as many while `leavers`
of the first close their sockets.

Estimate: 0.4 ms at the gateway (accept, transport, session, report) and 0.1 ms at the router, whoever leaves meanwhile; a leaver
costs what a join does without the accept, 0.1 ms at each. 5 KB of the gateway's memory for one that is subscribed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import socket
import struct
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.harness import Running, cluster, cpu_seconds
from comparison.load import exactly
from comparison.wires import packet, string

AT_ONCE = 100
MEMBERS = 10
ROLES = ("gateway", "router", "broker")


def come(address: tuple[str, int], first: int, count: int) -> list[socket.socket]:
    """So many clients that are connected and subscribed. Raises ConnectionError when one is refused."""
    found: list[socket.socket] = []
    for begin in range(first, first + count, AT_ONCE):
        part = []
        for number in range(begin, min(begin + AT_ONCE, first + count)):
            sock = socket.create_connection(address, timeout=60)
            hello = packet(0x10, string("MQTT") + bytes([4, 2]) + struct.pack(">H", 600) + string(f"c{number}"))
            sock.sendall(hello + packet(0x82, struct.pack(">H", 1) + string(f"room/{1 + number // MEMBERS}") + b"\0"))
            part.append(sock)
        for sock in part:
            answer = exactly(sock, 9)
            if answer[:4] != b"\x20\x02\x00\x00" or answer[8] > 2:
                raise ConnectionError(f"the gateway answered {answer.hex()}")
        found += part
    return found


def clients(port: int, count: int, leavers: int) -> None:
    """The load: a phase for each line on standard input, a line on standard output when it is over."""
    address = ("127.0.0.1", port)
    alive = come(address, 0, count)
    print("fresh", flush=True)
    sys.stdin.readline()
    alive += come(address, count, count)
    print("more", flush=True)
    sys.stdin.readline()
    at = 2 * count
    steps = max(count // AT_ONCE, 1)
    leaving = alive[:leavers]
    for step in range(steps):
        for sock in leaving[leavers * step // steps : leavers * (step + 1) // steps]:
            sock.close()
        alive += come(address, at, AT_ONCE)
        at += AT_ONCE
    print("while others leave", flush=True)
    sys.stdin.readline()


def memory(pid: int) -> int:
    """Bytes that a process has in memory and shares with nobody."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Private_Clean:", "Private_Dirty:")))


async def settle(running: Running) -> None:
    """Wait until nothing is going on any more: less than a tenth of a core for a second."""
    while True:
        before = cpu_seconds(running.servers)
        await asyncio.sleep(1.0)
        if cpu_seconds(running.servers) - before < 0.1:
            return


async def measure(count: int, leavers: int, replicas: int) -> list[dict[str, float | str]]:
    """CPU milliseconds a connection of each role, of all replicas together, and bytes of the gateway, phase by phase."""
    found: list[dict[str, float | str]] = []
    async with cluster(replicas=replicas) as running:
        await settle(running)
        pid = running.pids["gateway"][0]
        command = [sys.executable, "-m", "benchmarks.connections", "--load", str(running.mqtt_ports[0])]
        command += ["--count", str(count), "--leavers", str(leavers)]
        used, held = {role: cpu_seconds(running.pids[role]) for role in ROLES}, memory(pid)
        load = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert load.stdin is not None
        assert load.stdout is not None
        try:
            while phase := (await load.stdout.readline()).decode().strip():
                await settle(running)
                now, holds = {role: cpu_seconds(running.pids[role]) for role in ROLES}, memory(pid)
                row: dict[str, float | str] = {"phase": phase, "bytes": (holds - held) / count}
                row |= {f"{role}_ms": (now[role] - used[role]) / count * 1000 for role in ROLES}
                found.append(row)
                used, held = {role: cpu_seconds(running.pids[role]) for role in ROLES}, holds
                load.stdin.write(b"\n")
        finally:
            load.stdin.close()
            await load.wait()
    return found


def main() -> int:
    """Measure and print; with --load, be the clients."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=5000, help="clients that come in each phase")
    parser.add_argument("--leavers", type=int, default=5000, help="clients that leave in the last one")
    parser.add_argument("--replicas", type=int, default=1, help="of the router and of the broker")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--load", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    if args.load:
        clients(args.load, args.count, min(args.leavers, 2 * args.count))
        return 0
    results = asyncio.run(measure(args.count, args.leavers, args.replicas))
    if args.json:
        print(json.dumps(results))
        return 0
    table = Table("clients that come", *(f"{role}, CPU ms each" for role in ROLES), "gateway, bytes each")
    for row in results:
        table.add_row(str(row["phase"]), *(f"{row[f'{role}_ms']:.2f}" for role in ROLES), f"{row['bytes']:,.0f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
