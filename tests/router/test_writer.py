"""The Router DB is written behind, in order, and what fails is said once."""

from __future__ import annotations

from pathlib import Path

from cluster.membership.map.lww_map import Key, LwwMap
from cluster.membership.map.updates import Update
from cluster.membership.replica.store import ReplicaStore
from cluster.membership.replica.store_writer import MAX_PENDING, StoreWriter
from pixiu.ids import gateway_msg_id
from tests.support.waiting import until

MIB = 1 << 20


def login(counter: int, room: int, uin: int = 7) -> Update:
    return Update(gateway_msg_id(3, 1, counter), room, uin, True)


def content(folder: Path) -> LwwMap:
    store = ReplicaStore("router", folder, 16 * MIB)
    membership = LwwMap()
    for chunk in store.load():
        membership.merge(chunk, 0.0)
    store.close()
    return membership


async def test_many_changes_share_a_transaction_and_all_are_there_after_closing(tmp_path: Path) -> None:
    failures: list[str] = []
    writer = StoreWriter("router", tmp_path, 16 * MIB, failures.append)
    assert await writer.open() is None
    writer.start()
    for i in range(500):
        writer.persist([login(i + 1, i)], [])
    writer.persist([], [Key(0, 7, 3)])
    await writer.close()
    assert writer.transactions < 50
    assert content(tmp_path).groups == 499
    assert failures == []


async def test_a_reopened_database_knows_that_it_was_kept_up_to_date(tmp_path: Path) -> None:
    for expected in (None, True):
        writer = StoreWriter("router", tmp_path, 16 * MIB, lambda _: None)
        age = await writer.open()
        assert age is None if expected is None else age is not None and age < 60
        writer.start()
        writer.persist([login(1, 1)], [])
        await writer.close()


async def test_a_rewrite_replaces_everything_and_what_comes_after_it_is_kept(tmp_path: Path) -> None:
    writer = StoreWriter("router", tmp_path, 16 * MIB, lambda _: None)
    await writer.open()
    writer.start()
    writer.persist([login(1, 1)], [])
    await until(lambda: writer.written == 1)
    membership = LwwMap()
    membership.apply([login(2, 2), login(3, 3), login(4, 4)._replace(login=False)], 0.0)
    writer.rewrite(membership.snapshot())
    writer.persist([login(5, 5)], [Key(3, 7, 3)])
    await writer.close()
    found = content(tmp_path)
    assert [room for room in range(6) if found.gateways(room)] == [2, 5]
    assert found.get(4, 7, 3) == (gateway_msg_id(3, 1, 4), False)


async def test_a_full_database_is_said_once_and_a_rewrite_that_fits_ends_it(tmp_path: Path) -> None:
    failures: list[str] = []
    writer = StoreWriter("router", tmp_path, MIB, failures.append)
    await writer.open()
    writer.start()
    writer.persist([login(i + 1, i) for i in range(60_000)], [])
    await until(lambda: failures)
    writer.persist([login(1, 1)], [])
    assert writer.pending == 0
    membership = LwwMap()
    membership.apply([login(2, 2)], 0.0)
    writer.rewrite(membership.snapshot())
    writer.persist([login(3, 3)], [])
    await writer.close()
    assert len(failures) == 1
    assert "raise router.store_mb" in failures[0]
    assert content(tmp_path).groups == 2


async def test_a_disk_that_is_too_slow_is_a_failure_and_not_a_growing_queue(tmp_path: Path) -> None:
    failures: list[str] = []
    writer = StoreWriter("router", tmp_path, 16 * MIB, failures.append)
    part = [login(1, 1)] * 1000
    for _ in range(MAX_PENDING // 1000 + 5):
        writer.persist(part, [])
    assert writer.pending == 0
    assert len(failures) == 1
    await writer.close()


async def test_a_database_that_could_not_be_opened_is_opened_by_the_rewrite(tmp_path: Path) -> None:
    failures: list[str] = []
    holder = ReplicaStore("router", tmp_path, MIB)
    writer = StoreWriter("router", tmp_path, MIB, failures.append)
    writer.start()
    writer.persist([login(1, 1)], [])
    await until(lambda: failures)
    holder.close()
    membership = LwwMap()
    membership.apply([login(2, 2)], 0.0)
    writer.rewrite(membership.snapshot())
    await until(lambda: writer.written == 1)
    await writer.close()
    assert content(tmp_path).gateways(2) == (3,)
