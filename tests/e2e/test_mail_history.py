"""Mail between users who come and go, while every kind of process is killed (-9) in turn, and what the checker says of it.

Datagrams are lost all the time (5 %), and ZooKeeper is killed and started again once. Each kill waits until `pixiu status` is
healthy after the one before. `PIXIU_MAIL_KILLS=35` makes it long (`make mail`): at least 10 minutes then. The history is kept in
the test's folder; what happened is printed (`pytest -s`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from registry.embedded import EmbeddedZooKeeper
from tests.history.checker import check, counts, report
from tests.history.record import Fault, History
from tests.history.violation import Limits
from tests.support.cluster import LocalCluster, running_cluster, wait_for
from tests.support.lossy import Faults, LossyNetwork
from tests.support.mail_history import Traffic

KILLS = int(os.environ.get("PIXIU_MAIL_KILLS", "6"))
MIN_S = 600.0 if KILLS >= 30 else 0.0
SEED = int(os.environ.get("PIXIU_MAIL_SEED", "1"))
VICTIMS = ("proxy", "relay", "gateway", "xiu", "pi")
"""Killed in this order, again and again; of Xiu and Pi the leader, of the others each process in turn."""
SHAPE = [
    "--proxies=2", "--gateways=2", "--relays=1", "--relay-replicas=2", "--brokers=1", "--broker-replicas=1", "--routers=1",
    "--router-replicas=2", "--xius=1", "--xiu-replicas=2", "--pis=1", "--pi-replicas=2",
]  # fmt: skip

pytestmark = pytest.mark.timeout(300 + 60 * KILLS)


def victim(cluster: LocalCluster, role: str, number: int) -> dict[str, object]:
    """The process to kill: for a store its leader, once all its replicas are in sync."""

    def find() -> dict[str, object] | None:
        found = sorted(cluster.processes(role), key=lambda process: str(process["address"]))
        if role in ("xiu", "pi"):
            found = [process for process in found if process["replication"]["state"] == "Leading"]
            return found[0] if len(found) == 1 and len(found[0]["replication"]["in_sync"]) == 2 else None
        return found[number % len(found)] if len(found) == 2 else None

    process = wait_for(find, f"a {role} to kill")
    assert process is not None
    return process


async def test_every_mail_arrives_once_whoever_is_killed(tmp_path: Path) -> None:
    history = History(path=tmp_path / "history.jsonl")
    with EmbeddedZooKeeper(tmp_path / "zookeeper") as server:
        registry = f"zk://{server.address}/pubsub"
        network = LossyNetwork(registry, SEED)
        network.start()
        try:
            with running_cluster(
                tmp_path, "--registry", registry, *SHAPE, *network.settings(), "--set", f"xiu.table_dir={tmp_path}"
            ) as cluster:
                await asyncio.to_thread(cluster.wait_healthy)
                with network.faults(Faults(lost=0.05)):
                    async with Traffic(registry, history, SEED) as traffic:
                        await traffic.more(200)
                        await kill_all(cluster, server, history, traffic)
                        await traffic.settle()
        finally:
            network.stop()
    history.close()
    print(f"{dict(traffic.counts)}; {counts(history)}")
    found = check(history, Limits(sends=30 * KILLS, deliveries=50 * KILLS, acknowledgements=50 * KILLS, faults=KILLS))
    assert not found, report(history, found)


async def kill_all(cluster: LocalCluster, server: EmbeddedZooKeeper, history: History, traffic: Traffic) -> None:
    """One after the other, the next when the cluster is healthy again and mail has flowed meanwhile."""
    began, number = time.monotonic(), 0
    while number < KILLS or time.monotonic() - began < MIN_S:
        role = VICTIMS[number % len(VICTIMS)]
        process = await asyncio.to_thread(victim, cluster, role, number // len(VICTIMS))
        pid = int(str(process["pid"]))
        name = f"{role}/{process['address']}"
        history.fault(Fault("kill", name))
        os.kill(pid, signal.SIGKILL)
        await traffic.more(100)
        if number == KILLS // 2:
            history.fault(Fault("kill", "zookeeper"))
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            history.fault(Fault("kill", "zookeeper", heals=True))
        await asyncio.to_thread(cluster.wait_healthy)
        history.fault(Fault("kill", name, heals=True))
        print(f"{time.monotonic() - began:.0f} s: killed {name}; {dict(traffic.counts)}", flush=True)
        number += 1
