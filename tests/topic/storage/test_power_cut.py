"""A power cut at any operation on the files: what was flushed is there, and the journal's replay brings the rest, once."""

from __future__ import annotations

import random

import pytest

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


def whole(seed: int) -> tuple[Log, int]:
    log = Log(Fragile())
    play(log, random.Random(seed))
    return log, log.files.operations


@pytest.mark.parametrize("left", Left)
def test_nothing_is_lost_and_nothing_is_twice(left: Left) -> None:
    reference, operations = whole(3)
    expected = blocks(reference.store.logs[PART])
    for dark_at in range(1, operations, 2):
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
