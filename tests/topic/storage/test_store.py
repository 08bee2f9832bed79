"""Stores on real files and LMDB, the index by time, and retention."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.topics import entries as en
from pixiu.errors import DiskFailed, DiskFull
from tests.topic.builders import PART, TOPIC, Log, written
from topic.state.state import MAX_PARTS
from topic.storage.files import DiskFiles
from topic.storage.lmdb_table import LmdbTable
from topic.storage.segment import Stored
from topic.storage.store import Store


def on_disk(folder: Path) -> tuple[Log, LmdbTable]:
    (folder / "files").mkdir(exist_ok=True, parents=True)
    table = LmdbTable(folder / "table", 1 << 20)
    return Log(DiskFiles(folder / "files"), table), table  # type: ignore[arg-type]


def test_a_store_on_the_disk_is_read_again(tmp_path: Path) -> None:
    log, table = on_disk(tmp_path)
    log.open_part()
    for number in range(30):
        log.write(number, number + 1, first=1 + 2 * number)
    log.store.flush()
    table.close()
    again, table = on_disk(tmp_path)
    assert again.store.flushed == 32
    assert [(stamp.base, block.slots()) for stamp, block in again.store.blocks(PART, 11, 14)] == [(10, [5, 6]), (12, [6, 7])]
    assert len(again.store.logs[PART].segments) > 3
    assert again.write(7, first=61) is not None
    again.store.flush()
    table.close()


def test_a_full_table_keeps_its_changes_for_later(tmp_path: Path) -> None:
    log, table = on_disk(tmp_path)
    log.open_part()
    log.write(1)
    with pytest.raises(DiskFull, match="free some"):
        table.write([(b"k%d" % number, bytes(4000)) for number in range(400)], 9, 9)
    assert table.read() == ({}, 0, 0)
    assert log.store.flush() == 3
    assert table.read()[1:] == (3, 1000)
    table.close()


def test_a_table_that_is_no_table_says_so(tmp_path: Path) -> None:
    (tmp_path / "table").mkdir()
    (tmp_path / "table/data.mdb").write_bytes(b"x" * 9000)
    with pytest.raises(DiskFailed, match="cannot be opened"):
        LmdbTable(tmp_path / "table", 1 << 20)


def test_what_a_killed_process_began_to_make_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "table").mkdir()
    (tmp_path / "table/data.mdb.new").write_bytes(b"torn")
    table = LmdbTable(tmp_path / "table", 1 << 20)
    assert table.read() == ({}, 0, 0)
    assert sorted(path.name for path in (tmp_path / "table").iterdir()) == ["data.mdb", "lock.mdb"]
    table.close()


def test_a_flush_that_fails_is_made_up_for() -> None:
    log = Log()
    log.open_part()
    log.write(1)
    failing = log.table.write

    def fail(*_: object) -> None:
        raise DiskFull("full")

    log.table.write = fail  # type: ignore[assignment]
    with pytest.raises(DiskFull):
        log.store.flush()
    assert log.store.flushed == 0
    log.write(2, first=2)
    log.table.write = failing  # type: ignore[method-assign]
    log.store.flush()
    again = Log(log.files, log.table)
    assert again.store.state.parts[PART].end == 2
    assert again.store.state.parts[PART].writers[5].position == 2


def test_unwritten_blocks_are_read_from_memory() -> None:
    log = Log()
    log.open_part()
    log.write(1, 2)
    log.store.flush()
    log.write(3, first=3)
    found = log.store.logs[PART].read(1, 1 << 20)
    assert [each.stamp.base for each in found if isinstance(each, Stored)] == [0, 2]
    assert found[1].data.endswith(b"3")  # type: ignore[union-attr]
    assert [block.slots() for _, block in log.store.blocks(PART, 0, 9)] == [[1, 2], [3]]


def test_while_nothing_can_be_flushed_memory_serves() -> None:
    log = Log()
    log.open_part()
    log.write(1, 2)

    def away(*_: object) -> None:
        raise DiskFull("full")

    log.table.write = away  # type: ignore[assignment]
    for number in range(3, 40):
        log.write(number, first=number)
        with pytest.raises(DiskFull):
            log.store.flush()
        assert [stamp.base for stamp, _ in log.store.blocks(PART, number - 1, number)] == [number - 1]
    assert [block.slots() for _, block in log.store.blocks(PART, 0, 9)][:2] == [[1, 2], [3]]


def test_a_thousand_parts_share_a_group() -> None:
    log = Log()
    for number in range(1, MAX_PARTS + 1):
        log.open_part(number, number - 1, number)
    more = en.Opening(en.part_id(TOPIC, MAX_PARTS + 1), 0, 1).encode()
    assert "at most 1000 parts" in log.apply(en.OPEN, more).why  # type: ignore[attr-defined]
    for number in (1, 500, 1000):
        log.write(number - 1, part=number)
    log.store.flush()
    assert len(log.files.names("parts")) == 3  # those without a message have no file
    again = Log(log.files, log.table)
    for number in range(1, MAX_PARTS + 1):
        found = list(again.store.blocks(en.part_id(TOPIC, number), 0, 1))
        assert [block.slots() for _, block in found] == ([[number - 1]] if number in (1, 500, 1000) else [])
    assert 0 < again.store.cache.size < 3 * 200


def test_a_time_finds_its_offset() -> None:
    log = Log()
    log.open_part()
    for number in range(20):
        log.write(1, 2, first=1 + 2 * number, at_us=100 * number)
    log.store.flush()
    log.write(1, first=41, at_us=2500)
    for part in (log.store.logs[PART], Log(log.files, log.table).store.logs[PART]):
        assert [part.offset_at(at) for at in (0, 1, 100, 1450, 1900)] == [0, 2, 2, 30, 38]
    assert log.store.logs[PART].offset_at(2000) == 40
    assert log.store.logs[PART].offset_at(2501) == 41


def test_a_time_is_found_without_reading_all_segments() -> None:
    log = Log(segment_bytes=1)
    log.open_part()
    for number in range(200):
        log.apply(en.BLOCK, en.encode_block(42, written(1, first=1 + number, body=bytes(20_000))), 100 * (number // 3))
    log.store.flush()
    whole = log.store.logs[PART].segments
    assert len(whole) == 200
    for damaged in ((), range(90, 100)):
        for number in damaged:
            log.files.write(whole[number].path, 0, b"damaged" * 20)
        for at in (*range(0, 6600, 550), 2900, 3001, 3300, 3400):
            part = Log(log.files, log.table).store.logs[PART]
            found = part.offset_at(at)
            expected = 3 * -(-at // 100)
            assert found == (max(expected, 100) if expected in damaged else expected)
            assert sum(segment.scanned for segment in part.segments) < 30 + len(damaged)


def test_retention_goes_by_time_and_by_size_in_whole_segments() -> None:
    log = Log()
    log.open_part()
    for number in range(20):
        log.write(1, 2, first=1 + 2 * number, at_us=100 * number)
    log.store.flush()
    part = log.store.logs[PART]
    assert part.expired(0, 1 << 30) == 0
    by_time = part.expired(1000, 1 << 30)
    assert 0 < by_time <= 20
    assert part.expired(0, part.segments[-1].size) == part.segments[-1].base
    before = part.stored_bytes
    log.apply(en.TRIM, en.encode_trim(PART, by_time))
    log.store.flush()
    assert (part.first, part.stored_bytes < before) == (by_time, True)
    assert Log(log.files, log.table).store.logs[PART].first == by_time


def test_blocks_are_kept_as_they_came() -> None:
    log = Log()
    log.open_part()
    block = written(1, 2, 3, body=b"x" * 300)
    log.apply(en.BLOCK, en.encode_block(42, block), 77)
    log.store.flush()
    (found,) = log.store.logs[PART].read(1, 1)
    assert isinstance(found, Stored)
    assert (found.block.data, found.stamp) == (block, (0, 77, 42))
    assert isinstance(log.store, Store)


def test_a_block_larger_than_what_is_read_at_once_is_read_whole() -> None:
    log = Log()
    log.open_part()
    block = written(1, body=bytes(700_000))
    log.apply(en.BLOCK, en.encode_block(9, block))
    log.store.flush()
    (stored,) = log.store.logs[PART].read(0, 1)
    assert isinstance(stored, Stored)
    assert len(stored.block.data) == len(block)
    assert log.store.logs[PART].offset_at(0) == 0


def test_what_cannot_be_removed_is_a_failure_of_the_disk(tmp_path: Path) -> None:
    (tmp_path / "parts/1-1").mkdir(parents=True)
    with pytest.raises(DiskFailed, match="1-1"):
        DiskFiles(tmp_path).remove("parts/1-1")
