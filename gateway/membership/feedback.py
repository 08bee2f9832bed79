"""Negative feedback: reports that a room has no member here, sent when a record for it came anyway. Pure.

A room is reported at most once a second, with the last GatewayMsgID that this gateway made: routers and brokers drop what is not
newer. A leave that is still in flight reports the same; reporting it twice does no harm.

Source: docs/architecture.md, docs/memberships.md, "Negative feedback".
"""

from __future__ import annotations

from typing import Final

from cluster.membership.map.anti_entropy import encode_absence
from pixiu.ids import EndpointID

INTERVAL_S: Final = 1.0
"""Least time between two reports of a room, seconds."""
MAX_ROOMS: Final = 10_000
"""Rooms reported within the last interval, or about to be. Policy: a further one is not reported; its next record will cause it."""
ROOMS_A_MESSAGE: Final = 128
"""8 bytes each, so that they fit one datagram."""


class Feedback:
    """Rooms that got a record and have no member."""

    def __init__(self) -> None:
        self._waiting: dict[int, None] = {}
        self._said: dict[int, float] = {}
        """Room → time of its report, oldest first."""
        self.said = 0
        self.left_out = 0
        """Rooms not reported because of `MAX_ROOMS`."""

    def __bool__(self) -> bool:
        """True if a room waits for its report, or had it within the last interval."""
        return bool(self._waiting or self._said)

    def note(self, room: int) -> None:
        """Note a record for a room without a member."""
        if room in self._said or room in self._waiting:
            return
        if len(self._said) + len(self._waiting) >= MAX_ROOMS:
            self.left_out += 1
            return
        self._waiting[room] = None

    def due(self, now: float) -> list[int]:
        """Take the rooms to report now."""
        while self._said:
            room, at = next(iter(self._said.items()))
            if now - at < INTERVAL_S:
                break
            del self._said[room]
        rooms = list(self._waiting)
        self._waiting.clear()
        self._said.update(dict.fromkeys(rooms, now))
        self.said += len(rooms)
        return rooms


def absences(by_router: dict[EndpointID, list[int]], as_of: int) -> list[tuple[EndpointID, list[bytes]]]:
    """Feedback messages for each router."""
    found: list[tuple[EndpointID, list[bytes]]] = []
    for router, rooms in by_router.items():
        parts = [rooms[start : start + ROOMS_A_MESSAGE] for start in range(0, len(rooms), ROOMS_A_MESSAGE)]
        found.append((router, [encode_absence(as_of, part) for part in parts]))
    return found
