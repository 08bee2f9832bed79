"""The table on shared memory: what stays, what makes space, and what a killed process leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from cluster.replication.model import MemberID
from pixiu.errors import ConfigurationError
from xiu.records.block import Block, decode, encode
from xiu.records.table import Table, charged

MIB = 1 << 20
ME = MemberID(7)


@pytest.fixture
def folder() -> Iterator[Path]:
    base = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=base, prefix="pixiu-test-") as name:
        yield Path(name)


def block(first: int, size: int = 10_000, count: int = 10) -> Block:
    return Block(first, count, first, first.to_bytes(8, "big") * (size // 8))


def put(table: Table, *blocks: Block, persisted: bool = True) -> bool:
    return table.put([(each, encode(each)) for each in blocks], persisted)


def none(firsts: Sequence[int]) -> list[bool]:
    return [False] * len(firsts)


def every(firsts: Sequence[int]) -> list[bool]:
    return [True] * len(firsts)


def test_a_block_is_found_by_each_of_its_sequences(folder: Path) -> None:
    table = Table(folder, 8 * MIB, ME)
    put(table, block(100), block(110), block(200))
    for sequence, first in ((100, 100), (109, 100), (110, 110), (119, 110), (205, 200)):
        found = table.get(sequence)
        assert found is not None
        assert found == block(first)
    assert [table.get(sequence) for sequence in (99, 120, 210)] == [None, None, None]
    table.close()


def test_the_block_used_longest_ago_makes_space(folder: Path) -> None:
    table = Table(folder, 8 * MIB, ME)
    fits = table.capacity // charged(100_000)
    for number in range(fits):
        put(table, block(number * 10, 100_000))
    assert table.get(0) is not None
    put(table, block(fits * 10, 100_000))
    assert table.get(10) is None
    assert table.get(0) is not None
    assert table.counters.evicted == 1
    table.close()


def test_unpersisted_blocks_stay_and_push_back(folder: Path) -> None:
    table = Table(folder, 8 * MIB, ME)
    put(table, block(0, 100_000))
    number = 1
    while table.has_space(100_000):
        assert put(table, block(number * 10, 100_000), persisted=False)
        number += 1
    assert table.get(0) is None  # it was persisted, and made space
    assert table.get(10) is None  # nobody reads what is not committed
    assert table.unpersisted == number - 1
    table.persisted([10, 20])
    assert table.has_space(100_000)
    assert table.get(10) is not None
    assert table.dropped() == number - 3
    assert table.get(30) is None
    table.close()


def test_blocks_of_all_sizes_never_fill_the_map(folder: Path) -> None:
    table = Table(folder, 8 * MIB, ME)
    for number in range(3000):
        size = (100, 1900, 5000, 70_000, 300_000)[number * 7 % 5]
        assert put(table, block(number * 10, size, count=1), persisted=False)
        table.persisted([number * 10])
        assert table.used_bytes <= table.capacity
    found = table.get(2999 * 10)
    assert found is not None
    table.close()


def test_a_table_full_of_small_unpersisted_blocks_says_so_before_it_is_full(folder: Path) -> None:
    table = Table(folder, 8 * MIB, ME)
    number = 0
    while table.has_space(100):
        assert put(table, block(number, 96, count=1), persisted=False)
        number += 1
    assert number > 5_000
    table.close()


def test_a_restart_takes_over_what_is_whole_and_hands_back_what_is_not_persisted(folder: Path) -> None:
    table = Table(folder, 8 * MIB, ME)
    put(table, block(10), block(20))
    put(table, block(30), block(40), persisted=False)
    table.close()
    again = Table(folder, 8 * MIB, ME)
    left = again.recover(lambda firsts: [first < 30 for first in firsts])
    assert [each.first for each in left] == [30, 40]
    assert again.get(25) == block(20)
    assert again.get(30) is None
    again.persisted([30])
    assert again.dropped() == 1
    assert again.get(30) == block(30)
    again.close()


def test_a_flipped_byte_is_found_and_the_block_is_dropped(folder: Path) -> None:
    table = Table(folder, 8 * MIB, ME)
    value = encode(block(10))
    table.put([(block(10), value[:-1] + b"\xff")], persisted=True)
    put(table, block(20))
    assert table.get(10) is None
    assert table.counters.damaged == 1
    table.put([(block(30), value)], persisted=True)
    table.put([(block(40), value[:50] + b"\xff" + value[51:])], persisted=True)
    table.close()
    again = Table(folder, 8 * MIB, ME)
    assert again.recover(every) == []
    assert again.counters.damaged == 1
    assert again.get(20) == block(20)
    again.close()


def test_another_members_blocks_are_removed(folder: Path) -> None:
    table = Table(folder, 8 * MIB, ME)
    put(table, block(10))
    table.close()
    again = Table(folder, 8 * MIB, MemberID(8))
    assert again.recover(none) == []
    assert again.get(10) is None
    again.close()


def test_one_process_has_a_table(folder: Path) -> None:
    table = Table(folder, 8 * MIB, ME)
    with pytest.raises(ConfigurationError, match="table_name"):
        Table(folder, 8 * MIB, ME)
    table.close(remove=True)
    assert not folder.exists()
    folder.mkdir()


def test_too_little_memory_is_an_error_at_the_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_path: Path, _size: int) -> None:
        raise OSError(28, "No space left on device")

    from cluster.process import shared_memory

    monkeypatch.setattr(shared_memory, "allocate", full)
    with pytest.raises(OSError, match="No space"):
        Table(folder, 8 * MIB, ME)


WRITER = """
import sys
from pathlib import Path
from tests.xiu.test_table import ME, MIB, block, put
from xiu.records.table import Table
table = Table(Path(sys.argv[1]), 8 * MIB, ME)
number = 0
while True:
    put(table, block(number * 10, 20_000), persisted=number % 2 == 0)
    table.persisted([(number - 8) * 10])
    number += 1
    print(number, flush=True)
"""


@pytest.mark.process
def test_a_kill_at_any_instant_leaves_it_whole(folder: Path) -> None:
    for round_ in range(4):
        root = Path(__file__).resolve().parents[2]
        command = [sys.executable, "-c", WRITER, str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root) as process:
            assert process.stdout is not None
            while int(process.stdout.readline()) < 200 + round_ * 37:
                time.sleep(0)
            process.send_signal(signal.SIGKILL)
            process.wait()
        table = Table(folder, 8 * MIB, ME)
        left = table.recover(none)
        assert left
        assert table.counters.damaged == 0
        for each in left:
            assert each == block(each.first, 20_000)
        table.dropped()
        table.close()
    assert os.path.exists(folder)


def test_a_value_that_is_cut_is_no_block() -> None:
    value = encode(block(1))
    assert decode(1, value) == block(1)
    for end in (0, 3, 15, 16, len(value) - 1):
        assert decode(1, value[:end]) is None
