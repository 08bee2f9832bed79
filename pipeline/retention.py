"""Retention: what is archived may leave Xiu; reads of it find it in the archive (`pipeline.archived`).

    ├─ floor ──── archived, whole ────┤
    ├────────── older than ──────┤
    ├──────── acknowledged by every device ───┤         (unless `unread`)
    ├──────────── up to ─────────┤  the least of them; the leader trims at a mark at or below it, and where no reader is before it

The archive is verified first. Of each partition as many messages must be in it as are stored up to there: what is not archived
does not go.

Source: docs/pipeline.md; docs/decisions/0187-what-is-archived-may-leave-a-xiu.md.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

from pipeline.archive import READER, manifests, read_archive, verify
from pipeline.audit import SEQUENCE_MASK, acknowledged, readable
from pipeline.leader import Leader
from pipeline.reading import read
from pipeline.replicas import Replicas
from pipeline.report import Report, Section
from pixiu.errors import InvalidArgument, StoreDamaged

OLDER_THAN_H: Final = 24.0
"""Xiu remembers so long what it was sent, to store it once."""


@dataclass(frozen=True, slots=True)
class RetentionOptions:
    """What may go."""

    target: str
    path: str
    """Of the archive."""
    operator: str
    reason: str
    """Both go into the leaders' audit logs."""
    older_than_h: float = OLDER_THAN_H
    unread: bool = False
    """Also what a device has not acknowledged: it will read that the message is gone."""
    dry_run: bool = False
    reader: str = READER
    """By which the Xius know the archive: it needs nothing any more of what was found in it."""
    retry_s: float = 60.0
    """How long a leader is looked for."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How far one partition may be trimmed. Positions; each excluded."""

    floor: int
    """What is stored begins here."""
    archived: int
    old: int
    unread: int

    @property
    def up_to(self) -> int:
        """Nothing here or behind may go."""
        return max(self.floor, min(self.archived, self.old, self.unread))

    @property
    def limit(self) -> str:
        """What sets it: archive, age or unread."""
        least = min(self.archived, self.old, self.unread)
        return "archive" if least == self.archived else "age" if least == self.old else "unread"


def first_unread(spark: Any, target: str) -> dict[int, int]:
    """Xiu partition → the lowest position that a device can be given yet, or that a user without a device has not got."""
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


def _not_archived(spark: Any, options: RetentionOptions, partition: int, limits: Limits, replicas: Replicas) -> int:
    """How many messages that would go are in Xiu and not in the archive."""
    from pyspark.sql import functions as f

    stored = replicas.bounds(partition, limits.floor, limits.up_to).rows
    seq = f.col("seq")
    wanted = (f.col("xiu_partition") == partition) & (seq >= limits.floor) & (seq < limits.up_to)
    return max(0, stored - int(read_archive(spark, options.path).where(wanted).select("seq").distinct().count()))


def run(spark: Any, options: RetentionOptions) -> tuple[Report, dict[str, Any]]:
    """Say what may go, and have it gone. Raises InvalidArgument, StoreDamaged, PixiuError."""
    from pyspark.sql import functions as f

    if options.older_than_h < 0:
        raise InvalidArgument("--older-than is a number of hours")
    checked = verify(spark, options.path)
    if checked.findings:
        raise StoreDamaged(
            f"the archive in {options.path} is damaged in {checked.findings} places, and nothing was trimmed: "
            f"`pixiu pipeline archive {options.path} --verify` names them"
        )
    ends = {row[0]: row[1] + 1 for row in manifests(spark, options.path).groupBy("xiu_partition").agg(f.max("last")).collect()}
    before_us = time.time_ns() // 1000 - int(options.older_than_h * 3_600_000_000)
    unread = {} if options.unread else first_unread(spark, options.target)
    rows: list[tuple[int | str, ...]] = []
    lacking = trimmed = 0
    with Replicas(options.target, "xiu", retry_s=options.retry_s) as replicas:
        count = replicas.find()
        foreign = sorted(set(ends) - set(range(count)))
        if foreign:
            raise InvalidArgument(f"{options.path} has partition {foreign[0]}, which this cluster has not: it is of another one")
        for partition in sorted(ends):
            bounds = replicas.bounds(partition, at_us=before_us)
            if ends[partition] > bounds.end:
                raise InvalidArgument(
                    f"{options.path} is ahead of partition {partition}: it is of another cluster, or the partition lost messages "
                    "(`pixiu pipeline restore`)"
                )
            limits = Limits(bounds.first, ends[partition], bounds.at, unread.get(partition, bounds.end))
            missing, floor, gone = 0, bounds.first, 0
            if limits.up_to > floor:
                missing = _not_archived(spark, options, partition, limits, replicas)
                if not missing and not options.dry_run:
                    replicas.hold(partition, options.reader, ends[partition])  # streams say so a batch late
                    with Leader(options.target, partition, options.operator, options.reason, options.retry_s) as leader:
                        floor = leader.trim(limits.up_to)
                    gone = bounds.rows - replicas.bounds(partition, end=bounds.end).rows
            lacking, trimmed = lacking + missing, trimmed + gone
            rows.append((partition, limits.floor, limits.up_to, limits.limit, missing, floor, gone))
    names = ("partition", "floor", "up_to", "limit", "not_archived", "floor_now", "trimmed")
    report = Report("Retention", {"path": options.path, "dry_run": options.dry_run, "trimmed": trimmed})
    report.sections.append(Section("partitions", names, tuple(rows), len(rows)))
    report.findings = lacking
    return report, {}
