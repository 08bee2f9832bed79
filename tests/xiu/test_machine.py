"""A Xiu's state machine around its store: what goes on while another store takes its place."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.store.events import Committed
from pixiu.errors import DiskFull, StoreDamaged
from tests.support.waiting import until
from tests.xiu.parts import MemoryLog, MemoryStore, MemoryTable, mail, store
from xiu.core import Core, CoreSettings
from xiu.state.state import Head, State
from xiu.store.machine import Machine, settle
from xiu.store.repair import Row
from xiu.store.store import Store

WAIT_S = 60.0


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
    core = Core(CoreSettings(partition=0, max_record_bytes=1 << 20), log, machine.store, table)
    log.entries = [store(counter, mail(counter)) for counter in range(1, 1000)]

    def commit(up_to: int) -> None:
        core.step(Committed(machine.applied + 1, log.entries[machine.applied : up_to], 2), 0.0)

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
    other = Core(CoreSettings(partition=0, max_record_bytes=1 << 20), log, healthy, MemoryTable())
    other.step(Committed(1, log.entries, 2), 0.0)
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


async def with_entries(folder: Path, last: int) -> Machine:
    """An open machine whose state ends at an entry."""
    machine = await opened(folder)
    state = State(0, machine.store, machine.store.head)
    for counter in range(1, last + 1):
        machine.store.write([state.decide(store(counter, mail(counter)))])
    return machine


async def snapshot(folder: Path, last: int) -> Path:
    """A snapshot of a state that ends at an entry."""
    leader = await with_entries(folder / "leader", last)
    made = folder / "received"
    made.mkdir()
    assert await leader.snapshot(made) == last
    await leader.close()
    return made


@contextlib.contextmanager
def slow_opening(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """A store that is opened meanwhile sets the first event, and waits for the second."""
    begun, go_on = threading.Event(), threading.Event()
    real: Callable[[Store], object] = Store._open

    def slow(self: Store) -> object:
        begun.set()
        assert go_on.wait(WAIT_S)
        return real(self)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "_open", slow)
        try:
            yield begun, go_on
        finally:
            go_on.set()


async def test_the_old_store_is_read_until_a_snapshot_has_taken_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    received = await snapshot(tmp_path, 5)
    machine = await with_entries(tmp_path / "follower", 2)
    with slow_opening(monkeypatch) as (begun, go_on):
        loading = asyncio.create_task(machine.load(received))
        await until(begun.is_set)
        assert machine.applied == 2
        assert machine.store.readers() == {}
        assert machine.store.next_first(0) is not None
        go_on.set()
        while not loading.done():
            assert machine.store.readers() == {}
            await asyncio.sleep(0)
    await loading
    assert (machine.applied, machine.flushed) == (5, 5)
    assert [path.name for path in (tmp_path / "follower").iterdir()] == ["store.1"], "the old one is removed"
    await machine.flush()
    await machine.close()
    again = await opened(tmp_path / "follower")
    assert again.applied == 5
    assert [path.name for path in (tmp_path / "follower").iterdir()] == ["store"]
    await again.close()


async def test_a_snapshot_that_is_being_loaded_takes_its_place_before_a_process_that_ends_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received = await snapshot(tmp_path, 5)
    machine = await with_entries(tmp_path / "follower", 2)
    with slow_opening(monkeypatch) as (begun, go_on):
        loading = asyncio.create_task(machine.load(received))
        await until(begun.is_set)
        loading.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await loading
    assert machine.applied == 5
    await machine.close()
    again = await opened(tmp_path / "follower")
    assert again.applied == 5
    await again.close()


@pytest.mark.parametrize(("step", "left"), [("rename", 2), ("open", 5), ("adopt", 5), ("remove", 5)])
async def test_a_process_that_ends_while_a_snapshot_takes_its_place_leaves_one_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, left: int
) -> None:
    class Ended(Exception):
        """The process, before this step."""

    def end(*_: object, **__: object) -> None:
        raise Ended

    def end_in_it(given_up: Store) -> None:
        given_up.close()
        (given_up.folder / "CURRENT").unlink()
        end()

    received = await snapshot(tmp_path, 5)
    machine = await with_entries(tmp_path / "follower", 2)
    await machine.flush()
    with monkeypatch.context() as patch:
        match step:
            case "rename":
                patch.setattr("xiu.store.machine._rename", end)
            case "open" | "adopt":
                patch.setattr(Store, f"_{step}" if step == "open" else step, end)
            case "remove":
                patch.setattr("xiu.store.machine._remove", end_in_it)
        with pytest.raises(Ended):
            await machine.load(received)
    await machine.close()
    gc.collect()  # a store that was open when the process ended
    again = await opened(tmp_path / "follower")
    assert again.warning == ""
    assert again.applied == left
    assert [path.name for path in (tmp_path / "follower").iterdir()] == ["store"]
    await again.close()


async def test_what_is_left_of_a_store_that_was_given_up_is_not_taken_for_the_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = await with_entries(tmp_path, 1)

    def full(new: Store) -> bool:
        raise DiskFull("full")

    def ended(folder: Path, ignore_errors: bool = False) -> None:
        """The process ends while it removes this."""
        (folder / "CURRENT").unlink(missing_ok=True)

    with monkeypatch.context() as patch:
        patch.setattr("xiu.store.machine.shutil.rmtree", ended)
        with pytest.raises(DiskFull):
            await machine.rebuild(lambda _: nobody, full, lambda: None)
    await machine.flush()
    await machine.close()
    settle(tmp_path / "store")
    again = await opened(tmp_path)
    assert again.applied == 1
    await again.close()
