"""Measure the rows a second that Spark reads from a Xiu and writes as mail, and what a full-speed export costs live mail.

One Xiu alone, mails of 100 bytes; Spark with one task at a time (`local[1]`), all columns, into the sink that forgets
(`noop`). Beside it the same rows out of Parquet, and Spark's own rate source, whose rows have two columns. CPU seconds by who
spent them: the Xiu, Spark's Python worker, its JVM. `client` is the reading client without Spark.

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
binary, which somebody has to unpack again, two thirds.

    python -m benchmarks.clusters.spark_source [--rows 300000] [--mails 20000] [--seconds 5] [--shapes] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import pixiu
from comparison.ours import Running, cluster
from comparison.processes import TICKS, cpu_seconds
from pipeline.spark.replicas import Replicas, Rows
from pixiu.wire.export_tables import MESSAGES, columns_of

USERS = 1000
SETS = {
    "all columns": (),
    "six columns": ("msg_id", "key", "sender", "stored_at", "flags", "body"),
    "msg_id and body": ("msg_id", "body"),
    "body alone": ("body",),
}
SHAPES = ("flat", "three structs", "one struct", "packed", "six", "body")
BODY = bytes(100)
EXPORT = """
import sys
from benchmarks.clusters.spark_source import read_all
while True:
    read_all(sys.argv[1])
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
        """Rows a CPU second of the reader: of all but the Xiu."""
        spent = sum(seconds for who, seconds in self.cpu.items() if who != "xiu")
        return self.rows / spent if spent else 0.0


def tree_cpu() -> dict[str, float]:
    """Return the CPU seconds of this process's descendants, by program; those of ended ones count for the process that waited
    for them."""
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
    java = {pid for pid, (name, _) in found.items() if name == "java"}
    for pid, (name, seconds) in found.items():
        above = pid
        while above in parents and above not in java:
            above = parents[above]
        if name == "java":
            total["jvm"] += seconds
        elif above in java and name.startswith("python"):
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
            while True:
                try:
                    writer.send(1 + number % USERS, BODY, level="accepted")
                    break
                except pixiu.Overloaded:
                    await writer.space()
        await writer.wait_finished()


def case(what: str, rows: int, xiu: list[int], work: Callable[[], object], again: int = 2) -> Row:
    """Return the best of some runs, after one that warms up."""
    best: Row | None = None
    for _ in range(again + 1):
        before, xiu_before, own = tree_cpu(), cpu_seconds(xiu), time.process_time()
        began = time.perf_counter()
        work()
        seconds = time.perf_counter() - began
        cpu = {who: spent - before[who] for who, spent in tree_cpu().items()}
        cpu |= {"xiu": cpu_seconds(xiu) - xiu_before, "client": time.process_time() - own}
        if best is None or seconds < best.seconds:
            best = Row(what, rows, seconds, {who: round(spent, 2) for who, spent in cpu.items() if spent >= 0.01})
    assert best is not None
    return best


def spark_cases(running: Running, rows: int, mails: int, folder: str) -> list[Row]:
    """Measure source, Parquet, rate, sink; with a session of this thread, as Spark requires."""
    from pipeline.session import open_session

    spark, xiu = open_session("bench", "local[1]"), running.pids["xiu"]

    def forget(frame: Any) -> None:
        frame.write.format("noop").mode("overwrite").save()

    def source(columns: tuple[str, ...] = ()) -> Any:
        return spark.read.format("pixiu").option("target", running.registry).option("columns", ",".join(columns)).load()

    source().write.parquet(f"{folder}/parquet")
    found = []
    for name, columns in SETS.items():
        found.append(case(f"source, {name}", rows, xiu, lambda columns=columns: forget(source(columns))))  # type: ignore[misc]
        found.append(
            case(
                f"Parquet, {name}",
                rows,
                xiu,
                lambda columns=columns: forget(spark.read.parquet(f"{folder}/parquet").select(*columns or "*")),  # type: ignore[misc]
            )
        )

    def rate() -> None:
        frame = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", rows).option("numPartitions", 1).load()
        frame.writeStream.format("noop").trigger(once=True).start().awaitTermination()

    found.append(case("rate source, two columns", rows, xiu, rate))
    number = iter(range(100))

    def sink() -> None:
        frame = spark.range(mails).selectExpr("id", f"1 + id % {USERS} as uin", "repeat('x', 100) as body").coalesce(1)
        writer = frame.write.format("pixiu").mode("append").option("target", running.registry)
        writer.option("query", f"bench-{next(number)}").save()

    found.append(case("sink, mail at level replicated", mails, xiu, sink, again=1))
    spark.stop()
    return found


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


def shape_cases(rows: int) -> list[Row]:
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
    batches, found = max(1, rows // 8192), []
    for shape in SHAPES:
        frame = spark.read.format("repeated").option("shape", shape).option("batches", batches).load()
        found.append(case(shape, batches * 8192, [], lambda frame=frame: frame.write.format("noop").mode("overwrite").save()))  # type: ignore[misc]
    spark.stop()
    return found


async def live(target: str, seconds: float) -> tuple[float, float]:
    """Return p50 and p99 in milliseconds of mails sent one after the other."""
    took: list[float] = []
    async with pixiu.connect(target, client="bench-live") as px:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            began = time.perf_counter()
            await px.user(5).mail(BODY)
            took.append((time.perf_counter() - began) * 1000)
    took.sort()
    return took[len(took) // 2], took[len(took) * 99 // 100]


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure everything, or shapes of columns alone."""
    found: dict[str, Any] = {"live": {}}
    if arguments.shapes:
        return found | {"rows": await asyncio.to_thread(shape_cases, arguments.rows)}
    async with cluster(stores=1, settings=["xiu.export_share=1.0"]) as running:
        await fill(running.registry, arguments.rows)
        rows = await asyncio.to_thread(read_all, running.registry)
        results = [
            await asyncio.to_thread(case, "client, all columns", rows, running.pids["xiu"], lambda: read_all(running.registry))
        ]
        with tempfile.TemporaryDirectory() as folder:
            results += await asyncio.to_thread(spark_cases, running, rows, arguments.mails, folder)
        found["rows"] = results
    async with cluster(stores=1) as running:
        await fill(running.registry, min(arguments.rows, 100_000))
        found["live"] = {"alone": await live(running.registry, arguments.seconds)}
        export = subprocess.Popen([sys.executable, "-c", EXPORT, running.registry])
        try:
            await asyncio.sleep(2)
            found["live"]["beside an export, export_share 0.5"] = await live(running.registry, arguments.seconds)
        finally:
            export.kill()
            export.wait()
    return found


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--mails", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=5.0)
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
    for what, (p50, p99) in found["live"].items():
        print(f"live mail {what}: p50 {p50:.2f} ms, p99 {p99:.2f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
