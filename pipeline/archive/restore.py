"""Restore: an archive's Parquet back into partitions of Xiu that lost their storage, under the messages' former MsgIDs.

    archive ──▶ checked ──▶ rows of a partition, in order ──▶ blocks ──▶ the leader ──▶ the replicated log

One task per partition, partitions one after the other. An interrupted restore continues when it is run again: the partition knows
what it has.

Source: docs/pipeline.md, docs/stores.md, "Restore".
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage

from pipeline.archive.archive import COLUMNS, ranges_of, read_archive, verify
from pipeline.archive.coverage import check_cluster, cluster_of, reach
from pipeline.report import Report, section_of
from pipeline.spark.leader import Leader
from pipeline.spark.replicas import Replicas
from pixiu.errors import InvalidArgument, StoreDamaged
from pixiu.ids import MSG_COUNTER_BITS
from pixiu.wire.record import HEADER, HEADER_SIZE, MAIL, SIZE_FIELD, STAMP_SIZE, Flag
from pixiu.wire.v1 import xiu_pb2

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

CALL_BYTES: Final = 1 << 20
"""Size limit of the records in one call; a single record may have this size."""
BLOCK_RECORDS: Final = 4096
BLOCK_BYTES: Final = 1 << 18
_TRACE: Final = struct.Struct("<B")
FORMAT: Final = "pixiu-restore"
Row = tuple[int, int, bytes]
"""Partition_Msg_ID, the time it was stored in Unix µs, the record."""


@dataclass(frozen=True, slots=True)
class RestoreOptions:
    """The archive and the target of a restore, and settings."""

    target: str
    path: str
    partitions: tuple[int, ...] = ()
    """Of Xiu; empty: all that the archive has."""
    operator: str = ""
    reason: str = ""
    """Both go into the leaders' audit logs."""
    retry_s: float = 60.0
    """Time limit for finding a leader, seconds."""
    cluster: str = ""
    """Cluster of the archive, if it differs from the target's: the registry was lost and created again. Empty: the same."""

    def leader(self, partition: int) -> Leader:
        """Make a client of a partition's leader, in the operator's name."""
        return Leader(self.target, partition, self.operator, self.reason, self.retry_s)


