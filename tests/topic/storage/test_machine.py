"""The state machine over real files: flushes in a thread, snapshots while entries are applied, and loads that are interrupted."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cluster.replication.model import Entry
from cluster.topics import entries as en
from pixiu.errors import StateDamaged
from pixiu.objects.manifest import StoredObject
from tests.topic.builders import CHANNEL, PART, TOPIC, written
from topic.mending import follows
from topic.storage import folder as folders
from topic.storage.machine import GAPS, Machine
from topic.storage.segment import Gap, Stored
from topic.storage.store import Flush, Gone


class Driven:
    """A machine with entries applied one by one."""

    def __init__(self, folder: Path) -> None:
        self.machine = Machine(folder / "state", 1 << 20, 60.0, self._failed)
        self.aside = self.machine.open()
        self.position = 1 + self._written()

    def _failed(self, error: Exception) -> None:
        raise error

    def _written(self) -> int:
        part = self.machine.state.parts.get(PART)
        return part.writers[5].position if part and 5 in part.writers else 0

    def apply(self, kind: int, payload: bytes) -> object:
        return self.machine.apply([Entry(1, self.machine.applied + 1, kind, 1000, payload)])[0]

    def make(self) -> None:
        self.apply(en.TOPIC, en.TopicSettings(TOPIC, "orders").encode())
        self.apply(en.OPEN, en.Opening(PART, 0, 65_536).encode())
        self.apply(en.CHANNEL, en.ChannelSettings(CHANNEL, TOPIC, "c").encode())

    def write(self, blocks: int, size: int = 1000) -> None:
        for _ in range(blocks):
            block = written(1, 2, first=self.position, body=b"x" * size)
            self.apply(en.BLOCK, en.encode_block(42, block))
            self.position += 2

    def content(self) -> tuple[Any, ...]:
        """Everything that a reader could see."""
        machine, at, found = self.machine, 0, list[Any]()
        log = machine.store.logs.get(PART)
        while log is not None and at < log.end:
            for each in log.read(at, 1 << 20):
                found.append(each if isinstance(each, Gap) else (each.stamp, each.data))
                at = each.stamp.base + each.block.count if isinstance(each, Stored) else each.high
        acks = machine.state.progress[CHANNEL, PART].acks if (CHANNEL, PART) in machine.state.progress else None
        return machine.applied, found, acks and (acks.floor, acks.chunks)


@pytest.fixture
async def source(tmp_path: Path) -> AsyncIterator[Driven]:
    """A machine with 40 blocks, 30 of them flushed."""
    driven = Driven(tmp_path / "source")
    driven.make()
    driven.write(30)
    await driven.machine.flush()
    driven.apply(en.SETTLE, en.Settlement(CHANNEL, PART, [(0, 7), (9, 11)]).encode())
    driven.write(10)
    yield driven
    await driven.machine.close()


def fresh(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


async def test_a_closed_machine_is_opened_as_it_was(source: Driven, tmp_path: Path) -> None:
    before = source.content()
    await source.machine.close()
    again = Driven(tmp_path / "source")
    assert again.content() == before
    assert again.machine.flushed == again.machine.applied
    await again.machine.close()


async def test_a_snapshot_is_of_one_moment_while_entries_go_on(source: Driven, tmp_path: Path) -> None:
    before, snapshot = source.content(), fresh(tmp_path / "snapshot")
    assert await source.machine.snapshot(snapshot) == before[0]
    source.write(5)
    await source.machine.flush()
    assert len(source.machine.store.logs[PART].segments) == 2
    await source.machine.check(snapshot)
    copy = Driven(tmp_path / "copy")
    await copy.machine.load(snapshot)
    assert copy.content() == before
    assert not copy.aside
    copy.position = source.position - 10
    copy.write(5)
    await copy.machine.flush()
    assert copy.content()[1] == source.content()[1]
    await copy.machine.close()


async def test_a_snapshot_leaves_out_what_the_object_store_has(
    source: Driven, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is claimed after the moment of the snapshot is in it: its table does not know of it."""
    await source.machine.snapshot(fresh(tmp_path / "first"))
    source.write(5)
    await source.machine.snapshot(fresh(tmp_path / "second"))
    source.write(5)
    claim = en.encode_objects(PART, [StoredObject(0, 80, 1, 0, 1, 1, 1, "memory://s")])
    flush = source.machine.store.finish

    def finish(done: Flush) -> Gone:
        if done.stored == {PART: 0}:  # while the first flush was written
            source.apply(en.UPLOADED, claim)
        return flush(done)

    monkeypatch.setattr(source.machine.store, "finish", finish)
    early, late = fresh(tmp_path / "early"), fresh(tmp_path / "late")
    await source.machine.snapshot(early)
    await source.machine.snapshot(late)
    names = [sorted(path.name for path in folder.rglob("*.seg")) for folder in (early, late)]
    assert names == [[f"{base:015d}.seg" for base in (0, 80, 90)], [f"{base:015d}.seg" for base in (80, 90)]]
    for number, snapshot in enumerate((early, late)):
        await source.machine.check(snapshot)
        copy = Driven(tmp_path / f"copy{number}")
        await copy.machine.load(snapshot)
        assert copy.machine.store.logs[PART].gaps == []
        assert copy.machine.state.parts[PART].stored == (0, 80)[number]
        await copy.machine.close()


