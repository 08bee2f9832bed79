"""A channel in one part: what is acknowledged, what waits for another delivery, and its dead letters. Pure.

Source: docs/topics.md, "Channels".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from cluster.topics.entries import Settlement
from topic.state.acks import Acks

MAX_DEAD: Final = 10_000
"""Dead letters of a channel in a part. Policy: the one with the lowest offset is forgotten, and counted."""


class Waiting(NamedTuple):
    """A message that is to be delivered again."""

    due_us: int
    """By the log's clock."""
    attempts: int


class DeadLetter(NamedTuple):
    """A message that will not be delivered again."""

    attempts: int
    reason: int
    at_us: int
    text: str = ""
    """Reason that the member gave who rejected it; empty for others."""


class Changes(NamedTuple):
    """Rows that a settlement changed."""

    chunks: Set[int]
    """Numbers of bitmaps."""
    offsets: list[int]
    """Offsets that wait, did wait, or are dead letters from now on or no longer."""


@dataclass(slots=True)
class Progress:
    """A channel's state in one part."""

    acks: Acks = field(default_factory=Acks)
    waiting: dict[int, Waiting] = field(default_factory=dict)
    """By offset. Dead letters that were resent are among them, and count as acknowledged besides; nothing else does."""
    dead: dict[int, DeadLetter] = field(default_factory=dict)
    """By offset; all of them count as acknowledged."""
    forgotten: int = 0
    """Dead letters that were dropped by the limit."""
    lost: int = 0
    """Messages that retention dropped, or that no replica can read, before the channel had acknowledged them."""
    removed: int = 0
    """Rises when messages count as acknowledged that nobody has acknowledged. Not stored."""

    def settle(self, settlement: Settlement, end: int, at_us: int) -> Changes:
        """Take a settlement; what lies at or beyond `end` is ignored, and what is acknowledged stays so."""
        chunks, offsets, acknowledged = set[int](), list[int](), settlement.acknowledged
        if not self.waiting and all(high <= end for _, high in acknowledged):
            chunks |= self.acks.add_all(acknowledged)
        else:
            for low, high in acknowledged:
                chunks |= self._acknowledge(low, min(high, end), offsets)
        for offset, delay_us, attempts in settlement.deferred:
            if offset < end and self.is_open(offset):
                self.waiting[offset] = Waiting(at_us + delay_us, attempts)
                offsets.append(offset)
        for offset, attempts, reason, text in settlement.dead:
            if offset < end and self.is_open(offset):
                chunks |= self._acknowledge(offset, offset + 1, offsets)
                self.dead[offset] = DeadLetter(attempts, reason, at_us, text)
                offsets.append(offset)
        while len(self.dead) > MAX_DEAD:
            oldest = min(self.dead)
            del self.dead[oldest]
            self.forgotten += 1
            offsets.append(oldest)
        return Changes(chunks, offsets)

    def is_open(self, offset: int) -> bool:
        """True for a message that is to be delivered, or is with a member."""
        return offset in self.waiting or offset not in self.acks

    def open_in(self, low: int, high: int) -> Iterable[tuple[int, int]]:
        """The messages of [low, high) that are to be delivered, or are with members, as ranges, rising."""
        gaps, waiting = self.acks.gaps(low, high), self.waiting
        if not waiting:
            return gaps
        some = range(low, high) if high - low <= len(waiting) else waiting
        resent = [(offset, offset + 1) for offset in some if low <= offset < high and offset in waiting and offset in self.acks]
        return sorted([*gaps, *resent])

    def unacknowledged(self, end: int) -> int:
        """Number of messages below `end` that are to be delivered, or are with members."""
        return self.acks.missing_in(0, end) + self._resent_in(0, end)

    def _resent_in(self, low: int, high: int) -> int:
        return sum(low <= offset < high and offset in self.acks for offset in self.waiting)

    def _acknowledge(self, low: int, high: int, offsets: list[int]) -> Set[int]:
        if low >= high:
            return set()
        if self.waiting:
            done = [low] if high == low + 1 else [offset for offset in self.waiting if low <= offset < high]
            for offset in done:
                if self.waiting.pop(offset, None):
                    offsets.append(offset)
        return self.acks.add(low, high)

    def lose(self, low: int, high: int) -> Changes:
        """Nobody can read [low, high): what is not acknowledged there is lost to the channel, and counted."""
        self.lost += self.acks.missing_in(low, high) + self._resent_in(low, high)
        self.removed += 1
        offsets = list[int]()
        return Changes(self._acknowledge(low, high, offsets), offsets)

    def compact(self, ranges: Sequence[tuple[int, int]]) -> Changes:
        """Messages were superseded: they count as acknowledged, and are no dead letters any more."""
        chunks, offsets = set[int](), list[int]()
        for low, high in ranges:
            chunks |= self._acknowledge(low, high, offsets)
            some = range(low, high) if high - low <= len(self.dead) else list(self.dead)
            for offset in some:
                if low <= offset < high and self.dead.pop(offset, None) is not None:
                    offsets.append(offset)
        self.removed += 1
        return Changes(chunks, offsets)

    def trim(self, first: int) -> Changes:
        """Retention dropped everything below an offset: what was not acknowledged there is lost to the channel, and counted."""
        self.lost += self.acks.missing_in(self.acks.floor, first) + self._resent_in(0, first)
        self.removed += 1
        offsets = [offset for offset in (*self.waiting, *self.dead) if offset < first]
        for offset in offsets:
            self.waiting.pop(offset, None)
            self.dead.pop(offset, None)
        return Changes(self.acks.raise_floor(first), offsets)

    def seek(self, offset: int) -> Changes:
        """Everything below an offset is acknowledged, and nothing from there on. Dead letters below it stay."""
        chunks = self.acks.reset(offset)
        offsets = [*self.waiting, *(each for each in self.dead if each >= offset)]
        self.waiting.clear()
        for each in offsets:
            self.dead.pop(each, None)
        return Changes(chunks, offsets)

    def resend(self, offsets: Sequence[int], at_us: int) -> Changes:
        """Dead letters are to be delivered again, as if for the first time; no offsets: all of them."""
        found = [offset for offset in (offsets or sorted(self.dead)) if self.dead.pop(offset, None) is not None]
        for offset in found:
            self.waiting[offset] = Waiting(at_us, 0)
        return Changes(set(), found)
