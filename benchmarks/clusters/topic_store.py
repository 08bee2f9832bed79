"""A part of `topics.py`: writers while the object store fails, and what it has in the end.

One topic of one group with two replicas, whose closed segments go to `faulty_files.py`. A writer sends at a steady rate. For N
minutes each, in turn for 20 seconds at a time, the store is as it is, answers half of the requests with 503, and is away; so what
else the machine does changes all three alike. Then half of the answers are 503 for N minutes, the store is away for N minutes, and
the writer waits until it has caught up. At last everything is read, most of it from the store, since files go after 20 seconds.

Estimate: no writer notices: p99 within a factor of two, and noise; uploads catch up in the time that the bytes take on the disk.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import deque
from pathlib import Path
from typing import Any

import pixiu
from benchmarks.clusters.faulty_files import VARIABLE, environment
from benchmarks.clusters.growth import say
from benchmarks.clusters.topic_scale import SHAPE
from pixiu.client.topics.writing.writer import TopicWriter
from pixiu.errors import PixiuError
from pixiu.wire.v1 import topic_pb2
from tests.support.cluster import LocalCluster, running_cluster
from tools.cli.http import fetch, samples
from tools.topics.calls import TopicCluster

PHASES = (("as it is", "0"), ("half 503", "0.5"), ("away", "1"))
BLOCK_S = 20.0
"""Length of a phase's turn."""
SETTINGS = {"store_segment_mb": 1, "store_idle_s": 1.0, "local_retention_s": 20.0, "flush_interval_s": 0.5, "memory_mb": 16}
SWEEP_S = 0.005
CATCH_UP_S = 600.0


async def store(arguments: argparse.Namespace, folder: Path, findings: Any) -> None:
    """Write through all phases, and read everything."""
    objects, added = folder / "objects", environment(folder)
    faults = Path(added[VARIABLE])
    settings = [f"--set=topic.{name}={value}" for name, value in {"store": f"faulty://{objects}", **SETTINGS}.items()]
    with running_cluster(folder, *SHAPE, "--topic-replicas=2", *settings, environment=added) as cluster:
        await asyncio.to_thread(cluster.wait_healthy)
        async with pixiu.connect(cluster.target) as px:
            await px.topics.create("apart", parts=1)
            writer = _Writer(await px.durable_topic("apart").writer().open(), arguments.store_rate)
            figures: dict[str, Any] = {}
            took: dict[str, list[float]] = {name: [] for name, _ in PHASES}
            for _ in range(max(1, round(60.0 * arguments.minutes / BLOCK_S))):
                for name, share in PHASES:
                    faults.write_text(share)
                    took[name] += await writer.run(BLOCK_S)
            figures["in turn"] = {name: _summary(each) for name, each in took.items()}
            say(f"in turn: {figures['in turn']}")
            for name, share in PHASES[1:]:
                faults.write_text(share)
                figures[name] = _summary(await writer.run(60.0 * arguments.minutes)) | await _uploads(cluster)
                say(f"{name}: {figures[name]}")
            faults.write_text("0")
            figures["catches up in, s"] = await _caught_up(cluster)
            await writer.close()
            figures["then"] = await _uploads(cluster)
            faults.write_text("0.5")
            figures["read back"] = await _read(px, writer.sent, findings)
            figures["fetches"] = await _metric(cluster, "store_fetches_total")
    findings.figures["store"] = figures


class _Writer:
    """Sends numbered messages at a rate, and notes when each is confirmed."""

    def __init__(self, writer: TopicWriter, rate: float) -> None:
        self._writer, self._rate = writer, rate
        self.sent = 0

    async def run(self, seconds: float) -> list[float]:
        """Send for a time. Returns milliseconds until each message was confirmed."""
        began, took, mine = time.monotonic(), list[float](), 0
        waiting: deque[tuple[float, Any]] = deque()
        while time.monotonic() < began + seconds or waiting:
            due = int((time.monotonic() - began) * self._rate) if time.monotonic() < began + seconds else mine
            for _ in range(due - mine):
                mine, self.sent = mine + 1, self.sent + 1
                waiting.append((time.monotonic(), await self._writer.send(b"%d" % self.sent, headers={"fill": b"x" * 1000})))
            while waiting and waiting[0][1].resolved:
                at, receipt = waiting.popleft()
                await receipt
                took.append((time.monotonic() - at) * 1000)
            await asyncio.sleep(SWEEP_S)
        return took

    async def close(self) -> None:
        await self._writer.close()


def _summary(took: list[float]) -> dict[str, float]:
    """Number and percentiles of milliseconds."""
    took = sorted(took)
    return {"messages": len(took)} | {
        f"{name} ms": round(took[int(len(took) * share)], 1) for name, share in (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999))
    }


async def _state(cluster: LocalCluster) -> topic_pb2.TopicStore:
    async with TopicCluster(cluster.target) as topics:
        shown = await topics.show("apart")
        return shown.sizes[1].store or topic_pb2.TopicStore()


async def _metric(cluster: LocalCluster, name: str) -> float:
    total = 0.0
    for process in await asyncio.to_thread(cluster.processes, "topic"):
        address, _, port = process["http"].removeprefix("http://").rpartition(":")
        _, page = await fetch(address, int(port), "/metrics")
        total += sum(value for found, _, value in samples(page) if found == f"pixiu_topic_{name}")
    return total


async def _uploads(cluster: LocalCluster) -> dict[str, float]:
    return {
        "waiting MB": round((await _state(cluster)).waiting_bytes / 1e6, 1),
        "local MB": round(await _metric(cluster, "stored_bytes") / 1e6, 1),
        "failures so far": await _metric(cluster, "store_failures_total"),
        "uploads so far": await _metric(cluster, "store_uploads_total"),
    }


async def _caught_up(cluster: LocalCluster) -> float:
    began = time.monotonic()
    async with asyncio.timeout(CATCH_UP_S):
        while True:
            try:
                if (found := await _state(cluster)).end and not found.waiting_bytes:
                    return round(time.monotonic() - began, 1)
            except PixiuError as problem:
                say(str(problem))
            await asyncio.sleep(0.2)


async def _read(px: pixiu.Client, sent: int, findings: Any) -> dict[str, float]:
    began, expected = time.monotonic(), 1
    async with px.durable_topic("apart").reader() as reader:
        for _ in range(sent):
            async with asyncio.timeout(60.0):
                message = await anext(reader)
            if int(message.body) != expected:
                findings.problems.append(f"store: message {expected} is missing; {int(message.body)} came")
                break
            expected += 1
    return {"messages": expected - 1, "s": round(time.monotonic() - began, 1)}