async def test_a_load_is_repeated_wherever_it_was_interrupted(
    source: Driven, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, snapshot = source.content(), fresh(tmp_path / "snapshot")
    position = await source.machine.snapshot(snapshot)
    rename, left = Path.rename, 0

    def failing(path: Path, target: Path) -> Path:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return rename(path, target)

    for interrupted_at in range(1, 5):
        folder, received = tmp_path / f"copy{interrupted_at}", tmp_path / f"received{interrupted_at}"
        shutil.copytree(snapshot, received)
        old = Driven(folder)
        old.make()
        await old.machine.close()
        left = interrupted_at
        monkeypatch.setattr(Path, "rename", failing)
        with pytest.raises(KeyboardInterrupt):
            folders.move_in(received, folder / "state")
        monkeypatch.setattr(Path, "rename", rename)
        after = Driven(folder)
        if after.machine.applied < position:
            await after.machine.load(received)
        assert after.content() == before
        assert sorted(path.name for path in folder.iterdir()) == ["state"]
        await after.machine.close()


@pytest.mark.parametrize("what", ["segment", "table"])
async def test_a_damaged_snapshot_is_not_taken(source: Driven, tmp_path: Path, what: str) -> None:
    snapshot = fresh(tmp_path / "snapshot")
    await source.machine.snapshot(snapshot)
    if what == "segment":
        (path,) = (snapshot / "parts").rglob("*.seg")
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
    else:
        path = snapshot / "table/data.mdb"
        data = bytearray(path.read_bytes())
        place = data.index(b'"orders"')
        data[place + 2] ^= 1
    path.unlink()  # it may be a link
    path.write_bytes(data)
    with pytest.raises(StateDamaged, match=r"of the snapshot are missing or damaged|cannot be read"):
        await source.machine.check(snapshot)


async def test_gaps_that_the_sender_knows_are_no_damage_of_the_snapshot(source: Driven, tmp_path: Path) -> None:
    await source.machine.close()
    (path,) = (tmp_path / "source").rglob("*.seg")
    data = bytearray(path.read_bytes())
    path.write_bytes(data[:-10])
    damaged = Driven(tmp_path / "source")
    (gap,) = damaged.machine.store.logs[PART].gaps
    snapshot = fresh(tmp_path / "snapshot")
    await damaged.machine.snapshot(snapshot)
    assert (snapshot / GAPS).read_text() == f"{PART} {gap.low} {gap.high}\n"
    await damaged.machine.check(snapshot)
    await damaged.machine.close()


async def test_a_table_that_cannot_be_read_is_set_aside(source: Driven, tmp_path: Path) -> None:
    await source.machine.close()
    path = tmp_path / "source/state/table/data.mdb"
    path.write_bytes(path.read_bytes().replace(b'"orders"', b'"orderz"'))
    again = Driven(tmp_path / "source")
    assert again.aside
    assert again.machine.applied == 0
    assert (tmp_path / "source/state.damaged/table/data.mdb").exists()
    again.machine.mark_damaged("a test")
    await again.machine.close()
    last = Driven(tmp_path / "source")
    assert last.aside
    await last.machine.close()


async def whole_and_broken(source: Driven, tmp_path: Path) -> tuple[Driven, list[Path]]:
    """A copy of a machine with three segments, closed; and these files of the first one."""
    source.write(70, 4000)
    await source.machine.snapshot(fresh(tmp_path / "one"))
    source.write(70, 4000)
    await source.machine.snapshot(fresh(tmp_path / "two"))
    source.write(70, 4000)
    await source.machine.flush()
    await source.machine.close()
    shutil.copytree(tmp_path / "source", tmp_path / "whole")
    return Driven(tmp_path / "whole"), sorted((tmp_path / "source").rglob("*.seg"))


def stored_from(driven: Driven, offset: int) -> list[object]:
    found = driven.machine.store.logs[PART].read(offset, 1 << 30)
    return [each.data if isinstance(each, Stored) else each for each in found]


def damage(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 255
    path.write_bytes(data)


@pytest.mark.parametrize("broken", ["body", "stamp", "end", "missing", "last", "last block", "last missing"])
async def test_a_gap_is_mended_with_the_blocks_of_another_replica(source: Driven, tmp_path: Path, broken: str) -> None:
    whole, paths = await whole_and_broken(source, tmp_path)
    assert len(paths) == 3
    match broken:
        case "body":
            damage(paths[1], 100_000)
        case "stamp":
            place = paths[1].read_bytes().index(b"PB", 200_000) - 32
            damage(paths[1], place)
        case "end":
            paths[1].write_bytes(paths[1].read_bytes()[:-50_000])
        case "missing":
            paths[1].unlink()
        case "last":
            damage(paths[2], 100_000)
        case "last block":
            damage(paths[2], -1)
        case _:
            paths[2].unlink()
    again = Driven(tmp_path / "source")
    gaps = [each for each in again.content()[1] if isinstance(each, Gap)]
    assert gaps
    log = whole.machine.store.logs[PART]
    for gap in gaps:
        found, at = list[Stored](), gap.low
        while at < gap.high:
            each = log.read(at, 1)[0]
            assert isinstance(each, Stored)
            found.append(each)
            at = each.stamp.base + each.block.count
        assert await again.machine.mend(PART, found)
    again.write(3)
    await again.machine.flush()
    for _ in range(2):
        content = again.content()[1]
        assert content[:-3] == whole.content()[1]
        assert again.machine.store.logs[PART].gaps == []
        await again.machine.close()
        again = Driven(tmp_path / "source")
    await again.machine.close()
    await whole.machine.close()


@pytest.mark.parametrize("broken", ["stamp", "end", "missing", "last", "last missing"])
async def test_a_gap_is_mended_from_the_first_offset_that_retention_has_kept(source: Driven, tmp_path: Path, broken: str) -> None:
    whole, paths = await whole_and_broken(source, tmp_path)
    match broken:
        case "stamp":
            damage(paths[1], paths[1].read_bytes().index(b"PB", 200_000) - 32)
        case "end":
            paths[1].write_bytes(paths[1].read_bytes()[:-50_000])
        case "missing":
            paths[1].unlink()
        case "last":
            paths[2].write_bytes(paths[2].read_bytes()[:-50_000])
        case _:
            paths[2].unlink()
    again = Driven(tmp_path / "source")
    (gap,) = [each for each in again.content()[1] if isinstance(each, Gap)]
    log, found = whole.machine.store.logs[PART], list[Stored]()
    dropped = log.read(gap.low, 1)[0]
    assert isinstance(dropped, Stored)
    first = at = dropped.stamp.base + dropped.block.count
    assert gap.low < first < gap.high
    for driven in (again, whole):
        driven.apply(en.TRIM, en.encode_trim(PART, first))
    while at < gap.high:
        block = log.read(at, 1)[0]
        assert isinstance(block, Stored)
        assert follows(block, at, begun=bool(found))
        found.append(block)
        at = block.stamp.base + block.block.count
    assert not follows(found[0], found[1].stamp.base, begun=False)  # it leads nowhere
    assert await again.machine.mend(PART, found)
    again.write(3)
    await again.machine.flush()
    for _ in range(2):
        assert stored_from(again, first)[:-3] == stored_from(whole, first)
        await again.machine.close()
        again = Driven(tmp_path / "source")
    await again.machine.close()
    await whole.machine.close()
