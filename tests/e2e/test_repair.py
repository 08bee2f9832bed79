"""Two replicas, one with a flipped byte in its files: reads of a Xiu come right from the other one, and the store is built anew;
a Pi that has other entries than its leader takes the leader's."""

from __future__ import annotations

import asyncio
import json
from random import Random
from typing import Any

import grpc.aio
import pytest

from pi.store.digest import range_of_user
from pixiu.discovery.node import Node
from pixiu.discovery.paths import partition_state
from pixiu.wire.v1 import xiu_pb2
from tests.support.pi import UIN, Sender, inbox
from tests.support.repairs import alter, flip, repair
from tests.support.roles import Roles
from tests.support.stores import leader_of, wait_in_sync
from tests.support.waiting import until
from tests.xiu.writer import Writer, mails

NAMES = ("xiu-a", "xiu-b")


async def started(roles: Roles, name: str) -> Node:
    roles.start(name, "/pubsub", deaf=False, partition=0, drain_timeout_s="3")
    (node,) = await roles.running(name)
    return node


async def in_sync(roles: Roles, count: int) -> None:
    async def enough() -> bool:
        data, _ = await roles.zookeeper.get(partition_state("/pubsub", "xiu", 0))
        return len(json.loads(data)["in_sync"]) == count

    await until(enough, f"{count} in sync")


async def leads(node: Node) -> bool:
    async with Writer(node) as writer:
        return bool((await writer.stub.Position(xiu_pb2.PositionRequest())).epoch)


async def reads_come_right_and_the_store_is_repaired(roles: Roles, node: Node, ids: list[int], records: list[bytes]) -> None:
    async with Writer(node) as writer:
        assert await writer.fetch(ids) == [("", record) for record in records]
        assert await roles.metric(node, "reads_repaired_total") > 0

        async def repaired() -> bool:
            return await roles.metric(node, "repairs_total") == 1

        await until(repaired, "the store built anew")
        assert await roles.metric(node, "rows_repaired_total") > 0
        before = await roles.metric(node, "reads_repaired_total")
        assert await writer.fetch(ids) == [("", record) for record in records]
        assert [record for _, record in await writer.scan()] == records
        assert await roles.metric(node, "reads_repaired_total") == before, "nothing is damaged any more"


async def test_a_flipped_byte_of_a_follower_and_of_a_leader_is_repaired_from_the_other_replica(roles: Roles) -> None:
    await roles.layout(xiu=1)
    nodes = {name: await started(roles, name) for name in NAMES}
    await in_sync(roles, 2)
    leader = NAMES[0] if await leads(nodes[NAMES[0]]) else NAMES[1]
    (follower,) = set(NAMES) - {leader}
    async with Writer(nodes[leader]) as writer:
        records = [record for start in range(0, 400, 4) for record in mails(start, 4, body=Random(start).randbytes(500))]
        fates = [fate for start in range(0, 400, 4) for fate in await writer.store(records[start : start + 4])]
    ids = [identity for _, identity in fates]

    await roles.end(follower)
    flip(roles.folder / follower / "store")
    nodes[follower] = await started(roles, follower)
    await in_sync(roles, 2)
    await reads_come_right_and_the_store_is_repaired(roles, nodes[follower], ids, records)

    await roles.end(follower)  # it comes back with the store that was built anew
    await in_sync(roles, 1)  # a leader that ends before would hand over to it
    await roles.end(leader)
    flip(roles.folder / leader / "store")
    nodes[leader] = await started(roles, leader)
    await until(lambda: leads(nodes[leader]), "it leads again")
    async with Writer(nodes[leader]) as writer:
        read = await writer.fetch(ids)
        assert {code for code, _ in read} == {"", "STORE_DAMAGED"}, "nobody is there to ask"
        assert [found or record for record, (code, found) in zip(records, read, strict=True)] == records
        with pytest.raises(grpc.aio.AioRpcError, match="STORE_DAMAGED"):
            await writer.scan()
        meanwhile = mails(800, 3)
        stored = await writer.store(meanwhile)
        assert [code for code, _ in stored] == ["", "", ""]
        assert await roles.metric(nodes[leader], "reads_damaged_total") > 0
        records += meanwhile
        ids += [identity for _, identity in stored]
    exit_code, found = await repair(roles)
    assert exit_code == 1
    assert "no other replica" in str(found)
    nodes[follower] = await started(roles, follower)
    await in_sync(roles, 2)
    assert (await until_repaired_by_command(roles)) == 0
    async with Writer(nodes[leader]) as writer:
        more = mails(900, 3)
        assert [code for code, _ in await writer.store(more)] == ["", "", ""], "it still leads, and stores"
        assert await writer.fetch(ids) == [("", record) for record in records]
        assert [record for _, record in await writer.scan()] == records + more
    assert await roles.metric(nodes[leader], "repairs_total") == 1
    exit_code, found = await repair(roles, "--role", "xiu", "--partition", "0")
    assert exit_code == 0
    assert [(each["damaged"], each["differing"]) for each in found["replicas"]] == [(0, 0), (0, 0)]


