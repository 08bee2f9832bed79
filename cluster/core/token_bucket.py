"""Token buckets: limits of what a sender may send, fixed in advance and measured with a clock that is passed in. Pure.

A bucket fills with `rate` tokens a second up to `burst`. A batch is taken whole while the bucket is not empty, and may
leave it in debt; the next one waits until the debt is paid. So a batch that is larger than the burst is possible, the
long-run rate is exact, and refusing costs no walk through the batch.

        level   burst ─┐   ┌ batch
                       │╲  │   ╱╲ …
                   0 ──┼─╲─┼─╱───── refused while below; the wait is debt / rate
                       │  ╲│╱

Source: docs/promises.md, "Failure rules" 4.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class TokenBucket:
    """One bucket, full at first.

    Args:
        rate: tokens a second, above 0.
        burst: its capacity in tokens, above 0.
        now: monotonic seconds.
    """

    __slots__ = ("_at", "_burst", "_level", "_rate")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._level = burst
        self._at = now

    def wait_s(self, now: float) -> float:
        """Return the seconds until something can be taken; 0 if it can be now."""
        self._fill(now)
        return 0.0 if self._level > 0 else max(-self._level / self._rate, 1e-6)

    def take(self, amount: float, now: float) -> float:
        """Take `amount` tokens. Returns 0 if they were taken, else the seconds to wait, and takes nothing."""
        wait_s = self.wait_s(now)
        if not wait_s:
            self._level -= amount
        return wait_s

    def spend(self, amount: float, now: float) -> float:
        """Take `amount` tokens in any case. Returns the seconds until the debt is paid, 0 for none."""
        self._fill(now)
        self._level -= amount
        return max(-self._level / self._rate, 0.0)

    def take_some(self, amount: float, now: float) -> float:
        """Take as many of `amount` tokens as there are. Returns their number."""
        self._fill(now)
        taken = min(amount, max(self._level, 0.0))
        self._level -= taken
        return taken

    def full_at(self) -> float:
        """Return the time at which it is full again if nothing is taken: from then on it holds no information and may be
        forgotten."""
        return self._at + (self._burst - self._level) / self._rate

    def _fill(self, now: float) -> None:
        if now > self._at:
            self._level = min(self._level + (now - self._at) * self._rate, self._burst)
            self._at = now


class Meter:
    """Messages and bytes of one sender: two buckets that are checked together. A rate of 0 is no limit.

    Args:
        messages_per_s, bytes_per_s: the rates.
        burst_s: both bursts, as seconds of their rate.
        now: monotonic seconds.
    """

    __slots__ = ("_buckets",)

    def __init__(self, messages_per_s: float, bytes_per_s: float, burst_s: float, now: float) -> None:
        self._buckets = [TokenBucket(rate, rate * burst_s, now) if rate else None for rate in (messages_per_s, bytes_per_s)]

    def take(self, messages: int, size: int, now: float) -> float:
        """Take a batch. Returns 0 if it was taken, else the seconds to wait, and takes nothing."""
        wait_s = self.wait_s(now)
        if not wait_s:
            self.spend(messages, size, now)
        return wait_s

    def wait_s(self, now: float) -> float:
        """Return the seconds until something can be taken; 0 if it can be now."""
        return max((bucket.wait_s(now) for bucket in self._buckets if bucket is not None), default=0.0)

    def spend(self, messages: int, size: int, now: float) -> float:
        """Take a batch in any case. Returns the seconds until its debt is paid, 0 for none."""
        wait_s = 0.0
        for bucket, amount in zip(self._buckets, (messages, size), strict=True):
            if bucket is not None:
                wait_s = max(wait_s, bucket.spend(amount, now))
        return wait_s

    def full_at(self) -> float:
        """Return the time from which it may be forgotten."""
        return max((bucket.full_at() for bucket in self._buckets if bucket is not None), default=0.0)


class Meters(Generic[Key]):
    """A meter for each key, at most `limit` of them.

    Policy at the bound: the least recently used one is forgotten, which gives its key a full burst again. So a sender with more
    keys than the bound gets at most one burst for each turn through them, never a share of another key.

    """

    def __init__(self, messages_per_s: float, bytes_per_s: float, burst_s: float, limit: int) -> None:
        self._rates = (messages_per_s, bytes_per_s, burst_s)
        self._limit = limit
        self._meters: OrderedDict[Key, Meter] = OrderedDict()
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._meters)

    def take(self, key: Key, messages: int, size: int, now: float) -> float:
        """Take a batch of a key. Returns 0 if it was taken, else the seconds to wait."""
        return self.of(key, now).take(messages, size, now)

    def of(self, key: Key, now: float) -> Meter:
        """Return a key's meter. Do not keep it: it may be forgotten."""
        meter = self._meters.get(key)
        if meter is None:
            meter = self._meters[key] = Meter(*self._rates, now)
            self._make_space(now)
        self._meters.move_to_end(key)
        return meter

    def forget(self, key: Key) -> None:
        """Forget the meter of a key that is gone."""
        self._meters.pop(key, None)

    def _make_space(self, now: float) -> None:
        """Forget full meters at the old end, two for each new one, so that the table follows the keys in use."""
        for _ in range(2):
            oldest = next(iter(self._meters))
            if len(self._meters) > self._limit:
                self.evicted += 1
            elif self._meters[oldest].full_at() > now or len(self._meters) == 1:
                return
            del self._meters[oldest]
