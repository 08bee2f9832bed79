"""Mail through real cores of sender and proxy, with streams that break, leaders that change and proxies that die."""

from __future__ import annotations

import pytest

from pixiu.errors import Refusal
from pixiu.wire.levels import Level
from proxy import mail_events as ev
from proxy.mail.batches import Part, split_again
from proxy.mail.pipeline import MailCore
from proxy.mail.requests import Link
from tests.proxy.mail_world import PiModel, World, XiuModel
from tests.support.effort import runs

pytestmark = pytest.mark.sim

SEEDS = runs("PIXIU_MAIL_SEEDS", local=6, ci=20)
USERS = 6
MAILS = 400


def check(world: World) -> int:
    """Confirmed mail is in every inbox once, each sender's in order; returns how many were confirmed."""
    confirmed = 0
    for sender in world.senders:
        order = {ticket.message_id: place for place, (ticket, _, _) in enumerate(sender.tickets)}
        for ticket, receivers, lane in sender.tickets:
            assert ticket.resolved
            if ticket.failure is None:
                confirmed += 1
                for uin in receivers:
                    assert world.inbox(uin, lane).count(ticket.message_id) == 1
        for uin in range(1, USERS + 1):
            for lane in (0, 1):
                own = [order[identity] for identity in world.inbox(uin, lane) if identity in order]
                assert own == sorted(own), (uin, lane, own)
    return confirmed


def one_fault(world: World) -> str:
    """Something breaks; what."""
    chance = world.rng
    what = chance.choice(("link", "link", "xiu", "pi", "proxy", "refuse xiu", "refuse pi"))
    if what == "link":
        store = ev.Store(chance.random() < 0.5, chance.randrange(2))
        chance.choice(world.proxies).lose(store)
    elif what in ("xiu", "pi"):
        model: XiuModel | PiModel = chance.choice(world.xius) if what == "xiu" else chance.choice(world.pis)
        model.leads = False
        model.epoch += 1
        for proxy in world.proxies:
            if chance.random() < 0.8:  # else it finds out by itself
                proxy.lose(ev.Store(what == "pi", model.partition))
        world.after(chance.uniform(0.05, 8.0), lambda: setattr(model, "leads", True))
    elif what == "proxy":
        proxy = chance.choice(world.proxies)
        if proxy.alive:
            proxy.kill()
            world.after(chance.uniform(0.05, 1.0), proxy.start)
    else:
        refusing: XiuModel | PiModel = chance.choice(world.xius) if what == "refuse xiu" else chance.choice(world.pis)
        refusing.refusing = chance.choice(("OVERLOADED", "TOO_FEW_IN_SYNC", "NOT_LEADER", "UNAVAILABLE"))
        world.after(chance.uniform(0.05, 0.6), lambda: setattr(refusing, "refusing", ""))
    return what


def play(seed: int, mail: type[MailCore] = MailCore, *, doubles: bool = False, faulty: bool = True) -> World:
    """A whole run."""
    world = World(seed, mail=mail)
    chance = world.rng
    faults: list[str] = []
    for number in range(MAILS):
        sender = chance.choice(world.senders)
        several = chance.random() < 0.1
        receivers = chance.sample(range(1, USERS + 1), chance.randint(2, USERS)) if several else [chance.randint(1, USERS)]
        level = chance.choice((Level.REPLICATED, Level.REPLICATED, Level.PERSISTED, Level.ACCEPTED))
        sender.send(*receivers, level=level, lane=chance.choice((0, 1, 1)))
        world.run(chance.expovariate(200))
        if doubles and number == MAILS // 4:
            world.double_pis()
        if number % 40 == 20 and faulty:
            faults.append(one_fault(world))
    world.wait_for(world.all_sent)
    assert len(faults) == (MAILS // 40 if faulty else 0)
    if doubles:
        world.wait_for(lambda: world.layout_pis == 4)
    return world


@pytest.mark.parametrize("seed", range(SEEDS))
def test_confirmed_mail_is_in_every_inbox_once_and_each_senders_in_order(seed: int) -> None:
    world = play(seed)
    assert check(world) == MAILS
    for sender in world.senders:
        assert sender.generations == sorted(set(sender.generations))


@pytest.mark.parametrize("faulty", [False, True])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_same_while_pi_is_doubled(seed: int, faulty: bool) -> None:
    world = play(seed, doubles=True, faulty=faulty)
    assert check(world) == MAILS
    if not faulty:
        assert world.refused["WRONG_PARTITION"]
        assert [len(sender.generations) for sender in world.senders] == [1, 1], "no writer's stream ended"


class SendsAgainBehindTheRest(MailCore):
    """Fault: what was under way to a parent that was split is sent to its child behind what waited."""

    def _reroute_pi(self, link: Link[Part], text: str, out: list[ev.Effect]) -> None:
        waiting = list(link.queue)
        link.queue.clear()
        lost = [part for request in link.in_flight.values() for part in request.waiting]
        super()._reroute_pi(link, text, out)
        for part in [*waiting, *lost]:
            if part in waiting and not part.batch.done:
                for partition, found in split_again(part, self._pi_split).items():
                    self._pi(partition).queue.appendleft(found)


class KeepsTheLayout(MailCore):
    """Fault: a refusal of a parent that was split is no news."""

    def _moved_pi(self, link: Link[Part], event: ev.Appended, why: Refusal, now: float, out: list[ev.Effect]) -> None:
        link.in_flight.pop(event.request)


@pytest.mark.parametrize("fault", [SendsAgainBehindTheRest, KeepsTheLayout])
def test_a_fault_in_a_proxy_is_found(fault: type[MailCore]) -> None:
    """Of those that a doubling brings to light."""
    for seed in range(20):
        try:
            world = play(seed, fault, doubles=True, faulty=False)
            check(world)
        except AssertionError:
            return
        if any(len(sender.generations) > 1 for sender in world.senders):
            return
    raise AssertionError("not found")


def test_the_schedules_have_the_faults_that_they_are_for() -> None:
    """Seeds together: late appends were refused, streams were opened again, mail was sent again."""
    refused: dict[str, int] = {}
    resent = lost = 0
    for seed in range(12):
        world = World(seed)
        for number in range(200):
            world.rng.choice(world.senders).send(world.rng.randint(1, USERS))
            world.run(world.rng.expovariate(400))
            if number % 20 == 10:
                one_fault(world)
        world.wait_for(world.all_sent)
        check(world)
        resent += sum(sender.core.counters.resent for sender in world.senders)
        lost += sum(proxy.core.counters.links_lost for proxy in world.proxies)
        for code, count in world.refused.items():
            refused[code] = refused.get(code, 0) + count
    assert resent > 100
    assert lost > 10
    assert refused.get("STALE_WRITER", 0) + refused.get("stale append", 0) > 0
