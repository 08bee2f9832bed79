"""A partition of Xiu loses all its disks, and has its messages back from the archive."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
import pytest
from typer.testing import CliRunner

import pixiu
from pipeline.archive.restore import blocks_of, rows_of
from pipeline.commands import pipeline
from pixiu.ids import msg_partition
from pixiu.wire.export_tables import MESSAGES, columns_of
from pixiu.wire.v1 import xiu_pb2, xiu_pb2_grpc
from tests.pipeline.conftest import Store
from tests.pipeline.test_replicas import odd_records
from tests.support.cluster import wait_for
from tests.xiu.parts import NOW_US
from xiu.export.rows import Rows
from xiu.records.block import Block

MESSAGES_SENT = int(os.environ.get("PIXIU_RESTORE_MESSAGES", "2000"))


def exported(blocks: list[Block]) -> pa.RecordBatch:
    rows = Rows(1, columns_of(MESSAGES, ()), frozenset())
    for block in blocks:
        rows.add(block, block.first, block.last)
    batch = rows.batch()
    assert batch is not None
    return batch


def test_records_are_made_again_byte_for_byte() -> None:
    records = odd_records()
    first = 1 << 32 | 1
    block = Block(first, len(records), NOW_US, b"".join(records))
    assert [record for _, _, record in rows_of(exported([block]))] == records


def test_rows_become_the_blocks_that_they_were() -> None:
    record = odd_records()[0]

    def rows(*of: tuple[int, int]) -> Iterator[tuple[int, int, bytes]]:
        return ((seq, at_us, record) for seq, at_us in of)

    epoch = 1 << 32
    found = [(each.sequence, each.count, each.at_us) for each in blocks_of(rows((1, 5), (2, 5), (3, 6), (5, 6), (epoch + 1, 6)))]
    assert found == [(1, 2, 5), (3, 1, 6), (5, 1, 6), (epoch + 1, 1, 6)]
    many = list(blocks_of(rows(*((each, 5) for each in range(1, 5001)))))
    assert sum(each.count for each in many) == 5000
    assert max(each.count for each in many) <= 4096
    assert max(len(each.batch) for each in many) <= 1 << 18


def replicas_of(store: Store, partition: int) -> list[dict[str, Any]]:
    return [process for process in store.cluster.processes("xiu") if process["partition"] == partition]


def wipe(store: Store, partition: int) -> None:
    """Every replica of a partition loses its disk and its process at one moment."""
    found = replicas_of(store, partition)
    assert len(found) == 2
    for process in found:
        os.kill(process["pid"], signal.SIGSTOP)
    for folder in {Path(path).parent for path in store.cluster.folder.rglob(f"xiu-{partition}-*/replica")}:
        shutil.rmtree(folder)
    for process in found:
        os.kill(process["pid"], signal.SIGKILL)


async def read_inbox(target: str, uin: int, count: int) -> list[tuple[int, bytes]]:
    """What a new device of a user is given."""
    found: list[tuple[int, bytes]] = []
    async with pixiu.connect(target) as px, px.inbox(uin=uin, device="restored") as inbox:
        async with asyncio.timeout(120):
            async for mail in inbox:
                found.append((mail.msg_id, bytes(mail.payload)))
                mail.acknowledge()
                if len(found) == count:
                    return found
    return found


@pytest.mark.e2e
@pytest.mark.spark
def test_only_an_operator_restores_who_names_the_replica_and_why(store: Store) -> None:
    from tests.pipeline.test_spark import leader_of

    with grpc.insecure_channel(leader_of(store, 0)["address"]) as channel:
        stub: Any = xiu_pb2_grpc.XiuStub(channel)  # type: ignore[no-untyped-call, unused-ignore]
        member = stub.Position(xiu_pb2.PositionRequest(), timeout=60).member
        begin = {"operator": "ann", "reason": "why", "member": member, "step": xiu_pb2.RESTORE_BEGIN}
        blocks = [xiu_pb2.RestoredBlock(sequence=1, count=1, at_us=1, batch=odd_records()[0])]
        for wrong in (
            {"operator": ""},
            {"reason": "y" * 600},
            {"member": member ^ 1},
            {"step": 7},
            {"blocks": blocks},
            {"step": xiu_pb2.RESTORE_BLOCKS},
            {"step": xiu_pb2.RESTORE_BLOCKS, "blocks": blocks},  # none was begun
        ):
            with pytest.raises(grpc.RpcError) as refused:
                stub.Restore(xiu_pb2.RestoreRequest(**(begin | wrong)), timeout=60)
            assert str(refused.value.details()).startswith(("INVALID_ARGUMENT: ", "MALFORMED: ")), wrong


def in_state(store: Store, partition: int) -> list[tuple[str, str]]:
    """(state, member) of the replicas of a Xiu partition that answer."""
    found = (process.get("replication") or {} for process in replicas_of(store, partition))
    return [(each["state"], each["member"]) for each in found if each.get("member")]


@pytest.mark.e2e
@pytest.mark.spark
@pytest.mark.timeout(900)
def test_a_partition_whose_disks_are_lost_is_restored(
    spark: Any, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.pipeline.test_spark import batch, leader_of

    monkeypatch.setenv("PIXIU_KEEP_SESSION", "1")
    path = str(tmp_path / "archive")
    user, *users = store.users(50)
    lost = user % 2

    def command(*arguments: str) -> Any:
        result = CliRunner().invoke(pipeline, [*arguments, "--target", store.target, "--json"])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    mine = store.send([user], [b"mine %d" % number for number in range(40)])
    sent = mine | store.send(users, [b"%d" % number for number in range(MESSAGES_SENT)])
    command("archive", path)
    before = spark.createDataFrame(batch(spark, store).toArrow())
    wipe(store, lost)

    waiting = wait_for(
        lambda: [member for state, member in in_state(store, lost) if state == "Following"], "replicas that nobody leads"
    )
    arguments = ("xiu", str(lost), waiting[0], "--force", "--yes", "--reason", "both disks are lost")
    wait_for(lambda: store.cluster.pixiu("promote", *arguments).returncode == 0, "a leader with nothing")
    leader_of(store, lost)
    after_the_loss = store.send([user], [b"meanwhile"] * 10)

    report = command("restore", path, "--yes", "--partitions", str(lost), "--reason", "from the archive")
    of_lost = before.where(f"xiu_partition = {lost}")
    assert report["messages"] == of_lost.count() >= sum(msg_partition(each) == lost for each in sent)
    audits = [path.read_text() for path in store.cluster.folder.rglob(f"xiu-{lost}-*/replica/audit.log")]
    said = [line for line in map(json.loads, "".join(audits).splitlines()) if line["reason"] == "from the archive"]
    assert {line["restore"] for line in said} == {"begin", "end"}
    again = command("restore", path, "--yes", "--partitions", str(lost), "--reason", "once more")
    assert (again["messages"], again["tables"]["restored"]["rows"][0]["there_already"]) == (0, report["messages"])

    found = batch(spark, store)
    assert before.exceptAll(found).count() == 0
    new = {row.msg_id for row in found.exceptAll(before).collect()}
    assert new == set(after_the_loss)
    mails = asyncio.run(read_inbox(store.target, user, len(mine) + len(after_the_loss)))
    assert mails == [(each, record.body) for each, record in (mine | after_the_loss).items()]
    store.cluster.wait_healthy()
    assert store.cluster.pixiu("repair", "--role", "xiu", "--partition", str(lost)).returncode == 0, "both replicas have it"
