"""Log files of a support bundle: what is no file of its own folder, and what cannot be read, is named and left out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ops.support.bundle_command import MIB, Bundle, add_logs, known_secrets, leave_out_texts
from pixiu.errors import InvalidArgument


def test_links_and_what_is_no_file_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    (tmp_path / "shadow").write_text("root:secret")
    (folder / "shadow.log").symlink_to(tmp_path / "shadow")
    (folder / "gone.log").symlink_to(tmp_path / "nothing")
    (folder / "proxy.log").write_text("a line\n")
    (folder / "folder.log").mkdir()
    os.mkfifo(folder / "pipe.log")
    bundle = Bundle()
    add_logs(bundle, folder, MIB)
    assert bundle.files == {"logs/proxy.log": b"a line\n"}
    link = "is a symbolic link, and was not followed; give --logs the folder of the file itself"
    assert bundle.left_out == [
        f"{folder}/folder.log: is no regular file",
        f"{folder}/gone.log: {link}",
        f"{folder}/pipe.log: is no regular file",
        f"{folder}/shadow.log: {link}",
    ]


def test_a_file_that_becomes_a_link_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shadow").write_text("root:secret")
    (tmp_path / "a.log").symlink_to(tmp_path / "shadow")
    monkeypatch.setattr(Path, "lstat", Path.stat)  # it was a file when it was looked at
    bundle = Bundle()
    add_logs(bundle, tmp_path, MIB)
    assert bundle.files == {}
    assert bundle.left_out == [f"{tmp_path}/a.log: cannot be read: Too many levels of symbolic links"]


@pytest.mark.parametrize("below", ["", "logs"])
def test_a_folder_that_cannot_be_read_is_one_sentence(below: str, unprivileged: Path) -> None:
    locked = unprivileged / "locked"
    (locked / "logs").mkdir(parents=True)
    locked.chmod(0o000)
    with pytest.raises(InvalidArgument, match=r"--logs .*: the folder cannot be read: Permission denied; run the command as"):
        add_logs(Bundle(), locked / below, MIB)


@pytest.mark.parametrize("mode", [0o400, 0o700])
def test_a_file_that_cannot_be_read_is_left_out(mode: int, unprivileged: Path) -> None:
    folder = unprivileged / "logs"
    folder.mkdir()
    (folder / "proxy.log").write_text("a line\n")
    (folder / "proxy.log").chmod(0o000)
    folder.chmod(mode)
    bundle = Bundle()
    add_logs(bundle, folder, MIB)
    assert bundle.files == {}
    assert bundle.left_out == [f"{folder}/proxy.log: cannot be read: Permission denied"]


def test_texts_are_left_out_when_a_secret_cannot_be_read(unprivileged: Path) -> None:
    (unprivileged / "keys").mkdir(mode=0o000)
    config, bundle = unprivileged / "pixiu.toml", Bundle()
    _, unread = known_secrets({config: {"cluster": {"key_dir": "keys"}}})
    assert unread == {unprivileged / "keys": "Permission denied"}
    leave_out_texts(bundle, unread, [config])
    assert [text.partition(": ")[0] for text in bundle.left_out] == [f"{unprivileged}/keys", str(config)]
    assert (bundle.files, "run the command as a user who may read them" in bundle.left_out[1]) == ({}, True)
