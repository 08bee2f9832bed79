"""The alert rules of deploy/: each condition is made true in real processes, and none holds in a cluster that is well.

Elsewhere, where the state is made anyway: PixiuLoopStalled and PixiuBug in tests/cluster/process/test_process_lifecycle.py,
PixiuDiskFull in test_pi.py, PixiuDamaged in test_damage_applied.py, PixiuSlowClients in test_edges.py,
PixiuLinksDrop in tests/cluster/links/test_link.py, those of topics in test_topic_admin.py.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from dataclasses import replace
from pathlib import Path

import pixiu
from pixiu.discovery.paths import DEFAULT_ROOT
from pixiu.discovery.view import RoleLayout
from registry.layout import ensure_layout
from tests.support.alerts import RULES, firing, moment, rules, until_firing
from tests.support.roles import WAIT_S, Roles
from tests.support.stores import wait_in_sync
from tests.support.waiting import until
from tests.xiu.writer import Writer, mails

ROOM = 7
GARBAGE, GARBAGE_BYTES = 40_000, 1400
"""More than any socket's buffer holds."""


async def test_rooms_when_a_broker_stands_still(roles: Roles) -> None:
    await roles.layout(router=1, broker=1)
    for name in ("router-0", "broker-0"):
        roles.start(name, partition=0, session_timeout_ms=30_000)  # it is looked for while it stands still
    roles.start("gateway-0")
    roles.start("proxy-0")
    names = ("router-0", "broker-0", "gateway-0", "proxy-0")
    nodes = dict(zip(names, await roles.running(*names), strict=True))
    async with pixiu.connect(roles.target(), connect_timeout_s=WAIT_S) as px, px.subscribe(rooms=[ROOM]) as subscription:
        await px.room(ROOM).send(b"one")
        assert (await anext(subscription)).payload == b"one"

        async def well() -> bool:
            # Others may have all CPU: what is said of late loops and slow messages is not looked at.
            found = firing(await moment(**nodes), await moment(**nodes))
            return not found - {"PixiuLoopLate", "PixiuLatency", "PixiuLinksDrop"}

        await until(well, "no alert")
        before = await moment(**nodes)
        roles.send_signal("broker-0", signal.SIGSTOP)
        try:
            px.room(ROOM).send_soon(b"two")
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as flood:
                broker = nodes["broker-0"]
                await until_firing(before, nodes, "PixiuPeersDead", "PixiuProcessUnreachable")
                for _ in range(GARBAGE):
                    flood.sendto(bytes(GARBAGE_BYTES), (broker.host, broker.port))
        finally:
            roles.send_signal("broker-0", signal.SIGCONT)
        await until_firing(before, nodes, "PixiuKernelDrops", "PixiuDatagramsRefused", "PixiuLoopLate", "PixiuLatency")


async def test_a_router_while_zookeeper_stands_still(roles: Roles) -> None:
    await roles.layout(router=1)
    roles.start("router-0", partition=0)
    (router,) = await roles.running("router-0")
    before = await moment(router=router)
    os.kill(roles.server.pid, signal.SIGSTOP)
    try:
        await until_firing(before, {"router": router}, "PixiuRegistryUnreachable")
    finally:
        os.kill(roles.server.pid, signal.SIGCONT)

    async def connected() -> bool:
        return "PixiuRegistryUnreachable" not in firing(await moment(router=router))

    await until(connected, "the router connected again")


async def test_a_process_that_cannot_start_and_a_table_in_memory(roles: Roles) -> None:
    await roles.layout(router=1, broker=1)
    roles.start("gateway-0", signal_table_dir="/proc")
    (gateway,) = await roles.running("gateway-0")
    await until_firing({}, {"gateway-0": gateway}, "PixiuSignalTableInMemory")
    # A broker waits for a router.
    roles.start("broker-0", partition=0)

    async def http_port() -> int:
        lines = [json.loads(line) for line in roles.log("broker-0").splitlines() if line.startswith("{")]
        return next((line["http_port"] for line in lines if line["event"] == "registered"), 0)

    await until(http_port, "the broker registered")
    broker = replace(gateway, role="broker", http_port=await http_port())
    await until_firing({}, {"broker-0": broker}, "PixiuNotRunning")
    roles.start("router-0", partition=0)
    await roles.running("router-0", "broker-0")

    async def well() -> bool:
        return "PixiuNotRunning" not in firing(await moment(broker=broker))

    await until(well, "the alert is over")


async def test_stores_when_a_replica_stands_still_and_the_leader_is_killed(roles: Roles) -> None:
    await ensure_layout(roles.zookeeper, DEFAULT_ROOT, {"xiu": RoleLayout(1, 1, 2)})
    names = ("xiu-a", "xiu-b")
    for name in names:
        roles.start(name, partition=0)
    leader = await wait_in_sync(roles, *names)
    (other,) = set(names) - {leader}
    nodes = dict(zip(names, await roles.running(*names), strict=True))

    async def well() -> bool:
        return not firing(await moment(**nodes), await moment(**nodes)) - {"PixiuLoopLate", "PixiuCommitSlow"}

    await until(well, "no alert")
    before = await moment(**nodes)
    async with Writer(nodes[leader]) as writer:
        roles.send_signal(other, signal.SIGSTOP)
        try:
            # The leader waits for the other one until it takes it out of the set.
            assert {code for code, _ in await writer.store(mails(0, 5))} == {""}
            await until_firing(before, nodes, "PixiuReplicaMissing", "PixiuCommitSlow", "PixiuProcessUnreachable")
        finally:
            roles.send_signal(other, signal.SIGCONT)
    assert await wait_in_sync(roles, *names) == leader
    await roles.kill(leader)
    await until_firing(before, {other: nodes[other]}, "PixiuNoLeader")
    roles.start(leader, partition=0)
    await wait_in_sync(roles, *names)


def test_every_rule_says_what_is_wrong_and_is_made_true_by_a_test() -> None:
    text = RULES.read_text()
    assert len(rules()) == text.count("- alert:") == text.count("summary:")
    folder = Path(__file__).resolve().parents[1]
    tested = "".join(path.read_text() for path in folder.rglob("test_*.py"))
    assert [name for name in rules() if f'"{name}"' not in tested] == []
