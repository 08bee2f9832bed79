"""So many at a time, the others in order of their coming. Pure.

Source: docs/delivery.md; the article's "thousands log in at once" after a gateway's end.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class Slots(Generic[T]):
    """A fixed number of slots, given out in the order of requests.

    Args:
        slots: how many there are. The queue is bounded by who may ask: each waits at most once.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._holders: dict[T, None] = {}
        self._queue: OrderedDict[T, None] = OrderedDict()
        """Not a dict: the first key of one is searched behind all that were taken before it."""

    @property
    def held(self) -> int:
        """Slots that are taken."""
        return len(self._holders)

    @property
    def waiting(self) -> int:
        """How many wait for a slot."""
        return len(self._queue)

    def ask(self, who: T) -> None:
        """Wait for a slot; at the end of the queue, also who has one."""
        self.leave(who)
        self._queue[who] = None

    def leave(self, who: T) -> None:
        """Give the slot back, or wait no longer."""
        self._holders.pop(who, None)
        self._queue.pop(who, None)

    def grant(self) -> list[T]:
        """Who has a slot from now on."""
        found: list[T] = []
        while self._queue and len(self._holders) < self._slots:
            who, _ = self._queue.popitem(last=False)
            self._holders[who] = None
            found.append(who)
        return found
