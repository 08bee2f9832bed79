"""Ingest: JSON of a durable topic, or that devices send to a user, as a stream, in windows of time.

    topic, or mail ──▶ from_json ──▶ window, keys ──▶ count, and least, most, sum of every value ──▶ PATH/updates
                           └── counted one by one, before windows: malformed, late, ahead

    PATH/updates/batch=7/…     rows that the batch adds to windows
    PATH/merged/upto=6/…       the sum of all batches up to this one; `windows` adds the later ones
    PATH/counts/batch=7/…      numbers of rows of the batches of this run: where the driver's process is not this one (Spark
                               Connect) they could not come back otherwise
    PATH/options               definition of the windows, the same in every run
    PATH/_checkpoint           position at which the next run continues

Batches' rows can be merged in any order. So there is no watermark: no row is too late, and a device whose clock is wrong has
windows of its own and changes no others. A batch is written again under its number until Spark has committed it: a killed run
leaves nothing that counts twice. Batches are merged when there are `MERGE_AT` of them, and removed at the merge after that, when
no reader uses them any more.

Source: docs/pipeline.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pipeline.folders import names_in, remove_folder
from pipeline.queries import run_to_end
from pipeline.reading import microseconds, sentence_of
from pipeline.report import Report, section_of, series_of
from pixiu.errors import InvalidArgument

KEPT: Final = ("users", "topic", "fields", "time", "keys", "values", "window")
"""Options that are fixed for their folder."""
NUMBER: Final = r"^\s*[+-]?\d+(\.\d*)?([eE][+-]?\d+)?\s*$"
SECONDS_BELOW, MILLISECONDS_BELOW, MICROSECONDS_BELOW = 1e11, 1e14, 1e17
"""For a numeric time from 1973 to 5138 the magnitude determines the unit; smaller numbers are seconds."""
STORED: Final = "_stored_at"
"""Column with the time at which the cluster stored a row."""
LATE_S, AHEAD_S = 3600, 300
"""A row is late whose time is so long before it was stored, and ahead if it is so long after."""
COUNTS: Final = ("rows", "malformed", "late", "ahead")
MERGE_AT: Final = 16
FIRST_TIME, LAST_TIME = "0001-01-02 00:00:00", "9999-12-30 00:00:00"
"""Range that Python can show in any time zone."""


@dataclass(frozen=True, slots=True)
class IngestOptions:
    """The rows to ingest, and the form of the windows."""

    target: str
    path: str
    users: str
    """UINs that the devices send to, like 7,8; empty: `topic`."""
    fields: str
    """Fields of the JSON, as SQL declares columns: "ts timestamp, device string, temp double"."""
    time: str
    """The field that determines the window, a timestamp: ISO 8601, or Unix seconds, with a fraction or without, milli- or
    microseconds."""
    keys: tuple[str, ...]
    values: tuple[str, ...]
    window: str = "1 minute"
    rows_per_batch: int = 1_000_000
    topic: str = ""
    """Durable topic to read; empty: `users`."""

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


def parsed(raw: Any, options: IngestOptions) -> Any:
    """Parse each row's JSON, column `body`; keep its other columns. Malformed JSON, and JSON without a time, has a null time.
    Raises InvalidArgument."""
    from pyspark.sql import functions as f
    from pyspark.sql.types import DataType, StringType, StructField, StructType, TimestampType

    declared = DataType.fromDDL(options.fields)
    if not isinstance(declared, StructType) or options.time not in declared.names:
        raise InvalidArgument(f"--time {options.time}: --fields has no such field")
    if not isinstance(declared[options.time].dataType, TimestampType):
        raise InvalidArgument(f"--time {options.time}: --fields declares it otherwise than as a timestamp")
    # Spark does not parse numeric timestamps with a fraction, and takes every number as seconds.
    as_text = [StructField(each.name, StringType()) if each.name == options.time else each for each in declared.fields]
    others = [name for name in raw.columns if name != "body"]
    row = f.from_json(f.col("body").cast("string"), StructType(as_text)).alias("row")
    rows = raw.select(row, *others).select("row.*", *others)
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


def _values_of(parts: Any, keys: tuple[str, ...]) -> list[str]:
    return [column.removesuffix("_least") for column in parts.columns if column.endswith("_least") and column not in keys]


def combined(parts: Any, keys: tuple[str, ...]) -> Any:
    """The rows of batches as those of one batch, in the form of `in_windows`."""
    from pyspark.sql import functions as f

    wanted = [f.sum("rows").alias("rows")]
    for name in _values_of(parts, keys):
        for what, of in (("count", f.sum), ("least", f.min), ("most", f.max), ("sum", f.sum)):
            wanted.append(of(f"{name}_{what}").alias(f"{name}_{what}"))
    return parts.groupBy("begin", *keys).agg(*wanted)


def merged(parts: Any, keys: tuple[str, ...]) -> Any:
    """(begin, keys, rows, and of each value least, most, average, sum): the merged rows of batches."""
    from pyspark.sql import functions as f

    wanted = [f.col("begin"), *(f.col(key) for key in keys), f.col("rows")]
    for name in _values_of(parts, keys):
        total, count = f.col(f"{name}_sum"), f.col(f"{name}_count")
        average = f.when(count > 0, total / count).alias(f"{name}_average")
        wanted += [f.col(f"{name}_least"), f.col(f"{name}_most"), average, total]
    return combined(parts, keys).select(*wanted)


def _complete(spark: Any, folder: str, prefix: str) -> list[int]:
    """The numbers of subfolders that were written to their end."""
    names = (name.removeprefix(prefix) for name in names_in(spark, folder))
    numbers = sorted(int(name) for name in names if name.isdecimal())
    return [number for number in numbers if "_SUCCESS" in names_in(spark, f"{folder}/{prefix}{number}")]


def parts_of(spark: Any, path: str) -> Any:
    """The rows that windows are made of: the newest merge, and the batches after it. Raises InvalidArgument if there are none."""
    upto = max(_complete(spark, f"{path}/merged", "upto="), default=-1)
    later = [number for number in _complete(spark, f"{path}/updates", "batch=") if number > upto]
    folders = [f"{path}/updates/batch={number}" for number in later]
    folders += [f"{path}/merged/upto={upto}"] if upto >= 0 else []
    if not folders:
        raise InvalidArgument(f"{path} holds no windows")
    try:
        return spark.read.parquet(*folders)
    except Exception as error:
        raise InvalidArgument(f"{path} holds no windows: {sentence_of(error)}") from None


def windows(spark: Any, path: str, keys: tuple[str, ...]) -> Any:
    """All windows, as of now. Raises InvalidArgument if there are none."""
    return merged(parts_of(spark, path), keys)


def merge_batches(spark: Any, options: IngestOptions) -> int:
    """Merge the batches if there are many, which no query may write meanwhile; return their number. The batches stay until the next
    merge, for readers that use them now."""
    path = options.path
    done = max(_complete(spark, f"{path}/merged", "upto="), default=-1)
    every = _complete(spark, f"{path}/updates", "batch=")
    later = [number for number in every if number > done]
    if len(later) < MERGE_AT:
        return 0
    with microseconds(spark):
        combined(parts_of(spark, path), options.keys).write.mode("overwrite").parquet(f"{path}/merged/upto={later[-1]}")
    for number in every:
        if number <= done:
            remove_folder(spark, f"{path}/updates/batch={number}")
    for name in names_in(spark, f"{path}/merged"):
        if int(name.removeprefix("upto=")) < done:
            remove_folder(spark, f"{path}/merged/{name}")
    return len(later)


def keep_options(spark: Any, options: IngestOptions) -> None:
    """Write the options into the folder if it has none. Raises InvalidArgument if it has others."""
    folder = f"{options.path}/options"
    lines = [row[0] for row in spark.read.text(folder).collect()] if names_in(spark, folder) else []
    if lines:
        check_kept(options.path, json.loads("".join(lines)), options.kept())
        return
    frame = spark.createDataFrame([(json.dumps(options.kept()),)], "value string")
    frame.coalesce(1).write.mode("overwrite").text(folder)


def counts_of(rows: Any, options: IngestOptions) -> Any:
    """The numbers of parsed rows, as a DataFrame of one row: all, malformed, late, ahead."""
    from pyspark.sql import functions as f

    behind = f.unix_micros(STORED) - f.unix_micros(options.time)
    late, ahead = f.count_if(behind > LATE_S * 1_000_000), f.count_if(behind < -AHEAD_S * 1_000_000)
    wanted = f.count(f.lit(1)), f.count_if(f.col(options.time).isNull()), late, ahead
    return rows.agg(*(each.alias(name) for each, name in zip(wanted, COUNTS, strict=True)))


def _counted(spark: Any, path: str) -> list[int]:
    """The sums of what `counts_of` found in the batches of this run."""
    from pyspark.sql import functions as f

    if not names_in(spark, f"{path}/counts"):
        return [0] * len(COUNTS)
    found = spark.read.schema(", ".join(f"{name} long" for name in COUNTS)).json(f"{path}/counts")
    return list(found.agg(*(f.sum(name) for name in COUNTS)).first())


def source_of(spark: Any, options: IngestOptions) -> Any:
    """The stream of (body, time at which it was stored)."""
    from pyspark.sql import functions as f

    source = spark.readStream.format("pixiu").option("target", options.target).option("startingOffsets", "earliest")
    source = source.option("maxOffsetsPerTrigger", options.rows_per_batch)
    at = "append_time" if options.topic else "stored_at"
    source = source.option("topic", options.topic) if options.topic else source.option("users", options.users)
    return source.option("columns", f"body,{at}").load().select("body", f.col(at).alias(STORED))


def run(spark: Any, options: IngestOptions) -> tuple[Report, dict[str, Any]]:
    """Ingest what was stored until now, then report the windows."""
    from pyspark.sql import functions as f

    if not options.values or bool(options.users) == bool(options.topic):
        raise InvalidArgument("ingest needs --topic, or --users whose mail it reads, and --values that it sums up")
    raw = source_of(spark, options)
    try:
        _ = in_windows(parsed(raw, options), options)
    except InvalidArgument:
        raise
    except Exception as error:
        raise InvalidArgument(f"--fields, --time, --keys, --values or --window: {sentence_of(error)}") from None
    keep_options(spark, options)
    remove_folder(spark, f"{options.path}/counts")

    def write(frame: Any, batch_id: int) -> None:
        rows = parsed(frame, options).persist()
        try:
            timed = rows.where(f.col(options.time).isNotNull())
            with microseconds(frame.sparkSession):
                in_windows(timed, options).write.mode("overwrite").parquet(f"{options.path}/updates/batch={batch_id}")
            counts_of(rows, options).write.mode("overwrite").json(f"{options.path}/counts/batch={batch_id}")
        finally:
            rows.unpersist()

    stream = raw.writeStream.foreachBatch(write).option("checkpointLocation", f"{options.path}/_checkpoint")
    run_to_end(stream.trigger(availableNow=True).start)
    merge_batches(spark, options)
    rows, malformed, late, ahead = _counted(spark, options.path)
    read = {"topic": options.topic, "messages": rows} if options.topic else {"users": options.users, "mails": rows}
    report = Report("Ingest", read | {"malformed": malformed, "late": late, "ahead": ahead, "window": options.window})
    table = windows(spark, options.path, options.keys).orderBy("begin", *options.keys)
    report.sections.append(section_of("windows", table))
    report.facts["rows_in_windows"] = table.agg(f.sum("rows")).first()[0] or 0
    report.series.append(series_of("Rows in windows", table, "begin", "rows", f.sum("rows")))
    return report, {"windows": table}
