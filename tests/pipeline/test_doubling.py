"""The sink writes and the source reads into Parquet while Xiu is doubled and its leader killed: each row once."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.queries import BUSY, TRIES, run_to_end
from pixiu.ids import msg_partition
from tests.pipeline.conftest import SMALL, Store
from tests.pipeline.test_spark import batch, leader_of, stream, to_parquet
from tests.support.cluster import running_cluster, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.spark, pytest.mark.timeout(600)]

STORES = ["--relay-replicas=1", "--xius=1", "--xiu-replicas=2", "--pis=1", "--pi-replicas=1"]
ROWS_PER_S = 100
READ_EVERY, WRITE_EVERY = "1 second", "3 seconds"
"""Triggers: as fast as they can they leave the doubling no CPU, and each batch that is written starts a Python for its commit."""
FIRST_BATCH_S = 300.0
"""With a Java that has just started, on a machine that has much else to do."""


def sink(spark: Any, store: Store, checkpoint: Path) -> Any:
    """Rows that count, as mail to eight users."""
    rows = spark.readStream.format("rate").option("rowsPerSecond", ROWS_PER_S).load()
    return (
        rows.selectExpr("value as id", "1 + value % 8 as uin", "cast(value as string) as body")
        .writeStream.trigger(processingTime=WRITE_EVERY)
        .format("pixiu")
        .option("target", store.target)
        .option("query", "counted")
        .option("checkpointLocation", str(checkpoint))
    )


class Lasting:
    """A query that begins again at its checkpoint where no Python process connected in time, as those of our jobs do."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self._start, self._tries = start, 1
        self._query = start()

    def running(self) -> Any:
        """The query of now; that it failed in any other way is an error."""
        error = self._query.exception()
        if error is not None:
            assert BUSY in str(error), error
            assert self._tries < TRIES, error
            self._tries += 1
            self._query = self._start()
        return self._query

    def stop(self) -> None:
        """End it."""
        self._query.stop()


def offset_of(lasting: Lasting, partition: int) -> int:
    """Up to where a query has read a partition; 0 while it has read nothing."""
    progress = lasting.running().lastProgress
    return int(json.loads(progress["sources"][0]["endOffset"]).get(str(partition), 0)) if progress else 0


def test_xiu_is_doubled_and_its_leader_dies_under_source_and_sink(spark: Any, tmp_path: Path) -> None:
    with running_cluster(tmp_path, *SMALL, *STORES) as cluster:
        cluster.wait_healthy()
        store = Store(cluster)
        written, read = tmp_path / "written", tmp_path / "read"
        writes = Lasting(sink(spark, store, written).start)
        # One after the other: Spark gives a Python that it starts ten seconds, which two at once may need on a busy machine.
        wait_for(lambda: writes.running().lastProgress, "a micro-batch of the sink", FIRST_BATCH_S)
        reads = Lasting(
            stream(spark, store, maxOffsetsPerTrigger=500)
            .writeStream.trigger(processingTime=READ_EVERY)
            .format("parquet")
            .option("path", str(read / "rows"))
            .option("checkpointLocation", str(read / "checkpoint"))
            .start
        )
        try:
            wait_for(lambda: offset_of(reads, 0) > 1, "a micro-batch", FIRST_BATCH_S)
            doubling = cluster.start_pixiu("double xiu", "--to", "2", "--yes")
            wait_for(lambda: cluster.status()["doublings"] or doubling.poll() is not None, "a doubling under way")
            os.kill(leader_of(store, 0)["pid"], signal.SIGKILL)
            said, problem = doubling.communicate(timeout=240)
            assert doubling.returncode == 0, said + problem
            before = offset_of(reads, 0)
            wait_for(lambda: offset_of(reads, 0) > before and offset_of(reads, 1) > 1, "rows of both partitions", FIRST_BATCH_S)
            writes.running()
        finally:
            writes.stop()
            reads.stop()
        # And what was under way when it was stopped, again.
        run_to_end(sink(spark, store, written).trigger(availableNow=True).start)
        to_parquet(stream(spark, store), read)

        rows = spark.read.parquet(str(read / "rows")).select("msg_id", "body").collect()
        assert Counter(int(row.body) for row in rows) == Counter(range(len(rows)))
        assert {msg_partition(row.msg_id) for row in rows} == {0, 1}
        msg_ids = Counter(row.msg_id for row in rows)
        assert msg_ids == Counter(row.msg_id for row in batch(spark, store, columns="msg_id").collect())
        assert msg_ids == Counter(row.msg_id for row in batch(spark, store, table="inboxes").collect()), "no user sees one twice"
        committed = max((written / "offsets").glob("[0-9]*"), key=lambda path: int(path.name)).read_text().splitlines()[-1]
        assert len(rows) == int(committed) * ROWS_PER_S, "all that the sink was given"
        cluster.wait_healthy()
