"""A Xiu as a real process beside a real ZooKeeper: levels, reads, errors, crashes, damage, a full disk."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random

import grpc.aio
import pytest

from pixiu.discovery.node import Node
from pixiu.discovery.paths import partition_state
from pixiu.ids import msg_partition, msg_sequence, snowflake
from pixiu.wire.levels import Level
from pixiu.wire.record import Kind, encode
from pixiu.wire.v1 import xiu_pb2
from pixiu.wire.v1.xiu_pb2_grpc import XiuStub
from tests.support.disks import small_disk
from tests.support.effort import portion
from tests.support.roles import Roles
from tests.support.waiting import until
from tests.xiu.writer import Writer, mails

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


async def started(roles: Roles, name: str = "xiu-0", **settings: str) -> Node:
    """A Xiu of partition 0, Running."""
    roles.start(name, "/pubsub", deaf=False, partition=0, **settings)
    (node,) = await roles.running(name)
    return node


async def leading(nodes: dict[str, Node], *, epoch_above: int = 0) -> str:
    """Which of these leads, as it says itself."""
    for name, node in nodes.items():
        async with grpc.aio.insecure_channel(node.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            try:
                position = await XiuStub(channel).Position(xiu_pb2.PositionRequest(), timeout=2)  # type: ignore[no-untyped-call, unused-ignore]
            except grpc.aio.AioRpcError:
                continue
            if position.epoch > epoch_above:
                return name
    return ""


async def until_leading(nodes: dict[str, Node], epoch_above: int = 0) -> str:
    await until(lambda: leading(nodes, epoch_above=epoch_above), "a leader")
    return await leading(nodes, epoch_above=epoch_above)


async def until_in_sync(roles: Roles, count: int) -> None:
    """Until the registry says that so many replicas are in sync."""

    async def enough() -> bool:
        data, _ = await roles.zookeeper.get(partition_state("/pubsub", "xiu", 0))
        return len(json.loads(data)["in_sync"]) == count

    await until(enough, f"{count} replicas in sync")


async def until_readable(node: Node, ids: list[int], records: list[bytes]) -> None:
    """Until a replica has applied what was stored."""
    async with Writer(node) as writer:

        async def readable() -> bool:
            return (await writer.fetch(ids))[-1][0] == ""

        await until(readable, "everything applied")
        assert await writer.fetch(ids) == [("", record) for record in records]


async def test_messages_are_stored_once_and_read_back(roles: Roles) -> None:
    await roles.layout(xiu=2)
    roles.start("xiu-1", partition=1)
    node = await started(roles)
    (other,) = await roles.running("xiu-1")
    async with Writer(node) as writer:
        records = mails(0, 300)
        fates: list[tuple[str, int]] = []
        for start, level in ((0, Level.ACCEPTED), (100, Level.PERSISTED), (200, Level.REPLICATED)):
            fates += await writer.store(records[start : start + 100], level)
        ids = [identity for code, identity in fates if not code]
        assert [msg_sequence(identity) for identity in ids] == list(range(msg_sequence(ids[0]), msg_sequence(ids[0]) + 300))
        assert {msg_partition(identity) for identity in ids} == {0}
        reply = writer.replies[-1]
        assert (reply.epoch, reply.copies, reply.layout_version) == (1, 1, 1)
        assert reply.committed > 3
        assert await writer.fetch(ids) == [("", record) for record in records]
        assert await writer.store(records[50:60]) == [("", identity) for identity in ids[50:60]]
        assert await writer.scan() == list(enumerate(records, msg_sequence(ids[0])))
        assert [number for number, _ in await writer.scan(begin=msg_sequence(ids[150]), limit=7)] == [
            msg_sequence(identity) for identity in ids[150:157]
        ]
        position = await writer.stub.Position(xiu_pb2.PositionRequest())
        assert (position.epoch, position.last) == (1, msg_sequence(ids[-1]))

        changed = encode(Kind.MAIL, 4, b"another", int.from_bytes(records[0][16:24], "little"))
        (odd,) = mails(0, 1, key=5)
        damaged = records[1][:-1] + b"?"
        early = encode(Kind.MAIL, 4, b"", snowflake((1 << 41) - 1 + 1_577_836_800_000, 1, 1))
        old = encode(Kind.MAIL, 4, b"", snowflake(1_600_000_000_000, 1, 1))
        positions = writer.send([changed, odd, damaged, early, old])
        codes = [code for code, _ in await writer.answers(positions)]
        assert codes == ["ID_REUSED", "WRONG_PARTITION", "CHECKSUM_WRONG", "ID_AHEAD", "TOO_OLD"]
        assert other.address in writer.texts[positions[1]]
        assert [code for code, _ in await writer.answers(writer.send(mails(900, 1), epoch=99))] == ["STALE_STREAM"]
        missing = [ids[-1] + 1000, ids[0] - 1, 1 << 56 | ids[0]]
        assert [code for code, _ in await writer.fetch(missing)] == ["NOT_YET", "GONE", "WRONG_PARTITION"]
        with pytest.raises(grpc.aio.AioRpcError, match="at most 1000"):
            await writer.stub.Fetch(xiu_pb2.FetchRequest(msg_ids=[1] * 1001))
        writer.send_raw(b"no records", 1, 1)
        await until(lambda: _true(writer.problem), "the end of the stream")
        assert "end to end" in writer.problem


async def _true(value: object) -> object:
    return value


async def test_kill_9_again_and_again_loses_nothing_acknowledged_and_repeats_no_msgid(roles: Roles) -> None:
    await roles.layout(xiu=1)
    random = Random(4)
    known: dict[bytes, int] = {}
    unsure: list[bytes] = []
    number = 0
    for round_ in range(3):
        node = await started(roles, flush_interval_s="0.5", memtable_mb="1", drain_timeout_s="3")
        async with Writer(node) as writer:
            again = [record for record in unsure if record not in known]
            positions = {position: record for record, position in zip(again, writer.send(again), strict=True)} if again else {}
            await writer.answers(list(positions))
            if known:
                old = random.sample(sorted(known), min(200, len(known)))
                assert await writer.store(old) == [("", known[record]) for record in old], "a repeat has the same MsgID"
            stop = random.randint(40, 120)
            for batch in range(200):
                records = mails(number, 50, body=b"x" * 200, worker=1 + round_)
                number += 50
                level = (Level.REPLICATED, Level.PERSISTED)[batch % 2]
                sent = writer.send(records, level)
                positions.update(zip(sent, records, strict=True))
                if batch == stop:
                    await writer.answers(sent[:1])
                    await roles.kill("xiu-0")
                    break
                await asyncio.sleep(0)
        for position, record in positions.items():
            code, identity = writer.fates.get(position, ("lost", 0))
            if code:
                assert code in ("lost", "NOT_LEADER")
                unsure.append(record)
            else:
                assert known.setdefault(record, identity) == identity
    node = await started(roles)
    async with Writer(node) as writer:
        stored = await writer.scan()
        sequences = [sequence for sequence, _ in stored]
        assert sequences == sorted(set(sequences))
        by_record = {record: sequence for sequence, record in stored}
        assert len(by_record) == len(stored), "no record is stored twice"
        assert len(known) > 1000
        for record, identity in known.items():
            assert by_record[record] == msg_sequence(identity)
        order = [int(record[40:].split()[0]) for _, record in stored if record in known]
        assert len(order) == len(known)
        assert [record for _, record in await writer.fetch(sorted(known.values()))] == sorted(known, key=lambda r: known[r])


async def test_a_lost_table_and_a_clean_restart_lose_nothing(roles: Roles) -> None:
    await roles.layout(xiu=1)
    node = await started(roles)
    async with Writer(node) as writer:
        records = mails(0, 500)
        first = await writer.store(records)
    await roles.kill("xiu-0")
    (table,) = roles.folder.glob("pixiu-xiu-*")
    shutil.rmtree(table)
    node = await started(roles)
    async with Writer(node) as writer:
        assert await writer.fetch([identity for _, identity in first]) == [("", record) for record in records]
        more = await writer.store(mails(500, 1))
    await roles.end("xiu-0")
    assert not list(roles.folder.glob("pixiu-xiu-*/data.mdb"))
    node = await started(roles)
    async with Writer(node) as writer:
        assert len(await writer.scan()) == 501
        assert more[0][1] > first[-1][1]


async def test_a_log_with_a_hole_is_not_started_from(roles: Roles) -> None:
    await roles.layout(xiu=1)
    node = await started(roles, flush_interval_s="3600")
    async with Writer(node) as writer:
        await writer.store(mails(0, 100))
        await writer.store(mails(100, 100))
    await roles.kill("xiu-0")
    (segment,) = (roles.folder / "xiu-0" / "replica" / "log").glob("*.log")
    whole = segment.read_bytes()
    segment.write_bytes(whole[: len(whole) // 3] + b"\xff" + whole[len(whole) // 3 + 1 :])
    node = await started(roles)
    async with Writer(node) as writer:
        assert [code for code, _ in await writer.store(mails(900, 1))] == ["NOT_LEADER"]
    assert "replica_damaged" in roles.log("xiu-0")


async def test_an_empty_disk_never_leads_in_the_place_of_a_full_one(roles: Roles) -> None:
    await roles.layout(xiu=1)
    node = await started(roles)
    async with Writer(node) as writer:
        await writer.store(mails(0, 2))
    await roles.kill("xiu-0")
    shutil.rmtree(roles.folder / "xiu-0")
    node = await started(roles)
    async with Writer(node) as writer:
        assert [code for code, _ in await writer.store(mails(2, 1))] == ["NOT_LEADER"]


async def test_two_replicas_lose_nothing_when_the_leader_is_killed_again_and_again(roles: Roles) -> None:
    await roles.layout(xiu=1)
    names = ("xiu-a", "xiu-b")
    nodes = {name: await started(roles, name, flush_interval_s="0.5", memtable_mb="1", drain_timeout_s="3") for name in names}
    known: dict[bytes, int] = {}
    unsure: list[bytes] = []
    number, epoch = 0, 0
    for round_ in range(3):
        leader = await until_leading(nodes, epoch)
        await until_in_sync(roles, 2)
        async with Writer(nodes[leader]) as writer:
            again = [record for record in unsure if record not in known]
            positions = dict(zip(writer.send(again), again, strict=True)) if again else {}
            for batch in range(60):
                records = mails(number, 50, body=b"x" * 200, worker=1 + round_)
                number += 50
                positions.update(zip(writer.send(records), records, strict=True))
                if batch == 30:
                    await writer.answers(list(positions)[-50:-49])
                    epoch = writer.replies[-1].epoch
                    await roles.kill(leader)
                    break
        for position, record in positions.items():
            code, identity = writer.fates.get(position, ("lost", 0))
            if code:
                unsure.append(record)
            else:
                assert known.setdefault(record, identity) == identity
        other = next(name for name in names if name != leader)
        assert await until_leading({other: nodes[other]}, epoch) == other
        async with Writer(nodes[other]) as writer:
            assert await writer.fetch(list(known.values())) == [("", record) for record in known]
        nodes[leader] = await started(roles, leader, flush_interval_s="0.5", memtable_mb="1", drain_timeout_s="3")
    leader = await until_leading(nodes, epoch)
    await until_in_sync(roles, 2)
    assert len(known) > 1000
    last, record = max((identity, record) for record, identity in known.items())
    scans = []
    for node in nodes.values():
        await until_readable(node, [last], [record])
        async with Writer(node) as writer:
            scans.append([row for row in await writer.scan() if row[1] in known])
    assert scans[0] == scans[1]
    assert sorted(record for _, record in scans[0]) == sorted(known)
    assert [sequence for sequence, _ in scans[0]] == sorted(msg_sequence(identity) for identity in known.values())


async def test_a_new_replica_takes_a_snapshot_and_a_damaged_store_is_filled_again(roles: Roles) -> None:
    await roles.layout(xiu=1)
    settings = {"segment_mb": "1", "memtable_mb": "1", "flush_interval_s": "0.2", "drain_timeout_s": "3"}
    first = await started(roles, "xiu-a", **settings)
    records = [record for start in range(0, 6000, 50) for record in mails(start, 50, body=Random(start).randbytes(1000))]
    ids: list[int] = []
    async with Writer(first) as writer:
        for start in range(0, len(records), 50):
            ids += [identity for _, identity in await writer.store(records[start : start + 50])]
    folder = roles.folder / "xiu-a" / "replica" / "log"

    async def trimmed() -> bool:
        return min(int(path.name.partition("-")[0]) for path in folder.glob("*.log")) > 0

    await until(trimmed, "a trimmed log")
    second = await started(roles, "xiu-b", **settings)
    await until_in_sync(roles, 2)
    await until_readable(second, ids, records)
    async with Writer(second) as writer:
        assert [code for code, _ in await writer.store(mails(1, 1))] == ["NOT_LEADER"]
        assert writer.replies[-1].leader == first.address
    await roles.end("xiu-b")
    for path in (roles.folder / "xiu-b" / "store.1").glob("*.sst"):  # as it took the snapshot
        path.unlink()
    second = await started(roles, "xiu-b", **settings)
    assert "store_damaged" in roles.log("xiu-b")
    await until_in_sync(roles, 2)
    await until_readable(second, ids, records)
    async with Writer(first) as writer:
        assert await writer.store(mails(7000, 1)) != []
        assert writer.replies[-1].copies == 2


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 44 MiB."""
    with small_disk(tmp_path / "small", "44m") as mount:
        yield mount


