"""`df.write` and `df.writeStream` into a topic: each epoch is stored once, however often Spark writes it.

    task = (query, Spark's partition) ──▶ a writer ──▶ what has it stored? ──▶ blocks of what is missing ──▶ all confirmed

Source: docs/pipeline.md, "Topics".
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import BooleanType, DataType, MapType, StringType, StructType, TimestampType

from pipeline.spark.offsets import other_cluster
from pipeline.spark.replicas import FIRST_PAUSE_S, MAX_PAUSE_S
from pipeline.spark.sink import BYTES, WHOLE
from pipeline.spark.sink_checkpoint import read_cluster, write_cluster
from pipeline.topics.client import Again, TopicClient, parts_of
from pipeline.topics.epochs import Epoch, Row, writer_of
from pipeline.topics.options import WriteOptions, write_options
from pipeline.topics.streams import Streams
from pixiu.errors import InvalidArgument, Unavailable
from pixiu.placement.slots import SLOTS
from pixiu.rpc.backoff import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable

QUERY_ID: Final = "sql.streaming.queryId"
BATCH_ID: Final = "streaming.sql.batchId"
"""Properties that Spark gives the tasks of a stream."""
ROWS: Final = 10_000
"""Rows that are confirmed before the next ones are sent."""
MAX_CLIENT_BYTES: Final = 128
COLUMNS: Final[dict[str, tuple[tuple[type[DataType], ...], str]]] = {
    "body": (BYTES, "binary or string"),
    "key": (BYTES, "binary or string"),
    "slot": (WHOLE, "a whole number"),
    "headers": ((MapType,), "a map of strings to binary or string"),
    "event_time": ((TimestampType,), "a timestamp"),
    "tag": ((StringType,), "a string"),
    "load_test": ((BooleanType,), "a boolean"),
}
"""Column → types that it may have, and the same in words."""


def columns_to_write(schema: StructType) -> tuple[str, ...]:
    """The columns that make a message. Raises `InvalidArgument`, which names a missing column or a wrong type."""
    types = {field.name: field.dataType for field in schema.fields}
    if "body" not in types:
        raise InvalidArgument(f"a topic needs a column 'body' (binary or string); there are {', '.join(types)}")
    for name, (wanted, words) in COLUMNS.items():
        found = types.get(name)
        whole = not isinstance(found, MapType) or (isinstance(found.keyType, StringType) and isinstance(found.valueType, BYTES))
        if found is not None and not (isinstance(found, wanted) and whole):
            raise InvalidArgument(f"column {name!r} is {words}, not {found.simpleString()}")
    return tuple(name for name in COLUMNS if name in types)


def rows_of(batch: pa.RecordBatch, columns: Sequence[str]) -> list[Row]:
    """Convert the rows of a record batch. Raises `InvalidArgument` for a value that is not allowed."""
    found: dict[str, list[Any]] = {}
    for name in columns:
        column = batch.column(name)
        found[name] = (column.cast(pa.timestamp("us", "UTC")).cast(pa.int64()) if name == "event_time" else column).to_pylist()
    nothing = [None] * batch.num_rows
    bodies = [_bytes(body) for body in found["body"]]
    if None in bodies:
        raise InvalidArgument("a row has no body: filter such rows before they are written")
    keys = [_bytes(key) for key in found.get("key", nothing)]
    slots, times = found.get("slot", nothing), found.get("event_time", nothing)
    for slot in slots:
        if slot is not None and not 0 <= slot < SLOTS:
            raise InvalidArgument(f"column 'slot' is from 0 to {SLOTS - 1}, not {slot}")
    for at in times:
        if at is not None and at < 0:
            raise InvalidArgument("column 'event_time' has a time before 1970")
    headers = [[(name, _bytes(value) or b"") for name, value in each or ()] for each in found.get("headers", nothing)]
    tags, marks = found.get("tag", nothing), [bool(mark) for mark in found.get("load_test", nothing)]
    return list(map(Row, bodies, keys, slots, headers, times, tags, marks))


def _bytes(value: bytes | str | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """Report of a task to the driver."""

    cluster: str
    """The cluster that it wrote to."""


class TopicWriter:
    """Writes the rows of one task, and waits until the cluster has confirmed all of them.

    Args:
        cluster: of the checkpoint; empty: it has no note of it.
    """

    def __init__(self, options: WriteOptions, columns: tuple[str, ...], cluster: str = "") -> None:
        self._options, self._columns, self._cluster = options, columns, cluster

    def write(self, batches: Iterator[pa.RecordBatch], query: str, epoch: int, partition: int) -> Written:
        """Run one task. Raises InvalidArgument if this epoch was written with other rows; Unavailable; refusals of leaders."""
        options = self._options
        with TopicClient(options.target, options.topic, options.retry_s, is_task=True) as topic:
            task = _Task(topic, query, epoch, partition, options.retry_s)
            if self._cluster and self._cluster != topic.cluster:
                raise other_cluster(self._cluster, options.target, topic.cluster)
            with task.streams:
                for batch in batches:
                    for at in range(0, batch.num_rows, ROWS):
                        task.write(rows_of(batch.slice(at, ROWS), self._columns))
                task.end()
            return Written(topic.cluster)


class _Task:
    """Rows on their way to the leaders."""

    def __init__(self, topic: TopicClient, query: str, epoch: int, partition: int, retry_s: float) -> None:
        self._topic, self._retry_s = topic, retry_s
        self._writer = writer_of(query, partition)
        self._epoch = Epoch(topic.describe().topic, self._writer, epoch)
        self.streams = Streams(topic, f"spark-{query[:32]}-{partition}".encode()[:MAX_CLIENT_BYTES].decode(errors="ignore"))
        self._until = 0.0
        """Time at which it gives up, unless rows come in before, monotonic seconds."""
        self._most = 0
        """Of what was stored when it last looked."""
        self._patiently(self._learn)

    def write(self, rows: Sequence[Row]) -> None:
        """Store rows, those that are not stored already."""
        learned = True

        def store() -> None:
            nonlocal learned
            if not learned:
                self._learn()
            learned = False
            self.streams.store(self._epoch.blocks(rows))

        self._patiently(store)
        self._epoch.confirmed()

    def end(self) -> None:
        """The task has no more rows."""
        self._epoch.end()

    def _learn(self) -> None:
        topic = self._topic
        described = topic.describe()
        parts = parts_of(described)
        stored = topic.positions(self._writer, [part for part in parts if not part.sealed])
        rows = sum(known.position for known in stored.values())
        if rows > self._most:
            self._most, self._until = rows, time.monotonic() + self._retry_s
        if not self._epoch.learn(parts, stored):
            raise Again("parts of the topic are being opened")

    def _patiently(self, call: Callable[[], None]) -> None:
        self._until, backoff = time.monotonic() + self._retry_s, Backoff(FIRST_PAUSE_S, MAX_PAUSE_S, random.random)
        while True:
            try:
                return call()
            except Again as problem:
                pause = backoff.next_s()
                if time.monotonic() + pause > self._until:
                    with suppress(Again):
                        self._learn()  # rows may have come in since it looked
                if time.monotonic() + pause > self._until:
                    raise Unavailable(f"topic {self._topic.name} took no rows for {self._retry_s:g} s: {problem}") from None
            time.sleep(pause)


class TopicBatchWriter(DataSourceArrowWriter):
    """Writer of `df.write`."""

    def __init__(self, options: WriteOptions, columns: tuple[str, ...]) -> None:
        self._writer = TopicWriter(options, columns)
        self._query, self._epoch = options.query or secrets.token_hex(16), options.epoch

    @classmethod
    def of(cls, options: Mapping[str, str], schema: StructType) -> Self:
        """Make one from a user's options. Raises InvalidArgument, also for a topic that does not exist."""
        return cls(_checked(write_options(options, streaming=False), streaming=False), columns_to_write(schema))

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Run one task."""
        return self._writer.write(iterator, self._query, self._epoch, _context().partitionId())


class TopicStreamWriter(DataSourceStreamArrowWriter):
    """Writer of `df.writeStream`. A task's rows are confirmed when it ends: a commit only notes the cluster, once."""

    def __init__(self, options: WriteOptions, columns: tuple[str, ...]) -> None:
        self._query, self._checkpoint = options.query, options.checkpoint
        self._cluster = read_cluster(options.checkpoint) if options.checkpoint else ""
        self._writer = TopicWriter(options, columns, self._cluster)

    @classmethod
    def of(cls, options: Mapping[str, str], schema: StructType) -> Self:
        """Make one from a user's options. Raises InvalidArgument, also for a topic that does not exist."""
        return cls(_checked(write_options(options, streaming=True), streaming=True), columns_to_write(schema))

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Run one task of a micro-batch."""
        context = _context()
        query, epoch = self._query or context.getLocalProperty(QUERY_ID), context.getLocalProperty(BATCH_ID)
        if not query or not epoch:
            raise InvalidArgument("Spark does not say which micro-batch this is: write to a topic with writeStream of Spark 4.3")
        return self._writer.write(iterator, query, int(epoch), context.partitionId())

    def commit(self, messages: Sequence[Any], batchId: int) -> None:
        """Note the cluster, if the checkpoint does not have it yet."""
        cluster = next((message.cluster for message in messages if isinstance(message, Written)), "")
        if cluster and self._checkpoint and not self._cluster:
            write_cluster(self._checkpoint, cluster)

    def abort(self, messages: Sequence[Any], batchId: int) -> None:
        """Do nothing: the micro-batch is written again, and stored once."""


def _checked(options: WriteOptions, *, streaming: bool) -> WriteOptions:
    """Ask for the topic in the driver, of a stream at each micro-batch: Spark tries a task several times, and puts the stack of
    each around the reason."""
    with TopicClient(options.target, options.topic, options.retry_s, is_task=streaming) as topic:
        topic.describe()
    return options


def _context() -> TaskContext:
    found = TaskContext.get()
    assert found is not None, "Spark writes in tasks"
    return found
