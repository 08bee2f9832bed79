"""The audit log: security events as JSON lines in a chain of hashes, so that no line can be changed, removed or inserted unnoticed.

    FOLDER/audit.log                  being written; a lock keeps a second process away
    FOLDER/audit-000000000001.log     complete; the number is that of its first line
    FOLDER/refusals.log               a chain of its own, for events that anybody can cause: it never pushes out operators' actions

    {"n": 7, "at": "2026-11-23T04:05:06.789Z", "kind": "promotion", …, "previous": HASH OF LINE 6, "hash": HASH OF THIS ONE}

A line's hash is the BLAKE2b of its text without the hash itself. With it and the line before, everything older is fixed. Somebody
who can write the file can still rebuild a whole chain, or cut off its end: keep the last hash elsewhere (`pixiu audit verify`
prints it, `tell` passes it to the process's log).

Never written: payloads, tokens, passwords, secrets. Values are plain and short.

Source: docs/security.md, "The audit log".
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pixiu.durable import make_directory, sync_directory
from pixiu.errors import ConfigurationError, DiskFailed, MalformedData

OPERATIONS: Final = "audit"
REFUSALS: Final = "refusals"
NAME: Final = f"{OPERATIONS}.log"
FILE_BYTES: Final = 16 << 20
"""Size from which a file is complete and the next one begins."""
FILES: Final = 64
"""Number of complete files that are kept; the oldest go."""
REFUSAL_FILES: Final = 16
"""The same for the chain of refusals."""
MAX_TEXT: Final = 512
"""Maximum characters of a value; the rest is cut off."""
MAX_ITEMS: Final = 128
"""Maximum items of a list or a table."""
MAX_LINE: Final = 1 << 20
LIMITED_S: Final = 1.0
"""Interval between two lines with the same key, for events that anybody can cause."""
MAX_KEYS: Final = 1024
"""Keys that are counted separately in one second; all others together have one line a second."""
OTHERS: Final = ""
"""The key of all others."""
NEVER: Final = frozenset({"payload", "body", "data", "token", "password", "secret", "key", "credential", "private_key"})
"""Fields that no line may have."""
OWN: Final = frozenset({"n", "at", "previous", "hash"})
FIRST: Final = "0" * 64
"""Hash before the very first line."""
TAIL: Final = re.compile(rb', "hash": "([0-9a-f]{64})"\}$')


def _hash(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=32, person=b"pixiu-audit").hexdigest()


def _plain(value: object) -> Any:
    """Convert a value to one that a line may hold."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return value[:MAX_TEXT]
    if isinstance(value, Mapping):
        items = list(value.items())[:MAX_ITEMS]
        assert not NEVER & {str(name) for name, _ in items}, "an audit log has no payloads and no secrets"
        return {str(name)[:MAX_TEXT]: _plain(inner) for name, inner in items}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(inner) for inner in list(value)[:MAX_ITEMS]]
    raise AssertionError(f"an audit log has plain values, and not {type(value).__name__}")


