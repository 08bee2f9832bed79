"""Rotations of followed files, as they are told from what is in the folders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pixiu.errors import InvalidArgument, MalformedData
from tools.tail.core import (
    EDGE_BYTES,
    Change,
    Identity,
    Keys,
    Life,
    Seen,
    as_json,
    digest,
    from_json,
    lines_in,
    look,
    over_bound,
)


class Disk:
    """Files by path: an inode and what it has."""

    def __init__(self) -> None:
        self.files: dict[str, int] = {}
        self.data: dict[int, bytes] = {}
        self.lives: list[Life] = []
        self._names: Iterator[int] = count(1)
        self._inodes: Iterator[int] = count(1)

    def write(self, path: str, data: bytes) -> None:
        """Append."""
        inode = self.files.setdefault(path, next(self._inodes))
        self.data[inode] = self.data.get(inode, b"") + data

    def rename(self, path: str, to: str) -> None:
        """Rename."""
        self.files[to] = self.files.pop(path)

    def copy_and_cut(self, path: str, to: str) -> None:
        """As logrotate's copytruncate."""
        self.files.pop(to, None)
        self.write(to, self.data[self.files[path]])
        self.data[self.files[path]] = b""

    def seen(self, path: str) -> Seen:
        """A file as it is now."""
        inode = self.files[path]
        data = self.data[inode]
        return Seen(path, Identity(1, inode), len(data), lambda low, high: digest(data[low:high]))

    def look(self, *follow: str, from_end: bool = False) -> Change:
        """Look, with app.log or others followed."""
        wanted = follow or ("app.log",)
        followed = [self.seen(path) for path in wanted if path in self.files]
        others = [self.seen(path) for path in sorted(self.files) if path not in wanted]
        change = look(self.lives, followed, lambda: others, lambda: f"w{next(self._names)}", from_end=from_end)
        self.lives = list(change.lives)
        return change

    def read(self) -> bytes:
        """Store what is there, oldest first."""
        found = b""
        for at, life in enumerate(self.lives):
            data = self.data[self.files[life.place or life.path]]
            found += data[life.position :]
            edge = digest(data[max(0, len(data) - EDGE_BYTES) :])
            self.lives[at] = replace(life, position=len(data), edge=edge, size=len(data))
        return found


def test_a_file_that_grows_is_one_life() -> None:
    disk = Disk()
    disk.write("app.log", b"one\n")
    disk.look()
    assert disk.read() == b"one\n"
    disk.write("app.log", b"two\n")
    disk.look()
    assert (disk.read(), [life.writer for life in disk.lives]) == (b"two\n", ["w1"])


def test_a_renamed_file_is_read_to_its_end_before_the_new_one() -> None:
    disk = Disk()
    disk.write("app.log", b"one\n")
    disk.look()
    disk.read()
    disk.write("app.log", b"two\n")
    disk.rename("app.log", "app.log.1")
    disk.write("app.log", b"three\n")
    assert not disk.look().lost
    assert [(life.writer, life.place) for life in disk.lives] == [("w1", "app.log.1"), ("w2", "")]
    assert disk.read() == b"two\nthree\n"
    disk.look()
    assert [life.writer for life in disk.lives] == ["w2"]


def test_a_file_that_was_copied_and_cut_is_read_from_the_copy_also_if_it_has_grown_beyond_the_position() -> None:
    for more in (b"", b"a line that is longer than all before\n"):
        disk = Disk()
        disk.write("app.log", b"one\n")
        disk.look()
        disk.read()
        disk.write("app.log", b"two\n")
        disk.copy_and_cut("app.log", "app.log.1")
        disk.write("app.log", more)
        disk.write("other.log", b"one thing else\n")
        assert not disk.look().lost
        assert disk.read() == b"two\n" + more


