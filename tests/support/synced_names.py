"""The names that a power cut would leave in folders: those that were there at each folder's last sync."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest


class SyncedNames:
    """Watches syncs from now on. monkeypatch: takes the place of the system call, which is still made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files: set[tuple[int, int]] = set()
        """(inode, size) of each file that was synced."""
        self._names: dict[Path, set[str]] = {}
        fsync = os.fsync

        def watched(fd: int) -> None:
            fsync(fd)
            found = os.fstat(fd)
            if stat.S_ISDIR(found.st_mode):
                path = Path(os.readlink(f"/proc/self/fd/{fd}"))
                self._names[path] = {each.name for each in path.iterdir()}
            else:
                self.files.add((found.st_ino, found.st_size))

        monkeypatch.setattr(os, "fsync", watched)

    def keep(self, path: Path, above: Path) -> bool:
        """Return True if a power cut leaves a file with its content, and its folder, below one that was there before."""
        found = path.stat()
        folders = [folder for folder in path.parents if folder != above and folder.is_relative_to(above)]
        names = all(each.name in self._names.get(each.parent, ()) for each in (path, *folders))
        return names and (found.st_ino, found.st_size) in self.files
