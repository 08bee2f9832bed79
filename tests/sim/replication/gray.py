"""One replica is bad and stays so; nothing else is wrong. What a write waits is asked while it lasts, not after it.

0 s      8 s                    38 s
├─ well ─┼─ one replica is bad ─┤        every write of these 30 s is measured
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.replication.core import Core
from cluster.replication.states import State
from tests.sim.replication.world import Node, World

BEGIN_S = 8.0
LASTS_S = 30.0
STALL_S = 0.5
"""A write that waits for longer is held up; without faults none of them takes a tenth of a second."""
AILMENTS = {"full disk": 1.0, "deaf to entries": 2.5, "slow disk": 10.0, "very slow disk": 2.5}
"""What a follower has, and what a write may wait at most, once: it says that it is full; is silent for 1.2 s; is late for 5 s, in
which each of its syncs takes one and writes wait behind each other (8.9 s in the worst of 50 runs)."""


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
    if ailment == "full disk":
        node.disk.full = True
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
    followers = [node for node in world.nodes if node.core is not None and node.core.state is State.FOLLOWING]
    before = len(world.history.waits) / (BEGIN_S - 2.0)
    changes = world.counts["shrinks"] + world.counts["grows"]
    ail(world.rng.choice(followers), ailment)
    end = BEGIN_S + LASTS_S
    world.run_until(end)
    waits = [wait for wait in world.history.waits if wait[0] >= BEGIN_S]
    waits += [(write[4], end - write[4]) for node in world.nodes for write in node.writes]
    late = [wait for sent_at, wait in waits if sent_at >= end - 15.0]
    rate = sum(1 for sent_at, wait in waits if sent_at + wait >= end - 15.0) / 15.0 / before
    found = Waits(
        max(wait for _, wait in waits),
        sum(wait > STALL_S for wait in late) / max(1, len(late)),
        rate,
        world.counts["shrinks"] + world.counts["grows"] - changes,
    )
    return found, world.history.violations
