"""Latency by hop, from the traces that gateways keep (`gateway.trace_dir`): JSON lines, docs/operations.md.

    publisher ──▶ proxy ──▶ broker ──▶ gateway
       │   link: out → in   │  inside: in → out

Times of two processes are compared as they are: a difference of their clocks shifts a link's times, which may become negative.

Source: docs/pipeline.md; PiXiu §3.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from pipeline.reading import read_json
from pipeline.report import Bars, Report, section_of, series_of

SCHEMA = (
    "snowflake_id long, kind string, key long, "
    "stamps array<struct<role: string, partition: int, replica: int, in_us: long, out_us: long>>"
)


ACCURACY: Final = 10_000
UNITS: Final = tuple((name, "ms") for name in ("p50", "p99", "p999", "most"))


@dataclass(frozen=True, slots=True)
class LatencyOptions:
    """The traces, and the detail of the report."""

    traces: str
    """Folder or files of traces."""
    minute: bool = False
    """Report by minute, too."""


def spans(traces: Any) -> Any:
    """(kind, hop, at_us, us): one row for the time inside each hop, and one for the link to the next. `traces`: as in `SCHEMA`."""
    from pyspark.sql import functions as f

    stamps = f.col("stamps")
    numbered = traces.where(f.size(stamps) > 0).select("kind", "stamps", f.posexplode(stamps).alias("place", "stamp"))
    name = f.concat(f.col("stamp.role"), f.lit(" "), f.col("stamp.partition"), f.lit("/"), f.col("stamp.replica"))
    inside = numbered.select(
        "kind", name.alias("hop"), f.col("stamp.in_us").alias("at_us"), (f.col("stamp.out_us") - f.col("stamp.in_us")).alias("us")
    )
    following = f.element_at(stamps, f.col("place") + 2)
    links = numbered.where(f.col("place") + 1 < f.size(stamps)).select(
        "kind",
        f.concat(f.col("stamp.role"), f.lit(" → "), following["role"]).alias("hop"),
        f.col("stamp.out_us").alias("at_us"),
        (following["in_us"] - f.col("stamp.out_us")).alias("us"),
    )
    whole = traces.where(f.size(stamps) > 0).select(
        "kind",
        f.lit("whole way").alias("hop"),
        stamps[0]["in_us"].alias("at_us"),
        (f.element_at(stamps, -1)["out_us"] - stamps[0]["in_us"]).alias("us"),
    )
    return inside.unionByName(links).unionByName(whole)


def percentiles(found: Any, *, minute: bool = False) -> Any:
    """(kind, hop, [minute], count, p50, p99, p999, most) in milliseconds. The rank of a percentile is right to 1/`ACCURACY`."""
    from pyspark.sql import functions as f

    keys = ["kind", "hop"]
    if minute:
        found = found.withColumn("minute", f.date_trunc("minute", f.timestamp_micros("at_us")))
        keys.append("minute")
    ms = f.col("us") / 1000
    wanted = [
        f.expr(f"percentile_approx(us, {share}, {ACCURACY}) / 1000").alias(name)
        for name, share in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999))
    ]
    return found.groupBy(*keys).agg(f.count("*").alias("count"), *wanted, f.max(ms).alias("most")).orderBy(*keys)


def run(spark: Any, options: LatencyOptions) -> tuple[Report, dict[str, Any]]:
    """The report, and its tables. Malformed lines are counted and left out."""
    from pyspark.sql import functions as f

    traces = read_json(spark, options.traces, SCHEMA).persist()
    whole = traces.where(f.size("stamps") > 0)
    found = spans(whole).persist()
    hops = percentiles(found).persist()
    report = Report("Latency by hop", {"traces": whole.count(), "malformed": traces.where("stamps is null").count()})
    report.facts["percentiles"] = f"approximate: of a rank that differs by at most 1/{ACCURACY:,} of the count"
    report.sections.append(section_of("hops", hops, units=UNITS))
    rows = hops.collect()
    for name in ("p50", "p99"):
        report.bars.append(Bars(f"{name} of each hop", tuple((f"{row.kind}: {row.hop}", float(row[name])) for row in rows), "ms"))
    tables = {"hops": hops}
    if options.minute:
        tables["minutes"] = percentiles(found, minute=True).persist()
        report.sections.append(section_of("minutes", tables["minutes"], units=UNITS))
    ways = found.where("hop = 'whole way'").withColumn("at", f.timestamp_micros("at_us"))
    p99 = f.expr(f"percentile_approx(us, 0.99, {ACCURACY}) / 1000")
    report.series.append(series_of("p99 of the whole way", ways, "at", "ms", p99))
    for frame in (traces, found, *tables.values()):
        frame.unpersist()  # a later look at these files in this session must see them as they are then
    return report, tables
