"""Sorts messages of a part for a channel: by its filter, marks of load tests, tags, delays and expiry. Pure.

    block ──flags of the head──▶ nothing to look at: all of it is for anybody
              └──index, fields──▶ ranges: to skip (they count as acknowledged) | for members with a tag | for anybody | not yet due

Source: docs/topics.md, "Filters, tags, load tests".
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final, NamedTuple, Protocol

from pixiu.errors import InvalidArgument
from pixiu.wire import filters
from pixiu.wire.block import Block, Flag, Stamp
from topic.events import LoadTest
from topic.state.parts import Part

SKIP: Final = None
FOR_ALL: Final = ""
MICRO: Final = 1_000_000
FAR_US: Final = 3600 * MICRO
NEVER_US: Final = 1 << 64
WORK: Final = 2 << 20
"""Bytes that a channel's filter looks at in one turn, about. Policy: the next messages in the next turn."""
PIECE: Final = 16 << 10
"""Bytes of messages that a filter looks at together, if it is more than one message."""
FIELDS: Final = Flag.TAG | Flag.DELIVER_AT | Flag.EXPIRES


class Blocks(Protocol):
    """Interface to the blocks of parts."""

    def __call__(self, part: int, low: int, high: int, /) -> Iterable[tuple[Stamp, Block]]:
        """The blocks that hold the messages [low, high) of a part, or the first of them; none if the first cannot be read."""


Kind = str | float | None
"""`SKIP`; a tag, `FOR_ALL` for none; or the time from which it may be given, monotonic seconds."""


class Sorted(NamedTuple):
    """Messages [low, high) of one kind."""

    low: int
    high: int
    kind: Kind


class Wants:
    """A channel's choice, the same for all of its parts.

    Args:
        filter: JSON; empty: none.
    """

    def __init__(self, filter: str = "") -> None:
        self.text = ""
        self.filter: filters.Filter | None = None
        self.broken = ""
        """Why the filter cannot be read; then nothing is given."""
        self.load_test = LoadTest.BLOCK
        self.tags: Collection[str] = ()
        """Tags of members that are here: messages with others are for anybody."""
        self.errors: dict[int, int] = {}
        """By part: messages for which the filter's expression had no value since this leader began; they did not match."""
        self.new_errors = 0
        """Those that no total has yet."""
        self.work = WORK
        """Bytes that the filter may still look at in this turn; then nothing is sorted."""
        self.set_filter(filter)

    def set_filter(self, text: str) -> bool:
        """Take a filter. Returns True if it is another one."""
        if text == self.text:
            return False
        self.text, self.filter, self.broken = text, None, ""
        try:
            self.filter = filters.parse(text) if text else None
        except InvalidArgument as problem:
            self.broken = str(problem)
        return True


