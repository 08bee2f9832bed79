"""Gateway instances: one holder each, and a generation that grows with every start (docs/identifiers.md)."""

from __future__ import annotations

import asyncio

import pytest

from onebox.embedded import EmbeddedZooKeeper
from pixiu.discovery import paths
from pixiu.discovery.operations import Create, Delete, Operation
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.errors import InvalidArgument, Overloaded
from pixiu.ids import LAST_GENERATION
from registry.leases import Instance, InstanceLease
from tests.support.waiting import until
from tests.support.zookeeper import connected, expire


async def generation(zookeeper: ZooKeeper, root: str, number: int, value: int) -> None:
    await zookeeper.create(paths.instance(root, number), b'{"generation":%d}' % value, make_parents=True)


async def test_an_instance_is_held_by_an_ephemeral_node_and_its_generation_stays(zookeeper: ZooKeeper, root: str) -> None:
    lease = InstanceLease(zookeeper, root, "gateway-1")
    held = await lease.acquire()
    assert held == lease.held == Instance(held.instance, 1)
    data, stat = await zookeeper.get(paths.instance_holder(root, held.instance))
    assert data == b"gateway-1"
    assert stat.ephemeral_owner == zookeeper.session_id
    with pytest.raises(InvalidArgument):
        await lease.acquire()
    assert await lease.release()
    assert lease.held is None
    assert (await zookeeper.get(paths.instance(root, held.instance)))[0] == b'{"generation":1}'
    assert await zookeeper.exists(paths.instance_holder(root, held.instance)) is None
    assert await lease.release()


async def test_an_instance_that_was_never_used_comes_before_one_that_was(zookeeper: ZooKeeper, root: str) -> None:
    taken = []
    for start in range(6):
        lease = InstanceLease(zookeeper, root, f"g{start}", instances=3)
        taken.append(await lease.acquire())
        await lease.release()
    assert sorted(taken) == sorted((number, generation) for number in range(3) for generation in (1, 2))
    assert {one.instance for one in taken[:3]} == {0, 1, 2}


async def test_the_free_instance_with_the_lowest_generation_is_taken_and_retired_ones_never(
    zookeeper: ZooKeeper, root: str
) -> None:
    for number, value in enumerate([7, LAST_GENERATION, 3, 5, LAST_GENERATION - 1]):
        await generation(zookeeper, root, number, value)
    leases = [InstanceLease(zookeeper, root, f"g{number}", instances=5) for number in range(5)]
    taken = [await lease.acquire() for lease in leases[:4]]
    assert taken == [(2, 4), (3, 6), (0, 8), (4, LAST_GENERATION)]
    with pytest.raises(Overloaded, match="retired"):
        await leases[4].acquire()
    await leases[3].release()
    with pytest.raises(Overloaded):
        await leases[4].acquire()
    for lease in leases:
        await lease.release()


async def test_under_contention_every_instance_has_one_holder(zookeeper_server: EmbeddedZooKeeper, root: str) -> None:
    sessions = [await connected(zookeeper_server) for _ in range(3)]
    leases = [InstanceLease(session, root, f"g{number}", instances=12) for session in sessions for number in range(4)]
    for round_number in range(1, 3):
        taken = await asyncio.gather(*(lease.acquire() for lease in leases))
        assert sorted(taken) == [(number, round_number) for number in range(12)]
        for lease in leases:
            await lease.release()
    for session in sessions:
        await session.close()


async def test_after_the_loss_of_a_session_the_same_instance_is_held_in_the_same_generation(
    zookeeper: ZooKeeper, root: str
) -> None:
    lost: list[Instance] = []
    lease = InstanceLease(zookeeper, root, "g", on_lost=lost.append)
    held = await lease.acquire()
    owner = zookeeper.session_id
    await expire(zookeeper)
    await until(lambda: zookeeper.connected and zookeeper.session_id != owner)
    path = paths.instance_holder(root, held.instance)

    async with asyncio.timeout(30):
        while (stat := await zookeeper.exists(path)) is None or stat.ephemeral_owner != zookeeper.session_id:
            await asyncio.sleep(0.01)
    assert lease.held == held
    assert (await zookeeper.get(paths.instance(root, held.instance)))[0] == b'{"generation":1}'
    assert lost == []
    await lease.release()


async def test_a_holders_node_that_somebody_deleted_is_made_again(zookeeper: ZooKeeper, root: str) -> None:
    lease = InstanceLease(zookeeper, root, "g")
    held = await lease.acquire()
    path = paths.instance_holder(root, held.instance)
    await asyncio.sleep(0.1)  # so that the watch of the holder is there; without it the session's end would do the same
    await zookeeper.delete(path)
    async with asyncio.timeout(30):
        while await zookeeper.exists(path) is None:
            await asyncio.sleep(0.01)
    assert lease.held == held
    await lease.release()


@pytest.mark.parametrize("how", ["another holds it", "its generation grew"])
async def test_an_instance_that_another_took_meanwhile_is_lost_and_told(
    how: str, zookeeper: ZooKeeper, zookeeper_server: EmbeddedZooKeeper, root: str
) -> None:
    lost: list[Instance] = []
    lease = InstanceLease(zookeeper, root, "g", on_lost=lost.append)
    held = await lease.acquire()
    other = await connected(zookeeper_server)
    path = paths.instance_holder(root, held.instance)
    # As if the session had ended and another gateway had started before this one was connected again.
    if how == "another holds it":
        await other.transaction(_takeover(path))
    else:
        await other.set(paths.instance(root, held.instance), b'{"generation":2}')
        await expire(zookeeper)
    await until(lambda: lost)
    assert lost == [held]
    assert lease.held is None
    again = await lease.acquire()
    assert again.instance != held.instance
    await lease.release()
    await other.close()


def _takeover(path: str) -> list[Operation]:
    return [Delete(path), Create(path, b"other", ephemeral=True)]
