"""Topics in a real ZooKeeper: one admin leads at a time, and a deposed one changes nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from onebox.embedded import EmbeddedZooKeeper
from pixiu.discovery import paths
from pixiu.discovery.operations import Create, Delete, RegistryConflict, Set
from pixiu.discovery.topics import (
    MAX_TOPIC_BYTES,
    SETTINGS,
    Numbers,
    PartState,
    TopicChannel,
    TopicNode,
    TopicPart,
    read_topic,
    topic_names,
)
from pixiu.discovery.view import View
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.errors import InvalidArgument, MalformedData, NotLeader, UnknownTopic
from pixiu.placement.slots import SLOTS
from pixiu.wire.v1 import topic_pb2
from proxy import topics as proxy_topics
from proxy.topics import TopicsService
from registry.topics import AdminLease, TopicStore
from tests.support.waiting import until
from tests.support.zookeeper import connected, expire

NODE = TopicNode("orders", 1, 1, (TopicPart(1, 0, SLOTS, 0),), (TopicChannel(1, "billing"),), retention_s=60)


class Admin:
    """A lease and a store, and the epochs in which it led."""

    def __init__(self, zookeeper: ZooKeeper, root: str, name: str) -> None:
        self.epochs: list[int] = []
        self.lease = AdminLease(zookeeper, root, name, self.epochs.append)
        self.store = TopicStore(zookeeper, root, self.lease)
        self.lease.start(f"{name}:1")


async def test_one_leads_and_another_takes_over(zookeeper: ZooKeeper, root: str) -> None:
    first = Admin(zookeeper, root, "a")
    await until(lambda: first.lease.epoch == 1)
    second = Admin(zookeeper, root, "b")
    await until(lambda: second.lease.leader == "a:1")
    assert second.epochs == []
    with pytest.raises(NotLeader):
        second.lease.check()
    await first.lease.stop()
    assert first.epochs == [1, 0]
    await until(lambda: second.lease.epoch == 2)
    await second.lease.stop()


async def test_an_admin_that_stops_leaves_the_lease_of_another_one(zookeeper: ZooKeeper, root: str) -> None:
    first, lease = Admin(zookeeper, root, "a"), paths.admin_lease(root)
    await until(lambda: first.lease.epoch == 1)
    others = b'{"holder":"b","address":"b:1","epoch":2}'
    raised = Set(paths.admin_epoch(root), b'{"epoch":2}', -1)
    await zookeeper.transaction([Delete(lease), raised, Create(lease, others)])
    await first.lease.stop()
    assert (await zookeeper.get(lease))[0] == others


async def test_a_deposed_admin_writes_nothing(zookeeper: ZooKeeper, root: str) -> None:
    first = Admin(zookeeper, root, "a")
    await until(lambda: first.lease.epoch == 1)
    await first.store.load()
    assert await first.store.write("orders", -1, NODE, Numbers(1, 1)) == 0
    # Another one leads before the first one has learned that it does not.
    await zookeeper.set(paths.admin_epoch(root), b'{"epoch":2}')
    with pytest.raises(RegistryConflict):
        await first.store.write("orders", 0, replace(NODE, version=2), Numbers(1, 1))
    assert await read_topic(zookeeper, root, "orders") == (NODE, 0)
    await until(lambda: first.lease.epoch == 3)  # it sees that its epoch is over, and leads in a new one
    assert first.epochs == [1, 0, 3]
    await first.lease.stop()


async def test_proxies_see_what_another_one_changed(zookeeper: ZooKeeper, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch ends what a proxy remembers: a user may change a topic through one proxy and look at it through another."""
    monkeypatch.setattr(proxy_topics, "CACHED_S", 3600.0)
    admin = Admin(zookeeper, root, "a")
    await until(lambda: admin.lease.epoch == 1)
    await admin.store.load()
    context: Any = SimpleNamespace(zookeeper=zookeeper, root=root, tls=None, view=View())
    service = TopicsService(context, None)
    assert (await service.List(topic_pb2.ListTopicsRequest(), None)).topics == []

    async def shows(version: int) -> bool:
        try:
            described = await service.Describe(topic_pb2.DescribeTopicRequest(name="orders"), context_of_call)
        except UnknownTopic:
            return False
        listed = (await service.List(topic_pb2.ListTopicsRequest(), None)).topics
        return [described.version, *(each.version for each in listed)] == [version, version]

    async def abort(_code: object, _text: str) -> None:
        """The error follows."""

    context_of_call: Any = SimpleNamespace(abort=abort)
    opened = replace(NODE, parts=(replace(NODE.parts[0], state=PartState.OPEN),))
    for at, version in ((-1, 1), (0, 2)):
        await admin.store.write("orders", at, replace(opened, version=version), Numbers(1, 1))
        await until(partial(shows, version))
    await admin.lease.stop()


