"""A Xiu's state machine around its store: what goes on while another store takes its place."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pixiu.errors import DiskFull, StoreDamaged
from tests.xiu.parts import MemoryLog, MemoryStore, MemoryTable, mail, store
from xiu.core import Core, Settings
from xiu.events import EntriesCommitted
from xiu.machine import Machine
from xiu.repair import Row
from xiu.state import Head, State
from xiu.store import Store


def nobody(begin: bytes) -> Iterator[Row]:
    """Another replica that has nothing to give."""
    return iter(())


async def opened(folder: Path) -> Machine:
    machine = Machine(folder / "store", 1 << 20, 1 << 20, lambda _: "", lambda: None)
    await machine.open()
    return machine


async def test_the_disk_is_watched_and_writes_go_on_when_a_store_that_was_built_anew_took_the_old_ones_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[tuple[Path, bool]] = []
    remove = shutil.rmtree

    def noted(folder: Path, ignore_errors: bool = False) -> None:
        if folder.exists():
            removed.append((folder, threading.current_thread() is threading.main_thread()))
        remove(folder, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", noted)
    machine = await opened(tmp_path)
    state = State(0, machine.store, machine.store.head)
    for counter in (1, 2):
        machine.store.write([state.decide(store(counter, mail(counter)))])
    adopted = asyncio.Event()
    assert await machine.rebuild(lambda _: nobody, lambda _: True, adopted.set) == 0
    assert adopted.is_set()
    assert removed == [(tmp_path / "store", False)], "the old store, and not by the event loop"
    assert machine.free_bytes() > 0
    assert (machine.applied, machine.flushed) == (2, 2)
    machine.store.write([state.decide(store(3, mail(3)))])
    await machine.flush()
    await machine.close()
    again = await opened(tmp_path)
    assert again.applied == 3
    await again.close()


async def test_damage_is_found_when_a_snapshot_is_made_and_is_repaired_first_where_it_can_be(tmp_path: Path) -> None:
    told: list[str] = []
    can_repair = True

    def damaged(text: str) -> bool:
        told.append(text)
        return can_repair

    machine = Machine(tmp_path / "store", 1 << 20, 1 << 20, lambda _: "", lambda: None, damaged)
    await machine.open()
    state = State(0, machine.store, machine.store.head)
    machine.store.write([state.decide(store(1, mail(1)))])
    (tmp_path / "one").mkdir()
    assert await machine.snapshot(tmp_path / "one") == 1
    await machine.check(tmp_path / "one")
    assert told == []
    decision = state.decide(store(2, mail(2)))
    key, value = decision.puts[-1]
    decision.puts[-1] = key, value[:-1] + bytes([value[-1] ^ 1])
    machine.store.write([decision])
    (tmp_path / "two").mkdir()
    with pytest.raises(StoreDamaged, match="1 damaged place"):
        await machine.snapshot(tmp_path / "two")
    assert len(told) == 1
    can_repair = False  # the only replica: a second copy of all the rest is worth more
    (tmp_path / "three").mkdir()
    assert await machine.snapshot(tmp_path / "three") == 2
    assert len(told) == 2
    (tmp_path / "nothing").mkdir()
    with pytest.raises(StoreDamaged):
        await machine.check(tmp_path / "nothing")
    await machine.close()


async def test_a_new_store_is_brought_forward_turn_by_turn_while_the_old_one_goes_on(tmp_path: Path) -> None:
    machine = await opened(tmp_path)
    log, table = MemoryLog(), MemoryTable()
    core = Core(Settings(partition=0, max_record_bytes=1 << 20), log, machine.store, table)
    log.entries = [store(counter, mail(counter)) for counter in range(1, 1000)]

    def commit(up_to: int) -> None:
        core.step(EntriesCommitted(log.entries[machine.applied : up_to], 2), 0.0)

    commit(100)
    positions: list[int] = []

    def catch_up(new: Store) -> bool:
        positions.append(new.head.applied.counter)
        if machine.applied < len(log.entries):
            commit(min(100 + 400 * len(positions), len(log.entries)))
        return core.catch_up(new)

    await machine.rebuild(lambda _: nobody, catch_up, lambda: core.rewound(0.0))
    assert positions[0] == 100
    assert len(positions) > 2
    assert positions == sorted(positions)
    assert machine.applied == core.committed
    if machine.applied < len(log.entries):
        commit(len(log.entries))
    assert machine.applied == len(log.entries)
    healthy = MemoryStore(Head())
    other = Core(Settings(partition=0, max_record_bytes=1 << 20), log, healthy, MemoryTable())
    other.step(EntriesCommitted(log.entries, 2), 0.0)
    cursor = machine.store.cursor()
    row, rows = cursor.seek(b""), {}
    while row is not None:
        rows[row[0]] = row[1]
        row = cursor.next()
    assert rows == healthy.rows
    await machine.close()


async def test_a_new_store_that_cannot_be_brought_forward_is_forgotten(tmp_path: Path) -> None:
    machine = await opened(tmp_path)
    state = State(0, machine.store, machine.store.head)
    machine.store.write([state.decide(store(1, mail(1)))])

    def full(new: Store) -> bool:
        raise DiskFull("full")

    with pytest.raises(DiskFull):
        await machine.rebuild(lambda _: nobody, full, lambda: None)
    machine.store.write([state.decide(store(2, mail(2)))])
    await machine.close()
    again = await opened(tmp_path)
    assert again.applied == 2, "the old store, which went on"
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    await again.close()
