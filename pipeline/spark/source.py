"""Reads of a cluster's stores: batches, and streams of mail by Xiu partition and position.

    driver     initialOffset, latestOffset ──▶ Bounds of every partition ──▶ offsets, within the trigger's limit
    executors  a task for each range ──▶ Rows, from any replica that serves ──▶ Arrow record batches, untouched

`pushFilters` is not implemented, and must not be: Spark 4.3 keeps pushed filters on the source object that all scans of a DataFrame
share, and returns wrong rows silently. Filters are options.

Source: docs/pipeline.md.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from pipeline.spark.headers import HEADERS, shipped, with_headers
from pipeline.spark.offsets import (
    EARLIEST,
    LATEST,
    Offsets,
    Wanted,
    cluster_of,
    from_json,
    none_since,
    other_cluster,
    share_bytes,
    share_out,
    to_json,
)
from pipeline.spark.options import ReadOptions
from pipeline.spark.replicas import Addresses, Replicas, Rows
from pipeline.spark.schema import spark_schema
from pixiu.errors import Gone, InvalidArgument, PixiuError
from pixiu.ids import MAX_MSG_SEQUENCE
from pixiu.wire.export_tables import MESSAGES, columns_of

if TYPE_CHECKING:
    import pyarrow as pa

    from pixiu.wire.v1 import export_pb2

REFRESH_S: Final = 5.0
"""Interval at which a stream looks for new replicas and partitions, seconds; after failures it looks at once."""
LOG: Final = logging.getLogger("pixiu.pipeline")


def with_schema(options: ReadOptions, schema: StructType) -> ReadOptions:
    """Apply the columns of `.schema("seq long, body binary")`; without a schema Spark passes the source's own. Raises
    InvalidArgument for columns that the table does not have in this form, before anything is read."""
    own = [name for name, _ in options.columns]
    headers = options.headers and HEADERS in schema.names
    names = [name for name in schema.names if name != HEADERS] if headers else schema.names
    if headers and schema.names[-1] != HEADERS:
        raise InvalidArgument(f"column {HEADERS!r} is the last one: put it at the end of the schema")
    if names == own:
        chosen = options.columns
    elif own != [name for name, _ in columns_of(options.table, ())]:
        raise InvalidArgument(f"give a schema or option columns: one names {', '.join(schema.names)}, the other {', '.join(own)}")
    else:
        chosen = columns_of(options.table, names) if names else ()
    for given, field in zip(schema.fields, spark_schema(chosen, headers=headers).fields, strict=True):
        if given.dataType != field.dataType:
            is_, said = field.dataType.simpleString(), given.dataType.simpleString()
            raise InvalidArgument(f"column {field.name!r} of table {options.table} is {is_}, and the schema says {said}")
    return replace(options, columns=chosen, headers=headers)


class RowsPartition(InputPartition):
    """One task's rows, and the addresses of the replicas when it was planned."""

    def __init__(self, rows: Rows, addresses: tuple[str, ...]) -> None:
        super().__init__((rows, addresses))
        self.rows, self.addresses = rows, addresses


