"""Rooms whose records wait because their path has changed: the new path may be faster than the old one. Pure.

A gateway that gets a room's messages from the relay of one partition gets them from another one as well once a user of that
partition is there. Later messages must not overtake those still in flight to the first relay:

    message 1 ──▶ relay 0 (slow) ┄┄┄┄┄┄┄┄┄┄┄┄▶ gateway        a user of partition 1 joins
    message 2 ──▶ relay 0, and ┊ waits until relay 0 has handled message 1 ┊──▶ relay 1 ──▶ gateway

Links settle every parcel within 3 s, also a lost or hanging one, so no room waits longer. Rooms that do not change never wait.

Source: docs/architecture.md, "Through relays".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from cluster.core.contract import SendRecords

MAX_WAITING_RECORDS: Final = 100_000
"""Records that wait. Policy: beyond it all are released, in whatever order they arrive."""


class Barriers:
    """Parcels in flight, and the rooms that wait for them."""

    def __init__(self) -> None:
        self._last = 0
        """The token of the newest parcel."""
        self._under_way: dict[int, None] = {}
        self._rooms: dict[int, int] = {}
        """Room → newest parcel that it waits for."""
        self._all = 0
        """Newest parcel that all rooms wait for; 0: they do not wait."""
        self._waiting: dict[int, list[bytes]] = {}
        self._records = 0

    def sent(self, parcels: Iterable[SendRecords]) -> None:
        """Note parcels that leave now; they get their tokens here."""
        for parcel in parcels:
            self._last += 1
            parcel.token = self._last
            self._under_way[self._last] = None

    def changed(self, room: int) -> None:
        """Note that a room's path has changed."""
        if self._under_way:
            self._rooms.setdefault(room, self._last)

    def all_changed(self) -> None:
        """Note that any room's path may have changed."""
        if self._under_way:
            self._all = self._last

    @property
    def up(self) -> bool:
        """True if any room waits."""
        return bool(self._rooms or self._all)

    @property
    def full(self) -> bool:
        """True if the bound is exceeded and everything must be released."""
        return self._records > MAX_WAITING_RECORDS

    def holds(self, room: int) -> bool:
        """True if a room waits."""
        return bool(self._all) or room in self._rooms

    def hold(self, room: int, record: bytes) -> bool:
        """Keep a record if its room waits. Returns True if it was kept."""
        if not self.holds(room):
            return False
        self._waiting.setdefault(room, []).append(record)
        self._records += 1
        return True

    def take_back(self, room: int) -> None:
        """Drop the last record that was kept of a room."""
        self._waiting[room].pop()
        self._records -= 1

    def settled(self, parcels: Iterable[tuple[int, bool]]) -> list[bytes]:
        """Note parcels that were handled or lost. Returns the records that need not wait any longer, each room's in order."""
        for token, _ in parcels:
            self._under_way.pop(token, None)
        if not self.up:
            return []
        oldest = next(iter(self._under_way), self._last + 1)
        if self._all < oldest:
            self._all = 0
        for room in [room for room, token in self._rooms.items() if token < oldest]:
            del self._rooms[room]
        if self._all:
            return []
        return self._take([room for room in self._waiting if room not in self._rooms])

    def give_up(self) -> list[bytes]:
        """Release everything. Returns the records that waited."""
        self._rooms.clear()
        self._all = 0
        return self._take(list(self._waiting))

    def _take(self, rooms: list[int]) -> list[bytes]:
        found = [record for room in rooms for record in self._waiting.pop(room)]
        self._records -= len(found)
        return found
