"""Archive: stored mail as Parquet, by batch and day, each batch with a manifest of its content.

    PATH/messages/batch=1764223125123456/day=2026-11-22/part-….parquet
    PATH/manifest/batch=1764223125123456/part-….json      a line for each partition: positions, rows, digest, cluster

    plan positions ──▶ write messages ──▶ write the manifest ──▶ report to the Xius what is archived ──▶ plan …
                       nothing counts yet    all of it counts

The manifests alone determine where the next run continues, so nothing can come between a batch and the note of it. A batch is
written once, into a folder of its own, whose number is the time in Unix microseconds: a killed run leaves a folder without a
manifest, which no reader accepts, and the next run plans anew. A manifest may replace other batches (`compact.py`): these do not
count from the moment it is there. PATH is a folder, or any file system that Spark knows.

Source: docs/pipeline.md.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from pipeline.archive.coverage import GIVEN_UP, NONE, Range, check_cluster, cluster_of, holes, reach
from pipeline.folders import names_in
from pipeline.queries import until_not_busy
from pipeline.reading import microseconds, sentence_of
from pipeline.report import SHOWN_ROWS, Bars, Report, Section, section_of, when
from pipeline.spark.offsets import Offsets, from_json, to_json
from pipeline.spark.options import read_options
from pixiu.errors import Gone, InvalidArgument, StoreDamaged, Unavailable
from pixiu.wire.export_tables import MESSAGES, TABLES, columns_of

READER: Final = "archive"
"""Name of the archive as a reader, for retention."""
ROWS_PER_BATCH: Final = 1_000_000
BYTES_PER_BATCH: Final = 1 << 30
ROW_BYTES: Final = 100
"""Estimate of a message without its body."""
FIRST_ROWS: Final = 10_000
"""Limit of the rows of a batch while the size of messages is unknown."""
COLUMNS: Final = [name for name, _ in TABLES[MESSAGES]]
MANIFEST: Final = (
    "xiu_partition int, begin long, end long, after long, cluster string, "
    "rows long, first long, last long, bytes long, digest long, first_stored timestamp, last_stored timestamp, "
    "replaces array<bigint>"
)
ADVICE: Final = (
    "bring these batches back from a copy of the archive; a new archive in another folder has only what Xiu still stores, and "
    "the messages that retention trimmed are in this archive alone"
)
Summary = dict[int, tuple[int, ...]]
"""Partition → rows, first and last position, bytes of bodies, digest, first and last `stored_at` in Unix microseconds."""


@dataclass(frozen=True, slots=True)
class ArchiveOptions:
    """The cluster and the folder of an archive, and settings."""

    target: str
    path: str
    rows_per_batch: int = ROWS_PER_BATCH
    bytes_per_batch: int = BYTES_PER_BATCH
    """Limit of a batch, by the mean size of the messages before it."""
    reader: str = READER
    accept_loss: bool = False
    """Continue after messages that Xiu no longer has and the archive never had."""


class Source(Protocol):
    """Interface to the messages to archive: `pipeline.spark.source.PixiuStreamReader`."""

    @property
    def cluster(self) -> str:
        """The cluster of the messages, known after the first question."""

    def initialOffset(self) -> dict[str, int | str]:
        """Return the earliest positions."""

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the end at the newest positions now."""

    def latestOffset(self, start: dict[str, int | str], limit: Any) -> dict[str, int | str]:
        """Return the end of a batch."""

    def begins(self, start: dict[str, int | str], end: dict[str, int | str]) -> Offsets:
        """Return the begin of a batch: beyond `start` if retention has passed that."""

    def commit(self, end: dict[str, int | str]) -> None:
        """Report that nothing before this is needed any more."""


class Storage(Protocol):
    """Interface to the storage of an archive."""

    def ranges(self) -> list[Range]:
        """Return the ranges of all manifests."""

    def sealed(self) -> set[int]:
        """Return the batches that have a manifest."""

    def size(self) -> tuple[int, int]:
        """Return the number of messages, and the bytes of their bodies."""

    def write(self, batch: int, begins: Offsets, ends: Offsets) -> Summary:
        """Write the messages of a batch, which must be new."""

    def seal(self, ranges: Sequence[Range], summary: Summary) -> None:
        """Write a batch's manifest."""


