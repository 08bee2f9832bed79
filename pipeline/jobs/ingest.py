"""Ingest: JSON that devices send to a user, as a stream, in windows of time.

    mail to the user ──▶ from_json ──▶ window, keys ──▶ count, and least, most, sum of every value ──▶ PATH/updates
                                └── malformed JSON, or JSON without a time, is counted

    PATH/updates/batch=7/…     rows that the batch adds to windows; `windows` merges all batches
    PATH/options               definition of the windows, the same in every run
    PATH/_checkpoint           position at which the next run continues

Batches' rows can be merged in any order. So there is no watermark: no mail is too late, and a device whose clock is wrong has
windows of its own and changes no others. A batch is written again under its number until Spark has committed it: a killed run
leaves nothing that counts twice.

Source: docs/pipeline.md.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pipeline.queries import run_to_end
from pipeline.reading import names_in, sentence_of
from pipeline.report import Report, section_of
from pixiu.errors import InvalidArgument

KEPT: Final = ("users", "fields", "time", "keys", "values", "window")
"""Options that are fixed for their folder."""
NUMBER: Final = r"^\s*[+-]?\d+(\.\d*)?([eE][+-]?\d+)?\s*$"
SECONDS_BELOW, MILLISECONDS_BELOW, MICROSECONDS_BELOW = 1e11, 1e14, 1e17
"""For a numeric time from 1973 to 5138 the magnitude determines the unit; smaller numbers are seconds."""
FIRST_TIME, LAST_TIME = "0001-01-02 00:00:00", "9999-12-30 00:00:00"
"""Range that Python can show in any time zone."""


@dataclass(frozen=True, slots=True)
class IngestOptions:
    """The mail to ingest, and the form of the windows."""

    target: str
    path: str
    users: str
    """UINs that the devices send to, like 7,8."""
    fields: str
    """Fields of the JSON, as SQL declares columns: "ts timestamp, device string, temp double"."""
    time: str
    """The field that determines the window, a timestamp: ISO 8601, or Unix seconds, with a fraction or without, milli- or
    microseconds."""
    keys: tuple[str, ...]
    values: tuple[str, ...]
    window: str = "1 minute"
    rows_per_batch: int = 1_000_000

    def kept(self) -> dict[str, str]:
        """The options that are fixed for the folder."""
        found = {name: getattr(self, name) for name in KEPT}
        return {name: value if isinstance(value, str) else ",".join(value) for name, value in found.items()}


def check_kept(path: str, kept: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raise InvalidArgument if a folder was made with other options."""
    for name in KEPT:
        if kept.get(name) != now[name]:
            raise InvalidArgument(
                f"{path} was made with --{name} {kept.get(name)!r}, and not {now[name]!r}: use another PATH, or the options "
                "that it was made with"
            )


def parsed(mails: Any, options: IngestOptions) -> Any:
    """Parse each mail's JSON. Malformed JSON, and JSON without a time, has a null time. Raises InvalidArgument."""
    from pyspark.sql import functions as f
    from pyspark.sql.types import DataType, StringType, StructField, StructType, TimestampType

    declared = DataType.fromDDL(options.fields)
    if not isinstance(declared, StructType) or options.time not in declared.names:
        raise InvalidArgument(f"--time {options.time}: --fields has no such field")
    if not isinstance(declared[options.time].dataType, TimestampType):
        raise InvalidArgument(f"--time {options.time}: --fields declares it otherwise than as a timestamp")
    # Spark does not parse numeric timestamps with a fraction, and takes every number as seconds.
    as_text = [StructField(each.name, StringType()) if each.name == options.time else each for each in declared.fields]
    rows = mails.select(f.from_json(f.col("body").cast("string"), StructType(as_text)).alias("row")).select("row.*")
    return rows.withColumn(options.time, _time(f.col(options.time)))


def _time(text: Any) -> Any:
    from pyspark.sql import functions as f

    number = text.try_cast("double")
    size = f.abs(number)
    micros = (
        f.when(size < SECONDS_BELOW, number * 1_000_000)
        .when(size < MILLISECONDS_BELOW, number * 1000)
        .when(size < MICROSECONDS_BELOW, number)
    )
    found = f.when(text.rlike(NUMBER), f.timestamp_micros(f.round(micros).cast("bigint"))).otherwise(text.try_cast("timestamp"))
    return f.when(found.between(f.lit(FIRST_TIME).cast("timestamp"), f.lit(LAST_TIME).cast("timestamp")), found)


