"""Retention: archived messages may be trimmed from Xiu; reads of them use the archive (`pipeline.archive.archived`).

    ├─ floor ──── archived, whole ────┤
    ├────────── older than ──────┤
    ├──────── acknowledged by every device ───┤         (unless `unread`)
    ├──────────── up to ─────────┤  the least of them; the leader trims at a mark at or below it, beyond no reader

The messages to trim are verified in the archive first, which must be of this cluster. For each partition it must have as many
messages as are stored up to there: messages not archived stay.

Source: docs/pipeline.md, "Retention".
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from pipeline.archive.archive import READER, damaged, ranges_of, read_archive
from pipeline.archive.coverage import Range, batches_between, check_cluster, cluster_of, covered, reach
from pipeline.jobs.audit import SEQUENCE_MASK, acknowledged, readable
from pipeline.reading import read
from pipeline.report import Report, Section
from pipeline.spark.leader import Leader
from pipeline.spark.replicas import Replicas
from pixiu.errors import InvalidArgument, PixiuError, StoreDamaged, Unavailable

OLDER_THAN_H: Final = 24.0
"""Hours for which Xiu remembers messages to find duplicates."""


@dataclass(frozen=True, slots=True)
class RetentionOptions:
    """The choice of messages to trim, and settings."""

    target: str
    path: str
    """Of the archive."""
    operator: str
    reason: str
    """Both go into the leaders' audit logs."""
    older_than_h: float = OLDER_THAN_H
    unread: bool = False
    """Trim also messages that a device has not acknowledged: it will read that they are gone."""
    dry_run: bool = False
    reader: str = READER
    """Name of the archive at the Xius: it no longer needs messages that were found in it."""
    retry_s: float = 60.0
    """Time limit for finding a leader, seconds."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Positions up to which one partition may be trimmed; each excluded."""

    floor: int
    """The first stored position."""
    archived: int
    old: int
    unread: int

    @property
    def up_to(self) -> int:
        """The first position that must stay."""
        return max(self.floor, min(self.archived, self.old, self.unread))

    @property
    def limit(self) -> str:
        """The cause of the limit: archive, age or unread."""
        least = min(self.archived, self.old, self.unread)
        return "archive" if least == self.archived else "age" if least == self.old else "unread"


def first_unread(spark: Any, target: str) -> dict[int, int]:
    """Xiu partition → the lowest position that a device can still get, or that a user without a device has not got. Raises
    Unavailable while Pi is being doubled: its new partitions are not in a table before that is over."""
    with Replicas(target, "pi") as replicas:
        before = replicas.find()
        found = {} if replicas.doubling else _first_unread(spark, target)
        if replicas.doubling or replicas.find() != before or replicas.doubling:
            raise Unavailable(
                "Pi is being doubled, so what is unread is not known: run retention again when `pixiu double` has "
                "ended, or with --unread"
            )
    return found


def _first_unread(spark: Any, target: str) -> dict[int, int]:
    from pyspark.sql import functions as f

    entries = readable(read(spark, target, table="inboxes"), read(spark, target, table="heads"))
    devices = read(spark, target, table="devices").groupBy("uin").agg(f.count("*").alias("devices"))
    known = acknowledged(entries, read(spark, target, table="acknowledgements"))
    known = known.groupBy("uin", "lane", "inbox_seq").agg(f.countDistinct("device").alias("known"))
    counted = entries.join(known, ["uin", "lane", "inbox_seq"], "left").join(devices, "uin", "left")
    wanted = f.greatest(f.coalesce(f.col("devices"), f.lit(0)), f.lit(1))
    rest = counted.where(f.coalesce(f.col("known"), f.lit(0)) < wanted)
    partition = f.shiftright(f.col("msg_id"), 56).cast("int").bitwiseAND(f.lit(0xFF))
    seq = f.col("msg_id").bitwiseAND(f.lit(SEQUENCE_MASK))
    return {row.p: row.first for row in rest.groupBy(partition.alias("p")).agg(f.min(seq).alias("first")).collect()}


def archived(spark: Any, path: str, going: Mapping[int, Limits]) -> dict[int, int]:
    """Partition → number of the messages to trim that are in the archive."""
    from pyspark.sql import functions as f

    wanted = f.lit(False)
    for partition, limits in going.items():
        seq = f.col("seq")
        wanted |= (f.col("xiu_partition") == partition) & (seq >= limits.floor) & (seq < limits.up_to)
    found = read_archive(spark, path).where(wanted).groupBy("xiu_partition").agg(f.countDistinct("seq"))
    return {row[0]: row[1] for row in found.collect()}


