"""A real process of several idle roles, beside a real ZooKeeper: what each shows, who ends when, and what one's end costs."""

from __future__ import annotations

import json
import signal
from contextlib import AbstractAsyncContextManager

import pytest

from pixiu.discovery import paths
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.operations import NoNode
from pixiu.discovery.zookeeper import ZooKeeper
from tests.cluster.process.test_process_lifecycle import Role, connected, ending, get
from tests.support.shared_zookeeper import shared_server
from tests.support.waiting import until

pytestmark = [pytest.mark.process, pytest.mark.slow]

NAMES = ("router-0", "router-1", "broker-0", "relay-0")


@pytest.fixture
def registry() -> str:
    return shared_server().address


def started(registry: str, *roles: str) -> AbstractAsyncContextManager[Role]:
    return ending(Role("idle_node", [f"zk://{registry}", *roles]))


async def nodes(zookeeper: ZooKeeper, root: str) -> dict[str, Node]:
    """The registered nodes by their role and partition."""
    found = {}
    for name in NAMES:
        role, _, partition = name.partition("-")
        directory = paths.node_directory(root, role, int(partition))
        try:
            for child in await zookeeper.children(directory):
                found[name] = Node.from_json((await zookeeper.get(f"{directory}/{child}"))[0], replica=0)
        except NoNode:
            pass
    return found


def names(lines: list[dict[str, object]]) -> list[str]:
    return [f"{line['role']}-{line['partition']}" for line in lines]


async def test_each_role_shows_itself_and_they_end_in_order(registry: str) -> None:
    async with connected(registry) as zookeeper, started(f"{registry}/order", *NAMES) as process:
        await process.until(lambda: len(process.events("running")) == len(NAMES))
        found = await nodes(zookeeper, "/order")
        assert set(found) == set(NAMES)
        assert {node.pid for node in found.values()} == {process.process.pid}
        assert {node.state for node in found.values()} == {NodeState.RUNNING}
        for field in ("endpoint", "incarnation", "port", "http_port", "stream_port"):
            assert len({getattr(node, field) for node in found.values()}) == len(NAMES), field
        for name, node in found.items():
            health = json.loads((await get(node.http_port, "/health"))[1])
            assert (f"{health['role']}-{health['partition']}", health["state"]) == (name, "Running")
            assert f"pixiu_{node.role}_watchdog_stalls_total" in (await get(node.http_port, "/metrics"))[1]
        assert sorted(names(process.events("registered"))) == sorted(NAMES)
        process.kill(signal.SIGTERM)
        assert await process.ended() == 0
        assert await nodes(zookeeper, "/order") == {}
        stopped = names(process.events("stopped"))
        assert stopped[:2] == ["broker-0", "relay-0"]
        assert sorted(stopped[2:]) == ["router-0", "router-1"]
        ends = [(line["event"], line["role"]) for line in process.log if line["event"] in ("draining", "stopped")]
        assert ends[:4] == [(event, role) for role in ("broker", "relay") for event in ("draining", "stopped")]


async def test_a_crash_of_one_ends_all_in_good_order_with_its_exit_code(registry: str) -> None:
    async with connected(registry) as zookeeper, started(f"{registry}/node-crash", "router-0", "broker-0=fail=asked") as process:
        await process.until(lambda: len(process.events("running")) == 2)
        process.kill(signal.SIGUSR2)
        assert await process.ended() == 1
        assert names(process.events("crashed")) == ["broker-0"]
        assert names(process.events("stopped")) == ["router-0"]
        assert (process.out.count("drained"), process.out.count("stop")) == (1, 2), "the other one hands over"
        assert await nodes(zookeeper, "/node-crash") == {}


async def test_a_failed_start_of_one_ends_all_with_its_exit_code(registry: str) -> None:
    taken = f"router-0=start_s=600 broker-0=port={registry.rpartition(':')[2]}".split()
    async with connected(registry) as zookeeper, started(f"{registry}/failed", *taken) as process:
        assert await process.ended() == 2
        [line] = process.events("start_failed")
        assert line["role"] == "broker"
        assert "cannot be used" in line["error"]
        assert names(process.events("stopped")) == ["router-0"]
        assert await nodes(zookeeper, "/failed") == {}


async def test_a_second_signal_ends_all_at_once(registry: str) -> None:
    async with started(f"{registry}/twice", "router-0", "broker-0=drain_s=600") as process:
        await process.until(lambda: len(process.events("running")) == 2)
        process.kill(signal.SIGTERM)
        await process.until(lambda: "drain" in process.out)
        process.kill(signal.SIGINT)
        assert await process.ended() == 128 + signal.SIGINT
        assert [line["role"] for line in process.events("stopped_at_once")] == ["node"]


async def test_a_hanging_loop_is_reported_once_and_costs_every_role_its_place(registry: str) -> None:
    roles = [f"{name}=session_timeout_ms=1000,hang_s=5" for name in ("router-0", "broker-0")]
    async with connected(registry) as zookeeper, started(f"{registry}/node-hang", *roles) as process:
        await process.until(lambda: len(process.events("running")) == 2)
        before = await nodes(zookeeper, "/node-hang")
        process.kill(signal.SIGUSR1)

        async def gone() -> bool:
            return not await nodes(zookeeper, "/node-hang")

        async def back() -> bool:
            return len(await nodes(zookeeper, "/node-hang")) == 2

        await until(gone)
        await until(back)
        assert [line["role"] for line in process.events("loop_stalled")] == ["node"]
        assert {name: node.endpoint for name, node in (await nodes(zookeeper, "/node-hang")).items()} == {
            name: node.endpoint for name, node in before.items()
        }
        process.kill(signal.SIGTERM)
        assert await process.ended() == 0
