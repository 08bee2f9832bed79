"""Measure the rows a second that Spark reads from a Xiu and writes as mail, and what a full-speed export costs live mail.

One Xiu alone, mails of 100 bytes; Spark with one task at a time (`local[1]`), by column set, into the sink that forgets (`noop`).
Beside it the same rows out of Parquet, the same messages out of a durable topic and, where `PIXIU_BENCH_KAFKA` names a folder with
its jars and those of Spark's RDD for it, out of Kafka, and Spark's own rate source, whose rows have two columns. CPU seconds by who
spent them: the server, Spark's Python worker, its JVM. `client` is the reading client without Spark. Live mail is measured alone
and beside the export in turns.

Estimate, from `xiu/export/export.py` alone (580,000 rows a CPU second on a shared core) and from what Spark took of Arrow batches
in an experiment (540,000 a second, worker and JVM together): 300,000 rows a second by the clock on two cores, of which the Xiu is
the slower half; Parquet ten times that; the sink, whose cost is that of any client that sends mail, 10,000 to 20,000 a second.

First run (200,000 rows, 2 cores shared with seven other loads, the best of two): the client alone 412,000 rows a second, of
whose 0.5 CPU seconds the Xiu spent 0.4. Spark with all columns 139,000 a second (CPU seconds: Xiu 0.45, worker 0.19, JVM 0.98),
with the body alone 233,000 (0.32, 0.13, 0.46); the same rows out of Parquet 368,000 (JVM 0.53), the rate source 421,000 (JVM
0.35). So the worker passes on a million rows a CPU second, and the JVM takes 200,000, where Parquet's reader takes 360,000: the
aim of 500,000 a core is met up to Spark and not in it. The sink 10,800 mails a second. Live mail one by one 15 ms at the median
and 46 at p99 alone, 28 and 55 beside a full-speed export with its half of a core.

Later (150,000 rows, 100,000 mails, 2 cores shared with two other loads): the client alone 751,000 rows a second; Spark 243,000
with all columns (CPU seconds: Xiu 0.15, worker 0.12, JVM 0.32) and 391,000 with the body alone (0.12, 0.07, 0.22), which is
517,000 a CPU second of worker and JVM; Parquet 333,000 (JVM 0.5), the rate source 383,000 (0.34). The sink 28,100 mails a second,
95,000 a CPU second of its worker, of which a tenth is its start. Live mail 23 ms at p99 alone, 41 beside the export.

Column sets and shapes (`--shapes`, without a cluster: a source that repeats one record batch, so all that is measured is what Spark
does with it). Estimate: a row costs the JVM 0.4 µs and each column 0.1, so a struct of the 14 columns saves nothing, and one packed
binary, which somebody has to unpack again, two thirds. Measured with 2,000,000 rows a run, a row of 14 columns costs it 0.5 to 0.6.

The last figures are in docs/performance.md, "Spark's reads beside Parquet and Kafka".

    python -m benchmarks.clusters.spark_source [--rows 300000] [--mails 20000] [--again 2] [--rounds 5] [--seconds 2] [--shapes]
        [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import pixiu
from comparison.ours import Running, cluster
from comparison.processes import TICKS, cpu_seconds
from comparison.servers import KAFKA
from pipeline.spark.replicas import Replicas, Rows
from pixiu.wire.export_tables import MESSAGES, columns_of
from tests.support.kafka import KafkaServer, is_installed

USERS = 1000
SETS = {
    "all columns": (),
    "six columns": ("msg_id", "key", "sender", "stored_at", "flags", "body"),
    "msg_id and body": ("msg_id", "body"),
    "body alone": ("body",),
}
TOPIC, TOPIC_SETS = (
    "bench",
    {"all columns but headers": (), "offset, key, body": ("offset", "key", "body"), "body alone": ("body",)},
)
SERVERS = ("xiu", "topic", "kafka")
KAFKA_JARS = ("spark-streaming-kafka-0-10_2.13", "spark-token-provider-kafka-0-10_2.13", "kafka-clients")
KAFKA_AT_ONCE = 20_000
SHAPES = ("flat", "three structs", "one struct", "packed", "six", "body")
BODY = bytes(100)
EXPORT = """
import sys
from benchmarks.clusters.spark_source import read_all
while True:
    read_all(sys.argv[1])
    print(flush=True)
