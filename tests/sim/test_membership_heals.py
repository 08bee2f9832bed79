"""Production cores of gateways, routers and brokers on a seeded network that drops, repeats, reorders and cuts, with
crashes and restarts at any time, and with maps that lose and regain entries as no message would make them.

What must hold, whatever happens:

- no register ever goes back to an older message, and nothing is removed that its live gateway has (tests/sim/watched.py);
- when a router confirms a join or leave, every broker that is subscribed to it knows it;
- a broker that serves knows what its snapshots contained;
- five heartbeats after the last loss every router and every broker has exactly what is on the live gateways.

A failure prints its seed; the same seed gives the same run. `make sim` runs a thousand.

Source: seed 004 §5 (consistency of Gateway Messages); DESIGN sections 9, 10 and 14.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.cluster import HEARTBEAT_S, Cluster, Process, Settings
from tests.sim.watched import ByGateway, HastyFeedback, Watched, WithoutTombstones

SEEDS = int(os.environ.get("PIXIU_SIM_SEEDS", "50"))
FAULTS_S, CALM_S = 30.0, 44.0
"""Crashes and cuts begin before the first; at the second everybody has been up again for some seconds."""
HEARTBEATS = 5
SHAPES = ((1, 1), (2, 1), (1, 2), (2, 2))
"""Partitions of routers and of brokers."""
FAULT_SEEDS = 40
"""A fault must show in one of so many runs."""


def run(seed: int, membership: type[Watched] = Watched, *, digests: bool = True, serve_before_snapshot: bool = False) -> Cluster:
    """A whole run; what must hold at every moment raises AssertionError on the way."""
    routers, brokers = SHAPES[seed % len(SHAPES)]
    world = Cluster(seed, Settings(routers, brokers, 2, membership, digests, serve_before_snapshot))
    rng = world.rng
    for _ in range(200):
        number, when = rng.randrange(2), rng.uniform(0.5, CALM_S - 0.1)
        world.after(when, lambda number=number: world.change(number))  # type: ignore[misc]
    for message in range(300):
        world.after(rng.uniform(1.0, CALM_S), lambda message=message: world.publish(message))  # type: ignore[misc]
    for _ in range(6):
        world.after(rng.uniform(3.0, CALM_S - 0.1), world.scramble)

    def anybody() -> list[Process]:
        return [*world.routers.values(), *world.brokers.values(), *world.gateways]

    for _ in range(rng.randint(1, 5)):
        world.after(rng.uniform(2.0, FAULTS_S - 2.0), lambda: world.crash(rng.choice(anybody())))
    for _ in range(rng.randint(0, 4)):
        world.after(rng.uniform(2.0, FAULTS_S - 2.0), lambda: world.cut(*rng.sample(anybody(), 2)))
    world.run_until(CALM_S)
    world.faults = False
    world.run_until(CALM_S + HEARTBEATS * HEARTBEAT_S)
    return world


@pytest.mark.parametrize("seed", range(SEEDS))
def test_everybody_knows_who_is_where_five_heartbeats_after_the_last_loss(seed: int) -> None:
    world = run(seed)
    assert world.differences() == [], seed
    assert world.answered > 50, seed
    assert [g.core.rooms.presence.unconfirmed for g in world.gateways] == [0, 0], seed


def test_the_runs_have_faults_in_them() -> None:
    worlds = [run(seed) for seed in range(8)]
    assert sum(world.crashes for world in worlds) >= 10
    assert sum(world.cuts for world in worlds) >= 6
    assert sum(world.scrambled for world in worlds) > 20
    assert sum(world.checked for world in worlds) > 500
    assert sum(world.delivered for world in worlds) > 500
    assert sum(world.feedbacks for world in worlds) > 5
    maps = [router.core.membership for world in worlds for router in world.routers.values()]
    maps += [broker.core.membership for world in worlds for broker in world.brokers.values()]
    assert sum(membership.counters.healed for membership in maps) > 10
    assert sum(membership.counters.purged for membership in maps) > 5


def test_a_cut_and_a_crash_before_the_replicas_are_equal_again() -> None:
    """A join is known to one router replica alone, which dies with it."""
    for seed in range(5):
        world = Cluster(seed, Settings())
        world.run_until(3.0)
        one, other = world.routers.values()
        world.cut(one, other)
        world.run_until(9.0)
        for number in range(20):
            world.change(number % 2)
        world.run_until(9.2)
        world.crash(one if len(one.core.membership) else other)
        world.run_until(25.0)
        world.faults = False
        world.run_until(25.0 + HEARTBEATS * HEARTBEAT_S)
        assert world.differences() == [], seed


@pytest.mark.parametrize(
    ("fault", "finds"),
    [
        ({"membership": ByGateway}, "lacks"),
        ({"membership": WithoutTombstones}, "went back"),
        ({"digests": False}, "lacks"),
        ({"membership": HastyFeedback}, "was removed although its gateway has it"),
        ({"serve_before_snapshot": True}, "a broker serves that has taken no snapshot"),
    ],
    ids=["gateway-msg-id-by-gateway", "no-tombstones", "no-digest", "feedback-removes-newer", "broker-serves-before-snapshot"],
)
def test_the_simulation_finds_a_fault_that_is_put_back(fault: dict[str, object], finds: str) -> None:
    for seed in range(FAULT_SEEDS):
        try:
            found = "\n".join(run(seed, **fault).differences())  # type: ignore[arg-type]
        except AssertionError as error:
            found = str(error)
        if finds in found:
            return
    pytest.fail(f"no run of {FAULT_SEEDS} found it")


def test_the_same_seed_gives_the_same_run_byte_for_byte() -> None:
    """In another process too, whose sets of strings are in another order."""
    program = "from tests.sim.test_membership_heals import run; world = run(7); print(world.trace, world.deliveries)"
    root = Path(__file__).resolve().parents[2]
    told = {run(7).trace}
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        result = subprocess.run(
            [sys.executable, "-c", program], cwd=root, env=environment, capture_output=True, text=True, timeout=120, check=True
        )
        told.add(result.stdout.split()[0])
    assert len(told) == 1
    assert run(8).trace not in told
