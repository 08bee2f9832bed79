"""Lending SnowflakeID worker numbers to publishers that have no registry of their own.

The proxy holds numbers by leases of its own and lends each for a short time. A number that comes back with the last
time used is lent again from there, where clients log in only to the same login: the proof of the loan that is over would serve for
IDs of the next one's time. One that does not come back, or goes to another login, rests until its loan is over.

One login has a share of the numbers, those that rest for it included: opening and breaking streams takes no more. Beyond the share
it gets again what it did not give back, for times after now and after the last that its streams were seen to use. Two programs of
one login that have more than the share, of which one goes on by another proxy with a number that it broke off from here, could make
the same ID: each repeats at most the other's.

Source: docs/identifiers.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

from cluster.access.loans import TIME_SHIFT, WORKER_MASK, Loan
from pixiu.errors import Overloaded
from pixiu.ids import SNOWFLAKE_EPOCH_MS, SNOWFLAKE_SEQUENCE_BITS

LOAN_MS = 600_000
"""A loan's length; a publisher renews it in time."""
NO_LOAN = Loan(0, 0, 0)
"""One that is over."""
NO_WORKER = -1
SILENT_MS = 5_000
"""A number that was not given back and was in use so lately may be in use still."""
APART_MS = 1_000
"""Between the times that are known to have been used and those of a number that is lent again."""


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
    began_ms: int
    """Of the loan that is over."""


class Lender:
    """Lends worker numbers to SDK clients.

    Args:
        acquire: takes one more number from the registry: (worker, from_ms, until_ms).
        until: until when the proxy itself holds a number, Unix milliseconds.
        limit: numbers lent at one time.
        share: of them to one login.
    """

    def __init__(
        self, acquire: Callable[[], Awaitable[tuple[int, int, int]]], until: Callable[[int], int], limit: int, share: int = 8
    ) -> None:
        self._acquire = acquire
        self._until = until
        self._limit, self._share = limit, share
        self._acquiring: Counter[bytes] = Counter()
        """By login: numbers that are being taken from the registry for it."""
        self._seen_ms: dict[int, int] = {}
        """Number → the highest time in an ID of it that was seen; of those that are lent or rest for a login."""
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

    def saw(self, snowflake: int) -> None:
        """A login used this ID, of a number that it was lent, here or elsewhere."""
        worker = (snowflake & WORKER_MASK) >> SNOWFLAKE_SEQUENCE_BITS
        used_ms = (snowflake >> TIME_SHIFT) + SNOWFLAKE_EPOCH_MS
        if used_ms > self._seen_ms.get(worker, used_ms):
            self._seen_ms[worker] = used_ms

    async def lend(self, now_ms: int, owner: bytes = b"", returned: int = NO_WORKER) -> Loan:
        """A number for a new publisher. `owner`: its login; empty where nobody has to log in, who are then one. `returned`: the
        number that it had before, and may be using still.

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
        """What a login had and did not give back: the number that its publisher names, or at its share any. None: a further one.

        Raises `Overloaded` when it has its share, all in use.
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
        """Extend a loan. A number that is not on loan gives a loan that is over."""
        held = self._lent.get(worker)
        return NO_LOAN if held is None else self._loan(worker, held.loan.from_ms, now_ms, held.owner)

    def give_back(self, worker: int, last_used_ms: int) -> None:
        """A publisher is gone; `last_used_ms` is 0 when it did not say what it used."""
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
