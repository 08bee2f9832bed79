"""Worker numbers lent to publishers: no number is used by two at one time."""

from __future__ import annotations

import pytest

from pixiu.errors import Overloaded
from proxy.worker_leases import LOAN_MS, Lender

DAY = 86_400_000


class Registry:
    """Numbers that the proxy takes for itself, for a day."""

    def __init__(self) -> None:
        self.taken = 0

    async def acquire(self) -> tuple[int, int, int]:
        self.taken += 1
        return self.taken, 1_000, DAY

    def until(self, worker: int) -> int:
        return DAY if worker <= self.taken else 0


def lender(limit: int = 10) -> tuple[Lender, Registry]:
    registry = Registry()
    return Lender(registry.acquire, registry.until, limit), registry


async def test_two_publishers_have_two_numbers() -> None:
    lends, _ = lender()
    first, second = await lends.lend(1_000), await lends.lend(1_000)
    assert (first.worker, second.worker) == (1, 2)
    assert first.until_ms == 1_000 + LOAN_MS


async def test_a_number_that_came_back_goes_on_after_its_last_use() -> None:
    lends, registry = lender()
    first = await lends.lend(1_000)
    lends.give_back(first.worker, last_used_ms=5_000)
    again = await lends.lend(6_000)
    assert (again.worker, again.from_ms, registry.taken) == (1, 5_001, 1)


async def test_a_number_that_did_not_come_back_rests_until_its_loan_is_over() -> None:
    lends, registry = lender()
    first = await lends.lend(1_000)
    lends.give_back(first.worker, last_used_ms=0)
    assert (await lends.lend(2_000)).worker == 2
    late = await lends.lend(first.until_ms)
    assert (late.worker, late.from_ms, registry.taken) == (1, first.until_ms, 2)


async def test_a_number_that_came_back_early_is_lent_to_another_login_only_after_its_loan() -> None:
    lends, registry = lender()
    first = await lends.lend(1_000, b"alice")
    lends.give_back(first.worker, last_used_ms=1)
    second = await lends.lend(6_000, b"mallory")
    assert second.worker == 2
    again = await lends.lend(6_000, b"alice")
    assert (again.worker, again.from_ms) == (1, first.from_ms)
    lends.give_back(again.worker, last_used_ms=7_000)
    assert lends.resting() == [(1, again.until_ms)]
    late = await lends.lend(again.until_ms, b"mallory")
    assert (late.worker, late.from_ms, registry.taken) == (1, again.until_ms, 2)


async def test_a_renewed_loan_is_longer_and_one_that_ended_is_not_renewed() -> None:
    lends, _ = lender()
    first = await lends.lend(1_000)
    assert lends.renew(first.worker, 300_000).until_ms == 300_000 + LOAN_MS
    lends.give_back(first.worker, 0)
    assert lends.renew(first.worker, 300_000).until_ms == 0


async def test_a_loan_never_outlasts_the_proxys_own_lease() -> None:
    lends, _ = lender()
    assert (await lends.lend(DAY - 10_000)).until_ms == DAY


async def test_the_limit_is_told() -> None:
    lends, _ = lender(limit=1)
    await lends.lend(1_000)
    with pytest.raises(Overloaded, match="max_lent_workers"):
        await lends.lend(1_000)
    assert lends.lent == 1
