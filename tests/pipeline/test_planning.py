"""What the source plans: offsets, limits, ranges, what is lost; over partitions in memory. No Java."""

from __future__ import annotations

import itertools
import json
import pickle
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows
from pyspark.sql.types import BinaryType, IntegerType, LongType, MapType, StringType, StructType

from pipeline.format import PixiuSource
from pipeline.spark import source
from pipeline.spark.options import read_options
from pipeline.spark.source import PixiuReader, PixiuStreamReader, RowsPartition
from pixiu.errors import Gone, InvalidArgument, Overloaded
from pixiu.wire.v1 import export_pb2

TARGET = {"target": "127.0.0.1:7000"}
AT = 1_764_445_200_000
"""Unix milliseconds of position 0."""
HERE = "a" * 16
ROW = 100
"""Bytes of a row."""


@dataclass
class Cluster:
    """Partitions as lists of positions."""

    partitions: list[list[int]]
    floors: dict[int, int] = field(default_factory=dict)
    held: dict[tuple[int, str], int] = field(default_factory=dict)
    id: str = HERE
    full: str = ""
    """Why no reader is held."""

    def put(self, partition: int, count: int, epoch: int = 0) -> None:
        rows = self.partitions[partition]
        first = max(rows[-1] + 1 if rows else 1, epoch << 32)
        rows.extend(range(first, first + count))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    found = Cluster([[], []])

    class Replicas:
        def __init__(self, target: str, role: str, known: Any = None, retry_s: float = 0) -> None:
            self.count = 0
            self.addresses: dict[int, tuple[str, ...]] = {}
            self.cluster = ""

        def __enter__(self) -> Replicas:
            return self

        def __exit__(self, *_: object) -> None:
            self.close()

        def close(self) -> None:
            pass

        def find(self, max_age_s: float = 0) -> int:
            self.count = len(found.partitions)
            self.addresses = {partition: (f"127.0.0.1:{partition}",) for partition in range(self.count)}
            return self.count

        def bounds(
            self, partition: int, begin: int = 0, end: int = 0, limit: int = 0, at_us: int = 0, *, limit_bytes: int = 0,
            sizes: bool = False,
        ) -> export_pb2.BoundsReply:  # fmt: skip
            self.cluster = found.id
            rows = found.partitions[partition]
            floor, last = found.floors.get(partition, 0), (rows[-1] if rows else 0)
            stop = min(end or last + 1, last + 1)
            between = [position for position in rows if max(begin, floor) <= position < stop]
            taken = between[: max(1, limit_bytes // ROW) if limit_bytes else limit]
            return export_pb2.BoundsReply(
                role="xiu", partition=partition, first=floor, end=last + 1, rows=len(between), leads=True,
                advanced=taken[-1] + 1 if taken else begin, at=next((p for p in rows if p >= at_us // 1000 - AT), last + 1),
                bytes=ROW * len(taken if limit_bytes else between),
            )  # fmt: skip

        def hold(self, partition: int, reader: str, position: int) -> None:
            if found.full:
                raise Overloaded(found.full)
            found.held[partition, reader] = position

    monkeypatch.setattr(source, "Replicas", Replicas)
    return found


def stream(**options: str) -> PixiuStreamReader:
    return PixiuStreamReader(read_options(TARGET | options, streaming=True))


def ranges(tasks: Any) -> list[tuple[int, int, int]]:
    return [(task.rows.partition, task.rows.begin, task.rows.end) for task in tasks if isinstance(task, RowsPartition)]


def test_a_stream_goes_on_by_its_limit_over_epochs(cluster: Cluster) -> None:
    for partition, counts in enumerate(((10, 30), (5, 15))):
        for epoch, count in enumerate(counts):
            cluster.put(partition, count, epoch)
    reader = stream(startingOffsets="earliest", maxOffsetsPerTrigger="12")
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMaxRows(12)
    offset = reader.initialOffset()
    assert offset == {"0": 0, "1": 0, "cluster": HERE}
    seen: list[tuple[int, int]] = []
    sizes = []
    while (after := reader.latestOffset(offset, limit)) != offset:
        rows = [
            (partition, position)
            for partition, begin, end in ranges(reader.partitions(offset, after))
            for position in cluster.partitions[partition]
            if begin <= position < end
        ]
        sizes.append(len(rows))
        seen += rows
        offset = after
    assert sizes == [12, 12, 12, 12, 12]
    assert sorted(seen) == [(partition, position) for partition in (0, 1) for position in cluster.partitions[partition]]
    assert reader.latestOffset({"0": 0, "1": 0, "cluster": HERE}, ReadAllAvailable()) == offset, "all available is all"
    assert reader.reportLatestOffset() == offset | {"rows_behind": 0, "bytes_behind": 0}
    cluster.put(0, 7, epoch=2)
    behind = reader.reportLatestOffset()
    assert (behind["rows_behind"], behind["bytes_behind"]) == (7, 7 * ROW), "the lag is in rows, whatever positions do"


def test_a_stream_goes_on_by_its_limit_of_bytes(cluster: Cluster) -> None:
    cluster.put(0, 3)
    cluster.put(1, 30)
    reader = stream(startingOffsets="earliest", maxBytesPerTrigger="1000")
    limit, offset = reader.getDefaultReadLimit(), reader.initialOffset()
    assert limit == ReadMaxBytes(1000)
    ends = []
    while (after := reader.latestOffset(offset, limit)) != offset:
        ends.append((after["0"], after["1"]))
        offset = after
    assert ends == [(4, 8), (4, 18), (4, 28), (4, 31)], "what the small one leaves is the large one's"
    both = stream(startingOffsets="earliest", maxBytesPerTrigger="1000", maxOffsetsPerTrigger="4")
    first = both.latestOffset(both.initialOffset(), both.getDefaultReadLimit())
    assert (first["0"], first["1"]) == (0, 5), "the stricter limit counts"


def test_a_stream_waits_for_its_least_rows(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(source, "time", SimpleNamespace(monotonic=lambda: now))
    reader = stream(startingOffsets="earliest", minOffsetsPerTrigger="5", maxTriggerDelay="1m")
    start, limit = reader.initialOffset(), reader.getDefaultReadLimit()
    cluster.put(0, 1)
    first = reader.latestOffset(start, limit)
    assert first["0"] == 2, "the first one does not wait"
    cluster.put(0, 4)
    assert reader.latestOffset(first, limit) == first
    assert reader.reportLatestOffset()["rows_behind"] == 4
    cluster.put(1, 1)
    second = reader.latestOffset(first, limit)
    assert (second["0"], second["1"]) == (6, 2)
    cluster.put(0, 1)
    assert reader.latestOffset(second, limit) == second
    now = 160.0
    assert reader.latestOffset(second, limit)["0"] == 7
    reader.prepareForTriggerAvailableNow()
    assert reader.latestOffset(second, limit)["0"] == 7, "that ends, and waits for nothing"


def test_a_start_by_time(cluster: Cluster) -> None:
    cluster.put(0, 10)
    cluster.put(1, 5)

    def tasks(**options: str) -> list[tuple[int, int, int]]:
        return ranges(PixiuReader(read_options(TARGET | options, streaming=False)).partitions())

    assert tasks(startingTimestamp=str(AT + 4)) == [(0, 4, 11), (1, 4, 6)]
    assert tasks(startingTimestamp=str(AT + 8)) == [(0, 8, 11)]
    assert tasks(startingOffsetsByTimestamp=json.dumps({"0": AT + 9})) == [(0, 9, 11), (1, 0, 6)]
    assert tasks(endingOffsetsByTimestamp=json.dumps({"0": AT + 3, "1": AT + 99})) == [(0, 0, 3), (1, 0, 6)]
    with pytest.raises(
        InvalidArgument, match=r"Xiu partition 1 has nothing since 1764445200008 .* startingOffsetsByTimestampStrategy=latest"
    ):
        tasks(startingTimestamp=str(AT + 8), startingOffsetsByTimestampStrategy="error")
    with pytest.raises(InvalidArgument, match="the starting offsets name Xiu partition 7; the cluster has 0 to 1"):
        tasks(startingOffsetsByTimestamp=json.dumps({"7": AT + 9}))
    reader = stream(startingOffsetsByTimestamp=json.dumps({"0": AT + 9}))
    assert reader.initialOffset() == {"0": 9, "1": 6, "cluster": HERE}


def test_tasks_have_no_more_rows_than_they_may(cluster: Cluster) -> None:
    for epoch in (0, 1):
        cluster.put(0, 10, epoch)
    cluster.put(1, 3)
    tasks = PixiuReader(read_options(TARGET | {"maxRecordsPerPartition": "6"}, streaming=False)).partitions()
    counts = [sum(begin <= position < end for position in cluster.partitions[partition]) for partition, begin, end in ranges(tasks)]
    assert counts == [5, 5, 5, 5, 3]


def test_available_now_ends_at_what_was_there(cluster: Cluster) -> None:
    cluster.put(0, 10)
    reader = stream(startingOffsets="earliest")
    start = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    cluster.put(0, 5)
    cluster.partitions.append([])
    cluster.put(2, 5)
    end = reader.latestOffset(start, ReadAllAvailable())
    assert end == {"0": 11, "1": 1, "cluster": HERE}
    assert reader.latestOffset(end, ReadAllAvailable()) == end


def test_partitions_that_are_added_begin_at_their_earliest(cluster: Cluster) -> None:
    cluster.put(0, 3)
    reader = stream(startingOffsets="latest", reader="b")
    start = reader.initialOffset()
    assert start == {"0": 4, "1": 1, "cluster": HERE}
    cluster.partitions += [[], []]
    cluster.put(2, 4)
    end = reader.latestOffset(start, ReadAllAvailable())
    assert ranges(reader.partitions(start, end)) == [(2, 0, 5), (3, 0, 1)], "of 3, which is empty, nothing"
    reader.commit(start)
    assert cluster.held == {(0, "b"): 4, (1, "b"): 1, (2, "b"): 0, (3, "b"): 0}, "of what was added everything is needed"


def test_what_was_trimmed_of_an_added_partition_is_told(cluster: Cluster) -> None:
    cluster.partitions.append([])
    cluster.put(2, 4)
    cluster.floors[2] = 2
    start, end = {"0": 0, "1": 0, "cluster": HERE}, {"0": 1, "1": 1, "2": 5, "cluster": HERE}
    with pytest.raises(Gone, match="partition 2: retention has passed position 0; the first that is stored is 2"):
        stream().partitions(start, end)
    assert ranges(stream(failOnDataLoss="false").partitions(start, end))[-1] == (2, 2, 5)


def test_a_hold_that_nobody_takes_is_told(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    cluster.full = "64 readers are held already"
    stream(startingOffsets="earliest", reader="b").initialOffset()
    assert "retention does not wait for reader b in Xiu partition 1: 64 readers are held already" in caplog.text


def test_what_was_trimmed_is_told_or_passed(cluster: Cluster) -> None:
    cluster.put(0, 10)
    cluster.floors[0] = 6
    with pytest.raises(Gone, match="partition 0: retention has passed position 3; the first that is stored is 6; rows are lost"):
        stream().partitions({"0": 3, "cluster": HERE}, {"0": 11, "cluster": HERE})
    assert ranges(stream(failOnDataLoss="false").partitions({"0": 3, "cluster": HERE}, {"0": 11, "cluster": HERE})) == [(0, 6, 11)]
    with pytest.raises(Gone, match="retention has passed position 3"):
        PixiuReader(read_options(TARGET | {"startingOffsets": '{"0": 3}'}, streaming=False)).partitions()


def test_another_clusters_checkpoint_is_refused(cluster: Cluster) -> None:
    cluster.put(0, 3)
    with pytest.raises(InvalidArgument, match="the checkpoint is at position 99 of Xiu partition 0, and the cluster ends at 4"):
        stream().latestOffset({"0": 99, "1": 1, "cluster": HERE}, ReadAllAvailable())
    with pytest.raises(InvalidArgument, match="use another checkpointLocation"):
        stream().latestOffset({"logOffset": 3}, ReadAllAvailable())


def test_an_offset_says_of_which_cluster_it_is(cluster: Cluster) -> None:
    cluster.put(0, 3)
    reader = stream(startingOffsets="earliest")
    offset = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    assert offset == {"0": 4, "1": 1, "cluster": HERE}
    assert reader.reportLatestOffset() == offset | {"rows_behind": 0, "bytes_behind": 0}
    with pytest.raises(InvalidArgument, match="messages that were read are no longer stored: restore the partition"):
        stream().latestOffset(offset | {"0": 99}, ReadAllAvailable())
    cluster.id = "b" * 16
    said = "made with cluster a{16}, and 127.0.0.1:7000 is cluster b{16}: use another checkpointLocation, or the target"
    with pytest.raises(InvalidArgument, match=said):
        stream().latestOffset(offset, ReadAllAvailable())
    cluster.floors[0] = 2
    with pytest.raises(InvalidArgument, match=said):  # the last micro-batch once more, before anything else is asked
        stream().partitions({"0": 1, "1": 1, "cluster": HERE}, offset)


def test_a_batch_is_cut_as_it_is_told(cluster: Cluster) -> None:
    cluster.put(0, 100)
    cluster.put(1, 10)

    def tasks(**options: str) -> list[tuple[int, int, int]]:
        return ranges(PixiuReader(read_options(TARGET | options, streaming=False)).partitions())

    assert tasks() == [(0, 0, 101), (1, 0, 11)]
    assert tasks(partitions="1") == [(1, 0, 11)]
    assert tasks(startingOffsets='{"0": 5, "1": -1}', endingOffsets='{"0": 9}') == [(0, 5, 9)]
    assert tasks(endingOffsets='{"0": 50, "1": 1}') == [(0, 0, 50), (1, 0, 1)]
    with pytest.raises(InvalidArgument, match="endingOffsets names position 999 of Xiu partition 0, which ends at 101"):
        tasks(endingOffsets='{"0": 999, "1": 1}')
    with pytest.raises(InvalidArgument, match="startingOffsets names position 999 of Xiu partition 0, which ends at 101"):
        tasks(startingOffsets='{"0": 999}')
    with pytest.raises(InvalidArgument, match="the ending offsets name Xiu partition 9; the cluster has 0 to 1"):
        tasks(endingOffsets='{"9": 3}')
    with pytest.raises(InvalidArgument, match="the starting offsets name Xiu partition 9"):
        stream(startingOffsets='{"9": 3}').initialOffset()
    cut = tasks(minPartitions="8", partitions="0")
    assert len(cut) == 8
    assert cut[0][1] == 0
    assert cut[-1][2] == 101
    assert all(before[2] == after[1] for before, after in itertools.pairwise(cut))
    with pytest.raises(InvalidArgument, match="option partitions names 5; the cluster has xiu 0 to 1"):
        tasks(partitions="5")


def test_retention_is_told_what_is_still_needed(cluster: Cluster) -> None:
    cluster.put(0, 10)
    reader = stream(startingOffsets="earliest", reader="archive")
    reader.initialOffset()
    assert cluster.held == {(0, "archive"): 0, (1, "archive"): 0}
    reader.commit({"0": 7, "1": 1, "cluster": HERE})
    assert cluster.held[0, "archive"] == 7


def test_a_reader_travels_without_its_connections(cluster: Cluster) -> None:
    reader = stream(startingOffsets="earliest")
    reader.initialOffset()
    again = pickle.loads(pickle.dumps(reader))
    assert again._replicas is None
    assert again.initialOffset() == {"0": 0, "1": 0, "cluster": HERE}


def test_a_schema_chooses_columns_or_is_refused_when_planning() -> None:
    def names(schema: StructType, **options: str) -> list[str]:
        reader = PixiuSource(TARGET | options).reader(schema)
        return [name for name, _ in reader._options.columns]

    some = StructType().add("seq", LongType()).add("body", BinaryType())
    every = PixiuSource(dict(TARGET)).schema()
    assert names(some) == ["seq", "body"]
    assert names(every) == every.names
    assert names(some, columns="seq,body") == ["seq", "body"]
    with pytest.raises(InvalidArgument, match="column 'seq' of table messages is bigint, and the schema says int"):
        names(StructType().add("seq", IntegerType()))
    with pytest.raises(InvalidArgument, match="table messages has no column 'bodies'"):
        names(StructType().add("bodies", BinaryType()))
    with pytest.raises(InvalidArgument, match="give a schema or option columns: one names seq, body, the other key"):
        names(some, columns="key")
    headers = MapType(StringType(), StringType())
    assert names(StructType(list(some.fields)).add("headers", headers), includeHeaders="true") == ["seq", "body"]
    whole = PixiuSource(TARGET | {"includeHeaders": "true"})
    assert whole.schema().names == [*every.names, "headers"]
    assert names(StructType().add("headers", headers), includeHeaders="true") == []
    with pytest.raises(InvalidArgument, match="column 'headers' is the last one: put it at the end of the schema"):
        names(StructType().add("headers", headers).add("seq", LongType()), includeHeaders="true")
    with pytest.raises(InvalidArgument, match="table messages has no column 'headers'"):
        names(StructType(list(some.fields)).add("headers", headers))
