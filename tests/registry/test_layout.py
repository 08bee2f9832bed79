"""The layout and its mirrors."""

from __future__ import annotations

import asyncio
import re

import pytest

from pixiu.discovery import paths
from pixiu.discovery.view import Layout, RoleLayout
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.errors import ConfigurationError, InvalidArgument, MalformedData
from registry.layout import abort_doubling, begin_doubling, commit_doubling, ensure_layout, read_layout, set_replicas

DESIRED = {"router": RoleLayout(2, 2, 3), "broker": RoleLayout(4, 4, 1), "proxy": RoleLayout(1, 1, 2)}


async def mirror(zookeeper: ZooKeeper, root: str, role: str) -> bytes:
    return (await zookeeper.get(paths.partition_num(root, role)))[0]


async def test_a_layout_is_created_with_its_mirrors(zookeeper: ZooKeeper, root: str) -> None:
    assert await read_layout(zookeeper, root) is None
    layout = await ensure_layout(zookeeper, root, DESIRED)
    assert layout == Layout(1, DESIRED, layout.cluster) == await read_layout(zookeeper, root)
    assert await mirror(zookeeper, root, "router") == b"2"
    assert await mirror(zookeeper, root, "broker") == b"4"
    assert await zookeeper.exists(f"{root}/proxy/partition_num") is None
    assert await ensure_layout(zookeeper, root, DESIRED) == layout


async def test_a_clusters_id_is_made_once_and_stays(zookeeper: ZooKeeper, root: str) -> None:
    first = await ensure_layout(zookeeper, root, DESIRED)
    assert re.fullmatch("[0-9a-f]{16}", first.cluster)
    await begin_doubling(zookeeper, root, "router", "a" * 16)
    await commit_doubling(zookeeper, root, "router", "a" * 16)
    assert (await ensure_layout(zookeeper, root, DESIRED)).cluster == first.cluster
    assert (await ensure_layout(zookeeper, f"{root}/other", DESIRED)).cluster != first.cluster


async def test_any_number_of_processes_may_create_it_at_once(zookeeper: ZooKeeper, root: str) -> None:
    layouts = await asyncio.gather(*(ensure_layout(zookeeper, root, DESIRED) for _ in range(10)))
    assert layouts == [Layout(1, DESIRED, layouts[0].cluster)] * 10


async def test_another_number_of_partitions_is_refused_and_both_are_named(zookeeper: ZooKeeper, root: str) -> None:
    await ensure_layout(zookeeper, root, DESIRED)
    with pytest.raises(ConfigurationError, match=r"router has 2 .* 4 are configured: set the number in the configuration to 2"):
        await ensure_layout(zookeeper, root, {"router": RoleLayout(4, 4, 3)})
    layout = await read_layout(zookeeper, root)
    assert layout is not None
    assert (layout.version, layout.roles) == (1, DESIRED)


async def test_roles_that_are_missing_are_added_and_wanted_replicas_stay(zookeeper: ZooKeeper, root: str) -> None:
    await ensure_layout(zookeeper, root, DESIRED)
    layout = await ensure_layout(zookeeper, root, {"router": RoleLayout(2, 2, 9), "relay": RoleLayout(2, 2, 1)})
    assert (layout.version, layout.roles) == (2, {**DESIRED, "relay": RoleLayout(2, 2, 1)})
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