"""


@dataclass
class Row:
    """Result of one case."""

    what: str
    rows: int
    seconds: float
    cpu: dict[str, float] = field(default_factory=dict)
    """CPU seconds by spender."""

    @property
    def per_second(self) -> float:
        """Rows a second by the clock."""
        return self.rows / self.seconds

    @property
    def per_reader_cpu(self) -> float:
        """Rows a CPU second of the reader: of all but the server."""
        spent = sum(seconds for who, seconds in self.cpu.items() if who not in SERVERS)
        return self.rows / spent if spent else 0.0


def spark_cpu(jvm: int) -> dict[str, float]:
    """Return the CPU seconds of Spark's JVM and of its Python processes; those of ended ones count for the process that waited for
    them."""
    parents: dict[int, int] = {}
    found: dict[int, tuple[str, float]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:
            continue
        name, rest = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
        pid = int(path.parent.name)
        parents[pid] = int(rest[1])
        found[pid] = name, sum(int(rest[place]) for place in (11, 12, 13, 14)) / TICKS
    total = {"worker": 0.0, "jvm": 0.0}
    for pid, (name, seconds) in found.items():
        above = pid
        while above in parents and above != jvm:
            above = parents[above]
        if pid == jvm:
            total["jvm"] += seconds
        elif above == jvm and name.startswith("python"):
            total["worker"] += seconds
    return total


def read_all(target: str) -> int:
    """Read everything, as a task of Spark does. Returns the number of rows."""
    with Replicas(target, "xiu") as replicas:
        replicas.find()
        rows = Rows(0, MESSAGES, columns_of(MESSAGES, ()), (), 0, replicas.bounds(0).end)
        return sum(batch.num_rows for batch in replicas.read(rows))


async def fill(target: str, rows: int) -> None:
    """Store `rows` mails."""
    async with pixiu.connect(target, client="bench-fill") as px, px.mail_writer() as writer:
        for number in range(rows):
            await writer.space()
            writer.send(1 + number % USERS, BODY, level="accepted")
        await writer.wait_finished()


class Cases:
    """Runs cases and keeps the best run of each, after one that warms up.

    Args:
        again: runs of each that count.
        jvm: process of Spark; -1: there is none.
    """

    def __init__(self, again: int, jvm: int = -1) -> None:
        self._again, self._jvm = again, jvm
        self.rows: list[Row] = []

    def run(self, what: str, rows: int, work: Callable[[], object], server: str = "", pids: Sequence[int] = ()) -> None:
        """Run one. `server`: what the processes are that serve it."""
        best: Row | None = None
        for _ in range(self._again + 1):
            before, served, own = spark_cpu(self._jvm), cpu_seconds(pids), time.process_time()
            began = time.perf_counter()
            work()
            seconds = time.perf_counter() - began
            cpu = {who: spent - before[who] for who, spent in spark_cpu(self._jvm).items()}
            cpu |= {"client": time.process_time() - own, server: cpu_seconds(pids) - served}
            if best is None or seconds < best.seconds:
                best = Row(what, rows, seconds, {who: round(spent, 2) for who, spent in cpu.items() if spent >= 0.01})
        assert best is not None
        self.rows.append(best)


def forget(frame: Any) -> None:
    """Compute all rows of a frame."""
    frame.write.format("noop").mode("overwrite").save()


def spark_cases(running: Running, rows: int, mails: int, again: int, folder: str, kafka: KafkaServer | None) -> list[Row]:
    """Measure source, Parquet, rate, Kafka, sink; with a session of this thread, as Spark requires."""
    from pipeline.session import open_session

    settings = {"spark.driver.extraClassPath": ":".join(map(str, kafka_jars()))} if kafka is not None else {}
    spark = open_session("bench", "local[1]", settings=settings)
    cases = Cases(again, spark.sparkContext._gateway.proc.pid)

    def source(**options: str) -> Any:
        reader = spark.read.format("pixiu").option("target", running.registry)
        return reader.options(**options).load()

    source().write.parquet(f"{folder}/parquet")
    for name, columns in SETS.items():
        chosen = ",".join(columns)
        cases.run(
            f"source, {name}", rows, lambda chosen=chosen: forget(source(columns=chosen)), "xiu", running.pids["xiu"]  # type: ignore[misc]
        )  # fmt: skip
        of_parquet = spark.read.parquet(f"{folder}/parquet").select(*columns or "*")
        cases.run(f"Parquet, {name}", rows, lambda frame=of_parquet: forget(frame))  # type: ignore[misc]
    for name, columns in TOPIC_SETS.items():
        frame = source(topic=TOPIC, columns=",".join(columns))
        cases.run(f"durable topic, {name}", rows, lambda frame=frame: forget(frame), "topic", running.pids["topic"])  # type: ignore[misc]
    if kafka is not None:
        cases.run("Kafka, RDD of records, no rows", rows, lambda: read_kafka(spark, kafka.address, rows), "kafka", [kafka.pid])

    def rate() -> None:
        frame = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", rows).option("numPartitions", 1).load()
        frame.writeStream.format("noop").trigger(once=True).start().awaitTermination()

    cases.run("rate source, two columns", rows, rate)
    number = iter(range(100))

    def sink() -> None:
        frame = spark.range(mails).selectExpr("id", f"1 + id % {USERS} as uin", "repeat('x', 100) as body").coalesce(1)
        writer = frame.write.format("pixiu").mode("append").option("target", running.registry)
        writer.option("query", f"bench-{next(number)}").save()

    if mails:
        cases.run("sink, mail at level replicated", mails, sink, "xiu", running.pids["xiu"])
    spark.stop()
    return cases.rows


def kafka_jars() -> list[Path]:
    """Jars by which Spark reads Kafka, of the folder that PIXIU_BENCH_KAFKA names; none: one is missing."""
    libs = Path(os.environ.get(KAFKA, "."), "libs")
    found = [sorted(libs.glob(f"{name}-*.jar")) for name in KAFKA_JARS]
    return [jars[-1] for jars in found] if all(found) else []


def read_kafka(spark: Any, address: str, rows: int) -> None:
    """Take each record of a topic of Kafka in Spark's JVM, as it comes from the consumer."""
    context, java = spark.sparkContext, spark.sparkContext._jvm
    streaming, parameters = java.org.apache.spark.streaming.kafka010, java.java.util.HashMap()
    for key in ("key", "value"):
        parameters.put(f"{key}.deserializer", "org.apache.kafka.common.serialization.ByteArrayDeserializer")
    parameters.put("bootstrap.servers", address)
    parameters.put("group.id", "bench")
    ranges = context._gateway.new_array(streaming.OffsetRange, 1)
    ranges[0] = streaming.OffsetRange.create(TOPIC, 0, 0, rows)
    preferred = streaming.LocationStrategies.PreferConsistent()
    found = streaming.KafkaUtils.createRDD(context._jsc, parameters, ranges, preferred)
    assert found.zipWithIndex().count() == rows  # `count` alone would subtract offsets


