"""A fixed number of slots, with a queue. Pure.

Source: docs/delivery.md; the article's "thousands log in at once" after a gateway's end.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class Slots(Generic[T]):
    """A fixed number of slots, given out in the order of requests.

    Args:
        slots: number of slots. The queue is bounded by the number of askers: each waits at most once.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._holders: dict[T, None] = {}
        self._queue: OrderedDict[T, None] = OrderedDict()
        """Not a dict: finding its first key takes longer with every key removed before it."""

    @property
    def held(self) -> int:
        """Number of slots in use."""
        return len(self._holders)

    @property
    def waiting(self) -> int:
        """Number of askers that wait for a slot."""
        return len(self._queue)

    def ask(self, who: T) -> None:
        """Wait for a slot at the end of the queue; a holder gives its slot back first."""
        self.leave(who)
        self._queue[who] = None

    def leave(self, who: T) -> None:
        """Give the slot back, or leave the queue."""
        self._holders.pop(who, None)
        self._queue.pop(who, None)

    def grant(self) -> list[T]:
        """Grant free slots; return the new holders."""
        found: list[T] = []
        while self._queue and len(self._holders) < self._slots:
            who, _ = self._queue.popitem(last=False)
            self._holders[who] = None
            found.append(who)
        return found
