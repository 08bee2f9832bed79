"""A replica that lacks committed entries is promoted by force; then the old leader, which has them, comes back.

0 s      6 s              12 s        14 s                  17–22 s                     40 s
├─ well ─┼─ one is left ──┼─ it dies ─┼─ another by force ──┼─ the old leader is back ──┤
"""

from __future__ import annotations

from cluster.replication.core import events as ev
from cluster.replication.core.core import Core
from cluster.replication.core.states import State
from cluster.replication.model import START
from tests.sim.replication.world import World


def violations(seed: int, core: type[Core] = Core) -> list[tuple[str, str]]:
    """Play one seed."""
    world = World(seed, core)
    world.calm, world.loss, world.unknown = True, 0.0, 0.0
    for node in world.nodes:
        world.start(node)
    world.after(2.0, world.client_turn)
    world.run_until(6.0)
    leaders = [node for node in world.nodes if node.core is not None and node.core.state is State.LEADING]
    if len(leaders) != 1:
        return [("stuck", "no leader after six seconds")]
    leader, rest = leaders[0], [node for node in world.nodes if node is not leaders[0]]
    for node in rest:
        world.stop(node, power=False)
    world.run_until(12.0)
    world.stop(leader, power=False)
    for node in rest:
        world.start(node)
    world.run_until(14.0)
    chosen = world.rng.choice(rest)  # any: not the one with the longest log
    assert chosen.log is not None
    had, end = world.history.highest or START, chosen.log.last
    world.history.given_up(end.counter)
    for node in rest:
        node.applied = min(node.applied, chosen.log.last.counter)
        if node is not chosen:
            world.stop(node, power=False)
    world.deliver(chosen, chosen.start, ev.ForcePromotion("operator", "the other machine burned down"))
    world.run_until(world.rng.uniform(17.0, 22.0))
    world.start(leader)
    world.run_until(40.0)
    if had > end and (leader.core is None or leader.core.state is not State.HALTED):
        world.history.violation(
            "gave up without a word", f"the old leader had acknowledged up to {had}, the new one began behind {end}"
        )
    if not any(node.core is not None and node.core.state is State.LEADING for node in rest):
        world.history.violation("stuck", "the replica that was promoted by force does not lead")
    # A replica whose log differs from the leader's below what it has committed halts, as it should.
    return [violation for violation in world.history.violations if violation[0] != "halted"]
