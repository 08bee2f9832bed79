"""One wall clock of a partition is wrong, while replicas are killed, hand over and come back.

Replicas delete by the highest time of an entry: none may be ahead of the time that it is. With three replicas no time stands still
either, whichever clock is wrong; with two, the one that is behind cannot be told from the other after both were restarted.
"""

from __future__ import annotations

from collections.abc import Callable

from cluster.replication.core.core import Core
from cluster.replication.model import EntryKind
from tests.sim.replication.world import Node, World

LASTS_S = 40.0
YEAR_S = 365 * 86_400.0


def violations(seed: int, core: type[Core] = Core) -> list[tuple[str, str]]:
    """Play one seed; what was wrong."""
    world = World(seed, core)
    world.calm, world.loss, world.unknown = True, 0.0, 0.0
    rng = world.rng
    for node in world.nodes:
        world.start(node)
    wrong = rng.choice(world.nodes)
    far = rng.choice((61.5, 3600.0, YEAR_S, 10 * YEAR_S)) * rng.choice((1, 1, -1))
    at = rng.choice((0.0, rng.uniform(0.0, 30.0)))
    world.after(at, _jump, wrong, far)
    if rng.random() < 0.5:
        world.after(at + rng.uniform(1.0, 15.0), _jump, wrong, 0.0)
    world.after(1.0, world.client_turn)
    for _ in range(rng.randint(1, 5)):
        world.after(rng.uniform(2.0, 28.0), _restart(world, rng.choice(world.nodes), rng.uniform(0.2, 4.0)))
    if rng.random() < 0.3:
        world.after(rng.uniform(5.0, 20.0), _restart_all(world, wrong))
    world.run_until(LASTS_S)
    found = world.history.violations
    times = [entry.at_us for entry in world.history.log if entry.kind == EntryKind.DATA]
    if not times:
        found.append(("nothing written", ""))
    elif max(times) < world.true_us - 65_000_000 and len(world.nodes) > 2:
        found.append(("time stands still", f"{(world.true_us - max(times)) / 1e6:.0f} s behind"))
    return found


def _jump(node: Node, far: float) -> None:
    node.wall_off_s = far


def _restart(world: World, node: Node, away_s: float) -> Callable[[], None]:
    def restart() -> None:
        if any(other.core is None or other.core.context.clock.agreed is None for other in world.nodes):
            return  # one at a time, once all have heard the time: with only a wrong clock left nobody knows it
        world.stop(node, power=False)
        world.after(away_s, world.start, node)

    return restart


def _restart_all(world: World, wrong: Node) -> Callable[[], None]:
    """The wrong one comes last: who leads alone, before anybody else is there, has nobody to ask."""

    def restart() -> None:
        for node in world.nodes:
            world.stop(node, power=False)
            world.after(world.rng.uniform(0.1, 1.0) + (1.5 if node is wrong else 0.0), world.start, node)

    return restart
