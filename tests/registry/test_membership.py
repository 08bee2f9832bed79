"""Registration: the node, its state, and how it outlives sessions."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from onebox.embedded import EmbeddedZooKeeper
from pixiu.discovery import paths
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.operations import NoNode
from pixiu.discovery.paths import partition_directory
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.errors import ConfigurationError, InvalidArgument, RegistryUnavailable, Unavailable
from registry.leases import InstanceLease
from registry.membership import Membership
from tests.support.waiting import until
from tests.support.zookeeper import connected, expire, make_node


async def names(zookeeper: ZooKeeper, root: str, role: str = "router", partition: int = 0) -> list[str]:
    return [name for name in await zookeeper.children(paths.node_directory(root, role, partition)) if name.startswith("n")]


async def test_a_process_is_an_ephemeral_sequential_node_below_its_role_or_partition(zookeeper: ZooKeeper, root: str) -> None:
    router, proxy = Membership(zookeeper, root), Membership(zookeeper, root)
    node = await router.register(make_node("router", 2, port=7000))
    path = f"{root}/router/partition2/n{node.replica:010}"
    data, stat = await zookeeper.get(path)
    assert Node.from_json(data, replica=node.replica) == node == router.node
    assert stat.ephemeral_owner == zookeeper.session_id
    assert node.incarnation != 0
    other = await proxy.register(make_node("proxy", port=7100))
    assert await zookeeper.exists(f"{root}/proxy/n{other.replica:010}") is not None
    for member in (router, proxy):
        assert await member.unregister()
        assert member.node is None
    assert await zookeeper.exists(path) is None


async def test_replica_ids_grow_and_incarnations_differ(zookeeper: ZooKeeper, root: str) -> None:
    members = [Membership(zookeeper, root) for _ in range(3)]
    nodes = [await member.register(make_node(port=7000 + 10 * number)) for number, member in enumerate(members)]
    assert [node.replica for node in nodes] == sorted({node.replica for node in nodes})
    assert len({node.incarnation for node in nodes}) == 3
    for member in members:
        await member.unregister()


async def test_states_and_other_data_are_written(zookeeper: ZooKeeper, root: str) -> None:
    member = Membership(zookeeper, root)
    with pytest.raises(InvalidArgument):
        await member.set_state(NodeState.RUNNING)
    node = await member.register(make_node("gateway"))
    path = f"{root}/gateway/n{node.replica:010}"
    assert await member.set_state(NodeState.RUNNING)
    assert json.loads((await zookeeper.get(path))[0])["state"] == "Running"
    assert await member.update(replace(node, instance=7, generation=3, replica=99, incarnation=1))
    assert member.node == replace(node, instance=7, generation=3)
    assert json.loads((await zookeeper.get(path))[0])["instance"] == 7
    for wrong in (make_node("gateway"), replace(node, role="proxy")):
        with pytest.raises(InvalidArgument):
            await member.update(wrong)
    with pytest.raises(InvalidArgument):
        await member.register(node)
    await member.unregister()
    assert await member.unregister()


async def test_after_the_loss_of_a_session_a_process_registers_by_itself_with_a_new_incarnation(
    zookeeper: ZooKeeper, root: str
) -> None:
    again: list[Node] = []
    member = Membership(zookeeper, root, on_registered=again.append)
    first = await member.register(make_node())
    await member.set_state(NodeState.RUNNING)
    for times in range(1, 3):
        await expire(zookeeper)
        await until(lambda times=times: len(again) == times)  # type: ignore[misc]
    assert member.node == again[-1]
    assert again[-1].endpoint == first.endpoint
    assert again[-1].state is NodeState.RUNNING
    assert len({first.incarnation, *(node.incarnation for node in again)}) == 3
    assert len({first.replica, *(node.replica for node in again)}) == 3
    assert await names(zookeeper, root) == [f"n{again[-1].replica:010}"]
    await member.unregister()
    assert await names(zookeeper, root) == []


async def test_what_is_registered_again_is_made_anew_first_and_what_fails_there_is_tried_again(
    zookeeper: ZooKeeper, root: str
) -> None:
    again: list[Node] = []
    tries: list[int] = []

    async def renew(node: Node) -> Node:
        tries.append(node.member_incarnation)
        if len(tries) == 1:
            raise OSError("the disk is busy")
        return replace(node, member_incarnation=node.member_incarnation + 1)

    member = Membership(zookeeper, root, on_registered=again.append)
    await member.register(make_node(member=5, member_incarnation=7))
    member.before_registering_again(renew)
    await expire(zookeeper)
    await until(lambda: again)
    assert tries == [7, 7]
    assert (again[0].member, again[0].member_incarnation) == (5, 8)
    directory = partition_directory(root, "router", 0)
    (name,) = await names(zookeeper, root)
    assert Node.from_json((await zookeeper.get(f"{directory}/{name}"))[0]).member_incarnation == 8
    await member.unregister()


async def test_a_node_that_an_earlier_session_left_is_replaced(
    zookeeper: ZooKeeper, zookeeper_server: EmbeddedZooKeeper, root: str
) -> None:
    theirs = await connected(zookeeper_server)
    node = make_node()
    stranger = await Membership(theirs, root).register(make_node(port=7100))
    prefix = paths.node_prefix(root, "router", 0)
    left = await theirs.create(prefix, node.to_json(), ephemeral=True, sequence=True)
    member = Membership(zookeeper, root)
    now = await member.register(node)
    assert left != f"{prefix}{now.replica:010}"
    assert await names(zookeeper, root) == [f"n{stranger.replica:010}", f"n{now.replica:010}"]
    await member.unregister()
    await theirs.close()


async def test_a_node_that_somebody_deleted_is_made_again(zookeeper: ZooKeeper, root: str) -> None:
    again: list[Node] = []
    member = Membership(zookeeper, root, on_registered=again.append)
    first = await member.register(make_node())
    await zookeeper.delete(f"{root}/router/partition0/n{first.replica:010}")
    await until(lambda: again)
    assert await names(zookeeper, root) == [f"n{again[0].replica:010}"]
    await member.unregister()


async def test_what_is_unregistered_stays_so_when_the_session_ends(zookeeper: ZooKeeper, root: str) -> None:
    member = Membership(zookeeper, root)
    await member.register(make_node())
    await member.unregister()
    before = zookeeper.session_id
    await expire(zookeeper)
    await until(lambda: zookeeper.connected and zookeeper.session_id != before)
    assert await names(zookeeper, root) == []
    assert member.registrations == 1


async def test_without_zookeeper_registering_fails_clearly_and_unregistering_does_not(
    own_server: EmbeddedZooKeeper, root: str
) -> None:
    session = await connected(own_server)
    member, late = Membership(session, root), Membership(session, root)
    await member.register(make_node())
    own_server.kill()
    await until(lambda: not session.connected)
    with pytest.raises(RegistryUnavailable, match=own_server.address):
        await late.register(make_node())
    assert await member.unregister() is False
    await session.close()


async def test_a_process_with_other_cluster_settings_is_refused_and_both_are_named(zookeeper: ZooKeeper, root: str) -> None:
    there, here = Membership(zookeeper, root), Membership(zookeeper, root)
    await there.register(make_node("broker", 1, port=7000, wire_hash="aaaa"))
    with pytest.raises(ConfigurationError) as caught:
        await here.register(make_node("gateway", port=7100, wire_hash="bbbb"))
    for part in ("aaaa", "bbbb", "broker", "127.0.0.1:7000", "gateway", root):
        assert part in str(caught.value)
    assert here.node is None
    with pytest.raises(NoNode):
        await names(zookeeper, root, "gateway", -1)
    agreeing = Membership(zookeeper, root)
    await agreeing.register(make_node("gateway", port=7100, wire_hash="aaaa"))
    for member in (there, agreeing):
        await member.unregister()
    await here.register(make_node("gateway", port=7100, wire_hash="bbbb"))
    await here.unregister()


async def test_a_process_whose_protocol_versions_nobody_speaks_is_refused(zookeeper: ZooKeeper, root: str) -> None:
    there, here = Membership(zookeeper, root), Membership(zookeeper, root)
    await there.register(make_node("broker", 1, port=7000))
    with pytest.raises(ConfigurationError, match=r"versions 2 to 3, and broker at 127\.0\.0\.1:7000 speaks 1 to 1: upgrade"):
        await here.register(make_node("gateway", port=7100, protocol_min=2, protocol_max=3))
    await here.register(make_node("gateway", port=7100, protocol_max=2))
    for member in (there, here):
        await member.unregister()


async def test_the_earlier_run_at_the_same_address_is_no_reason_to_refuse(zookeeper: ZooKeeper, root: str) -> None:
    before, after = Membership(zookeeper, root), Membership(zookeeper, root)
    await before.register(make_node(wire_hash="aaaa"))
    await after.register(make_node(wire_hash="bbbb"))
    for member in (before, after):
        await member.unregister()


async def test_of_processes_that_start_at_once_with_different_settings_those_of_one_kind_stay(
    zookeeper: ZooKeeper, root: str
) -> None:
    members = [Membership(zookeeper, root) for _ in range(8)]
    nodes = [make_node("proxy", port=7000 + 10 * number, wire_hash="ab"[number % 2]) for number in range(8)]
    results = await asyncio.gather(
        *(member.register(node) for member, node in zip(members, nodes, strict=True)), return_exceptions=True
    )
    registered = [result for result in results if isinstance(result, Node)]
    assert len({node.wire_hash for node in registered}) == 1
    assert all(isinstance(result, Node | ConfigurationError) for result in results)
    assert len(await names(zookeeper, root, "proxy", -1)) == len(registered)
    for member in members:
        await member.unregister()


async def test_registering_can_wait_for_an_earlier_run_of_the_cluster_to_go(zookeeper: ZooKeeper, root: str) -> None:
    before, after = Membership(zookeeper, root), Membership(zookeeper, root, conflict_wait_s=30.0)
    await before.register(make_node(port=7000, wire_hash="aaaa"))
    registering = asyncio.create_task(after.register(make_node(port=7100, wire_hash="bbbb")))
    await asyncio.sleep(0.05)
    assert not registering.done()
    await before.unregister()
    await registering
    await after.unregister()


async def test_an_instance_that_is_not_leased_is_not_registered(zookeeper: ZooKeeper, root: str) -> None:
    node = make_node("gateway", instance=5, generation=1)
    member = Membership(zookeeper, root)
    with pytest.raises(Unavailable, match="instance 5 is not leased to anybody"):
        await member.register(node)
    other = InstanceLease(zookeeper, root, "another")
    held = await other.acquire()
    node = replace(node, instance=held.instance, generation=held.generation)
    with pytest.raises(Unavailable, match=f"is not leased to {node.endpoint:016x} but to another in generation 1"):
        await member.register(node)
    await other.release()
    with pytest.raises(Unavailable, match="is not leased to anybody"):
        await member.register(node)
    assert await zookeeper.children(f"{root}/gateway") == []
    own = InstanceLease(zookeeper, root, f"{node.endpoint:016x}")
    leased = await own.acquire()
    node = replace(node, instance=leased.instance, generation=leased.generation)
    with pytest.raises(Unavailable, match="in generation 9 is not leased"):
        await member.register(replace(node, generation=9))
    assert (await member.register(node)).instance == leased.instance
    await member.unregister()
    await own.release()
