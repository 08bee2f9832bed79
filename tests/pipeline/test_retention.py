"""Retention by an archive: what is archived leaves Xiu, and is found in the archive's files; what is not stays."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from pipeline.archive.archived import read_messages
from pipeline.archive.retention import Limits
from pipeline.commands import pipeline
from pipeline.spark.replicas import Replicas
from pixiu.errors import InvalidArgument, StoreDamaged
from pixiu.wire.export_tables import MESSAGES, columns_of
from tests.pipeline.conftest import Store
from tests.pipeline.test_replicas import odd_records
from tests.pipeline.test_restore import exported, replicas_of
from tests.support.cluster import wait_for
from tests.xiu.parts import NOW_US
from xiu.records.block import Block

BODY_BYTES = 8000
"""So that some hundred are more than a mark of retention is apart."""


def test_the_least_limit_counts() -> None:
    assert Limits(10, archived=30, old=20, unread=25).up_to == 20
    assert Limits(10, archived=30, old=20, unread=25).limit == "age"
    assert Limits(10, archived=15, old=20, unread=25).limit == "archive"
    assert Limits(10, archived=30, old=40, unread=12).limit == "unread"
    assert Limits(10, archived=5, old=40, unread=12).up_to == 10, "never below what is stored"


def test_what_is_no_archive_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="holds no archive"):
        read_messages(str(tmp_path), [1])
    with pytest.raises(InvalidArgument, match="not a folder that Arrow knows"):
        read_messages("what://is/this", [1])
    refused = CliRunner().invoke(pipeline, ["find", str(tmp_path), "first"])
    assert (refused.exit_code, "'first' is not a MsgID" in refused.stderr) == (2, True)


def test_files_of_an_archive_are_read_by_msg_id(tmp_path: Path) -> None:
    records = odd_records()

    def write(batch: int, first: int, *, manifest: bool = True) -> list[int]:
        rows = exported([Block(first, len(records), NOW_US, b"".join(records))])
        folder = tmp_path / "messages" / f"batch={batch}" / "day=2026-11-23"
        folder.mkdir(parents=True)
        pq.write_table(pa.Table.from_batches([rows]), folder / "part-0.parquet")
        if manifest:
            line = {"xiu_partition": 1, "rows": len(records), "first": first, "last": first + len(records) - 1}
            (tmp_path / "manifest" / f"batch={batch}").mkdir(parents=True)
            (tmp_path / "manifest" / f"batch={batch}" / "part-0.json").write_text(json.dumps(line) + "\n")
        return list(map(int, rows.column("msg_id").to_pylist()))

    first, second = write(0, 1 << 32 | 1), write(1, 1 << 32 | 1000)
    killed = write(2, 1 << 32 | 2000, manifest=False)
    found = read_messages(str(tmp_path), [second[1], first[0], killed[0], 5])
    assert found.column("msg_id").to_pylist() == [first[0], second[1]]
    assert found.column_names == [name for name, _ in columns_of(MESSAGES, ())]
    assert read_messages(f"file://{tmp_path}", [killed[0]]).num_rows == 0
    (tmp_path / "messages/batch=1/day=2026-11-23/part-0.parquet").write_bytes(b"torn")
    with pytest.raises(StoreDamaged, match="cannot be read"):
        read_messages(str(tmp_path), [second[1]])
    (tmp_path / "manifest/batch=1/part-0.json").write_text('{"xiu_part')
    with pytest.raises(StoreDamaged, match=r"the manifest .*batch=1/part-0\.json cannot be read"):
        read_messages(str(tmp_path), [first[0]])


@pytest.mark.e2e
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_what_is_archived_leaves_xiu_and_is_found_in_the_archive(
    spark: Any, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.pipeline.test_spark import batch, of

    monkeypatch.setenv("PIXIU_KEEP_SESSION", "1")
    path = str(tmp_path / "archive")
    users = store.users(2)
    chance = random.Random(1)
    sent = store.send(users, [chance.randbytes(BODY_BYTES) for _ in range(600)])

    def command(*arguments: str, code: int = 0) -> Any:
        result = CliRunner().invoke(pipeline, [*arguments, "--json"])
        assert result.exit_code == code, result.output
        return json.loads(result.stdout)

    def retention(*more: str, of: str = path, code: int = 0) -> Any:
        target = ("--target", store.target, "--yes", "--reason", "archived")
        return command("retention", of, *target, *more, code=code)

    def left() -> set[int]:
        return {row.msg_id for row in batch(spark, store, users=of(*users), columns="msg_id").collect()}

    total = batch(spark, store, columns="seq").count()
    command("archive", path, "--target", store.target, "--rows", str(total // 2 + 1))
    later = store.send(users, [b"not archived"] * 4)
    unread = retention("--older-than", "0")["tables"]["partitions"]["rows"]
    assert {row["limit"] for row in unread} == {"unread"}, "nobody has acknowledged anything"
    dry = retention("--older-than", "0", "--unread", "--dry-run")
    assert {row["limit"] for row in dry["tables"]["partitions"]["rows"]} == {"archive"}
    assert {row["trimmed"] for found in (unread, dry["tables"]["partitions"]["rows"]) for row in found} == {0}

    partly = shutil.copytree(path, tmp_path / "partly")
    shutil.rmtree(min((partly / "manifest").glob("batch=*")))
    lacking = retention("--older-than", "0", "--unread", of=str(partly), code=1)
    assert lacking["trimmed"] == 0
    assert sum(row["not_archived"] for row in lacking["tables"]["partitions"]["rows"]) > 0
    (part, *_) = (foreign := Path(shutil.copytree(path, tmp_path / "foreign"))).glob("manifest/batch=*/part-*.json")
    part.write_text(part.read_text().replace('"cluster":"', '"cluster":"0'))
    (part.parent / f".{part.name}.crc").unlink()
    refused = CliRunner().invoke(pipeline, ["retention", str(foreign), "--target", store.target, "--yes", "--reason", "r"])
    assert (refused.exit_code, "has batches of cluster 0" in refused.stderr) == (2, True), refused.output
    assert left() == set(sent) | set(later), "so far nothing is gone"

    report = retention("--older-than", "0", "--unread")
    gone = set(sent) - left()
    assert report["trimmed"] >= len(gone) > 0
    assert left() >= set(later), "what is not archived stays"
    floors = {row["partition"]: row["floor_now"] for row in report["tables"]["partitions"]["rows"]}

    def on_replicas() -> bool:
        for partition, floor in floors.items():
            for process in replicas_of(store, partition):
                with Replicas(store.target, "xiu", {partition: (process["address"],)}) as one:
                    if one.bounds(partition).first != floor:
                        return False
        return True

    wait_for(on_replicas, "the same floor on every replica")
    audits = [line for log in store.cluster.folder.rglob("xiu-*/replica/audit.log") for line in log.read_text().splitlines()]
    said = [line for line in map(json.loads, audits) if line["reason"] == "archived"]
    assert len(said) == len(floors), "a line for each partition, by its leader"

    found = read_messages(path, [*gone, 12345]).to_pylist()
    assert {row["msg_id"]: row["body"] for row in found} == {each: sent[each].body for each in gone}
    some = min(gone)
    shown = command("find", path, hex(some), "12345", code=1)
    assert ([row["msg_id"] for row in shown["messages"]], shown["missing"]) == ([some], [12345])
