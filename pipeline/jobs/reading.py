"""Reading: the time until mail is read, and what is unread, from snapshots of inboxes and acknowledgements.

    inboxes, heads, acknowledgements ──▶ an entry is open, or read by a device ──▶ compared with what was open at the last snapshot
    messages ──▶ its sender, and when it was stored                                  open then, read now   → PATH/read/run=…
                                                                                     open now              → PATH/open/run=…
                                                                                     open then, not there  → counted as `left`
    PATH/runs/run=…     written last: only a snapshot that has this counts

A cursor has no time. So an entry that was open at one snapshot and is read at the next one was read between the two: its time to
read has a lower and an upper limit, and nothing more is known. More frequent runs bring them closer. An entry that left its inbox
between two snapshots was read and forgotten, or expired, or was trimmed: which one cannot be seen. What was stored, read and
forgotten between two snapshots is not seen at all; inboxes keep what was read for a day. Arrival is by the clocks of the Pis, and
snapshots are by the one of this machine.

Source: docs/pipeline.md, "Reading".
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

from pipeline.folders import names_in
from pipeline.jobs.audit import acknowledged
from pipeline.queries import until_not_busy
from pipeline.reading import microseconds, read
from pipeline.report import Report, section_of, series_of, when

ENTRY: Final = ["uin", "lane", "inbox_seq"]
ACCURACY: Final = 10_000
DURATIONS: Final = ("read_after_p50_least", "read_after_p50_most", "read_after_p99_least", "read_after_p99_most")


@dataclass(frozen=True, slots=True)
class ReadingOptions:
    """The cluster, and the folder of snapshots."""

    target: str
    path: str
    cohort: str = "1 hour"
    """Interval of arrival by which mail is grouped."""


def entries_now(spark: Any, target: str) -> Any:
    """(uin, lane, inbox_seq, msg_id, appended_at, sender, stored_at, read): every entry that is read, because one device has
    acknowledged it, or that a device can still get. `sender` and `stored_at` are null if Xiu no longer has the message."""
    from pyspark.sql import functions as f

    # Acknowledgements are read after inboxes: what is acknowledged meanwhile counts as read.
    # Entries that every device acknowledged are below the floor, and stay for a day.
    entries = read(spark, target, table="inboxes")
    floors = read(spark, target, table="heads").select("uin", "lane", "floor")
    known = acknowledged(entries, read(spark, target, table="acknowledgements")).select(*ENTRY).distinct()
    known = known.withColumn("read", f.lit(True))
    senders = read(spark, target, columns="msg_id,sender,stored_at")
    found = entries.join(known, ENTRY, "left").join(floors, ["uin", "lane"], "left").join(senders, "msg_id", "left")
    found = found.where(f.col("read") | (f.col("inbox_seq") > f.coalesce(f.col("floor"), f.lit(0))))
    return found.select(*ENTRY, "msg_id", "appended_at", "sender", "stored_at", f.coalesce("read", f.lit(False)).alias("read"))


def compared(now: Any, before: Any, seen: Any, begun_us: int, ended_us: int) -> tuple[Any, Any, int]:
    """Return what was read since the last snapshot, with the limits of its time to read in milliseconds; what is open now; and the
    number of open entries that left.

    `before`: what was open at the last snapshot; `seen`: what earlier ones saw as read. `begun_us`: of the last snapshot;
    `ended_us`: of this one.
    """
    from pyspark.sql import functions as f

    arrived = f.unix_micros("appended_at")
    was_open = before.select(*ENTRY).withColumn("was_open", f.lit(True))
    read_now = now.where("read").drop("read").join(seen.select(*ENTRY), ENTRY, "left_anti").join(was_open, ENTRY, "left")
    least = f.when(f.col("was_open"), f.greatest(f.lit(0.0), (f.lit(begun_us) - arrived) / 1000)).otherwise(f.lit(0.0))
    read_now = read_now.withColumn("least_ms", least).drop("was_open")
    read_now = read_now.withColumn("most_ms", f.greatest(f.lit(0.0), (f.lit(ended_us) - arrived) / 1000))
    return read_now, now.where("not read").drop("read"), before.join(now.select(*ENTRY), ENTRY, "left_anti").count()


def by_cohort(read_so_far: Any, open_now: Any, cohort: str) -> Any:
    """(cohort, read, unread, and limits of the median and the p99 of the time to read, in milliseconds)."""
    from pyspark.sql import functions as f

    begin = f.window("appended_at", cohort)["start"].alias("cohort")
    wanted = [f.count(f.lit(1)).alias("read")]
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        for limit in ("least", "most"):
            aggregate = f.percentile_approx(f"{limit}_ms", share, ACCURACY)
            wanted.append(aggregate.alias(f"read_after_{name}_{limit}"))
    done = read_so_far.groupBy(begin).agg(*wanted)
    rest = open_now.groupBy(begin).agg(f.count(f.lit(1)).alias("unread"))
    found = done.join(rest, "cohort", "full_outer").orderBy("cohort")
    return found.select("cohort", *(f.coalesce(name, f.lit(0)).alias(name) for name in ("read", "unread")), *DURATIONS)


def run(spark: Any, options: ReadingOptions) -> tuple[Report, dict[str, Any]]:
    """Take a snapshot, compare it with the last one, and report all of them."""
    path = options.path
    runs = sorted(int(name.removeprefix("run=")) for name in names_in(spark, f"{path}/runs") if name.startswith("run="))
    whole = [each for each in runs if "_SUCCESS" in names_in(spark, f"{path}/runs/run={each}")]
    before_us = whole[-1] if whole else 0

    def snapshot() -> tuple[int, int]:
        begun_us = max(time.time_ns() // 1000, before_us + 1)
        now = entries_now(spark, options.target).persist()
        try:
            now.count()  # reads it here, once
            nothing = now.limit(0)
            before = spark.read.parquet(f"{path}/open/run={before_us}") if whole else nothing
            seen = spark.read.parquet(*(f"{path}/read/run={each}" for each in whole)) if whole else nothing
            read_now, open_now, left = compared(now, before, seen, before_us, time.time_ns() // 1000)
            with microseconds(spark):
                read_now.write.parquet(f"{path}/read/run={begun_us}")
                open_now.write.parquet(f"{path}/open/run={begun_us}")
        finally:
            now.unpersist()
        spark.createDataFrame([(left,)], "left long").coalesce(1).write.json(f"{path}/runs/run={begun_us}")
        return begun_us, left

    taken_us, left = until_not_busy(snapshot)
    read_so_far = spark.read.parquet(*(f"{path}/read/run={each}" for each in (*whole, taken_us)))
    open_now = spark.read.parquet(f"{path}/open/run={taken_us}")
    cohorts = by_cohort(read_so_far, open_now, options.cohort)
    report = Report("Reading of mail", {
        "snapshots": len(whole) + 1, "last_snapshot": when(before_us) if whole else "none", "this_snapshot": when(taken_us),
        "read": read_so_far.count(), "unread": open_now.count(), "left_unseen": left,
    })  # fmt: skip
    report.facts["time_to_read"] = "between two limits: a snapshot shows only that it was read since the one before"
    report.sections.append(section_of("cohorts", cohorts, units=tuple((name, "ms") for name in DURATIONS)))
    report.series.append(series_of("Unread, by arrival", open_now, "appended_at", "messages"))
    return report, {"cohorts": cohorts}
