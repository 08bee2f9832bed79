"""Tasks of a topic's source and sink against a real cluster, without Spark: leaders are killed and parts resized under them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import pixiu
from pipeline.topics.columns import TYPES, spark_schema
from pipeline.topics.options import write_options
from pipeline.topics.sink import TopicWriter
from pipeline.topics.source import BlocksPartition, TopicReader, options_of
from pixiu.errors import InvalidArgument
from pixiu.placement.slots import SLOTS
from tests.pipeline.conftest import Store
from tests.support.cluster import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
ROWS, BATCH = 20_000, 2_000


def on_topics(store: Store, steps: Callable[[pixiu.Client], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with pixiu.connect(store.target) as px:
            return await steps(px)

    return asyncio.run(run())


def kill_leader(store: Store, group: int) -> None:
    """The group's leader is killed; `pixiu up` starts it again."""

    def leader() -> int:
        replicas = [each for each in store.cluster.processes("topic") if each["partition"] == group]
        leading = [each for each in replicas if each["replication"]["member"] == each["replication"]["leader"]]
        return int(leading[0]["pid"]) if len(replicas) == 2 and leading else 0

    os.kill(wait_for(leader, f"a leader of group {group} with a follower"), signal.SIGKILL)


def batches(meanwhile: Callable[[int], None]) -> Iterator[pa.RecordBatch]:
    for begin in range(0, ROWS, BATCH):
        meanwhile(begin)
        numbers = range(begin, begin + BATCH)
        yield pa.RecordBatch.from_pydict(
            {"body": [b"%d" % number for number in numbers], "key": [b"%d" % (number % 50) for number in numbers]}
        )


def test_a_task_stores_and_reads_each_row_once(store: Store) -> None:
    info = on_topics(store, lambda px: px.topics.create("tasks", parts=2))
    low, high = info.parts
    options = {"target": store.target, "topic": "tasks"}
    writer = TopicWriter(write_options(options | {"retrySeconds": "120"}, streaming=True), ("body", "key"))

    def meanwhile(begin: int) -> None:
        match begin // BATCH:
            case 2:
                kill_leader(store, low.group)
            case 4:
                on_topics(store, lambda px: px.topics.resize("tasks", [low.number], bounds=[SLOTS // 4]))
            case 6:
                kill_leader(store, high.group)
                on_topics(store, lambda px: px.topics.resize("tasks", [4, high.number]))

    written = writer.write(batches(meanwhile), "q", 7, 0)
    assert written.cluster
    killed = list[int]()

    def read() -> list[dict[str, Any]]:
        wanted = options_of(options | {"retrySeconds": "120"}, spark_schema(("part", "offset", "key", "body")), streaming=False)
        reader = TopicReader(wanted)
        found = list[dict[str, Any]]()
        for task in reader.partitions():
            for batch in reader.read(task):
                found += batch.to_pylist()
                if not killed:
                    killed.append(low.group)
                    kill_leader(store, low.group)
        return found

    rows = read()
    assert Counter(row["body"] for row in rows) == Counter(b"%d" % number for number in range(ROWS))
    assert {row["part"] for row in rows} == {1, 2, 3, 4, 5}
    for key in range(50):
        mine = [row for row in rows if row["key"] == b"%d" % key]  # numbers of parts rise from parents to children
        numbers = [int(row["body"]) for row in sorted(mine, key=lambda row: (row["part"], row["offset"]))]
        assert numbers == sorted(numbers)
    writer.write(batches(lambda _begin: None), "q", 7, 0)
    assert len(read()) == ROWS, "the epoch was stored"
    with pytest.raises(InvalidArgument, match=f"{ROWS} rows were written, now it has 0"):
        writer.write(iter([]), "q", 7, 0)
    writer.write(batches(lambda _begin: None), "q", 7, 1)
    assert len(read()) == 2 * ROWS, "another epoch"


def test_a_task_waits_for_the_rate_of_its_topic_while_rows_come_in(store: Store) -> None:
    on_topics(store, lambda px: px.topics.create("slow", parts=1, bytes_per_s=1 << 20))
    options = write_options({"target": store.target, "topic": "slow", "retrySeconds": "3"}, streaming=True)
    rows = pa.RecordBatch.from_pydict({"body": [b"%d" % number * 900_000 for number in range(6)]})
    TopicWriter(options, ("body",)).write(iter([rows]), "q", 1, 0)
    on_topics(store, lambda px: px.topics.set_channel("slow", "seen"))
    (part,) = on_topics(store, lambda px: px.topics.channel_state("slow", "seen"))
    assert part.unacknowledged == 6


def test_a_task_reads_the_same_rows_from_the_object_store(store: Store, tmp_path: Path) -> None:
    """Every row once, by level stored; then the last object is lost, and the leader gives what it had."""

    async def write(px: pixiu.Client) -> int:
        await px.topics.create("apart", parts=1, store=str(tmp_path))
        async with px.durable_topic("apart").writer() as writer:
            for number in range(3_000):
                writer.send_soon(b"%d" % number, key=b"%d" % (number % 7))
        return (await px.durable_topic("apart").send(b"last", level="stored")).offset

    assert on_topics(store, write) == 3_000

    def read(**options: str) -> tuple[list[dict[str, Any]], int]:
        given = {"target": store.target, "topic": "apart"} | options
        reader = TopicReader(options_of(given, spark_schema(tuple(TYPES)), streaming=False))
        tasks = reader.partitions()
        rows = [row for task in tasks for batch in reader.read(task) for row in batch.to_pylist()]
        return rows, sum(len(task.objects) for task in tasks if isinstance(task, BlocksPartition))

    wait_for(lambda: read()[1], "a manifest")
    rows, _ = read()
    assert read(fromStore="false") == (rows, 0)
    assert [row["body"] for row in rows] == [*(b"%d" % number for number in range(3_000)), b"last"]
    sorted(tmp_path.rglob("*.seg"))[-1].unlink()
    assert read()[0] == rows
