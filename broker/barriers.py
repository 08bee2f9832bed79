"""Rooms whose records wait because their way has changed: the new way may be quicker than the one before. Pure.

A gateway that gets a room's messages from the relay of one partition gets them from another one as well once a user of that
partition is there. What is sent then must not overtake what is still on its way to the first relay:

    message 1 ──▶ relay 0 (slow) ┄┄┄┄┄┄┄┄┄┄┄┄▶ gateway        a user of partition 1 joins
    message 2 ──▶ relay 0, and ┊ waits until relay 0 has handled message 1 ┊──▶ relay 1 ──▶ gateway

Links settle every parcel, one that is lost or hangs within 3 s; so no room waits longer. Rooms that do not change wait for nothing.

Source: docs/architecture.md, "Through relays".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from cluster.runtime.contract import SendRecords

MAX_WAITING_RECORDS: Final = 100_000
"""Records that wait. Policy: beyond it all go on, in whatever order they arrive."""


class Barriers:
    """What is under way, and which rooms wait for it."""

    def __init__(self) -> None:
        self._last = 0
        """The token of the newest parcel."""
        self._under_way: dict[int, None] = {}
        self._rooms: dict[int, int] = {}
        """Room → the newest parcel that it waits for."""
        self._all = 0
        """The same of all rooms; 0: they do not wait."""
        self._waiting: dict[int, list[bytes]] = {}
        self._records = 0

    def sent(self, parcels: Iterable[SendRecords]) -> None:
        """These parcels leave now; they get their tokens here."""
        for parcel in parcels:
            self._last += 1
            parcel.token = self._last
            self._under_way[self._last] = None

    def changed(self, room: int) -> None:
        """A room's way has changed."""
        if self._under_way:
            self._rooms.setdefault(room, self._last)

    def all_changed(self) -> None:
        """Any room's way may have changed."""
        if self._under_way:
            self._all = self._last

    @property
    def up(self) -> bool:
        """Whether any room waits."""
        return bool(self._rooms or self._all)

    @property
    def full(self) -> bool:
        """Whether so much waits that nothing is to wait any longer."""
        return self._records > MAX_WAITING_RECORDS

    def holds(self, room: int) -> bool:
        """Whether a room waits."""
        return bool(self._all) or room in self._rooms

    def hold(self, room: int, record: bytes) -> bool:
        """Keep a record while its room waits. Whether it does."""
        if not self.holds(room):
            return False
        self._waiting.setdefault(room, []).append(record)
        self._records += 1
        return True

    def take_back(self, room: int) -> None:
        """The last record that was kept of a room is not to be sent at all."""
        self._waiting[room].pop()
        self._records -= 1

    def settled(self, parcels: Iterable[tuple[int, bool]]) -> list[bytes]:
        """These parcels were handled or lost. Returns the records that need not wait any longer, each room's in order."""
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
        """Nothing waits any longer. Returns all that did."""
        self._rooms.clear()
        self._all = 0
        return self._take(list(self._waiting))

    def _take(self, rooms: list[int]) -> list[bytes]:
        found = [record for room in rooms for record in self._waiting.pop(room)]
        self._records -= len(found)
        return found
