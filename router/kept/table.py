"""Kept filters of a router partition: which sessions a message is for. Pure.

    (session, room, filter) → version, until when
    room → the filters in a tree → sessions
    tenant → the sessions that have a place among its own

A room has its own filters, and free topics have besides those of the room that carries all of them, which every session with such a
filter keeps for each partition.

Source: docs/subscriptions.md, "Kept filters".
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator
from typing import Final, NamedTuple

import xxhash

from cluster.routers.places import PLACE_PREFIX, is_place
from pixiu.ids import MAX_ID, TOPIC_ROOM
from pixiu.placement.filter_tree import FilterTree
from pixiu.placement.topic_rooms import all_topics
from pixiu.placement.topics import ROOM_PREFIX, USER_PREFIX, TopicRefusal, parse_filter
from router.replicated.table import BUCKETS, Table

MAX_SLICE: Final = 1_000
"""Entries in one slice of a listing."""
MAX_SLICE_BYTES: Final = 256 << 10
MAX_FILTER_BYTES: Final = 4 * 4096
"""Longest filter, bytes."""
ENTRY_BYTES: Final = 1_500
"""Bytes counted for an entry beyond three times its filter."""
_KEY: Final = struct.Struct(">QQ")
_PLACE: Final = PLACE_PREFIX.encode()


class Entry(NamedTuple):
    """A filter that is kept for a session in a room, or the mark that it was removed."""

    room: int
    session: int
    filter: bytes
    """UTF-8."""
    version: int
    expires_at_ms: int
    """Unix milliseconds."""
    live: bool
    no_local: bool
    limit: int = 0
    """Of a place: the most that its tenant may have; 0: no limit."""

    @property
    def key(self) -> bytes:
        """Session, room, filter."""
        return _KEY.pack(self.session, self.room) + self.filter

    @property
    def stamp(self) -> tuple[int, int]:
        """The higher one wins. Of two with one version a replica that has either keeps the same: the removed one."""
        return self.version, int(not self.live)

    @property
    def size(self) -> int:
        """Bytes that are counted for it."""
        return ENTRY_BYTES + 3 * len(self.filter)

    @property
    def is_place(self) -> bool:
        """True if it is no filter but the session's place among those of its tenant."""
        return self.filter.startswith(_PLACE)

    @property
    def is_whole(self) -> bool:
        """True if its parts make sense: a filter that a client can subscribe to, in a room that can carry what it matches."""
        if not (0 < self.room <= MAX_ID and 0 < self.session <= MAX_ID and self.version and self.expires_at_ms):
            return False
        if len(self.filter) > MAX_FILTER_BYTES:
            return False
        name = self.filter.decode("utf-8", "replace")
        if self.is_place:
            return is_place(name, self.room)
        found = parse_filter(name)
        if isinstance(found, TopicRefusal) or found.group or name.startswith(("$", USER_PREFIX)):
            return False
        numbered = name.startswith(ROOM_PREFIX)
        return name == f"{ROOM_PREFIX}{self.room}" if numbered else self.room >= TOPIC_ROOM

    def removed(self, until_ms: int) -> Entry:
        """The mark that it was removed."""
        return self._replace(live=False, expires_at_ms=until_ms)


class _Room:
    """The filters of a room."""

    __slots__ = ("filters", "sessions")

    def __init__(self) -> None:
        self.filters: FilterTree[dict[int, Entry]] = FilterTree()
        """Filter → session → entry."""
        self.sessions: dict[int, int] = {}
        """Session → the number of its filters here."""