def rows_for(options: ArchiveOptions, rows: int, size: int) -> int:
    """The limit of rows of the next batch. `rows`, `size`: messages before it, and the bytes of their bodies."""
    if not rows:
        return min(options.rows_per_batch, FIRST_ROWS)
    return max(1, min(options.rows_per_batch, options.bytes_per_batch * rows // (size + rows * ROW_BYTES)))


def archive_new(source: Source, storage: Storage, options: ArchiveOptions, now_us: Callable[[], int]) -> list[int]:
    """Archive messages stored until now, batch after batch; return the batches' numbers. Raises InvalidArgument, Gone,
    Unavailable."""
    from pyspark.sql.streaming.datasource import ReadMaxRows

    known, ranges = storage.sealed(), storage.ranges()
    size = storage.size() if ranges else (0, 0)
    source.prepareForTriggerAvailableNow()
    check_cluster(options.path, cluster_of(ranges, options.path) or source.cluster, options.target, source.cluster)
    so_far = reach(ranges)
    start = to_json(so_far, source.cluster) if ranges else source.initialOffset()
    source.commit(start)  # a reader that was silent for long is forgotten
    unknown = 0 if ranges else NONE
    written: list[int] = []
    while True:
        end = source.latestOffset(start, ReadMaxRows(rows_for(options, *size)))
        starts, ends = from_json(start), from_json(end)
        if starts == ends:
            return written
        begins = source.begins(start, end)
        lost = [(each, starts.get(each, 0), begin) for each, begin in sorted(begins.items()) if begin > starts.get(each, 0)]
        if lost and not options.accept_loss:
            raise _lost(options.path, *lost[0])

        def attempt(begins: Offsets = begins, ends: Offsets = ends) -> tuple[int, Summary]:
            number = max(now_us(), max(known, default=0) + 1)
            return number, storage.write(number, begins, ends)

        batch, summary = until_not_busy(attempt)
        if storage.sealed() != known:
            raise Unavailable(
                f"the archive in {options.path} changed while this run wrote to it: another run archives there, or a manifest "
                f"was removed; run it again when no other one runs"
            )
        here = source.cluster
        sealed = [Range(batch, each, begins[each], ends[each], so_far.get(each, unknown), here) for each in sorted(ends)]
        storage.seal(sealed, summary)
        known.add(batch)
        written.append(batch)
        source.commit(end)
        so_far |= ends
        start = end
        size = sum(each[0] for each in summary.values()), sum(each[3] or 0 for each in summary.values())


def _lost(path: str, partition: int, position: int, first: int) -> Gone:
    return Gone(
        f"Xiu partition {partition}: the archive in {path} ends at position {position}, and retention has passed it: the first "
        f"that is stored is {first}. If batches were removed from {path}/manifest, bring them back; --accept-loss goes on without "
        "these messages"
    )


class SparkStorage:
    """An archive in files that Spark writes."""

    def __init__(self, spark: Any, options: ArchiveOptions) -> None:
        self._spark, self._options = spark, options

    def ranges(self) -> list[Range]:
        """See `Storage`."""
        return ranges_of(self._spark, self._options.path) if self.sealed() else []

    def sealed(self) -> set[int]:
        """See `Storage`."""
        return batches_in(self._spark, f"{self._options.path}/manifest")

    def size(self) -> tuple[int, int]:
        """See `Storage`."""
        found = manifests(self._spark, self._options.path).agg({"rows": "sum", "bytes": "sum"}).first()
        return found["sum(rows)"] or 0, found["sum(bytes)"] or 0

    def write(self, batch: int, begins: Offsets, ends: Offsets) -> Summary:
        """See `Storage`."""
        wanted = [each for each in sorted(ends) if begins[each] < ends[each]]
        if not wanted:
            return {}
        source = self._spark.read.format("pixiu").option("target", self._options.target)
        source = source.option("partitions", ",".join(map(str, wanted)))
        source = source.option("startingOffsets", json.dumps({str(each): begins[each] for each in wanted}))
        source = source.option("endingOffsets", json.dumps({str(each): ends[each] for each in wanted}))
        return write_messages(self._spark, source.load(), batch, self._options.path)

    def seal(self, ranges: Sequence[Range], summary: Summary) -> None:
        """See `Storage`."""
        write_manifest(self._spark, ranges, summary, self._options.path)


def write_messages(spark: Any, frame: Any, batch: int, path: str) -> Summary:
    """Write the messages of one batch, whose folder must not exist; return the summary for its manifest."""
    from pyspark.sql import functions as f

    frame = (frame if "day" in frame.columns else frame.withColumn("day", f.to_date("stored_at"))).persist()
    try:
        with microseconds(spark):
            writer = frame.write.option("compression", "zstd").partitionBy("day")
            writer.parquet(f"{path}/messages/batch={batch}")
        found = frame.groupBy("xiu_partition").agg(
            f.count("*"),
            f.min("seq"),
            f.max("seq"),
            f.sum(f.length("body")),
            digest(),
            f.unix_micros(f.min("stored_at")),
            f.unix_micros(f.max("stored_at")),
        )
        return {row[0]: tuple(row)[1:] for row in found.collect()}
    finally:
        frame.unpersist()


def write_manifest(spark: Any, ranges: Sequence[Range], summary: Summary, path: str, replaces: Collection[int] = ()) -> None:
    """Write the manifest of one batch, which counts from now on, instead of those that it replaces."""
    from pyspark.sql import functions as f

    nothing, others = (0, 0, 0, 0, 0, None, None), sorted(replaces) or None
    rows = [
        (each.partition, each.begin, each.end, each.after, each.cluster, *summary.get(each.partition, nothing), others)
        for each in ranges
    ]
    frame = spark.createDataFrame(rows, MANIFEST.replace("timestamp", "long"))
    for name in ("first_stored", "last_stored"):
        frame = frame.withColumn(name, f.timestamp_micros(name))
    frame.coalesce(1).write.json(f"{path}/manifest/batch={ranges[0].batch}")


def digest() -> Any:
    """The digest of all columns of messages, whatever their order. A null does not change it, so neither does a column that is
    added later."""
    from pyspark.sql import functions as f

    return f.bit_xor(f.xxhash64(*COLUMNS))


def batches_in(spark: Any, folder: str) -> set[int]:
    """The batches that have a subfolder in a folder."""
    names = (name.removeprefix("batch=") for name in names_in(spark, folder))
    return {int(name) for name in names if name.isdecimal()}


def manifests(spark: Any, path: str) -> Any:
    """The manifests of all batches that count, with their `batch`. Raises InvalidArgument if there is no archive."""
    from pyspark.sql import functions as f

    found = every_manifest(spark, path)  # its files are listed once
    return found.join(found.select(f.explode("replaces").alias("batch")), "batch", "left_anti")


def every_manifest(spark: Any, path: str) -> Any:
    """All manifests, those of replaced batches included. Raises InvalidArgument if there is no archive."""
    try:
        return spark.read.schema(f"{MANIFEST}, batch long").json(f"{path}/manifest")
    except Exception as error:
        raise InvalidArgument(f"{path} holds no archive: {sentence_of(error)}") from None


def ranges_of(spark: Any, path: str) -> list[Range]:
    """The ranges of positions that an archive has. Raises InvalidArgument, StoreDamaged."""
    found = manifests(spark, path).select("batch", "xiu_partition", "begin", "end", "after", "cluster").collect()
    for row in found:
        if None in row:
            raise StoreDamaged(f"{path}/manifest/batch={row.batch} cannot be read: bring it back, or remove it")
    return [Range(*row) for row in found]


def read_archive(spark: Any, path: str) -> Any:
    """The archived messages in the form of table `messages`, with `batch` and `day`. A batch that does not count is left out, and a
    column that a batch does not have is null. Raises InvalidArgument."""
    whole = manifests(spark, path).select("batch").distinct()
    return files_of(spark, path).join(whole, "batch", "left_semi")


def files_of(spark: Any, path: str, *, readable: bool = False) -> Any:
    """The messages of all files; `readable`: as far as they can be read. Raises InvalidArgument if there are none."""
    from pyspark.sql.types import DateType, LongType

    from pipeline.spark.schema import spark_schema

    schema = spark_schema(columns_of(MESSAGES, ())).add("batch", LongType()).add("day", DateType())
    reader = spark.read.schema(schema)
    if readable:
        reader = reader.option("ignoreCorruptFiles", "true").option("ignoreMissingFiles", "true")
    try:
        return reader.parquet(f"{path}/messages")
    except Exception as error:
        raise InvalidArgument(f"{path} holds no archive: {sentence_of(error)}") from None


def damaged(spark: Any, path: str, batches: Collection[int] | None = None) -> Section:
    """Find files that do not match the manifests, of these batches or of all; an unreadable file does not end the search. Raises
    InvalidArgument."""
    from pyspark.sql import functions as f

    wanted = manifests(spark, path)  # not cached: Spark would use the cached rows for the same path, whatever was written since
    if batches is not None:
        wanted = wanted.where(f.col("batch").isin(sorted(batches)))
    said = {(row.batch, row.xiu_partition): row for row in wanted.collect()}
    found: dict[tuple[int, int], tuple[int, int]] = {}
    numbers = sorted({batch for batch, _ in said})
    if numbers and batches_in(spark, f"{path}/messages"):
        files = files_of(spark, path, readable=True).where(f.col("batch").isin(numbers))
        counted = files.groupBy("batch", "xiu_partition").agg(f.count("*"), digest()).collect()
        found = {(row[0], row[1]): (row[2], row[3]) for row in counted}
    rows = []
    for key in sorted(said.keys() | found.keys(), key=lambda each: (each[0], -1 if each[1] is None else each[1])):
        row, (count, sums) = said.get(key), found.get(key, (0, 0))
        if row is None or row.xiu_partition is None or (row.rows, row.digest) != (count, sums):
            rows.append((*key, *((None, count, None, None) if row is None else (row.rows, count, row.first, row.last))))
    names = ("batch", "xiu_partition", "rows", "found", "first", "last")
    return Section("damaged", names, tuple(rows), len(rows))


def verify(spark: Any, path: str, batches: Collection[int] | None = None) -> Report:
    """Compare the files of these batches, or of all, with the manifests, and the manifests with one another. Raises
    InvalidArgument."""
    from pyspark.sql import functions as f

    wanted = manifests(spark, path).where("xiu_partition is not null")  # unreadable ones are damaged
    found = [Range(*row) for row in wanted.select("batch", "xiu_partition", "begin", "end", "after", "cluster").collect()]
    totals = wanted.agg(f.sum("rows"), f.sum("bytes"), f.countDistinct("batch")).first()
    report = Report("Archive", {"path": path, "messages": totals[0] or 0, "bytes": totals[1] or 0, "batches": totals[2]})
    report.facts["cluster"] = cluster_of(found, path)
    report.facts["unfinished"] = len(batches_in(spark, f"{path}/messages") - batches_in(spark, f"{path}/manifest"))
    reached = wanted.groupBy("xiu_partition").agg(
        f.sum("rows").alias("messages"),
        f.min("begin").alias("begin"),
        f.max("end").alias("end"),
        f.max("last_stored").alias("to"),
    )
    lacking = holes(found)
    columns = ("xiu_partition", "begin", "end", "what")
    rows = tuple((each.partition, each.begin, each.end, each.what) for each in lacking)
    report.sections += [
        section_of("archived", reached.orderBy("xiu_partition")),
        damaged(spark, path, batches),
        Section("holes", columns, rows, len(rows)),
    ]
    report.findings = report.sections[1].total + sum(each.what != GIVEN_UP for each in lacking)
    by_batch = wanted.groupBy("batch").agg(f.sum("rows")).orderBy(f.desc("batch")).limit(SHOWN_ROWS).collect()
    bars = tuple((when(row[0]), float(row[1] or 0)) for row in by_batch[::-1])
    report.bars.append(Bars("Newest batches", bars, "messages"))
    if report.findings:
        report.facts["advice"] = ADVICE
    return report


def run(spark: Any, options: ArchiveOptions) -> tuple[Report, dict[str, Any]]:
    """Archive messages stored until now, check them, then report the archive's content."""
    from pipeline.spark.source import PixiuStreamReader

    wanted = {
        "target": options.target, "startingOffsets": "earliest", "failOnDataLoss": "false", "reader": options.reader,
        "maxOffsetsPerTrigger": str(options.rows_per_batch),
    }  # fmt: skip
    source = PixiuStreamReader(read_options(wanted, streaming=True))
    storage = SparkStorage(spark, options)
    try:
        written = archive_new(source, storage, options, lambda: time.time_ns() // 1000)
    finally:
        source.stop()
    if not storage.sealed():
        return Report("Archive", {"path": options.path, "messages": 0}, [Section("archived", (), (), 0)]), {}
    report = verify(spark, options.path, written)
    report.facts["batches_written"] = len(written)
    return report, {}
