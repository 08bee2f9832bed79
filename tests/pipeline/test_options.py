"""Options, offsets and shares: what is wrong is said in one sentence. No Java."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import BinaryType, StructField, StructType

from pipeline.format import PixiuSource
from pipeline.reading import sentence_of
from pipeline.spark.headers import headers_of, shipped, with_headers
from pipeline.spark.offsets import EARLIEST, LATEST, from_json, parse_wanted, share_bytes, share_out, to_json
from pipeline.spark.options import read_options, write_options
from pipeline.spark.schema import arrow_schema, spark_schema
from pipeline.topics.columns import TYPES
from pixiu.errors import InvalidArgument
from pixiu.wire.export_tables import TABLES

TARGET = {"target": "zk://127.0.0.1:2181/pubsub"}
AT = 1_764_445_200_000
"""Unix milliseconds."""


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({}, "option target is missing"),
        ({}, "SELECT … FROM table WITH ('target' = 'zk://HOST:PORT/ROOT')"),
        (TARGET | {"PATH": "clicks"}, "'clicks' was given as a path, to load, save or start, and there are no paths"),
        (TARGET | {"paths": '["a"]'}, 'for a durable topic use option topic, .option("topic", "clicks")'),
        (TARGET | {"subscribe": "clicks"}, "subscribe is an option of Kafka: the option is topic"),
        (TARGET | {"subscribePattern": "c.*"}, "a read has one topic, option topic: join several reads by unionByName"),
        ({"kafka.bootstrap.servers": "h:1"}, "kafka.bootstrap.servers is an option of Kafka: the option is target, zk://"),
        (TARGET | {"topics": "clicks"}, "no option 'topics' here; did you mean topic?"),
        (TARGET | {"startingOffsets": '{"1": 9}', "endingOffsets": '{"1": 8}'}, "Xiu partition 1 would end at 8, before its begin"),
        (TARGET | {"startingTimestamp": f"{AT + 1}", "endingTimestamp": f"{AT}"}, f"the read would end at time {AT}, before its"),
        (
            TARGET | {"startingTimestamp": f"{AT + 1}", "endingOffsetsByTimestamp": f'{{"1": {AT}}}'},
            f"Xiu partition 1 would end at time {AT}, before its begin at {AT + 1}",
        ),
        (TARGET | {"endingTimestamp": "1764445200"}, "1764445200 is 1970-01-21: of seconds, give 1764445200000"),
        (TARGET | {"startingOffsetsByTimestamp": '{"0": 1764445200}'}, "startingOffsetsByTimestamp is Unix milliseconds, and 176"),
        ({"target": "ftp://x"}, "unknown scheme"),
        (TARGET | {"startingOffset": "earliest"}, "no option 'startingOffset' here; did you mean startingOffsets?"),
        (TARGET | {"zzz": "1"}, "no option 'zzz' here; there are target, topic, table"),
        (TARGET | {"table": "mails"}, "no table 'mails'; one of messages, inboxes"),
        (TARGET | {"columns": "bodies"}, "no column 'bodies'; it has xiu_partition"),
        (TARGET | {"partitions": "1,x"}, "option partitions is a list like 1,2,3 of numbers from 0 to 127, not 'x'"),
        (TARGET | {"partitions": "128"}, "from 0 to 127, not '128'"),
        (TARGET | {"users": "-1"}, "option users is a list"),
        (TARGET | {"startingOffsets": "begin"}, "startingOffsets is earliest, latest, or a position for each Xiu partition"),
        (TARGET | {"startingOffsets": "[1]"}, "startingOffsets is earliest"),
        (TARGET | {"startingOffsets": '{"0": "1"}'}, "startingOffsets is earliest"),
        (TARGET | {"startingOffsets": '{"300": 1}'}, "startingOffsets is earliest"),
        (TARGET | {"startingOffsets": '{"0": -3}'}, "startingOffsets is earliest"),
        (TARGET | {"startingOffsets": "latest"}, "after latest there is nothing"),
        (TARGET | {"endingOffsets": "earliest"}, "before earliest there is nothing"),
        (TARGET | {"startingOffsets": "earliest", "startingTimestamp": "1"}, "give startingOffsets or startingTimestamp"),
        (TARGET | {"startingTimestamp": "yesterday"}, "option startingTimestamp is a number"),
        (TARGET | {"maxOffsetsPerTrigger": "5"}, "option maxOffsetsPerTrigger is for streaming reads"),
        (TARGET | {"failOnDataLoss": "maybe"}, "option failOnDataLoss is one of true, false, not 'maybe'"),
        (TARGET | {"minPartitions": "--5"}, "option minPartitions is a number from 1 to 100000, not '--5'"),
        (TARGET | {"minPartitions": "\u0665"}, "option minPartitions is a number from 1 to 100000"),
        (TARGET | {"minPartitions": "08"}, "option minPartitions is a number from 1 to 100000, not '08'"),
        (TARGET | {"users": "1,02"}, "option users is a list like 1,2,3 of numbers from 1"),
        (TARGET | {"startingOffsets": '{"00": 5}'}, "startingOffsets is earliest, latest, or a position for each"),
        (TARGET | {"startingOffsets": '{"0": 5, "0": 7}'}, "startingOffsets is earliest, latest, or a position for each"),
        (TARGET | {"startingOffsets": '{"\u0660": 5}'}, "startingOffsets is earliest, latest, or a position for each"),
        (TARGET | {"startingOffsets": "[" * 100_000}, "startingOffsets is earliest, latest, or a position for each"),
        (TARGET | {"startingOffsetsByTimestamp": '{"0": -5}'}, "startingOffsetsByTimestamp is a time for each partition"),
        (TARGET | {"startingOffsetsByTimestamp": "{}"}, "startingOffsetsByTimestamp is a time for each partition"),
        (
            TARGET | {"startingTimestamp": "5", "startingOffsetsByTimestamp": '{"0": 5}'},
            "give startingTimestamp or startingOffsetsBy",
        ),
        (TARGET | {"startingOffsetsByTimestampStrategy": "error"}, "needs startingTimestamp or startingOffsetsByTimestamp"),
        (TARGET | {"startingTimestamp": f"{AT}", "startingOffsetsByTimestampStrategy": "x"}, "one of latest, error, not 'x'"),
        (TARGET | {"partitions": "0", "startingOffsets": '{"1": 5}'}, "name partition 1, which option partitions leaves out"),
        (TARGET | {"maxRecordsPerPartition": "0"}, "option maxRecordsPerPartition is a number from 1"),
        (TARGET | {"table": "inboxes", "includeHeaders": "true"}, "option includeHeaders is for table messages"),
        (TARGET | {"table": "inboxes", "startingOffsets": "earliest"}, "inboxes has no offsets"),
        (TARGET | {"reader": "x" * 129}, "is for streaming reads"),
    ],
)
def test_a_wrong_option_of_a_batch_is_named(given_: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        read_options(given_, streaming=False)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({"endingOffsets": "latest"}, "option endingOffsets is for batch reads"),
        ({"table": "inboxes"}, "read it as a batch"),
        ({"maxOffsetsPerTrigger": "0"}, "option maxOffsetsPerTrigger is a number from 1"),
        ({"maxBytesPerTrigger": "1k"}, "option maxBytesPerTrigger is a number from 1"),
        ({"minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "8"}, "minOffsetsPerTrigger, 9, is above maxOffsetsPerTrigger, 8"),
        ({"maxTriggerDelay": "1m"}, "maxTriggerDelay is how long minOffsetsPerTrigger waits: give both"),
        ({"minOffsetsPerTrigger": "9", "maxTriggerDelay": "soon"}, "a number and a unit, ms, s, m, h or d, like 15m, not 'soon'"),
        ({"endingOffsetsByTimestamp": '{"0": 5}'}, "option endingOffsetsByTimestamp is for batch reads"),
        ({"reader": "x" * 129}, "at most 128 characters"),
    ],
)
def test_a_wrong_option_of_a_stream_is_named(given_: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        read_options(TARGET | given_, streaming=True)
    assert said in str(raised.value)


def test_options_have_kafkas_names_in_any_case() -> None:
    found = read_options(TARGET | {"STARTINGOFFSETS": '{"0": 7, "3": -1}', "failondataloss": "False"}, streaming=True)
    assert [found.starting.of(partition) for partition in (0, 3, 1)] == [7, LATEST, LATEST]
    assert not found.fail_on_data_loss
    batch = read_options(TARGET | {"startingOffsets": '{"0": 7}', "users": "1, 2", "columns": "body,seq"}, streaming=False)
    assert [batch.starting.of(partition) for partition in (0, 1)] == [7, EARLIEST]
    assert batch.users == (1, 2)
    assert [name for name, _ in batch.columns] == ["body", "seq"]
    timed = read_options(TARGET | {"startingOffsetsByTimestamp": f'{{"3": {AT}}}'}, streaming=True)
    assert [(timed.starting.at_ms(partition), timed.starting.of(partition)) for partition in (3, 0)] == [
        (AT, LATEST),
        (0, LATEST),
    ]
    waiting = read_options(TARGET | {"minOffsetsPerTrigger": "9", "maxTriggerDelay": "90s"}, streaming=True).limits
    assert [waiting.waits(8, 89.0), waiting.waits(9, 89.0), waiting.waits(8, 90.0)] == [True, False, False]


def test_a_write_needs_a_name_that_stays() -> None:
    with pytest.raises(InvalidArgument, match="option query is missing"):
        write_options(TARGET)
    with pytest.raises(InvalidArgument, match="kind is one of mail, chat, room"):
        write_options(TARGET | {"query": "q", "kind": "letter"})
    found = write_options(TARGET | {"query": "q", "idColumns": "a, b", "checkpointLocation": "/x"})
    assert (found.kind, found.id_columns, found.level) == ("mail", ("a", "b"), "replicated")


@pytest.mark.parametrize("topic", [{}, {"topic": "orders"}])
def test_a_name_given_as_a_path_is_refused_at_once(topic: dict[str, str]) -> None:
    """`load("clicks")` would read all mail, and `save("clicks")` send it."""
    schema = StructType([StructField("body", BinaryType())])
    source = PixiuSource(TARGET | topic | {"path": "clicks", "query": "q"})
    steps: list[Callable[[], object]] = [
        source.schema,
        lambda: source.reader(schema),
        lambda: source.streamReader(schema),
        lambda: source.writer(schema, False),
        lambda: source.streamWriter(schema, False),
    ]
    for step in steps:
        with pytest.raises(InvalidArgument, match=r"'clicks' was given as a path.* use option topic"):
            step()
    with pytest.raises(InvalidArgument, match="subscribe is an option of Kafka"):
        PixiuSource(TARGET | topic | {"subscribe": "clicks"}).schema()


@pytest.mark.parametrize("ddl", [("body",), ("part", "offset", "body"), tuple(TYPES)])
def test_a_topics_table_does_not_read_mail(ddl: tuple[str, ...]) -> None:
    """Of CREATE TABLE … OPTIONS (topic …) Spark hands over the columns alone: `body` is one of mail, too."""
    schema = StructType([StructField(name, TYPES[name][0]) for name in ddl])
    source = PixiuSource(TARGET)
    for made in (source.reader, source.streamReader):
        with pytest.raises(InvalidArgument, match=r"there is no option topic here: in SQL give it at each use, WITH .'target' = "):
            made(schema)
    assert PixiuSource(TARGET | {"topic": "clicks"}).reader(schema)
    body = StructType([StructField("body", BinaryType())])
    assert PixiuSource(TARGET | {"table": "messages"}).reader(body)
    assert PixiuSource(TARGET | {"columns": "body"}).reader(body)


def test_offsets_come_back_from_a_checkpoint() -> None:
    assert from_json(to_json({1: 5, 0: 1 << 40}, "a" * 16)) == {0: 1 << 40, 1: 5}
    for other in ({"logOffset": 3}, {"0": 3}, {"logOffset": 3, "cluster": "a" * 16}):
        with pytest.raises(InvalidArgument, match="use another checkpointLocation"):
            from_json(other)
    assert parse_wanted("startingOffsets", "LATEST", EARLIEST).of(5) == LATEST


@given(st.integers(1, 1000), st.dictionaries(st.integers(0, 7), st.integers(0, 500), max_size=8))
def test_shares_are_the_limit_and_fit_what_there_is(limit: int, available: dict[int, int]) -> None:
    shares = share_out(limit, available)
    assert shares.keys() == available.keys()
    assert all(0 <= shares[partition] <= rows for partition, rows in available.items())
    assert sum(shares.values()) == min(limit, sum(available.values()))


@given(st.integers(1, 10_000), st.lists(st.lists(st.integers(1, 500), max_size=9), max_size=6))
def test_bytes_are_shared_by_the_limit_and_nobody_starves(limit: int, sizes: list[list[int]]) -> None:
    taken: dict[int, int] = {}

    def take(partition: int, most: int) -> int:
        found = [size for place, size in enumerate(sizes[partition]) if sum(sizes[partition][: place + 1]) <= most or not place]
        taken[partition] = len(found)
        return sum(found)

    share_bytes(limit, {partition: len(rows) for partition, rows in enumerate(sizes)}, take)
    assert taken.keys() == {partition for partition, rows in enumerate(sizes) if rows}
    assert all(taken.values()), "one row at least of each"
    over = sum(sum(sizes[partition][:count]) for partition, count in taken.items() if count > 1)
    assert over <= limit
    if sum(map(sum, sizes)) <= limit // 6:
        assert taken == {partition: len(rows) for partition, rows in enumerate(sizes) if rows}


@pytest.mark.parametrize("table", TABLES)
def test_arrow_has_what_spark_expects(table: str) -> None:
    from pyspark.sql.pandas.types import to_arrow_schema

    assert to_arrow_schema(spark_schema(TABLES[table]), timezone="UTC").equals(arrow_schema(TABLES[table]))


def test_headers_are_a_map() -> None:
    ext = [b'{"tag": "a", "n": 3, "x": null, "in": {"b": [1]}}', b"", b"no JSON", b"[1]", b"\xff"]
    batch = pa.RecordBatch.from_pydict({"seq": pa.array(range(5)), "ext": pa.array(ext, pa.binary())})
    found = with_headers(batch, (("seq", "long"),))
    assert found.column_names == ["seq", "headers"]
    assert found.column("headers").to_pylist()[1:] == [None] * 4
    assert dict(found.column("headers").to_pylist()[0]) == {"tag": "a", "n": "3", "x": "null", "in": '{"b":[1]}'}
    assert headers_of(b"[" * 100_000) is None
    assert shipped((("seq", "long"),)) == (("seq", "long"), ("ext", "binary"))
    schema = spark_schema(TABLES["messages"], headers=True)
    from pyspark.sql.pandas.types import to_arrow_schema

    assert to_arrow_schema(schema, timezone="UTC").field("headers").type == found.schema.field("headers").type


def test_what_java_says_is_not_hidden_behind_the_call() -> None:
    text = "An error occurred while calling o51.load.\n: java.lang.IllegalStateException: no worker\n\tat org.apache.Spark\n"
    assert sentence_of(RuntimeError(text)) == "java.lang.IllegalStateException: no worker"
    assert sentence_of(RuntimeError("An error occurred while calling o51.load.")) == "An error occurred while calling o51.load."
