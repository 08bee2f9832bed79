"""`pixiu add-replica` and `pixiu remove-replica` where no `pixiu up` runs: the layout changes, and what is left to do is said."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from onebox.embedded import EmbeddedZooKeeper
from pixiu.discovery import paths
from pixiu.discovery.node import NodeState
from pixiu.discovery.view import RoleLayout
from pixiu.discovery.zookeeper import ZooKeeper
from registry.layout import begin_doubling, ensure_layout, read_layout
from registry.mailbox import Mark, data_at
from registry.membership import Membership
from tests.support.zookeeper import PATIENCE_S, connected, expire, make_node
from tools.cli.main import application


def run(*words: str) -> Result:
    return CliRunner().invoke(application(words), list(words))


class Cluster:
    """A root with a layout and no processes."""

    def __init__(self, server: EmbeddedZooKeeper, zookeeper: ZooKeeper, root: str) -> None:
        self.zookeeper, self.root = zookeeper, root
        self.target = f"zk://{server.address}{root}"

    async def __call__(self, *words: str) -> Result:
        return await asyncio.to_thread(run, *words, "--target", self.target)

    async def replicas(self, role: str) -> int:
        layout = await read_layout(self.zookeeper, self.root)
        assert layout is not None
        return layout.roles[role].replicas


@pytest.fixture
async def cluster(zookeeper_server: EmbeddedZooKeeper, zookeeper: ZooKeeper, root: str) -> Cluster:
    await ensure_layout(zookeeper, root, {"broker": RoleLayout(2, 2, 1), "proxy": RoleLayout(1, 1, 2)})
    return Cluster(zookeeper_server, zookeeper, root)


async def test_one_more_is_wanted_and_what_is_to_be_started_is_said(cluster: Cluster) -> None:
    added = await cluster("add-replica", "broker")
    assert (added.exit_code, await cluster.replicas("broker")) == (0, 2)
    assert added.stdout.count("python -m broker --config FILE --set partition=1") == 2
    said: dict[str, Any] = json.loads((await cluster("add-replica", "proxy", "--json")).stdout)
    assert said == {"role": "proxy", "replicas": 3, "supervisor": "", "do": ["python -m proxy --config FILE"] * 3}


async def test_one_less_is_wanted_and_the_newest_is_named(cluster: Cluster) -> None:
    processes = [Membership(cluster.zookeeper, cluster.root) for _ in range(2)]
    nodes = [
        await process.register(make_node("proxy", port=7000 + 10 * number, state=NodeState.RUNNING))
        for number, process in enumerate(processes)
    ]
    removed = await cluster("remove-replica", "proxy", "--force")
    assert (removed.exit_code, await cluster.replicas("proxy")) == (0, 1)
    assert f"  pixiu drain proxy/{nodes[1].replica}\n" in removed.stdout
    assert f"proxy/{nodes[0].replica}" not in removed.stdout
    for process in processes:
        await process.unregister()


async def test_what_cannot_be_changes_nothing(cluster: Cluster) -> None:
    ill = await cluster("remove-replica", "proxy")
    assert (ill.exit_code, "not healthy, and nothing was changed" in ill.stderr) == (2, True)
    last = await cluster("remove-replica", "broker", "--force")
    assert (last.exit_code, "broker has 1 wanted replica(s)" in last.stderr) == (2, True)
    unknown = await cluster("add-replica", "king")
    assert (unknown.exit_code, "no role 'king'; it has broker, proxy" in unknown.stderr) == (2, True)
    await begin_doubling(cluster.zookeeper, cluster.root, "broker", "0" * 16)
    doubled = await cluster("add-replica", "broker")
    assert (doubled.exit_code, "is being doubled" in doubled.stderr) == (2, True)
    assert (await cluster.replicas("proxy"), await cluster.replicas("broker")) == (2, 1)


async def test_a_supervisor_that_does_not_get_there_is_named(cluster: Cluster) -> None:
    await cluster.zookeeper.create(paths.supervisor(cluster.root), b"desk (pid 7)")  # no session of it can end meanwhile
    late = await cluster("add-replica", "proxy", "--timeout", "1")
    assert (late.exit_code, "`pixiu up` has not reached that" in late.stderr) == (2, True)
    assert await cluster.replicas("proxy") == 3


async def test_the_mark_of_a_supervisor_outlives_its_session(
    zookeeper_server: EmbeddedZooKeeper, zookeeper: ZooKeeper, root: str
) -> None:
    session = await connected(zookeeper_server)
    mark = Mark(session, paths.supervisor(root), "desk (pid 7)")
    mark.start()

    async def stands(before: int) -> int:
        """In another session than `before`."""
        while (stat := await zookeeper.exists(paths.supervisor(root))) is None or stat.ephemeral_owner == before:
            await asyncio.sleep(0.01)
        return stat.ephemeral_owner

    async with asyncio.timeout(PATIENCE_S):
        first = await stands(0)
        await expire(session)
        await stands(first)
    assert await data_at(zookeeper, paths.supervisor(root)) == b"desk (pid 7)"
    await mark.stop()
    await session.close()
    assert await data_at(zookeeper, paths.supervisor(root)) == b""
