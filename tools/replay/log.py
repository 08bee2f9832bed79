"""Reads a chat log: JSON lines `{ts_ms, room, user, text}`, or with a kind; plain or gzip.

    kind     fields                     meaning (`msg` where the line has none)
    msg      text                       a message
    action   text                       a message in the third person
    join                                the user comes into the room
    part                                the user leaves it
    nick     to                         the user goes on under the name `to`

Source: docs/operations.md.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Final, NamedTuple, cast

import xxhash

from pixiu.errors import InvalidArgument
from pixiu.ids import MAX_ROOM, UIN, RoomID, uin_of_name

MAX_LINE_BYTES: Final = 1 << 20
"""Limit of a line, bytes; a longer one is refused, because its message would be above the cluster's limit anyway."""
MAX_NAME_BYTES: Final = 256
"""Limit of a room's or a user's name, bytes."""
MAX_EVENTS: Final = 5_000_000
"""Limit of lines that one replay holds in memory; use `--limit` or `--rooms` for a longer log."""
KINDS: Final = ("msg", "action", "join", "part", "nick")
GZIP_MAGIC: Final = b"\x1f\x8b"


class LogEvent(NamedTuple):
    """One line of a chat log."""

    ts_ms: int
    """Unix milliseconds, or milliseconds since the room's first event after `align_rooms`."""
    room: str
    kind: str
    user: str
    text: str
    to: str
    """The new name of a nick; the person addressed in a message; else empty."""
    line: int
    """The line's number in the file, from 1."""


def _encodable(text: str) -> bool:
    # JSON may hold half a surrogate pair ("\\ud800"), which UTF-8 does not have.
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _name(fields: dict[str, object], key: str, where: str) -> str:
    value = fields.get(key)
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not 0 < len(value.encode("utf-8", "replace")) <= MAX_NAME_BYTES or not _encodable(value):
        raise InvalidArgument(f"{where}: {key!r} must be a name of 1 to {MAX_NAME_BYTES} bytes of UTF-8, not {value!r:.80}")
    return value


def parse_line(data: bytes, line: int, source: str = "log") -> LogEvent:
    """Parse one line. Raises `InvalidArgument` with the source, the line's number and the field at fault."""
    where = f"{source}, line {line}"
    if len(data) > MAX_LINE_BYTES:
        raise InvalidArgument(f"{where}: longer than {MAX_LINE_BYTES} bytes")
    try:
        fields = json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{where}: is not text: byte {error.start + 1} is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{where}: not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidArgument(f"{where}: not a JSON object but {type(fields).__name__}")
    ts_ms = fields.get("ts_ms")
    if not isinstance(ts_ms, int) or isinstance(ts_ms, bool) or not 0 <= ts_ms < 1 << 53:
        raise InvalidArgument(f"{where}: 'ts_ms' must be Unix milliseconds, not {ts_ms!r:.80}")
    kind = fields.get("kind", "msg")
    if kind not in KINDS:
        raise InvalidArgument(f"{where}: 'kind' must be one of {', '.join(KINDS)}, not {kind!r:.80}")
    text = fields.get("text", "")
    if not isinstance(text, str) or (kind in ("msg", "action") and "text" not in fields):
        raise InvalidArgument(f"{where}: 'text' must be a string in a line of kind {kind}")
    room, user = _name(fields, "room", where), _name(fields, "user", where)
    to = _name(fields, "to", where) if kind == "nick" or fields.get("to") else ""
    return LogEvent(ts_ms, room, cast(str, kind), user, text, to, line)


def read_events(stream: IO[bytes], source: str = "log", *, rooms: int = 0, limit: int = 0) -> Iterator[LogEvent]:
    """Read the events of an open log, in order; empty lines are skipped.

    `rooms`: number of rooms to read, the first ones (0: all). `limit`: limit of their events (0: none).
    Raises `InvalidArgument` for a malformed line, and for one that is earlier than the one before it.
    """
    chosen: set[str] = set()
    taken = line = last_ms = 0
    while data := stream.readline(MAX_LINE_BYTES + 1):
        line += 1
        if not data.strip():
            continue
        event = parse_line(data.rstrip(b"\r\n") if len(data) <= MAX_LINE_BYTES else data, line, source)
        if event.ts_ms < last_ms:
            raise InvalidArgument(f"{source}, line {line}: 'ts_ms' goes back from {last_ms} to {event.ts_ms}; sort the log by time")
        last_ms = event.ts_ms
        if event.room not in chosen:
            if rooms and len(chosen) >= rooms:
                continue
            chosen.add(event.room)
        if taken >= MAX_EVENTS:
            raise InvalidArgument(f"{source}: more than {MAX_EVENTS} lines; use --limit or --rooms")
        taken += 1
        yield event
        if limit and taken >= limit:
            return


def load_log(path: Path, *, rooms: int = 0, limit: int = 0) -> list[LogEvent]:
    """Load a whole log, plain or gzip (recognized by its first bytes). Raises `InvalidArgument` when it cannot be read."""
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == GZIP_MAGIC
            raw.seek(0)
            if not packed:
                return list(read_events(raw, path.name, rooms=rooms, limit=limit))
            with gzip.GzipFile(fileobj=raw) as unpacked:
                return list(read_events(cast(IO[bytes], unpacked), path.name, rooms=rooms, limit=limit))
    except (OSError, EOFError) as error:
        raise InvalidArgument(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def align_rooms(events: Iterable[LogEvent]) -> list[LogEvent]:
    """Let every room start at 0, for logs whose rooms lie years apart. The order inside a room stays."""
    first: dict[str, int] = {}
    moved = [event._replace(ts_ms=event.ts_ms - first.setdefault(event.room, event.ts_ms)) for event in events]
    moved.sort(key=lambda event: (event.ts_ms, event.line))
    return moved


def room_of_name(name: str) -> RoomID:
    """The RoomID of a log's room: 62 bits of its name's xxh3, never 0. Source: docs/identifiers.md, docs/routing.md."""
    return RoomID((xxhash.xxh3_64_intdigest(name.encode()) >> 2 & MAX_ROOM) or 1)


class Names:
    """The IDs of a log's rooms and users; the same name has the same ID in every run.

    Both methods raise `InvalidArgument` when two names have one ID.
    """

    def __init__(self) -> None:
        self._rooms: dict[str, RoomID] = {}
        self._users: dict[str, UIN] = {}
        self.room_names: dict[RoomID, str] = {}
        self.user_names: dict[UIN, str] = {}

    def room(self, name: str) -> RoomID:
        """A room's RoomID."""
        found = self._rooms.get(name)
        if found is None:
            found = self._rooms[name] = room_of_name(name)
            other = self.room_names.setdefault(found, name)
            if other != name:
                raise InvalidArgument(f"the rooms {other!r} and {name!r} have one RoomID; rename one")
        return found

    def user(self, name: str) -> UIN:
        """A user's UIN."""
        found = self._users.get(name)
        if found is None:
            found = self._users[name] = uin_of_name(name)
            other = self.user_names.setdefault(found, name)
            if other != name:
                raise InvalidArgument(f"the users {other!r} and {name!r} have one UIN; rename one")
        return found
