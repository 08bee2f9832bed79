"""Skew: hot rooms or users, loads of partitions at n, 2n and 4n, and a recommendation.

    vroom     one key alone has more than an even share at twice the partitions: doubling cannot split it, VRooms can (`[cluster]
              big_rooms`); or the fullest partition keeps its load at twice the partitions
    leave     else, if the fullest partition has at most `uneven` times the average
    double    else: with twice the partitions the fullest one has clearly less

Source: docs/pipeline.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pipeline.reading import read, read_file
from pipeline.report import Bars, Report, Section, series_of
from pipeline.spark.replicas import Replicas
from pixiu.errors import InvalidArgument
from pixiu.ids import topic_room

UNEVEN: Final = 1.5
PARTITIONS_OF_A_LOG: Final = 2
GAINS: Final = 0.8
"""Doubling pays if the fullest partition keeps at most this part of its load."""


@dataclass(frozen=True, slots=True)
class SkewOptions:
    """Input: the stored messages, or a log."""

    target: str = ""
    log: str = ""
    """JSON lines, CSV or Parquet with the column `key_column`."""
    key_column: str = "room"
    partitions: int = 0
    """Current number. 0: the cluster's number of Xiu partitions; 2 for a log."""
    top: int = 20


@dataclass(frozen=True, slots=True)
class Load:
    """The load with this number of partitions."""

    partitions: int
    most: int
    average: float

    @property
    def ratio(self) -> float:
        """Load of the fullest partition, relative to the average."""
        return self.most / self.average if self.average else 1.0


def verdict(loads: Sequence[Load], hottest: int, uneven: float = UNEVEN) -> str:
    """Recommend leave, vroom or double. `loads` at n, 2n, …; `hottest`: messages of the hottest key. Pure."""
    now, doubled = loads[0], loads[1]
    if hottest > doubled.average:
        return "vroom"
    if now.ratio <= uneven:
        return "leave"
    return "vroom" if doubled.most > now.most * GAINS else "double"


def loads_of(counts: Any, sizes: Sequence[int]) -> list[Load]:
    """Loads of partitions by `id % n`. `counts`: (id, messages)."""
    from pyspark.sql import functions as f

    total = counts.agg(f.sum("messages")).first()[0] or 0
    found = []
    for size in sizes:
        fullest = counts.groupBy(f.pmod(f.col("id"), f.lit(size))).agg(f.sum("messages").alias("m")).agg(f.max("m")).first()[0] or 0
        found.append(Load(size, int(fullest), total / size))
    return found


def count(spark: Any, options: SkewOptions) -> Any:
    """(name, id, messages, senders) of every key. A name is a topic's, with the ID of the room that carries it."""
    from pyspark.sql import functions as f

    if bool(options.target) == bool(options.log):
        raise InvalidArgument("skew looks at a cluster (--target) or at a log (--log FILE), one of them")
    if options.target:
        rows = read(spark, options.target, columns="key,sender").select(f.col("key").alias("name"), f.col("sender").alias("who"))
    else:
        frame = read_file(spark, options.log, (options.key_column,))
        who = f.col("user") if "user" in frame.columns else f.lit(0)
        rows = frame.select(f.col(options.key_column).alias("name"), who.alias("who"))
    counted = rows.groupBy("name").agg(f.count("*").alias("messages"), f.count_distinct("who").alias("senders"))
    kinds = dict(counted.dtypes)
    named = f.udf(lambda name: topic_room(name) if name else None, "long", useArrow=False)  # Arrow's UDFs need pandas
    number = f.col("name").cast("long") if kinds["name"] in ("bigint", "int") else named(f.col("name").cast("string"))
    return counted.where("name is not null").withColumn("id", number)


def partitions_of(options: SkewOptions) -> int:
    """The current number of partitions. Raises PixiuError."""
    if options.partitions or not options.target:
        return options.partitions or PARTITIONS_OF_A_LOG
    with Replicas(options.target, "xiu") as replicas:
        return replicas.find()


def run(spark: Any, options: SkewOptions) -> tuple[Report, dict[str, Any]]:
    """The report, and all keys with their counts."""
    n = partitions_of(options)
    if n < 1 or n & (n - 1):
        raise InvalidArgument(f"--partitions is a power of two, not {n}")
    counts = count(spark, options).persist()
    total = counts.agg({"messages": "sum"}).first()[0] or 0
    top = counts.orderBy("messages", "name", ascending=[False, True]).limit(options.top).collect()
    loads = loads_of(counts, (n, 2 * n, 4 * n))
    hottest = top[0].messages if top else 0
    said = verdict(loads, hottest)
    report = Report("Skew of traffic", {"messages": int(total), "keys": counts.count(), "partitions": n, "verdict": said})
    share = 100 / total if total else 0.0
    report.sections.append(
        Section(
            "hottest",
            ("key", "messages", "percent", "senders"),
            tuple((row["name"], row.messages, row.messages * share, row.senders) for row in top),
            counts.count(),
        )
    )
    rows = tuple(
        (load.partitions, load.most, load.average, load.ratio, hottest / load.average if load.average else 0.0) for load in loads
    )
    names = ("partitions", "fullest", "average", "ratio", "hottest_key_ratio")
    report.sections.append(Section("predicted load", names, rows, len(rows)))
    report.facts["even_at"] = next((load.partitions for load in loads if load.ratio <= UNEVEN), "none of these")
    report.bars.append(Bars("Hottest keys", tuple((str(row["name"]), float(row.messages)) for row in top), "messages"))
    plot = tuple((f"{load.partitions} partitions", load.ratio) for load in loads if math.isfinite(load.ratio))
    counts.unpersist()  # a later look at this log in this session must see it as it is then
    if options.target:
        when_stored = read(spark, options.target, columns="stored_at")
        report.series.append(series_of("Messages stored", when_stored, "stored_at", "messages"))
    report.bars.append(Bars("Fullest partition to the average", plot, "x"))
    return report, {"keys": counts}
