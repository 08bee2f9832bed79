"""Options, plans and rows of topics in Spark: what is wrong, lost or elsewhere is said in one sentence. No Java."""

from __future__ import annotations

import datetime
import json
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows
from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from pipeline.format import PixiuSource
from pipeline.spark.offsets import EARLIEST, LATEST
from pipeline.topics import source
from pipeline.topics.client import Known
from pipeline.topics.columns import TYPES, spark_schema
from pipeline.topics.epochs import Row
from pipeline.topics.lineage import BY_TIME
from pipeline.topics.options import read_options, write_options
from pipeline.topics.sink import columns_to_write, rows_of
from pipeline.topics.source import BlocksPartition, TopicReader, TopicStreamReader, read_partition
from pixiu.errors import Gone, InvalidArgument
from pixiu.objects.manifest import Manifest, StoredObject
from pixiu.objects.store import ObjectStore
from pixiu.wire.block import Message, Stamp, encode, stamped
from pixiu.wire.v1 import topic_pb2

TARGET = {"target": "127.0.0.1:7000", "topic": "orders"}
AT = 1_764_445_200_000
"""Unix milliseconds of offset 0."""
HERE = "a" * 16


@dataclass
class Topic:
    """A topic in memory: its parts by number, (low, high, state, parents), and their offsets."""

    parts: dict[int, tuple[int, int, int, tuple[int, ...]]]
    bounds: dict[int, list[int]]
    """Part → first, end."""
    gaps: list[tuple[int, int]] = field(default_factory=list)
    version: int = 1
    id: int = 7
    cluster: str = HERE
    store: topic_pb2.TopicStore | None = None
    asked: list[tuple[int, int]] = field(default_factory=list)
    """Offsets that were read from leaders."""

    def description(self) -> topic_pb2.TopicDescription:
        found = topic_pb2.TopicDescription(name="orders", topic=self.id, version=self.version)
        for number, (low, high, state, parents) in self.parts.items():
            found.parts.add(number=number, low=low, high=high, state=topic_pb2.PartState.ValueType(state), parents=parents)
        return found


