"""Does Spark read a durable topic once, and write one once, while its driver is killed (SIGKILL) and the topic is resized?

A cluster of two groups. A writer sends; one streaming query goes from the topic into Parquet, another one from the topic into a
second topic. Both run in one driver, which is killed with its JVM and its workers some seconds after its first micro-batches, again
and again; a split or a merge comes between. The last driver ends when it has everything. Then the newest commit of each query is
taken away, as if a driver had died before it noted it, and the queries run once more.

Estimate: each message is once in Parquet and once in the second topic, and what runs once more writes nothing.

    python -m benchmarks.clusters.spark_kills [--kills 3] [--rate 400] [--seed 1] [--keep DIR] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pixiu
from benchmarks.clusters.growth import play, say
from pixiu.placement.slots import SLOTS
from tests.support.cluster import running_cluster

SHAPE = [f"--{name}=1" for name in ("brokers", "broker-replicas", "routers", "router-replicas", "gateways", "proxies", "admins")]
SHAPE += ["--relays=0", "--topics=2", "--topic-replicas=2"]
ORDERS, COPY = "orders", "copy"
KEYS = 50
BATCH = 1_500
"""Rows of a micro-batch, so that there are several between two kills."""
AT_THE_END = 30_000
"""The same of the driver that ends by itself."""
KILL_S = (1.0, 8.0)
"""After the driver's first micro-batch."""
DRIVER_S = 900.0
READ_S = 120.0


def drive(target: str, folder: Path, end: bool) -> None:
    """The driver: both queries, until it is killed, or until they have everything."""
    from pipeline.session import open_session

    spark = open_session("kills", "local[2]", brief=True)

    def source() -> Any:
        most = AT_THE_END if end else BATCH
        made = spark.readStream.format("pixiu").option("target", target).option("topic", ORDERS)
        return made.option("startingOffsets", "earliest").option("retrySeconds", "60").option("maxOffsetsPerTrigger", most).load()

    parquet = source().writeStream.format("parquet").option("path", str(folder / "rows"))
    copy = source().selectExpr("body", "key").writeStream.format("pixiu").option("target", target).option("topic", COPY)
    queries = []
    for name, writer in (("rows", parquet), ("copy", copy)):
        writer = writer.option("checkpointLocation", str(folder / f"{name}-checkpoint"))
        queries.append((writer.trigger(availableNow=True) if end else writer).start())
    for query in queries:
        query.awaitTermination()
        if query.exception() is not None:
            raise query.exception()
    if end:
        rows = spark.read.parquet(str(folder / "rows")).select("body").collect()
        (folder / "rows.json").write_text(json.dumps([bytes(row.body).decode() for row in rows]))
    spark.stop()


class Driver:
    """A driver in a session of its own, which is killed as a whole."""

    def __init__(self, target: str, folder: Path, end: bool = False) -> None:
        command = [sys.executable, "-m", "benchmarks.clusters.spark_kills", "--drive", target, str(folder)] + ["--end"] * end
        self._log = (folder / "driver.log").open("ab")
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log, start_new_session=True)

    async def wait_begun(self, commits: Path, before: int) -> None:
        """Wait until it has ended a micro-batch."""
        async with asyncio.timeout(DRIVER_S):
            while _count(commits) <= before:
                assert self._process.poll() is None, "the driver ended by itself; see driver.log"
                await asyncio.sleep(0.2)

    async def wait(self) -> int:
        """Wait until it ends."""
        return await asyncio.to_thread(self._process.wait, DRIVER_S)

    def kill(self) -> int:
        """Kill it, its JVM and its workers. Returns the number of its processes."""
        pids = _session(self._process.pid)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()
        return len(pids)


def _session(leader: int) -> list[int]:
    """The processes of a session, and those that a process of it began a session with (Spark's workers do)."""
    parents, sessions = dict[int, int](), dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            parents[int(path.parent.name)], sessions[int(path.parent.name)] = int(fields[1]), int(fields[3])
    found = {pid for pid, session in sessions.items() if session == leader}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


def _count(commits: Path) -> int:
    return len(list(commits.glob("[0-9]*")))


