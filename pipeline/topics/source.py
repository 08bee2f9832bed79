"""Reads of a topic: batches, and streams whose offsets are places in the topic's parts.

    driver     Describe, bounds of parts ──▶ `lineage`: what comes next, within the trigger's limit ──▶ a task for each range
    executors  the object store, or Read, a mebibyte of blocks each ──▶ Arrow record batches ──▶ Spark

Source: docs/pipeline.md, "Topics".
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Self

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from pipeline.spark.offsets import none_since, other_cluster
from pipeline.topics.client import Known, TopicClient, parts_of
from pipeline.topics.columns import columns_of, record_batch, spark_schema
from pipeline.topics.lineage import Bounds, Node, Parts, Place
from pipeline.topics.objects import AWAY, Manifests, pieces, read_object
from pipeline.topics.options import ReadOptions, read_options
from pixiu.errors import Gone, InvalidArgument
from pixiu.objects.manifest import StoredObject
from pixiu.wire.v1 import topic_pb2

if TYPE_CHECKING:
    import pyarrow as pa

DESCRIBED_S: Final = 1.0
"""Time for which a stream plans with a description, seconds: Spark asks for new rows a hundred times a second."""
LOG: Final = logging.getLogger("pixiu.pipeline")


def options_of(options: Mapping[str, str], schema: StructType, *, streaming: bool) -> ReadOptions:
    """Check the options of a read, with the columns of `.schema("offset long, body binary")`; without it Spark passes the source's
    own. Raises InvalidArgument for columns that a topic does not have in this form, before anything is read."""
    columns = columns_of(schema.names)
    for given, field in zip(schema.fields, spark_schema(columns).fields, strict=True):
        if given.dataType != field.dataType:
            is_, said = field.dataType.simpleString(), given.dataType.simpleString()
            raise InvalidArgument(f"column {field.name!r} of a topic is {is_}, and the schema says {said}")
    return replace(read_options(options, streaming=streaming), columns=columns)


class BlocksPartition(InputPartition):
    """One task's offsets of a part, and what the driver knows of the topic."""

    def __init__(
        self, part: int, group: int, begin: int, end: int, known: Known, objects: Sequence[StoredObject] = ()
    ) -> None:  # fmt: skip
        super().__init__((part, group, begin, end, known, objects))
        self.part, self.group, self.begin, self.end, self.known = part, group, begin, end, known
        self.objects = objects
        """Objects of the store that have some of them, rising."""


