"""A partition in a real ZooKeeper: compare-and-set with its three outcomes, reads, presence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.replication.core.events import CompareAndSetOutcome
from cluster.replication.model import MemberID, PartitionState, Presence, Versioned
from cluster.replication.peers.registry import LiveReplica, PartitionRegistry
from onebox.embedded import EmbeddedZooKeeper
from pixiu.discovery import paths
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.ids import EndpointID
from tests.support.waiting import until
from tests.support.zookeeper import connected

A, B = MemberID(0xA), MemberID(0xB)
FIRST = PartitionState(1, A, 1, frozenset({A}))
NODE = Node("xiu", 0, -1, NodeState.RUNNING, "127.0.0.1", 7000, 7001, EndpointID(1), 1, "", "", 0, member=A, member_incarnation=3)


class Told:
    """A partition's registry, and what it told."""

    def __init__(self, zookeeper: ZooKeeper, root: str) -> None:
        self.zookeeper, self.root = zookeeper, root
        self.states: list[Versioned | None] = []
        self.swapped: list[tuple[int, CompareAndSetOutcome]] = []
        self.live: list[dict[MemberID, LiveReplica]] = []
        self.errors: list[BaseException] = []
        context: Any = SimpleNamespace(
            zookeeper=zookeeper, root=root, role="xiu", options=SimpleNamespace(partition=0), crash=self.errors.append,
            log=SimpleNamespace(error=lambda *_arguments, **_fields: None),
        )  # fmt: skip
        self.registry = PartitionRegistry(
            context, self.states.append, lambda token, outcome: self.swapped.append((token, outcome)), self.live.append
        )

    async def register(self, node: Node) -> str:
        return await self.zookeeper.create(
            paths.node_prefix(self.root, "xiu", 0), node.to_json(), ephemeral=True, sequence=True, make_parents=True
        )


@pytest.fixture
async def told(zookeeper: ZooKeeper, root: str) -> AsyncIterator[Told]:
    await zookeeper.ensure_path(paths.partition_directory(root, "xiu", 0))
    found = Told(zookeeper, root)
    await found.registry.start()
    yield found
    await found.registry.close()
    assert found.errors == []


async def test_a_state_is_created_and_changed_by_its_version_only(told: Told) -> None:
    told.registry.read()
    await until(lambda: told.states)
    assert told.states == [Versioned(-1, None)]
    second = replace(FIRST, epoch=2)
    for token, expected, state in ((1, -1, FIRST), (2, -1, second), (3, 5, second), (4, 0, second)):
        told.registry.swap(token, expected, state)
        await until(lambda token=token: told.swapped and told.swapped[-1][0] == token)  # type: ignore[misc]
    assert told.swapped == [
        (1, CompareAndSetOutcome.OK),
        (2, CompareAndSetOutcome.CONFLICT),
        (3, CompareAndSetOutcome.CONFLICT),
        (4, CompareAndSetOutcome.OK),
    ]
    await until(lambda: told.states[-1] == Versioned(1, second))  # the watch told it


async def test_a_state_that_cannot_be_read_is_never_taken_for_none(told: Told) -> None:
    path = paths.partition_state(told.root, "xiu", 0)
    await told.zookeeper.create(path, b'{"epoch": 1}')
    told.registry.read()
    await until(lambda: told.states)
    assert told.states == [None]
    assert told.registry.counts["state_malformed_total"] == 1


async def test_without_zookeeper_reads_fail_and_outcomes_are_unknown(own_server: EmbeddedZooKeeper, root: str) -> None:
    zookeeper = await connected(own_server)
    told = Told(zookeeper, root)
    await told.registry.start()
    await asyncio.to_thread(own_server.kill)
    await until(lambda: not zookeeper.connected)
    told.registry.read()
    told.registry.swap(1, -1, FIRST)
    await until(lambda: told.states and told.swapped)
    assert told.states[-1] is None
    assert told.swapped == [(1, CompareAndSetOutcome.UNKNOWN)]
    await told.registry.close()
    await zookeeper.close()


async def test_presence_is_the_newest_registration_of_each_member(told: Told) -> None:
    first = await told.register(NODE)
    second = await told.register(replace(NODE, member_incarnation=4, port=7002))
    await told.register(replace(NODE, member=0))  # no replica
    other = await told.register(replace(NODE, member=B, port=7003))
    await until(lambda: told.live and len(told.live[-1]) == 2)
    number = paths.replica_of(second.rpartition("/")[2])
    await until(lambda: told.live[-1][A].presence == Presence(number or 0, A, 4))
    assert told.live[-1][A].address == "127.0.0.1:7002"
    await told.zookeeper.delete(first)
    await told.zookeeper.delete(other)
    await until(lambda: told.live[-1].keys() == {A})
    assert told.live[-1][A].presence.incarnation == 4
