"""An object store that can be told to fail: a folder behind fsspec's interface, `faulty:///folder`, for `topic_store.py`.

The file that `PIXIU_FAULTY_FILES` names has the share of calls that answer 503, 0 to 1; half of these happen all the same.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fsspec import AbstractFileSystem, register_implementation
from fsspec.implementations.local import LocalFileSystem

from tests.support.forked_pixiu import FORKED_IMPORT

VARIABLE = "PIXIU_FAULTY_FILES"
Found = TypeVar("Found")


class FaultyFiles(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """The calls that topics use."""

    protocol = "faulty"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._files = LocalFileSystem(auto_mkdir=True)

    def _try(self, work: Callable[[], Found]) -> Found:
        share = float(Path(os.environ[VARIABLE]).read_text() or 1)
        fails = random.random() < share
        if fails and (share == 1.0 or random.random() < 0.5):
            raise OSError("503 Slow Down")
        found = work()
        if fails:
            raise OSError("503 Slow Down, after all")
        return found

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        """Write a file."""
        self._try(lambda: self._files.pipe_file(self._strip_protocol(path), value, mode=mode))

    def cat_file(self, path: str, **options: Any) -> bytes:
        """Read a file."""
        return bytes(self._try(lambda: self._files.cat_file(self._strip_protocol(path))))

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        """List a folder."""
        return list(self._try(lambda: self._files.ls(self._strip_protocol(path), detail=detail)))

    def rm_file(self, path: str) -> None:
        """Remove a file."""
        self._try(lambda: self._files.rm_file(self._strip_protocol(path)))


register_implementation("faulty", FaultyFiles, clobber=True)


def environment(folder: Path) -> dict[str, str]:
    """Make the file of faults; there are none yet. Returns what a cluster's processes need to know `faulty:`."""
    faults = folder / "faults"
    faults.write_text("0")
    return {VARIABLE: str(faults), FORKED_IMPORT: __name__}
