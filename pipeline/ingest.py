"""Ingest: JSON that devices send to a user, as a stream, in windows of time.

    mail to the user ──▶ from_json ──▶ window, keys ──▶ count, and least, most, average, sum of every value
                                └── what is no such JSON is counted

    PATH/updates/batch=7/…     the windows that changed in that batch, as they were then; `windows` has the newest of each
    PATH/_checkpoint           where the next run goes on

A batch is written again under its number until Spark knows that it is: whoever is killed leaves nothing that counts twice.

Source: docs/pipeline.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.queries import run_to_end
from pipeline.reading import sentence_of
from pipeline.report import Report, section_of
from pixiu.errors import DiskFailed, InvalidArgument


@dataclass(frozen=True, slots=True)
class IngestOptions:
    """What is taken in, and how."""

    target: str
    path: str
    users: str
    """UINs that the devices send to, like 7,8."""
    fields: str
    """Of the JSON, as SQL declares columns: "ts timestamp, device string, temp double"."""
    time: str
    """The field that windows go by."""
    keys: tuple[str, ...]
    values: tuple[str, ...]
    window: str = "1 minute"
    late: str = "1 hour"
    """What comes later than this behind the newest is left out: windows do not stay in memory for ever."""
    rows_per_batch: int = 1_000_000


def parsed(mails: Any, options: IngestOptions) -> Any:
    """The fields of each mail's JSON. What is none, or has no time, has a null there."""
    from pyspark.sql import functions as f

    return mails.select(f.from_json(f.col("body").cast("string"), options.fields).alias("row")).select("row.*")


def in_windows(rows: Any, options: IngestOptions) -> Any:
    """(begin, keys, rows, and of each value least, most, average, sum). Batch or stream."""
    from pyspark.sql import functions as f

    wanted = [f.count("*").alias("rows")]
    for name in options.values:
        for what, of in (("least", f.min), ("most", f.max), ("average", f.avg), ("sum", f.sum)):
            wanted.append(of(name).alias(f"{name}_{what}"))
    grouped = rows.groupBy(f.window(options.time, options.window), *options.keys).agg(*wanted)
    return grouped.select(f.col("window.start").alias("begin"), *(name for name in grouped.columns if name != "window"))


def windows(spark: Any, path: str, keys: tuple[str, ...]) -> Any:
    """The newest of each window that was written. Raises InvalidArgument where nothing was."""
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    try:
        found = spark.read.parquet(f"{path}/updates")
    except Exception as error:
        raise InvalidArgument(f"{path} holds no windows: {sentence_of(error)}") from None
    newest = Window.partitionBy("begin", *keys).orderBy(f.col("batch").desc())
    return found.withColumn("place", f.row_number().over(newest)).where("place = 1").drop("place", "batch")


def run(spark: Any, options: IngestOptions) -> tuple[Report, dict[str, Any]]:
    """Take in what is new until now, then say what the windows hold."""
    from pyspark.sql import functions as f

    if not options.values or not options.users:
        raise InvalidArgument("ingest needs --users whose mail it reads, and --values that it sums up")
    source = spark.readStream.format("pixiu").option("target", options.target).option("startingOffsets", "earliest")
    source = source.option("users", options.users).option("columns", "body").option("maxOffsetsPerTrigger", options.rows_per_batch)
    try:
        rows = parsed(source.load(), options)
        rows = rows.where(f.col(options.time).isNotNull()).withWatermark(options.time, options.late)
        found = in_windows(rows, options)
    except Exception as error:
        raise InvalidArgument(f"--fields, --time, --keys, --values or --window: {sentence_of(error)}") from None

    def write(frame: Any, batch_id: int) -> None:
        frame.write.mode("overwrite").parquet(f"{options.path}/updates/batch={batch_id}")

    stream = found.writeStream.outputMode("update").foreachBatch(write).option("checkpointLocation", f"{options.path}/_checkpoint")
    queries = run_to_end(stream.trigger(availableNow=True).start)
    if queries[-1].exception() is not None:
        raise DiskFailed(f"not everything was taken in: {sentence_of(queries[-1].exception())}")
    steps = [progress for query in queries for progress in query.recentProgress]
    taken = sum(progress["numInputRows"] for progress in steps)
    late = sum(int(state["numRowsDroppedByWatermark"]) for progress in steps for state in progress["stateOperators"])
    report = Report("Ingest", {"mails": taken, "too_late": late})
    table = windows(spark, options.path, options.keys).orderBy("begin", *options.keys)
    report.sections.append(section_of("windows", table))
    report.facts["rows_in_windows"] = table.agg(f.sum("rows")).first()[0] or 0
    return report, {"windows": table}
