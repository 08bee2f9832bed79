"""Audit: compares stored messages (Xiu), listed messages (Pi), and acknowledgements of devices.

    never_listed     stored, and in no inbox of its first receiver: its arrival was never confirmed to its sender
    orphaned         listed, and not stored although it is in the window, and retention has not passed it
    stored_twice     two messages of one receiver with one ID
    listed_twice     one message twice in one inbox
    out_of_order     of one sender, inbox and lane, after a message that was sent later
    unacknowledged   listed for longer than `unacked_s`, still readable, and no device has acknowledged it
    dropped          inboxes that lost entries before every device had them
    lost             in the file of messages confirmed as stored, and in no inbox         (with `sends`)
    repeated         in the file of received messages, more than once                    (with `receipts`)

Messages stored in the last `settle_s` seconds are left out: they may be between the two stores now. So are those older than
`window_s`, as inboxes forget acknowledged entries after a day.

Source: docs/pipeline.md.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

from pipeline.reading import read, read_file
from pipeline.report import Bars, Report, section_of, series_of, when
from pipeline.spark.replicas import Replicas
from pixiu.ids import MSG_COUNTER_BITS, SNOWFLAKE_SEQUENCE_BITS, SNOWFLAKE_WORKER_BITS
from pixiu.wire.record import Flag

DAY_S: Final = 86_400
SEQUENCE_MASK: Final = (1 << 48) - 1
assert MSG_COUNTER_BITS < 48


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """The range of messages, and files to compare with."""

    target: str
    settle_s: int = 60
    window_s: int = DAY_S - 3600
    unacked_s: int = 3600
    sends: str = ""
    """File of (msg_id, uin) confirmed to senders as stored."""
    receipts: str = ""
    """File of (msg_id, uin) that receivers got."""


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables to compare, as DataFrames."""

    messages: Any
    """Stored in the window."""
    stored: Any
    """(msg_id) of messages stored from the window's begin on."""
    inboxes: Any
    heads: Any
    acknowledgements: Any
    floors: Any
    """(xiu_partition, floor): begin of the window; earlier messages are not compared."""


def findings(tables: Tables, begin_us: int, now_us: int, unacked_s: int) -> dict[str, Any]:
    """A DataFrame of rows for each finding. Times are Unix microseconds."""
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    messages, inboxes = tables.messages, tables.inboxes
    listed = inboxes.select(f.col("uin").alias("key"), "msg_id")
    never = messages.join(listed, ["key", "msg_id"], "left_anti").select("msg_id", "key", "sender", "snowflake_id", "stored_at")
    partition = f.shiftright(f.col("msg_id"), 56).cast("int")
    placed = inboxes.withColumn("xiu_partition", partition).withColumn("seq", f.col("msg_id").bitwiseAND(f.lit(SEQUENCE_MASK)))
    in_window = f.unix_micros("appended_at") >= f.lit(begin_us)
    orphaned = (
        placed.join(tables.floors, "xiu_partition", "left")
        .where(in_window & (f.col("seq") >= f.coalesce(f.col("floor"), f.lit(0))))
        .join(tables.stored, "msg_id", "left_anti")
        .select("msg_id", "uin", "lane", "inbox_seq", "appended_at")
    )
    derived = f.col("flags").bitwiseAND(f.lit(int(Flag.DERIVED_ID))) != 0
    twice = messages.groupBy("key", "snowflake_id", derived.alias("derived")).agg(
        f.count("*").alias("times"), f.sort_array(f.collect_list("msg_id")).alias("msg_ids")
    )
    again = inboxes.groupBy("uin", "msg_id").agg(
        f.count("*").alias("times"), f.sort_array(f.collect_list("inbox_seq")).alias("seqs")
    )
    worker = f.shiftright(f.col("snowflake_id"), SNOWFLAKE_SEQUENCE_BITS).bitwiseAND(f.lit((1 << SNOWFLAKE_WORKER_BITS) - 1))
    before = Window.partitionBy("uin", "lane", "worker").orderBy("inbox_seq").rowsBetween(Window.unboundedPreceding, -1)
    ordered = (
        inboxes.join(messages.where(~derived).select("msg_id", "snowflake_id", "sender"), "msg_id")
        .withColumn("worker", worker)
        .withColumn("newest_before", f.max("snowflake_id").over(before))
    )
    late = ordered.where(f.col("snowflake_id") < f.col("newest_before")).select(
        "msg_id", "uin", "lane", "inbox_seq", "sender", "worker"
    )
    return {
        "never_listed": never,
        "orphaned": orphaned,
        "stored_twice": twice.where("times > 1"),
        "listed_twice": again.where("times > 1"),
        "out_of_order": late,
        "unacknowledged": _unacknowledged(tables, now_us - unacked_s * 1_000_000),
        "dropped": tables.heads.where("dropped > 0").select("uin", "lane", "dropped", "gap", "last"),
    }


