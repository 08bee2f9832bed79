"""Messages of a part by slots: what a channel of mode `ordered` gives. Pure.

Each slot is a lane. A lane is with one member at a time, and its next batch leaves when everything of the last one is settled, by
committed entries. So a message is delivered after all earlier ones of its slot, and a message that fails holds up its own lane
only.

Source: docs/topics.md, "Channels".
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from cluster.core.contract import NEVER
from topic.dispatch.ready import MICRO
from topic.state.channels import Progress

MAX_AHEAD: Final = 10_000
"""Messages that are known by their lanes and not yet delivered. Policy: the part is read no further until there are fewer, so lanes
that fail for long hold up the others in the end."""
BATCH: Final = 64
"""Messages of a lane that a member gets at once."""
READ: Final = 512
"""Slots that are read at once."""

Slots = Callable[[int, int], Sequence[int]]
"""The slots of the messages with offsets [low, high)."""


@dataclass(slots=True)
class Lane:
    """A slot with messages that are not acknowledged."""

    waiting: list[int] = field(default_factory=list)
    """Offsets, rising."""
    taken: set[int] = field(default_factory=set)
    """Offsets that are with a member, or being settled."""


class Lanes:
    """Gives a lane's next messages, lane after lane. Arguments as of `AnyOrder`.

    Args:
        slots: of messages.
    """

    def __init__(self, progress: Progress, clock_us: int, now: float, slots: Slots) -> None:
        self._progress = progress
        self._slots = slots
        self._next = progress.acks.floor
        self._lanes: dict[int, Lane] = {}
        self._slot_of: dict[int, int] = {}
        """Offset → slot, of what waits or is taken."""
        self._turn: deque[int] = deque()
        """Lanes that may have something to give; each at most once."""
        self._in_turn: set[int] = set()
        self._due = {offset: now + max(0, each.due_us - clock_us) / MICRO for offset, each in progress.waiting.items()}
        """Offset → time before which it is not delivered."""
        self._wake: list[tuple[float, int]] = []
        """(time, slot): the head of a lane is due then."""

    def take(self, limit: int, end: int, now: float) -> list[int]:
        """See `Ready`: messages of one lane."""
        self._read(end)
        while self._wake and self._wake[0][0] <= now:
            self._enter(heapq.heappop(self._wake)[1])
        while self._turn:
            slot = self._turn.popleft()
            self._in_turn.discard(slot)
            lane = self._lanes.get(slot)
            if lane is None or not self._is_free(lane):
                continue
            found = self._batch(lane, min(limit, BATCH), now)
            if found:
                return found
            if lane.waiting:
                heapq.heappush(self._wake, (self._due[lane.waiting[0]], slot))
            elif not lane.taken:
                del self._lanes[slot]
        return []

    def _is_free(self, lane: Lane) -> bool:
        return not lane.taken

    def _batch(self, lane: Lane, limit: int, now: float) -> list[int]:
        """Take a lane's messages up to the first that is not due."""
        found, acks = list[int](), self._progress.acks
        gone = [offset for offset in lane.waiting if offset in acks]  # by retention, or by the leader before this one
        for offset in gone:
            lane.waiting.remove(offset)
            self._slot_of.pop(offset)
            self._due.pop(offset, None)
        for offset in lane.waiting:
            if len(found) >= limit or self._due.get(offset, now) > now:
                break
            found.append(offset)
        del lane.waiting[: len(found)]
        lane.taken.update(found)
        for offset in found:
            self._due.pop(offset, None)
        return found

    def _read(self, end: int) -> None:
        acks = self._progress.acks
        while len(self._slot_of) < MAX_AHEAD and (low := acks.next_missing(self._next)) < end:
            slots = self._slots(low, min(low + READ, end))
            for offset, slot in enumerate(slots, low):
                if offset not in acks:
                    self._lanes.setdefault(slot, Lane()).waiting.append(offset)
                    self._slot_of[offset] = slot
                    self._enter(slot)
            self._next = low + len(slots)
            if not slots:
                break

    def _enter(self, slot: int) -> None:
        if slot not in self._in_turn:
            self._in_turn.add(slot)
            self._turn.append(slot)

    def done(self, offset: int) -> None:
        """See `Ready`."""
        slot = self._slot_of.pop(offset, None)
        if slot is not None:
            lane = self._lanes[slot]
            lane.taken.discard(offset)
            if not lane.taken:
                self._enter(slot)

    def again(self, offset: int, due: float) -> None:
        """See `Ready`."""
        slot = self._slot_of.get(offset)
        if slot is not None:
            lane = self._lanes[slot]
            lane.taken.discard(offset)
            insort(lane.waiting, offset)
            self._due[offset] = due
            if not lane.taken:
                self._enter(slot)

    def next_deadline(self) -> float:
        """See `Ready`."""
        return self._wake[0][0] if self._wake else NEVER
