"""One replica is bad and stays so; nothing else is wrong. What a write waits is asked while it lasts, not after it.

0 s      8 s                    38 s
├─ well ─┼─ one replica is bad ─┤        every write of these 30 s is measured
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.replication.core.core import Core
from cluster.replication.core.states import State
from tests.sim.replication.world import Node, World

BEGIN_S = 8.0
LASTS_S = 30.0
STALL_S = 0.5
"""A write that waits for longer is held up; without faults none of them takes a tenth of a second."""
FULL_LEADER, UNREGISTERED_LEADER = "leader with a full disk", "leader without ZooKeeper"
AILMENTS = {
    "full disk": 1.0, "deaf to entries": 1.55, "slow disk": 3.0, "very slow disk": 2.5, FULL_LEADER: 1.0, UNREGISTERED_LEADER: 3.0,
}  # fmt: skip
"""What a follower, or the leader, has, and what a write may wait at most, once: it says that it is full; is silent for 1.2 s (1.5 s
in the worst of 300 runs; 1.6 for one that is late and not silent); is late for 1.5 s, in which writes wait behind each other (4.4 s
in the worst of 40 runs as long as only the time behind `slow_s` was counted, 1.8 s now); hands over; is confirmed no more."""


@dataclass
class Waits:
    """What the writes of a run waited."""

    longest_s: float
    """Of all that were sent while the replica was bad, also of those that still wait."""
    stalled: float
    """The share of the writes of the last 15 seconds that waited for longer than STALL_S."""
    rate: float
    """Acknowledged writes of the last 15 seconds, for each that there was in the same time before the fault."""
    changes: int
    """Of the in-sync set."""


def ail(node: Node, ailment: str) -> None:
    """Make a replica bad."""
    if ailment in ("full disk", FULL_LEADER):
        node.disk.full = True
    elif ailment == UNREGISTERED_LEADER:
        node.reachable = False
    elif ailment == "deaf to entries":
        node.deaf_to_entries = True
    else:
        node.disk_s, node.disk_least = (1.0, 0.9) if ailment == "slow disk" else (1.5, 0.9)


def violations(seed: int, ailment: str, core: type[Core] = Core) -> list[tuple[str, str]]:
    """What was wrong in a run."""
    waits, found = play(seed, ailment, core)
    if waits.longest_s > AILMENTS[ailment]:
        found.append(("a write waits too long", f"{ailment}: {waits.longest_s:.1f} s"))
    if waits.stalled > 0.15:
        found.append(("writes are held up again and again", f"{ailment}: {waits.stalled:.0%} of them"))
    if waits.rate < 0.5:
        found.append(("few writes", f"{ailment}: {waits.rate:.0%} of what there was"))
    if waits.changes > 6:
        found.append(("the in-sync set flaps", f"{ailment}: {waits.changes} changes"))
    return found


def play(seed: int, ailment: str, core: type[Core] = Core) -> tuple[Waits, list[tuple[str, str]]]:
    """Play one seed: a follower gets the ailment. Returns what writes waited, and what history found."""
    world = World(seed, core)
    world.calm, world.loss, world.unknown = True, 0.0, 0.0
    for node in world.nodes:
        world.start(node)
    world.after(2.0, world.client_turn)
    world.run_until(BEGIN_S)
    state = State.LEADING if ailment in (FULL_LEADER, UNREGISTERED_LEADER) else State.FOLLOWING
    suitable = [node for node in world.nodes if node.core is not None and node.core.state is state]
    before = len(world.history.waits) / (BEGIN_S - 2.0)
    changes = world.counts["shrinks"] + world.counts["grows"]
    ail(world.rng.choice(suitable), ailment)
    end = BEGIN_S + LASTS_S
    world.run_until(end)
    registered = {session.member for session in world.zookeeper.sessions.values()}
    if not any(node.core is not None and node.core.state is State.LEADING and node.member in registered for node in world.nodes):
        world.history.violation("nobody can find the leader", "it is not in the registry")
    waits = [wait for wait in world.history.waits if wait[0] >= BEGIN_S]
    waits += [(write[4], end - write[4]) for node in world.nodes for write in node.writes]
    late = [wait for sent_at, wait in waits if sent_at >= end - 15.0]
    rate = sum(1 for sent_at, wait in waits if sent_at + wait >= end - 15.0) / 15.0 / before
    found = Waits(
        max((wait for _, wait in waits), default=0.0),
        sum(wait > STALL_S for wait in late) / max(1, len(late)),
        rate,
        world.counts["shrinks"] + world.counts["grows"] - changes,
    )
    return found, world.history.violations
