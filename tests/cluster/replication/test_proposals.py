"""Writes that wait for a level."""

from __future__ import annotations

import asyncio

import pytest

from cluster.replication.proposals import Proposal, Proposals
from pixiu.errors import OutcomeUnknown
from pixiu.wire.levels import Level


def made(proposals: Proposals, first: int, size: int) -> Proposal:
    proposal = Proposal(7, first, size)
    proposals.add(proposal)
    return proposal


async def test_a_write_rises_from_level_to_level() -> None:
    proposals = Proposals()
    one = made(proposals, 5, 2)
    persisted = asyncio.create_task(one.reached(Level.PERSISTED))
    replicated = asyncio.create_task(one.reached(Level.REPLICATED))
    assert (await one.reached(Level.ACCEPTED)).level is Level.ACCEPTED
    proposals.persisted(5)
    await asyncio.sleep(0)
    assert not persisted.done()
    proposals.persisted(6)
    assert ((await persisted).first, (await persisted).answers, replicated.done()) == (5, (), False)
    proposals.applied(5, ["a", "b"], 2)
    done = await replicated
    assert (done.epoch, done.first, done.level, done.copies, list(done.answers)) == (7, 5, Level.REPLICATED, 2, ["a", "b"])


async def test_a_write_on_too_few_disks_is_applied_and_not_confirmed() -> None:
    proposals = Proposals()
    one = made(proposals, 5, 1)
    replicated = asyncio.create_task(one.reached(Level.REPLICATED))
    proposals.persisted(5)
    proposals.applied(5, ["a"], 0)
    with pytest.raises(OutcomeUnknown, match="min_in_sync"):
        await replicated
    assert (await one.reached(Level.PERSISTED)).first == 5
    assert list((await one.settled(Level.REPLICATED)).answers) == ["a"]


async def test_answers_of_batches_that_do_not_end_with_writes_go_to_the_right_ones() -> None:
    proposals = Proposals()
    one, two = made(proposals, 3, 3), made(proposals, 6, 2)
    proposals.applied(1, ["x", "y", "3", "4"], 1)  # what stands before them nobody waits for
    assert len(proposals) == 2
    proposals.applied(5, ["5", "6"], 1)
    assert list((await one.reached(Level.REPLICATED)).answers) == ["3", "4", "5"]
    assert two.level is Level.ACCEPTED
    proposals.applied(7, ["7", "z"], 1)
    assert list((await two.reached(Level.REPLICATED)).answers) == ["6", "7"]
    assert len(proposals) == 0


async def test_writes_of_a_leader_that_was_deposed_have_an_unknown_outcome_unless_they_were_answered() -> None:
    proposals = Proposals()
    one, two = made(proposals, 1, 1), made(proposals, 2, 1)
    waiting = asyncio.create_task(two.reached(Level.REPLICATED))
    await asyncio.sleep(0)
    proposals.persisted(2)
    proposals.applied(1, ["a"], 2)
    proposals.fail(OutcomeUnknown("gone"))
    with pytest.raises(OutcomeUnknown):
        await waiting
    with pytest.raises(OutcomeUnknown):
        await two.reached(Level.REPLICATED)
    assert (await two.reached(Level.PERSISTED)).level is Level.PERSISTED
    assert list((await one.reached(Level.REPLICATED)).answers) == ["a"]
