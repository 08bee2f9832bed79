"""Lending SnowflakeID worker numbers to publishers that have no registry of their own.

The proxy holds numbers by leases of its own and lends each for a short time. A number that comes back with the last
time used is lent again from there; one that does not come back rests until its loan is over.

Source: docs/identifiers.md.
"""

from __future__ import annotations

import heapq
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pixiu.errors import Overloaded

LOAN_MS = 600_000
"""A loan's length; a publisher renews it in time."""


@dataclass(frozen=True, slots=True)
class Loan:
    """A worker number for times in [from_ms, until_ms), Unix milliseconds."""

    worker: int
    from_ms: int
    until_ms: int


class Lender:
    """Lends numbers.

    Args:
        acquire: takes one more number from the registry: (worker, from_ms, until_ms).
        until: until when the proxy itself holds a number, Unix milliseconds.
        limit: numbers lent at one time.
    """

    def __init__(self, acquire: Callable[[], Awaitable[tuple[int, int, int]]], until: Callable[[int], int], limit: int) -> None:
        self._acquire = acquire
        self._until = until
        self._limit = limit
        self._lent: dict[int, int] = {}
        self._resting: list[tuple[int, int]] = []
        """A heap of (the first millisecond that may be used, worker)."""

    @property
    def lent(self) -> int:
        """Numbers on loan now."""
        return len(self._lent)

    def resting(self) -> list[tuple[int, int]]:
        """Numbers that are not on loan: (worker, the first millisecond that may be used)."""
        return [(worker, first) for first, worker in self._resting]

    async def lend(self, now_ms: int) -> Loan:
        """A number for a new publisher. Raises `Overloaded` at the limit, and what `acquire` raises."""
        if len(self._lent) >= self._limit:
            text = f"{self._limit} publishers of this proxy have a lent worker number (proxy.max_lent_workers); use another proxy"
            raise Overloaded(text, retry_after_ms=5_000)
        if self._resting and self._resting[0][0] <= now_ms and self._until(self._resting[0][1]) > now_ms + 1_000:
            from_ms, worker = heapq.heappop(self._resting)
        else:
            worker, from_ms, _ = await self._acquire()
        return self._loan(worker, from_ms, now_ms)

    def renew(self, worker: int, now_ms: int) -> Loan:
        """Extend a loan. A number that is not on loan gives a loan that is over."""
        if worker not in self._lent:
            return Loan(worker, 0, 0)
        return self._loan(worker, 0, now_ms)

    def give_back(self, worker: int, last_used_ms: int) -> None:
        """A publisher is gone; `last_used_ms` is 0 when it did not say what it used."""
        until_ms = self._lent.pop(worker, None)
        if until_ms is not None:
            first = last_used_ms + 1 if 0 < last_used_ms < until_ms else until_ms
            heapq.heappush(self._resting, (first, worker))

    def _loan(self, worker: int, from_ms: int, now_ms: int) -> Loan:
        until_ms = max(min(now_ms + LOAN_MS, self._until(worker)), self._lent.get(worker, 0))
        self._lent[worker] = until_ms
        return Loan(worker, from_ms, until_ms)
