"""`pixiu top` in front of a real cluster: what flows, what is hot, what is dead."""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
from collections.abc import Iterable
from typing import Any

import pixiu
from tests.support.cluster import LocalCluster
from tests.support.roles import WAIT_S

HOT, COLD = 4711, 4712


def top(cluster: LocalCluster, *arguments: str) -> dict[str, Any]:
    result = cluster.pixiu("top", "--once", "--json", *arguments)
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def read_into(lines: queue.Queue[str], output: Iterable[str]) -> None:
    for line in output:
        lines.put(line)


async def test_what_flows_and_what_is_hot_is_shown_by_role_and_partition(cluster: LocalCluster) -> None:
    async with pixiu.connect(cluster.target, connect_timeout_s=WAIT_S) as px, px.subscribe(rooms=[HOT, COLD]) as subscription:
        watching = cluster.start_pixiu("top", "--json", "--interval", "1")
        try:
            lines: queue.Queue[str] = queue.Queue()
            threading.Thread(target=read_into, args=(lines, watching.stdout), daemon=True).start()
            rooms: set[int] = set()
            delivered = 0.0
            latency: dict[str, float | None] = {}
            while not (HOT in rooms and delivered and latency.get("broker") and latency.get("proxy")):
                for number in range(100):
                    await px.room(HOT if number % 10 else COLD).send(b"%d" % number)
                    await anext(subscription)
                while not lines.empty():
                    said = json.loads(lines.get())
                    rooms |= {hot["room"] for hot in said["hot_rooms"][:1]}
                    by_role = {row["role"]: row for row in said["roles"]}
                    delivered = max(delivered, by_role["gateway"]["out_per_s"])
                    latency |= {role: row["p99_s"] for role, row in by_role.items() if row["p99_s"] is not None}
        finally:
            watching.send_signal(signal.SIGINT)
            watching.wait(WAIT_S)
    assert watching.returncode == 0
    places = {(row["role"], row["partition"]): row["alive"] for row in said["roles"]}
    assert places == {
        ("proxy", -1): 2, ("gateway", -1): 2, ("router", 0): 2, ("router", 1): 2, ("broker", 0): 2, ("broker", 1): 2
    } | {key: alive for key, alive in places.items() if key[0] == "relay"}  # fmt: skip
    assert (said["dead"], said["problems"]) == ([], [])


def test_a_process_that_stands_still_is_shown_as_dead(cluster: LocalCluster) -> None:
    victim = cluster.processes("broker")[0]
    os.kill(victim["pid"], signal.SIGSTOP)
    try:
        said = top(cluster, "--interval", "0.2")
        shown = cluster.pixiu("top", "--once", "--interval", "0.2")
    finally:
        os.kill(victim["pid"], signal.SIGCONT)
    assert [text for text in said["dead"] if victim["address"] in text]
    [row] = [row for row in said["roles"] if (row["role"], row["partition"]) == ("broker", victim["partition"])]
    assert (row["alive"], row["dead"]) == (1, 1)
    # On a machine that is busy its session may be over by then.
    assert f"at {victim['address']} does not answer" in shown.stdout or "1 of 2 Running" in shown.stdout
    cluster.wait_healthy()


def test_without_a_registry_it_says_what_to_do(cluster: LocalCluster) -> None:
    assert "no cluster" in cluster.pixiu("top", "--once", "--target", "zk://127.0.0.1:1/pubsub").stderr
    wrong = cluster.pixiu("top", "--once", "--target", "127.0.0.1:7000")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "give zk://" in wrong.stderr