def in_windows(rows: Any, options: IngestOptions) -> Any:
    """(begin, keys, rows, and of each value count, least, most, sum): the rows added to windows."""
    from pyspark.sql import functions as f

    wanted = [f.count("*").alias("rows")]
    for name in options.values:
        for what, of in (("count", f.count), ("least", f.min), ("most", f.max), ("sum", f.sum)):
            wanted.append(of(name).alias(f"{name}_{what}"))
    grouped = rows.groupBy(f.window(options.time, options.window), *options.keys).agg(*wanted)
    return grouped.select(f.col("window.start").alias("begin"), *(name for name in grouped.columns if name != "window"))


def merged(parts: Any, keys: tuple[str, ...]) -> Any:
    """(begin, keys, rows, and of each value least, most, average, sum): the merged rows of batches."""
    from pyspark.sql import functions as f

    wanted = [f.sum("rows").alias("rows")]
    for name in [column.removesuffix("_least") for column in parts.columns if column.endswith("_least") and column not in keys]:
        total, count = f.sum(f"{name}_sum"), f.sum(f"{name}_count")
        wanted.append(f.min(f"{name}_least").alias(f"{name}_least"))
        wanted.append(f.max(f"{name}_most").alias(f"{name}_most"))
        wanted.append(f.when(count > 0, total / count).alias(f"{name}_average"))
        wanted.append(total.alias(f"{name}_sum"))
    return parts.groupBy("begin", *keys).agg(*wanted)


def windows(spark: Any, path: str, keys: tuple[str, ...]) -> Any:
    """All windows, as of now. Raises InvalidArgument if there are none."""
    try:
        found = spark.read.parquet(f"{path}/updates")
    except Exception as error:
        raise InvalidArgument(f"{path} holds no windows: {sentence_of(error)}") from None
    return merged(found, keys)


def keep_options(spark: Any, options: IngestOptions) -> None:
    """Write the options into the folder if it has none. Raises InvalidArgument if it has others."""
    folder = f"{options.path}/options"
    lines = [row[0] for row in spark.read.text(folder).collect()] if names_in(spark, folder) else []
    if lines:
        check_kept(options.path, json.loads("".join(lines)), options.kept())
        return
    frame = spark.createDataFrame([(json.dumps(options.kept()),)], "value string")
    frame.coalesce(1).write.mode("overwrite").text(folder)


def run(spark: Any, options: IngestOptions) -> tuple[Report, dict[str, Any]]:
    """Ingest mail stored until now, then report the windows."""
    from pyspark.sql import functions as f

    if not options.values or not options.users:
        raise InvalidArgument("ingest needs --users whose mail it reads, and --values that it sums up")
    source = spark.readStream.format("pixiu").option("target", options.target).option("startingOffsets", "earliest")
    source = source.option("users", options.users).option("columns", "body").option("maxOffsetsPerTrigger", options.rows_per_batch)
    mails = source.load()
    try:
        _ = in_windows(parsed(mails, options), options)
    except InvalidArgument:
        raise
    except Exception as error:
        raise InvalidArgument(f"--fields, --time, --keys, --values or --window: {sentence_of(error)}") from None
    keep_options(spark, options)
    counts: Counter[str] = Counter()

    def write(frame: Any, batch_id: int) -> None:
        rows = parsed(frame, options).persist()
        try:
            in_windows(rows, options).write.mode("overwrite").parquet(f"{options.path}/updates/batch={batch_id}")
            taken, timed = rows.agg(f.count(f.lit(1)), f.count(options.time)).first()
            counts.update(mails=taken, malformed=taken - timed)
        finally:
            rows.unpersist()

    stream = mails.writeStream.foreachBatch(write).option("checkpointLocation", f"{options.path}/_checkpoint")
    run_to_end(stream.trigger(availableNow=True).start)
    report = Report("Ingest", {"mails": counts["mails"], "malformed": counts["malformed"]})
    table = windows(spark, options.path, options.keys).orderBy("begin", *options.keys)
    report.sections.append(section_of("windows", table))
    report.facts["rows_in_windows"] = table.agg(f.sum("rows")).first()[0] or 0
    return report, {"windows": table}
