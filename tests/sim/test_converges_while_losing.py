"""Maps become equal while messages go on being lost: 5 % dropped, 2 % repeated, many late, before, during and after.

At one moment the last user joins, and several routers and brokers lose entries or have old ones back, as no message would make
them; then it is counted after how many heartbeats every router, broker and relay has exactly what is on the gateways. Prints
the distribution (`pytest -s`; `make sim` has more seeds).

Source: docs/memberships.md, "Anti-entropy".
"""

from __future__ import annotations

from tests.sim.cluster.faults import Variant
from tests.sim.cluster.world import HEARTBEAT_S, Shape, World
from tests.support.effort import runs

SEEDS = min(runs("PIXIU_SIM_SEEDS", local=2, ci=4), 600)
DROP, REPEAT = 0.05, 0.02
SHAPES = ((1, 1, 1), (2, 1, 2), (1, 2, 1), (2, 2, 2))
"""Partitions of routers, of brokers and of relays. Each datagram takes a time of its own, so that many overtake others."""
LAST_JOIN_S = 10.0
MOVES, MESSAGES, SCRAMBLED = 80, 60, 6
STEP_S = 0.1
HEARTBEATS = 10
GIVE_UP = 15
"""Heartbeats after which a run is not looked at any longer."""


def heartbeats_until_equal(seed: int, *, digests: bool = True) -> float:
    """After the last join; `GIVE_UP` when they are not equal by then."""
    routers, brokers, relays = SHAPES[seed % len(SHAPES)]
    world = World(seed, Shape(routers, brokers, relays), Variant(digests=digests))
    world.wire.drop, world.wire.repeat = DROP, REPEAT
    for _ in range(MOVES):
        world.at(world.rng.uniform(3.0, LAST_JOIN_S - 0.1), world.clients.act)
    for _ in range(MESSAGES):
        world.at(world.rng.uniform(3.0, LAST_JOIN_S + GIVE_UP), world.clients.publish)
    world.wire.run_until(LAST_JOIN_S)
    for _ in range(SCRAMBLED):
        world.scramble()
    while any(world.watch.maps()) and world.now < LAST_JOIN_S + GIVE_UP * HEARTBEAT_S:
        world.wire.run_until(world.now + STEP_S)
    return round((world.now - LAST_JOIN_S) / HEARTBEAT_S, 1)


def test_ten_heartbeats_after_the_last_join_all_replicas_are_equal_although_the_loss_goes_on() -> None:
    took = sorted(heartbeats_until_equal(seed) for seed in range(SEEDS))
    shares = {share: took[min(int(SEEDS * share), SEEDS - 1)] for share in (0.5, 0.9, 0.95, 0.99)}
    within = {most: sum(found <= most for found in took) for most in (3, 5, HEARTBEATS)}
    text = f"{SEEDS} runs, heartbeats until equal: {shares}, highest {took[-1]}; runs within {within}"
    print(text)
    assert took[SEEDS // 2] > 0.5, "the runs have something to repair"
    assert within[HEARTBEATS] >= 0.99 * SEEDS, text


def test_without_digests_what_was_lost_stays_lost() -> None:
    assert any(heartbeats_until_equal(seed, digests=False) >= GIVE_UP for seed in range(4))
