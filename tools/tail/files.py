"""Files that are followed, and the file that keeps their positions. Blocking: to be called in threads.

Source: docs/bridges.md, "Log files".
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from stat import S_ISREG
from typing import Any, Final

from pixiu.durable import replace_file, sync_directory
from pixiu.errors import ConfigurationError, InvalidArgument, MalformedData
from tools.tail.core import EDGE_BYTES, Change, Identity, Life, Seen, as_json, digest, from_json, look

MAX_FILES: Final = 256
"""Files that are followed. Policy: more are refused."""
MAX_OTHERS: Final = 10_000
"""Files of their folders among which rotated ones are looked for. Policy: further ones are not."""
MAX_POSITIONS_BYTES: Final = 4 << 20
READ_BYTES: Final = 1 << 20


class Files:
    """Files that are followed, and the positions up to which they are stored.

    Args:
        patterns: paths, or globs of them.
        positions: file that keeps the positions; beside it is a folder of rotated files that are not stored yet.
        from_end: a file of which nothing is known begins at its end.

    Raises `InvalidArgument` for a path that is not there, `ConfigurationError` if another process has the positions.
    """

    def __init__(self, patterns: Sequence[str], positions: Path, *, from_end: bool = False) -> None:
        self._patterns = [os.path.abspath(each) for each in patterns]
        self._positions, self._from_end = positions, from_end
        self._spill = positions.with_name(f"{positions.name}.spill")
        for pattern, path in zip(patterns, self._patterns, strict=True):
            if not glob.has_magic(path) and os.path.isdir(path):
                raise InvalidArgument(f"{pattern} is a folder: give its files, such as '{pattern.rstrip('/')}/*.log'")
            if not glob.glob(path):
                raise InvalidArgument(f"there is no file {pattern}: check the path, or make the file before")
        self._lock = self._locked()
        self.lives: list[Life] = self._read()

    def _locked(self) -> int:
        try:
            self._positions.parent.mkdir(parents=True, exist_ok=True)
            self._spill.mkdir(exist_ok=True)
            lock = os.open(self._spill / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigurationError(
                f"{self._positions}: positions cannot be kept there: {error.strerror}: give --positions"
            ) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise ConfigurationError(f"{self._positions}: another `pixiu tail` uses it: end it, or give --positions FILE") from None
        return lock

    def _read(self) -> list[Life]:
        try:
            with open(self._positions, "rb") as file:
                data = file.read(MAX_POSITIONS_BYTES + 1)
            if len(data) > MAX_POSITIONS_BYTES:
                raise ValueError(f"above {MAX_POSITIONS_BYTES} bytes")
            found: Any = json.loads(data)
            return from_json(found)
        except FileNotFoundError:
            return []
        except (ValueError, MalformedData) as error:
            raise ConfigurationError(
                f"{self._positions}: the positions cannot be read: {error}; remove it to begin again, and have all lines twice"
            ) from None

    def save(self) -> None:
        """Keep the positions, durably."""
        replace_file(self._positions, json.dumps(as_json(self.lives)).encode())

    def close(self) -> None:
        """Let others use the positions."""
        os.close(self._lock)

    def look(self) -> Change:
        """See what became of the files; rotated ones are linked, so that nobody can remove them before they are stored."""
        paths = sorted({path for pattern in self._patterns for path in glob.glob(pattern)})
        followed = [seen for path in paths if (seen := seen_at(path)) is not None]
        if len(followed) > MAX_FILES:
            raise InvalidArgument(f"these are {len(followed)} files; at most {MAX_FILES} are followed: give a narrower pattern")
        known = {seen.path for seen in followed}

        @cache
        def others() -> list[Seen]:
            folders = dict.fromkeys([str(self._spill), *(os.path.dirname(life.path) for life in self.lives)])
            names = [entry.path for folder in folders for entry in _entries(folder)][:MAX_OTHERS]
            return [seen for name in names if name not in known and (seen := seen_at(name)) is not None]

        change = look(self.lives, followed, others, lambda: f"tail.{secrets.token_hex(12)}", from_end=self._from_end)
        self._from_end = False  # what comes now is new
        before, self.lives = self.lives, [self._linked(life) for life in change.lives]
        if [life.writer for life in before] != [life.writer for life in self.lives] or change.lost:
            sync_directory(self._spill)  # the links to which the positions point
            self.save()
            self._clear()
        return change

    def _linked(self, life: Life) -> Life:
        link = self._spill / life.writer
        if not life.place or life.place == str(link):
            return life
        try:
            os.link(life.place, link)
        except OSError:  # another file system: it is read where it is
            return life
        return replace(life, place=str(link))

    def _clear(self) -> None:
        wanted = {life.place for life in self.lives}
        for entry in _entries(str(self._spill)):
            if entry.name != "lock" and entry.path not in wanted:
                with suppress(OSError):
                    os.unlink(entry.path)

    def stored(self, done: Iterable[tuple[str, int]]) -> None:
        """Note positions, by writers, up to which all is stored, and keep them."""
        found = dict(done)
        lives = list[Life]()
        for life in self.lives:
            if (position := found.get(life.writer, 0)) > life.position:
                edge = read_at(life, max(0, position - EDGE_BYTES), position)
                life = replace(life, position=position, edge=digest(edge))
            lives.append(life)
        if lives != self.lives:
            self.lives = lives
            self.save()

    def drop(self, given_up: Sequence[Life]) -> None:
        """Give up rotated files."""
        self.lives = [life for life in self.lives if life not in given_up]
        self.save()
        self._clear()


def _entries(folder: str) -> list[os.DirEntry[str]]:
    with suppress(OSError), os.scandir(folder) as found:
        return sorted((entry for entry in found if entry.is_file(follow_symlinks=False)), key=lambda entry: entry.name)
    return []


def seen_at(path: str) -> Seen | None:
    """A file as it is now; None: it is none, or cannot be read."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    if not S_ISREG(found.st_mode) or not os.access(path, os.R_OK):
        return None

    def digest_of(low: int, high: int) -> str:
        with suppress(OSError), open(path, "rb", buffering=0) as file:
            return digest(os.pread(file.fileno(), high - low, low))
        return ""

    return Seen(path, Identity(found.st_dev, found.st_ino), found.st_size, digest_of)


def read_at(life: Life, low: int, high: int) -> bytes:
    """Bytes of a file; fewer if it ends there, or is no longer this one."""
    with suppress(OSError), open(life.place or life.path, "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        if life.place or Identity(status.st_dev, status.st_ino) == life.identity:
            return os.pread(file.fileno(), high - low, low)
    return b""
