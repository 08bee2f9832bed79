"""The files of a store: what it asks of a file system, and the one of the machine.

Source: docs/topics.md, "How it is stored".
"""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from pixiu.errors import DiskFailed, DiskFull, MalformedData

MAX_OPEN: Final = 256
"""Files that stay open after use. Policy: the one that was used least recently is closed."""
UNREADABLE: Final = frozenset({errno.EIO, errno.EBADMSG})
NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class Files(Protocol):
    """Files below one folder, by relative paths with `/`. A change is durable after a sync: of the file for its bytes and size,
    of its folder for its name."""

    def names(self, folder: str) -> list[str]:
        """The names in a folder, sorted; none if there is no such folder."""

    def make_folder(self, folder: str) -> None:
        """Make a folder, whose parent is there; it may exist."""

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

    def rename(self, path: str, to: str) -> None:
        """Give a file the name of another one, which is gone then. Raises DiskFailed."""

    def remove(self, path: str) -> None:
        """Remove a file; it may be gone."""

    def remove_folder(self, folder: str) -> None:
        """Remove a folder and its files; it may be gone."""

    def sync(self, path: str) -> None:
        """Make a file's bytes durable. Raises DiskFailed."""

    def sync_folder(self, folder: str) -> None:
        """Make the names in a folder durable. Raises DiskFailed."""


@dataclass(slots=True)
class _Open:
    """A file that is open."""

    descriptor: int
    users: int = 0
    gone: bool = False
    """True if the last user closes it."""


class DiskFiles:
    """Files of this machine. May be used by several threads.

    Args:
        root: the folder; it exists.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._lock = threading.Lock()

    def names(self, folder: str) -> list[str]:
        """See `Files`."""
        path = self.root / folder
        return sorted(os.listdir(path)) if path.is_dir() else []

    def make_folder(self, folder: str) -> None:
        """See `Files`. Raises DiskFull, DiskFailed."""
        with self._telling(folder):
            (self.root / folder).mkdir(exist_ok=True)

    def create(self, path: str) -> None:
        """See `Files`. Raises DiskFull, DiskFailed."""
        with self._telling(path), self._opened(path, os.O_CREAT) as descriptor:
            os.ftruncate(descriptor, 0)

    def size(self, path: str) -> int:
        """See `Files`."""
        return (self.root / path).stat().st_size

    def read(self, path: str, offset: int, size: int) -> bytes:
        """See `Files`."""
        try:
            with self._opened(path) as descriptor:
                return os.pread(descriptor, size, offset)
        except FileNotFoundError as problem:
            raise MalformedData(f"{path}: it is not there") from problem
        except OSError as problem:
            if problem.errno not in UNREADABLE:
                raise
            raise MalformedData(f"{path}: the disk cannot read byte {offset}: {problem.strerror}") from problem

    def write(self, path: str, offset: int, data: bytes) -> None:
        """See `Files`."""
        written = 0
        with self._telling(path), self._opened(path) as descriptor:
            while written < len(data):
                written += os.pwrite(descriptor, memoryview(data)[written:], offset + written)

    def truncate(self, path: str, size: int) -> None:
        """See `Files`."""
        with self._telling(path), self._opened(path) as descriptor:
            os.ftruncate(descriptor, size)

    def rename(self, path: str, to: str) -> None:
        """See `Files`."""
        self._close(path)
        with self._telling(to):
            (self.root / path).replace(self.root / to)
        self._close(to)

    def remove(self, path: str) -> None:
        """See `Files`. Raises DiskFailed."""
        self._close(path)
        with self._telling(path):
            (self.root / path).unlink(missing_ok=True)

    def remove_folder(self, folder: str) -> None:
        """See `Files`. Raises DiskFailed."""
        for name in self.names(folder):
            self.remove(f"{folder}/{name}")
        with self._telling(folder), suppress(FileNotFoundError):
            (self.root / folder).rmdir()

    def sync(self, path: str) -> None:
        """See `Files`."""
        with self._telling(path), self._opened(path) as descriptor:
            os.fdatasync(descriptor)

    def sync_folder(self, folder: str) -> None:
        """See `Files`."""
        with self._telling(folder):
            descriptor = os.open(self.root / folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def close(self) -> None:
        """Close all files."""
        for path in list(self._open):
            self._close(path)

    @contextmanager
    def _telling(self, path: str) -> Iterator[None]:
        """Raises DiskFull, DiskFailed in place of what the system says of a change."""
        try:
            yield
        except OSError as problem:
            if problem.errno in NO_SPACE:
                raise DiskFull(f"{self.root}: no space left for topics; free some, then writes continue") from problem
            raise DiskFailed(f"{self.root / path}: {problem.strerror}") from problem

    @contextmanager
    def _opened(self, path: str, flags: int = 0) -> Iterator[int]:
        """The file's descriptor, which nobody closes meanwhile."""
        with self._lock:
            found = self._open.get(path)
            if found is None:
                found = self._open[path] = _Open(os.open(self.root / path, os.O_RDWR | os.O_CLOEXEC | flags, 0o644))
            found.users += 1
            self._open.move_to_end(path)
            if len(self._open) > MAX_OPEN:
                self._release(self._open.popitem(last=False)[1])
        try:
            yield found.descriptor
        finally:
            with self._lock:
                found.users -= 1
                if found.gone:
                    self._release(found)

    def _close(self, path: str) -> None:
        with self._lock:
            found = self._open.pop(path, None)
            if found is not None:
                self._release(found)

    @staticmethod
    def _release(found: _Open) -> None:
        """Close a file that nobody uses; else its last user does."""
        found.gone = True
        if not found.users:
            os.close(found.descriptor)
