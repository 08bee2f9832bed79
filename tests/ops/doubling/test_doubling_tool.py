"""The tool that doubles a role, with a real registry: killed in every phase, twice at a time, taken back."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Callable

import pytest

from cluster.wire.v1 import doubling_pb2 as pb
from ops.doubling import tool as doubling_tool
from ops.doubling.doubling import Phase, Seen, phases
from ops.doubling.tool import DoublingTool
from pixiu.discovery import paths
from pixiu.discovery.agreement import MAX_PROTOCOL
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.view import RoleLayout
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.errors import InvalidArgument, Unavailable
from pixiu.ids import EndpointID
from pixiu.version import __version__
from registry.layout import ensure_layout, read_layout
from tests.support.doublings import Stores

pytestmark = pytest.mark.zookeeper
ENTRIES = 3_000


class Killed(Exception):
    """The tool ends here."""


def killer(phase: Phase) -> Callable[[Phase], None]:
    def acted(done: Phase) -> None:
        if done is phase:
            raise Killed

    return acted


async def register(zookeeper: ZooKeeper, root: str, role: str, partitions: range, version: str = __version__) -> None:
    """A Running replica of each partition, at an address where nobody is."""
    for partition in partitions:
        node = Node(
            role,
            partition,
            -1,
            NodeState.RUNNING,
            "127.0.0.1",
            partition + 1,
            1,
            EndpointID(partition + 1),
            1,
            version,
            "",
            1,
            os.getpid(),
            protocol_max=MAX_PROTOCOL,
        )
        prefix = paths.node_prefix(root, role, partition)
        await zookeeper.create(prefix, node.to_json(), ephemeral=True, sequence=True, make_parents=True)


@pytest.fixture
async def session(zookeeper: ZooKeeper) -> AsyncIterator[ZooKeeper]:
    """Of a tool."""
    found = ZooKeeper(zookeeper.hosts)
    await found.connect()
    yield found
    await found.close()


async def run(
    session: ZooKeeper, root: str, role: str, stores: Stores | None = None, acted: Phase | None = None, to: int = 4
) -> int:
    """The partitions afterwards."""
    hook = killer(acted) if acted is not None else lambda _: None
    tool = DoublingTool(session, root, role, operator="test", leaders=stores, acted=hook)
    try:
        _, doubling, problems = await tool.look(to)
        assert problems == []
        return to if doubling is None else (await tool.run(doubling, 60.0)).partitions
    finally:
        await tool.close()


@pytest.mark.parametrize("phase", [phase for phase in phases("router") if phase not in (Phase.START, Phase.FOLLOW, Phase.DONE)])
async def test_a_tool_that_is_killed_in_any_phase_is_followed_by_one_that_ends_it(
    zookeeper: ZooKeeper, session: ZooKeeper, root: str, phase: Phase
) -> None:
    await ensure_layout(zookeeper, root, {"router": RoleLayout(2, 2, 1)})
    await register(zookeeper, root, "router", range(4))
    with pytest.raises(Killed):
        await run(session, root, "router", acted=phase)
    assert await run(session, root, "router") == 4
    layout = await read_layout(zookeeper, root)
    assert layout is not None
    assert (layout.roles["router"].n, layout.roles["router"].next, len(layout.roles["router"].doublings)) == (4, 4, 1)
    data, _ = await zookeeper.get(paths.doublings(root, "router"))
    said = [json.loads(line) for line in data.decode().splitlines()]
    assert [line["what"] for line in said if line["what"] != "resumed"][:2] == ["begun", "committed"]
    assert {line["operator"] for line in said} == {"test"}


@pytest.mark.parametrize("phase", [phase for phase in phases("pi") if phase not in (Phase.START, Phase.FOLLOW, Phase.DONE)])
async def test_the_same_for_partitions_with_logs(zookeeper: ZooKeeper, session: ZooKeeper, root: str, phase: Phase) -> None:
    await ensure_layout(zookeeper, root, {"pi": RoleLayout(2, 2, 1)})
    await register(zookeeper, root, "pi", range(4))
    stores = Stores(2, ENTRIES)
    with pytest.raises(Killed):
        await run(session, root, "pi", stores, phase)
    assert await run(session, root, "pi", stores) == 4
    assert [one.phase for one in stores.partitions.values()] == [0, 0, 3, 3]
    assert len(stores.history) == 8, "no phase twice"
    layout = await read_layout(zookeeper, root)
    assert layout is not None
    assert layout.roles["pi"].n == 4
    assert await run(session, root, "pi", stores) == 4, "nothing is left to do"


async def test_without_replicas_of_the_new_partitions_it_says_which_and_is_taken_back(
    zookeeper: ZooKeeper, session: ZooKeeper, root: str
) -> None:
    await ensure_layout(zookeeper, root, {"broker": RoleLayout(2, 2, 1)})
    await register(zookeeper, root, "broker", range(3))
    tool = DoublingTool(session, root, "broker", operator="test")
    layout, doubling, problems = await tool.look(0)
    assert doubling is not None
    assert problems == []
    result = await tool.run(doubling, 0.0)
    assert result.missing == ("broker partition 3: 0 of 1 replicas Running",)
    assert (await tool.take_back(doubling)).roles == layout.roles
    await tool.close()


async def test_a_split_that_comes_after_it_was_taken_back_does_nothing(zookeeper: ZooKeeper, session: ZooKeeper, root: str) -> None:
    await ensure_layout(zookeeper, root, {"pi": RoleLayout(2, 2, 1)})
    await register(zookeeper, root, "pi", range(4))
    stores = Stores(2, ENTRIES)
    late: list[tuple[int, pb.DoublingAdvanceRequest]] = []
    stores.late = late
    with pytest.raises(Killed):
        await run(session, root, "pi", stores, Phase.SPLIT)
    assert len(late) == 2
    tool = DoublingTool(session, root, "pi", operator="test", leaders=stores)
    _, doubling, _ = await tool.look(0)
    assert doubling is not None
    assert (await tool.take_back(doubling)).roles["pi"].next == 2
    await tool.close()
    stores.late = None
    for partition, request in late:
        with pytest.raises(Unavailable, match="taken back"):
            await stores.advance(tool._discovery.view, partition, request)
    for one in (2, 3):
        stores.partitions[one].phase = pb.DOUBLING_NONE  # as `pixiu up` ends it; another doubling has it learn anew
    assert await run(session, root, "pi", stores) == 4


async def test_a_tool_that_takes_back_late_does_nothing_once_another_one_goes_on(
    zookeeper: ZooKeeper, session: ZooKeeper, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ensure_layout(zookeeper, root, {"pi": RoleLayout(2, 2, 1)})
    await register(zookeeper, root, "pi", range(4))
    stores = Stores(2, ENTRIES)
    with pytest.raises(Killed):
        await run(session, root, "pi", stores, Phase.LEARN)
    late = DoublingTool(session, root, "pi", operator="late", leaders=stores)
    _, doubling, _ = await late.look(0)
    assert doubling is not None
    keep_whole = late._keep_whole

    async def stopped(seen: Seen) -> None:
        """Its session ends here; another tool goes on; it wakes up."""
        await keep_whole(seen)
        await late._unlock()
        with pytest.raises(Killed):
            await run(session, root, "pi", stores, Phase.SPLIT)

    monkeypatch.setattr(late, "_keep_whole", stopped)
    with pytest.raises(Unavailable, match="another tool has gone on"):
        await late.take_back(doubling)
    await late.close()
    assert await run(session, root, "pi", stores) == 4


async def test_what_must_be_right_before_is_said(zookeeper: ZooKeeper, session: ZooKeeper, root: str) -> None:
    await ensure_layout(zookeeper, root, {"broker": RoleLayout(2, 2, 1)})
    await register(zookeeper, root, "broker", range(1, 2))
    tool = DoublingTool(session, root, "broker", operator="test")
    _, _, problems = await tool.look(0)
    assert problems == ["broker partition 0 has no Running replica: `pixiu status`"]
    await tool.close()


async def test_a_partition_without_a_leader_and_a_tool_of_another_version_are_refused_before_anything_begins(
    zookeeper: ZooKeeper, session: ZooKeeper, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doubling_tool, "LEADER_WAIT_S", 0.0)
    await ensure_layout(zookeeper, root, {"pi": RoleLayout(2, 2, 1)})
    await register(zookeeper, root, "pi", range(1))
    await register(zookeeper, root, "pi", range(1, 2), version="0.0.9")
    tool = DoublingTool(session, root, "pi", operator="test")  # whom it asks is not there
    _, doubling, problems = await tool.look(0)
    assert doubling is not None
    *mute, strange = problems
    assert mute == [f"pi partition {one} has no leader that answers: `pixiu status` says what it waits for" for one in range(2)]
    assert strange == f"this tool has version {__version__}, and pi runs 0.0.9: use the tool of the same version"
    await tool.close()


async def test_two_tools_at_once_are_refused_and_a_dead_ones_lock_is_not(
    zookeeper: ZooKeeper, session: ZooKeeper, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ensure_layout(zookeeper, root, {"broker": RoleLayout(2, 2, 1), "router": RoleLayout(2, 2, 1)})
    await register(zookeeper, root, "broker", range(4))
    monkeypatch.setattr(doubling_tool, "LOCK_WAIT_S", 0.0)
    process = await asyncio.create_subprocess_exec("true")
    await process.wait()
    lock = paths.doubling(root, "router")
    for host, pid, refused in [
        ("elsewhere", 1, True),
        (socket.gethostname(), os.getpid(), True),
        (socket.gethostname(), process.pid, False),
    ]:
        said = {"operator": "other", "host": host, "pid": pid}
        await zookeeper.create(lock, json.dumps(said).encode(), ephemeral=True)
        if refused:
            with pytest.raises(InvalidArgument, match="other doubles router"):
                await run(session, root, "broker")
            await zookeeper.delete(lock)
        else:
            assert await run(session, root, "broker") == 4
