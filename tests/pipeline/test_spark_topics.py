"""Durable topics in a real Spark, on a real cluster: read once through resizes and dying drivers, written once."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import pixiu
from pipeline.queries import run_to_end
from pipeline.reading import sentence_of
from pixiu.placement.slots import SLOTS, slot_of
from tests.pipeline.conftest import Store
from tests.support.cluster import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.spark, pytest.mark.timeout(600)]
HALF = SLOTS // 2


def on_topics(store: Store, steps: Callable[[pixiu.Client], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with pixiu.connect(store.target) as px:
            return await steps(px)

    return asyncio.run(run())


def create(store: Store, name: str, parts: int = 1) -> None:
    on_topics(store, lambda px: px.topics.create(name, parts=parts))


def send(store: Store, topic: str, bodies: Sequence[bytes], keys: int = 7) -> None:
    async def steps(px: pixiu.Client) -> None:
        async with px.durable_topic(topic).writer() as writer:
            for number, body in enumerate(bodies):
                await writer.send(body, key=b"key-%d" % (number % keys))
            await writer.wait_finished()

    on_topics(store, steps)


def resize(store: Store, topic: str, parts: Sequence[int], *bounds: int) -> None:
    on_topics(store, lambda px: px.topics.resize(topic, parts, bounds=bounds))


def batch(spark: Any, store: Store, topic: str, **options: object) -> Any:
    return with_options(spark.read.format("pixiu"), store, topic, options).load()


def stream(spark: Any, store: Store, topic: str, **options: object) -> Any:
    return with_options(spark.readStream.format("pixiu").option("startingOffsets", "earliest"), store, topic, options).load()


def with_options(made: Any, store: Store, topic: str, options: dict[str, object]) -> Any:
    made = made.option("target", store.target).option("topic", topic).option("retrySeconds", "30")
    for name, value in options.items():
        made = made.option(name, value)
    return made


def to_parquet(source: Any, folder: Path) -> Any:
    writer = source.writeStream.format("parquet").option("path", str(folder / "rows"))
    query = run_to_end(writer.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True).start)[-1]
    if query.exception() is not None:
        raise query.exception()
    return query


def bodies_of(rows: Any) -> Counter[bytes]:
    return Counter(bytes(row.body) for row in rows.select("body").collect())


def newest(folder: Path) -> Path:
    return max(folder.glob("[0-9]*"), key=lambda path: int(path.name.removesuffix(".compact")))


def without_commit(checkpoint: Path, *others: Path) -> None:
    """Leave what a driver leaves that dies before it notes its newest micro-batch as done."""
    if newest(checkpoint / "commits").name == newest(checkpoint / "offsets").name:
        for path in map(newest, (checkpoint / "commits", *others)):
            path.unlink()
            (path.parent / f".{path.name}.crc").unlink(missing_ok=True)


def wait_for_another(commits: Path) -> None:
    """Wait for a micro-batch that ends after this."""
    before = len(list(commits.glob("[0-9]*")))
    wait_for(lambda: len(list(commits.glob("[0-9]*"))) > before, "a micro-batch")


def test_a_batch_is_what_was_written(spark: Any, store: Store) -> None:
    create(store, "batch", parts=2)
    at = datetime(2026, 3, 1, 12, 0, 0, 250_000, tzinfo=UTC)

    async def steps(px: pixiu.Client) -> None:
        topic = px.durable_topic("batch")
        await topic.send(b"plain", slot=5)
        await topic.send(b"all", key="k", headers={"a": b"1", "b": b""}, event_time=at, tag="red", load_test=True)

    on_topics(store, steps)
    plain, full = sorted(batch(spark, store, "batch").collect(), key=lambda row: row.tag or "")
    assert (plain.slot, bytes(plain.body), plain.key, plain.headers, plain.event_time) == (5, b"plain", None, {}, None)
    assert (plain.part, plain.offset, plain.tag, plain.load_test) == (1, 0, None, False)
    assert (full.slot, bytes(full.key), full.tag, full.load_test) == (slot_of(b"k"), b"k", "red", True)
    assert {name: bytes(value) for name, value in full.headers.items()} == {"a": b"1", "b": b""}
    assert full.event_time.replace(tzinfo=UTC) == at
    assert abs((full.append_time.replace(tzinfo=UTC) - datetime.now(UTC)).total_seconds()) < 600
    sent = [b"%d" % number for number in range(5000)]
    send(store, "batch", sent)
    ends = {row.part: row.end + 1 for row in batch(spark, store, "batch").groupBy("part").agg({"offset": "max"})
            .withColumnRenamed("max(offset)", "end").collect()}  # fmt: skip
    after_ms = int(full.append_time.replace(tzinfo=UTC).timestamp() * 1000) + 1
    later = batch(spark, store, "batch", startingTimestamp=after_ms, minPartitions=5)
    assert later.rdd.getNumPartitions() >= 5
    assert bodies_of(later) == Counter(sent)
    send(store, "batch", [b"later"] * 10)
    assert bodies_of(batch(spark, store, "batch", startingOffsets=json.dumps(ends))) == {b"later": 10}
    assert batch(spark, store, "batch", endingOffsets=json.dumps(ends), columns="offset,body").count() == 5002
    assert batch(spark, store, "batch").select("offset").schema.simpleString() == "struct<offset:bigint>"


def test_a_stream_reads_once_while_parts_come_and_go(spark: Any, store: Store, tmp_path: Path) -> None:
    """Split, merged and moved under a running query, whose driver dies between two of its notes, and again later."""
    create(store, "orders")
    count, sent = 0, list[bytes]()

    def more(rows: int) -> None:
        nonlocal count
        bodies = [b"%d" % number for number in range(count, count + rows)]
        count += rows
        sent.extend(bodies)
        send(store, "orders", bodies)

    more(200)
    writer = stream(spark, store, "orders", maxOffsetsPerTrigger=150).writeStream.format("parquet")
    writer = writer.option("path", str(tmp_path / "rows")).option("checkpointLocation", str(tmp_path / "checkpoint"))
    query, commits = writer.start(), tmp_path / "checkpoint" / "commits"
    for parts, bounds in (([1], [HALF]), ([2, 3], []), ([4], [HALF // 2, HALF])):
        more(300)
        resize(store, "orders", parts, *bounds)
        wait_for_another(commits)
    more(300)
    query.stop()
    assert query.exception() is None
    without_commit(tmp_path / "checkpoint", tmp_path / "rows" / "_spark_metadata")
    resize(store, "orders", [5, 6], HALF // 4)
    more(100)
    again = to_parquet(stream(spark, store, "orders", maxOffsetsPerTrigger=400), tmp_path)
    rows = spark.read.parquet(str(tmp_path / "rows"))
    assert bodies_of(rows) == Counter(sent)
    (source,) = again.lastProgress["sources"]
    assert json.loads(source["latestOffset"])["rows_behind"] == 0
    assert {row.part for row in rows.select("part").distinct().collect()} >= {1, 2, 3, 4, 5, 6, 7}
    more(50)
    to_parquet(stream(spark, store, "orders"), tmp_path)
    assert bodies_of(spark.read.parquet(str(tmp_path / "rows"))) == Counter(sent)


def test_a_sink_that_is_run_again_stores_once(spark: Any, store: Store, tmp_path: Path) -> None:
    create(store, "once", parts=2)

    def put(begin: int) -> None:
        frame = spark.range(begin, begin + 100).selectExpr("cast(id as string) as body", "cast(id % 7 as string) as key")
        frame.repartition(2).sortWithinPartitions("body").write.mode("append").parquet(str(tmp_path / "in"))

    def run() -> Any:
        source = spark.readStream.schema("body string, key string").option("maxFilesPerTrigger", 2).parquet(str(tmp_path / "in"))
        query = (
            source.writeStream.format("pixiu").option("target", store.target).option("topic", "once")
            .option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()
        )  # fmt: skip
        assert query.awaitTermination(240)
        if query.exception() is not None:
            raise query.exception()
        return query

    put(0)
    put(100)
    run()
    assert batch(spark, store, "once").count() == 200
    without_commit(tmp_path / "checkpoint")
    resize(store, "once", [1], HALF // 2)
    resize(store, "once", [2, 4])
    again = run()
    assert again.lastProgress["numInputRows"] == 100, "the last micro-batch was written once more"
    assert bodies_of(batch(spark, store, "once")) == Counter(b"%d" % number for number in range(200))
    put(200)
    run()
    assert bodies_of(batch(spark, store, "once")) == Counter(b"%d" % number for number in range(300))
    rows = batch(spark, store, "once").where("key = '3'").orderBy("part", "offset").collect()
    assert len(rows) == 43
    assert len({row.slot for row in rows}) == 1


def test_batches_that_are_written_again(spark: Any, store: Store) -> None:
    create(store, "batches")

    def write(frame: Any, **options: object) -> None:
        with_options(frame.write.format("pixiu").mode("append"), store, "batches", options).save()

    frame = spark.range(0, 500, 1, 2).selectExpr("cast(id as string) as body", "cast(id as int) as slot")
    for _ in range(2):
        write(frame, query="b", epoch=3)
    assert batch(spark, store, "batches").count() == 500, "the second one stored nothing"
    with pytest.raises(Exception) as raised:  # whatever Spark wraps it in
        write(frame.selectExpr("concat(body, '!') as body", "slot"), query="b", epoch=3)
    assert "rows are not those that were written before" in sentence_of(raised.value)
    write(frame, query="b", epoch=4)
    write(frame)
    write(frame)
    assert batch(spark, store, "batches").count() == 2000, "without a name, each write is one of its own"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"topic": "none"}, "there is no topic none"),
        ({"columns": "bodies"}, "a topic has no column 'bodies'"),
        ({"startingOffsets": '{"9": 1}'}, "there is no part 9"),
        ({"target": "127.0.0.1:1", "retrySeconds": "1"}, "no proxy listens at 127.0.0.1:1"),
        ({"table": "messages"}, "there is no option 'table' here"),
    ],
)
def test_what_is_wrong_is_one_sentence(spark: Any, store: Store, options: dict[str, str], said: str) -> None:
    create_once(store)
    with pytest.raises(Exception) as raised:  # whatever Spark wraps it in
        batch(spark, store, **{"topic": "wrong"} | options).count()
    sentence = sentence_of(raised.value)
    assert said in sentence
    assert "\n" not in sentence


def test_a_sink_of_a_missing_topic_is_refused_before_any_task(spark: Any, store: Store, tmp_path: Path) -> None:
    frame = spark.range(4).selectExpr("cast(id as string) as body")
    ticks = spark.readStream.format("rate").load().selectExpr("'x' as body")
    stream_ = with_options(ticks.writeStream.format("pixiu"), store, "none", {"checkpointLocation": str(tmp_path)})
    for write in (
        with_options(frame.write.format("pixiu").mode("append"), store, "none", {}).save,
        lambda: stream_.start().awaitTermination(),
    ):
        with pytest.raises(Exception, match="there is no topic none") as raised:  # whatever Spark wraps it in
            write()
        assert "there is no topic none" in sentence_of(raised.value)
        assert "Task" not in str(raised.value), "no task was tried"


def create_once(store: Store) -> None:
    on_topics(store, lambda px: px.topics.create("wrong", if_missing=True))
