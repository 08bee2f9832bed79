"""Damage of a Xiu's store that is met while entries are applied: repaired from the other replica, or refused without one."""

from __future__ import annotations

import json

from tests.support.alerts import firing, moment
from tests.support.repairs import damage_dedupe_window
from tests.support.roles import Roles
from tests.support.stores import equal_scans, health, wait_in_sync
from tests.support.waiting import until
from tests.xiu.writer import Writer, mails

NAMES = ("xiu-a", "xiu-b")


async def stored(roles: Roles, name: str) -> tuple[list[bytes], list[int]]:
    """Records that a leader stored, and their MsgIDs."""
    (node,) = await roles.running(name)
    records = mails(0, 400)
    async with Writer(node) as writer:
        fates = [fate for start in range(0, 400, 20) for fate in await writer.store(records[start : start + 20])]
    assert {code for code, _ in fates} == {""}
    return records, [identity for _, identity in fates]


async def test_a_follower_that_meets_damage_as_it_applies_repairs_itself_from_the_leader(roles: Roles) -> None:
    await roles.layout(xiu=1)
    for name in NAMES:
        roles.start(name, partition=0)
    leader = await wait_in_sync(roles, *NAMES)
    (follower,) = set(NAMES) - {leader}
    records, ids = await stored(roles, leader)
    await roles.end(follower)
    bad = damage_dedupe_window(roles.folder / follower / "store", records)
    roles.start(follower, partition=0)
    assert await wait_in_sync(roles, *NAMES) == leader
    nodes = await roles.running(leader, follower)
    more = mails(500, 50)
    async with Writer(nodes[0]) as writer:  # repeats: every replica looks them up in its dedupe window
        assert await writer.store(bad) == [("", ids[records.index(record)]) for record in bad]
        assert {code for code, _ in await writer.store(more)} == {""}

    async def repaired() -> bool:
        return await roles.metric(nodes[1], "repairs_total") >= 1

    await until(repaired, "the follower's store built anew")
    scanned = await equal_scans(*nodes)
    assert [record for _, record in scanned] == records + more
    assert await health_is_good(roles, follower)


async def health_is_good(roles: Roles, name: str) -> bool:
    (node,) = await roles.running(name)

    async def good() -> bool:
        return (await health(node)).get("degraded", "?") is None and not await roles.metric(node, "damaged")

    await until(good, f"{name} not degraded")
    return True


async def test_a_sole_leader_refuses_what_it_cannot_decide_and_serves_reads_until_another_replica_comes(roles: Roles) -> None:
    await roles.layout(xiu=1)
    for name in NAMES:
        roles.start(name, partition=0)
    leader = await wait_in_sync(roles, *NAMES)
    (other,) = set(NAMES) - {leader}
    records, ids = await stored(roles, leader)
    await roles.end(other)
    await roles.end(leader)
    bad = damage_dedupe_window(roles.folder / leader / "store", records)
    for _ in range(2):  # a start with the damage already met is the same
        roles.start(leader, partition=0)
        assert await wait_in_sync(roles, leader) == leader
        (node,) = await roles.running(leader)
        async with Writer(node) as writer:
            assert {code for code, _ in await writer.store(bad[:1])} == {"STORE_DAMAGED"}
            assert {code for code, _ in await writer.store(mails(500, 5))} == {"STORE_DAMAGED"}
            assert "another replica" in writer.texts[2]
            assert await writer.fetch(ids) == [("", record) for record in records]
        assert await roles.metric(node, "damaged") == 1
        assert "PixiuDamaged" in firing(await moment(xiu=node))
        await until(lambda: said(roles, leader), "what to do in the log")
        await roles.kill(leader)
    roles.start(leader, partition=0)
    roles.start(other, partition=0)
    assert await wait_in_sync(roles, *NAMES) == leader
    assert await health_is_good(roles, leader)
    nodes = await roles.running(leader, other)
    more = mails(600, 50)
    async with Writer(nodes[0]) as writer:
        assert await writer.store(bad) == [("", ids[records.index(record)]) for record in bad]
        assert {code for code, _ in await writer.store(more)} == {""}
    scanned = await equal_scans(*nodes)
    assert [record for _, record in scanned] == records + more
    assert await roles.metric(nodes[0], "repairs_total") == 1


async def said(roles: Roles, name: str) -> bool:
    lines = [json.loads(line) for line in roles.log(name).splitlines() if line.startswith("{")]
    return any(line["event"] == "store_not_repaired" and "no other replica" in line["error"] for line in lines)
