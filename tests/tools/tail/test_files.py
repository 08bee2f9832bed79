"""Followed files on a disk, and the file that keeps their positions."""

from __future__ import annotations

from pathlib import Path

import pytest

from pixiu.errors import ConfigurationError, InvalidArgument
from tools.tail.files import Files, read_at


def test_wrong_files_are_named_with_what_to_do(tmp_path: Path) -> None:
    wrong = ((tmp_path / "nosuch", "there is no file"), (tmp_path, "is a folder"), (tmp_path / "*.log", "there is no"))
    for pattern, text in wrong:
        with pytest.raises(InvalidArgument, match=text):
            Files([str(pattern)], tmp_path / "p")
    (tmp_path / "app.log").touch()
    (tmp_path / "p").write_text("{")
    with pytest.raises(ConfigurationError, match="remove it to begin again"):
        Files([str(tmp_path / "app.log")], tmp_path / "p")
    with pytest.raises(ConfigurationError, match="give --positions"):
        Files([str(tmp_path / "app.log")], tmp_path / "app.log" / "p")


def test_two_processes_do_not_share_positions(tmp_path: Path) -> None:
    (tmp_path / "app.log").touch()
    found = Files([str(tmp_path / "app.log")], tmp_path / "p")
    with pytest.raises(ConfigurationError, match="another `pixiu tail` uses it"):
        Files([str(tmp_path / "app.log")], tmp_path / "p")
    found.close()
    Files([str(tmp_path / "app.log")], tmp_path / "p").close()


def test_a_rotated_file_cannot_be_removed_before_it_is_stored_also_through_a_restart(tmp_path: Path) -> None:
    log, rotated = tmp_path / "app.log", tmp_path / "app.log.1"
    log.write_bytes(b"one\n")
    found = Files([str(tmp_path / "*.log")], tmp_path / "p")
    found.look()
    found.stored([(found.lives[0].writer, 4)])
    with open(log, "ab") as file:
        file.write(b"two\n")
    log.rename(rotated)
    log.write_bytes(b"three\n")
    found.look()
    rotated.unlink()
    found.close()
    found = Files([str(tmp_path / "*.log")], tmp_path / "p")
    assert not found.look().lost
    old, new = found.lives
    assert (read_at(old, old.position, 99), read_at(new, new.position, 99)) == (b"two\n", b"three\n")
    found.stored([(old.writer, 8)])
    found.look()
    assert ([life.writer for life in found.lives], [path.name for path in (tmp_path / "p.spill").iterdir()]) == (
        [new.writer], ["lock"],
    )  # fmt: skip
    found.close()
