"""The table of delivered signals in memory that outlives the process: LMDB, on whatever folder a test has."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import lmdb
import pytest

from cluster.process import shared_memory
from gateway.delivery.signal_table import MAX_A_TRANSACTION, SharedTable, folder_name, open_table
from gateway.delivery.signals import MemoryTable
from gateway.options import Options
from pixiu.errors import ConfigurationError

MIB = 1 << 20


def ids(*numbers: int) -> list[tuple[int, int]]:
    return [(number, 42) for number in numbers]


def test_what_was_added_is_known_after_it_is_opened_again(tmp_path: Path) -> None:
    table = SharedTable(tmp_path / "t", MIB)
    assert table.add(ids(1, 2, 1)) == [True, True, False]
    table.close(remove=False)
    again = SharedTable(tmp_path / "t", MIB)
    assert again.add(ids(2, 3)) == [False, True]
    assert again.count() == 3
    again.close(remove=False)


@pytest.mark.parametrize("how", ["open", "link", "another user's"])
def test_a_folder_that_somebody_else_made_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """On /dev/shm everybody may make a folder of any name before its owner does."""
    folder = tmp_path / "t"
    (tmp_path / "real").mkdir(mode=0o700)
    if how == "link":
        folder.symlink_to(tmp_path / "real")
    else:
        folder.mkdir(mode=0o700)
    if how == "open":
        folder.chmod(0o777)
    if how == "another user's":
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(ConfigurationError, match="of this user alone"):
        SharedTable(folder, MIB)


def test_it_agrees_with_its_twin_in_memory(tmp_path: Path) -> None:
    """Generations that end within a transaction, and a table that is opened again now and then."""
    chance = random.Random(7)
    table, twin = SharedTable(tmp_path / "t", MIB, generation=50), MemoryTable(generation=50)
    for turn in range(200):
        asked = [(chance.randrange(300), chance.randrange(2)) for _ in range(chance.randrange(1, 120))]
        assert table.add(asked) == twin.add(asked)
        assert table.count() == len(twin)
        if turn % 20 == 19:
            table.close(remove=False)
            table = SharedTable(tmp_path / "t", MIB, generation=50)
    table.close(remove=True)


def test_the_largest_ids_are_kept_apart(tmp_path: Path) -> None:
    table = SharedTable(tmp_path / "t", MIB)
    top = 2**64 - 1
    assert table.add([(top, top), (top, top - 1), (top - 1, top), (top, top)]) == [True, True, True, False]
    table.close(remove=True)


def test_its_whole_memory_is_taken_at_the_start(tmp_path: Path) -> None:
    for _ in range(2):
        table = SharedTable(tmp_path / "t", 4 * MIB)
        assert (tmp_path / "t" / "data.mdb").stat().st_blocks * 512 >= 4 * MIB
        table.close(remove=False)


@pytest.mark.parametrize("per_turn", [1, 100, 5 * MAX_A_TRANSACTION])
def test_it_never_outgrows_its_memory(tmp_path: Path, per_turn: int) -> None:
    """IDs in random order, which fill pages least, for several generations of the smallest table."""
    chance = random.Random(3)
    table = SharedTable(tmp_path / "t", MIB)
    for _ in range(max(3, 20_000 // per_turn)):
        assert all(table.add([(chance.getrandbits(63), chance.getrandbits(62)) for _ in range(per_turn)]))
    assert table.problem == ""
    assert table.count() >= MIB // 256
    table.close(remove=True)


def test_a_clean_end_leaves_nothing(tmp_path: Path) -> None:
    table = SharedTable(tmp_path / "t", MIB)
    table.add(ids(1))
    table.close(remove=True)
    assert list(tmp_path.iterdir()) == []


def test_a_table_in_use_is_refused_by_name(tmp_path: Path) -> None:
    table = SharedTable(tmp_path / "t", MIB)
    with pytest.raises(ConfigurationError, match="signal_table_name"):
        open_table(tmp_path, "t", MIB)
    table.close(remove=True)


def test_without_a_folder_signals_are_kept_in_the_process_and_it_is_said(tmp_path: Path) -> None:
    table, problem = open_table(tmp_path / "nowhere", "t", MIB)
    assert isinstance(table, MemoryTable)
    assert "nowhere" in problem
    assert "signal_table_dir" in problem


def test_without_enough_memory_signals_are_kept_in_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_memory, "allocate", full)
    table, problem = open_table(tmp_path, "t", MIB)
    assert isinstance(table, MemoryTable)
    assert "No space left" in problem
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_table_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir(mode=0o700)
    (tmp_path / "t" / "data.mdb").write_bytes(bytes(MIB))
    table, problem = open_table(tmp_path, "t", MIB)
    assert isinstance(table, SharedTable)
    assert problem == ""
    assert table.add(ids(1)) == [True]
    table.close(remove=True)


def test_a_table_that_fails_later_goes_on_in_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = SharedTable(tmp_path / "t", MIB)

    def fails(identities: object) -> list[bool]:
        raise lmdb.MapFullError("full")

    monkeypatch.setattr(table, "_add", fails)
    assert table.add(ids(1, 2)) == [True, True]
    assert table.add(ids(2)) == [False]
    assert "full" in table.problem
    assert table.count() == 2
    table.close(remove=True)


WRITER = """
import sys
from pathlib import Path
from gateway.delivery.signal_table import SharedTable

table = SharedTable(Path(sys.argv[1]), 1 << 20)
for start in range(0, 1_000_000, 7):
    table.add([(number, 42) for number in range(start, start + 7)])
    print(start + 7, flush=True)
"""


@pytest.mark.process
def test_what_was_added_survives_a_kill_at_any_instant(tmp_path: Path) -> None:
    for number in range(5):
        folder = tmp_path / str(number)
        with subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            for _ in range(20 + 31 * number):
                last = int(writer.stdout.readline())
            os.kill(writer.pid, signal.SIGKILL)
            last = max([last, *(int(line) for line in writer.stdout.read().splitlines(keepends=True) if line.endswith(b"\n"))])
        table, problem = open_table(folder.parent, folder.name, MIB)
        assert isinstance(table, SharedTable), problem
        known = table.add(ids(*range(max(0, last - 1000), last)))
        assert not any(known)
        table.close(remove=True)


def test_the_folder_is_named_after_the_gateways_address() -> None:
    assert folder_name("/pubsub", "127.0.0.1", 1883) == "pixiu-signals-pubsub-127.0.0.1-1883"
    assert folder_name("/", "::1", 1883) == "pixiu-signals-1-1883"


@pytest.mark.parametrize("name", ["../x", "a/b", ".", "-a", "a" * 101])
def test_a_name_that_is_no_name_is_refused(name: str) -> None:
    assert "signal_table_name" in dict(Options(signal_table_name=name).problems())
    assert "signal_table_name" not in dict(Options(signal_table_name="gateway-1").problems())
