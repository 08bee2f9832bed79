"""A power cut at any operation on the files: what was flushed is there, and the journal's replay brings the rest, once."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from cluster.topics import entries as en
from pixiu.objects.manifest import StoredObject
from tests.sim.power_cut.disk import Left
from tests.sim.topics.disk import MemoryFiles
from tests.topic.builders import PART, Log
from topic.storage.part_log import PartLog
from topic.storage.segment import Gap, Stored


class Dark(Exception):
    """The power goes."""


class Fragile(MemoryFiles):
    """Files that lose their power before an operation."""

    dark_at = -1

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "operations" and value == self.dark_at:
            raise Dark


def blocks(log: PartLog) -> list[tuple[int, bytes]]:
    found, at = list[tuple[int, bytes]](), 0
    while at < log.end:
        for each in log.read(at, 1 << 20):
            assert isinstance(each, Stored), each
            found.append((each.stamp.base, each.data))
            at = each.stamp.base + each.block.count
    return found


def play(log: Log, rng: random.Random) -> None:
    """Blocks and flushes; the same for the same chance."""
    log.open_part()
    position = 1
    for _ in range(20):
        slots = [rng.randrange(65_536) for _ in range(rng.randint(1, 6))]
        log.write(*slots, first=position, at_us=1000 * position)
        position += len(slots)
        if rng.random() < 0.4:
            log.store.flush()
    log.store.flush()


def play_with_store(log: Log, rng: random.Random) -> None:
    """The same, and objects of the store, whose files go."""
    log.open_part()
    position, part = 1, log.store.state.parts[PART]
    for _ in range(20):
        slots = [rng.randrange(65_536) for _ in range(rng.randint(1, 6))]
        log.write(*slots, first=position, at_us=1000 * position)
        position += len(slots)
        if rng.random() < 0.4:
            log.store.flush()
            if rng.random() < 0.6 and (end := log.store.logs[PART].synced) > part.stored:
                found = StoredObject(part.stored, end, 1, 0, 1, 1, 1, "memory://s")
                log.apply(en.UPLOADED, en.encode_objects(PART, [found]))
                log.store.local_firsts[PART] = end
    log.store.flush()


def whole(seed: int, play: Callable[[Log, random.Random], None] = play) -> tuple[Log, int]:
    log = Log(Fragile())
    play(log, random.Random(seed))
    return log, log.files.operations


def moments(left: Left, operations: int) -> range:
    """Power cuts before every second operation; kills before each, as the next process finds names and bytes that none synced."""
    return range(1, operations, 1 if left is Left.ALL else 2)


@pytest.mark.parametrize("left", Left)
def test_nothing_is_lost_and_nothing_is_twice(left: Left) -> None:
    reference, operations = whole(3)
    expected = blocks(reference.store.logs[PART])
    for dark_at in moments(left, operations):
        files = Fragile()
        files.dark_at = dark_at
        log = Log.__new__(Log)
        try:
            log.__init__(files)  # type: ignore[misc]
            play(log, random.Random(3))
        except Dark:
            pass
        rng = random.Random(dark_at)
        after = Log(files.cut(left, rng), log.table)
        applied = after.store.flushed
        for entry in reference.entries[applied:]:
            after.store.apply([entry])
        assert blocks(after.store.logs[PART]) == expected
        after.store.flush()
        last = Log(after.files.cut(Left.NOTHING, rng), after.table)
        assert blocks(last.store.logs[PART]) == expected


@pytest.mark.parametrize("left", Left)
def test_what_is_no_longer_in_files_is_in_the_store(left: Left) -> None:
    reference, operations = whole(3, play_with_store)
    end = reference.store.logs[PART].end
    assert 0 < reference.store.logs[PART].first <= reference.store.state.parts[PART].stored
    for dark_at in moments(left, operations):
        files = Fragile()
        files.dark_at = dark_at
        log = Log.__new__(Log)
        try:
            log.__init__(files)  # type: ignore[misc]
            play_with_store(log, random.Random(3))
        except Dark:
            pass
        after = Log(files.cut(left, random.Random(dark_at)), log.table)
        part = after.store.state.parts.get(PART)
        missing = after.store.logs[PART].gaps if part is not None else []
        assert not missing, "before the journal is applied"
        for entry in reference.entries[after.store.flushed :]:
            after.store.apply([entry])
        here, part = after.store.logs[PART], after.store.state.parts[PART]
        assert all(part.object_at(offset) for offset in range(here.first))
        assert part.objects == reference.store.state.parts[PART].objects
        at = here.first
        while at < end:
            for each in here.read(at, 1 << 20):
                assert isinstance(each, Stored), each
                at = each.stamp.base + each.block.count


def test_a_damaged_block_is_a_gap_and_the_rest_is_read() -> None:
    log, _ = whole(4)
    segments = log.store.logs[PART].segments
    assert len(segments) > 3
    middle = segments[1]
    log.files._file(middle.path).do((middle.size // 2, b"\xff\xff"))
    end, at, gaps, read = log.store.logs[PART].end, 0, list[Gap](), set[int]()
    reopened = Log(log.files, log.table).store.logs[PART]
    while at < end:
        for each in reopened.read(at, 1 << 20):
            if isinstance(each, Gap):
                gaps.append(each)
                at = each.high
            else:
                read |= set(range(each.stamp.base, each.stamp.base + each.block.count))
                at = each.stamp.base + each.block.count
    assert len(gaps) == 1
    assert read | set(range(*gaps[0])) == set(range(end))
    assert middle.base <= gaps[0].low < gaps[0].high <= middle.end


def test_what_a_disk_lost_below_the_flushed_end_is_a_gap() -> None:
    log, _ = whole(5)
    before = log.store.logs[PART]
    last = before.segments[-1]
    log.files._file(last.path).do(last.size - 3)
    after = Log(log.files, log.table)
    found = after.store.logs[PART]
    assert found.end == before.end
    (gap,) = found.gaps
    assert gap.high == before.end
    after.write(1, first=before.end + 1)
    after.store.flush()
    (left, *_) = found.read(gap.low, 1 << 20)
    assert left == gap
    (new,) = found.read(gap.high, 1 << 20)
    assert isinstance(new, Stored)
    assert new.stamp.base == before.end
