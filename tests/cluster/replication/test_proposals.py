"""Writes whose commit is awaited."""

from __future__ import annotations

import asyncio

import pytest

from cluster.replication.proposals import Proposal, Proposals
from pixiu.errors import OutcomeUnknown


def made(proposals: Proposals, first: int, size: int) -> Proposal:
    proposal = Proposal(first, size)
    proposals.add(proposal)
    return proposal


async def test_a_write_on_too_few_disks_is_applied_and_not_confirmed() -> None:
    proposals = Proposals()
    one = made(proposals, 5, 1)
    proposals.applied(5, ["a"], 0)
    with pytest.raises(OutcomeUnknown, match="min_in_sync"):
        await one.replicated()


async def test_answers_of_batches_that_do_not_end_with_writes_go_to_the_right_ones() -> None:
    proposals = Proposals()
    one, two = made(proposals, 3, 3), made(proposals, 6, 2)
    proposals.applied(1, ["x", "y", "3", "4"], 1)  # what stands before them nobody waits for
    assert len(proposals) == 2
    proposals.applied(5, ["5", "6"], 1)
    assert await one.replicated() == ["3", "4", "5"]
    assert len(proposals) == 1
    proposals.applied(7, ["7", "z"], 1)
    assert await two.replicated() == ["6", "7"]
    assert len(proposals) == 0


async def test_writes_of_a_leader_that_was_deposed_have_an_unknown_outcome_unless_they_were_answered() -> None:
    proposals = Proposals()
    one, two = made(proposals, 1, 1), made(proposals, 2, 1)
    waiting = asyncio.create_task(two.replicated())
    await asyncio.sleep(0)
    proposals.applied(1, ["a"], 2)
    proposals.fail(OutcomeUnknown("gone"))
    with pytest.raises(OutcomeUnknown):
        await waiting
    with pytest.raises(OutcomeUnknown):
        await two.replicated()
    assert await one.replicated() == ["a"]
