"""One run of a whole system: a shape, a workload and faults, all of them chosen by the seed.

python -m tests.sim.system.run 17
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Final

from tests.sim.system.faults import SystemVariant
from tests.sim.system.world import SystemShape, SystemWorld
from tests.support.builds import stands_in_for_compiled

FAULTS_S: Final = 10.0
CALM_S: Final = 17.0
"""Faults begin before the first; at the second no datagram is lost any more. Who was killed in a doubling may start even later."""
HEALED_S: Final = 22.0
"""Rooms are right then, or five heartbeats after the last process has come up again."""
END_S: Final = 60.0
"""Mail is right before that: all is confirmed, delivered and acknowledged."""
LOOK_S: Final = 0.37
"""Between two looks at what is not right yet; no fraction of a second, in which Pi's leaders write their clock."""
NODES: Final = {0: "uneven", 9: "front", 11: "whole"}
"""Seed, modulo 16 → which roles share a process, Xiu and Pi among them."""
NO_FAULT: Final = SystemVariant()


@dataclass(frozen=True)
class SystemLoad:
    """How much happens in a run."""

    moves: int = 40
    messages: int = 50
    user_messages: int = 12
    chat: int = 40
    signals: int = 12
    user_signals: int = 8
    mails: int = 60
    wanders: int = 30
    crashes: int = 5
    leaders: int = 3
    drains: int = 4
    pauses: int = 3
    cuts: int = 3
    breaks: int = 25


def shape_of(seed: int) -> SystemShape:
    """The shapes follow each other, so that a few seeds see them all."""
    return SystemShape(
        routers=1,
        brokers=1,
        relays=1 + seed // 3 % 2,
        doubles=("", "relay", "router", "broker")[seed // 2 % 4],
        reorder=seed % 5 != 0,
        lossless=seed % 11 == 0,
        through_relays=seed % 7 == 3,
        xius=1 + seed % 2,
        pis=1 + seed // 5 % 2,
        writers=1 + seed % 3,
        stores=((), ("pi",), ("xiu",))[seed % 3],
        harsh=seed % 10 in (4, 5, 6),
        nodes=NODES.get(seed % 16, ""),
    )


def run(seed: int, variant: SystemVariant = NO_FAULT, load: SystemLoad | None = None) -> SystemWorld:
    """A whole run. What must hold at every moment raises on the way; `differences` says the rest."""
    world = SystemWorld(seed, shape_of(seed), variant)
    rng, load, clients = world.rng, load or SystemLoad(), world.clients
    for device in world.devices:
        world.at(rng.uniform(0.3, 2.0), device.come)
    for number, action in (
        (load.moves, clients.act),
        (load.messages, clients.publish),
        (load.user_messages, clients.publish_by_user),
        (load.chat, clients.chat),
        (load.signals, lambda: clients.signal(rng.random() < 0.7, to_user=False)),
        (load.user_signals, lambda: clients.signal(rng.random() < 0.7, to_user=True)),
        (load.mails, world.mailed),
        (load.wanders, world.wander),
    ):
        for _ in range(number):
            world.at(rng.uniform(1.0, CALM_S - 1.0), action)
    for number, action in (
        (rng.randint(1, load.crashes), lambda: world.crash(world.some_place())),
        (rng.randint(0, load.leaders), lambda: world.crash_leader() if rng.random() < 0.5 else world.isolate()),
        (rng.randint(0, load.drains), world.drain_some),
        (rng.randint(0, load.pauses), lambda: world.pause(world.some_place())),
        (rng.randint(0, load.cuts), world.cut_some),
        (rng.randint(0, load.breaks), world.break_stream),
    ):
        for _ in range(number):
            world.at(rng.uniform(2.0, FAULTS_S), action)
    if world.shape.doubles:
        world.at(rng.uniform(4.0, FAULTS_S - 4.0), lambda: world.double(world.shape.doubles))
    for role in world.shape.stores:
        world.at(rng.uniform(3.0, FAULTS_S - 3.0), lambda role=role: world.double(role))  # type: ignore[misc]
    world.wire.run_until(CALM_S)
    world.wire.faults = False
    for device in world.devices:
        device.slow_until = 0.0
        device.come()
    world.wire.run_until(HEALED_S)
    while (world.doubles() or world.is_troubled()) and world.now < END_S:
        world.wire.run_until(world.now + 1.0)
    while list(world.mail.differences()) and world.now < END_S:
        world.wire.run_until(world.now + LOOK_S)
    return world


def differences(world: SystemWorld) -> list[str]:
    """What is not as it must be at the end of a run."""
    return [*world.watch.differences(), *world.mail.differences(), *world.mail.told.violations()]


def report(seed: int, variant: SystemVariant = NO_FAULT, load: SystemLoad | None = None) -> tuple[list[str], SystemWorld | None]:
    """What a run found, with the seed and how to run it alone; and the run itself where it came to its end."""
    alone = f"seed {seed} alone: .venv/bin/python -m tests.sim.system.run {seed}"
    try:
        world = run(seed, variant, load)
    except Exception as error:
        if stands_in_for_compiled(error):
            raise  # the test is left out
        return [alone, f"{type(error).__name__}: {error}"], None
    found = differences(world)
    return [alone, *found] if found else [], world


def main(arguments: list[str]) -> int:
    """Run seeds, each alone; without any: how it is done."""
    if not arguments:
        print("python -m tests.sim.system.run SEED …")
        return 2
    failed = 0
    for seed in map(int, arguments):
        found, world = report(seed)
        failed += bool(found)
        if world is not None:
            happened = ", ".join(f"{name} {number}" for name, number in world.pairs())
            print(f"seed {seed}: {world.shape}, trace {world.wire.trace}, well after {world.now:.0f} s; {happened}")
        print("\n".join(found) if found else "every promise kept")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
