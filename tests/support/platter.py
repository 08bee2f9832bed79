"""What a power cut leaves of a folder: a copy of each file as of its last sync, under the names as of the folder's last sync."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest


class Platter:
    """Shadows a folder from now on.

    Args:
        folder: need not exist yet.
        shadow: the copy's folder, where a process may be started as after a power cut.
        monkeypatch: takes the place of the two system calls, which are still made.
    """

    def __init__(self, folder: Path, shadow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.shadow = folder, shadow
        shadow.mkdir(parents=True, exist_ok=True)
        data, names = os.fdatasync, os.fsync

        def fdatasync(fd: int) -> None:
            data(fd)
            self._synced(fd)

        def fsync(fd: int) -> None:
            names(fd)
            self._synced(fd)

        monkeypatch.setattr(os, "fdatasync", fdatasync)
        monkeypatch.setattr(os, "fsync", fsync)

    def _synced(self, fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path == self.folder:
            self._names_synced()
        elif path.parent == self.folder and path.is_file():
            shutil.copyfile(path, self.shadow / path.name)

    def _names_synced(self) -> None:
        there = {path.name for path in self.folder.iterdir()}
        for path in self.shadow.iterdir():
            if path.name not in there:
                path.unlink()
        for name in there:
            (self.shadow / name).touch()
