"""Compaction of an archive that is killed between any two steps: every message is read once. With Spark, without a cluster."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from pipeline.archive import archive, compact
from pipeline.archive.archived import read_messages
from pipeline.archive.coverage import Range
from pixiu.errors import StoreDamaged
from pixiu.wire.export_tables import MESSAGES, columns_of

pytestmark = [pytest.mark.process, pytest.mark.spark, pytest.mark.timeout(600)]
HOUR_US = 3_600_000_000
AT = datetime(2026, 3, 1, 23, 0, tzinfo=UTC)


class Killed(BaseException):
    """The process ends here."""


def messages(spark: Any, begin: int, end: int, *, without: str = "") -> Any:
    """Messages at these positions of partition 0, an hour apart."""
    from pipeline.spark.schema import spark_schema

    rows = [
        (0, 64, seq, seq, seq, 7, 8, None, AT + timedelta(hours=seq), 0, 60, b"", b"body %d" % seq, b"")
        for seq in range(begin, end)
    ]
    frame = spark.createDataFrame(rows, spark_schema(columns_of(MESSAGES, ()))).coalesce(1)
    return frame.drop(without) if without else frame


def written(spark: Any, path: str, batch: int, begin: int, end: int) -> None:
    summary = archive.write_messages(spark, messages(spark, begin, end), batch, path)
    archive.write_manifest(spark, [Range(batch, 0, begin, end, begin if begin else -1, "a" * 16)], summary, path)


def read(spark: Any, path: str) -> list[int]:
    return sorted(row.seq for row in archive.read_archive(spark, path).select("seq").collect())


def test_each_message_is_read_once_wherever_compaction_is_killed(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path)
    for batch in range(4):
        written(spark, path, batch, batch * 10, batch * 10 + 10)
    before = archive.verify(spark, path)
    assert before.findings == 0
    old_reader = archive.read_archive(spark, path).select("seq")

    def killed(name: str, *, first: bool) -> None:
        work = getattr(compact, name)

        def dies(*arguments: Any) -> Any:
            if not first:
                work(*arguments)
            raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(compact, name, dies)
            with pytest.raises(Killed):
                compact.run(spark, path, lambda: clock, keep_h=0)
        assert read(spark, path) == list(range(40)), (name, first)

    clock = HOUR_US
    killed("write_messages", first=True)
    killed("write_messages", first=False)
    clock += 1
    killed("write_manifest", first=True)
    clock += 1
    killed("write_manifest", first=False)
    assert sorted(row.seq for row in old_reader.collect()) == list(range(40)), "who began before reads on"
    assert [row["body"] for row in read_messages(path, [15]).to_pylist()] == [b"body 15"]
    clock += 1
    killed("remove_folder", first=False)
    report, _ = compact.run(spark, path, lambda: clock, keep_h=0)
    assert (report.facts["batches"], report.facts["removed"]) == (1, 4)
    assert len(archive.batches_in(spark, f"{path}/manifest")) == 1
    assert len(list(tmp_path.glob(f"messages/batch={HOUR_US + 2}/*/*.parquet"))) == 3, "a file for each day"
    after = archive.verify(spark, path)
    assert (after.findings, after.facts["messages"], after.facts["bytes"]) == (0, 40, before.facts["bytes"])
    assert [row["body"] for row in read_messages(path, [15]).to_pylist()] == [b"body 15"]
    written(spark, path, clock + 1, 40, 50)
    compact.run(spark, path, lambda: clock, keep_h=1)
    assert read(spark, path) == list(range(50)), "a joined batch is joined again"


def test_what_is_damaged_is_not_replaced(spark: Any, tmp_path: Path) -> None:
    path = str(tmp_path)
    for batch in range(2):
        written(spark, path, batch, batch * 10, batch * 10 + 10)
    manifest, *_ = tmp_path.glob("manifest/batch=1/part-*.json")
    line = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(line | {"digest": line["digest"] ^ 1}))
    (manifest.parent / f".{manifest.name}.crc").unlink()
    with pytest.raises(StoreDamaged, match="are damaged, and nothing was replaced"):
        compact.run(spark, path, lambda: 100)
    report = archive.verify(spark, path)
    assert report.findings == 1
    assert "retention trimmed" in report.facts["advice"]
    assert read(spark, path) == list(range(20))


def test_an_archive_with_a_column_less_is_read_and_appended_to(spark: Any, tmp_path: Path) -> None:
    """As one that was made before the column was added: files, digests and manifests without it."""
    path = str(tmp_path)
    columns, hidden = archive.COLUMNS, "lifetime_min"
    older = [name for name in columns if name != hidden]
    step: Callable[..., Any] = archive.write_messages
    archive.COLUMNS[:] = older
    try:
        step(spark, messages(spark, 0, 10, without=hidden), 1, path)
        summary = step(spark, messages(spark, 0, 10, without=hidden), 2, str(tmp_path / "again"))
    finally:
        archive.COLUMNS[:] = [name for name, _ in columns_of(MESSAGES, ())]
    archive.write_manifest(spark, [Range(1, 0, 0, 10, -1, "a" * 16)], summary, path)
    manifest, *_ = tmp_path.glob("manifest/batch=1/part-*.json")
    assert "replaces" not in manifest.read_text()
    written(spark, path, 2, 10, 20)
    assert archive.verify(spark, path).findings == 0
    found = {row.seq: row.lifetime_min for row in archive.read_archive(spark, path).collect()}
    assert found == dict(itertools.chain(((seq, None) for seq in range(10)), ((seq, 60) for seq in range(10, 20))))
    assert [row["lifetime_min"] for row in read_messages(path, [5, 15]).to_pylist()] == [None, 60]
    compact.run(spark, path, lambda: 100)
    assert archive.verify(spark, path).findings == 0
    assert {row.seq: row.lifetime_min for row in archive.read_archive(spark, path).collect()} == found
