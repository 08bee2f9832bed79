"""The parts of a replica's shell: its folder, its applier."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from cluster.replication.applier import Applier
from cluster.replication.model import Entry, EntryKind, MemberID, PartitionState, Position
from cluster.replication.storage.folder import DataFolder
from cluster.replication.storage.log import SegmentedLog
from pixiu.errors import DiskFailed, DiskFull, StateDamaged, StorageError


class Machine:
    """A state in memory. `full`: it has no space."""

    def __init__(self, applied: int = 0) -> None:
        self.applied = self.flushed = applied
        self.full = False
        self.loaded: list[str] = []

    def look_ahead(self, entries: Sequence[Entry]) -> None:
        raise AssertionError

    def apply(self, entries: Sequence[Entry]) -> Sequence[object]:
        if self.full:
            raise DiskFull("no space")
        assert entries[0].counter == self.applied + 1
        self.applied = entries[-1].counter
        return [entry.payload for entry in entries]

    @property
    def clock_us(self) -> int:
        return 0

    async def snapshot(self, folder: Path) -> int:
        (folder / "state").write_text(str(self.applied))
        return self.applied

    async def check(self, folder: Path) -> None:
        int((folder / "state").read_text())

    async def load(self, folder: Path) -> None:
        self.loaded.append((folder / "state").read_text())
        self.applied = int(self.loaded[-1])


def entries(first: int, last: int) -> list[Entry]:
    return [Entry(1, counter, EntryKind.DATA, 0, b"%d" % counter) for counter in range(first, last + 1)]


def received(folder: DataFolder, position: Position) -> None:
    (folder.begin_incoming(10) / "state").write_text(str(position.counter))
    folder.accept_incoming(position)


# --- the folder


def test_a_folder_that_another_process_has_open_is_refused(tmp_path: Path) -> None:
    first, second = DataFolder(tmp_path, 1 << 20), DataFolder(tmp_path, 1 << 20)
    log = first.open(0)
    with pytest.raises(StorageError, match="another process"):
        second.open(0)
    log.close()
    first.close()
    second.open(0).close()


async def test_a_snapshot_whose_installation_broke_off_is_loaded_at_the_start(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path, 1 << 20)
    log = folder.open(0)
    received(folder, Position(3, 50))
    log.reset(Position(3, 50))
    machine = Machine(applied=10)
    await folder.finish_install(log, machine)
    assert (machine.loaded, machine.applied, log.unclean) == (["50"], 50, False)
    assert folder.received_position() is None
    assert not folder.received.exists()


async def test_a_snapshot_that_the_log_was_not_reset_to_is_thrown_away(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path, 1 << 20)
    log = folder.open(0)
    log.append(entries(1, 20))
    received(folder, Position(3, 50))
    machine = Machine(applied=10)
    await folder.finish_install(log, machine)
    assert (machine.loaded, machine.applied, log.last.counter, log.unclean) == ([], 10, 20, False)
    assert not folder.received.exists()


async def test_a_snapshot_without_its_manifest_is_not_whole(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path, 1 << 20)
    log = folder.open(0)
    received(folder, Position(3, 50))
    (tmp_path / "received.json").unlink()
    log.reset(Position(3, 50))
    machine = Machine()
    await folder.finish_install(log, machine)
    assert machine.loaded == []
    assert log.unclean


async def test_a_state_that_ends_before_the_log_begins_is_damage_and_the_log_is_set_aside(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path, 1 << 20)
    log = folder.open(0)
    log.reset(Position(2, 100))
    log.append([entry._replace(epoch=2) for entry in entries(101, 110)])
    log.sync()
    await folder.finish_install(log, Machine(applied=40))
    assert log.unclean
    assert log.damage is not None
    assert "the state ends at 40" in log.damage.reason
    assert log.last == Position(0, 0)
    assert list((tmp_path / "log").glob("*.damaged"))
    log.close()
    assert SegmentedLog(tmp_path / "log").unclean  # also after a power cut


def test_a_snapshot_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="does not fit"):
        DataFolder(tmp_path, 1 << 20).begin_incoming(1 << 60)


def test_promotions_by_force_are_written_down_one_after_the_other(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path, 1 << 20)
    for reason in ("first", "second"):
        folder.audit("ann", reason, MemberID(7), Position(3, 9), PartitionState(3, MemberID(8), 1, frozenset({MemberID(8)})))
    lines = [json.loads(line) for line in (tmp_path / "audit.log").read_text().splitlines()]
    assert [line["reason"] for line in lines] == ["first", "second"]
    assert lines[0]["in_sync_before"] == ["0000000000000008"]
    assert lines[0]["last"] == [3, 9]


# --- applying


class Applied:
    """An applier over a log with some entries, and what it told."""

    def __init__(self, folder: Path, count: int) -> None:
        self.log = SegmentedLog(folder)
        self.log.append(entries(1, count))
        self.machine = Machine()
        self.told: list[tuple[int, int, int]] = []
        self.failures: list[str] = []
        self.crashes: list[BaseException] = []
        self.applier = Applier(
            self.machine,
            lambda first, answers, copies: self.told.append((first, len(answers), copies)),
            self.failures.append,
            self.crashes.append,
        )
        self.applier.start(self.log)


async def test_a_long_way_is_applied_in_batches_with_turns_of_the_loop_between(tmp_path: Path) -> None:
    it = Applied(tmp_path, 10_000)
    it.applier.commit(9_000, 2)
    it.applier.run()
    assert it.told == [(1, 4096, 2)]
    it.applier.run()  # the next batch waits for its turn
    assert it.machine.applied == 4096
    while it.applier.behind:
        await asyncio.sleep(0)
    assert it.told == [(1, 4096, 2), (4097, 4096, 2), (8193, 808, 2)]


async def test_a_full_disk_stops_applying_until_there_is_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.replication.applier.RETRY_S", 0.01)
    it = Applied(tmp_path, 10)
    it.machine.full = True
    it.applier.commit(10, 1)
    it.applier.run()
    assert (str(it.applier.blocked), it.told) == ("no space", [])
    it.machine.full = False
    async with asyncio.timeout(30):
        while it.applier.behind:
            await asyncio.sleep(0.01)
    assert (it.applier.blocked, it.told) == (None, [(1, 10, 1)])


class Standing(Machine):
    """A state that goes back to 5 when it meets entry 8, until entry 9,000 was looked at."""

    goes_on = False

    def apply(self, entries: Sequence[Entry]) -> Sequence[object]:
        if not self.goes_on and entries[-1].counter >= 8:
            if entries[0].counter == 8:
                raise StateDamaged("entry 8")
            self.applied = 5
            entries = entries[: 7 - self.applied] if entries[0].counter == 6 else []
            if not entries:
                raise StateDamaged("entry 8")
        return super().apply(entries)

    def look_ahead(self, entries: Sequence[Entry]) -> None:
        self.goes_on = self.goes_on or any(entry.counter == 9000 for entry in entries)


async def test_a_state_that_stands_before_a_broken_value_is_asked_again_and_every_answer_is_given_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.replication.applier.RETRY_S", 0.01)
    it = Applied(tmp_path, 9_000)
    it.machine = it.applier._machine = Standing()
    for committed in (7, 8_999):
        it.applier.commit(committed, 1)
        it.applier.run()
    async with asyncio.timeout(30):
        while it.applier._looked < 8_999:
            await asyncio.sleep(0)
        while it.applier.blocked is None:
            await asyncio.sleep(0)
    assert (str(it.applier.blocked), it.machine.applied, it.told) == ("entry 8", 7, [(1, 7, 1)])
    it.applier.commit(9_000, 1)
    async with asyncio.timeout(30):
        while it.applier.behind:
            await asyncio.sleep(0.01)
    assert it.told[:2] == [(1, 7, 1), (8, 4096, 1)]
    assert (it.failures, it.crashes) == ([], [])


async def test_a_state_machine_that_fails_ends_the_process(tmp_path: Path) -> None:
    it = Applied(tmp_path, 10)
    it.machine.applied = 3
    it.machine.apply = lambda _entries: 1 // 0  # type: ignore[method-assign, assignment, return-value]
    it.applier.commit(10, 1)
    it.applier.run()
    assert isinstance(it.crashes[0], ZeroDivisionError)
    it.applier.run()
    assert len(it.crashes) == 1


async def test_nothing_is_applied_while_a_snapshot_is_loaded(tmp_path: Path) -> None:
    it = Applied(tmp_path / "log", 10)
    folder = DataFolder(tmp_path / "replica", 1 << 20)
    folder.path.mkdir()
    received(folder, Position(1, 5))
    it.applier.install(Position(1, 5), folder)
    it.applier.commit(10, 1)
    it.applier.run()
    assert it.told == []
    async with asyncio.timeout(30):
        while it.applier.behind:
            await asyncio.sleep(0.01)
    assert (it.machine.loaded, it.told) == (["5"], [(6, 5, 1)])
    assert not it.applier.installing
    assert not folder.received.exists()


async def test_who_waits_for_a_snapshot_to_be_loaded_is_called_then_and_before_anything_is_applied(tmp_path: Path) -> None:
    it = Applied(tmp_path / "log", 10)
    seen: list[tuple[int, int]] = []
    it.applier.when_loaded(lambda: seen.append((it.machine.applied, len(it.told))))
    assert seen == [(0, 0)]
    folder = DataFolder(tmp_path / "replica", 1 << 20)
    folder.path.mkdir()
    received(folder, Position(1, 5))
    it.applier.install(Position(1, 5), folder)
    it.applier.commit(10, 1)
    it.applier.when_loaded(lambda: seen.append((it.machine.applied, len(it.told))))
    assert len(seen) == 1
    async with asyncio.timeout(30):
        while it.applier.behind:
            await asyncio.sleep(0.01)
    assert seen == [(0, 0), (5, 0)]


async def test_a_disk_that_fails_under_the_state_is_told(tmp_path: Path) -> None:
    it = Applied(tmp_path, 10)

    def broken(_entries: Sequence[Entry]) -> Sequence[object]:
        raise DiskFailed("gone")

    it.machine.apply = broken  # type: ignore[method-assign, assignment]
    it.applier.commit(10, 1)
    it.applier.run()
    assert (it.failures, it.told) == (["gone"], [])
