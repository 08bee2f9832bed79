"""Messages of a channel and part that are not due yet, by time: however many they are, and however far off. Pure.

    add ──▶ hours (4,096 s) ──split before they come──▶ seconds ──when one begins──▶ a heap ──due──▶ take
                └── two arrays: 12 bytes for each range

A range of messages that follow each other and are due in the same millisecond is one entry.

Source: docs/topics.md, "Filters, tags, load tests".
"""

from __future__ import annotations

import heapq
from array import array
from math import ceil
from typing import Final

from cluster.core.contract import NEVER

HOUR_BITS: Final = 12
"""Binary logarithm of the seconds of a coarse bucket."""
LEAD_S: Final = 600
"""A coarse bucket is split so long before its time."""
SPLIT: Final = 8192
"""Entries that are split in one turn. Policy: the others in the next turns, or all when their time has come."""
SPLIT_AGAIN_S: Final = 0.02
"""Pause between such turns."""
LENGTH_BITS: Final = 16
LONGEST: Final = 1 << LENGTH_BITS
"""Messages of an entry."""
MILLI: Final = 1000


class _Bucket:
    """Entries whose times begin together: where they lie, and the milliseconds after the bucket's begin."""

    __slots__ = ("places", "times")

    def __init__(self) -> None:
        self.places = array("Q")
        self.times = array("I")

    def add(self, milli: int, low: int, high: int) -> int:
        """Add a range. Returns the number of new entries."""
        places, times, before = self.places, self.times, len(self.places)
        if times and times[-1] == milli:
            first, length = places[-1] >> LENGTH_BITS, (places[-1] & LONGEST - 1) + 1
            if first + length == low and high - first <= LONGEST:
                places[-1] = first << LENGTH_BITS | high - first - 1
                return 0
        while low < high:
            upto = min(high, low + LONGEST)
            places.append(low << LENGTH_BITS | upto - low - 1)
            times.append(milli)
            low = upto
        return len(places) - before


class Delays:
    """Index of messages by the time from which they may be delivered, monotonic seconds; at most a millisecond late."""

    __slots__ = ("_heap", "_hour", "_hour_keys", "_hours", "_second", "_second_keys", "_seconds", "_split_at", "count")

    def __init__(self, now: float) -> None:
        self._heap: list[tuple[float, int, int]] = []
        """(time, low, high) of what is due in the present second, or was."""
        self._seconds: dict[int, _Bucket] = {}
        self._second_keys: list[int] = []
        self._hours: dict[int, _Bucket] = {}
        self._hour_keys: list[int] = []
        self._second = int(now) + 1
        """Messages that are due before this second are in the heap."""
        self._hour = (self._second >> HOUR_BITS) + 1
        """Messages that are due before this hour are in the heap, or among the seconds."""
        self._split_at = 0.0
        self.count = 0
        """Entries: 12 bytes each, and 150 in the heap."""

    def add(self, due: float, low: int, high: int) -> None:
        """The messages [low, high) are due at a time."""
        second = int(due)
        if second < self._second:
            heapq.heappush(self._heap, (due, low, high))
            self.count += 1
            return
        if (hour := second >> HOUR_BITS) < self._hour:
            self._add_second(second, ceil((due - second) * MILLI), low, high)
            return
        bucket = self._hours.get(hour)
        if bucket is None:
            bucket = self._hours[hour] = _Bucket()
            heapq.heappush(self._hour_keys, hour)
        self.count += bucket.add(ceil((due - (hour << HOUR_BITS)) * MILLI), low, high)

    def _add_second(self, second: int, milli: int, low: int, high: int) -> None:
        bucket = self._seconds.get(second)
        if bucket is None:
            bucket = self._seconds[second] = _Bucket()
            heapq.heappush(self._second_keys, second)
        self.count += bucket.add(milli, low, high)

    def next_deadline(self) -> float:
        """Time at which something is due, or is to be prepared; `NEVER`: nothing waits."""
        found = self._heap[0][0] if self._heap else NEVER
        if self._second_keys:
            found = min(found, self._second_keys[0])
        if self._hour_keys:
            found = min(found, max((self._hour_keys[0] << HOUR_BITS) - LEAD_S, self._split_at))
        return found

    def take(self, now: float) -> list[tuple[int, int]]:
        """Take what is due, in the order of time."""
        self._prepare(now)
        found, heap = list[tuple[int, int]](), self._heap
        while heap and heap[0][0] <= now:
            _, low, high = heapq.heappop(heap)
            found.append((low, high))
        self.count -= len(found)
        return found

    def _prepare(self, now: float) -> None:
        """Split the hours that come soon, and begin with the seconds that have come."""
        while self._hour_keys and (begin := self._hour_keys[0] << HOUR_BITS) <= now + LEAD_S:
            self._split(self._hour_keys[0], now + 1 < begin)
            if self._hour_keys and self._hour_keys[0] << HOUR_BITS == begin:
                self._split_at = now + SPLIT_AGAIN_S
                break
        self._second = max(self._second, int(now) + 1)
        while self._second_keys and self._second_keys[0] < self._second:
            second = heapq.heappop(self._second_keys)
            bucket = self._seconds.pop(second)
            for place, milli in zip(bucket.places, bucket.times, strict=True):
                low = place >> LENGTH_BITS
                heapq.heappush(self._heap, (second + milli / MILLI, low, low + (place & LONGEST - 1) + 1))

    def _split(self, hour: int, some: bool) -> None:
        """Put entries of an hour among the seconds: `some`, or all."""
        bucket, begin = self._hours[hour], hour << HOUR_BITS
        self._hour = max(self._hour, hour + 1)  # what is added from now on
        at = max(len(bucket.places) - SPLIT, 0) if some else 0
        for place, milli in zip(bucket.places[at:], bucket.times[at:], strict=True):
            low = place >> LENGTH_BITS
            self._add_second(begin + milli // MILLI, milli % MILLI, low, low + (place & LONGEST - 1) + 1)
        self.count -= len(bucket.places) - at
        del bucket.places[at:], bucket.times[at:]
        if not at:
            heapq.heappop(self._hour_keys)
            del self._hours[hour]
