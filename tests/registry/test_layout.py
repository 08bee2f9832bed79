"""The layout and its mirrors."""

from __future__ import annotations

import asyncio

import pytest

from pixiu.discovery import paths
from pixiu.discovery.view import Layout, RoleLayout
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.errors import ConfigurationError, InvalidArgument, MalformedData
from registry.layout import ensure_layout, read_layout, set_replicas

DESIRED = {"router": RoleLayout(2, 2, 3), "broker": RoleLayout(4, 4, 1), "proxy": RoleLayout(1, 1, 2)}


async def mirror(zookeeper: ZooKeeper, root: str, role: str) -> bytes:
    return (await zookeeper.get(paths.partition_num(root, role)))[0]


async def test_a_layout_is_created_with_its_mirrors(zookeeper: ZooKeeper, root: str) -> None:
    assert await read_layout(zookeeper, root) is None
    layout = await ensure_layout(zookeeper, root, DESIRED)
    assert layout == Layout(1, DESIRED) == await read_layout(zookeeper, root)
    assert await mirror(zookeeper, root, "router") == b"2"
    assert await mirror(zookeeper, root, "broker") == b"4"
    assert await zookeeper.exists(f"{root}/proxy/partition_num") is None
    assert await ensure_layout(zookeeper, root, DESIRED) == layout


async def test_any_number_of_processes_may_create_it_at_once(zookeeper: ZooKeeper, root: str) -> None:
    layouts = await asyncio.gather(*(ensure_layout(zookeeper, root, DESIRED) for _ in range(10)))
    assert layouts == [Layout(1, DESIRED)] * 10


async def test_another_number_of_partitions_is_refused_and_both_are_named(zookeeper: ZooKeeper, root: str) -> None:
    await ensure_layout(zookeeper, root, DESIRED)
    with pytest.raises(ConfigurationError, match=r"router has 2 .* 4 are configured: set the number in the configuration to 2"):
        await ensure_layout(zookeeper, root, {"router": RoleLayout(4, 4, 3)})
    assert await read_layout(zookeeper, root) == Layout(1, DESIRED)


async def test_roles_that_are_missing_are_added_and_wanted_replicas_stay(zookeeper: ZooKeeper, root: str) -> None:
    await ensure_layout(zookeeper, root, DESIRED)
    layout = await ensure_layout(zookeeper, root, {"router": RoleLayout(2, 2, 9), "relay": RoleLayout(2, 2, 1)})
    assert layout == Layout(2, {**DESIRED, "relay": RoleLayout(2, 2, 1)})
    assert await mirror(zookeeper, root, "relay") == b"2"


async def test_a_mirror_that_is_there_without_a_layout_is_written_over(zookeeper: ZooKeeper, root: str) -> None:
    await zookeeper.create(paths.partition_num(root, "router"), b"64", make_parents=True)
    await ensure_layout(zookeeper, root, DESIRED)
    assert await mirror(zookeeper, root, "router") == b"2"


async def test_wanted_replicas_are_set_and_concurrent_changes_are_all_kept(zookeeper: ZooKeeper, root: str) -> None:
    await ensure_layout(zookeeper, root, DESIRED)
    await asyncio.gather(*(set_replicas(zookeeper, root, role, 5) for role in DESIRED))
    layout = await read_layout(zookeeper, root)
    assert layout is not None
    assert layout.version == 4
    assert {role: one.replicas for role, one in layout.roles.items()} == dict.fromkeys(DESIRED, 5)
    assert layout.partitions("broker") == 4
    assert await set_replicas(zookeeper, root, "router", 5) == layout


async def test_what_cannot_be_is_refused_before_anything_is_written(zookeeper: ZooKeeper, root: str) -> None:
    for role, wanted in (
        ("king", RoleLayout()),
        ("router", RoleLayout(3, 3, 1)),
        ("router", RoleLayout(256, 256, 1)),
        ("router", RoleLayout(2, 4, 1)),
        ("proxy", RoleLayout(2, 2, 1)),
        ("router", RoleLayout(2, 2, -1)),
    ):
        with pytest.raises(InvalidArgument, match=role):
            await ensure_layout(zookeeper, root, {role: wanted})
    with pytest.raises(InvalidArgument, match="no role"):
        await set_replicas(zookeeper, root, "router", 1)
    with pytest.raises(InvalidArgument):
        await set_replicas(zookeeper, root, "router", -1)
    assert await zookeeper.exists(root) is None


async def test_a_layout_that_cannot_be_read_is_never_written_over(zookeeper: ZooKeeper, root: str) -> None:
    await zookeeper.create(paths.layout(root), b"nonsense", make_parents=True)
    with pytest.raises(MalformedData):
        await ensure_layout(zookeeper, root, DESIRED)
    assert (await zookeeper.get(paths.layout(root)))[0] == b"nonsense"