def readable(inboxes: Any, heads: Any) -> Any:
    """Entries that a device can still get."""
    from pyspark.sql import functions as f

    floors = heads.select("uin", "lane", "floor")
    return inboxes.join(floors, ["uin", "lane"], "left").where(f.col("inbox_seq") > f.coalesce(f.col("floor"), f.lit(0)))


def acknowledged(entries: Any, acknowledgements: Any) -> Any:
    """(uin, lane, inbox_seq, device) of each device that has acknowledged an entry."""
    from pyspark.sql import functions as f

    cursors = acknowledgements.select("uin", "lane", "device", "up_to", "map")
    # Bit i of the map is entry up_to + 1 + i.
    place = f.col("inbox_seq") - f.col("up_to") - 1
    in_map = (place >= 0) & (place < 64) & (f.expr("shiftrightunsigned(map, cast(inbox_seq - up_to - 1 as int)) & 1") == 1)
    found = entries.join(cursors, ["uin", "lane"]).where((f.col("inbox_seq") <= f.col("up_to")) | in_map)
    return found.select("uin", "lane", "inbox_seq", "device")


def _unacknowledged(tables: Tables, before_us: int) -> Any:
    from pyspark.sql import functions as f

    entries = readable(tables.inboxes.where(f.unix_micros("appended_at") < f.lit(before_us)), tables.heads)
    some = acknowledged(entries, tables.acknowledgements).select("uin", "lane", "inbox_seq").distinct()
    rest = entries.join(some, ["uin", "lane", "inbox_seq"], "left_anti")
    return rest.select("msg_id", "uin", "lane", "inbox_seq", "appended_at")


def load(spark: Any, options: AuditOptions, now_us: int) -> tuple[Tables, int, int]:
    """Read the current tables; return them with the begin and end of the compared messages, Unix microseconds.

    Xiu is read before Pi: messages stored and listed before the first read are in the second.
    """
    from pyspark.sql import functions as f

    end_us, begin_us = now_us - options.settle_s * 1_000_000, now_us - options.window_s * 1_000_000
    columns = "xiu_partition,seq,msg_id,snowflake_id,key,sender,stored_at,flags"
    begin_ms = begin_us // 1000
    with Replicas(options.target, "xiu") as replicas:
        begins = [(each, int(replicas.bounds(each, at_us=begin_ms * 1000).at)) for each in range(replicas.find())]
    everything = read(spark, options.target, columns=columns, startingTimestamp=begin_ms).persist()
    everything.count()  # reads it here, once, before Pi is read
    stored_us = f.unix_micros("stored_at")
    messages = everything.where((stored_us >= f.lit(begin_us)) & (stored_us < f.lit(end_us)))
    tables = Tables(
        messages=messages,
        stored=everything.select("msg_id"),
        inboxes=read(spark, options.target, table="inboxes").where(f.unix_micros("appended_at") < f.lit(end_us)).persist(),
        heads=read(spark, options.target, table="heads"),
        acknowledgements=read(spark, options.target, table="acknowledgements"),
        floors=spark.createDataFrame(begins, "xiu_partition int, floor long"),
    )
    return tables, begin_us, end_us


def run(spark: Any, options: AuditOptions) -> tuple[Report, dict[str, Any]]:
    """The report, and all rows of each finding."""
    from pyspark.sql import functions as f

    now_us = time.time_ns() // 1000
    tables, begin_us, end_us = load(spark, options, now_us)
    found = findings(tables, begin_us, now_us, options.unacked_s)
    if options.sends:
        sends = read_file(spark, options.sends, ("msg_id", "uin"))
        found["lost"] = sends.join(tables.inboxes.select("msg_id", "uin"), ["msg_id", "uin"], "left_anti").select("msg_id", "uin")
    if options.receipts:
        receipts = read_file(spark, options.receipts, ("msg_id", "uin"))
        found["repeated"] = receipts.groupBy("msg_id", "uin").agg(f.count("*").alias("times")).where("times > 1")
    report = Report("Audit of mail", {
        "from": when(begin_us), "to": when(end_us), "messages": tables.messages.count(), "entries": tables.inboxes.count(),
    })  # fmt: skip
    for name, frame in found.items():
        found[name] = frame.persist()
        report.sections.append(section_of(name, found[name]))
    report.findings = sum(section.total for section in report.sections if section.title not in ("unacknowledged", "dropped"))
    report.facts["verdict"] = f"{report.findings:,} rows do not match" if report.findings else "everything matches"
    report.bars.append(Bars("What was found", tuple((section.title, float(section.total)) for section in report.sections), "rows"))
    report.series.append(series_of("Messages stored", tables.messages, "stored_at", "messages"))
    return report, found
