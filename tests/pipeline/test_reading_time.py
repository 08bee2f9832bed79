"""Time until mail is read, from snapshots: each entry counts once, and what a snapshot cannot say is two limits."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.conftest import Store
from tests.pipeline.test_jobs import delivered, saved
from tests.support.cluster import wait_for

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]
S = 1_000_000


@pytest.mark.process
def test_what_two_snapshots_say(spark: Any) -> None:
    from pyspark.sql import functions as f

    from pipeline.jobs import reading

    def entries(*rows: tuple[int, int, bool]) -> Any:
        """(inbox_seq, arrival in seconds, read)."""
        frame = spark.createDataFrame([(1, 0, *row) for row in rows], "uin long, lane int, inbox_seq long, at_s long, read boolean")
        return frame.withColumn("appended_at", f.timestamp_seconds("at_s")).drop("at_s")

    before = entries((1, 100, False), (2, 100, False), (3, 130, False)).drop("read")
    seen = entries((4, 90, True)).drop("read")
    now = entries((1, 100, True), (2, 100, False), (4, 90, True), (5, 190, True), (6, 195, False))
    read, unread, left = reading.compared(now, before, seen, 160 * S, 200 * S)
    found = {row.inbox_seq: (row.least_ms, row.most_ms) for row in read.collect()}
    assert found == {1: (60_000, 100_000), 5: (0, 10_000)}, "2 is open, 4 was seen as read before"
    assert {row.inbox_seq for row in unread.collect()} == {2, 6}
    assert left == 1, "3 was read, or has expired: nobody knows"
    cohorts = {row.cohort.minute: row for row in reading.by_cohort(read, unread, "1 minute").collect()}
    assert {minute: (row.read, row.unread) for minute, row in cohorts.items()} == {1: (1, 1), 3: (1, 1)}
    assert cohorts[1].read_after_p50_least == 60_000
    assert cohorts[1].read_after_p99_most == 100_000


@pytest.mark.e2e
def test_reading_of_a_cluster(spark: Any, store: Store, tmp_path: Path) -> None:
    from pipeline.jobs import reading

    quick, slow = store.users(2)
    store.send([quick, slow], [b"%d" % number for number in range(6)])
    options = reading.ReadingOptions(store.target, str(tmp_path / "reading"))
    first, _ = reading.run(spark, options)
    assert len(asyncio.run(delivered(store, quick, 3, acknowledge=True))) == 3
    wait_for(lambda: saved(store, quick) == 3, "acknowledgements in Pi")
    second, tables = reading.run(spark, options)
    assert (second.facts["snapshots"], second.facts["last_snapshot"]) == (2, first.facts["this_snapshot"])
    assert (second.facts["read"], second.facts["unread"]) == (first.facts["read"] + 3, first.facts["unread"] - 3)
    again, _ = reading.run(spark, options)
    assert again.facts["read"] == second.facts["read"], "each counts once"
    assert sum(row.unread for row in tables["cohorts"].collect()) == second.facts["unread"]
