"""Maps become equal while messages go on being lost: 5 % dropped, 2 % repeated, 5 % late, before, during and after.

At one moment the last user joins, and several routers and brokers lose entries or have old ones back, as no message would make
them; then it is counted after how many heartbeats every router and every broker has exactly what is on the gateways. Prints
the distribution (`pytest -s`).

Source: DESIGN section 10, "Anti-entropy".
"""

from __future__ import annotations

import os

from tests.sim.cluster import HEARTBEAT_S, Cluster, Settings

SEEDS = min(max(100, int(os.environ.get("PIXIU_SIM_SEEDS", "100"))), 600)
DROP, REPEAT, LATE = 0.05, 0.02, 0.05
SHAPES = ((1, 1), (2, 1), (1, 2), (2, 2))
"""Partitions of routers and of brokers."""
GATEWAYS = 3
LAST_JOIN_S = 10.0
SCRAMBLED = 6
STEP_S = 0.1
HEARTBEATS = 10
GIVE_UP = 15
"""Heartbeats after which a run is not looked at any longer."""


class Losing(Cluster):
    """Some datagrams, answers to heartbeats among them, come after others that were sent much later."""

    def delay(self) -> float:
        """Of one datagram."""
        late = self.rng.uniform(0.03, 0.1) if self.chance(LATE) else 0.0
        return super().delay() + late


def heartbeats_until_equal(seed: int, *, digests: bool = True) -> float:
    """After the last join; `GIVE_UP` when they are not equal by then."""
    routers, brokers = SHAPES[seed % len(SHAPES)]
    world = Losing(seed, Settings(routers, brokers, GATEWAYS, digests=digests), DROP, REPEAT)
    rng = world.rng
    for _ in range(150):
        number, when = rng.randrange(GATEWAYS), rng.uniform(3.0, LAST_JOIN_S - 0.1)
        world.after(when, lambda number=number: world.change(number))  # type: ignore[misc]
    for message in range(60):
        world.after(rng.uniform(3.0, LAST_JOIN_S + GIVE_UP), lambda message=message: world.publish(message))  # type: ignore[misc]
    world.run_until(LAST_JOIN_S)
    for _ in range(SCRAMBLED):
        world.scramble()
    assert world.answered > 20
    while world.differences() and world.now < LAST_JOIN_S + GIVE_UP * HEARTBEAT_S:
        world.run_until(world.now + STEP_S)
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
