"""Kept messages through whole proxies, while parcels, brokers, routers, stores and proxies are lost, and rooms become kept."""

from __future__ import annotations

import pytest

from proxy import mail_events as mail_ev
from tests.proxy.kept_world import KeptWorld, number_of, room_of
from tests.proxy.mail_world import PiModel, XiuModel
from tests.support.effort import runs

pytestmark = pytest.mark.sim

SEEDS = runs("PIXIU_KEPT_SEEDS", local=6, ci=20)
MESSAGES = 300
ROOMS = 6
SESSIONS = range(1001, 1009)


def one_fault(world: KeptWorld) -> None:
    """Something breaks."""
    chance = world.rng
    what = chance.choice(("link", "xiu", "pi", "proxy", "refuse xiu", "refuse pi", "router", "broker", "full"))
    if what == "link":
        chance.choice(world.proxies).lose(mail_ev.Store(chance.random() < 0.5, chance.randrange(2)))
    elif what in ("xiu", "pi"):
        model: XiuModel | PiModel = chance.choice(world.xius) if what == "xiu" else chance.choice(world.pis)
        model.leads = False
        model.epoch += 1
        for proxy in world.proxies:
            proxy.lose(mail_ev.Store(what == "pi", model.partition))
        world.after(chance.uniform(0.05, 6.0), lambda: setattr(model, "leads", True))
    elif what == "proxy":
        proxy = chance.choice(world.proxies)
        if all(each.alive for each in world.proxies):
            proxy.kill()
            world.after(chance.uniform(0.05, 1.0), proxy.start)
    elif what == "router":
        world.router_up = False
        world.after(chance.uniform(0.05, 1.0), lambda: setattr(world, "router_up", True))
    elif what == "broker":
        world.lose_broker()
    else:
        model = chance.choice(world.xius) if what == "refuse xiu" else chance.choice(world.pis)
        model.refusing = chance.choice(("UNAVAILABLE", "OVERLOADED", "DISK_FULL")) if what != "refuse xiu" else "UNAVAILABLE"
        world.after(chance.uniform(0.05, 2.0), lambda: setattr(model, "refusing", ""))


def check(world: KeptWorld) -> int:
    """Each session's inbox has each accepted message once, a publisher's in order; returns how many were for sessions."""
    assert not world.late, "a broker delivered it before it was stored"
    found = 0
    inboxes = {uin: world.inbox(uin) for uin in SESSIONS}
    for uin, inbox in inboxes.items():
        assert len(inbox) == len(set(inbox)), uin
    for publisher in world.publishers:
        order = {number_of(record): place for place, record in enumerate(publisher.made)}
        rooms = {number_of(record): room_of(record) for record in publisher.made}
        for number in publisher.accepted:
            for uin in publisher.wanted[number]:
                found += 1
                assert number in inboxes[uin], (publisher.number, order[number], uin)
        # What was published before the filter was put may be for the session when it is sent again, and then comes late.
        for uin, inbox in inboxes.items():
            counted = {each for each, sessions in publisher.wanted.items() if uin in sessions} - publisher.refused.keys()
            for room in world.rooms:
                own = [order[each] for each in inbox if each in counted and rooms[each] == room]
                assert own == sorted(own), (publisher.number, room, own)
    return found


def run(world: KeptWorld, faults: int) -> int:
    kept = [world.rng.sample(SESSIONS, world.rng.randrange(1, 5)) for _ in world.rooms[:-1]]
    for room, sessions in zip(world.rooms, kept, strict=False):  # the last one is never kept
        world.after(world.rng.choice((0.0, world.rng.uniform(0.0, 4.0))), world.keep, room, sessions)
    for publisher in world.publishers:
        for _ in range(MESSAGES):
            world.after(world.rng.uniform(0.1, 12.0), publisher.publish)
    for _ in range(faults):
        world.after(world.rng.uniform(0.5, 12.0), one_fault, world)
    world.run(13.0)
    world.wait_for(world.resolved)
    world.wait_for(lambda: not any(proxy.records.kept.under_way for proxy in world.proxies))  # type: ignore[attr-defined]
    world.run(20.0)
    return check(world)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_each_session_gets_each_accepted_message_once_and_in_order(seed: int) -> None:
    world = KeptWorld(seed, ROOMS)
    assert run(world, faults=8) > 300


@pytest.mark.parametrize("seed", range(SEEDS // 3))
def test_so_while_pi_is_doubled(seed: int) -> None:
    world = KeptWorld(seed, ROOMS)
    world.after(4.0, world.double_pis)
    assert run(world, faults=5) > 300
    assert world.layout_pis == 4


@pytest.mark.parametrize("seed", range(2))
def test_without_faults_nothing_is_refused(seed: int) -> None:
    world = KeptWorld(seed, ROOMS, lossy=0.0)
    assert run(world, faults=0) > 500
    assert [publisher.codes for publisher in world.publishers] == [{}, {}]
    # A room is learnt by a refusal once; afterwards its messages go the short way.
    returned = sum(proxy.records.kept.counters.kept_returned for proxy in world.proxies)  # type: ignore[attr-defined]
    assert 0 < returned < 200