def read_partition(options: ReadOptions, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """Run a task: yield record batches as they come."""
    if not isinstance(partition, RowsPartition):
        return  # Spark reads InputPartition(None) if there is nothing to read
    rows = partition.rows
    known: Addresses = {rows.partition: partition.addresses}
    with Replicas(options.target, options.role, known, options.retry_s) as replicas:
        try:
            for batch in replicas.read(rows):
                yield with_headers(batch, options.columns) if options.headers else batch
        except Gone as gone:
            raise data_loss(rows.partition, str(gone)) from None


def data_loss(partition: int, text: str) -> Gone:
    """Make the error that `failOnDataLoss` controls."""
    return Gone(
        f"Xiu partition {partition}: {text}; rows are lost to this query: set failOnDataLoss=false to go on without them, "
        "or begin again at startingOffsets=earliest"
    )


class Planner:
    """Turns requested positions into real ones, for batch and streaming reads."""

    def __init__(self, options: ReadOptions, replicas: Replicas) -> None:
        self.options, self.replicas = options, replicas

    def partitions(self) -> list[int]:
        """The partitions to read. Raises errors of `Replicas.find`; InvalidArgument for one that does not exist."""
        count = self.replicas.find(REFRESH_S)
        wanted = self.options.partitions
        if wanted and max(wanted) >= count:
            raise InvalidArgument(f"option partitions names {max(wanted)}; the cluster has {self.options.role} 0 to {count - 1}")
        return sorted(wanted) if wanted else list(range(count))

    def check_named(self, count: int) -> None:
        """Raise InvalidArgument if an option has a position or a time for a partition that does not exist."""
        for end, wanted in (("starting", self.options.starting), ("ending", self.options.ending)):
            if max(wanted.named, default=0) >= count:
                raise InvalidArgument(f"the {end} offsets name Xiu partition {max(wanted.named)}; the cluster has 0 to {count - 1}")

    def check_cluster(self, offset: Mapping[str, object]) -> None:
        """Raise InvalidArgument if an offset belongs to another cluster. Call this after a replica has answered."""
        made, here = cluster_of(offset), self.replicas.cluster
        if made != here:
            raise other_cluster(made, self.options.target, here)

    def _position(self, partition: int, wanted: Wanted, bounds: export_pb2.BoundsReply) -> int:
        position = wanted.of(partition)
        if position == EARLIEST:
            return int(bounds.first)
        return int(bounds.end) if position == LATEST else position

    def start(self, partition: int, bounds: export_pb2.BoundsReply) -> int:
        """The first position of a query. Raises InvalidArgument for one that was not written yet, Gone."""
        at_ms = self.options.starting.at_ms(partition)
        if at_ms:
            found = self.replicas.bounds(partition, at_us=at_ms * 1000)
            if found.at >= found.end and not self.options.latest_if_none:
                raise none_since(f"Xiu partition {partition}", at_ms)
            return self.begin(partition, found.at, bounds)
        position = self._position(partition, self.options.starting, bounds)
        self._check_written("startingOffsets", partition, position, bounds)
        return self.begin(partition, position, bounds)

    @staticmethod
    def _check_written(option: str, partition: int, position: int, bounds: export_pb2.BoundsReply) -> None:
        if position > bounds.end and bounds.leads:
            raise InvalidArgument(
                f"option {option} names position {position} of Xiu partition {partition}, which ends at {bounds.end}"
            )

    def begin(self, partition: int, position: int, bounds: export_pb2.BoundsReply) -> int:
        """The begin of a read. Raises Gone if retention has passed it and `failOnDataLoss` is set; position 0 counts, too."""
        if position >= bounds.first:
            return position
        if self.options.fail_on_data_loss:
            raise data_loss(partition, f"retention has passed position {position}; the first that is stored is {bounds.first}")
        LOG.warning("partition %d: positions %d to %d were trimmed and are not read", partition, position, bounds.first - 1)
        return int(bounds.first)

    def end(self, partition: int, bounds: export_pb2.BoundsReply) -> int:
        """The end of a batch. Raises InvalidArgument for a position that was not written yet."""
        at_ms = self.options.ending.at_ms(partition)
        if at_ms:
            return int(self.replicas.bounds(partition, at_us=at_ms * 1000).at)
        end = self._position(partition, self.options.ending, bounds)
        self._check_written("endingOffsets", partition, end, bounds)
        return end  # if the leader does not answer, a task waits for a replica that has it

    def tasks(self, begins: Offsets, ends: Offsets) -> list[RowsPartition]:
        """Make tasks of ranges: one for each partition, or `minPartitions` in all, and none of more than
        `maxRecordsPerPartition`."""
        found: list[RowsPartition] = []
        ranges = [(partition, begins[partition], end) for partition, end in sorted(ends.items()) if begins[partition] < end]
        tasks = -(-self.options.limits.min_partitions // len(ranges)) if ranges else 1
        columns = shipped(self.options.columns) if self.options.headers else self.options.columns
        for partition, begin, end in ranges:
            for low, high in self._cut(partition, begin, end, tasks):
                rows = Rows(partition, MESSAGES, columns, self.options.users, low, high)
                found.append(RowsPartition(rows, self.replicas.addresses.get(partition, ())))
        return found

    def _cut(self, partition: int, begin: int, end: int, tasks: int) -> Iterator[tuple[int, int]]:
        limits = self.options.limits
        if tasks > 1 or limits.max_rows_of_task:
            rows = int(self.replicas.bounds(partition, begin, end).rows)
            pieces = limits.pieces(rows, tasks)
            each = -(-rows // pieces)
            while each and pieces > 1:
                behind = self.replicas.bounds(partition, begin, end, each).advanced
                if not begin < behind < end:
                    break
                yield begin, behind
                begin, pieces = behind, pieces - 1
        yield begin, end


class PixiuReader(DataSourceReader):
    """A batch read. Its end is fixed when the query is planned: later messages are not in it."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        """Plan the tasks."""
        options = self._options
        with Replicas(options.target, options.role, retry_s=options.retry_s) as replicas:
            planner = Planner(options, replicas)
            wanted = planner.partitions()
            if options.table != MESSAGES:
                return self._of_pi(replicas, wanted)
            planner.check_named(replicas.count)
            begins: Offsets = {}
            ends: Offsets = {}
            for partition in wanted:
                bounds = replicas.bounds(partition)
                ends[partition] = planner.end(partition, bounds)
                begins[partition] = planner.start(partition, bounds)
            return planner.tasks(begins, ends)

    def _of_pi(self, replicas: Replicas, wanted: Sequence[int]) -> list[RowsPartition]:
        """Plan a task for each partition, or for each that has one of the users."""
        options, count, found = self._options, replicas.count, list[RowsPartition]()
        for partition in wanted:
            users = tuple(uin for uin in options.users if uin % count == partition)
            if options.users and not users:
                continue
            applied = replicas.bounds(partition).applied
            rows = Rows(partition, options.table, options.columns, users, applied=applied)
            found.append(RowsPartition(rows, replicas.addresses.get(partition, ())))
        return found

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Run one task."""
        return read_partition(self._options, partition)


class PixiuStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A streaming read: offsets are the next positions to read."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._replicas: Replicas | None = None
        self._target: Offsets | None = None
        """With `Trigger.AvailableNow`: the end of the query."""
        self._planned: Offsets = {}
        """The end of the newest micro-batch."""
        self._taken_at = -math.inf
        """Monotonic time of the last micro-batch; the first one does not wait."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_replicas": None}

    def _planner(self) -> Planner:
        if self._replicas is None:
            self._replicas = Replicas(self._options.target, self._options.role, retry_s=self._options.retry_s)
        return Planner(self._options, self._replicas)

    @property
    def cluster(self) -> str:
        """The cluster of the messages, once a replica or the registry has reported it."""
        return self._planner().replicas.cluster

    def initialOffset(self) -> dict[str, int | str]:
        """The first offset of a query without a checkpoint."""
        planner, found = self._planner(), Offsets()
        wanted = planner.partitions()
        planner.check_named(planner.replicas.count)
        for partition in wanted:
            found[partition] = planner.start(partition, planner.replicas.bounds(partition))
        self._hold(planner, found)
        return to_json(found, planner.replicas.cluster)

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit by `maxOffsetsPerTrigger` or `maxBytesPerTrigger`."""
        return self._options.limits.read_limit

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the query's end at the partitions' current ends."""
        self._target = self._ends(self._planner())

    def _ends(self, planner: Planner) -> Offsets:
        return {partition: int(planner.replicas.bounds(partition).end) for partition in planner.partitions()}

    def latestOffset(self, start: Mapping[str, object], limit: ReadLimit) -> dict[str, int | str]:
        """The end of the next micro-batch."""
        planner, begins = self._planner(), from_json(start)
        wanted = planner.partitions() if self._target is None else sorted(self._target)
        ends: Offsets = dict(begins)
        rows: dict[int, int] = {}
        for partition in wanted:
            begin = begins.get(partition, 0)
            target = MAX_MSG_SEQUENCE if self._target is None else self._target[partition]
            bounds = planner.replicas.bounds(partition, begin, target)
            planner.check_cluster(start)
            if begin > bounds.end and bounds.leads:
                raise InvalidArgument(
                    f"the checkpoint is at position {begin} of Xiu partition {partition}, and the cluster ends at {bounds.end}: "
                    "messages that were read are no longer stored: restore the partition from an archive, or use another "
                    "checkpointLocation"
                )
            ends[partition] = max(begin, min(bounds.end, target))
            rows[partition] = bounds.rows
        now, total, limits = time.monotonic(), sum(rows.values()), self._options.limits
        if self._target is None and limits.waits(total, now - self._taken_at):
            ends = dict(begins)
        else:
            self._limit(planner, begins, ends, rows, *limits.within(limit))
        if total and ends != begins:
            self._taken_at = now
        self._planned = ends
        return to_json(ends, planner.replicas.cluster)

    @staticmethod
    def _limit(
        planner: Planner, begins: Offsets, ends: Offsets, rows: Mapping[int, int], max_rows: int, max_bytes: int
    ) -> None:  # fmt: skip
        """Move the ends of a micro-batch back by the trigger's limits of rows and of bytes."""
        bounds = planner.replicas.bounds
        shares = share_out(max_rows, rows) if max_rows else dict(rows)
        for partition, share in shares.items():
            begin = begins.get(partition, 0)
            if rows[partition] > share:
                ends[partition] = int(bounds(partition, begin, ends[partition], share).advanced) if share else begin

        def take(partition: int, most: int) -> int:
            reply = bounds(partition, begins.get(partition, 0), ends[partition], limit_bytes=most)
            ends[partition] = int(reply.advanced)
            return int(reply.bytes)

        if max_bytes:
            share_bytes(max_bytes, shares, take)

    def reportLatestOffset(self) -> dict[str, int | str]:
        """The newest offset, for the query's progress; `rows_behind`, the number of rows after the newest micro-batch, and
        `bytes_behind`, their size. Positions alone do not show it: they jump with every epoch."""
        planner, ends, rows, size = self._planner(), dict[int, int](), 0, 0
        for partition in planner.partitions():
            bounds = planner.replicas.bounds(partition, self._planned.get(partition, 0), sizes=True)
            ends[partition] = int(bounds.end)
            rows, size = rows + bounds.rows, size + bounds.bytes
        return to_json(ends, planner.replicas.cluster) | {"rows_behind": rows, "bytes_behind": size}

    def partitions(self, start: Mapping[str, object], end: Mapping[str, object]) -> Sequence[InputPartition]:
        """Plan the tasks of a micro-batch."""
        begins = self.begins(start, end)
        return self._planner().tasks(begins, from_json(end))

    def begins(self, start: Mapping[str, object], end: Mapping[str, object]) -> Offsets:
        """The begin of a micro-batch in each partition; 0 in those that a doubling added. Raises Gone."""
        planner, begins = self._planner(), from_json(start)
        if not planner.replicas.addresses:
            planner.partitions()
        found: Offsets = {}
        for partition, behind in from_json(end).items():
            begin = begins.get(partition, 0)
            found[partition] = begin
            if begin < behind:
                bounds = planner.replicas.bounds(partition)
                planner.check_cluster(end)
                found[partition] = planner.begin(partition, begin, bounds)
        return found

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Run one task."""
        return read_partition(self._options, partition)

    def commit(self, end: Mapping[str, object]) -> None:
        """Report that everything before this was processed: retention need not wait for it. It lags a batch behind, which is
        safe."""
        self._hold(self._planner(), from_json(end))

    def _hold(self, planner: Planner, offsets: Offsets) -> None:
        """Report this reader's positions to every partition: 0, for everything, to those that the offsets do not name yet."""
        reader = self._options.reader
        if not reader:
            return
        try:
            partitions = planner.partitions()
        except PixiuError as problem:
            LOG.warning("partitions that were added are not held for reader %s: %s", reader, problem)
            partitions = []
        for partition in sorted({*partitions, *offsets}):
            try:
                planner.replicas.hold(partition, reader, offsets.get(partition, 0))
            except PixiuError as problem:
                LOG.warning("retention does not wait for reader %s in Xiu partition %d: %s", reader, partition, problem)

    def stop(self) -> None:
        """Close the connections at the end of the query."""
        if self._replicas is not None:
            self._replicas.close()
            self._replicas = None