def rows_of(batch: pa.RecordBatch) -> Iterator[Row]:
    """Rebuild the records of an archive's rows, byte for byte as they were stored."""
    import pyarrow as pa

    stored = batch.column("stored_at").cast(pa.timestamp("us", "UTC")).cast(pa.int64()).to_pylist()
    names = ("seq", "type", "flags", "lifetime_min", "snowflake_id", "key", "sender", "ext", "body", "trace")
    columns = [batch.column(name).to_pylist() for name in names]
    pack, fixed = HEADER.pack, HEADER_SIZE - SIZE_FIELD
    for at_us, seq, type_, flags, lifetime, snowflake, key, sender, ext, body, trace in zip(stored, *columns, strict=True):
        trailer = trace + _TRACE.pack(len(trace) // STAMP_SIZE) if flags & Flag.TRACED else b""
        size = fixed + len(ext) + len(body) + len(trailer)
        crc = crc32(body, crc32(ext))
        head = pack(size, MAIL, flags, type_, 1 if ext else 0, len(ext), lifetime, crc, snowflake, key, sender)
        yield seq, at_us, b"".join((head, ext, body, trailer))


def blocks_of(rows: Iterable[Row]) -> Iterator[xiu_pb2.RestoredBlock]:
    """Join rows in order to blocks: consecutive records stored at one time."""
    first, at_us, size = 0, 0, 0
    records: list[bytes] = []

    def block() -> xiu_pb2.RestoredBlock:
        return xiu_pb2.RestoredBlock(sequence=first, count=len(records), at_us=at_us, batch=b"".join(records))

    for seq, stored_us, record in rows:
        follows = seq == first + len(records) and seq >> MSG_COUNTER_BITS == first >> MSG_COUNTER_BITS and stored_us == at_us
        if records and not (follows and len(records) < BLOCK_RECORDS and size + len(record) <= BLOCK_BYTES):
            yield block()
            records.clear()
        if not records:
            first, at_us, size = seq, stored_us, 0
        records.append(record)
        size += len(record)
    if records:
        yield block()


class RestoreWriter(DataSourceArrowWriter):
    """Stores the rows of one partition, in order; a retried task continues.

    Args:
        options: of the restore.
        partition: of Xiu.
    """

    def __init__(self, options: RestoreOptions, partition: int) -> None:
        self._options, self._partition = options, partition

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Store the rows. Raises PixiuError."""
        together: list[xiu_pb2.RestoredBlock] = []
        waiting = 0
        with self._options.leader(self._partition) as leader:
            there = leader.begin()
            rows = (row for batch in iterator for row in rows_of(batch) if row[0] > there.restored)
            for block in blocks_of(rows):
                if together and waiting + len(block.batch) > CALL_BYTES:
                    leader.store(together)
                    together, waiting = [], 0
                together.append(block)
                waiting += len(block.batch)
            if together:
                leader.store(together)
        return WriterCommitMessage()


class RestoreSink(DataSource):
    """The write format of a restore: Spark passes Arrow data only to such formats, unless pandas is installed."""

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return FORMAT

    def writer(self, schema: StructType, overwrite: bool) -> RestoreWriter:
        """Make the writer of `df.write`."""
        given = {name.lower(): value for name, value in self.options.items()}
        options = RestoreOptions(given["target"], "", (), given["operator"], given["reason"], float(given["retry_s"]))
        return RestoreWriter(options, int(given["partition"]))


def restore_partition(spark: Any, frame: Any, options: RestoreOptions, partition: int) -> tuple[int, ...]:
    """Restore one partition from the archive's rows; return a row of the report. Raises PixiuError, errors of Spark."""
    from pyspark.sql import functions as f

    began = time.monotonic()
    of_partition = frame.where(f.col("xiu_partition") == partition).select(*COLUMNS)
    with options.leader(partition) as leader:
        there = leader.begin()
        missing = (f.col("seq") < there.below) & (f.col("seq") >= max(there.floor, there.restored + 1))
        wanted = of_partition.where(missing)
        messages, size = wanted.agg(f.count("*"), f.coalesce(f.sum(f.length("body")), f.lit(0))).first()
        writer = wanted.coalesce(1).sortWithinPartitions("seq").write.format(FORMAT).mode("append")
        settings = {"target": options.target, "operator": options.operator, "reason": options.reason}
        writer.options(**settings, partition=partition, retry_s=options.retry_s).save()
        last = leader.begin().restored
        leader.end()
    return partition, messages, of_partition.count() - messages, size, last, round(time.monotonic() - began)


def run(spark: Any, options: RestoreOptions) -> tuple[Report, dict[str, Any]]:
    """Check the archive, then restore the partitions one after the other. Raises InvalidArgument, StoreDamaged, PixiuError."""
    ranges = ranges_of(spark, options.path)
    with Replicas(options.target, "xiu", retry_s=options.retry_s) as replicas:
        replicas.find()
        replicas.bounds(0)  # returns the cluster's ID, if no registry did
        made = cluster_of(ranges, options.path)
        try:
            check_cluster(options.path, made, options.target, options.cluster or replicas.cluster)
        except InvalidArgument as other:
            raise InvalidArgument(f"{other}; `--cluster {made}` restores it anyway, where the registry was lost") from None
    checked = verify(spark, options.path)
    if checked.findings:
        raise StoreDamaged(
            f"the archive in {options.path} is damaged in {checked.findings} places, and nothing was restored: "
            f"`pixiu pipeline archive {options.path} --verify` names them"
        )
    found = sorted(reach(ranges))
    missing = sorted(set(options.partitions) - set(found))
    if missing:
        raise InvalidArgument(f"the archive in {options.path} has nothing of partition {missing[0]}; it has {found}")
    frame = read_archive(spark, options.path)
    spark.dataSource.register(RestoreSink)
    rows = [restore_partition(spark, frame, options, partition) for partition in options.partitions or found]
    names = "xiu_partition int, messages long, there_already long, bytes long, last long, seconds long"
    table = spark.createDataFrame(rows, names)
    report = Report("Restore", {"path": options.path, "messages": sum(row[1] for row in rows)}, [section_of("restored", table)])
    return report, {}
