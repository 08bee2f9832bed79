"""Xiu is doubled twice while mail flows and leaders, proxies and streams go: mail is stored once, and is in inboxes in order.

What would break that is put back, and found.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest

import xiu.core
import xiu.state.doubling
from cluster.store.doubling.phases import Phase
from proxy import mail_events as me
from tests.sim.doubling.world import TOTAL, DoublingWorld
from tests.support.effort import runs
from xiu.doubling.answering import Answers
from xiu.state.doubling import Record

pytestmark = pytest.mark.sim

SEEDS = runs("PIXIU_DOUBLING_SEEDS", local=6, ci=25)
FAULT_SEEDS = 120
"""Within so many a fault that was put back is found."""
FAULTS = {
    "both take what moved": 9, "the child opens early": 7, "the child does not ask": 26, "a deposed leader answers its child": 357,
}  # fmt: skip
"""Each with a seed that found it; it is played before all others."""
USERS = 8
MAILS = 260


def check(world: DoublingWorld) -> None:
    """Confirmed mail is stored once and in every inbox once, each sender's in order."""
    stored = world.stored()
    twice = {identity: found for identity, found in stored.items() if len(found) > 1}
    assert not twice, f"stored twice: {twice}"
    names = {found[0]: identity for identity, found in stored.items()}
    inboxes = {
        uin: [names.get(number, 0) for number in world.pis[uin % len(world.pis)].inboxes.get((uin, 1), [])]
        for uin in range(1, USERS + 1)
    }
    for sender in world.senders:
        order = {ticket.message_id: place for place, (ticket, _, _) in enumerate(sender.tickets)}
        for ticket, receivers, _ in sender.tickets:
            assert ticket.failure is None, ticket.failure
            for uin in receivers:
                assert inboxes[uin].count(ticket.message_id) == 1, "lost, or repeated"
        for inbox in inboxes.values():
            own = [order[identity] for identity in inbox if identity in order]
            assert own == sorted(own), "out of order"


def one_fault(world: DoublingWorld) -> None:
    """Something breaks."""
    chance = world.rng
    what = chance.choice(("link", "link", "xiu", "xiu", "proxy"))
    if what == "link":
        chance.choice(world.proxies).lose(me.Store(chance.random() < 0.3, chance.randrange(2)))
    elif what == "xiu":
        world.crash(world.xius[chance.randrange(TOTAL)])
    else:
        proxy = chance.choice(world.proxies)
        if proxy.alive:
            proxy.kill()
            world.after(chance.uniform(0.05, 0.6), proxy.start)


@cache
def played(seed: int) -> DoublingWorld:
    """A run without a fault in the code."""
    return play(seed)


def play(seed: int, *, early: bool = False) -> DoublingWorld:
    """A whole run."""
    world = DoublingWorld(seed, early=early)
    chance = world.rng
    for number in range(MAILS):
        receivers = chance.sample(range(1, USERS + 1), 3) if chance.random() < 0.1 else [chance.randint(1, USERS)]
        chance.choice(world.senders).send(*receivers)
        world.run(chance.expovariate(40))
        if number % 12 == 6:
            one_fault(world)
        if number == 20:
            world.double()
    world.wait_for(lambda: world.doubled and world.all_sent())
    world.wait_for(lambda: all(xiu.readable and xiu.committed == len(xiu.log.entries) for xiu in world.xius))
    return world


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_mail_is_stored_once_and_in_order(seed: int) -> None:
    check(played(seed))


def test_the_schedules_have_what_they_are_for() -> None:
    """Seeds together: children refused before they were open, answered repeats that their parents had, and waited for parents."""
    refused: dict[str, int] = {}
    asked = repeated = divided = stored = 0
    for seed in range(SEEDS):
        world = played(seed)
        for code, count in world.refused.items():
            refused[code] = refused.get(code, 0) + count
        stored += sum(bool(xiu.store.blocks()) for xiu in world.xius)
        asked += sum(xiu.core.counters.asked for xiu in world.xius[1:])
        repeated += sum(xiu.core.counters.repeated for xiu in world.xius[1:])
        divided += sum(xiu.core.counters.moved for xiu in world.xius)
    assert refused["WRONG_PARTITION"] > 10
    assert refused["UNAVAILABLE"] > 0
    assert min(asked, repeated, divided) > 0
    assert stored > 3 * SEEDS


@contextmanager
def put_back(patch: pytest.MonkeyPatch, fault: str) -> Iterator[bool]:
    """A fault in the production code. Yields whether children open early."""
    with patch.context() as back:
        if fault == "both take what moved":

            def counted(now: Record, layout: int) -> int:
                if now.phase is Phase.LEARNING:
                    return now.partitions // 2
                return max(now.partitions, layout) if now.cut_us else layout

            back.setattr(xiu.core, "counted", counted)
            back.setattr(xiu.state.doubling, "takes", lambda _now, _partition, _key: True)
        elif fault == "the child does not ask":
            back.setattr(xiu.core, "is_asked", lambda *_: False)
        elif fault == "a deposed leader answers its child":
            back.setattr(Answers, "sure", lambda _self, _lease: True)
        yield fault == "the child opens early"


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with put_back(monkeypatch, fault) as early:
        for seed in (FAULTS[fault], *range(FAULT_SEEDS)):
            try:
                check(play(seed, early=early))
            except AssertionError:
                return
    pytest.fail(f"{fault}: not found in {FAULT_SEEDS} seeds")
