"""Readers that retention waits for, by name: what they have not processed is not trimmed.

    DATA_DIR/readers.json    {"archive": {"position": 4294967297, "at_us": 1763800000000000}, …}

Every replica keeps what it was told, and whoever leads goes by it. A reader that was not heard of for `hold_us` holds nothing any
more, so that one that was given up does not fill the disk.

Source: docs/pipeline.md.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from pixiu.errors import DiskFailed, InvalidArgument, Overloaded
from pixiu.ids import MAX_MSG_SEQUENCE

MAX_READERS: Final = 64
"""Policy: a further one is refused."""
MAX_NAME: Final = 128
EVERYTHING: Final = MAX_MSG_SEQUENCE + 1
"""Nobody needs anything."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a reader needs."""

    position: int
    at_us: int
    """When it said so."""


class Readers:
    """Positions of named readers. A file that cannot be read counts as empty: its readers report again.

    Args:
        path: of the file.
        hold_us: how long a reader is waited for that says nothing.
    """

    def __init__(self, path: Path, hold_us: int) -> None:
        self._path, self._hold_us = path, hold_us
        self._held: dict[str, Held] = {}
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            found = json.loads(path.read_text())
            self._held = {str(name): Held(int(each["position"]), int(each["at_us"])) for name, each in found.items()}

    def hold(self, name: str, position: int, now_us: int) -> None:
        """A reader needs what lies at a position or behind. Blocking. Raises InvalidArgument, Overloaded, DiskFailed."""
        if not 0 < len(name) <= MAX_NAME or position > EVERYTHING:
            raise InvalidArgument(f"a reader has a name of at most {MAX_NAME} characters, and a position of this partition")
        alive = self._alive(now_us)
        if name not in alive and len(alive) >= MAX_READERS:
            raise Overloaded(f"{MAX_READERS} readers are known already; let one go first")
        self._save(alive | {name: Held(position, now_us)})

    def release(self, name: str, now_us: int) -> None:
        """A reader needs nothing more. Blocking. Raises DiskFailed."""
        self._save({other: held for other, held in self._alive(now_us).items() if other != name})

    def keep_from(self, now_us: int) -> int:
        """The lowest position that somebody needs; `EVERYTHING` when nobody does."""
        return min((held.position for held in self._alive(now_us).values()), default=EVERYTHING)

    def _alive(self, now_us: int) -> dict[str, Held]:
        return {name: held for name, held in self._held.items() if now_us - held.at_us < self._hold_us}

    def _save(self, held: dict[str, Held]) -> None:
        new = self._path.with_suffix(".new")
        try:
            with open(new, "w") as file:
                json.dump({name: asdict(each) for name, each in held.items()}, file)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self._path)
        except OSError as error:
            raise DiskFailed(f"{self._path} cannot be written: {error.strerror}") from error
        self._held = held
