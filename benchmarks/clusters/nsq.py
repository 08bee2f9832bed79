"""Measure how many messages of NSQ's clients a CPU second carries: at a listener in front of durable topics, and at nsqd.

A load of plain sockets, 100-byte messages: PUB with a window of 100, MPUB of 100, and a consumer with RDY 500 that finishes each.
Listener and topic group have a process each, whose CPU is shown apart: listeners are added at will, groups share topics. The group
has one replica, which syncs before it answers; nsqd answers once a message is in memory, or with `--mem-queue-size=0` in its file,
which it syncs every 2,500 messages or two seconds.

Estimate: a session in Python takes some 6 µs for a command and as much for the SDK: 60,000 PUB a CPU second with a window,
150,000 by MPUB, 40,000 consumed. nsqd, in Go: 75,000 to 87,000 consumed in memory, 17,000 from its file, by an earlier measurement.

    python -m benchmarks.clusters.nsq [--messages 50000] [--peer]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.clusters.growth import say
from comparison.processes import cpu_seconds, free_port
from tests.clients.nsq.matrix import BUILT
from tests.support.cluster import LocalCluster, running_cluster
from tests.support.nsq import mpub

BODY = b"x" * 100
WINDOW, BATCH, READY, FINISHES = 100, 100, 500, 50
SHAPE = [f"--{name}=1" for name in ("brokers", "broker-replicas", "routers", "router-replicas", "gateways", "proxies")]
SHAPE += ["--relays=0", "--topics=1", "--topic-replicas=1", "--admins=1"]
WAIT_S = 300.0


class Load:
    """A blocking connection."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
        self._buffer = b""
        self.send(b"  V2")

    def send(self, data: bytes) -> None:
        """Send bytes."""
        self._socket.sendall(data)

    def frames(self) -> Iterator[tuple[int, bytes]]:
        """Frames as they come."""
        while True:
            at = 0
            while len(self._buffer) - at >= 8 and len(self._buffer) - at >= 4 + (
                size := struct.unpack_from(">i", self._buffer, at)[0]
            ):
                yield self._buffer[at + 7], self._buffer[at + 8 : at + 4 + size]
                at += 4 + size
            self._buffer = self._buffer[at:]
            data = self._socket.recv(1 << 18)
            assert data, "the connection is over"
            self._buffer += data


def publish(port: int, topic: str, messages: int, *, many: bool) -> None:
    """Publish with a window of commands that are not answered."""
    load, size = Load(port), BATCH if many else 1
    body = mpub(*[BODY] * BATCH) if many else BODY
    command = (b"MPUB " if many else b"PUB ") + topic.encode() + b"\n" + len(body).to_bytes(4, "big") + body
    sent, answered, window = 0, 0, 4 if many else WINDOW
    frames, wanted = load.frames(), messages // size
    while answered < wanted:
        free = min(window - (sent - answered), wanted - sent)
        if free >= max(1, window // 4) or (free and sent - answered == 0):
            load.send(command * free)
            sent += free
        assert next(frames) == (0, b"OK")
        answered += 1


def consume(port: int, topic: str, messages: int) -> None:
    """Consume, and finish what came at a time at once."""
    load = Load(port)
    load.send(b"SUB %s bench\nRDY %d\n" % (topic.encode(), READY))
    left, finished = messages, []
    for kind, data in load.frames():
        if kind != 2:
            assert data in (b"OK", b"_heartbeat_"), data
            continue
        finished.append(b"FIN " + data[10:26] + b"\n")
        left -= 1
        if len(finished) == FINISHES or not left:
            load.send(b"".join(finished))
            finished.clear()
        if not left:
            return


@contextlib.contextmanager
def listener(cluster: LocalCluster) -> Iterator[tuple[int, dict[str, list[int]]]]:
    """A listener of its own process: its port, and the pids whose CPU counts."""
    port = free_port()
    command = (sys.executable, "-m", "nsqdoor", "--target", cluster.target, "--tcp-port", str(port), "--http-port", "0")
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        until_listens(port)
        topic = [int(each["pid"]) for each in cluster.processes("topic")]
        yield port, {"listener": [process.pid], "group": topic}
    finally:
        process.terminate()
        process.wait(60)


@contextlib.contextmanager
def peer(*arguments: str) -> Iterator[tuple[int, dict[str, list[int]]]]:
    """An nsqd."""
    port = free_port()
    with tempfile.TemporaryDirectory() as data:
        command = (
            str(BUILT / "nsqd/nsqd"),
            "-tcp-address",
            f"127.0.0.1:{port}",
            "-http-address",
            "127.0.0.1:0",
            "-data-path",
            data,
        )
        process = subprocess.Popen((*command, *arguments), stderr=subprocess.DEVNULL)
        try:
            until_listens(port)
            yield port, {"nsqd": [process.pid]}
        finally:
            process.terminate()
            process.wait(60)


def until_listens(port: int) -> None:
    """Wait until somebody listens."""
    end = time.monotonic() + WAIT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            assert time.monotonic() < end, "nobody listens"
            time.sleep(0.1)
        else:
            return


def measure(name: str, port: int, pids: dict[str, list[int]], messages: int) -> list[dict[str, Any]]:
    """Play the load, and say what each kind of process used."""
    topic, found = f"bench-{time.time_ns()}", []
    publish(port, topic, BATCH, many=False)  # the topic is made
    steps: list[tuple[str, int, Callable[[], None]]] = [
        ("PUB", messages, lambda: publish(port, topic, messages, many=False)),
        ("MPUB", messages, lambda: publish(port, topic, messages, many=True)),
        ("consume", 2 * messages, lambda: consume(port, topic, 2 * messages)),
    ]
    for step, count, work in steps:
        before, began = {kind: cpu_seconds(each) for kind, each in pids.items()}, time.monotonic()
        work()
        wall, used = time.monotonic() - began, {kind: cpu_seconds(each) - before[kind] for kind, each in pids.items()}
        figures = {kind: round(count / max(seconds, 1e-9)) for kind, seconds in used.items()}
        figures |= {"all": round(count / sum(used.values())), "by the clock": round(count / wall)}
        say(f"{name:22}{step:8}" + "  ".join(f"{kind} {figure:,}" for kind, figure in figures.items()))
        found.append({"server": name, "step": step, **figures})
    return found


async def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=50_000)
    parser.add_argument(
        "--peer", action="store_true", help="measure nsqd, too: tests/clients/nsq/matrix.py --prepare --peer builds it"
    )
    parser.add_argument("--json", action="store_true")
    wanted = parser.parse_args()
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, running_cluster(Path(folder), *SHAPE, layout="separate") as cluster:
        await asyncio.to_thread(cluster.wait_healthy)
        with listener(cluster) as (port, pids):
            found += await asyncio.to_thread(measure, "listener and topics", port, pids, wanted.messages)
    if wanted.peer:
        for name, arguments in (("nsqd in memory", ("--mem-queue-size=1000000",)), ("nsqd from its file", ("--mem-queue-size=0",))):
            with peer(*arguments) as (port, pids):
                found += await asyncio.to_thread(measure, name, port, pids, wanted.messages)
    if wanted.json:
        print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main())
