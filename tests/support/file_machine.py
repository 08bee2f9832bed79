"""A base of tests' state machines: the state is in memory, and in a file every so many entries."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.replication.model import Entry

FLUSH_EVERY = 100
NAME = "state.json"


class FileMachine:
    """What of `StateMachine` is the same for all of them."""

    clock_us = 0

    def __init__(self, folder: Path) -> None:
        self._file = folder / NAME
        self.flushed = 0

    @property
    def applied(self) -> int:
        """Counter of the last entry in the state."""
        raise NotImplementedError

    def _dumped(self) -> Any:
        """The state, as JSON."""
        raise NotImplementedError

    def _restore(self, found: Any) -> None:
        """The state is this one, which was dumped."""
        raise NotImplementedError

    def open(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        if self._file.exists():
            self._read()

    def _read(self) -> None:
        self._restore(json.loads(self._file.read_text()))
        self.flushed = self.applied

    def _write(self, file: Path) -> None:
        fresh = file.with_suffix(".new")
        with open(fresh, "w") as out:
            json.dump(self._dumped(), out)
            out.flush()
            os.fsync(out.fileno())
        fresh.rename(file)

    def _flush(self) -> None:
        if self.applied >= self.flushed + FLUSH_EVERY:
            with contextlib.suppress(OSError):  # a full disk: the log keeps it until there is space
                self._write(self._file)
                self.flushed = self.applied

    def look_ahead(self, entries: Sequence[Entry]) -> None:
        raise AssertionError

    async def snapshot(self, folder: Path) -> int:
        self._write(folder / NAME)
        return self.applied

    async def check(self, folder: Path) -> None:
        json.loads((folder / NAME).read_text())

    async def load(self, folder: Path) -> None:
        fresh = self._file.with_suffix(".new")
        shutil.copyfile(folder / NAME, fresh)
        with open(fresh, "rb") as file:
            os.fsync(file.fileno())
        fresh.rename(self._file)
        self._read()
