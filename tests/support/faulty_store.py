"""An object store that fails as real ones do: 503 before or after the effect, or away. Over fsspec's interface."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, TypeVar

from fsspec.implementations.memory import MemoryFileSystem

from pixiu.objects.store import ObjectStore

Found = TypeVar("Found")
URL = "memory://store"


class FaultyFiles:
    """The calls of fsspec's file systems that topics use, over a memory of its own.

    Args:
        chance: of a failure of each call; half of them happen all the same, and only their answer is lost.
    """

    protocol = "faulty"

    def __init__(self, chance: float = 0.0, seed: int = 1) -> None:
        self._files = MemoryFileSystem()
        self._files.store, self._files.pseudo_dirs = {}, [""]  # fsspec shares them among all others
        self.chance, self.away = chance, False
        self._random = random.Random(seed)
        self.calls = self.failures = 0

    def _try(self, work: Callable[[], Found]) -> Found:
        self.calls += 1
        fails = self.away or self._random.random() < self.chance
        if fails and (self.away or self._random.random() < 0.5):
            self.failures += 1
            raise OSError("503 Slow Down")
        found = work()
        if fails:
            self.failures += 1
            raise OSError("503 Slow Down, after all")
        return found

    def pipe_file(self, path: str, data: bytes, mode: str = "overwrite") -> None:
        self._try(lambda: self._files.pipe_file(path, data, mode=mode))

    def cat_file(self, path: str) -> bytes:
        return bytes(self._try(lambda: self._files.cat_file(path)))

    def ls(self, path: str, detail: bool = False) -> list[Any]:
        return list(self._try(lambda: self._files.ls(path, detail=detail)))

    def rm_file(self, path: str) -> None:
        self._try(lambda: self._files.rm_file(path))

    def invalidate_cache(self) -> None:
        """Nothing is cached."""


def faulty_store(chance: float = 0.0, seed: int = 1) -> tuple[ObjectStore, FaultyFiles]:
    """A store, and its faults."""
    files = FaultyFiles(chance, seed)
    return ObjectStore(URL, (files, "/store")), files
