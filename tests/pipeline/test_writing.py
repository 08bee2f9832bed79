"""What the sink writes, with a proxy, a Xiu and a Pi as processes: once, whatever is written again. No Spark."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from pipeline.spark.options import write_options
from pipeline.spark.replicas import Replicas, Rows
from pipeline.spark.sink import PixiuWriter, columns_to_write
from pixiu.errors import IdReused, InvalidArgument
from pixiu.wire.export_tables import ROLE_OF_TABLE, columns_of
from pixiu.wire.record import Flag
from tests.support.roles import Roles

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
SCHEMA = StructType([StructField("id", LongType()), StructField("uin", LongType()), StructField("body", StringType())])
USERS = 5


def read_table(target: str, table: str, users: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    with Replicas(target, ROLE_OF_TABLE[table], retry_s=60) as replicas:
        replicas.find()
        bounds = replicas.bounds(0)
        rows = Rows(0, table, columns_of(table, ()), users, end=bounds.end, applied=bounds.applied)
        return [row for batch in replicas.read(rows) for row in batch.to_pylist()]


def batches(begin: int, end: int, mark: str = "") -> list[pa.RecordBatch]:
    numbers = list(range(begin, end))
    columns = {"id": numbers, "uin": [1 + number % USERS for number in numbers], "body": [f"{number}{mark}" for number in numbers]}
    whole = pa.RecordBatch.from_pydict(columns)
    return [whole.slice(place, 100) for place in range(0, len(numbers), 100)]


async def test_rows_that_are_written_again_are_stored_and_listed_once(roles: Roles) -> None:
    await roles.layout(xiu=1, pi=1, relay=1, router=1, broker=1)
    roles.start("xiu-a", partition=0)
    roles.start("pi-a", partition=0)
    roles.start("proxy-a")
    await roles.running("xiu-a", "pi-a", "proxy-a")
    target = roles.target()
    options = write_options({"target": target, "query": "q", "retrySeconds": "120"})
    writer = PixiuWriter(options, columns_to_write(SCHEMA, options))
    other = write_options({"target": target, "query": "p", "retrySeconds": "120"})

    def write(found: list[pa.RecordBatch], by: PixiuWriter = writer) -> None:
        by.write_all(iter(found))

    await asyncio.to_thread(write, batches(0, 350))
    await asyncio.to_thread(write, batches(100, 500))
    stored = await asyncio.to_thread(read_table, target, "messages")
    assert Counter(row["body"] for row in stored) == Counter(b"%d" % number for number in range(500))
    assert all(row["flags"] == Flag.DERIVED_ID and row["sent_at"] is None for row in stored)
    listed = await asyncio.to_thread(read_table, target, "inboxes")
    assert Counter((row["uin"], row["msg_id"]) for row in listed) == Counter((row["key"], row["msg_id"]) for row in stored)
    order = [row["msg_id"] for row in listed if row["uin"] == 3]
    assert [row["body"] for row in sorted(stored, key=lambda row: row["seq"]) if row["key"] == 3] == [
        b"%d" % number for number in range(2, 500, 5)
    ]
    assert len(order) == 100
    heads = await asyncio.to_thread(read_table, target, "heads", (2, 4))
    assert [(row["uin"], row["last"]) for row in heads] == [(2, 100), (4, 100)]

    await asyncio.to_thread(write, batches(0, 10), PixiuWriter(other, columns_to_write(SCHEMA, other)))
    assert len(await asyncio.to_thread(read_table, target, "messages")) == 510, "another query's rows are others"
    with pytest.raises(IdReused, match="has the ID of another message: two rows have the same values of id"):
        await asyncio.to_thread(write, batches(0, 10, "!"))
    with pytest.raises(InvalidArgument, match="a row has no uin"):
        await asyncio.to_thread(write, [pa.RecordBatch.from_pydict({"id": [1], "uin": [None], "body": ["x"]})])
    assert len(await asyncio.to_thread(read_table, target, "messages")) == 510
