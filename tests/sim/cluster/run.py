"""One run: a shape, a workload and faults, all of them chosen by the seed."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from cluster.membership.map.devices import LoginPolicy
from tests.sim.cluster.faults import Variant
from tests.sim.cluster.nodes import LAYOUTS
from tests.sim.cluster.process import Place
from tests.sim.cluster.world import HEARTBEAT_S, Shape, World
from tests.support.builds import stands_in_for_compiled

FAULTS_S, CALM_S = 20.0, 32.0
"""Crashes, pauses and cuts begin before the first; at the second everybody has been up again for some seconds."""
HEARTBEATS = 5
"""So long after the last lost datagram everything must be right."""
NO_FAULT = Variant()
POLICIES = (LoginPolicy.ALL, LoginPolicy.NEWEST, LoginPolicy.NEWEST_OF_CLASS)


@dataclass(frozen=True)
class Load:
    """How much happens in a run."""

    moves: int = 120
    moves_until: float = CALM_S - 0.5
    """When the last users join, leave or move."""
    messages: int = 150
    big_messages: int = 4
    user_messages: int = 40
    signals: int = 40
    user_signals: int = 30
    chat: int = 100
    scrambles: int = 4
    crashes: int = 4
    pauses: int = 2
    cuts: int = 3
    confirmed: int = 0
    """How often a user publishes at QoS 1."""
    announced: bool = False
    """Whether publishers say of a third of their batches that more follows at once, be it true or not."""


def shape_of(seed: int) -> Shape:
    """The shapes follow each other, so that a few seeds see them all."""
    return Shape(
        routers=1 + seed % 2,
        brokers=1 + seed // 2 % 2,
        relays=1 + seed // 5 % 2,
        doubles=("", "broker", "relay", "router")[seed // 4 % 4],
        reorder=seed % 3 != 0,
        lossless=seed % 9 == 0,
        through_relays=seed % 7 in (2, 5),
        policy=POLICIES[seed % 11 // 4],
        nodes=LAYOUTS[seed % 5],
    )


def run(seed: int, variant: Variant = NO_FAULT, load: Load | None = None) -> World:
    """A whole run. What must hold at every moment raises AssertionError on the way; `watch.differences()` says the rest."""
    world = World(seed, shape_of(seed), variant)
    rng, load, end = world.rng, load or Load(), CALM_S - 0.5
    world.clients.announces = load.announced
    for number, first, action in (
        (load.moves, 0.5, world.clients.act),
        (load.messages, 1.0, world.clients.publish),
        (load.big_messages, 3.0, world.clients.publish_big),
        (load.user_messages, 1.0, world.clients.publish_by_user),
        (load.chat, 1.0, world.clients.chat),
        (load.signals, 1.0, lambda: world.clients.signal(rng.random() < 0.7, to_user=False)),
        (load.user_signals, 1.0, lambda: world.clients.signal(rng.random() < 0.7, to_user=True)),
        (load.scrambles, 3.0, world.scramble),
        (load.confirmed, 1.0, world.clients.publish_confirmed),
    ):
        last = load.moves_until if action == world.clients.act else end
        for _ in range(number):
            world.at(rng.uniform(first, last), action)
    for _ in range(rng.randint(1, load.crashes)):
        world.at(rng.uniform(2.0, FAULTS_S), lambda: world.crash(rng.choice(world.places)))
    for _ in range(rng.randint(0, load.pauses)):
        world.at(rng.uniform(2.0, FAULTS_S), lambda: world.pause(rng.choice(world.places)))
    for _ in range(rng.randint(0, load.cuts)):
        world.at(rng.uniform(2.0, FAULTS_S), lambda: world.cut(*_two(world), both=rng.random() < 0.6))
    if world.shape.doubles:
        world.at(rng.uniform(6.0, FAULTS_S - 4.0), lambda: world.double(world.shape.doubles))
    world.wire.run_until(CALM_S)
    world.wire.faults = False
    world.wire.run_until(CALM_S + HEARTBEATS * HEARTBEAT_S)
    return world


def _two(world: World) -> tuple[Place, Place]:
    one, other = world.rng.sample(world.places, 2)
    return one, other


def report(seed: int, variant: Variant = NO_FAULT, load: Load | None = None) -> tuple[list[str], World | None]:
    """What a run found, with the seed and how to run it alone; and the run itself where it came to its end."""
    try:
        world = run(seed, variant, load)
    except Exception as error:
        if stands_in_for_compiled(error):
            raise  # `Watched` is a map of memberships that looks at itself: the test is left out
        return [_alone(seed), f"{type(error).__name__}: {error}"], None
    found = world.watch.differences()
    return [_alone(seed), *found] if found else [], world


def _alone(seed: int) -> str:
    return f"seed {seed} alone: .venv/bin/python -m tests.sim.cluster.run {seed}"


def main(arguments: list[str]) -> int:
    """Run seeds, each alone; without any: how it is done."""
    if not arguments:
        print("python -m tests.sim.cluster.run SEED …")
        return 2
    failed = 0
    for seed in map(int, arguments):
        found, world = report(seed)
        failed += bool(found)
        if world is not None:
            happened = ", ".join(f"{name} {number}" for name, number in world.pairs())
            print(f"seed {seed}: {world.shape}, trace {world.wire.trace}, {world.wire.deliveries} datagrams; {happened}")
        print("\n".join(found) if found else "every promise kept")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
