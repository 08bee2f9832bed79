"""Two replicas of a Xiu, one with a flipped byte in its files: reads come right from the other one, and the store is built anew."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random

import grpc.aio
import pytest
from typer.testing import CliRunner

from pixiu.cli.main import app
from pixiu.discovery.node import Node
from pixiu.discovery.paths import partition_state
from pixiu.wire.v1 import xiu_pb2
from tests.support.roles import Roles, until
from tests.support.roles import roles as roles
from tests.support.zookeeper import own_server as own_server
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

    await until(f"{count} in sync", enough)


async def leads(node: Node) -> bool:
    async with Writer(node) as writer:
        return bool((await writer.stub.Position(xiu_pb2.PositionRequest())).epoch)


def flip(folder: Path) -> None:
    """One bit in the middle of the largest file of a store."""
    file = max(folder.glob("*.sst"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) * 2 // 5] ^= 1
    file.write_bytes(data)


async def reads_come_right_and_the_store_is_repaired(roles: Roles, node: Node, ids: list[int], records: list[bytes]) -> None:
    async with Writer(node) as writer:
        assert await writer.fetch(ids) == [("", record) for record in records]
        assert await roles.metric(node, "reads_repaired_total") > 0

        async def repaired() -> bool:
            return await roles.metric(node, "repairs_total") == 1

        await until("the store built anew", repaired)
        assert await roles.metric(node, "rows_repaired_total") > 0
        before = await roles.metric(node, "reads_repaired_total")
        assert await writer.fetch(ids) == [("", record) for record in records]
        assert [record for _, record in await writer.scan()] == records
        assert await roles.metric(node, "reads_repaired_total") == before, "nothing is damaged any more"


async def repair(roles: Roles, *more: str) -> tuple[int, dict[str, object]]:
    """`pixiu repair --json`."""
    arguments = ["repair", "--target", roles.target(), "--json", *more]
    found = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    return found.exit_code, json.loads(found.stdout)


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
    await roles.end(leader)
    flip(roles.folder / leader / "store")
    nodes[leader] = await started(roles, leader)
    await until("it leads again", lambda: leads(nodes[leader]))
    async with Writer(nodes[leader]) as writer:
        codes = {code for code, _ in await writer.fetch(ids)}
        assert codes == {"", "STORE_DAMAGED"}, "nobody is there to ask"
        with pytest.raises(grpc.aio.AioRpcError, match="STORE_DAMAGED"):
            await writer.scan()
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
    assert [(each["damaged"], each["differing"]) for each in found["replicas"]] == [(0, 0), (0, 0)]  # type: ignore[attr-defined]


async def until_repaired_by_command(roles: Roles) -> int:
    exit_code, found = await repair(roles)
    replicas = found["replicas"]
    assert sum(each["repaired"] for each in replicas) > 0  # type: ignore[attr-defined]
    return exit_code


async def test_a_pi_is_checked_and_what_cannot_be_repaired_is_said(roles: Roles) -> None:
    await roles.layout(pi=1)
    roles.start("pi-0", "/pubsub", deaf=False, partition=0)
    await roles.running("pi-0")
    exit_code, found = await repair(roles, "--role", "pi")
    assert exit_code == 0, found
    assert [(each["role"], each["damaged"]) for each in found["replicas"]] == [("pi", 0)]  # type: ignore[attr-defined]
    exit_code, found = await repair(roles, "--role", "xiu")
    assert exit_code == 2
    assert "no live replica" in str(found)