@pytest.mark.parametrize("reserve_mb", portion([0, 10]))
async def test_a_full_disk_refuses_writes_serves_reads_and_goes_on_by_itself(disk: Path, roles: Roles, reserve_mb: int) -> None:
    await roles.layout(xiu=1)
    settings = {"memtable_mb": "1", "flush_interval_s": "0.3", "segment_mb": "1", "reserve_mb": str(reserve_mb)}
    settings["data_dir"] = str(disk / "xiu")
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(20 << 20))  # more than the reserve: the space is looked at once a second, and writes go on until then
    node = await started(roles, **settings)
    kept: dict[int, bytes] = {}
    async with Writer(node) as writer:
        codes = {""}
        for start in range(0, 200_000, 50):
            records = mails(start, 50, body=Random(start).randbytes(2000))
            fates = await writer.store(records)
            kept.update({identity: record for (code, identity), record in zip(fates, records, strict=True) if not code})
            codes = {code for code, _ in fates}
            if codes != {""}:
                break
        assert codes == {"DISK_FULL"}
        assert len(kept) > 500
        some = Random(1).sample(sorted(kept), 300)
        # Also what the log has and the store has no space for.
        assert await writer.fetch(some) == [("", kept[identity]) for identity in some]
        ballast.unlink()

        async def stored() -> bool:
            records = mails(300_000, 1)
            return [code for code, _ in await writer.store(records)] == [""]

        await until(stored, "writes after space was freed")

        async def readable() -> bool:
            return await writer.fetch(some) == [("", kept[identity]) for identity in some]

        await until(readable, "all that was confirmed")
    await roles.kill("xiu-0")
    node = await started(roles, **settings)
    async with Writer(node) as writer:
        assert await writer.fetch(sorted(kept)) == [("", kept[identity]) for identity in sorted(kept)]


async def test_a_disk_that_has_gone_ends_the_process_with_an_error_that_says_so(roles: Roles, tmp_path: Path) -> None:
    await roles.layout(xiu=1)
    with small_disk(tmp_path / "small", "24m") as mount:
        await started(roles, data_dir=str(mount / "xiu"), memtable_mb="1", segment_mb="1", reserve_mb="0")
    told = await roles.failed("xiu-0")
    assert "DISK_FAILED" in told
    assert "is it still mounted?" in told
    assert "Traceback" not in told
