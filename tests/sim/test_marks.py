"""Marks of rooms with kept filters, in the simulated cluster: a broker has each that was confirmed, and all maps have the same in
the end, whatever crashes, stops, is cut off or doubles.

Source: docs/memberships.md, "Marks"; docs/subscriptions.md, "Kept filters".
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest

from cluster.membership import events as ev
from cluster.membership.map.updates import Update
from pixiu.ids import KEPT_INSTANCE
from pixiu.placement.partition import serves
from router.core import FIRST_MARK_ID, MARK, Core
from tests.sim.cluster.faults import Variant
from tests.sim.cluster.run import shape_of
from tests.sim.cluster.stores import BrokerProcess, RouterProcess
from tests.sim.cluster.world import HEARTBEAT_S, World
from tests.support.effort import runs

SEEDS = runs("PIXIU_SIM_SEEDS", local=3, ci=15)
ROOMS = range(101, 117)
"""Rooms in which nobody is."""
MARKS, FAULTS, FAULTS_S, CALM_S, HEARTBEATS = 120, 5, 14.0, 24.0, 6


def mark(world: World, request: int) -> None:
    """A router that serves a room marks it, or takes the mark away."""
    routers = world.running(RouterProcess)
    room, marked = world.rng.choice(ROOMS), world.rng.random() < 0.7
    routers = [each for each in routers if serves(each.place.partition, room, each.view.count("router"))]
    if routers:
        router = world.rng.choice(routers)
        now_ms = 1 + int(1000 * world.now) + world.rng.choice([0, 5_000])  # clocks differ
        known = router.core.membership.get(room, MARK, KEPT_INSTANCE)
        id_ = max(FIRST_MARK_ID + now_ms, known[0] + 1 if known is not None else 0)
        world.watch.marks[request] = [Update(id_, room, MARK, marked)], world.now

        def step() -> None:
            router.step(ev.MarkRooms(request, (room,), marked, now_ms))

        router.do(step)


def run(seed: int, variant: Variant) -> World:
    world = World(seed, shape_of(seed), variant)
    rng = world.rng
    for request in range(1, MARKS + 1):
        world.at(rng.uniform(1.0, CALM_S), partial(mark, world, request))
    for _ in range(FAULTS):
        fault = rng.choice([world.crash, world.pause])
        world.at(rng.uniform(2.0, FAULTS_S), partial(fault, rng.choice(world.places)))
    one, other = rng.sample(world.places, 2)
    world.at(rng.uniform(2.0, FAULTS_S), lambda: world.cut(one, other, both=True))
    if world.shape.doubles:
        world.at(rng.uniform(4.0, FAULTS_S - 4.0), lambda: world.double(world.shape.doubles))
    world.wire.run_until(CALM_S)
    world.wire.faults = False
    world.wire.run_until(CALM_S + HEARTBEATS * HEARTBEAT_S)
    return world


def marked(process: RouterProcess | BrokerProcess) -> dict[int, int]:
    """Room → ID of its mark."""
    membership = process.core.membership
    return {room: found[0] for room in ROOMS if (found := membership.get(room, MARK, KEPT_INSTANCE)) is not None and found[1]}


def differences(world: World) -> list[str]:
    view = world.registry.view
    truth: dict[int, int] = {}
    held: list[RouterProcess | BrokerProcess] = [*world.alive(RouterProcess), *world.alive(BrokerProcess)]
    for process in held:
        for room, id_ in marked(process).items():
            if serves(process.place.partition, room, view.count(process.place.role)):
                truth[room] = max(id_, truth.get(room, 0))
    found: list[str] = []
    for process in held:
        wanted = {r: i for r, i in truth.items() if serves(process.place.partition, r, view.count(process.place.role))}
        if marked(process) != wanted:
            found.append(f"{process.place.name} has {marked(process)}, not {wanted}")
    return found


def test_marks_are_confirmed_when_brokers_have_them_and_are_the_same_everywhere_in_the_end() -> None:
    happened: Counter[str] = Counter()
    for seed in range(SEEDS):
        world = run(seed, Variant())
        assert differences(world) == [], f"seed {seed}"
        happened.update(dict(world.pairs()))
    assert happened["marks"] > 60 * SEEDS
    assert happened["confirmations"] > 0
    assert happened["confirmations of a peer's"] > 0


class Hasty(Core):
    """Fault: a mark is confirmed before anybody has it."""

    def _on_mark(self, event: ev.MarkRooms, now: float, out: list[ev.Effect]) -> None:
        super()._on_mark(event, now, out)
        out.insert(0, ev.RoomsMarked(event.request))


def test_a_mark_that_is_confirmed_too_early_is_found() -> None:
    with pytest.raises(AssertionError, match="a broker does not know a confirmed change"):
        for seed in range(4):
            run(seed, Variant(router=Hasty))