@pytest.mark.parametrize("role", ["router", "broker"])
async def test_a_doubling_is_begun_and_ended_once_and_the_mirror_follows(zookeeper: ZooKeeper, root: str, role: str) -> None:
    n, replicas = DESIRED[role].n, DESIRED[role].replicas
    await ensure_layout(zookeeper, root, DESIRED)
    for _ in range(2):
        layout = await begin_doubling(zookeeper, root, role, "0" * 15 + "1")
        assert layout.roles[role] == RoleLayout(n, 2 * n, replicas, ("0" * 15 + "1",))
        assert layout.version == 2
    assert await mirror(zookeeper, root, role) == b"%d" % n
    with pytest.raises(InvalidArgument, match=r"doubling 0000000000000001 of .* is under way"):
        await begin_doubling(zookeeper, root, role, "f" * 16)
    with pytest.raises(InvalidArgument, match="is not the one under way"):
        await commit_doubling(zookeeper, root, role, "f" * 16)
    for _ in range(2):
        layout = await commit_doubling(zookeeper, root, role, "0" * 15 + "1")
        assert layout.roles[role] == RoleLayout(2 * n, 2 * n, replicas, ("0" * 15 + "1",))
        assert layout.version == 3
    assert await mirror(zookeeper, root, role) == b"%d" % (2 * n)
    assert await read_layout(zookeeper, root) == layout
    with pytest.raises(InvalidArgument, match="it cannot be taken back"):
        await abort_doubling(zookeeper, root, role, "0" * 15 + "1")


async def test_a_doubling_is_taken_back(zookeeper: ZooKeeper, root: str) -> None:
    await ensure_layout(zookeeper, root, DESIRED)
    await begin_doubling(zookeeper, root, "router", "a" * 16)
    for _ in range(2):
        assert (await abort_doubling(zookeeper, root, "router", "a" * 16)).roles == DESIRED
    with pytest.raises(InvalidArgument, match="'proxy' has no partitions"):
        await begin_doubling(zookeeper, root, "proxy", "a" * 16)


def test_only_doublings_make_a_layout_grow() -> None:
    two, begun, four = RoleLayout(2, 2), RoleLayout(2, 4, 0, ("a" * 16,)), RoleLayout(4, 4, 0, ("a" * 16,))
    eight = RoleLayout(8, 8, 0, ("a" * 16, "b" * 16))
    for before, after in [(two, two), (two, begun), (begun, two), (begun, four), (two, four), (four, eight), (two, eight)]:
        assert after.grew(before)
    by_hand, other = RoleLayout(4, 4), RoleLayout(4, 4, 0, ("c" * 16,))
    for before, after in [
        (two, by_hand),
        (begun, by_hand),
        (four, two),
        (eight, four),
        (four, other),
        (four, by_hand),
        (other, eight),
    ]:
        assert not after.grew(before)


@pytest.mark.parametrize("doublings", ['"x"', "[1]", '["xyz"]', '["0000000000000001", "A000000000000001"]'])
def test_doublings_without_an_id_are_malformed(doublings: str) -> None:
    with pytest.raises(MalformedData, match="doublings of router"):
        Layout.from_json(b'{"version":1,"cluster":"0123456789abcdef","router":{"n":2,"doublings":%s}}' % doublings.encode())


async def test_a_configuration_from_before_doublings_takes_their_number(zookeeper: ZooKeeper, root: str) -> None:
    await ensure_layout(zookeeper, root, DESIRED)
    n = DESIRED["router"].n
    for doubled, doubling in enumerate(("a" * 16, "b" * 16), 1):
        await begin_doubling(zookeeper, root, "router", doubling)
        assert (await ensure_layout(zookeeper, root, DESIRED)).roles["router"].n == n << doubled - 1
        layout = await commit_doubling(zookeeper, root, "router", doubling)
        assert await ensure_layout(zookeeper, root, DESIRED) == layout
        assert layout.roles["router"].n == n << doubled
    with pytest.raises(ConfigurationError, match="but 16 are configured"):
        await ensure_layout(zookeeper, root, {"router": RoleLayout(16, 16)})


async def test_a_role_with_groups_gets_those_configured_and_keeps_those_added(zookeeper: ZooKeeper, root: str) -> None:
    for wanted, found in ((2, 2), (3, 3), (1, 3)):
        layout = await ensure_layout(zookeeper, root, {"topic": RoleLayout(wanted, wanted, 1)})
        assert layout.roles == {"topic": RoleLayout(found, found, 1)}
    assert await mirror(zookeeper, root, "topic") == b"3"
    with pytest.raises(InvalidArgument, match="topic is never doubled"):
        await begin_doubling(zookeeper, root, "topic", "a" * 16)