class Audit:
    """Writes one folder's audit log. A line is in the file at once, and on the disk at the end of the event loop's turn.

    Args:
        folder: created if missing. None: nothing is kept, but `tell` still gets every line.
        identity: the writer's identity in each line: role, partition.
        tell: called with each line's kind and fields, for the process's own log; with "audit_failed" and the error when the disk
            fails.

    Raises ConfigurationError when another process writes there, or the folder is unusable.
    """

    def __init__(
        self,
        folder: Path | None,
        identity: Mapping[str, str | int] | None = None,
        tell: Callable[[str, Mapping[str, object]], None] = lambda _kind, _fields: None,
        *,
        file_bytes: int = FILE_BYTES,
        files: int = FILES,
        chain: str = OPERATIONS,
    ) -> None:
        self._folder, self._identity, self._tell, self._chain = folder, dict(identity or {}), tell, chain
        self._file_bytes, self._files = file_bytes, files
        self._file = -1
        self._size = 0
        self._first = self._n = 0
        self._last = FIRST
        self._limited: dict[str, tuple[float, int]] = {}
        self._others: dict[str, tuple[float, int]] = {}
        self.refusals = self
        """The chain of events that anybody can cause."""
        self._syncing: asyncio.Task[None] | None = None
        self._unsynced = False
        self.failures = 0
        """Lines that could not be written or synced."""
        if folder is not None:
            try:
                make_directory(folder)
                self._open()
                sync_directory(folder)  # the name of the first file; its maker may have been killed before that
            except OSError as error:
                raise ConfigurationError(f"the audit log cannot be kept in {folder}: {error.strerror}") from None
        if folder is not None and chain != REFUSALS:
            limits = {"file_bytes": file_bytes, "files": min(files, REFUSAL_FILES)}
            try:
                self.refusals = Audit(folder, identity, tell, **limits, chain=REFUSALS)
            except BaseException:
                self.close()
                raise

    @property
    def head(self) -> tuple[int, str]:
        """Number and hash of the last line."""
        return self._n, self._last

    def write(self, kind: str, **fields: object) -> None:
        """Write a line. In an event loop it is synced at the end of the loop's turn (`flush` waits for it), elsewhere at once."""
        try:
            self._append(kind, fields)
            if self._file >= 0:
                self._sync_soon()
        except OSError as error:
            self._failed(error)

    def write_now(self, kind: str, **fields: object) -> None:
        """Write a line that must be on the disk before anything else happens. Blocks. Raises DiskFailed."""
        try:
            self._append(kind, fields)
            if self._file >= 0:
                os.fsync(self._file)
        except OSError as error:
            raise DiskFailed(f"{self._folder}: this line cannot be written to the audit log: {error.strerror}") from error

    def write_limited(self, kind: str, about: str, **fields: object) -> None:
        """Write an event that anybody can cause to the chain of refusals: one line a second for each key; the next line has the
        number left out. Beyond `MAX_KEYS` keys a second all others share one line."""
        now, name = time.monotonic(), f"{kind} {about}"
        counted = self._limited
        if name not in counted:
            while len(counted) >= MAX_KEYS and now - self._oldest() >= LIMITED_S:
                del counted[next(iter(counted))]
            if len(counted) >= MAX_KEYS:
                counted, name = self._others, OTHERS
        since, left_out = counted.get(name, (-LIMITED_S, 0))
        if now - since < LIMITED_S:
            counted[name] = (since, left_out + 1)  # keep its place: the first is the oldest
            return
        counted.pop(name, None)
        counted[name] = (now, 0)
        self.refusals.write(kind, **fields, **({"left_out": left_out} if left_out else {}))

    def _oldest(self) -> float:
        return next(iter(self._limited.values()))[0]

    async def flush(self) -> None:
        """Wait until every line is on the disk."""
        for each in (self, self.refusals):
            while each._syncing is not None:
                await asyncio.shield(each._syncing)

    def close(self) -> None:
        """Sync, close and unlock the folder."""
        if self.refusals is not self:
            self.refusals.close()
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.fsync(self._file)
            os.close(self._file)
            self._file = -1

    # --- inside

    def _open(self) -> None:
        assert self._folder is not None
        path = self._folder / f"{self._chain}.log"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            self._file = -1
            raise ConfigurationError(f"another process writes the audit log in {self._folder}: give each its own folder") from None
        with open(path, "rb") as file:
            text = file.read()
        whole = text.rfind(b"\n") + 1
        if whole < len(text):  # a crash in the middle of a line: it was not synced, and nobody was informed that it was
            os.ftruncate(self._file, whole)
        self._size = whole
        lines = text[:whole].splitlines()
        before = [] if lines else [older.read_bytes().splitlines() for older in _complete(self._folder, self._chain)[-1:]]
        last = lines[-1] if lines else (before[0][-1] if before and before[0] else b"")
        found = TAIL.search(last)
        try:
            if found is not None:
                self._n, self._last = int(json.loads(last)["n"]), found[1].decode()
            self._first = int(json.loads(lines[0])["n"]) if lines else self._n + 1
        except (ValueError, KeyError, TypeError, RecursionError):
            self.close()
            raise ConfigurationError(
                f"the audit log in {self._folder} is damaged: `pixiu audit verify {self._folder}` names the first line; move the "
                "folder away, and a new log begins"
            ) from None

    def _append(self, kind: str, fields: Mapping[str, object]) -> None:
        assert not (OWN | NEVER) & fields.keys(), "a line's own fields, payloads and secrets are not given"
        if not self._identity.keys().isdisjoint(fields):
            fields = {name: value for name, value in fields.items() if name not in self._identity}
        self._tell(kind, fields)
        if self._file < 0:
            return
        unix_ms = time.time_ns() // 1_000_000
        at = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(unix_ms // 1000))}.{unix_ms % 1000:03}Z"
        line = {"n": self._n + 1, "at": at, "kind": kind, **self._identity, **_plain(fields), "previous": self._last}
        text = json.dumps(line).encode()
        hashed = _hash(text)
        data = text[:-1] + b', "hash": "' + hashed.encode() + b'"}\n'
        if len(data) > MAX_LINE:
            raise AssertionError(f"a line of the audit log has {len(data)} bytes")
        if self._size and self._size + len(data) > self._file_bytes:
            self._rotate()
        written = os.write(self._file, data)
        if written != len(data):
            os.ftruncate(self._file, self._size)
            raise OSError(28, "the disk is full")
        self._size += written
        self._n, self._last = self._n + 1, hashed

    def _rotate(self) -> None:
        assert self._folder is not None
        os.fsync(self._file)
        path, complete = self._folder / f"{self._chain}.log", self._folder / f"{self._chain}-{self._first:012}.log"
        if not complete.exists():  # an earlier try may have ended here
            path.rename(complete)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            raise
        os.close(self._file)
        self._file = file
        self._size, self._first = 0, self._n + 1
        for gone in _complete(self._folder, self._chain)[: -self._files]:
            gone.unlink()
        sync_directory(self._folder)

    def _sync_soon(self) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            os.fsync(self._file)
            return
        self._unsynced = True
        if self._syncing is None:
            self._syncing = loop.create_task(self._sync(), name="audit")

    async def _sync(self) -> None:
        try:
            while self._unsynced and self._file >= 0:
                self._unsynced = False
                # A descriptor of its own, because a rotation may close the file meanwhile.
                file = os.dup(self._file)
                try:
                    await asyncio.to_thread(os.fsync, file)
                finally:
                    os.close(file)
        except OSError as error:
            self._failed(error)
        finally:
            self._syncing = None

    def _failed(self, error: OSError) -> None:
        self.failures += 1
        self._tell("audit_failed", {"error": error.strerror or str(error), "folder": str(self._folder)})


@dataclass(frozen=True, slots=True)
class Verified:
    """Result of checking a chain of lines."""

    lines: int
    first: int
    """Number of the first line in the chain; above 1: older files were removed."""
    last: int
    head: str
    """Hash of the last line."""


def _complete(folder: Path, chain: str) -> list[Path]:
    return sorted(path for path in folder.iterdir() if re.fullmatch(rf"{chain}-(\d{{12}})\.log", path.name))


def verify(path: Path) -> Verified:
    """Check a file, or both chains of a folder; returns the result for the operators' chain. An incomplete line at the end of
    the last file is ignored.

    Raises ConfigurationError if there is none, `MalformedData` that names the file and line that was changed or is missing.
    """
    if not path.is_dir():
        return _verify_files([path])
    found = _verify_files([*_complete(path, OPERATIONS), path / NAME])
    if (path / f"{REFUSALS}.log").exists():
        _verify_files([*_complete(path, REFUSALS), path / f"{REFUSALS}.log"])
    return found


def _verify_files(paths: Iterable[Path]) -> Verified:
    lines: list[tuple[str, bytes]] = []
    for each in paths:
        try:
            text = each.read_bytes()
        except OSError as error:
            raise ConfigurationError(f"{each}: cannot be read: {error.strerror}; is it the folder of an audit log?") from None
        whole = text[: text.rfind(b"\n") + 1]
        lines += [(f"{each.name}:{number}", line) for number, line in enumerate(whole.splitlines(), 1)]
    return _verify(lines)


def _verify(lines: Iterable[tuple[str, bytes]]) -> Verified:
    count = first = number = 0
    head = FIRST
    for where, line in lines:
        found = TAIL.search(line)
        if found is None:
            raise MalformedData(f"{where}: has no hash")
        text = line[: found.start()] + b"}"
        if _hash(text) != found[1].decode():
            raise MalformedData(f"{where}: was changed: its hash is another")
        try:
            fields = json.loads(text)
            said, previous = int(fields["n"]), str(fields["previous"])
        except (ValueError, KeyError, TypeError):
            raise MalformedData(f"{where}: is not a line of an audit log") from None
        if count and said != number + 1:
            raise MalformedData(
                f"{where}: is line {said} of the chain, after line {number}: lines between are missing, or twice there"
            )
        if (count or said == 1) and previous != head:
            raise MalformedData(f"{where}: does not continue the line before it: one was changed or put there")
        first = first or said
        number, head, count = said, found[1].decode(), count + 1
    return Verified(count, first, number, head)
