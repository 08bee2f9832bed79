"""The files of a store: what it asks of a file system, and the one of the machine.

Source: docs/topics.md, "How it is stored".
"""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from pathlib import Path
from typing import Final, Protocol

from pixiu.errors import DiskFailed, DiskFull, MalformedData

MAX_OPEN: Final = 256
"""Files that are open at a time. Policy: the one that was used least recently is closed."""
UNREADABLE: Final = frozenset({errno.EIO, errno.EBADMSG})
NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class Files(Protocol):
    """Files below one folder, by relative paths with `/`. A change is durable after a sync: of the file for its bytes and size,
    of its folder for its name."""

    def names(self, folder: str) -> list[str]:
        """The names in a folder, sorted; none if there is no such folder."""

    def make_folder(self, folder: str) -> None:
        """Make a folder, whose parent is there, durably; it may exist."""

    def create(self, path: str) -> None:
        """Make an empty file, or empty it."""

    def size(self, path: str) -> int:
        """Size of a file."""

    def read(self, path: str, offset: int, size: int) -> bytes:
        """Read at most `size` bytes. Raises MalformedData for what the disk cannot read."""

    def write(self, path: str, offset: int, data: bytes) -> None:
        """Write all bytes. Raises DiskFull, DiskFailed; the file may then be longer than before."""

    def truncate(self, path: str, size: int) -> None:
        """Cut a file to a size. Raises DiskFailed."""

    def remove(self, path: str) -> None:
        """Remove a file."""

    def sync(self, path: str) -> None:
        """Make a file's bytes durable. Raises DiskFailed."""

    def sync_folder(self, folder: str) -> None:
        """Make the names in a folder durable. Raises DiskFailed."""


class DiskFiles:
    """Files of this machine.

    Args:
        root: the folder; it exists.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._open: OrderedDict[str, int] = OrderedDict()

    def names(self, folder: str) -> list[str]:
        """See `Files`."""
        path = self._root / folder
        return sorted(os.listdir(path)) if path.is_dir() else []

    def make_folder(self, folder: str) -> None:
        """See `Files`."""
        path = self._root / folder
        if not path.is_dir():
            path.mkdir()
            self.sync_folder(str(Path(folder).parent))

    def create(self, path: str) -> None:
        """See `Files`."""
        os.ftruncate(self._descriptor(path, os.O_CREAT), 0)

    def size(self, path: str) -> int:
        """See `Files`."""
        return os.fstat(self._descriptor(path)).st_size

    def read(self, path: str, offset: int, size: int) -> bytes:
        """See `Files`."""
        try:
            return os.pread(self._descriptor(path), size, offset)
        except OSError as problem:
            if problem.errno not in UNREADABLE:
                raise
            raise MalformedData(f"{path}: the disk cannot read byte {offset}: {problem.strerror}") from problem

    def write(self, path: str, offset: int, data: bytes) -> None:
        """See `Files`."""
        descriptor, written = self._descriptor(path), 0
        try:
            while written < len(data):
                written += os.pwrite(descriptor, memoryview(data)[written:], offset + written)
        except OSError as problem:
            if problem.errno in NO_SPACE:
                raise DiskFull(f"{self._root}: no space left for topics; free some, then writes continue") from problem
            raise DiskFailed(f"{path}: {problem.strerror}") from problem

    def truncate(self, path: str, size: int) -> None:
        """See `Files`."""
        try:
            os.ftruncate(self._descriptor(path), size)
        except OSError as problem:
            raise DiskFailed(f"{path}: {problem.strerror}") from problem

    def remove(self, path: str) -> None:
        """See `Files`."""
        if (descriptor := self._open.pop(path, None)) is not None:
            os.close(descriptor)
        (self._root / path).unlink(missing_ok=True)

    def sync(self, path: str) -> None:
        """See `Files`."""
        try:
            os.fdatasync(self._descriptor(path))
        except OSError as problem:
            raise DiskFailed(f"{path}: {problem.strerror}") from problem

    def sync_folder(self, folder: str) -> None:
        """See `Files`."""
        descriptor = os.open(self._root / folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as problem:
            raise DiskFailed(f"{folder}: {problem.strerror}") from problem
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Close all files."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def _descriptor(self, path: str, flags: int = 0) -> int:
        descriptor = self._open.get(path)
        if descriptor is None:
            descriptor = self._open[path] = os.open(self._root / path, os.O_RDWR | flags, 0o644)
            if len(self._open) > MAX_OPEN:
                os.close(self._open.popitem(last=False)[1])
        self._open.move_to_end(path)
        return descriptor
