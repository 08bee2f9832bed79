"""A network that delays one hop of a real cluster moves that hop in the report on latency, and no other."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pixiu
from onebox.embedded import EmbeddedZooKeeper
from tests.pipeline.conftest import SMALL
from tests.support.cluster import LocalCluster, running_cluster, wait_for
from tests.support.lossy import LossyNetwork
from tests.support.waiting import until
from tools.load.mqtt import MQTTClient

DELAY_MS = float(os.environ.get("PIXIU_DELAY_MS", "400"))
"""So much that a loaded machine does not add the half of it to another hop's median."""
MESSAGES = 100
SLOW = "proxy → broker"
pytestmark = [pytest.mark.e2e, pytest.mark.spark, pytest.mark.timeout(600)]


@pytest.fixture
def traced(tmp_path: Path) -> Iterator[tuple[LocalCluster, LossyNetwork, Path]]:
    """A cluster behind a network of the test, which keeps the trace of every message."""
    traces = tmp_path / "traces"
    traces.mkdir()
    settings = {"cluster.trace_fraction": "1.0", "gateway.trace_dir": str(traces), "gateway.trace_file_s": "1.0"}
    given = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    with EmbeddedZooKeeper(tmp_path / "zookeeper") as server:
        registry = f"zk://{server.address}/pubsub"
        network = LossyNetwork(registry, 1)
        network.start()
        try:
            with running_cluster(
                tmp_path, "--registry", registry, *SMALL, "--relay-replicas=1", *given, *network.settings()
            ) as cluster:
                cluster.wait_healthy()
                yield cluster, network, traces
        finally:
            network.stop()


async def carry(cluster: LocalCluster, network: LossyNetwork, rooms: tuple[int, int]) -> None:
    """Messages to a room through the network as it is, and to another while one hop of it is slow."""
    (port,) = cluster.mqtt_ports()
    came: list[bytes] = []
    client = MQTTClient("127.0.0.1", port, on_message=lambda _, payload: came.append(bytes(payload)))
    await client.connect()
    await client.subscribe([f"room/{room}" for room in rooms])
    async with pixiu.connect(cluster.target) as px:
        for room in rooms:
            network.delay({("proxy", "broker"): DELAY_MS / 1000} if room == rooms[1] else {})
            del came[:]
            for number in range(MESSAGES):
                px.room(room).send_soon(b"%d" % number)
            await px.flush()
            await until(lambda: len(came) == MESSAGES, lambda: f"{len(came)} came")
    network.delay({})
    await client.close()


def test_a_delay_on_one_link_moves_that_link_alone(
    spark: Any, traced: tuple[LocalCluster, LossyNetwork, Path], tmp_path: Path
) -> None:
    from pipeline.jobs import latency

    cluster, network, folder = traced
    rooms = (7001, 7002)
    asyncio.run(carry(cluster, network, rooms))

    def lines() -> dict[int, list[str]]:
        found: dict[int, list[str]] = {room: [] for room in rooms}
        for line in (line for file in folder.glob("traces-*.jsonl") for line in file.read_text().splitlines()):
            found.get(json.loads(line)["key"], []).append(line)
        return found

    wait_for(lambda: all(len(each) == MESSAGES for each in lines().values()), "every trace")
    medians = []
    for room, each in lines().items():
        path = tmp_path / f"{room}.jsonl"
        path.write_text("\n".join(each))
        report, _ = latency.run(spark, latency.LatencyOptions(str(path)))
        medians.append({row["hop"]: row["p50"] for row in report.to_json()["tables"]["hops"]["rows"]})
    before, after = medians
    print(f"\nmedians in ms before: {before}\nafter: {after}")
    assert set(before) == set(after) >= {SLOW, "broker → gateway", "whole way"}
    moved = {hop for hop in before if after[hop] - before[hop] > DELAY_MS / 2}
    assert moved == {SLOW, "whole way"}
    assert after[SLOW] >= DELAY_MS