def read_partition(options: ReadOptions, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """Run a task: yield record batches as they come. Raises Gone for what is missing, unless it may be."""
    if not isinstance(partition, BlocksPartition):
        return  # Spark reads InputPartition(None) if there is nothing to read
    part = partition.part
    with TopicClient(options.target, options.topic, options.retry_s, partition.known) as topic:
        for begin, end, found in pieces(partition.begin, partition.end, partition.objects):
            blocks = list[bytes]()
            if found is not None:
                try:
                    blocks = read_object(topic.id, part, found)
                except AWAY as problem:
                    LOG.warning("offsets %d to %d of part %d are read from the leader: %s", begin, end - 1, part, problem)
            if blocks:
                yield from (batch for data in blocks if (batch := record_batch(data, part, options.columns, begin, end)).num_rows)
            else:
                yield from _from_leader(options, topic, partition, begin, end)


def _from_leader(
    options: ReadOptions, topic: TopicClient, partition: BlocksPartition, begin: int, end: int
) -> Iterator[pa.RecordBatch]:
    part = partition.part
    for reply in topic.read(part, partition.group, begin, end):
        if reply.blocks:
            batch = record_batch(reply.blocks, part, options.columns, begin, end)
            if batch.num_rows:
                yield batch
        if reply.gap_high and max(reply.gap_low, begin) < end:
            lose(options, part, max(reply.gap_low, begin), min(reply.gap_high, end))


def lose(options: ReadOptions, part: int, low: int, high: int) -> int:
    """Offsets [low, high) are missing; high -1: it is not known how many. Returns their number; raises Gone if that ends the
    query."""
    rows = f"{high - low} rows, offsets {low} to {high - 1}," if high > 0 else f"offsets from {low} on"
    if options.fail_on_data_loss:
        raise Gone(
            f"part {part} of topic {options.topic}: {rows} were dropped by retention, or no replica can read them; rows are lost "
            "to this query: set failOnDataLoss=false to go on without them, or begin again at startingOffsets=earliest"
        )
    LOG.warning("part %d of topic %s: %s are lost and not read", part, options.topic, rows)
    return max(0, high - low)


class Planner:
    """A topic as it is at one moment, for a plan.

    Args:
        topic: its client.
        place: that was seen before, of the same topic.
        only: parts that count; None: all.
        manifests: those that earlier plans have read.
    """

    def __init__(
        self, options: ReadOptions, topic: TopicClient, place: Place | None = None, only: frozenset[int] | None = None,
        manifests: Manifests | None = None,
    ) -> None:  # fmt: skip
        self.options, self._topic = options, topic
        self._manifests = manifests or Manifests()
        self.lost = 0
        """Rows that are missing in the plan, as far as their number is known."""
        self.description = topic.describe(0, DESCRIBED_S)
        if place is not None:
            self._check(place)  # first: another topic may never have a version as high as this one's
            self.description = topic.describe(place.version, DESCRIBED_S)
        self._stores: dict[int, topic_pb2.TopicStore] = {}
        """Number of a part → where its closed segments are."""
        self._groups = {part.number: part.group for part in parts_of(self.description) if only is None or part.number in only}
        nodes = {each.number: Node(each.number, each.parents) for each in parts_of(self.description) if each.number in self._groups}
        self.parts = Parts(nodes, self._look)

    def _look(self, part: int) -> Bounds:
        reply = self._topic.look(part, self._groups[part])
        if reply.HasField("store") and self.options.from_store:
            self._stores[part] = reply.store
        return Bounds(reply.first, reply.committed_end, reply.sealed, reply.mean_bytes)

    def starting(self, part: int) -> int:
        """The first offset of a part by time. Raises InvalidArgument if there is none and `startingOffsetsByTimestampStrategy` is
        `error`."""
        at_us = self.options.starting.at_us(part)
        found, bounds = self._topic.offset_at(part, self._groups[part], at_us), self.parts.bounds(part)
        if found >= bounds.end and not bounds.sealed and not self.options.latest_if_none:
            raise none_since(f"part {part} of topic {self.options.topic}", at_us // 1000)
        return found

    def ending(self, part: int) -> int:
        """The end of a part by time."""
        return self._topic.offset_at(part, self._groups[part], self.options.ending.at_us(part))

    def placed(self, place: Place) -> Place:
        """A place with the IDs of this topic and its cluster."""
        return replace(place, version=self.description.version, topic=self.description.topic, cluster=self._topic.cluster)

    def _check(self, place: Place) -> None:
        """Raise InvalidArgument if a place is in another topic or cluster."""
        if place.cluster != self._topic.cluster:
            raise other_cluster(place.cluster, self.options.target, self._topic.cluster)
        if place.topic != self.description.topic:
            raise InvalidArgument(
                f"the checkpoint is of topic {place.topic}, and {self.options.topic} is topic {self.description.topic}: use "
                "another checkpointLocation, or the topic of this one; what was deleted and created again has another ID"
            )

    def tasks(self, ranges: Mapping[int, tuple[int, int]]) -> list[BlocksPartition]:
        """Make tasks of offsets by part: one for each part, or `minPartitions` in all. Raises Gone."""
        found, kept = list[BlocksPartition](), list[tuple[int, int, int]]()
        for part, (begin, end) in sorted(ranges.items()):
            if begin < end:
                first = self.parts.bounds(part).first if part in self._groups else end
                if begin < first:
                    self.lost += lose(self.options, part, begin, min(first, end))
                if max(begin, first) < end:
                    kept.append((part, max(begin, first), end))
        total, limits = sum(end - begin for _, begin, end in kept), self.options.limits
        for part, begin, end in kept:
            pieces = min(end - begin, limits.pieces(end - begin, -(-limits.min_partitions * (end - begin) // total)))
            cuts = [begin + (end - begin) * piece // pieces for piece in range(pieces + 1)]
            group = self._groups[part]
            known = self._topic.known(group)
            found += [
                BlocksPartition(part, group, low, high, known, self._objects(part, low, high))
                for low, high in itertools.pairwise(cuts)
            ]
        return found

    def _objects(self, part: int, begin: int, end: int) -> Sequence[StoredObject]:
        store = self._stores.get(part)
        return self._manifests.objects(self.description.topic, part, store, begin, end) if store is not None else ()


class TopicReader(DataSourceReader):
    """A batch read. Its end is fixed when the query is planned: later messages are not in it."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options

    @classmethod
    def of(cls, options: Mapping[str, str], schema: StructType) -> Self:
        """Make one from a user's options. Raises InvalidArgument."""
        return cls(options_of(options, schema, streaming=False))

    def partitions(self) -> Sequence[InputPartition]:
        """Plan the tasks."""
        options = self._options
        with TopicClient(options.target, options.topic, options.retry_s) as topic:
            planner = Planner(options, topic)
            parts = planner.parts
            ranges = parts.ranges(parts.begin(options.starting, planner.starting))
            found = {
                part: (begin, parts.resolved(part, options.ending.of(part), planner.ending)) for part, (begin, _) in ranges.items()
            }
            return planner.tasks(found)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Run one task."""
        return read_partition(self._options, partition)


class TopicStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A streaming read."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._topic: TopicClient | None = None
        self._only: frozenset[int] | None = None
        self._target: dict[int, int] | None = None
        """With `Trigger.AvailableNow`: the parts that there were, and where those ended that were not sealed."""
        self._planned: Place | None = None
        """The end of the newest micro-batch."""
        self._taken_at = -math.inf
        """Monotonic time of the last micro-batch; the first one does not wait."""
        self._lost = 0
        self._manifests = Manifests()

    @classmethod
    def of(cls, options: Mapping[str, str], schema: StructType) -> Self:
        """Make one from a user's options. Raises InvalidArgument."""
        return cls(options_of(options, schema, streaming=True))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_topic": None}

    def _planner(self, place: Place | None = None, only: frozenset[int] | None = None) -> Planner:
        if self._topic is None:
            self._topic = TopicClient(self._options.target, self._options.topic, self._options.retry_s)
        return Planner(self._options, self._topic, place, only, self._manifests)

    def initialOffset(self) -> dict[str, object]:
        """The first offset of a query without a checkpoint."""
        planner = self._planner()
        return planner.placed(planner.parts.begin(self._options.starting, planner.starting)).to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit by `maxOffsetsPerTrigger` or `maxBytesPerTrigger`."""
        return self._options.limits.read_limit

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the query's end at the parts' current ends."""
        planner = self._planner()
        self._only, self._target = frozenset(planner.parts.nodes), planner.parts.ends()

    def latestOffset(self, start: Mapping[str, object], limit: ReadLimit) -> dict[str, object]:
        """The end of the next micro-batch."""
        place, limits, now = Place.from_json(start), self._options.limits, time.monotonic()
        planner = self._planner(place, self._only)
        if self._target is None and limits.waits(planner.parts.behind(place)[0], now - self._taken_at):
            self._planned = place
            return place.to_json()
        rows, size = limits.within(limit)
        gone, end = planner.parts.next(place, rows, self._target, size)
        if end.offsets != place.offsets:
            self._taken_at = now
        for part, offset in gone.items():
            lose(self._options, part, offset, -1)
        end = place if (end.offsets, end.finished) == (place.offsets, place.finished) else planner.placed(end)
        self._planned = end
        return end.to_json()

    def reportLatestOffset(self) -> dict[str, object]:
        """The newest offset, for the query's progress; `rows_behind`, the number of rows after the newest micro-batch, and
        `bytes_behind`, about their size; `rows_lost` since the query began."""
        planned = self._planned
        planner = self._planner(planned)
        latest = planner.placed(Place(planner.parts.ends())).to_json()
        behind = {} if planned is None else dict(zip(("rows_behind", "bytes_behind"), planner.parts.behind(planned), strict=True))
        return latest | behind | ({"rows_lost": self._lost} if self._lost else {})

    def partitions(self, start: Mapping[str, object], end: Mapping[str, object]) -> Sequence[InputPartition]:
        """Plan the tasks of a micro-batch."""
        begin, behind = Place.from_json(start), Place.from_json(end)
        planner = self._planner(behind)
        tasks = planner.tasks({part: (begin.offsets.get(part, 0), offset) for part, offset in behind.offsets.items()})
        self._lost += planner.lost
        return tasks

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Run one task."""
        return read_partition(self._options, partition)

    def commit(self, end: Mapping[str, object]) -> None:
        """Do nothing: a topic does not know who reads it without a channel."""

    def stop(self) -> None:
        """Close the connections at the end of the query."""
        if self._topic is not None:
            self._topic.close()
            self._topic = None
