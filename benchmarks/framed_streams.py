"""An exchange on a stream between two processes, over frames and over gRPC: what it costs either side.

One stream, a message and its answer of the same size, one at a time or some under way; a process on each side, the carriers in
turn. The CPU is that of the whole process, all threads, per exchange.

    python -m benchmarks.framed_streams [--seconds 1] [--rounds 3] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection as Pipe
from typing import Any, Final, NamedTuple

import grpc
import grpc.aio
from rich.console import Console
from rich.table import Table

from cluster.rpc.framed import FramedCall
from cluster.rpc.framed_door import FramedDoor
from cluster.rpc.frames import Hello
from pixiu.rpc.channels import PEER_CHANNEL
from pixiu.rpc.duplex import Carrier, Duplex, Outbox
from pixiu.rpc.grpc_streams import GrpcCall, GrpcHandler

METHOD: Final = "/pixiu.v1.Pi/Exchange"
CARRIERS: Final = ("grpc", "framed")
CASES: Final = ((100, 1), (1400, 1), (14_000, 1), (140_000, 1), (100, 16), (1400, 16))
"""Bytes of a message, and how many are under way."""
MAX_BYTES: Final = 4 << 20


class Cost(NamedTuple):
    """Of one exchange, microseconds."""

    client: float
    server: float
    clock: float


async def echo(carrier: Carrier[bytes, bytes]) -> None:
    """Answer each message with itself."""
    outbox = Outbox[bytes](1000)

    def take(message: bytes) -> None:
        assert outbox.put(message)

    await Duplex(carrier, take, outbox.give, work=outbox.work).run()


async def _listen(carrier: str) -> tuple[int, Callable[[], Awaitable[object]]]:
    if carrier == "framed":
        door = FramedDoor(max_bytes=MAX_BYTES)
        door.serve(METHOD, bytes, echo)
        port = await door.bind("127.0.0.1", 0, fallback=True)
        await door.start()
        return port, door.close
    server = grpc.aio.server()
    methods: dict[str, Any] = {"Exchange": grpc.stream_stream_rpc_method_handler(_grpc_echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("pixiu.v1.Pi", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return port, lambda: server.stop(0)


async def _grpc_echo(_requests: Any, context: Any) -> None:
    await echo(GrpcHandler(context))


def serve(carrier: str, pipe: Pipe) -> None:
    """The other process: says its port, then its CPU whenever it is asked, until it is told to end."""

    async def run() -> None:
        port, close = await _listen(carrier)
        pipe.send(port)
        while await asyncio.to_thread(pipe.recv):
            pipe.send(time.process_time())
        await close()

    asyncio.run(run())


def _call(carrier: str, port: int) -> GrpcCall[bytes, bytes] | FramedCall[bytes, bytes]:
    if carrier == "framed":
        return FramedCall("127.0.0.1", port, "pi", Hello(METHOD, "proxy", 1), lambda: None, bytes, MAX_BYTES)
    return GrpcCall.to(f"127.0.0.1:{port}", "pi", PEER_CHANNEL, lambda channel: channel.stream_stream(METHOD)())


async def exchange(carrier: str, port: int, pipe: Pipe, size: int, window: int, seconds: float) -> Cost:
    """Run one case."""
    message, done = bytes(size), 0
    outbox = Outbox[bytes](1000)

    def answered(_message: bytes) -> None:
        nonlocal done
        done += 1
        outbox.put(message)

    def cpu() -> float:
        pipe.send(True)
        return float(pipe.recv())

    async with _call(carrier, port) as call:
        await call.opened(10.0)
        stream = Duplex(call, answered, outbox.give, work=outbox.work)
        running = asyncio.create_task(stream.run())
        for _ in range(window):
            outbox.put(message)
        await asyncio.sleep(seconds / 5)
        before, own, other, began = done, time.process_time(), cpu(), time.perf_counter()
        await asyncio.sleep(seconds)
        count, own_after, other_after, ended = done - before, time.process_time(), cpu(), time.perf_counter()
        stream.end("")
        await running
    each = 1e6 / max(count, 1)
    return Cost((own_after - own) * each, (other_after - other) * each, (ended - began) * each)


def measured(carrier: str, size: int, window: int, seconds: float) -> Cost:
    """One case with processes of its own."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    server = spawn.Process(target=serve, args=(carrier, theirs))
    server.start()
    try:
        return asyncio.run(exchange(carrier, ours.recv(), ours, size, window, seconds))
    finally:
        ours.send(False)
        server.join(10)
        if server.is_alive():
            server.kill()


def main() -> int:
    """Measure, and print a table."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seconds", type=float, default=1.0, help="for each case")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--json", action="store_true")
    options = arguments.parse_args()
    found: dict[tuple[int, int, str], list[Cost]] = {}
    for _ in range(options.rounds):
        for size, window in CASES:
            for carrier in CARRIERS:
                found.setdefault((size, window, carrier), []).append(measured(carrier, size, window, options.seconds))
    rows = [
        {"bytes": size, "under_way": window, "carrier": carrier}
        | {f"{name}_us": round(statistics.median(getattr(cost, name) for cost in costs), 1) for name in Cost._fields}
        for (size, window, carrier), costs in found.items()
    ]
    if options.json:
        print(json.dumps(rows))
        return 0
    table = Table("bytes", "under way", "carrier", "client µs", "server µs", "by the clock µs")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
