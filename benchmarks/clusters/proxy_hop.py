"""Measure how many records a CPU second the proxy carries.

A real proxy in front of a real broker without members. In by gRPC, as the SDK publishes, in batches of 10, 100 and 1,000
records of 140 bytes; and in by datagrams, as gateways publish. The load comes from processes of their own with
prebuilt batches.

Estimate before it was built: receiving a full gRPC message 0.5 µs a record, reading the header, slicing and routing
0.6 µs, packing and sending datagrams 0.4 µs: 600,000 a CPU second at 1,000 a batch. Seed 004 §2.2.1: 50,000 a second in
one thread, 200,000 in several. Aim: 200,000.

    python -m benchmarks.clusters.proxy_hop [--seconds 5] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncIterator

import grpc.aio
from rich.console import Console
from rich.table import Table

from cluster.links.api import Outcome, Peer, PeerState
from cluster.links.endpoint import Endpoint
from cluster.links.options import LinkOptions
from comparison.ours import Running, cluster
from comparison.processes import cpu_seconds
from pixiu.ids import EndpointID
from pixiu.wire.record import Kind, encode
from pixiu.wire.v1 import wire_pb2, wire_pb2_grpc

ROOMS = 1000
WINDOW = 20_000
"""Records in flight."""


def records(count: int, first: int) -> list[bytes]:
    """Make records of 140 bytes to many rooms."""
    return [encode(Kind.ROOM, 1 + (first + n) % ROOMS, b"x" * 100, first + n) for n in range(count)]


async def publish(address: str, batch: int, seconds: float) -> int:
    """Publish by gRPC for some seconds. Returns the records that were resolved."""
    data = b"".join(records(batch, 1))
    resolved = 0
    room = asyncio.Condition()
    async with grpc.aio.insecure_channel(address) as channel:

        async def requests() -> AsyncIterator[wire_pb2.PublishRequest]:
            yield wire_pb2.PublishRequest(hello=wire_pb2.PublishHello(client="bench"))
            position, end = 1, time.monotonic() + seconds
            while time.monotonic() < end:
                async with room:
                    while position - resolved > WINDOW:
                        await room.wait()
                yield wire_pb2.PublishRequest(batch=data, count=batch, position=position)
                position += batch

        call = wire_pb2_grpc.PublisherStub(channel).Publish(requests())
        async for reply in call:
            async with room:
                resolved = max(resolved, reply.up_to)
                room.notify_all()
    return resolved


class _Sender:
    """A gateway's end of a link, reduced to sending."""

    def __init__(self) -> None:
        self.handled = 0
        self.sizes: dict[int, int] = {}
        self.ready = asyncio.Event()
        self.room = asyncio.Event()

    def on_records(self, peer: EndpointID, data: bytes, start: int, end: int, count: int) -> Outcome:
        return Outcome.TAKEN

    def on_control(self, peer: EndpointID, messages: list[bytes]) -> Outcome:
        return Outcome.TAKEN

    def on_settled(self, peer: EndpointID, settled: list[tuple[int, bool]]) -> None:
        for token, handled in settled:
            size = self.sizes.pop(token)
            self.handled += size * handled
        self.room.set()

    def on_peer_state(self, peer: EndpointID, state: PeerState) -> None:
        if state is PeerState.ALIVE:
            self.ready.set()

    def on_heartbeat(self, peer: EndpointID, reply: bool, attachment: bytes) -> bytes:
        return b""


async def forward(port: int, endpoint_id: int, batch: int, seconds: float) -> int:
    """Send by datagrams for some seconds, `batch` records an event-loop turn. Returns the records that were handled."""
    sender = _Sender()
    endpoint = Endpoint(EndpointID(secrets.randbits(63)), LinkOptions(), sender)
    endpoint.bind("127.0.0.1", 0)
    await endpoint.start()
    proxy = EndpointID(endpoint_id)
    endpoint.set_peers([Peer(proxy, "proxy", "127.0.0.1", port)])
    await asyncio.wait_for(sender.ready.wait(), 20)
    data, token, end = records(batch, 1), 0, time.monotonic() + seconds
    while time.monotonic() < end:
        token += 1
        sender.sizes[token] = batch
        endpoint.send_records(proxy, data, 1, token)
        await asyncio.sleep(0)
        while len(sender.sizes) * batch > WINDOW:
            sender.room.clear()
            await asyncio.wait_for(sender.room.wait(), 20)
    while sender.sizes:
        sender.room.clear()
        await asyncio.wait_for(sender.room.wait(), 20)
    await endpoint.close()
    return sender.handled


async def case(running: Running, way: str, batch: int, seconds: float) -> dict[str, float | str]:
    """Measure one load from a process of its own."""
    pids = running.pids["proxy"]
    arguments = [
        sys.executable,
        "-m",
        "benchmarks.clusters.proxy_hop",
        "--load",
        way,
        "--batch",
        str(batch),
        "--seconds",
        str(seconds),
    ]
    port = running.proxies.rpartition(":")[2] if way == "grpc" else str(running.ports["proxy"][0])
    arguments += ["--port", port, "--endpoint", str(running.endpoints["proxy"][0])]
    before, started = cpu_seconds(pids), time.monotonic()
    process = await asyncio.create_subprocess_exec(*arguments, stdout=subprocess.PIPE)
    output, _ = await process.communicate()
    used, wall = cpu_seconds(pids) - before, time.monotonic() - started
    count = int(output)
    return {"way": way, "batch": batch, "records": count, "per_cpu_s": count / used, "per_s": count / wall}


async def measure(seconds: float) -> list[dict[str, float | str]]:
    """Measure every case against one proxy."""
    async with cluster(settings=("cluster.guests=true",)) as running:  # the load by datagrams is not in the registry
        found = [await case(running, "grpc", batch, seconds) for batch in (10, 100, 1000)]
        return found + [await case(running, "datagrams", batch, seconds) for batch in (1, 10, 50)]


def main() -> int:
    """Measure and print; with --load, be the load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--load", choices=["grpc", "datagrams"], help=argparse.SUPPRESS)
    for name in ("batch", "port", "endpoint"):
        parser.add_argument(f"--{name}", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load == "grpc":
        print(asyncio.run(publish(f"127.0.0.1:{args.port}", args.batch, args.seconds)))
        return 0
    if args.load:
        print(asyncio.run(forward(args.port, args.endpoint, args.batch, args.seconds)))
        return 0
    results = asyncio.run(measure(args.seconds))
    if args.json:
        print(json.dumps(results))
        return 0
    table = Table("in by", "records a batch", "records / CPU s of the proxy", "records / s")
    for result in results:
        table.add_row(str(result["way"]), str(result["batch"]), f"{result['per_cpu_s']:,.0f}", f"{result['per_s']:,.0f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