class KeptTable(Table[Entry]):
    """Kept filters.

    Args:
        max_entries, max_bytes: see `Table`.
        max_sessions: limit of sessions in one room.
    """

    def __init__(self, max_entries: int, max_bytes: int, max_sessions: int) -> None:
        super().__init__(max_entries, max_bytes)
        self._max_sessions = max_sessions
        self._rooms: dict[int, _Room] = {}
        self._places: dict[bytes, set[int]] = {}
        """Name of the places of a tenant → sessions."""

    @property
    def rooms(self) -> Collection[int]:
        """Rooms with kept filters."""
        return self._rooms.keys()

    def has_room(self, room: int) -> bool:
        """True if a room has kept filters."""
        return room in self._rooms

    def crowded(self, entry: Entry) -> bool:
        """True if the room, or the tenant, has as many sessions as it may, and this one is not among them."""
        if entry.is_place:
            sessions = self._places.get(entry.filter, ())
            return 0 < entry.limit <= len(sessions) and entry.session not in sessions
        room = self._rooms.get(entry.room)
        return room is not None and len(room.sessions) >= self._max_sessions and entry.session not in room.sessions

    def places(self, name: bytes) -> int:
        """Number of sessions that have a place among those of a tenant."""
        return len(self._places.get(name, ()))

    def match(self, partition: int, room: int, topic: bytes, publisher: int, now_ms: int) -> list[int]:
        """Sessions that a message is for, ascending.

        Args:
            partition: of the router, whose room of all free topics counts.
            topic: a free topic's name, or `room/42`.
            publisher: the session that published it; 0: none.
        """
        found: set[int] = set()
        everything = all_topics(room, partition)
        for each in (room,) if everything is None or everything == room else (room, everything):
            kept = self._rooms.get(each)
            if kept is not None:
                for entries in kept.filters.match(topic):
                    for session, entry in entries.items():
                        if entry.expires_at_ms > now_ms and not (entry.no_local and session == publisher):
                            found.add(session)
        return sorted(found)

    def listing(self, session: int, after: bytes, limit: int) -> tuple[list[Entry], bytes]:
        """A slice of the live entries, of one session or of all (0): by bucket, then by session, room and filter. Returns the key
        after which the next slice begins, too; empty: there is none."""
        most = min(limit or MAX_SLICE, MAX_SLICE)
        found: list[Entry] = []
        size = 0
        for entry in self._ordered(session, after):
            if len(found) == most or size >= MAX_SLICE_BYTES:
                return found, found[-1].key
            found.append(entry)
            size += len(entry.filter)
        return found, b""

    def _ordered(self, session: int, after: bytes) -> Iterator[Entry]:
        first = self._bucket(_KEY.pack(session, 0)) if session else self._bucket(after) if after else 0
        for bucket in range(first, first + 1 if session else BUCKETS):
            for key in sorted(self._members[bucket]):
                entry = self._entries[key]
                passed = bucket == first and key <= after
                if entry.live and not passed and session in (0, entry.session):
                    yield entry

    def _bucket(self, key: bytes) -> int:
        """The bucket of the session: all its filters are in one."""
        return xxhash.xxh3_64_intdigest(key[:8]) % BUCKETS

    def _has_space(self, entry: Entry) -> bool:
        return not self.crowded(entry)

    def _added(self, entry: Entry) -> None:
        if entry.is_place:
            self._places.setdefault(entry.filter, set()).add(entry.session)
            return
        room = self._rooms.get(entry.room)
        if room is None:
            room = self._rooms[entry.room] = _Room()
        entries = room.filters.get(entry.filter)
        if entries is None:
            room.filters.put(entry.filter, entries := {})
        entries[entry.session] = entry
        room.sessions[entry.session] = room.sessions.get(entry.session, 0) + 1

    def _gone(self, entry: Entry) -> None:
        if entry.is_place:
            sessions = self._places[entry.filter]
            sessions.discard(entry.session)
            if not sessions:
                del self._places[entry.filter]
            return
        room = self._rooms[entry.room]
        entries = room.filters.get(entry.filter)
        assert entries is not None, "every live entry is in its room"
        del entries[entry.session]
        if not entries:
            room.filters.remove(entry.filter)
        if room.sessions[entry.session] > 1:
            room.sessions[entry.session] -= 1
            return
        del room.sessions[entry.session]
        if not room.sessions:
            del self._rooms[entry.room]
