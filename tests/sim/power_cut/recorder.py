"""Records writes, syncs and changes of names below one folder, whoever makes them: Python, LMDB or RocksDB.

A library in front of libc's, by LD_PRELOAD (`recorder.c`); needs Linux and `cc`. It keeps what happened in order, in memory. Syncs
are noted and not made, since `tests.sim.power_cut.disk` alone decides what is durable. Writes to mapped memory are not seen: of a
replica's files only LMDB's lock file is written so, which counts for nothing after a start. RocksDB's text log (`LOG`) is left out.
"""

from __future__ import annotations

import ctypes
import enum
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tests.support.interposed import compiled

HEAD: Final = struct.Struct("<BxxxIIIqq")
"""Kind, bytes of the first path, of the second, of the data, number of the inode, and what the kind says."""
SOURCE: Final = Path(__file__).with_name("recorder.c")


class Kind(enum.IntEnum):
    """What happened."""

    OPENED = 1
    """A file has a number, is new (1), was emptied (2)."""
    WRITTEN = 2
    RESIZED = 3
    GROWN = 4
    """It is at least so large."""
    SYNCED = 5
    """The path is that by which the file was opened."""
    NAMES_SYNCED = 6
    RENAMED = 7
    UNLINKED = 8
    LINKED = 9
    MADE = 10
    REMOVED = 11
    NOTED = 12
    """The harness said something by its number."""


class Operation(NamedTuple):
    """One call. `path` and `other` are relative to the folder."""

    kind: Kind
    inode: int
    value: int
    path: str
    other: str
    data: bytes


class Recorder:
    """The library in this process. Raises RuntimeError where the process was not started with it."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        if not hasattr(self._library, "recorder_begin"):
            raise RuntimeError("this process was not started with the recorder; use `python -m tests.sim.power_cut.run`")
        self._library.recorder_begin.argtypes = [ctypes.c_char_p]
        self._library.recorder_note.argtypes = [ctypes.c_int64]
        self._library.recorder_end.restype = ctypes.c_size_t
        self._folder = ""

    def begin(self, folder: Path) -> None:
        """Record what happens below a folder, which holds no open file."""
        self._folder = str(folder)
        self._library.recorder_begin(self._folder.encode())

    def note(self, number: int) -> None:
        """Say something between two calls."""
        self._library.recorder_note(number)

    def end(self) -> list[Operation]:
        """Record nothing more; what happened."""
        found = ctypes.POINTER(ctypes.c_uint8)()
        size = self._library.recorder_end(ctypes.byref(found))
        return list(self._decoded(ctypes.string_at(found, size)))

    def _decoded(self, data: bytes) -> Iterator[Operation]:
        at, skip = 0, len(self._folder) + 1
        while at < len(data):
            kind, one, two, size, inode, value = HEAD.unpack_from(data, at)
            at += HEAD.size
            path, other = data[at : at + one].decode(), data[at + one : at + one + two].decode()
            at += one + two
            yield Operation(Kind(kind), inode, value, path[skip:], other[skip:], data[at : at + size])
            at += size


def environment(compiled_library: Path) -> dict[str, str]:
    """Of a process with the library. Sets are in the same order in each."""
    return os.environ | {"LD_PRELOAD": str(compiled_library), "PYTHONHASHSEED": "0"}


def library(folder: Path) -> Path:
    """Compile the library into a folder. Raises RuntimeError where there is no C compiler."""
    return compiled(SOURCE.read_text(), folder, "recorder")
