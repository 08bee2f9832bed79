"""Messages to users in a replay: a user's messages are recorded as a room of its own, with the user as its only member. Pure.

    number  1 << 63 | UIN      above every RoomID, which have 63 bits

Source: docs/architecture.md, "A message to a user", docs/operations.md.
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, Final, NamedTuple, cast

from pixiu.errors import InvalidArgument
from pixiu.ids import UIN, RoomID
from tools.replay.log import GZIP_MAGIC, MAX_EVENTS, MAX_NAME_BYTES

INBOX: Final = 1 << 63
COLUMNS: Final = ("ts_ms", "line", "room", "user", "to_user")
MAX_MS: Final = 1 << 53


class Mention(NamedTuple):
    """One message from a user to another."""

    ts_ms: int
    line: int
    room: str
    user: str
    to: str

    @property
    def text(self) -> bytes:
        """Text of the message: the file has none."""
        return f"{self.room}:{self.line} @{self.to}".encode()


def inbox_of(uin: int) -> RoomID:
    """The number under which messages to a user are recorded."""
    return RoomID(INBOX | uin)


def user_of(room: int) -> UIN | None:
    """The user whose inbox a number is; None for a room."""
    return UIN(room & ~INBOX) if room & INBOX else None


def read_mentions(lines: Iterator[str], source: str = "mentions") -> Iterator[Mention]:
    """Read rows of a CSV file with a head, in the order of time. Raises `InvalidArgument` that names the line at fault."""
    rows = csv.reader(lines)
    last_ms = 0
    try:
        if tuple(next(rows, ())) != COLUMNS:
            raise InvalidArgument(f"{source}, line 1: the columns must be {','.join(COLUMNS)}")
        for number, row in enumerate(rows, start=2):
            where = f"{source}, line {number}"
            if len(row) != len(COLUMNS) or not all(part.isascii() and part.isdecimal() and len(part) <= 16 for part in row[:2]):
                raise InvalidArgument(f"{where}: needs {len(COLUMNS)} columns, 'ts_ms' and 'line' as numbers")
            ts_ms = int(row[0])
            if not last_ms <= ts_ms < MAX_MS:
                raise InvalidArgument(f"{where}: 'ts_ms' must be Unix milliseconds that do not go back")
            if not all(0 < len(name.encode()) <= MAX_NAME_BYTES for name in row[2:]):
                raise InvalidArgument(f"{where}: names must be 1 to {MAX_NAME_BYTES} bytes")
            if number > MAX_EVENTS:
                raise InvalidArgument(f"{source}: more than {MAX_EVENTS} lines")
            last_ms = ts_ms
            yield Mention(ts_ms, int(row[1]), *row[2:])
    except csv.Error as error:
        raise InvalidArgument(f"{source}, line {rows.line_num}: {error}") from None


def load_mentions(
    path: Path, first_ms: int = 0, last_ms: int = MAX_MS, rooms: Collection[str] | None = None
) -> list[Mention]:  # fmt: skip
    """Load the mentions of a period, in some rooms; by default all. Plain or gzip. Raises `InvalidArgument`."""
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == GZIP_MAGIC
            raw.seek(0)
            data = gzip.GzipFile(fileobj=raw) if packed else raw
            with io.TextIOWrapper(cast(IO[bytes], data), encoding="utf-8", newline="") as lines:
                found = (mention for mention in read_mentions(iter(lines), path.name) if rooms is None or mention.room in rooms)
                return [mention for mention in found if first_ms <= mention.ts_ms <= last_ms]
    except UnicodeDecodeError:
        raise InvalidArgument(f"{path}: is not text: not all of it is UTF-8") from None
    except (OSError, EOFError) as error:
        raise InvalidArgument(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
