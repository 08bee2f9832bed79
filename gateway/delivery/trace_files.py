"""Finished traces in files: JSON lines for later analysis, bounded in size and number.

    trace_dir/.traces-1764000000000-0123456789abcdef-000002.jsonl     being written
    trace_dir/traces-1764000000000-0123456789abcdef-000001.jsonl      complete: never changes again

A reader takes the complete files; the name of an unfinished one begins with a dot, which Spark and shells leave out. Several
gateways may write to one folder. A file left by a killed gateway is completed by the next one that starts or begins a file.

Source: docs/architecture.md, "Probes and traces", docs/promises.md, "Failure rules" 5 (a full disk is reported, serving goes on).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final

from pixiu.errors import ConfigurationError
from pixiu.wire.trace import trace_json

MAX_WAITING: Final = 10_000
"""Traces that wait for the disk; those beyond it are dropped and counted."""
MAX_A_WRITE: Final = 1_000
BLOCK: Final = 65_536
"""Bytes of a file read at once in the search for its last whole line."""
LOOK_S: Final = 1.0
"""Interval between two checks of a file's age, seconds."""
CLOSE_TIMEOUT_S: Final = 5.0
"""Time limit for the last write at the end, seconds."""


class TraceFiles:
    """The files of one gateway. Synchronous: for one thread.

    Args:
        folder: created if missing.
        name: of this gateway, in the names of its files.
        file_bytes: most bytes in a file.
        max_files: complete files in the folder, of all gateways; the oldest are removed.
        file_s: a file is complete after this number of seconds at the latest.
        clock_ms: Unix milliseconds.

    Raises `ConfigurationError` if the folder cannot be used.
    """

    def __init__(
        self, folder: Path, name: str, *, file_bytes: int, max_files: int, file_s: float, clock_ms: Callable[[], int]
    ) -> None:
        self._folder, self._name = folder, name
        self._file_bytes, self._max_files, self._file_ms = file_bytes, max_files, int(file_s * 1000)
        self._clock_ms = clock_ms
        self._file: BinaryIO | None = None
        self._path = folder
        self._size = 0
        self._began_ms = 0
        self._number = 0
        self.lines = 0
        self.malformed = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._begin()
        except OSError as error:
            text = f"gateway.trace_dir = {folder}: traces cannot be written there: {error.strerror}; choose another folder"
            raise ConfigurationError(text) from None

    def write(self, records: list[bytes]) -> None:
        """Write finished records. Raises OSError; then the files are whole, and nothing or a part of it is written."""
        chunk: list[bytes] = []
        size = 0
        for record in records:
            trace = trace_json(record)
            if trace is None:
                self.malformed += 1
                continue
            line = json.dumps(trace, separators=(",", ":")).encode() + b"\n"
            if self._size + size + len(line) > self._file_bytes and self._size + size:
                self._append(chunk)
                self.complete()
                chunk, size = [], 0
            chunk.append(line)
            size += len(line)
        self._append(chunk)

    def look(self) -> None:
        """Complete a file that is old enough. Raises OSError."""
        if self._size and self._clock_ms() - self._began_ms >= self._file_ms:
            self.complete()

    def complete(self) -> None:
        """End the unfinished file, and remove the oldest ones. Raises OSError."""
        file, self._file = self._file, None
        if file is not None:
            with file:
                _publish(file, self._path)
        self._size = 0
        for old in sorted(self._folder.glob("traces-*.jsonl"))[: -self._max_files]:
            old.unlink(missing_ok=True)

    def _begin(self) -> None:
        self._adopt()
        self._number += 1
        self._began_ms, self._size = self._clock_ms(), 0
        self._path = self._folder / f".traces-{self._began_ms:013d}-{self._name}-{self._number:06d}.jsonl"
        file = open(self._path, "w+b", buffering=0)  # noqa: SIM115 (kept open)
        fcntl.flock(file, fcntl.LOCK_EX)
        self._file = file

    def _append(self, lines: list[bytes]) -> None:
        if not lines:
            return
        if self._file is None:
            self._begin()
        file = self._file
        assert file is not None
        data = memoryview(b"".join(lines))
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            # A full disk: leave no torn line.
            with contextlib.suppress(OSError):
                file.truncate(self._size)
                file.seek(self._size)
            raise
        self._size = file.tell()
        self.lines += len(lines)

    def _adopt(self) -> None:
        """Complete the files of killed gateways: nobody holds their lock."""
        for path in sorted(self._folder.glob(".traces-*.jsonl")):
            with contextlib.suppress(OSError), open(path, "r+b", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _publish(file, path)


def _publish(file: BinaryIO, path: Path) -> None:
    """Give a file its name for readers, without a torn last line; remove an empty one."""
    size = _end_of_lines(file)
    file.truncate(size)
    if size:
        path.rename(path.with_name(path.name.removeprefix(".")))
    else:
        path.unlink()


def _end_of_lines(file: BinaryIO) -> int:
    """Length of the whole lines of a file, bytes."""
    end = file.seek(0, os.SEEK_END)
    while end:
        begin = max(end - BLOCK, 0)
        file.seek(begin)
        found = file.read(end - begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0


class TraceWriter:
    """Writes traces after the deliveries, in a thread of its own. Use it from the event loop."""

    def __init__(self, files: TraceFiles) -> None:
        self._files = files
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="traces")
        self._waiting: list[bytes] = []
        self._wake = asyncio.Event()
        self._closing = False
        self.dropped = 0
        """Traces dropped because too many waited."""
        self.failed = 0
        """Traces that could not be written."""
        self.problem = ""
        """Reason why the last ones could not be written; empty if they were."""
        self._task = asyncio.create_task(self._run(), name="traces")

    def put(self, records: list[bytes]) -> None:
        """Write finished records soon."""
        room = MAX_WAITING - len(self._waiting)
        self.dropped += max(len(records) - room, 0)
        self._waiting += records[:room]
        self._wake.set()

    async def close(self) -> None:
        """Write everything that waits, and complete the file."""
        self._closing = True
        self._wake.set()
        await asyncio.wait({self._task}, timeout=CLOSE_TIMEOUT_S)
        self._task.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def samples(self) -> dict[str, float]:
        """Samples for metrics."""
        return {
            "traces_written_total": self._files.lines,
            "traces_dropped_total": self.dropped,
            "traces_failed_total": self.failed,
        }

    async def _run(self) -> None:
        while not (self._closing and not self._waiting):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                part, self._waiting = self._waiting[:MAX_A_WRITE], self._waiting[MAX_A_WRITE:]
                await self._try(partial(self._files.write, part), len(part))
            await self._try(self._files.look, 0)
        await self._try(self._files.complete, 0)

    async def _try(self, call: Callable[[], None], records: int) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, call)
        except OSError as error:
            self.failed += records
            self.problem = f"traces cannot be written: {error.strerror}"
        else:
            if records:
                self.problem = ""


def open_traces(folder: str, name: str, file_mb: int, max_files: int, file_s: float) -> TraceWriter | None:
    """Open the writer for a gateway's options; None: no traces are kept. Raises `ConfigurationError`."""
    if not folder:
        return None
    return TraceWriter(
        TraceFiles(
            Path(folder),
            name,
            file_bytes=file_mb << 20,
            max_files=max_files,
            file_s=file_s,
            clock_ms=lambda: time.time_ns() // 1_000_000,
        )
    )
