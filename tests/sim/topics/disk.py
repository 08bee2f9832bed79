"""A group's files and table in memory, over what a power cut leaves of them: the disk of the power-cut simulation.

Both fail when they are told to: a change finds no space, or the disk does not take it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from pixiu.errors import DiskFailed, MalformedData, PixiuError
from tests.sim.power_cut.disk import Disk, File, Folder, Left
from tests.sim.power_cut.recorder import Kind, Operation
from topic.storage.keys import KEY, Sweep


class MemoryFiles:
    """`topic.storage.files.Files` over a simulated disk. Operations are counted."""

    def __init__(self, disk: Disk | None = None) -> None:
        self.disk = disk or Disk()
        self.operations = 0
        self._inode = 0
        self.fails: tuple[int, PixiuError] | None = None
        """After how many operations one fails, and how."""

    def count(self) -> None:
        """An operation begins. Raises what it is to fail with."""
        self.operations += 1
        if self.fails is not None and self.operations > self.fails[0]:
            raise self.fails[1]

    def _do(self, kind: Kind, path: str, value: int = 0) -> None:
        """Raises DiskFailed where something is missing, as the system would."""
        self._inode += 1
        self.count()
        try:
            self.disk.do(Operation(kind, self._inode, value, path, "", b""))
        except KeyError as problem:
            raise DiskFailed(f"{path}: it is not there") from problem

    def _file(self, path: str) -> File:
        """Raises DiskFailed where there is none."""
        try:
            found = self.disk.find(path)
        except KeyError as problem:
            raise DiskFailed(f"{path}: it is not there") from problem
        assert isinstance(found, File)
        return found

    def names(self, folder: str) -> list[str]:
        try:
            found = self.disk.find(folder)
        except KeyError:
            return []
        assert isinstance(found, Folder)
        return sorted(found.now)

    def make_folder(self, folder: str) -> None:
        parent, _, name = folder.rpartition("/")
        if name not in self.names(parent):
            self._do(Kind.MADE, folder)

    def create(self, path: str) -> None:
        folder, _, name = path.rpartition("/")
        if name in self.names(folder):
            self._file(path).do(0)
        else:
            self._do(Kind.OPENED, path, 1)

    def size(self, path: str) -> int:
        return len(self._file(path).now)

    def read(self, path: str, offset: int, size: int) -> bytes:
        try:
            return bytes(self._file(path).now[offset : offset + size])
        except DiskFailed as problem:
            raise MalformedData(str(problem)) from problem

    def write(self, path: str, offset: int, data: bytes) -> None:
        self.count()
        self._file(path).do((offset, data))

    def truncate(self, path: str, size: int) -> None:
        self.count()
        self._file(path).do(size)

    def rename(self, path: str, to: str) -> None:
        self._inode += 1
        self.operations += 1
        self.disk.do(Operation(Kind.RENAMED, self._inode, 0, path, to, b""))

    def remove(self, path: str) -> None:
        self._do(Kind.UNLINKED, path)

    def remove_folder(self, folder: str) -> None:
        for name in self.names(folder):
            self.remove(f"{folder}/{name}")
        self._do(Kind.REMOVED, folder)

    def sync(self, path: str) -> None:
        self.count()
        self._file(path).sync()

    def sync_folder(self, folder: str) -> None:
        self._do(Kind.NAMES_SYNCED, folder)

    def cut(self, left: Left, rng: random.Random) -> MemoryFiles:
        """The files after a kill (`Left.ALL`) or a power cut."""
        return MemoryFiles(self.disk.cut(left, rng))


class MemoryTable:
    """`topic.storage.store.Table`: a transaction is there whole, or not at all."""

    def __init__(self, rows: Mapping[bytes, bytes] | None = None, position: tuple[int, int] = (0, 0)) -> None:
        self.rows = dict(rows or {})
        self.position = position
        self.before: Callable[[], None] = lambda: None
        """Called before a transaction; what it raises is what the disk says."""

    def read(self) -> tuple[Mapping[bytes, bytes], int, int]:
        return {key: value for key, value in self.rows.items() if key[:1] != KEY}, *self.position

    def get(self, key: bytes) -> bytes | None:
        return self.rows.get(key)

    def sweep(self, prefix: bytes, goes: Sweep) -> None:
        for key in [key for key, value in self.rows.items() if key.startswith(prefix) and goes(value)]:
            del self.rows[key]

    def write(self, changes: Sequence[tuple[bytes, bytes | None]], applied: int, clock_us: int) -> None:
        self.before()
        for key, value in changes:
            if value is None:
                self.rows.pop(key, None)
            else:
                self.rows[key] = value
        self.position = applied, clock_us

    def copy(self) -> MemoryTable:
        return MemoryTable(self.rows, self.position)
