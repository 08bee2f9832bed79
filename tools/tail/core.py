"""Rotations of followed files, told from what is in their folders. Pure.

    app.log ──rename──▶ app.log.1, and a new app.log       the old one is read to its end, then the new one from its start
    app.log ──copy────▶ app.log.1, app.log cut to 0        what was not read yet is read from the copy, then app.log from its start

A file is known by device and inode, and by digests of its beginning and of what lies before the position: inodes are used again,
and a file that was cut may have grown beyond the position. Each life of a file is a writer of the topic with a name of its own,
whose progress is the position. So the topic itself knows what is stored, and a line that is read again is not stored again.

Source: docs/bridges.md, "Log files".
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from pixiu.errors import InvalidArgument, MalformedData

HEAD_BYTES: Final = 1_024
"""Bytes at the beginning of a file by which it is known again."""
EDGE_BYTES: Final = 256
"""Bytes before the position, for the same."""
MAX_LINE_BYTES: Final = 900_000
"""Longest line that is one message; a longer one is several."""


class Identity(NamedTuple):
    """A file, whatever its name."""

    device: int
    inode: int


class Seen(NamedTuple):
    """A file as it is now."""

    path: str
    identity: Identity
    size: int
    digest: Callable[[int, int], str]
    """The digest of its bytes from one position to another."""


@dataclass(frozen=True)
class Life:
    """A file from its beginning until it is cut or gone."""

    path: str
    """The path that is followed, not the one that it has after a rotation."""
    identity: Identity
    writer: str
    """Name of its writer in the topic."""
    position: int = 0
    """Up to here all is stored."""
    head_bytes: int = 0
    head: str = ""
    """Digest of its first `head_bytes`."""
    edge: str = ""
    """Digest of the `EDGE_BYTES` before the position."""
    size: int = 0
    """As it was seen last."""
    place: str = ""
    """Path of a rotated file, at which it is read; empty: at `path`."""

    def known_by(self, seen: Seen) -> bool:
        """True if a file has everything of this one up to the position."""
        if seen.size < max(self.head_bytes, self.position):
            return False
        if self.head_bytes and seen.digest(0, self.head_bytes) != self.head:
            return False
        return not self.edge or seen.digest(max(0, self.position - EDGE_BYTES), self.position) == self.edge

    @property
    def waiting(self) -> int:
        """Bytes that are not stored, as far as it was seen."""
        return max(0, self.size - self.position)

    def seen(self, seen: Seen) -> Life:
        """The same, known by more of its beginning."""
        size = min(seen.size, HEAD_BYTES)
        if self.head_bytes >= size:
            return replace(self, size=seen.size)
        return replace(self, size=seen.size, head_bytes=size, head=seen.digest(0, size))


class Change(NamedTuple):
    """Outcome of a look at the folders."""

    lives: Sequence[Life]
    """In the order in which they are read: of one path, rotated ones first."""
    lost: Sequence[Life] = ()
    """Files that are gone before all of them was stored."""


def look(
    lives: Sequence[Life], followed: Sequence[Seen], others: Callable[[], Sequence[Seen]], name: Callable[[], str],
    *, from_end: bool = False,
) -> Change:  # fmt: skip
    """Compare what is known with what is there.

    Args:
        lives: as known.
        followed: the files at the followed paths.
        others: the other files of their folders, where rotated ones are; asked for when a file is not what it was.
        name: makes the name of a writer that there never was.
        from_end: a path of which nothing is known begins at its end.
    """
    found, lost = list[Life](), list[Life]()
    now = {seen.path: seen for seen in followed}
    paths, missing = {life.path for life in lives}, list[Life]()
    for life in lives:
        here = now.get(life.path)
        if not life.place and here is not None and here.identity == life.identity and life.known_by(here):
            found.append(life.seen(here))
            del now[life.path]
        else:
            missing.append(life)
    for life in missing:
        rotated = _rotated(life, [*others(), *now.values()])
        if rotated is None:
            lost += [life] if life.waiting else []
        elif now.pop(rotated.path, None) is not None:  # its new name is followed, too
            found.append(replace(life.seen(rotated), path=rotated.path, identity=rotated.identity, place=""))
        elif rotated.size > life.position:
            found.append(replace(life.seen(rotated), place=rotated.path))
    for path, seen in now.items():
        begin = seen.size if from_end and path not in paths else 0
        found.append(Life(path, seen.identity, name(), begin).seen(seen))
    return Change(sorted(found, key=lambda life: (life.path, not life.place)), lost)


def _rotated(life: Life, others: Sequence[Seen]) -> Seen | None:
    """The file with the rest of a life: the renamed one, or else a copy."""
    for seen in others:
        if seen.identity == life.identity and life.known_by(seen):
            return seen
    copies = [seen for seen in others if life.head_bytes and life.known_by(seen)]
    return min(copies, key=lambda seen: seen.size, default=None)


def over_bound(lives: Sequence[Life], most: int) -> list[Life]:
    """The rotated files that are given up, oldest first, so that the others wait with at most so many bytes."""
    rotated = [life for life in lives if life.place]
    total, found = sum(life.waiting for life in rotated), list[Life]()
    for life in rotated:
        if total <= most:
            break
        found.append(life)
        total -= life.waiting
    return found


def digest(data: bytes) -> str:
    """The digest of the beginning of a file."""
    return hashlib.sha256(data).hexdigest()[:32]


def lines_in(data: bytes, position: int, *, whole: bool) -> list[tuple[int, bytes]]:
    """The lines in what was read from a position on, each with the position after it.

    Args:
        data: as read.
        position: of its first byte.
        whole: nothing follows, so a last line without an end is one.
    """
    found, at = list[tuple[int, bytes]](), 0
    while at < len(data):
        end = data.find(b"\n", at)
        if end < 0:
            cut = len(data) - at >= MAX_LINE_BYTES
            if not (whole or cut):
                break
            end = at + MAX_LINE_BYTES if cut else len(data)
            found.append((position + end, data[at:end]))
            at = end
        else:
            for piece in range(at, max(end, at + 1), MAX_LINE_BYTES):
                last = piece + MAX_LINE_BYTES >= end
                line = data[piece:end] if last else data[piece : piece + MAX_LINE_BYTES]
                found.append((position + (end + 1 if last else piece + MAX_LINE_BYTES), line.removesuffix(b"\r") if last else line))
            at = end + 1
    return found


class Keys:
    """The key of a line: what an expression finds in it, else the file's path. Raises `InvalidArgument` for no expression."""

    def __init__(self, expression: str) -> None:
        try:
            self._expression = re.compile(expression.encode()) if expression else None
        except re.error as error:
            raise InvalidArgument(f"--key {expression}: no regular expression: {error}") from None

    def of(self, path: str, line: bytes) -> bytes:
        """The key of a line."""
        match = self._expression.search(line) if self._expression is not None else None
        if match is None:
            return path.encode(errors="surrogateescape")[-4_096:]
        return (match[1] if match.re.groups else match[0] or b"")[:4_096] or b"-"


def as_json(lives: Iterable[Life]) -> list[dict[str, Any]]:
    """Lives as they are kept."""
    return [
        {"path": each.path, "device": each.identity.device, "inode": each.identity.inode, "writer": each.writer,
         "position": each.position, "head_bytes": each.head_bytes, "head": each.head, "edge": each.edge,
         "size": each.size, "place": each.place}
        for each in lives
    ]  # fmt: skip


def from_json(found: Sequence[Mapping[str, Any]]) -> list[Life]:
    """Lives as they were kept. Raises `MalformedData`."""
    try:
        return [
            Life(
                str(each["path"]), Identity(int(each["device"]), int(each["inode"])), str(each["writer"]), int(each["position"]),
                int(each["head_bytes"]), str(each["head"]), str(each["edge"]), int(each["size"]), str(each["place"]),
            )
            for each in found
        ]  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise MalformedData(f"they are not what `pixiu tail` writes ({error!r})") from None