def test_a_file_whose_new_name_is_followed_as_well_is_not_read_again() -> None:
    for rotate in (Disk.rename, Disk.copy_and_cut):
        disk, names = Disk(), ("app.log", "app.log.1")
        disk.write("app.log", b"one\n")
        disk.look(*names)
        disk.read()
        disk.write("app.log", b"two\n")
        rotate(disk, "app.log", "app.log.1")
        disk.write("app.log", b"three\n")
        assert not disk.look(*names).lost
        assert sorted(disk.read().splitlines()) == [b"three", b"two"]
        disk.look(*names)
        assert (disk.read(), len(disk.lives)) == (b"", 2)


def test_a_cut_file_of_which_everything_is_stored_loses_nothing() -> None:
    disk = Disk()
    disk.write("app.log", b"one\n")
    disk.look()
    disk.read()
    disk.data[disk.files["app.log"]] = b""
    assert not disk.look().lost
    disk.write("app.log", b"new\n")
    disk.look()
    assert (disk.read(), disk.lives[0].writer) == (b"new\n", "w2")


def test_an_inode_that_is_used_again_is_another_file() -> None:
    disk = Disk()
    disk.write("app.log", b"old and stored\n")
    disk.look()
    disk.read()
    disk.data[disk.files["app.log"]] = b"a new file with that inode\n"
    disk.look()
    assert disk.read() == b"a new file with that inode\n"


def test_what_is_gone_before_it_was_stored_is_told_with_its_size() -> None:
    disk = Disk()
    disk.write("app.log", b"one\ntwo\n")
    disk.look()
    del disk.files["app.log"]
    disk.write("app.log", b"new\n")
    (lost,) = disk.look().lost
    assert (lost.writer, lost.waiting) == ("w1", 8)


def test_only_files_of_which_nothing_was_known_begin_at_their_end() -> None:
    disk = Disk()
    disk.write("app.log", b"before\n")
    disk.look(from_end=True)
    assert disk.read() == b""
    disk.rename("app.log", "app.log.1")
    disk.write("app.log", b"after\n")
    disk.look(from_end=True)
    assert disk.read() == b"after\n"


def test_the_oldest_rotated_files_are_given_up_above_the_bound() -> None:
    lives = [Life("a", Identity(1, n), f"w{n}", 0, size=10, place=f"a.{n}" if n < 3 else "") for n in (1, 2, 3)]
    assert [life.writer for life in over_bound(lives, 10)] == ["w1"]
    assert over_bound(lives, 20) == []


@given(st.lists(st.binary(max_size=20).filter(lambda line: b"\n" not in line and not line.endswith(b"\r"))), st.integers(0, 60))
def test_lines_and_their_positions(lines: list[bytes], cut: int) -> None:
    data = b"".join(line + b"\n" for line in lines)
    first = lines_in(data[:cut], 100, whole=False)
    at = first[-1][0] - 100 if first else 0
    found = first + lines_in(data[at:], 100 + at, whole=False)
    assert [line for _, line in found] == lines
    assert not found or found[-1][0] == 100 + len(data)


def test_a_line_without_an_end_waits_for_it_and_a_long_one_is_several() -> None:
    assert lines_in(b"one\r\ntw", 0, whole=False) == [(5, b"one")]
    assert lines_in(b"two", 5, whole=True) == [(8, b"two")]
    long = b"x" * 2_000_000
    found = lines_in(long, 0, whole=False)
    assert [position for position, _ in found] == [900_000, 1_800_000]
    ended = lines_in(long + b"\n", 0, whole=False)
    assert (b"".join(line for _, line in ended), ended[-1][0]) == (long, 2_000_001)


def test_keys() -> None:
    assert Keys("").of("/app.log", b"line") == b"/app.log"
    assert Keys(r"user=(\w+)").of("/app.log", b"GET user=ann 200") == b"ann"
    assert Keys(r"\d+").of("/app.log", b"none") == b"/app.log"
    with pytest.raises(InvalidArgument, match="no regular expression"):
        Keys("(")


def test_lives_are_kept_and_damage_is_noticed() -> None:
    disk = Disk()
    disk.write("app.log", b"one\n")
    disk.look()
    assert from_json(as_json(disk.lives)) == disk.lives
    with pytest.raises(MalformedData, match="they are not what"):
        from_json([{"path": "a"}])
