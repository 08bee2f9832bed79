"""Worker numbers lent to publishers: no number is used by two at one time."""

from __future__ import annotations

import pytest

from pixiu.errors import Overloaded
from pixiu.ids import SNOWFLAKE_EPOCH_MS, snowflake
from proxy.publishers.worker_leases import LOAN_MS, Lender

DAY = 1 << 50


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


async def test_one_login_has_a_share_however_often_it_comes_and_others_still_get_one() -> None:
    lends, registry = lender(limit=100)
    now = 1_000
    for _ in range(200):
        now += 10_000
        loan = await lends.lend(now, b"eve")
        lends.give_back(loan.worker, last_used_ms=0)
    assert registry.taken <= 8
    assert (await lends.lend(now, b"bob")).worker


async def test_a_login_with_its_share_in_use_is_told_so() -> None:
    lends, registry = lender(limit=100)
    for _ in range(8):
        await lends.lend(1_000, b"eve")
    with pytest.raises(Overloaded, match="login_lent_workers"):
        await lends.lend(1_000, b"eve")
    assert (await lends.lend(1_000, b"bob")).worker == registry.taken == 9


async def test_a_number_lent_again_begins_after_what_was_seen_of_it() -> None:
    lends, _ = lender(limit=100)
    start = SNOWFLAKE_EPOCH_MS + 1_000_000
    loans = [await lends.lend(start, b"eve") for _ in range(8)]
    for loan in loans:
        lends.saw(snowflake(start + 4_000 + loan.worker, loan.worker, 3))
        lends.give_back(loan.worker, last_used_ms=0)
    with pytest.raises(Overloaded):  # another of its streams may use them
        await lends.lend(start + 5_000, b"eve")
    again = await lends.lend(start + 9_004, b"eve")
    assert again.worker == loans[0].worker
    assert again.from_ms > start + 9_004
    assert lends.lent == 1


async def test_who_names_the_number_that_it_had_gets_it_again() -> None:
    lends, registry = lender()
    first = await lends.lend(1_000, b"eve")
    lends.give_back(first.worker, last_used_ms=0)
    assert (await lends.lend(2_000, b"bob", first.worker)).worker == 2, "not somebody else's"
    again = await lends.lend(2_000, b"eve", first.worker)
    assert (again.worker, again.from_ms, registry.taken) == (first.worker, first.from_ms, 2)
