"""What an operator sees and does while all runs, with processes: a plan on a skewed load, settings that change."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

import pixiu
from tests.support.cluster import LocalCluster, running_cluster, wait_for
from tools.cli.http import fetch, samples

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

HOT, OTHERS = 7, range(1000, 1100)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with running_cluster(tmp_path_factory.mktemp("growth"), "--xius=1", "--pis=1", layout="small") as found:
        yield found


def shown(cluster: LocalCluster, command: str, *arguments: str) -> dict[str, Any]:
    """What a command prints as one JSON object."""
    result = cluster.pixiu(command, *arguments, "--json")
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def plan(cluster: LocalCluster, role: str) -> dict[str, Any]:
    return shown(cluster, f"double {role}", "--dry-run")


async def skewed(target: str, stop: asyncio.Event) -> None:
    """Four of five mails are one user's."""
    async with pixiu.connect(target) as px, px.mail_writer() as writer:
        number = 0
        while not stop.is_set():
            await writer.space()
            number += 1
            writer.send(HOT if number % 5 else OTHERS[number % len(OTHERS)], b"mail")
            if number % 50 == 0:
                await asyncio.sleep(0.05)
        await writer.wait_finished()


async def test_a_plan_says_that_one_hot_user_will_not_get_lighter(cluster: LocalCluster) -> None:
    stop = asyncio.Event()
    load = asyncio.create_task(skewed(cluster.target, stop))

    def counted() -> dict[str, Any] | None:
        found = plan(cluster, "pi")
        assert not load.done() or load.result() is None
        return found if found["load"][0]["per_s"] > 20 and found["load"][0]["hottest"] else None

    try:
        pi = await asyncio.to_thread(wait_for, counted, "ten seconds of load")
        xiu = await asyncio.to_thread(plan, cluster, "xiu")
        text = await asyncio.to_thread(cluster.pixiu, "double pi", "--dry-run")
    finally:
        stop.set()
        await load
    assert pi is not None
    assert pi["problems"] == []
    for role, found in (("pi", pi), ("xiu", xiu)):
        (one,) = found["load"]
        assert one["hottest"] == HOT, role
        assert one["lighter"] is False, role
        assert 0.6 < one["hottest_per_s"] / one["per_s"] <= 1, "four of five"
        assert one["goes_per_s"] > one["stays_per_s"], "7 goes to the child, and takes the load along"
        assert f"user {HOT} alone is" in found["warnings"][0], role
        assert found["pause_s"] > 0
    assert pi["move_bytes"] > 0
    assert xiu["move_bytes"] == 0, "a child of Xiu copies nothing"
    (machine,) = pi["machines"]
    assert machine["memory_free_bytes"] > 0
    assert machine["disk_free_bytes"] > machine["disk_wanted_bytes"] > 0
    assert machine["replicas"] == 1
    assert f"partition 0 will not get lighter: user {HOT} alone is" in text.stdout
    assert "pause to expect: about" in text.stdout


async def over_rate(cluster: LocalCluster) -> float:
    """How many of some messages the proxy refused because they came too fast; the SDK sends them again."""
    (proxy,) = cluster.processes("proxy")
    address, _, port = proxy["http"].removeprefix("http://").rpartition(":")

    async def refused() -> float:
        _, page = await fetch(address, int(port), "/metrics")
        return sum(value for name, _, value in samples(page) if name == "pixiu_proxy_records_over_rate_total")

    before = await refused()
    async with pixiu.connect(cluster.target) as px:
        for number in range(5):
            await px.room(5).send(b"%d" % number)
    return await refused() - before


async def test_settings_change_while_all_runs_and_stay(cluster: LocalCluster) -> None:
    found = shown(cluster, "config get")
    assert (found["version"], found["behind"]) == (0, [])
    assert found["settings"]["proxy.room_messages_per_s"]["set"] is None
    assert await over_rate(cluster) == 0
    changed = shown(cluster, "config set", "proxy.publisher_messages_per_s=1", "broker.log_level=debug", "cluster.trace_fraction=1")
    assert (changed["version"], changed["behind"]) == (1, [])
    assert changed["processes"] == len(cluster.status()["processes"]), "all go by it"
    assert await over_rate(cluster) > 0
    back = shown(cluster, "config unset", "proxy.publisher_messages_per_s")
    assert back["changed"] == {"proxy.publisher_messages_per_s": None}
    assert await over_rate(cluster) == 0
    wrong = cluster.pixiu("config set", "proxy.room_mesages_per_s=5")
    assert wrong.returncode == 2
    assert "Did you mean proxy.room_messages_per_s" in wrong.stderr
    first, second = cluster.pixiu("config history").stdout.splitlines()
    assert "version 1: " in first
    assert "version 2: proxy.publisher_messages_per_s unset" in second