class Sorter:
    """Sorts the messages of one part for a channel.

    Args:
        wants: the channel's.
        part: whose.
        blocks: of parts.
        clock: monotonic seconds → the log's clock, Unix µs.
        fold: what has a tag that no member has is sorted as for anybody, and messages that follow each other and are due in more
            than `FAR_US` as if all were due with the earliest of them: whoever sorts them looks at them again then.
    """

    __slots__ = ("_blocks", "_clock", "_fold", "_part", "_wants")

    def __init__(self, wants: Wants, part: Part, blocks: Blocks, clock: Callable[[float], int], fold: bool) -> None:
        self._wants, self._part, self._blocks, self._clock, self._fold = wants, part, blocks, clock, fold

    @property
    def tags(self) -> Collection[str]:
        """Tags of members that are here."""
        return self._wants.tags

    @property
    def plain(self) -> bool:
        """True if everything is for anybody: no message has to be looked at."""
        wants = self._wants
        return not self._part.flags & self._marks() and wants.filter is None and wants.load_test is not LoadTest.ONLY

    def _marks(self) -> int:
        """Flags of messages that are not simply for anybody."""
        wants, marks = self._wants, Flag.DELIVER_AT | Flag.EXPIRES | Flag.HOLE
        if wants.tags or not self._fold:
            marks |= Flag.TAG
        return marks if wants.load_test is LoadTest.PASS else marks | Flag.LOAD_TEST

    @property
    def spent(self) -> bool:
        """True if the filter has looked at enough for this turn: nothing is sorted until the next one."""
        return self._wants.work <= 0

    def sort(self, low: int, high: int, now: float) -> Iterator[tuple[int, Block, list[Sorted]]]:
        """Sort the messages [low, high), or the first of them: for each block its base and what it has of them. Ends where a block
        cannot be read, and when the filter has looked at enough."""
        for stamp, block in self._blocks(self._part.part, low, high):
            begin, end = max(low, stamp.base), min(high, stamp.base + block.count)
            if begin < end:
                if self.spent:
                    return
                found = self._sorted(stamp, block, begin, end, now)
                yield stamp.base, block, found
                if found[-1].high < end:
                    return

    def _sorted(self, stamp: Stamp, block: Block, low: int, high: int, now: float) -> list[Sorted]:
        wants, only = self._wants, self._wants.load_test is LoadTest.ONLY
        if block.flags & Flag.HOLE or (only and not block.flags & Flag.LOAD_TEST):
            return [Sorted(low, high, SKIP)]
        base, found = stamp.base, list[Sorted]()
        marks = block.flags & self._marks()
        if wants.filter is None:
            if not marks:
                return [Sorted(low, high, FOR_ALL)]
            pieces: Iterable[tuple[int, int]] = [(low, high)]
        else:
            numbers, upto = self._matching(wants.filter, block, low - base, high - base)
            pieces, high = _pieces(numbers, base), base + upto
            if wants.filter.errors:
                wants.new_errors += wants.filter.errors
                wants.errors[self._part.part] = wants.errors.get(self._part.part, 0) + wants.filter.errors
                wants.filter.errors = 0
        at, flags = low, block.all_flags()
        for begin, end in pieces:
            _add(found, at, begin, SKIP)
            if not marks:
                _add(found, begin, end, FOR_ALL)
            elif marks == Flag.DELIVER_AT:
                self._sort_by_time(found, block, base, begin, end, now)
            else:
                for offset in range(begin, end):
                    _add(found, offset, offset + 1, self._kind(block, offset - base, flags[offset - base], stamp.at_us, now))
            at = end
        _add(found, at, high, SKIP)
        return found

    def _matching(self, filter: filters.Filter, block: Block, low: int, high: int) -> tuple[list[int], int]:
        """The numbers of messages that match, and the end of those that were looked at: at least one."""
        wants, found, at, ends = self._wants, list[int](), low, block.ends()
        while at < high and (wants.work > 0 or at == low):
            upto = min(high, max(at + 1, bisect_right(ends, (ends[at - 1] if at else 0) + PIECE)))
            found += filter.matching(block, at, upto)
            wants.work -= filter.work
            filter.work, at = 0, upto
        return found, at

    def _sort_by_time(self, found: list[Sorted], block: Block, base: int, low: int, high: int, now: float) -> None:
        """Messages of which nothing counts but when they are due."""
        clock_us, times = self._clock(now), block.deliver_times(low - base, high - base)
        far_us = clock_us + FAR_US if self._fold else NEVER_US
        if min(times) > far_us:
            _add(found, low, high, now + (min(times) - clock_us) / MICRO)
            return
        at = low
        for far, some in groupby(times, far_us.__lt__):
            each = list(some)
            if far:
                _add(found, at, at + len(each), now + (min(each) - clock_us) / MICRO)
                at += len(each)
                continue
            for deliver_at_us in each:
                _add(found, at, at + 1, FOR_ALL if deliver_at_us <= clock_us else now + (deliver_at_us - clock_us) / MICRO)
                at += 1

    def _kind(self, block: Block, number: int, flags: int, at_us: int, now: float) -> Kind:
        wants = self._wants
        marked = bool(flags & Flag.LOAD_TEST)
        if marked if wants.load_test is LoadTest.BLOCK else not marked and wants.load_test is LoadTest.ONLY:
            return SKIP
        if not flags & FIELDS:
            return FOR_ALL
        deliver_at_us, expires_in_s, tag = block.handling(number)
        clock_us = self._clock(now)
        if expires_in_s is not None and clock_us >= at_us + expires_in_s * MICRO:
            return SKIP
        if deliver_at_us is not None and deliver_at_us > clock_us:
            return now + (deliver_at_us - clock_us) / MICRO
        return FOR_ALL if tag is None or (self._fold and tag not in wants.tags) else tag


def _pieces(numbers: Sequence[int], base: int) -> Iterator[tuple[int, int]]:
    """Offsets of messages, as ranges."""
    begin = end = -1
    for number in numbers:
        if number != end:
            if end > begin:
                yield base + begin, base + end
            begin = number
        end = number + 1
    if end > begin:
        yield base + begin, base + end


def _add(found: list[Sorted], low: int, high: int, kind: Kind) -> None:
    if low < high:
        if found and found[-1].high == low and found[-1].kind == kind:
            found[-1] = Sorted(found[-1].low, high, kind)
        else:
            found.append(Sorted(low, high, kind))