async def run(arguments: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Write, kill and resize. Returns figures and what is wrong."""
    rolls, figures, sent = random.Random(arguments.seed), dict[str, Any](), list[str]()
    with running_cluster(folder, *SHAPE, layout="separate") as cluster:
        await asyncio.to_thread(cluster.wait_healthy)
        async with pixiu.connect(cluster.target) as px:
            await px.topics.create(ORDERS, parts=2)
            await px.topics.create(COPY, parts=2)
            ending = asyncio.Event()
            writing = asyncio.create_task(_write(px, arguments.rate, sent, ending))
            for number in range(arguments.kills):
                commits = folder / ("rows-checkpoint", "copy-checkpoint")[number % 2] / "commits"
                driver = Driver(cluster.target, folder)
                try:
                    await driver.wait_begun(commits, _count(commits))
                    await _resize(px, merge=bool(number % 2))
                    await asyncio.sleep(rolls.uniform(*KILL_S))
                finally:
                    killed = driver.kill()
                figures[f"kill {number + 1}"] = f"{killed} processes, after {_count(commits)} micro-batches"
                say(f"killed {killed} processes of the driver")
            ending.set()
            await writing
            figures["sent"] = len(sent)
            problems = await _end(px, cluster.target, folder, sent, figures, "")
            figures["commits taken away"] = sum(map(_without_commit, (folder / "rows-checkpoint", folder / "copy-checkpoint")))
            _without_commit(folder / "rows", "_spark_metadata")
            problems += await _end(px, cluster.target, folder, sent, figures, "once more: ")
    return figures, problems


async def _write(px: pixiu.Client, rate: float, sent: list[str], ending: asyncio.Event) -> None:
    began = time.monotonic()
    async with px.durable_topic(ORDERS).writer() as writer:
        while not ending.is_set():
            while len(sent) < (time.monotonic() - began) * rate:
                await writer.send(b"%d" % len(sent), key=b"%d" % (len(sent) % KEYS))
                sent.append(str(len(sent)))
            await asyncio.sleep(0.02)
        await writer.wait_finished()


async def _resize(px: pixiu.Client, *, merge: bool) -> None:
    for topic in (ORDERS, COPY):
        parts = sorted((await px.topics.describe(topic)).open_parts, key=lambda part: part.low)
        if merge:
            await px.topics.resize(topic, [parts[0].number, parts[1].number])
        else:
            await px.topics.resize(topic, [parts[0].number], bounds=[(parts[0].low + min(parts[0].high, SLOTS)) // 2])


async def _end(
    px: pixiu.Client, target: str, folder: Path, sent: list[str], figures: dict[str, Any], what: str
) -> list[str]:  # fmt: skip
    """Let a driver end by itself, and compare."""
    began = time.monotonic()
    driver = Driver(target, folder, end=True)
    try:
        code = await driver.wait()
    finally:
        driver.kill()
    figures[f"{what}last driver, s"] = round(time.monotonic() - began, 1)
    found = {"Parquet": Counter(json.loads((folder / "rows.json").read_text())), "the other topic": Counter(await _read(px))}
    problems = [f"{what}the last driver ended with {code}"] if code else []
    for name, rows in found.items():
        lost, more = Counter(sent) - rows, rows - Counter(sent)
        figures[f"{what}rows in {name}"] = rows.total()
        if lost or more:
            problems.append(
                f"{what}{name}: {lost.total()} are missing, {more.total()} are there again: {[*lost][:5]} {[*more][:5]}"
            )
    say(f"{figures} {problems}")
    return problems


async def _read(px: pixiu.Client) -> list[str]:
    rows = list[str]()
    await px.topics.set_channel(COPY, "count")
    total = sum(part.end for part in await px.topics.channel_state(COPY, "count"))
    async with asyncio.timeout(READ_S), px.durable_topic(COPY).reader(start="earliest") as reader:
        while len(rows) < total:
            rows.append((await anext(reader)).body.decode())
    return rows


def _without_commit(folder: Path, name: str = "commits") -> bool:
    """Take the newest note away, as if the driver had died before it. Returns False if there is none."""
    notes = sorted((folder / name).glob("[0-9]*"), key=lambda path: int(path.name.removesuffix(".compact")))
    if notes:
        notes[-1].unlink()
        (notes[-1].parent / f".{notes[-1].name}.crc").unlink(missing_ok=True)
    return bool(notes)


def main() -> int:
    """Run, and print the results. Returns 1 when a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--rate", type=float, default=400.0, help="messages a second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", default="", help="keep logs and rows in this folder")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--drive", nargs=2, default=(), help=argparse.SUPPRESS)
    parser.add_argument("--end", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.drive:
        drive(arguments.drive[0], Path(arguments.drive[1]), arguments.end)
        return 0
    return play(run, arguments)


if __name__ == "__main__":
    sys.exit(main())
