"""Deliveries that may wait, those of big rooms: a few connections every millisecond.

A copy for a VRoom is hundreds of writes. Done at once they would delay everything that comes meanwhile for other rooms, in this
process and, if cores are scarce, in others; done a few at a time with a pause between, they delay nobody by more than a few writes.
The more waits, the more is written at a time, so that all of it leaves within some ten milliseconds.

Source: PiXiu §2.2.2; docs/routing.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from gateway import events as ev

MIN_WRITES = 16
"""Least number of connections written to at a time: some 0.2 ms."""
SHARE = 10
"""Part of the waiting connections written to at a time, one in this number, when that is more."""
PAUSE_S = 0.001
MAX_WAITING = 4_096
"""Deliveries that may wait. Policy: the oldest is dropped, and its messages are counted."""


class PacedFanout:
    """A queue of deliveries, processed in order.

    Args:
        write: writes a delivery's data to a connection, by its number; does nothing if that is gone.
        later: calls a function after a number of seconds.
        dropped: called with the number of dropped messages, each counted once per connection.
    """

    def __init__(
        self,
        write: Callable[[int, bytes, int], None],
        later: Callable[[float, Callable[[], None]], object],
        dropped: Callable[[int], None],
    ) -> None:
        self._write = write
        self._later = later
        self._dropped = dropped
        self._waiting: deque[ev.Deliver] = deque()
        self._position = 0
        self._connections = 0
        self._scheduled = False

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, delivery: ev.Deliver) -> None:
        """Add a delivery."""
        if len(self._waiting) >= MAX_WAITING:
            oldest = self._waiting[0]
            self._dropped(oldest.count * (len(oldest.connections) - self._position))
            self._connections -= len(oldest.connections) - self._position
            self._next()
        self._waiting.append(delivery)
        self._connections += len(delivery.connections)
        if not self._scheduled:
            self._scheduled = True
            self._later(0.0, self._turn)

    def _next(self) -> None:
        self._waiting.popleft()
        self._position = 0

    def _turn(self) -> None:
        left = max(MIN_WRITES, self._connections // SHARE)
        self._connections -= min(left, self._connections)
        while left and self._waiting:
            delivery = self._waiting[0]
            end = min(self._position + left, len(delivery.connections))
            for number in delivery.connections[self._position : end]:
                self._write(number, delivery.data, delivery.count)
            left -= end - self._position
            self._position = end
            if end == len(delivery.connections):
                self._next()
        self._scheduled = bool(self._waiting)
        if self._scheduled:
            self._later(PAUSE_S, self._turn)
