"""`df.write` and `df.writeStream` with `format("pixiu")`: rows become mail, chat or messages to rooms.

    row ──▶ ID = xxh3(query, values of the ID columns) ──▶ mail with flag 32 ──▶ stored once, however often the row is written

Spark repeats a micro-batch if it does not know of its commit, and a failed task: the IDs are the same then, and a Xiu answers with
what it stored. Its memory of an ID counts from when the message was stored, and lasts at least a day.

Source: docs/pipeline.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import xxhash
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import BinaryType, ByteType, IntegerType, LongType, ShortType, StringType, StructType

from pipeline.spark.offsets import other_cluster
from pipeline.spark.options import WriteOptions
from pipeline.spark.sink_checkpoint import read_cluster, write_cluster
from pixiu.client.client import Client, connect
from pixiu.errors import IdReused, InvalidArgument, Overloaded, PixiuError
from pixiu.ids import MAX_ID
from pixiu.wire.record import LANE_FIRST, LANE_NORMAL

if TYPE_CHECKING:
    import pyarrow as pa

    from pixiu.client.mail.receipt import MailReceipt
    from pixiu.client.mail.writer import MailWriter
    from pixiu.client.send.streams import Receipt

WHOLE: Final = (ByteType, ShortType, IntegerType, LongType)
BYTES: Final = (BinaryType, StringType)
ID_CANDIDATES: Final = (("id",), ("xiu_partition", "seq"), ("topic", "partition", "offset"), ("partition", "offset"))
"""Default ID columns, which identify a row's origin: a column of its own, this source's, Kafka's."""
OPTIONAL: Final = {"type": WHOLE, "lane": WHOLE, "lifetime_min": WHOLE, "ext": BYTES}
WORDS: Final = {"mail": "uin", "chat": "uin", "room": "room"}
"""Kind → the column with the receiver."""


@dataclass(frozen=True, slots=True)
class WrittenColumns:
    """The columns by their use."""

    key: str
    ids: tuple[str, ...]
    optional: tuple[str, ...]
    """The existing ones of `OPTIONAL`."""


def columns_to_write(schema: StructType, options: WriteOptions) -> WrittenColumns:
    """Choose the columns. Raises `InvalidArgument`, which names a missing column or a wrong type."""
    types = {field.name: field.dataType for field in schema.fields}
    key = WORDS[options.kind]
    for name, wanted, what in ((key, WHOLE, "a whole number"), ("body", BYTES, "binary or string")):
        if name not in types:
            raise InvalidArgument(f"{options.kind} needs a column {name!r} ({what}); there are {', '.join(types)}")
        if not isinstance(types[name], wanted):
            raise InvalidArgument(f"column {name!r} is {what}, not {types[name].simpleString()}")
    ids = options.id_columns or next((names for names in ID_CANDIDATES if all(name in types for name in names)), ())
    if not ids:
        raise InvalidArgument(
            "option idColumns is missing: the columns whose values together are another for each row and the same whenever the "
            "row is written again, like partition,offset"
        )
    for name in ids:
        if name not in types:
            raise InvalidArgument(f"option idColumns names {name!r}, which is not a column; there are {', '.join(types)}")
        if not isinstance(types[name], WHOLE + BYTES):
            raise InvalidArgument(f"idColumns are whole numbers, strings or binary; {name!r} is {types[name].simpleString()}")
    for name, wanted in OPTIONAL.items():
        if name in types and name not in ids and not isinstance(types[name], wanted):
            raise InvalidArgument(f"column {name!r} cannot be {types[name].simpleString()}")
    return WrittenColumns(key, tuple(ids), tuple(name for name in OPTIONAL if name in types))


def derived_id(query: str, values: Sequence[object]) -> int:
    """The ID of a row: 63 bits of xxh3 of the query's name and the ID columns' values.

    Every part is preceded by its length, so that no two lists of values have the same bytes.
    """
    return _id_of(_part(query), values)


def _part(value: object) -> bytes:
    if value is None:
        raise InvalidArgument("a column of idColumns is null: every row needs an ID")
    data = b"%d" % value if value.__class__ is int else value if isinstance(value, bytes) else str(value).encode()
    return b"%d:%b" % (len(data), data)


def _id_of(begin: bytes, values: Sequence[object]) -> int:
    return xxhash.xxh3_64_intdigest(begin + b"".join(map(_part, values))) & MAX_ID or 1


class Row(NamedTuple):
    """The message of one row."""

    key: int
    body: bytes
    id: int
    type: int
    lane: int
    lifetime_min: int
    ext: bytes


def rows_of(batch: pa.RecordBatch, columns: WrittenColumns, query: str) -> Iterator[Row]:
    """Convert the rows of a record batch. Raises `InvalidArgument` for a null that is not allowed."""
    found = {name: batch.column(name).to_pylist() for name in {columns.key, "body", *columns.ids, *columns.optional}}
    count = batch.num_rows
    types, lanes, lifetimes, exts = (found.get(name) or [None] * count for name in OPTIONAL)
    begin = _part(query)
    ids = [_id_of(begin, values) for values in zip(*(found[name] for name in columns.ids), strict=True)]
    for key, body, id_, type_, lane, lifetime, ext in zip(
        found[columns.key], found["body"], ids, types, lanes, lifetimes, exts, strict=True
    ):
        if key is None or body is None:
            raise InvalidArgument(
                f"a row has no {columns.key if key is None else 'body'}: filter such rows before they are written"
            )
        yield Row(  # positional, which is faster
            key,
            body if body.__class__ is bytes else str(body).encode(),
            id_,
            type_ or 0,
            LANE_NORMAL if lane is None else lane,
            lifetime or 0,
            ext.encode() if isinstance(ext, str) else ext or b"",
        )


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """Report of a task to the driver."""

    cluster: str
    """The cluster that it wrote to."""


