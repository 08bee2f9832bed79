"""An old part of the leader's log cannot be read any more, and a follower comes back that needs it; nothing else is wrong.

0 s      4 s                      10 s                              25 s
├─ well ─┼─ a follower is away ───┼─ it is back, a bit is flipped ──┤        every write of the last 15 s is measured

What is broken is in the state, durably: no replica may end for it, and no write may wait.
"""

from __future__ import annotations

from cluster.replication.core import events as ev
from cluster.replication.core.core import Core
from cluster.replication.core.states import State
from tests.sim.replication.world import World

LONGEST_WAIT_S = 2.5
SEGMENT = 8
"""Entries that are broken together, at most."""


def violations(seed: int, core: type[Core] = Core) -> list[tuple[str, str]]:
    """What was wrong in a run."""
    return play(seed, core).history.violations


def play(seed: int, core: type[Core] = Core) -> World:
    """Play one seed."""
    world = World(seed, core)
    world.calm, world.loss, world.unknown = True, 0.0, 0.0
    world.cold = world.rng.random() < 0.5
    for node in world.nodes:
        world.start(node)
    world.after(2.0, world.client_turn)
    world.run_until(4.0)
    leaders = [node for node in world.nodes if node.core is not None and node.core.state is State.LEADING]
    assert len(leaders) == 1, "no leader after four seconds"
    leader = leaders[0]
    assert leader.log is not None
    world.deliver(leader, leader.start, ev.Pinned("a reader of the log", leader.log.first.counter))
    away = world.rng.choice([node for node in world.nodes if node is not leader])
    assert away.log is not None
    world.stop(away, power=False)
    needed = away.disk.image.last.counter
    world.run_until(10.0)
    world.deliver(leader, leader.start, ev.Flushed(leader.applied))
    last = min(needed + world.rng.randint(1, SEGMENT), leader.applied - 1)
    leader.log.rotten = (max(leader.log.first.counter, needed - world.rng.randint(0, SEGMENT)) + 1, last)
    if world.cold:
        leader.log.cold_to = last
    world.start(away)
    world.run_until(25.0)
    longest = max((wait for sent_at, wait in world.history.waits if sent_at >= 10.0), default=LONGEST_WAIT_S)
    if longest >= LONGEST_WAIT_S:
        world.history.violation("a write waits too long", f"{longest:.1f} s")
    state = world.zookeeper.state
    if state is None or away.member not in state.in_sync:
        world.history.violation("stuck", "the follower that came back is not in sync")
    return world
