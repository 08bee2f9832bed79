"""Lending SnowflakeID worker numbers to publishers that have no registry of their own.

The proxy leases numbers itself and lends each for a short time. A number that comes back with the last time used is lent again from
that time on; where clients log in, only to the same login, because the proof of the old loan would also be valid for IDs of the
next one's time. A number that does not come back, or goes to another login, rests until its loan is over.

One login has a share of the numbers, including those that rest for it: opening and breaking streams takes no more. Beyond the share
it gets again what it did not give back, for times after now and after the last that its streams were seen to use. If two programs
of one login hold more than the share, and one continues by another proxy with a number whose stream it broke off here, they could
make the same ID: each repeats at most the other's.

Source: docs/identifiers.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

from cluster.trust.loans import TIME_SHIFT, WORKER_MASK, Loan
from pixiu.errors import Overloaded
from pixiu.ids import SNOWFLAKE_EPOCH_MS, SNOWFLAKE_SEQUENCE_BITS

LOAN_MS = 600_000
"""A loan's length; a publisher renews it in time."""
NO_LOAN = Loan(0, 0, 0)
"""A loan that is over."""
NO_WORKER = -1
SILENT_MS = 5_000
"""A number that was not given back may still be in use if it was used within this time."""
APART_MS = 1_000
"""Gap between the times known to be used and those of a number that is lent again."""


@dataclass(slots=True)
class _Lent:
    loan: Loan
    owner: bytes


class _Resting(NamedTuple):
    """A number that is not on loan: the first millisecond that its last owner may use, and the first that anybody may use."""

    own_from_ms: int
    from_ms: int
    worker: int
    owner: bytes
    began_ms: int
    """Start of the loan that is over."""


class Lender:
    """Lends worker numbers to SDK clients.

    Args:
        acquire: takes one more number from the registry: (worker, from_ms, until_ms).
        until: Unix milliseconds until which the proxy itself holds a number.
        limit: numbers lent at one time.
        share: the part of them for one login.
    """

    def __init__(
        self, acquire: Callable[[], Awaitable[tuple[int, int, int]]], until: Callable[[int], int], limit: int, share: int = 8
    ) -> None:
        self._acquire = acquire
        self._until = until
        self._limit, self._share = limit, share
        self._acquiring: Counter[bytes] = Counter()
        """Login → numbers that are being taken from the registry for it."""
        self._seen_ms: dict[int, int] = {}
        """Number → highest time seen in an ID of it; for numbers that are lent or rest for a login."""
        self._lent: dict[int, _Lent] = {}
        self._resting: list[_Resting] = []
        """At most the number that the proxy may hold (`registry.leases.MAX_LEASES`)."""

    @property
    def lent(self) -> int:
        """Number of worker numbers on loan now."""
        return len(self._lent)

    def resting(self) -> list[tuple[int, int]]:
        """Numbers that are not on loan: (worker, first millisecond that anybody may use)."""
        return [(one.worker, one.from_ms) for one in self._resting]

    def saw(self, snowflake: int) -> None:
        """Note an ID that a login used, of a number that it was lent, here or elsewhere."""
        worker = (snowflake & WORKER_MASK) >> SNOWFLAKE_SEQUENCE_BITS
        used_ms = (snowflake >> TIME_SHIFT) + SNOWFLAKE_EPOCH_MS
        if used_ms > self._seen_ms.get(worker, used_ms):
            self._seen_ms[worker] = used_ms

    async def lend(self, now_ms: int, owner: bytes = b"", returned: int = NO_WORKER) -> Loan:
        """Lend a number to a new publisher. `owner`: its login; empty where nobody has to log in, and all count as one login.
        `returned`: the number that it had before, and may still be using.

        Raises `Overloaded` at a limit, and what `acquire` raises.
        """
        if len(self._lent) >= self._limit:
            text = f"{self._limit} publishers of this proxy have a lent worker number (proxy.max_lent_workers); use another proxy"
            raise Overloaded(text, retry_after_ms=5_000)
        again = self._again(now_ms, owner, returned) if owner else None
        if again is not None:
            return again
        firsts = [(one.own_from_ms if one.owner == owner else one.from_ms, one) for one in self._resting]
        firsts = [(first, one) for first, one in firsts if first <= now_ms and self._until(one.worker) > now_ms + 1_000]
        if firsts:
            from_ms, found = min(firsts)
            self._resting.remove(found)
            worker = found.worker
        else:
            self._acquiring[owner] += 1
            try:
                worker, from_ms, _ = await self._acquire()
            finally:
                self._acquiring[owner] -= 1
                if not self._acquiring[owner]:
                    del self._acquiring[owner]
        return self._loan(worker, from_ms, now_ms, owner)

    def _again(self, now_ms: int, owner: bytes, returned: int) -> Loan | None:
        """Lend a login a number that rests for it: the one that its publisher names, one given back or, at its share, a silent one.

        Returns None if it may get a further number. Raises `Overloaded` if the login has its share, all in use.
        """
        mine = [one for one in self._resting if one.owner == owner and one.from_ms > now_ms]
        usable = [one for one in mine if self._until(one.worker) > now_ms + APART_MS]
        for one in usable:
            if one.worker == returned:
                return self._rested(one, one.began_ms, now_ms)
        given_back = [one for one in usable if one.own_from_ms <= now_ms]
        if given_back:
            first = min(given_back)
            return self._rested(first, first.own_from_ms, now_ms)
        lent = sum(held.owner == owner for held in self._lent.values())
        if lent + len(mine) + self._acquiring[owner] < self._share:
            return None
        for one in usable:
            seen_ms = self._seen_ms.get(one.worker, 0)
            if seen_ms + SILENT_MS < now_ms:
                return self._rested(one, now_ms + APART_MS, now_ms)
        text = f"this login has {self._share} worker numbers of this proxy (proxy.login_lent_workers); use another one"
        raise Overloaded(text, retry_after_ms=SILENT_MS)

    def _rested(self, one: _Resting, from_ms: int, now_ms: int) -> Loan:
        """Lend a number again to the login that had it."""
        self._resting.remove(one)
        return self._loan(one.worker, from_ms, now_ms, one.owner)

    def renew(self, worker: int, now_ms: int) -> Loan:
        """Extend a loan. A number that is not on loan gives an ended loan."""
        held = self._lent.get(worker)
        return NO_LOAN if held is None else self._loan(worker, held.loan.from_ms, now_ms, held.owner)

    def give_back(self, worker: int, last_used_ms: int) -> None:
        """Take a number back from a publisher that is gone; `last_used_ms` is 0 if it did not report its last use."""
        held = self._lent.pop(worker, None)
        if held is not None:
            until_ms = held.loan.until_ms
            first = max(last_used_ms + 1, held.loan.from_ms) if 0 < last_used_ms < until_ms else until_ms
            self._resting.append(_Resting(first, until_ms if held.owner else first, worker, held.owner, held.loan.from_ms))

    def _loan(self, worker: int, from_ms: int, now_ms: int, owner: bytes) -> Loan:
        before = self._lent.get(worker)
        until_ms = max(min(now_ms + LOAN_MS, self._until(worker)), before.loan.until_ms if before is not None else 0)
        loan = Loan(worker, from_ms, until_ms)
        self._lent[worker] = _Lent(loan, owner)
        if owner:
            self._seen_ms.setdefault(worker, 0)
        return loan