def one_batch(shape: str, rows: int = 8192) -> Any:
    """A record batch with the columns of table `messages` in a shape."""
    import pyarrow as pa

    from pipeline.spark.schema import arrow_schema

    columns = columns_of(MESSAGES, SETS["six columns"] if shape == "six" else ("body",) if shape == "body" else ())
    data = [
        pa.array([BODY if name == "body" else b""] * rows, each.type)
        if (name := each.name) in ("body", "ext", "trace")
        else pa.array(range(rows), pa.int64()).cast(each.type)
        for each in arrow_schema(columns)
    ]
    flat = pa.RecordBatch.from_arrays(data, schema=arrow_schema(columns))
    if shape == "packed":
        return pa.RecordBatch.from_pydict({"record": pa.array([bytes(180)] * rows, pa.binary())})
    if shape in ("flat", "six", "body"):
        return flat
    cuts = [0, 5, 11, 14] if shape == "three structs" else [0, 14]
    groups = [flat.select(range(low, high)) for low, high in itertools.pairwise(cuts)]
    return pa.RecordBatch.from_arrays([group.to_struct_array() for group in groups], names=[f"s{at}" for at in range(len(groups))])


def shape_cases(rows: int, again: int) -> list[Row]:
    """Measure what the JVM takes for rows by the shape of their columns."""
    from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
    from pyspark.sql.pandas.types import from_arrow_schema

    from pipeline.session import open_session

    class Repeated(DataSource, DataSourceReader):  # type: ignore[misc]
        """One record batch, again and again."""

        @classmethod
        def name(cls) -> str:
            return "repeated"

        def schema(self) -> Any:
            return from_arrow_schema(one_batch(self.options["shape"], 1).schema)

        def reader(self, schema: Any) -> DataSourceReader:
            return self

        def read(self, partition: InputPartition) -> Any:
            batch = one_batch(self.options["shape"])
            for _ in range(int(self.options["batches"])):
                yield batch

    spark = open_session("bench", "local[1]")
    spark.dataSource.register(Repeated)
    batches, cases = max(1, rows // 8192), Cases(again, spark.sparkContext._gateway.proc.pid)
    for shape in SHAPES:
        frame = spark.read.format("repeated").option("shape", shape).option("batches", batches).load()
        cases.run(shape, batches * 8192, lambda frame=frame: forget(frame))  # type: ignore[misc]
    spark.stop()
    return cases.rows


async def live(target: str, seconds: float) -> list[float]:
    """Return the milliseconds of mails sent one after the other."""
    took: list[float] = []
    async with pixiu.connect(target, client="bench-live") as px:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            began = time.perf_counter()
            await px.user(5).mail(BODY)
            took.append((time.perf_counter() - began) * 1000)
    return took


async def live_in_turns(target: str, seconds: float, rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of live mail alone and beside an export at full speed, in turns: the export stops and goes on."""
    found: dict[str, list[float]] = {"alone": [], "beside an export, export_share 0.5": []}
    export = subprocess.Popen([sys.executable, "-c", EXPORT, target], stdout=subprocess.PIPE)
    try:
        assert export.stdout is not None
        await asyncio.to_thread(export.stdout.readline)  # it has read everything once
        for _ in range(rounds):
            for (_, times), order in zip(found.items(), (signal.SIGSTOP, signal.SIGCONT), strict=True):
                export.send_signal(order)
                times += await live(target, seconds)
    finally:
        export.kill()
        export.wait()
    return found


def percentile(values: list[float], of: float) -> float:
    """Return a percentile of values."""
    return sorted(values)[int(len(values) * of)]


async def fill_topic(target: str, rows: int) -> None:
    """Store `rows` messages in a durable topic of one part."""
    async with pixiu.connect(target, client="bench-fill") as px:
        await px.topics.create(TOPIC, parts=1)
        async with px.durable_topic(TOPIC).writer() as writer:
            for number in range(rows):
                await writer.send(BODY, key=b"%d" % (number % USERS))


async def sources(arguments: argparse.Namespace) -> list[Row]:
    """Measure every source and the sink."""
    async with cluster(stores=1, topics=1, settings=["xiu.export_share=1.0"]) as running, contextlib.AsyncExitStack() as here:
        folder, kafka = here.enter_context(tempfile.TemporaryDirectory()), None
        await fill(running.registry, arguments.rows)
        await fill_topic(running.registry, arguments.rows)
        if is_installed() and kafka_jars():
            kafka = await here.enter_async_context(KafkaServer(Path(folder, "kafka")))
            await kafka.topic(TOPIC, 1)
            for begin in range(0, arguments.rows, KAFKA_AT_ONCE):
                some = range(begin, min(begin + KAFKA_AT_ONCE, arguments.rows))
                await kafka.write(TOPIC, [(b"%d" % (number % USERS), BODY) for number in some], [])
        rows, client = await asyncio.to_thread(read_all, running.registry), Cases(arguments.again)
        work = partial(read_all, running.registry)
        await asyncio.to_thread(client.run, "client, all columns", rows, work, "xiu", running.pids["xiu"])
        return client.rows + await asyncio.to_thread(
            spark_cases, running, arguments.rows, arguments.mails, arguments.again, folder, kafka
        )


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure everything, or shapes of columns alone."""
    if arguments.shapes:
        return {"rows": await asyncio.to_thread(shape_cases, arguments.rows, arguments.again), "live": {}}
    found: dict[str, Any] = {"rows": await sources(arguments) if arguments.rows else [], "live": {}}
    if arguments.rounds:
        async with cluster(stores=1) as running:
            await fill(running.registry, min(arguments.rows or 100_000, 100_000))
            times = await live_in_turns(running.registry, arguments.seconds, arguments.rounds)
        found["live"] = {what: (len(each), *map(partial(percentile, each), (0.5, 0.99))) for what, each in times.items()}
    return found


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--mails", type=int, default=20_000)
    parser.add_argument("--again", type=int, default=2, help="Runs of each case that count.")
    parser.add_argument("--rounds", type=int, default=5, help="Of live mail; 0: none.")
    parser.add_argument("--seconds", type=float, default=2.0, help="Of a turn of live mail.")
    parser.add_argument("--shapes", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = asyncio.run(run(arguments))
    if arguments.json:
        print(json.dumps({"rows": [asdict(row) for row in found["rows"]], "live": found["live"]}))
        return 0
    table = Table("what", "rows", "rows/s", "rows a reader's CPU s", "CPU s")
    for row in found["rows"]:
        cpu = ", ".join(f"{who} {seconds}" for who, seconds in row.cpu.items())
        table.add_row(row.what, f"{row.rows:,}", f"{row.per_second:,.0f}", f"{row.per_reader_cpu:,.0f}", cpu)
    Console(width=160).print(table)
    for what, (count, p50, p99) in found["live"].items():
        print(f"live mail {what}: {count}, p50 {p50:.2f} ms, p99 {p99:.2f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
