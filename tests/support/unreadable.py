"""Sectors that a disk cannot read: reads of them fail with EIO, a write or a cut makes them good again."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest


class Unreadable:
    """Bytes of files that cannot be read while a test runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._bad: dict[str, int] = {}
        pread, ftruncate, read_bytes = os.pread, os.ftruncate, Path.read_bytes

        def reading(fd: int, size: int, offset: int) -> bytes:
            place = self._bad.get(os.readlink(f"/proc/self/fd/{fd}"))
            if place is not None and offset <= place < offset + size:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return pread(fd, size, offset)

        def cutting(fd: int, size: int) -> None:
            path = os.readlink(f"/proc/self/fd/{fd}")
            if size <= self._bad.get(path, -1):
                del self._bad[path]
            ftruncate(fd, size)

        def reading_all(path: Path) -> bytes:
            if path.name == "label" and str(path) in self._bad:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return read_bytes(path)

        monkeypatch.setattr(os, "pread", reading)
        monkeypatch.setattr(os, "ftruncate", cutting)
        monkeypatch.setattr(Path, "read_bytes", reading_all)

    def spoil(self, path: Path, offset: int) -> None:
        """This byte cannot be read any more."""
        self._bad[str(path)] = offset

    def clear(self) -> None:
        """All of it was met, and written anew or removed."""
        self._bad.clear()
