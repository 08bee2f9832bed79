"""Messages of a part that may be delivered next, to any member: what a channel of mode `any` gives, by offset. Pure.

Source: docs/topics.md, "Channels".
"""

from __future__ import annotations

import heapq
from typing import Final, Protocol

from cluster.core.contract import NEVER
from topic.state.channels import Progress

MICRO: Final = 1_000_000


class Ready(Protocol):
    """Interface to either order: a message is taken, and is then done or comes again."""

    def take(self, limit: int, end: int, now: float) -> list[int]:
        """Take at most `limit` offsets below `end` that one member may have now, together; none: nothing is ready."""

    def done(self, offset: int) -> None:
        """A message that was taken is acknowledged, or dead."""

    def again(self, offset: int, due: float) -> None:
        """A message that was taken is to be delivered again from a time on, monotonic seconds."""

    def next_deadline(self) -> float:
        """Time at which a message that waits is due; `NEVER`: none waits."""


class AnyOrder:
    """Gives each message that is not acknowledged, the due ones first.

    Args:
        progress: the channel's state in the part; what waits in it is due in as many seconds as the log's clock is before it.
        clock_us: the log's clock.
        now: the same moment, monotonic seconds.
    """

    def __init__(self, progress: Progress, clock_us: int, now: float) -> None:
        self._progress = progress
        self._next = progress.acks.floor
        self._waiting = [(now + max(0, each.due_us - clock_us) / MICRO, offset) for offset, each in progress.waiting.items()]
        heapq.heapify(self._waiting)
        self._held = {offset for _, offset in self._waiting}
        """Offsets that come from the heap, or came: the scan passes over them, once."""

    def take(self, limit: int, end: int, now: float) -> list[int]:
        """See `Ready`."""
        found = list[int]()
        acks = self._progress.acks
        while self._waiting and self._waiting[0][0] <= now and len(found) < limit:
            _, offset = heapq.heappop(self._waiting)
            if offset not in acks:
                found.append(offset)
        while len(found) < limit:
            offset = acks.next_missing(self._next)
            if offset >= end:
                break
            self._next = offset + 1
            if offset in self._held:
                self._held.discard(offset)
            else:
                found.append(offset)
        return found

    def done(self, offset: int) -> None:
        """See `Ready`."""

    def again(self, offset: int, due: float) -> None:
        """See `Ready`."""
        heapq.heappush(self._waiting, (due, offset))
        if offset >= self._next:
            self._held.add(offset)

    def next_deadline(self) -> float:
        """See `Ready`."""
        return self._waiting[0][0] if self._waiting else NEVER