class PixiuWriter:
    """Writes the rows of one task, and waits until the cluster has confirmed all of them.

    Args:
        cluster: of the checkpoint; empty: it has no note of it.
    """

    def __init__(self, options: WriteOptions, columns: WrittenColumns, cluster: str = "") -> None:
        self._options, self._columns, self._cluster = options, columns, cluster
        self._plain = not columns.optional

    def write_all(self, batches: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Run one task. Raises the first failed row's error; the rows of a failed task are written again, with the same IDs."""
        return Written(asyncio.run(self._write(batches)))

    async def _write(self, batches: Iterator[pa.RecordBatch]) -> str:
        options = self._options
        async with connect(options.target, client=f"spark-{options.query}"[:64], mail_timeout_s=options.retry_s) as px:
            here = px.cluster().id
            if self._cluster and self._cluster != here:
                raise other_cluster(self._cluster, options.target, here)
            # The next batch is computed while this one waits for confirmations: not in the event loop's thread.
            following = asyncio.ensure_future(asyncio.to_thread(next, batches, None))
            while (batch := await following) is not None:
                following = asyncio.ensure_future(asyncio.to_thread(next, batches, None))
                rows = list(rows_of(batch, self._columns, options.query))
                await (self._send_mails(px, rows) if options.kind == "mail" else self._send(px, rows))
            return here

    async def _send_mails(self, px: Client, rows: Sequence[Row]) -> None:
        writer = px.mail_writer()
        await writer.space()
        receipts: list[MailReceipt] = []
        for row in rows:
            while True:
                try:
                    receipts.append(self._send_mail(writer, row))
                    break
                except Overloaded:
                    await writer.space()
        try:
            await writer.wait_finished()
        except IdReused:
            place = next(index for index, receipt in enumerate(receipts) if isinstance(receipt.error, IdReused))
            raise self._reused(rows[place]) from None

    def _send_mail(self, writer: MailWriter, row: Row) -> MailReceipt:
        key, body, id_, type_, lane, lifetime_min, ext = row
        level: Any = self._options.level  # the options were checked
        if self._plain:  # passing a mail's options is half of their cost
            return writer.send(key, body, level=level, derived_id=id_)
        expire = timedelta(minutes=lifetime_min) if lifetime_min else None
        return writer.send(key, body, level=level, lane=lane, expire=expire, type=type_, extension=ext, derived_id=id_)

    async def _send(self, px: Client, rows: Sequence[Row]) -> None:
        """Send to rooms or online users. These messages are not stored: a repeated row may reach a receiver twice."""
        receipts: list[Receipt] = []
        for row in rows:
            to = px.room(row.key) if self._options.kind == "room" else px.user(row.key).destination
            receipts.append(
                await to.writer().send(
                    row.body,
                    type=row.type,
                    lifetime_min=row.lifetime_min,
                    extension=row.ext,
                    first_lane=row.lane == LANE_FIRST,
                    derived_id=row.id,
                )
            )
        for receipt in receipts:
            await receipt

    def _reused(self, row: Row) -> PixiuError:
        key, ids, query = self._columns.key, ", ".join(self._columns.ids), self._options.query
        return IdReused(
            f"a row for {key} {row.key} has the ID of another message: two rows have the same values of {ids}, or rows "
            f"differ when they are computed again, or another query writes as {query!r}"
        )


class PixiuBatchWriter(DataSourceArrowWriter):
    """Writer of `df.write`."""

    def __init__(self, options: WriteOptions, columns: WrittenColumns) -> None:
        self._writer = PixiuWriter(options, columns)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Run one task."""
        return self._writer.write_all(iterator)


class PixiuStreamWriter(DataSourceStreamArrowWriter):
    """Writer of `df.writeStream`. A task's rows are confirmed when it ends: a commit only notes the cluster, once."""

    def __init__(self, options: WriteOptions, columns: WrittenColumns) -> None:
        self._checkpoint = options.checkpoint
        self._cluster = read_cluster(options.checkpoint) if options.checkpoint else ""
        self._writer = PixiuWriter(options, columns, self._cluster)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Run one task of a micro-batch."""
        return self._writer.write_all(iterator)

    def commit(self, messages: Sequence[Any], batchId: int) -> None:
        """Note the cluster, if the checkpoint does not have it yet."""
        cluster = next((message.cluster for message in messages if isinstance(message, Written)), "")
        if cluster and self._checkpoint and not self._cluster:
            write_cluster(self._checkpoint, cluster)

    def abort(self, messages: Sequence[Any], batchId: int) -> None:
        """Do nothing: the micro-batch is written again, with the same IDs."""
