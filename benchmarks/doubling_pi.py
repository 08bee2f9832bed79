"""How long a doubling of Pi with a million entries takes, and what it moves: `python -m benchmarks.doubling_pi [--entries N]`.

Estimate, written before the first run: a million entries in 100,000 inboxes are about 2.4 million values of some 60 bytes (entry,
index, MsgID); half of them move: 1.2 million, 70 MB, read, sent, logged and written once more. At 50,000 values a second on a free
core that is 25 s; deleting them in the parent in slices of 500 looked-at values, a pause of 2 ms between two, 15 s. The
cut itself does not depend on how much there is.

Meanwhile a back end writes a mail to each of sixteen users in turn, a hundred a second, half of whom move: the longest wait of
one from the cut on is what a doubling costs its users.

First run: see the figures in docs/doubling.md, "Measured".
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio

import pixiu
import pixiu.testing
from benchmarks.pi_core import appends
from pixiu.cli.http import fetch
from pixiu.client.mail_receipt import MailReceipt
from pixiu.discovery.node import Node
from pixiu.wire.v1 import pi_pb2, pi_pb2_grpc
from registry.session import read_view, registry_of

INBOXES = 100_000
BATCH = 500
IN_FLIGHT = 8
LOOK_AT = 50
"""Batches between two looks at how much waits to be written."""
MAX_UNWRITTEN = 200_000
"""Half of what a replica takes before it refuses."""
USERS = range(INBOXES + 1, INBOXES + 17)
PACE_S = 0.01
PIXIU = str(Path(sys.executable).parent / "pixiu")


async def unwritten(node: Node) -> int:
    """Changes that wait for LMDB."""
    _, body = await fetch(node.host, node.http_port, "/metrics")
    found = [line.split()[-1] for line in body.decode().splitlines() if line.startswith("pixiu_pi_unwritten_changes")]
    return int(float(found[0]))


async def fill(target: str, entries: int) -> None:
    """Append at the leader of partition 0."""
    async with registry_of(target) as (zookeeper, root):
        (node,) = (await read_view(zookeeper, root)).replicas("pi", 0)
    slots = asyncio.Semaphore(IN_FLIGHT)
    payloads = appends(entries, INBOXES, BATCH)

    async def requests() -> AsyncIterator[pi_pb2.PiRequest]:
        for number, payload in enumerate(payloads, 1):
            await slots.acquire()
            while not number % LOOK_AT and await unwritten(node) > MAX_UNWRITTEN:
                await asyncio.sleep(0.1)
            yield pi_pb2.PiRequest(request=number, operations=payload)

    async with grpc.aio.insecure_channel(node.address) as channel:
        async for reply in pi_pb2_grpc.PiStub(channel).Exchange(requests()):
            if reply.code:
                raise SystemExit(f"{reply.code}: {reply.text}")
            slots.release()


class Waits:
    """Mails that are written while Pi doubles, and how long each took."""

    def __init__(self) -> None:
        self.found: list[tuple[float, int, float]] = []
        """(when it was sent, its user, seconds until it was confirmed)"""
        self._ending = asyncio.Event()

    async def write(self, target: str) -> None:
        """A mail to each user in turn, until told to end."""
        waiting: list[asyncio.Task[None]] = []
        async with pixiu.connect(target, uin=1) as px, px.mail_writer() as writer:
            while not self._ending.is_set():
                await writer.room()
                uin = USERS[len(waiting) % len(USERS)]
                waiting.append(asyncio.create_task(self._confirmed(uin, writer.send(uin, b"probe"))))
                await asyncio.sleep(PACE_S)
            await asyncio.gather(*waiting)

    async def _confirmed(self, uin: int, receipt: MailReceipt) -> None:
        began = time.monotonic()
        await receipt
        self.found.append((began, uin, time.monotonic() - began))

    def end(self) -> None:
        """The last mail was sent."""
        self._ending.set()

    def longest(self, since: float, until: float, *, moved: bool) -> float:
        """Milliseconds."""
        found = [wait for at, uin, wait in self.found if since <= at + wait and at <= until and uin % 2 == moved]
        return 1000 * max(found, default=0.0)


async def double(target: str, waits: Waits) -> tuple[list[tuple[float, dict[str, object]]], float]:
    """What the tool says, and when; how long it took."""
    command = [PIXIU, "double", "pi", "--yes", "--json", "--target", target]
    writing = asyncio.create_task(waits.write(target))
    while len(waits.found) < 3 * len(USERS):
        await asyncio.sleep(0.1)
    began = time.monotonic()
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    said = [(time.monotonic(), json.loads(line)) async for line in process.stdout]
    errors = (await process.stderr.read()).decode()
    if await process.wait():
        raise SystemExit(errors or said[-1:])
    took = time.monotonic() - began
    waits.end()
    await writing
    return said, took


def main() -> None:
    """Fill, double, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--entries", type=int, default=1_000_000)
    wanted = parser.parse_args()
    waits = Waits()
    with pixiu.testing.cluster() as cluster:
        began = time.monotonic()
        asyncio.run(fill(cluster.target, wanted.entries))
        print(f"{wanted.entries:,} entries appended in {time.monotonic() - began:.0f} s", flush=True)
        said, took = asyncio.run(double(cluster.target, waits))
    show(said, took, waits)


def show(said: list[tuple[float, dict[str, object]]], took: float, waits: Waits) -> None:
    """Times, what moved, and how long mails waited in each phase."""
    steps = [(at, line) for at, line in said if line["event"] == "phase"]
    done: Counter[str] = Counter()
    for _, line in steps:
        for what in ("done", "bytes"):
            if line["phase"] in ("learn", "split", "open"):
                done[what] = max(done[what], int(str(line.get(what, 0))))
        if line["phase"] == "clean":
            done["deleted"] = max(done["deleted"], int(str(line.get("total", 0))))
    seconds = said[-1][1]["seconds"]
    assert isinstance(seconds, dict)
    print(f"doubled in {took:.1f} s: " + ", ".join(f"{phase} {spent:.1f} s" for phase, spent in seconds.items()))
    rate = done["done"] / max(seconds.get("learn", 0.0), 0.1)
    print(f"copied {done['done']:,} values, {done['bytes'] / (1 << 20):,.0f} MiB: {rate:,.0f} a second while learning")
    print(f"deleted {done['deleted']:,} in the parent: {done['deleted'] / max(seconds.get('clean', 0.0), 0.1):,.0f} a second")
    began = {str(line["phase"]): at for at, line in reversed(steps)}
    ends = [*list(began.values())[-2::-1], said[-1][0]]
    for (phase, since), until in zip(sorted(began.items(), key=lambda item: item[1]), ends, strict=True):
        moved, stayed = (waits.longest(since, until, moved=moved) for moved in (True, False))
        print(f"longest wait of a mail in {phase:6}: {moved:5.0f} ms of a user who moves, {stayed:5.0f} ms of one who stays")


if __name__ == "__main__":
    main()