async def test_a_session_that_ends_costs_the_leadership(zookeeper_server: EmbeddedZooKeeper, root: str) -> None:
    zookeeper = await connected(zookeeper_server)
    admin = Admin(zookeeper, root, "a")
    await until(lambda: admin.lease.epoch == 1)
    await admin.store.load()
    await expire(zookeeper)
    await until(lambda: admin.epochs[:2] == [1, 0])
    await until(lambda: admin.lease.epoch > 1)
    await admin.store.load()
    assert await admin.store.write("orders", -1, NODE, Numbers(1, 1)) == 0
    await admin.lease.stop()
    await zookeeper.close()


async def test_nodes_are_written_by_compare_and_set_with_their_numbers(zookeeper: ZooKeeper, root: str) -> None:
    admin = Admin(zookeeper, root, "a")
    await until(lambda: admin.lease.epoch == 1)
    loaded = await admin.store.load()
    assert loaded == (Numbers(), {}, {})
    await admin.store.write("orders", -1, NODE, Numbers(1, 1))
    with pytest.raises(RegistryConflict):
        await admin.store.write("orders", -1, NODE, Numbers(2, 1))
    assert (await admin.store.load()).numbers == Numbers(1, 1)
    assert await admin.store.write("orders", 0, replace(NODE, version=2), Numbers(1, 5)) == 1
    await zookeeper.set(paths.topic(root, "orders"), b"{}")
    loaded = await admin.store.load()
    assert loaded.numbers == Numbers(1, 5)
    assert not loaded.topics
    assert loaded.unreadable.keys() == {"orders"}
    await admin.store.write("orders", 2, None, Numbers(1, 5))
    assert await topic_names(zookeeper, root) == []
    await admin.lease.stop()


def test_a_node_is_read_as_it_was_written() -> None:
    parts = (
        TopicPart(1, 0, SLOTS, 0, PartState.SEALED, sealed_at_ms=5),
        TopicPart(2, 0, 9, 1, PartState.OPEN, (1,)),
        TopicPart(3, 9, SLOTS, 2, PartState.OPEN, (1,)),
    )
    channel = TopicChannel(7, "billing", True, True, 3, 500, '{"a":1}', 4, True)
    settings: dict[str, Any] = {name: number for number, name in enumerate(SETTINGS, 1)} | {"store": "s3://b/c"}
    node = TopicNode("orders", 9, 5, parts, (channel,), **settings, deleted_at_ms=5, purge_at_ms=6, purging=True, settled=7)
    assert TopicNode.from_json("orders", node.to_json()) == node
    assert node.lineage().children(1)[0].number == 2


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'{"topic":1}',
        NODE.to_json().replace(b"65536", b"65535"),
        NODE.to_json().replace(b"opening", b"gone"),
        NODE.to_json().replace(b'"channels":[', b'"channels":[1,'),
        NODE.to_json().replace(b'"billing"', b'"bill ing"'),
        b" " * (MAX_TOPIC_BYTES + 1),
    ],
)
def test_what_is_no_topic_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedData):
        TopicNode.from_json("orders", data)


def test_a_node_has_a_limit() -> None:
    channels = tuple(TopicChannel(number, f"c{number}", filter="x" * 4_000) for number in range(1, 200))
    with pytest.raises(InvalidArgument, match="524,288"):
        replace(NODE, channels=channels).to_json()
