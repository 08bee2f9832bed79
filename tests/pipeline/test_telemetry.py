"""Telemetry by MQTT into a durable topic and into windows: the same as a batch over the rows, late and broken ones counted."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pixiu
from tests.pipeline.conftest import Store
from tests.support.telemetry import (
    FIELDS,
    SELECTED,
    VALUES,
    Reading,
    check_bodies,
    disordered,
    expected,
    made,
    publish,
    record,
    windows_of,
    with_broken,
    with_clocks,
)


def test_rows_that_are_delayed_are_all_there() -> None:
    ordered = list(made(1000))
    late = disordered(ordered)
    assert late != ordered
    assert sorted(late, key=lambda each: each.ts_ms) == ordered
    assert expected(late, 60_000) == expected(ordered, 60_000)
    bodies = with_broken(late, every=50)
    assert (len(bodies), check_bodies(body for _, body in bodies)) == (1020, 20)


@pytest.mark.e2e
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_windows_of_a_topic_are_those_of_a_batch(spark: Any, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.jobs import ingest

    monkeypatch.setattr(ingest, "MERGE_AT", 2)
    (port,) = store.cluster.mqtt_ports()
    record(store.cluster, "telemetry/#", "sensors", store.routes)
    readings, fresh, ahead = with_clocks(disordered(made(900)), time.time_ns() // 1_000_000, every=130)
    assert len(fresh) == len(ahead) == 7
    steps = [readings[:400], readings[400:600], readings[600:]]
    options = ingest.IngestOptions(
        store.target, str(tmp_path / "in"), "", FIELDS, "ts_ms", ("device",), VALUES, topic="sensors", rows_per_batch=300
    )  # fmt: skip
    so_far: list[Reading] = []
    for step in steps:
        bodies = with_broken(step, every=30)
        asyncio.run(publish(port, bodies))
        so_far += step
        report, tables = ingest.run(spark, options)
        of_step = Counter("fresh" if each in fresh else "ahead" if each in ahead else "late" for each in step)
        facts = report.facts
        assert (facts["messages"], facts["malformed"]) == (len(bodies), len(bodies) - len(step))
        assert (facts["late"], facts["ahead"]) == (of_step["late"], of_step["ahead"])
        assert facts["rows_in_windows"] == len(so_far)
        found = windows_of(tables["windows"].selectExpr(*SELECTED).collect())
        assert found == expected(so_far, 60_000)
    batches, merges = (tmp_path / "in" / name for name in ("updates", "merged"))
    assert len(list(batches.glob("batch=*"))) < len(list((tmp_path / "in/_checkpoint/commits").glob("[0-9]*"))), "they are removed"
    assert len(list(merges.glob("upto=*"))) <= 2
    newest = max(merges.glob("upto=*"), key=lambda each: int(each.name.removeprefix("upto=")))
    (newest / "_SUCCESS").unlink()  # as a merge that was killed leaves it
    found = windows_of(ingest.windows(spark, options.path, options.keys).selectExpr(*SELECTED).collect())
    assert found == expected(so_far, 60_000)
    with pytest.raises(pixiu.InvalidArgument, match="was made with --topic 'sensors', and not 'other'"):
        ingest.run(spark, replace(options, topic="other"))
