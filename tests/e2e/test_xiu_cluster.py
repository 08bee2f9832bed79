"""Xius under `pixiu up`: every partition stores, and a killed one comes back with everything."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.target import parse_address
from pixiu.discovery.watcher import Discovery
from pixiu.discovery.zookeeper import ZooKeeper
from tests.support.cluster import running_cluster
from tests.support.stores import figures
from tests.support.waiting import until
from tests.xiu.writer import Writer, mails

ROUNDS = int(os.environ.get("PIXIU_KILL_ROUNDS", "3"))
SMALL = (
    "--proxies",
    "1",
    "--gateways",
    "1",
    "--brokers",
    "1",
    "--broker-replicas",
    "1",
    "--routers",
    "1",
    "--router-replicas",
    "1",
)


@pytest.mark.timeout(120 + 60 * ROUNDS)
async def test_xius_store_what_they_serve_and_survive_kill_9(tmp_path: Path) -> None:
    settings = ["--set", f"xiu.table_dir={tmp_path}", "--set", "xiu.table_mb=8"]
    settings += ["--relays", "0", "--xius", "2", "--xiu-replicas", "1"]
    with running_cluster(tmp_path, *SMALL, *settings) as running:
        address = parse_address(running.target)
        zookeeper = ZooKeeper(address.hosts)
        await zookeeper.connect()
        discovery = Discovery(zookeeper, address.root, lambda _view: None)
        await discovery.start()
        try:
            nodes = {node.partition: node for node in discovery.view.of_role("xiu")}
            assert sorted(nodes) == [0, 1]
            stored: dict[int, list[tuple[str, int]]] = {}
            records = {partition: mails(0, 200, key=10 + partition) for partition in nodes}
            for partition, node in nodes.items():
                async with Writer(node) as writer:
                    assert {code for code, _ in await writer.store(records[1 - partition][:3])} == {"WRONG_PARTITION"}
                    assert nodes[1 - partition].address in writer.texts[1]
                    stored[partition] = await writer.store(records[partition])
                    assert {code for code, _ in stored[partition]} == {""}
            times: list[float] = []
            for _ in range(ROUNDS):
                killed, began = nodes[1].pid, time.monotonic()
                os.kill(killed, signal.SIGKILL)

                async def again(killed: int = killed) -> Node | None:
                    found = [node for node in discovery.view.replicas("xiu", 1) if node.pid != killed]
                    return found[0] if found and found[0].state is NodeState.RUNNING else None

                await until(again, "the Xiu is back")
                back = await again()
                assert back is not None
                nodes[1] = back
                async with Writer(back) as writer:
                    assert await writer.store(records[1]) == stored[1]
                    times.append(time.monotonic() - began)
                    ids = [identity for _, identity in stored[1]]
                    assert await writer.fetch(ids) == [("", record) for record in records[1]]
            said = figures("from a kill of the only replica to the next acknowledgement", times)
            print(f"{said}; rounds {ROUNDS}")
        finally:
            await discovery.close()
            await zookeeper.close()