def kept_by(options: RetentionOptions, limits: Limits, missing: int, floor_now: int) -> str:
    """Why `floor_now` is below `up_to`."""
    if floor_now >= limits.up_to:
        return ""
    if missing:
        return "not archived"
    return "dry run" if options.dry_run else "mark or reader"


def limits_of(
    replicas: Replicas, ranges: Sequence[Range], path: str, before_us: int, unread: Mapping[int, int]
) -> dict[int, Limits]:
    """Positions up to which each partition of the archive may be trimmed. Raises InvalidArgument if the archive is ahead of a
    partition."""
    found: dict[int, Limits] = {}
    for partition, end in sorted(reach(ranges).items()):
        bounds = replicas.bounds(partition, at_us=before_us)
        if end > bounds.end:
            raise InvalidArgument(f"{path} is ahead of partition {partition}, which lost messages (`pixiu pipeline restore`)")
        whole = covered(ranges, partition, bounds.first)
        found[partition] = Limits(bounds.first, whole, bounds.at, unread.get(partition, bounds.end))
    return found


def run(spark: Any, options: RetentionOptions) -> tuple[Report, dict[str, Any]]:
    """Determine what may be trimmed, trim it, and report. Raises InvalidArgument, StoreDamaged, PixiuError."""
    if options.older_than_h < 0:
        raise InvalidArgument("--older-than is a number of hours")
    ranges = ranges_of(spark, options.path)
    before_us = time.time_ns() // 1000 - int(options.older_than_h * 3_600_000_000)
    with Replicas(options.target, "xiu", retry_s=options.retry_s) as replicas:
        replicas.find()
        replicas.bounds(0)  # returns the cluster's ID, if no registry did
        check_cluster(options.path, cluster_of(ranges, options.path), options.target, replicas.cluster)
        unread = {} if options.unread else first_unread(spark, options.target)
        limits = limits_of(replicas, ranges, options.path, before_us, unread)
        going = {partition: each for partition, each in limits.items() if each.up_to > each.floor}
        batches = {
            batch for partition, each in going.items() for batch in batches_between(ranges, partition, each.floor, each.up_to)
        }
        wrong = damaged(spark, options.path, batches)
        if wrong.total:
            raise StoreDamaged(
                f"the archive in {options.path} is damaged in {wrong.total} places, and nothing was trimmed: "
                f"`pixiu pipeline archive {options.path} --verify` names them"
            )
        there, ends = archived(spark, options.path, going) if going else {}, reach(ranges)
        rows: list[tuple[int | str, ...]] = []
        lacking = trimmed = 0
        for partition, each in limits.items():
            missing, floor, gone = 0, each.floor, 0
            if each.archived < ends[partition]:  # a batch is missing
                missing = replicas.bounds(partition, each.archived, ends[partition]).rows
            if partition in going:
                missing += max(0, replicas.bounds(partition, each.floor, each.up_to).rows - there.get(partition, 0))
                if not missing and not options.dry_run:
                    floor, gone = _trim(options, replicas, partition, each, ends[partition])
            lacking, trimmed = lacking + missing, trimmed + gone
            rows.append(
                (partition, each.floor, each.up_to, each.limit, missing, floor, gone, kept_by(options, each, missing, floor))
            )
    names = ("partition", "floor", "up_to", "limit", "not_archived", "floor_now", "trimmed", "rest_kept_by")
    report = Report("Retention", {"path": options.path, "dry_run": options.dry_run, "trimmed": trimmed})
    report.sections.append(Section("partitions", names, tuple(rows), len(rows)))
    report.findings = lacking
    return report, {}


def _trim(options: RetentionOptions, replicas: Replicas, partition: int, limits: Limits, end: int) -> tuple[int, int]:
    """Trim one partition; return its new first position, and the number of messages trimmed."""
    before = replicas.bounds(partition, limits.floor, limits.up_to).rows
    with suppress(PixiuError):  # the archive job does so as well
        replicas.hold(partition, options.reader, end)
    with Leader(options.target, partition, options.operator, options.reason, options.retry_s) as leader:
        floor = leader.trim(limits.up_to)
    return floor, before - replicas.bounds(partition, limits.floor, limits.up_to).rows
