"""How long does a request of the HTTP API take, on a connection that is kept and on a fresh one?

Callers, one and then several at the same time, send `POST /v1/publish` (100 bytes to a room with a listener), `GET
/v1/retained` of one topic and of 100 topics, and `GET /v1/health`, which shows what HTTP alone costs. Each waits for its answer
before the next request.

Estimate, written before the first run: aiohttp costs 0.4 ms of a core, the hop to a proxy and a broker 0.7 ms, a retained topic
from a router 0.5 ms, 100 of them and their JSON 2 ms; a fresh connection 0.15 ms more. So at the median 1.2, 1 and 2.5 ms; with
16 callers on two cores they wait for each other, 8 ms. p99 is three times the median.

    python -m benchmarks.clients.http [--requests 2000] [--callers 1,16] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.clients.connection import Session, connect
from benchmarks.clients.watching import cpu_s, percentile
from comparison.processes import free_port
from tests.support.cluster import LocalCluster, running_cluster
from tests.support.shared_zookeeper import end_shared_server

SHAPE = ("--proxies=1", "--gateways=1", "--relays=0", "--brokers=1", "--broker-replicas=1", "--routers=1", "--router-replicas=1")
RETAINED = 100
REQUESTS = {
    "GET /v1/health": ("GET", "/v1/health", b""),
    "POST /v1/publish": ("POST", "/v1/publish?topic=room/42&user=7", b"x" * 100),
    "GET /v1/retained, one": ("GET", "/v1/retained?filter=kept/7&user=7", b""),
    "GET /v1/retained, 100": ("GET", "/v1/retained?filter=kept/%2B&user=7", b""),
}


@dataclass(frozen=True)
class Row:
    """Result of one case."""

    request: str
    connection: str
    callers: int
    requests: int
    p50_ms: float
    p99_ms: float
    per_second: float
    cpu_ms: float
    """Of all servers, for a request."""
    load: float


class Caller:
    """A client of HTTP/1.1 with one connection."""

    def __init__(self, port: int, *, kept: bool) -> None:
        self._port, self._kept = port, kept
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def call(self, method: str, path: str, body: bytes) -> bytes:
        """Send a request, and return the body of its answer. Raises RuntimeError if it is not 200."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        more = "" if self._kept else "Connection: close\r\n"
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\n{more}Content-Type: application/octet-stream\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        said = await reader.readuntil(b"\r\n\r\n")
        size = next(int(line[15:]) for line in said.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        answer = await reader.readexactly(size)
        if b" 200 " not in said[:20]:
            raise RuntimeError(f"{method} {path}: {said[:40]!r} {answer[:200]!r}")
        if not self._kept:
            await self.close()
        return answer

    async def close(self) -> None:
        """Close the connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def measure(cluster: LocalCluster, port: int, name: str, kept: bool, callers: int, requests: int) -> Row:
    """Measure one case."""
    took: list[float] = []

    async def calls(count: int) -> None:
        caller = Caller(port, kept=kept)
        for _ in range(count):
            began = time.perf_counter()
            await caller.call(*REQUESTS[name])
            took.append((time.perf_counter() - began) * 1e3)
        await caller.close()

    await calls(20)
    took.clear()
    before, began = await asyncio.to_thread(cpu_s, cluster), time.perf_counter()
    await asyncio.gather(*(calls(requests // callers) for _ in range(callers)))
    wall = time.perf_counter() - began
    used = sum((await asyncio.to_thread(cpu_s, cluster)).values()) - sum(before.values())
    return Row(
        name, "kept" if kept else "fresh", callers, len(took), round(percentile(took, 0.5), 2), round(percentile(took, 0.99), 2),
        round(len(took) / wall), round(used / len(took) * 1e3, 2), round(os.getloadavg()[0], 1),
    )  # fmt: skip


async def run(arguments: argparse.Namespace, folder: Path) -> list[Row]:
    """Measure all cases."""
    port = free_port()
    rows = []
    with running_cluster(folder, *SHAPE, f"--set=gateway.api_port={port}", layout="separate") as cluster:
        await asyncio.to_thread(cluster.wait_healthy)
        listener = await connect(("127.0.0.1", cluster.mqtt_ports()[0]), Session("listener", "9"))
        await listener.subscribe([("room/42", 0)])
        for number in range(RETAINED):
            await listener.publish(f"kept/{number}", b"x" * 100, 1, retain=True)
        if len(json.loads(await Caller(port, kept=False).call(*REQUESTS["GET /v1/retained, 100"]))["messages"]) != RETAINED:
            raise RuntimeError("not all retained messages are listed")
        for name in REQUESTS:
            for kept in (True, False):
                for callers in arguments.callers:
                    rows.append(await measure(cluster, port, name, kept, callers, arguments.requests))
                    print(rows[-1], file=sys.stderr, flush=True)
        listener.cut()
    return rows


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000, help="of each case")
    parser.add_argument("--callers", type=lambda text: tuple(map(int, text.split(","))), default=(1, 16))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pixiu-http-") as name:
        try:
            rows = asyncio.run(run(arguments, Path(name)))
        finally:
            end_shared_server()
    if arguments.json:
        print(json.dumps([vars(row) for row in rows]))
        return 0
    for row in rows:
        print(
            f"{row.request:24} {row.connection:6} {row.callers:3} callers  p50 {row.p50_ms:7.2f} ms  p99 {row.p99_ms:7.2f} ms  "
            f"{row.per_second:6.0f} / s  {row.cpu_ms:.2f} ms CPU  load {row.load}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