async def until_repaired_by_command(roles: Roles) -> int:
    exit_code, found = await repair(roles)
    replicas = found["replicas"]
    assert sum(each["repaired"] for each in replicas) > 0
    return exit_code


async def test_a_pi_is_checked_and_what_cannot_be_repaired_is_said(roles: Roles) -> None:
    await roles.layout(pi=1)
    roles.start("pi-0", "/pubsub", deaf=False, partition=0)
    await roles.running("pi-0")
    exit_code, found = await repair(roles, "--role", "pi")
    assert exit_code == 0, found
    assert [(each["role"], each["damaged"]) for each in found["replicas"]] == [("pi", 0)]
    exit_code, found = await repair(roles, "--role", "xiu")
    assert exit_code == 2
    assert "no live replica" in str(found)


async def test_an_entry_of_a_follower_that_is_another_than_the_leaders_is_found_and_mended_while_writes_go_on(
    roles: Roles,
) -> None:
    names = ("pi-a", "pi-b")
    settings: dict[str, Any] = {"partition": 0, "flush_interval_s": 0.1}
    await roles.layout(pi=1)
    for name in names:
        roles.start(name, **settings)
    leader = await wait_in_sync(roles, *names)
    (follower,) = set(names) - {leader}
    sender = Sender(roles, {leader})
    await sender.more(1000)
    exit_code, found = await repair(roles, "--role", "pi")
    assert exit_code == 0, found
    assert [(each["differed"], each["differing"]) for each in found["replicas"]] == [(0, 0), (0, 0)]

    await roles.end(follower)
    alter(roles.folder / follower / "inboxes", UIN, 10)
    roles.start(follower, **settings)
    assert await wait_in_sync(roles, *names) == leader
    command = asyncio.create_task(repair(roles, "--role", "pi"))
    assert await roles.ended(follower) == 1, roles.log(follower)
    assert f"ranges [{range_of_user(UIN)}] of users" in roles.log(follower)
    roles.start(follower, **settings)  # as its supervisor does
    exit_code, found = await command
    assert exit_code == 0, found
    told = sorted((each["damaged"], each["differed"], each["repaired"], each["differing"]) for each in found["replicas"])
    assert told == [(0, 0, 0, 0), (0, 1, 1, 0)]
    assert await wait_in_sync(roles, *names) == leader
    await sender.more(100)
    await sender.stop()
    await roles.end(leader)

    async def other_leads() -> bool:
        return await leader_of(roles, follower) == follower

    await until(other_leads, "the repaired replica leads")
    entries = await inbox(roles, follower)
    by_id = {msg_id: seq for seq, msg_id in entries}
    assert {msg_id: by_id.get(msg_id) for msg_id in sender.known} == sender.known