@pytest.fixture
def topic(monkeypatch: pytest.MonkeyPatch) -> Topic:
    found = Topic({1: (0, 65536, topic_pb2.PART_OPEN, ())}, {1: [0, 100]})

    class Client:
        def __init__(self, target: str, name: str, retry_s: float = 0, known: Known | None = None) -> None:
            self.cluster, self.id = found.cluster, found.id

        def __enter__(self) -> Client:
            return self

        def __exit__(self, *_: object) -> None:
            self.close()

        def close(self) -> None:
            pass

        def known(self, group: int) -> Known:
            return Known((), b"", self.cluster)

        def describe(self, version: int = 0, max_age_s: float = 0) -> topic_pb2.TopicDescription:
            self.cluster = found.cluster
            assert version <= found.version, "it would wait for a version that this topic never has"
            return found.description()

        def look(self, part: int, group: int) -> topic_pb2.TopicReadReply:
            first, end = found.bounds[part]
            sealed = found.parts[part][2] == topic_pb2.PART_SEALED
            return topic_pb2.TopicReadReply(first=first, committed_end=end, sealed=sealed, store=found.store, mean_bytes=10)

        def offset_at(self, part: int, group: int, time_us: int) -> int:
            return min(time_us // 1000 - AT, found.bounds[part][1])

        def read(self, part: int, group: int, begin: int, end: int) -> Iterator[topic_pb2.TopicReadReply]:
            found.asked.append((begin, end))
            for low, high in found.gaps:
                if begin < high and low < end:
                    before = blocks(begin, low - begin) if begin < low else b""
                    yield topic_pb2.TopicReadReply(blocks=before, next=high, gap_low=low, gap_high=high)
                    begin = high
            if begin < end:
                yield topic_pb2.TopicReadReply(blocks=blocks(begin, end - begin), next=end)

    monkeypatch.setattr(source, "TopicClient", Client)
    return found


def blocks(base: int, count: int) -> bytes:
    block = encode([Message(b"%d" % (base + at), 1) for at in range(count)], topic=7, part=1, writer=9, first=base + 1)
    return stamped(block, Stamp(base, 1, 2))


def stream(**options: str) -> TopicStreamReader:
    made = PixiuSource(TARGET | {"startingOffsets": "earliest"} | options)
    found = made.streamReader(made.schema())
    assert isinstance(found, TopicStreamReader)
    return found


def ranges(tasks: Any) -> list[tuple[int, int, int]]:
    assert all(isinstance(pickle.loads(pickle.dumps(task)), BlocksPartition) for task in tasks)
    return [(task.part, task.begin, task.end) for task in tasks]


def test_micro_batches(topic: Topic) -> None:
    reader = stream(maxOffsetsPerTrigger="60")
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMaxRows(60)
    start = reader.initialOffset()
    assert start == {"1": 0, "finished": [], "version": 1, "topic": 7, "cluster": HERE}
    end = reader.latestOffset(start, limit)
    assert end["1"] == 60
    assert reader.reportLatestOffset() == end | {"1": 100, "rows_behind": 40, "bytes_behind": 400}
    assert ranges(reader.partitions(start, end)) == [(1, 0, 60)]
    topic.parts = {
        1: (0, 65536, topic_pb2.PART_SEALED, ()),
        2: (0, 32768, topic_pb2.PART_OPEN, (1,)),
        3: (32768, 65536, topic_pb2.PART_OPENING, (1,)),
    }
    topic.bounds[2], topic.version = [0, 5], 2
    last = reader.latestOffset(end, limit)
    assert last == end | {"1": 100, "finished": [1], "version": 2}
    assert reader.latestOffset(last, limit) == {"2": 5, "finished": [], "version": 2, "topic": 7, "cluster": HERE}
    topic.parts[3] = (32768, 65536, topic_pb2.PART_OPEN, (1,))
    topic.bounds[3] = [0, 0]
    newest = reader.latestOffset(last, ReadAllAvailable())
    assert (newest["2"], newest["3"]) == (5, 0)
    assert ranges(reader.partitions(last, newest)) == [(2, 0, 5)]
    assert reader.latestOffset(newest, limit) == newest
    again: TopicStreamReader = pickle.loads(pickle.dumps(reader))
    assert again.latestOffset(newest, limit) == newest


def test_limits_of_micro_batches(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(source, "time", SimpleNamespace(monotonic=lambda: now))
    topic.parts, topic.bounds[2] = dict.fromkeys((1, 2), (0, 65536, topic_pb2.PART_OPEN, ())), [0, 3]
    reader = stream(maxBytesPerTrigger="200")
    limit, start = reader.getDefaultReadLimit(), reader.initialOffset()
    assert limit == ReadMaxBytes(200)
    end = reader.latestOffset(start, limit)
    assert (end["1"], end["2"]) == (17, 3), "20 of about 10 bytes"
    assert reader.latestOffset(start, ReadAllAvailable())["1"] == 100
    patient = stream(minOffsetsPerTrigger="5")
    first = patient.latestOffset(start, patient.getDefaultReadLimit())
    topic.bounds[2][1] = 7
    assert patient.latestOffset(first, ReadAllAvailable()) == first
    now += 15 * 60
    assert patient.latestOffset(first, ReadAllAvailable())["2"] == 7


def test_an_end_that_is_fixed(topic: Topic) -> None:
    reader = stream()
    reader.prepareForTriggerAvailableNow()
    topic.bounds[1][1] = 150
    topic.parts |= {2: (0, 65536, topic_pb2.PART_OPEN, (1,))}
    topic.parts[1] = (0, 65536, topic_pb2.PART_SEALED, ())
    topic.bounds[2] = [0, 9]
    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    assert end["1"] == 100
    assert reader.latestOffset(end, ReadAllAvailable()) == end


def test_what_is_lost_is_said_or_counted(topic: Topic, caplog: pytest.LogCaptureFixture) -> None:
    start = stream().initialOffset()
    topic.bounds[1][0] = 30
    end = stream().latestOffset(start, ReadMaxRows(50))
    assert end["1"] == 80, "what is gone does not count"
    with pytest.raises(Gone, match=r"part 1 of topic orders: 30 rows, offsets 0 to 29, were dropped .* failOnDataLoss=false"):
        stream().partitions(start, end)
    assert ranges(stream(failOnDataLoss="false").partitions(start, end)) == [(1, 30, 80)]
    assert "part 1 of topic orders: 30 rows, offsets 0 to 29, are lost" in caplog.text
    topic.parts = {2: (0, 65536, topic_pb2.PART_OPEN, (1,))}
    topic.bounds[2] = [3, 9]
    with pytest.raises(Gone, match="part 1 of topic orders: offsets from 80 on were dropped"):
        stream().latestOffset(end, ReadAllAvailable())
    loose = stream(failOnDataLoss="false")
    following = loose.latestOffset(end, ReadAllAvailable())
    assert following["2"] == 9
    assert ranges(loose.partitions(end, following)) == [(2, 3, 9)]
    assert loose.reportLatestOffset()["rows_lost"] == 3
    assert "offsets from 80 on are lost" in caplog.text


def test_a_gap_is_said_or_counted(topic: Topic, caplog: pytest.LogCaptureFixture) -> None:
    topic.gaps = [(10, 20), (70, 200)]
    known = Known((), b"", HERE)
    strict = read_options(TARGET, streaming=False)
    with pytest.raises(Gone, match="10 rows, offsets 10 to 19, were dropped by retention, or no replica can read them"):
        list(read_partition(strict, BlocksPartition(1, 0, 0, 60, known)))
    loose = read_options(TARGET | {"failOnDataLoss": "false", "columns": "offset,body"}, streaming=False)
    found = [row for batch in read_partition(loose, BlocksPartition(1, 0, 5, 90, known)) for row in batch.to_pylist()]
    assert found == [{"offset": at, "body": b"%d" % at} for at in (*range(5, 10), *range(20, 70))]
    assert "10 rows, offsets 10 to 19, are lost" in caplog.text
    assert "20 rows, offsets 70 to 89, are lost" in caplog.text


def test_checkpoints_of_other_topics(topic: Topic) -> None:
    start = stream().initialOffset()
    topic.id = 8
    for version in (1, 9):
        with pytest.raises(InvalidArgument, match="the checkpoint is of topic 7, and orders is topic 8: use another checkpoint"):
            stream().latestOffset({**start, "version": version}, ReadAllAvailable())
    topic.id, topic.cluster = 7, "b" * 16
    with pytest.raises(InvalidArgument, match=f"made with cluster {HERE}, and 127.0.0.1:7000 is cluster bbbb"):
        stream().partitions(start, start)


def test_batches(topic: Topic) -> None:
    def planned(**options: str) -> list[tuple[int, int, int]]:
        made = PixiuSource(TARGET | options)
        reader = made.reader(made.schema())
        assert isinstance(reader, TopicReader)
        return ranges(reader.partitions())

    assert planned() == [(1, 0, 100)]
    assert planned(minPartitions="3") == [(1, 0, 33), (1, 33, 66), (1, 66, 100)]
    assert planned(startingOffsets='{"1": 10}', endingOffsets='{"1": 20}') == [(1, 10, 20)]
    assert planned(startingTimestamp=str(AT + 40), endingTimestamp=str(AT + 50)) == [(1, 40, 50)]
    topic.parts = {1: (0, 65536, topic_pb2.PART_SEALED, ()), 2: (0, 65536, topic_pb2.PART_OPEN, (1,))}
    topic.bounds[2] = [0, 300]
    assert planned() == [(1, 0, 100), (2, 0, 300)]
    assert planned(minPartitions="4") == [(1, 0, 100), (2, 0, 100), (2, 100, 200), (2, 200, 300)]
    assert planned(startingTimestamp=str(AT + 150)) == [(2, 150, 300)]
    assert planned(maxRecordsPerPartition="150") == [(1, 0, 100), (2, 0, 150), (2, 150, 300)]
    assert planned(endingOffsetsByTimestamp=json.dumps({"2": AT + 50})) == [(1, 0, 100), (2, 0, 50)]
    assert planned(startingOffsetsByTimestamp=json.dumps({"1": AT + 90})) == [(1, 90, 100), (2, 0, 300)], (
        "what follows is read whole"
    )
    assert planned(startingTimestamp=str(AT + 400)) == []
    with pytest.raises(InvalidArgument, match="part 2 of topic orders has nothing since 1764445200400"):
        planned(startingTimestamp=str(AT + 400), startingOffsetsByTimestampStrategy="error")
    with pytest.raises(InvalidArgument, match="part 2 ends at offset 300, and 301 was asked for"):
        planned(endingOffsets='{"2": 301}')


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({"target": "127.0.0.1:1"}, "option topic is the name of a topic"),
        ({"topic": "x"}, "option target is missing"),
        (TARGET | {"path": "clicks"}, "'clicks' was given as a path, to load, save or start, and there are no paths"),
        (TARGET | {"startingOffsets": '{"1": 9}', "endingOffsets": '{"1": 8}'}, "part 1 would end at 8, before its begin at 9"),
        (TARGET | {"startingTimestamp": str(AT + 1), "endingTimestamp": str(AT)}, f"the read would end at time {AT}, before"),
        (
            TARGET | {"startingTimestamp": "1764445200"},
            "startingTimestamp is Unix milliseconds, and 1764445200 is 1970-01-21: of seconds, give 1764445200000",
        ),
        (TARGET | {"columns": "bodies"}, "a topic has no column 'bodies'; it has part, offset"),
        (TARGET | {"startingOffsets": "begin"}, "startingOffsets is earliest, latest, or an offset for each part"),
        (TARGET | {"startingOffsets": "latest"}, "after latest there is nothing"),
        (TARGET | {"endingOffsets": "earliest"}, "before earliest there is nothing"),
        (TARGET | {"startingOffsets": "earliest", "startingTimestamp": "1"}, "give startingOffsets or startingTimestamp"),
        (TARGET | {"maxOffsetsPerTrigger": "5"}, "is for streaming reads"),
        (TARGET | {"maxOffsetPerTrigger": "5"}, "did you mean maxOffsetsPerTrigger?"),
        (TARGET | {"users": "5"}, "there is no option 'users' here"),
    ],
)
def test_a_wrong_option_of_a_read_is_named(given_: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        read_options(given_, streaming=False)
    assert said in str(raised.value)


def test_options() -> None:
    assert read_options(TARGET, streaming=False).starting.word == EARLIEST
    assert read_options(TARGET, streaming=True).starting.word == LATEST
    assert read_options(TARGET | {"startingTimestamp": str(AT)}, streaming=True).starting.word == BY_TIME
    assert read_options(TARGET, streaming=True).columns == tuple(TYPES)
    assert "headers" not in PixiuSource(TARGET | {"includeHeaders": "false"}).schema().names
    for given_, streaming, said in (
        (TARGET | {"epoch": "1"}, False, "option epoch needs option query"),
        (TARGET | {"epoch": "1", "query": "q"}, True, "option epoch is for batch writes"),
        (TARGET | {"query": "q" * 129}, True, "at most 128 characters"),
        (TARGET | {"level": "accepted"}, True, "there is no option 'level' here"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            write_options(given_, streaming=streaming)
    with pytest.raises(InvalidArgument, match="column 'offset' of a topic is bigint, and the schema says int"):
        TopicReader.of(TARGET, StructType([StructField("offset", IntegerType())]))


def test_rows_to_write() -> None:
    columns = columns_to_write(spark_schema(tuple(TYPES)))
    assert columns == ("body", "key", "slot", "headers", "event_time", "tag", "load_test")
    at = datetime.datetime(2026, 3, 1, tzinfo=datetime.UTC)
    found = {
        "body": pa.array([b"b", b""], pa.binary()),
        "key": pa.array(["k", None]),
        "slot": pa.array([3, None], pa.int16()),
        "headers": pa.array([[("n", "v"), ("m", None)], None], pa.map_(pa.string(), pa.string())),
        "event_time": pa.array([at, None], pa.timestamp("us", "UTC")),
        "tag": pa.array(["t", None]),
        "load_test": pa.array([True, None]),
    }
    rows = rows_of(pa.RecordBatch.from_pydict(found), columns)
    assert rows == [Row(b"b", b"k", 3, [("n", b"v"), ("m", b"")], int(at.timestamp() * 1e6), "t", True), Row(b"", headers=[])]
    for name, values, said in (
        ("body", [None, "x"], "a row has no body"),
        ("slot", [65536, 1], "column 'slot' is from 0 to 65535, not 65536"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            rows_of(pa.RecordBatch.from_pydict(found | {name: pa.array(values)}), columns)
    for schema, said in (
        ([StructField("value", BinaryType())], "a topic needs a column 'body' .binary or string.; there are value"),
        ([StructField("body", LongType())], "column 'body' is binary or string, not bigint"),
        ([StructField("body", StringType()), StructField("event_time", LongType())], "'event_time' is a timestamp, not bigint"),
        (
            [StructField("body", StringType()), StructField("headers", MapType(StringType(), TimestampType()))],
            "a map of strings to",
        ),
    ):
        with pytest.raises(InvalidArgument, match=said):
            columns_to_write(StructType(schema))


@pytest.fixture
def stored(topic: Topic, tmp_path: Path) -> ObjectStore:
    """Offsets 0 to 79 are in a store, in two objects with 10 offsets between them that were given up."""
    store = ObjectStore(str(tmp_path))
    objects = []
    for low, high in ((0, 40), (50, 80)):
        data = b"".join(blocks(base, 10) for base in range(low, high, 10))
        objects.append(StoredObject(low, high, len(data), crc32(data), 1, 1, 3, store.url))
        store.put(objects[-1].name("7-1"), data)
    manifest = Manifest(3, 1, 7, 1, 0, False, objects)
    store.create(manifest.name, manifest.encode())
    topic.store, topic.gaps = topic_pb2.TopicStore(url=store.url, end=80), [(40, 50)]
    return store


def bodies(reader: TopicReader) -> list[bytes]:
    found = list[bytes]()
    for task in reader.partitions():
        for batch in reader.read(pickle.loads(pickle.dumps(task))):
            found += batch.column("body").to_pylist()
    return found


def batch_reader(**options: str) -> TopicReader:
    made = PixiuSource(TARGET | {"failOnDataLoss": "false"} | options)
    found = made.reader(made.schema())
    assert isinstance(found, TopicReader)
    return found


def test_closed_segments_are_read_from_the_store_and_the_rest_from_the_leader(topic: Topic, stored: ObjectStore) -> None:
    apart = bodies(batch_reader(startingOffsets='{"1": 5}', endingOffsets='{"1": 95}'))
    assert topic.asked == [(40, 50), (80, 95)]
    topic.asked.clear()
    assert bodies(batch_reader(startingOffsets='{"1": 5}', endingOffsets='{"1": 95}', fromStore="false")) == apart
    assert topic.asked == [(5, 95)]
    assert apart == [b"%d" % number for number in (*range(5, 40), *range(50, 95))]


@pytest.mark.parametrize("fault", ["away", "damaged", "no manifest"])
def test_what_cannot_be_read_from_the_store_comes_from_the_leader(topic: Topic, stored: ObjectStore, fault: str) -> None:
    (one,) = [name for name in stored.names("7-1") if "/000000000000000-" in name]
    (manifest,) = [name for name in stored.names("7-1") if "manifest" in name]
    match fault:
        case "away":
            stored.remove([one])
        case "damaged":
            stored.put(one, stored.read(one)[:-1] + b"?")
        case _:
            stored.put(manifest, b"{")
    assert bodies(batch_reader()) == [b"%d" % number for number in (*range(40), *range(50, 100))]
    assert topic.asked[0] == ((0, 100) if fault == "no manifest" else (0, 40))


def test_a_stream_reads_the_manifest_again_only_for_what_it_does_not_name(
    topic: Topic, stored: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    real = ObjectStore.manifest

    def manifest(store: ObjectStore, topic: int, number: int) -> Manifest | None:
        read.append(number)
        return real(store, topic, number)

    monkeypatch.setattr(ObjectStore, "manifest", manifest)
    reader = stream(failOnDataLoss="false")
    start = reader.initialOffset()
    assert topic.store is not None
    for rows, known in ((10, 80), (30, 80), (45, 85)):
        topic.store.end = known
        end = reader.latestOffset(start, ReadMaxRows(rows))
        tasks = reader.partitions(start, end)
        start = end
        assert all(task.objects for task in tasks if task.begin < 80)
    assert len(read) == 2  # at first, and when the leader says that the store has more
