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
from collections.abc import Sequence
from typing import Final

from cluster.core.contract import NEVER
from topic.dispatch.flights import ranges
from topic.dispatch.ready import LOOKED, MAX_AHEAD, Skipped
from topic.dispatch.sorting import FOR_ALL, MICRO, SKIP, Sorted, Sorter
from topic.events import Run
from topic.state.channels import Progress

BATCH: Final = 64
"""Messages of a lane that a member gets at once."""
READ: Final = 512
"""Messages that are looked at together."""


class Lane:
    """A slot with messages that are not acknowledged."""

    __slots__ = ("in_turn", "taken", "waiting")

    def __init__(self) -> None:
        self.waiting: list[int] = []
        """Offsets, rising."""
        self.taken = 0
        """Number of messages that are with a member, or being settled."""
        self.in_turn = False


class Lanes:
    """Gives a lane's next messages, lane after lane. Arguments as of `AnyOrder`.

    At most `MAX_AHEAD` messages are known by their lanes: then the part is read no further until there are fewer, so lanes that
    fail for long hold up the others in the end.
    """

    def __init__(self, progress: Progress, sorter: Sorter, clock_us: int, now: float) -> None:
        self._progress, self._sorter = progress, sorter
        self._next = progress.acks.floor
        self._lanes: dict[int, Lane] = {}
        self._slot_of: dict[int, int] = {}
        """Offset → slot, of what waits or is taken."""
        self._tags: dict[int, str] = {}
        """Offset → tag, of what waits and has one."""
        self._turns: dict[str, deque[int]] = {FOR_ALL: deque()}
        """Lanes that may have something to give, by the tag of members that may have it; each at most once."""
        self._due = {offset: now + max(0, each.due_us - clock_us) / MICRO for offset, each in progress.waiting.items()}
        """Offset → time before which it is not delivered."""
        self._wake: list[tuple[float, int]] = []
        """(time, slot): the head of a lane is due then."""
        self._resent = sorted((offset for offset in progress.waiting if offset in progress.acks), reverse=True)
        """Dead letters whose slots are not looked up yet."""
        self._again_below = 0
        """Offsets below which some were looked at before, and may be taken."""
        self._removed = progress.removed
        self.skipped = Skipped()
        self.left = False

    def take(self, tag: str, limit: int, sharers: int, end: int, now: float) -> list[Run]:
        """See `Ready`: whole batches of lanes."""
        if self._removed != self._progress.removed:
            self._forget_removed()
        all_read = True
        if self._resent or self._next < end:
            all_read = self._read(end, now)
        if self._wake:
            self.wake(now)
        found, turn = list[int](), self._turns.get(tag)
        lanes = -(-len(turn) // sharers) if turn else 0
        while turn and lanes > 0 and len(found) < limit:
            slot = turn.popleft()
            lane = self._lanes[slot]
            lane.in_turn = False
            if not self._is_free(lane):
                continue
            batch = self._batch(lane, tag, min(limit - len(found), BATCH), now)
            if batch:
                found += batch
                lanes -= 1
            elif not lane.waiting:
                if not lane.taken:
                    del self._lanes[slot]
            elif self._due.get(lane.waiting[0], now) > now:
                heapq.heappush(self._wake, (self._due[lane.waiting[0]], slot))
            else:
                self._enter(slot, lane)
        self.left = bool(turn) or not all_read
        return self._runs(found)

    def _is_free(self, lane: Lane) -> bool:
        return not lane.taken

    def _batch(self, lane: Lane, tag: str, limit: int, now: float) -> list[int]:
        """Take a lane's messages up to the first that is not due, or not for the same members."""
        waiting, count = lane.waiting, 0
        if not self._due and not self._tags:
            count = min(limit, len(waiting))
        else:
            for offset in waiting[:limit]:
                if self._due.get(offset, now) > now or self._for(offset) != tag:
                    break
                count += 1
        found = waiting[:count]
        del waiting[:count]
        lane.taken += count
        if self._due:
            for offset in found:
                self._due.pop(offset, None)
        return found

    def _for(self, offset: int) -> str:
        """The tag of the members that may have a message."""
        tag = self._tags.get(offset, FOR_ALL)
        return tag if tag in self._sorter.tags else FOR_ALL

    def _runs(self, offsets: list[int]) -> list[Run]:
        waiting, found = self._progress.waiting, list[Run]()
        offsets.sort()  # a lane's messages stay in their order
        low = high = -1
        attempts = 1
        for offset in offsets:
            before = waiting.get(offset) if waiting else None
            now = before.attempts + 1 if before else 1
            if offset != high or now != attempts:
                if low < high:
                    found.append(Run(low, high, attempts))
                low, attempts = offset, now
            high = offset + 1
        if low < high:
            found.append(Run(low, high, attempts))
        return found

    # --- reading

    def _read(self, end: int, now: float) -> bool:
        """Look at messages. Returns False if there are more, and this is enough for now."""
        while self._resent and self._look_at(self._resent[-1], self._resent[-1] + 1, now):
            self._resent.pop()
        if self._sorter.spent:
            return False
        acks, left = self._progress.acks, LOOKED
        while len(self._slot_of) < MAX_AHEAD and left > 0:
            low, high = acks.next_gap(self._next, end, READ)
            if low >= high:
                self._next = max(self._next, low)
                return True
            number = self._look_at(low, high, now)
            if not number:
                return not self._sorter.spent
            self._next = low + number
            left -= number
        return left > 0 and not self._sorter.spent

    def _look_at(self, low: int, high: int, now: float) -> int:
        """Put the messages [low, high), or the first of them, into their lanes. Returns how many these were; 0: they cannot be
        read."""
        at = low
        for base, block, pieces in self._sorter.sort(low, high, now):
            slots = block.slots()
            for piece in pieces:
                for part in self._new_in(piece) if piece.low < self._again_below else (piece,):
                    if part.kind is SKIP:
                        self.skipped.add(part.low, part.high, now)
                    else:
                        self._put(part, slots[part.low - base : part.high - base])
            at = pieces[-1].high
        return at - low

    def _new_in(self, piece: Sorted) -> list[Sorted]:
        """Messages that no lane has."""
        known = self._slot_of
        found = ranges(offset for offset in range(piece.low, piece.high) if offset not in known)
        return [Sorted(low, high, piece.kind) for low, high in found]

    def _put(self, piece: Sorted, slots: Sequence[int]) -> None:
        lanes, slot_of = self._lanes, self._slot_of
        if isinstance(piece.kind, float):
            for offset in range(piece.low, piece.high):
                self._due[offset] = max(piece.kind, self._due.get(offset, piece.kind))
        elif piece.kind:
            for offset in range(piece.low, piece.high):
                self._tags[offset] = piece.kind
        for offset, slot in enumerate(slots, piece.low):
            lane = lanes.get(slot)
            if lane is None:
                lane = lanes[slot] = Lane()
            slot_of[offset] = slot
            waiting = lane.waiting
            if not waiting or waiting[-1] < offset:
                waiting.append(offset)
            else:
                insort(waiting, offset)
            if not lane.in_turn and not lane.taken:
                self._enter(slot, lane)

    def _enter(self, slot: int, lane: Lane) -> None:
        if not lane.in_turn:
            tag = self._for(lane.waiting[0]) if self._tags and lane.waiting else FOR_ALL
            lane.in_turn = True
            turn = self._turns.get(tag)
            if turn is None:
                turn = self._turns[tag] = deque()
            turn.append(slot)

    def _forget_removed(self) -> None:
        """Retention dropped some, nobody can read them, or they were superseded."""
        self._removed = self._progress.removed
        for lane in self._lanes.values():
            gone = [offset for offset in lane.waiting if not self._progress.is_open(offset)]
            for offset in gone:
                lane.waiting.remove(offset)
                self._forget(offset)
        self._resent = [offset for offset in self._resent if self._progress.is_open(offset)]

    def _forget(self, offset: int) -> None:
        self._slot_of.pop(offset, None)
        self._due.pop(offset, None)
        self._tags.pop(offset, None)

    # --- what becomes of them

    def done(self, low: int, high: int) -> None:
        """See `Ready`."""
        slot_of, lanes, tags = self._slot_of, self._lanes, self._tags
        for offset in range(low, high):
            slot = slot_of.pop(offset, None)
            if slot is not None:
                lane = lanes[slot]
                lane.taken -= 1
                if not lane.taken:
                    self._released(slot, lane)
        if tags:
            for offset in range(low, high):
                tags.pop(offset, None)

    def _released(self, slot: int, lane: Lane) -> None:
        if lane.waiting:
            self._enter(slot, lane)
        elif not lane.in_turn:
            del self._lanes[slot]

    def again(self, low: int, high: int, due: float) -> None:
        """See `Ready`."""
        for offset in range(low, high):
            slot = self._slot_of.get(offset)
            if slot is not None:
                lane = self._lanes[slot]
                lane.taken -= 1
                insort(lane.waiting, offset)
                self._due[offset] = due
                if not lane.taken:
                    self._enter(slot, lane)

    def resent(self, offsets: Sequence[int], now: float) -> None:
        """See `Ready`."""
        self._resent = sorted([*self._resent, *offsets], reverse=True)

    def wake(self, now: float) -> None:
        """See `Ready`."""
        while self._wake and self._wake[0][0] <= now:
            _, slot = heapq.heappop(self._wake)
            lane = self._lanes.get(slot)
            if lane is not None and lane.waiting and not lane.taken:
                self._enter(slot, lane)

    def sort_again(self, anew: bool) -> None:
        """See `Ready`."""
        if anew:
            self._look_again()
        self._turns = {FOR_ALL: deque()}
        for slot, lane in self._lanes.items():
            lane.in_turn = False
            if lane.waiting and not lane.taken:
                self._enter(slot, lane)

    def _look_again(self) -> None:
        self._again_below = max(self._again_below, self._next)
        for slot, lane in list(self._lanes.items()):
            for offset in lane.waiting:
                if offset in self._progress.acks:
                    insort(self._resent, offset, key=lambda each: -each)
                else:
                    self._next = min(self._next, offset)
                due = self._due.get(offset)
                self._forget(offset)
                if due is not None:
                    self._due[offset] = due
            lane.waiting.clear()
            if not lane.taken:
                del self._lanes[slot]

    def has(self, tag: str) -> bool:
        """See `Ready`."""
        return bool(self._turns.get(tag))

    def next_deadline(self) -> float:
        """See `Ready`."""
        return self._wake[0][0] if self._wake else NEVER

    def parked(self) -> dict[str, int]:
        """See `Ready`."""
        return {tag: sum(len(self._lanes[slot].waiting) for slot in turn) for tag, turn in self._turns.items() if turn}
