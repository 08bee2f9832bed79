"""Archive: stored mail as Parquet, by batch and day, each batch with a manifest that says what is in it.

    PATH/messages/batch=7/day=2026-11-22/part-….parquet
    PATH/manifest/batch=7/part-….json      rows, positions by partition, sums over IDs, headers and bodies
    PATH/_checkpoint                       where the next run goes on

A batch is written whole, again and again under its number until its manifest is there: a run that was killed leaves a batch
without a manifest, which no reader takes, and the next run writes it anew. PATH is a folder, or any file system that Spark
knows.

Source: docs/pipeline.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from pipeline.queries import run_to_end
from pipeline.reading import sentence_of
from pipeline.report import Report, Section, section_of
from pixiu.errors import DiskFailed, InvalidArgument, StoreDamaged
from pixiu.wire.export_tables import MESSAGES, TABLES

READER: Final = "archive"
"""By which retention knows who archives."""
ROWS_PER_BATCH: Final = 1_000_000
COLUMNS: Final = [name for name, _ in TABLES[MESSAGES]]
MANIFEST: Final = (
    "xiu_partition int, rows long, first long, last long, bytes long, digest long, first_stored timestamp, last_stored timestamp"
)


@dataclass(frozen=True, slots=True)
class ArchiveOptions:
    """What is archived where."""

    target: str
    path: str
    rows_per_batch: int = ROWS_PER_BATCH
    reader: str = READER


def summary(frame: Any) -> Any:
    """A manifest's rows: one a partition. The digest is of all that a message is, whatever the order of rows."""
    from pyspark.sql import functions as f

    return frame.groupBy("xiu_partition").agg(
        f.count("*").alias("rows"),
        f.min("seq").alias("first"),
        f.max("seq").alias("last"),
        f.sum(f.length("body")).alias("bytes"),
        f.bit_xor(f.xxhash64(*COLUMNS)).alias("digest"),
        f.min("stored_at").alias("first_stored"),
        f.max("stored_at").alias("last_stored"),
    )


def write_batch(frame: Any, batch_id: int, path: str) -> None:
    """One batch and then its manifest; written again it is the same."""
    from pyspark.sql import functions as f

    frame = frame.persist()
    try:
        folder = f"{path}/messages/batch={batch_id}"
        frame.withColumn("day", f.to_date("stored_at")).write.mode("overwrite").partitionBy("day").parquet(folder)
        summary(frame).coalesce(1).write.mode("overwrite").json(f"{path}/manifest/batch={batch_id}")
    finally:
        frame.unpersist()


def manifests(spark: Any, path: str) -> Any:
    """All manifests, with their `batch`. Raises InvalidArgument where there is no archive."""
    try:
        return spark.read.schema(f"{MANIFEST}, batch long").json(f"{path}/manifest")
    except Exception as error:
        raise InvalidArgument(f"{path} holds no archive: {sentence_of(error)}") from None


def read_archive(spark: Any, path: str) -> Any:
    """What is archived, as table `messages` has it, with `batch` and `day`. A batch without a manifest is left out. Raises
    InvalidArgument."""
    whole = manifests(spark, path).select("batch").distinct()
    try:
        found = spark.read.parquet(f"{path}/messages")
    except Exception as error:
        raise InvalidArgument(f"{path} holds no archive: {sentence_of(error)}") from None
    missing = [name for name in (*COLUMNS, "batch", "day") if name not in found.columns]
    if missing:
        raise InvalidArgument(f"{path} is an archive of another schema: it has no column {missing[0]!r}")
    return found.join(whole, "batch", "left_semi")


def verify(spark: Any, path: str) -> Report:
    """Compare what is archived with what the manifests say. Raises InvalidArgument, StoreDamaged for a file that cannot be read."""
    from pyspark.sql import functions as f

    wanted = manifests(spark, path)  # not kept: Spark would take what is kept for the same path, whatever was written since
    keys = ["batch", "xiu_partition"]
    try:
        frame = read_archive(spark, path)
        counted = frame.groupBy(*keys).agg(f.count("*").alias("found"), f.bit_xor(f.xxhash64(*COLUMNS)).alias("found_digest"))
        found = spark.createDataFrame(counted.collect(), counted.schema)  # read once: a row a batch and partition
    except InvalidArgument:
        raise
    except Exception as error:
        raise StoreDamaged(f"the archive in {path} cannot be read: {sentence_of(error)}; archive into another folder") from None
    wrong = (
        wanted.join(found, keys, "full")
        .where(~f.col("rows").eqNullSafe(f.col("found")) | ~f.col("digest").eqNullSafe(f.col("found_digest")))
        .select(*keys, "rows", "found", "first", "last")
    )
    totals = wanted.agg(f.sum("rows"), f.sum("bytes"), f.countDistinct("batch")).first()
    report = Report("Archive", {"path": path, "messages": totals[0] or 0, "bytes": totals[1] or 0, "batches": totals[2]})
    reach = wanted.groupBy("xiu_partition").agg(
        f.sum("rows").alias("messages"),
        f.min("first").alias("first"),
        f.max("last").alias("last"),
        f.max("last_stored").alias("to"),
    )
    report.sections += [section_of("archived", reach.orderBy("xiu_partition")), section_of("damaged", wrong)]
    report.findings = report.sections[-1].total
    return report


def run(spark: Any, options: ArchiveOptions) -> tuple[Report, dict[str, Any]]:
    """Archive what is new until now, then say what the archive holds."""
    source = spark.readStream.format("pixiu").option("target", options.target).option("startingOffsets", "earliest")
    source = source.option("maxOffsetsPerTrigger", options.rows_per_batch).option("reader", options.reader)
    written: list[int] = []

    def write(frame: Any, batch_id: int) -> None:
        write_batch(frame, batch_id, options.path)
        written.append(batch_id)

    stream = source.load().writeStream.foreachBatch(write).option("checkpointLocation", f"{options.path}/_checkpoint")
    query = run_to_end(stream.trigger(availableNow=True).start)[-1]
    if query.exception() is not None:
        raise DiskFailed(f"the archive is not complete: {sentence_of(query.exception())}")
    if not written and not _exists(spark, options.path):
        return Report("Archive", {"path": options.path, "messages": 0}, [Section("archived", (), (), 0)]), {}
    report = verify(spark, options.path)
    report.facts["batches_written"] = len(written)
    return report, {}


def _exists(spark: Any, path: str) -> bool:
    try:
        manifests(spark, path).limit(1).count()
    except InvalidArgument:
        return False
    return True
