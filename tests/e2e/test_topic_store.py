"""Storage apart from compute, with real processes: parts go to a store, and what is there is neither kept nor copied."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from cluster.topics import entries as en
from pixiu.discovery.node import Node
from pixiu.objects.store import ObjectStore
from pixiu.wire.v1 import level_pb2 as pb_level
from pixiu.wire.v1 import topic_pb2 as pb
from tests.support.roles import Roles, at_least
from tests.support.topics import ORDERS, TOPIC, Member, Writer, append, call, in_sync, leader, make_topic, read_all, status
from tests.support.waiting import until

BODY = b"x" * 100_000
FAST: dict[str, Any] = {
    "flush_interval_s": 0.05,
    "store_segment_mb": 1,
    "store_idle_s": 0.2,
    "local_retention_s": 0.0,
    "segment_mb": 1,
}


async def stored(node: Node, end: int) -> bool:
    reply = await call(node, "Read", pb.TopicReadRequest(topic=ORDERS, part=1, end=True))
    return bool(reply.store.end >= end)


def files_of(roles: Roles, name: str) -> list[Path]:
    return sorted((roles.folder / name / "state/parts").rglob("*.seg"))


async def test_what_the_store_has_is_neither_kept_nor_copied_and_is_read_by_the_next_leader(
    roles: Roles, tmp_path: Path
) -> None:  # fmt: skip
    store = tmp_path / "store"
    await roles.layout(topic=1)
    roles.start("topic-a", partition=0, store=str(store), **FAST)
    (node,) = await roles.running("topic-a")
    await leader(roles, "topic-a")
    await make_topic(node)
    expected = {number - 1: b"%d" % number + BODY for number in range(1, 61)} | {60: b"safe"}
    async with Writer(node) as writer:
        for number in range(1, 61):
            assert (await writer.write([expected[number - 1]], number)).verdict == pb.WRITE_STORED
        assert (await writer.write([b"safe"], 61, level=pb_level.STORED)).verdict == pb.WRITE_STORED
    assert await stored(node, 61)
    (folder,) = {path.parent for path in store.rglob("manifest-*")}
    assert folder.name == f"{TOPIC}-1"
    await until(lambda: len(files_of(roles, "topic-a")) == 1, "only the last file is kept")
    roles.start("topic-b", partition=0, store=str(store), **FAST)
    await in_sync(roles, 2, "topic-a", "topic-b")
    (new,) = await roles.running("topic-b")
    assert await roles.metric(new, "replica_snapshots_installed_total") == 1
    copied = sum(path.stat().st_size for path in files_of(roles, "topic-b"))
    assert copied < 3_000_000 < sum(map(len, expected.values()))
    await roles.kill("topic-a")
    await leader(roles, "topic-b")
    async with Member(new, credit=100, load_test=pb.LOAD_TEST_ONLY):  # looks at every message, and wants none
        await until(lambda: finished(new), "the channel has seen all of it")
    assert await roles.metric(new, "store_fetches_total") >= 5
    assert await read_all(new) == expected
    roles.start("topic-a", partition=0, store=str(store), **FAST)
    await in_sync(roles, 2, "topic-a", "topic-b")
    assert (await append(new, en.TOPIC, en.TopicSettings(TOPIC, ORDERS, deleted=True).encode())).ok
    assert (await append(new, en.DROP, en.encode_drop(en.part_id(TOPIC, 1)))).ok
    await until(lambda: not any(path.is_file() for path in store.rglob("*")), "a dropped part has nothing in the store")


async def finished(node: Node) -> bool:
    state = await call(node, "Channel", pb.ChannelRequest(topic=ORDERS, channel="c", state=True))
    return [part.unacknowledged for part in state.parts] == [0]


async def test_while_the_store_is_away_writers_go_on_until_space_is_short(roles: Roles, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.write_text("no folder yet: every write fails")
    await roles.layout(topic=1)
    roles.start("topic-a", partition=0, store=str(store), **FAST | {"local_mb": 3})
    (node,) = await roles.running("topic-a")
    await leader(roles, "topic-a")
    await make_topic(node)
    async with Writer(node) as writer:
        number = 0
        while (result := await writer.write([BODY], number + 1)).verdict == pb.WRITE_STORED:
            number += 1
            if number > 28:
                await asyncio.sleep(0.05)  # what waits is not old enough yet
        assert result.refusal.code == "OVERLOADED"
        assert "wait for the object store" in result.refusal.text
        assert number > 25
        assert "writers are held" in (await status(roles, "topic-a"))["degraded"]
        await until(lambda: at_least(roles.metric(node, "store_failures_total"), 3), "it is tried again")
        assert await roles.metric(node, "store_waiting_bytes") > 2_500_000
        reply = await call(node, "Read", pb.TopicReadRequest(topic=ORDERS, part=1, end=True))
        assert (reply.store.end, bool(reply.store.problem)) == (0, True)
        store.unlink()
        await until(lambda: stored(node, number), "it catches up")

        async def taken() -> bool:
            return (await writer.write([BODY], number + 1)).verdict in (pb.WRITE_STORED, pb.WRITE_REPEATED)

        await until(taken, "writers go on")
    assert await read_all(node) == dict.fromkeys(range(number + 1), BODY)
    (folder,) = {path.parent for path in store.rglob("*.seg")}
    manifest = ObjectStore(str(folder.parent)).manifest(TOPIC, 1)
    assert manifest is not None
    assert manifest.objects[0].base == 0
