"""Messages of a part that may be delivered next: what a channel of mode `any` gives, the due ones first, then by offset. Pure.

    not looked at ──▶ for anybody, or for members with a tag ──take──▶ with a member
          │    ▲────── not due ◀── comes again after a delay ────────────────┘
          └──▶ skipped: counts as acknowledged, once it is settled

Source: docs/topics.md, "Channels".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Protocol

from cluster.core.contract import NEVER
from topic.dispatch.delays import Delays
from topic.dispatch.flights import ranges
from topic.dispatch.sorting import FOR_ALL, MICRO, SKIP, Sorted, Sorter
from topic.events import Run
from topic.state.channels import Progress

MAX_AHEAD: Final = 10_000
"""Ranges of messages that were looked at and not yet given. Policy: the part is read no further until there are fewer, so what
nobody takes holds up the rest in the end."""
MAX_DELAYED: Final = 12_000_000
"""Ranges of messages that are not due, in an index of 12 bytes each. Policy: as of `MAX_AHEAD`; more that come again are kept, as
the state has them anyway."""
READ: Final = 4096
"""Messages that are looked at together."""
LOOKED: Final = 8192
"""Messages that are looked at in one turn, at most. Policy: the next ones in the next turn."""


class Ready(Protocol):
    """Interface to either order: messages are taken, and are then done or come again."""

    skipped: Skipped
    left: bool
    """After a call of `take`: more may be ready."""

    def take(self, tag: str, limit: int, sharers: int, end: int, now: float) -> list[Run]:
        """Take at most `limit` messages below `end` that a member with this tag may have now, by offset, and not more than a share
        if so many members could have some; none: nothing is ready."""

    def done(self, low: int, high: int) -> None:
        """Messages that were taken are acknowledged, or dead."""

    def again(self, low: int, high: int, due: float) -> None:
        """Messages that were taken are to be delivered again from a time on, monotonic seconds."""

    def resent(self, offsets: Sequence[int], now: float) -> None:
        """Dead letters are to be delivered again."""

    def wake(self, now: float) -> None:
        """Time has passed: what waited and is due is ready."""

    def sort_again(self, anew: bool) -> None:
        """Members with other tags are here. `anew`: the channel wants other messages, too."""

    def has(self, tag: str) -> bool:
        """True if something was looked at that is for members with a tag."""

    def next_deadline(self) -> float:
        """Time at which a message that waits is due; `NEVER`: none waits."""

    def parked(self) -> dict[str, int]:
        """Number of messages that were looked at and wait for a member, by tag."""


class Skipped:
    """Messages that a channel does not want, until an entry acknowledges them.

    Attributes:
        since: when the first of them was found; `NEVER`: there are none.
    """

    __slots__ = ("count", "found", "since")

    def __init__(self) -> None:
        self.found: list[tuple[int, int]] = []
        self.count = 0
        self.since = NEVER

    def add(self, low: int, high: int, now: float) -> None:
        """Messages [low, high) are not wanted."""
        if self.found and self.found[-1][1] == low:
            self.found[-1] = self.found[-1][0], high
        else:
            self.found.append((low, high))
        self.count += high - low
        self.since = min(self.since, now)

    def take(self, limit: int) -> list[tuple[int, int]]:
        """Take at most this many ranges, to be acknowledged."""
        found, self.found = self.found[:limit], self.found[limit:]
        self.count -= sum(high - low for low, high in found)
        if not self.found:
            self.since = NEVER
        return found


class AnyOrder:
    """Gives each message that is not acknowledged.

    Args:
        progress: the channel's state in the part; what waits in it is due in as many seconds as the log's clock is before it.
        sorter: of the part's messages.
        clock_us: the log's clock.
        now: the same moment, monotonic seconds.
    """

    __slots__ = ("_backlog", "_held", "_next", "_parked", "_progress", "_removed", "_sorter", "_waiting", "left", "skipped")

    def __init__(self, progress: Progress, sorter: Sorter, clock_us: int, now: float) -> None:
        self._progress, self._sorter = progress, sorter
        self._next = progress.acks.floor
        """Everything below was looked at, or given."""
        self._parked: dict[str, deque[Run]] = {}
        """Messages that may be given, by tag."""
        self._backlog: list[tuple[int, int]] = []
        """Messages below `_next` that have to be looked at again, the first at the end."""
        self._waiting, held = Delays(now), list[tuple[int, int]]()
        """Messages that are not due."""
        for low, high, due in _dues(progress, clock_us, now):
            self._waiting.add(due, low, high)
            if low not in progress.acks:
                held.append((low, high))
        self._held = sorted(held, reverse=True)
        """Of them, those that the part's reading passes over, the first at the end."""
        self._removed = progress.removed
        self.skipped = Skipped()
        self.left = False

    def take(self, tag: str, limit: int, sharers: int, end: int, now: float) -> list[Run]:
        """See `Ready`."""
        if sharers > 1 and end - self._next < limit * sharers:
            parked = len(self._parked.get(tag, ()))
            limit = min(limit, max(-((self._next - end) // sharers), -(-parked // sharers), 1))
        if self._waiting.count and self._waiting.next_deadline() <= now:
            self.wake(now)
        if self._removed != self._progress.removed:
            self._forget_removed()
        found, ready, looked, self.left = list[Run](), self._parked.get(tag), 0, True
        plain = self._sorter.plain
        while limit > 0:
            if ready:
                run = ready[0]
                if run.high - run.low > limit:
                    ready[0] = Run(run.low + limit, run.high, run.attempts)
                    run = Run(run.low, run.low + limit, run.attempts)
                else:
                    ready.popleft()
            elif plain and not self._backlog:
                low, high = self._gap(end, limit)
                if low >= high or tag != FOR_ALL:
                    self.left = False
                    break
                self._next = high
                run = Run(low, high, 1)
            elif looked >= LOOKED or self._sorter.spent:
                break
            elif number := self._sort_some(end, now):
                looked += number
                ready = self._parked.get(tag)
                continue
            else:
                self.left = False
                break
            limit -= run.high - run.low
            if found and found[-1].high == run.low and found[-1].attempts == run.attempts:
                run = Run(found.pop().low, run.high, run.attempts)
            found.append(run)
        if len(found) > 1:
            found.sort()
        return found

    @property
    def delayed(self) -> int:
        """Entries of messages that are not due."""
        return self._waiting.count

    def _gap(self, end: int, limit: int) -> tuple[int, int]:
        """The next messages that were not looked at yet."""
        while True:
            low, high = self._progress.acks.next_gap(self._next, end, limit)
            held = self._held
            while held and held[-1][1] <= low:
                held.pop()
            if not held or held[-1][0] >= high:
                return low, high
            if held[-1][0] > low:
                return low, held[-1][0]
            self._next = held.pop()[1]

    def _sort_some(self, end: int, now: float) -> int:
        """Look at some messages. Returns how many."""
        if sum(map(len, self._parked.values())) >= MAX_AHEAD or self._waiting.count >= MAX_DELAYED:
            return 0
        if self._backlog:
            low, high = self._backlog.pop()
            upto = low
            for each in self._sorted(low, min(high, low + READ), now):
                self._sort_in(each, now)
                upto = each.high
            if upto < high:  # the rest another time; or it cannot be read
                self._backlog.append((upto, high))
            return upto - low
        low, high = self._gap(end, READ)
        self._next = max(self._next, low)
        for each in self._sorted(low, high, now) if low < high else ():
            self._sort_in(each, now)
            self._next = each.high
        return self._next - low

    def _sorted(self, low: int, high: int, now: float) -> Iterator[Sorted]:
        if self._sorter.plain:
            yield Sorted(low, high, FOR_ALL)
        else:
            for _, _, pieces in self._sorter.sort(low, high, now):
                yield from pieces

    def _sort_in(self, found: Sorted, now: float) -> None:
        low, high, kind = found
        if kind is SKIP:
            self.skipped.add(low, high, now)
        elif isinstance(kind, float):
            self._waiting.add(kind, low, high)
        else:
            self._park(low, high, kind)

    def _park(self, low: int, high: int, kind: str) -> None:
        parked = self._parked.get(kind)
        if parked is None:
            parked = self._parked[kind] = deque()
        waiting, at = self._progress.waiting, low
        if waiting:
            some = range(low, high) if high - low <= len(waiting) else waiting
            for offset in sorted(offset for offset in some if low <= offset < high and offset in waiting):
                if at < offset:
                    parked.append(Run(at, offset, 1))
                at, attempts = offset + 1, waiting[offset].attempts + 1
                if parked and parked[-1].high == offset and parked[-1].attempts == attempts:
                    parked.append(Run(parked.pop().low, at, attempts))
                else:
                    parked.append(Run(offset, at, attempts))
        if at < high:
            if parked and parked[-1].high == at and parked[-1].attempts == 1:
                parked.append(Run(parked.pop().low, high, 1))
            else:
                parked.append(Run(at, high, 1))

    def _forget_removed(self) -> None:
        """Retention dropped some, nobody can read them, or they were superseded."""
        self._removed = self._progress.removed
        for tag, parked in self._parked.items():
            self._parked[tag] = deque(run for each in parked for run in self._left_of(each))
        self._backlog = [run for low, high in self._backlog for run in reversed(list(self._progress.open_in(low, high)))]

    def _left_of(self, run: Run) -> Iterator[Run]:
        for low, high in self._progress.open_in(run.low, run.high):
            yield Run(low, high, run.attempts)

    def done(self, low: int, high: int) -> None:
        """See `Ready`."""

    def again(self, low: int, high: int, due: float) -> None:
        """See `Ready`."""
        self._waiting.add(due, low, high)

    def resent(self, offsets: Sequence[int], now: float) -> None:
        """See `Ready`."""
        for low, high in ranges(offsets):
            self.again(low, high, now)

    def wake(self, now: float) -> None:
        """See `Ready`."""
        due = list[tuple[int, int]]()
        for low, high in self._waiting.take(now):
            due += self._progress.open_in(low, high)
        if self._sorter.plain:
            for low, high in due:
                self._park(low, high, FOR_ALL)
        else:
            self._backlog += reversed(due)

    def sort_again(self, anew: bool) -> None:
        """See `Ready`."""
        parked = [(run.low, run.high) for each in self._parked.values() for run in each]
        self._parked.clear()
        self._backlog = sorted([*self._backlog, *parked], reverse=True)

    def has(self, tag: str) -> bool:
        """See `Ready`."""
        return bool(self._parked.get(tag))

    def next_deadline(self) -> float:
        """See `Ready`."""
        return self._waiting.next_deadline()

    def parked(self) -> dict[str, int]:
        """See `Ready`."""
        return {tag: sum(run.high - run.low for run in each) for tag, each in self._parked.items() if each}


def _dues(progress: Progress, clock_us: int, now: float) -> Iterable[tuple[int, int, float]]:
    """Messages that wait in the state, as ranges that are due at the same time: (low, high, monotonic seconds)."""
    by_due = dict[int, list[int]]()
    for offset, each in progress.waiting.items():
        by_due.setdefault(each.due_us, []).append(offset)
    for due_us, offsets in by_due.items():
        for low, high in ranges(offsets):
            yield low, high, now + max(0, due_us - clock_us) / MICRO
