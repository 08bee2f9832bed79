"""Lending SnowflakeID worker numbers to publishers that have no registry of their own.

The proxy holds numbers by leases of its own and lends each for a short time. A number that comes back with the last
time used is lent again from there, where clients log in only to the same login: the proof of the loan that is over would serve for
IDs of the next one's time. One that does not come back, or goes to another login, rests until its loan is over.

Source: docs/identifiers.md.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

from cluster.access.loans import Loan
from pixiu.errors import Overloaded

LOAN_MS = 600_000
"""A loan's length; a publisher renews it in time."""
NO_LOAN = Loan(0, 0, 0)
"""One that is over."""


@dataclass(slots=True)
class _Lent:
    loan: Loan
    owner: bytes


class _Resting(NamedTuple):
    """A number that is not on loan: the first millisecond that its last owner may use, and that anybody may."""

    own_from_ms: int
    from_ms: int
    worker: int
    owner: bytes


class Lender:
    """Lends worker numbers to SDK clients.

    Args:
        acquire: takes one more number from the registry: (worker, from_ms, until_ms).
        until: until when the proxy itself holds a number, Unix milliseconds.
        limit: numbers lent at one time.
    """

    def __init__(self, acquire: Callable[[], Awaitable[tuple[int, int, int]]], until: Callable[[int], int], limit: int) -> None:
        self._acquire = acquire
        self._until = until
        self._limit = limit
        self._lent: dict[int, _Lent] = {}
        self._resting: list[_Resting] = []
        """At most as many as the proxy may hold (`registry.leases.MAX_LEASES`)."""

    @property
    def lent(self) -> int:
        """Numbers on loan now."""
        return len(self._lent)

    def resting(self) -> list[tuple[int, int]]:
        """Numbers that are not on loan: (worker, the first millisecond that anybody may use)."""
        return [(one.worker, one.from_ms) for one in self._resting]

    async def lend(self, now_ms: int, owner: bytes = b"") -> Loan:
        """A number for a new publisher. `owner`: its login; empty where nobody has to log in, who are then one.

        Raises `Overloaded` at the limit, and what `acquire` raises.
        """
        if len(self._lent) >= self._limit:
            text = f"{self._limit} publishers of this proxy have a lent worker number (proxy.max_lent_workers); use another proxy"
            raise Overloaded(text, retry_after_ms=5_000)
        firsts = [(one.own_from_ms if one.owner == owner else one.from_ms, one) for one in self._resting]
        firsts = [(first, one) for first, one in firsts if first <= now_ms and self._until(one.worker) > now_ms + 1_000]
        if firsts:
            from_ms, found = min(firsts)
            self._resting.remove(found)
            worker = found.worker
        else:
            worker, from_ms, _ = await self._acquire()
        return self._loan(worker, from_ms, now_ms, owner)

    def renew(self, worker: int, now_ms: int) -> Loan:
        """Extend a loan. A number that is not on loan gives a loan that is over."""
        held = self._lent.get(worker)
        return NO_LOAN if held is None else self._loan(worker, held.loan.from_ms, now_ms, held.owner)

    def give_back(self, worker: int, last_used_ms: int) -> None:
        """A publisher is gone; `last_used_ms` is 0 when it did not say what it used."""
        held = self._lent.pop(worker, None)
        if held is not None:
            until_ms = held.loan.until_ms
            first = max(last_used_ms + 1, held.loan.from_ms) if 0 < last_used_ms < until_ms else until_ms
            self._resting.append(_Resting(first, until_ms if held.owner else first, worker, held.owner))

    def _loan(self, worker: int, from_ms: int, now_ms: int, owner: bytes) -> Loan:
        before = self._lent.get(worker)
        until_ms = max(min(now_ms + LOAN_MS, self._until(worker)), before.loan.until_ms if before is not None else 0)
        loan = Loan(worker, from_ms, until_ms)
        self._lent[worker] = _Lent(loan, owner)
        return loan
