"""Random schedules of faults, and a whole run.

python -m tests.sim.replication.schedule 17     one seed: what happened, and what was wrong
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from cluster.replication.core import events as ev
from cluster.replication.core.core import Core
from cluster.replication.core.states import State
from tests.sim.replication.files import FileDisk
from tests.sim.replication.world import FAULTS_S, HEALING_S, Node, World

FAULTS = (
    "kill",
    "power",
    "pause",
    "cut",
    "one way",
    "zookeeper",
    "expire",
    "isolate",
    "slow disk",
    "rot",
    "drain",
    "isolate leader",
    "full disk",
    "kill, then power",
)


@dataclass
class Verdict:
    """What a run came to."""

    seed: int
    violations: list[tuple[str, str]]
    counts: Counter[str]
    trace: str
    outcome: str
    """"well", "well by an operator's word" (a sole member was damaged and said so), or "stuck"."""


class Schedule:
    """Does something bad every now and then; which faults a run has is drawn once, so that each is also seen alone."""

    def __init__(self, world: World) -> None:
        self.world = world
        rng = world.rng
        self.faults = [fault for fault in FAULTS if rng.random() < 0.5] or list(FAULTS)
        self.mean_s = rng.choice((0.5, 1.0, 2.0))
        world.cold = rng.random() < 0.5
        world.options = replace(world.options, min_in_sync=rng.choice((1, 1, 2)))

    def begin(self) -> None:
        for node in self.world.nodes:
            self.world.after(self.world.rng.uniform(0.0, 0.5), self.world.start, node)
        self.world.after(1.0, self.turn)
        self.world.after(1.0, self.world.client_turn)

    def turn(self) -> None:
        world = self.world
        if world.calm:
            return
        rng = world.rng
        fault = rng.choice(self.faults)
        node = rng.choice(world.nodes)
        if fault == "isolate leader" or rng.random() < 0.3:
            leaders = [n for n in world.nodes if n.core is not None and n.core.state is State.LEADING]
            node = leaders[0] if leaders else node
        world.counts[f"fault: {fault}"] += 1
        getattr(self, "_" + fault.replace(",", "").replace(" ", "_"))(node, rng)
        world.after(rng.expovariate(1 / self.mean_s), self.turn)

    def _restart_later(self, node: Node, rng: random.Random) -> None:
        self.world.after(rng.choice((0.1, 1.0, 4.0)) * rng.uniform(0.5, 1.5), self.world.start, node)

    def _kill(self, node: Node, rng: random.Random) -> None:
        self.world.stop(node, power=False)
        self._restart_later(node, rng)

    def _power(self, node: Node, rng: random.Random) -> None:
        for each in self.world.nodes if rng.random() < 0.2 else [node]:
            self.world.stop(each, power=True)
            self._restart_later(each, rng)

    def _kill_then_power(self, node: Node, rng: random.Random) -> None:
        """What the killed process wrote is in the page cache when it starts again, and soon everything is dark."""
        self.world.stop(node, power=False)
        self.world.after(rng.uniform(0.05, 0.3), self.world.start, node)
        self.world.after(rng.uniform(0.3, 2.5), self._dark, rng)

    def _dark(self, rng: random.Random) -> None:
        if self.world.calm:
            return
        for each in self.world.nodes:
            self.world.stop(each, power=True)
            self._restart_later(each, rng)

    def _full_disk(self, node: Node, rng: random.Random) -> None:
        node.disk.full = True
        self.world.after(self._until(rng) - self.world.now, self._free, node)

    def _free(self, node: Node) -> None:
        node.disk.full = False

    def _pause(self, node: Node, rng: random.Random) -> None:
        self.world.pause(node, rng.choice((0.3, 1.5, 4.0)) * rng.uniform(0.5, 1.5))

    def _until(self, rng: random.Random) -> float:
        return self.world.now + rng.choice((0.3, 1.5, 5.0)) * rng.uniform(0.5, 1.5)

    def _cut(self, node: Node, rng: random.Random) -> None:
        other, until = rng.choice(self.world.nodes), self._until(rng)
        self.world.cuts[node.member, other.member] = self.world.cuts[other.member, node.member] = until

    def _one_way(self, node: Node, rng: random.Random) -> None:
        self.world.cuts[node.member, rng.choice(self.world.nodes).member] = self._until(rng)

    def _zookeeper(self, node: Node, rng: random.Random) -> None:
        node.reachable = False
        self.world.after(self._until(rng) - self.world.now, self._reach, node)

    def _reach(self, node: Node) -> None:
        node.reachable = True

    def _expire(self, node: Node, rng: random.Random) -> None:
        if node.session is not None:
            self.world.zookeeper.close(node.session)

    def _isolate(self, node: Node, rng: random.Random) -> None:
        until = self._until(rng)
        for other in self.world.nodes:
            self.world.cuts[node.member, other.member] = self.world.cuts[other.member, node.member] = until
        node.reachable = False
        self.world.after(until - self.world.now, self._reach, node)

    _isolate_leader = _isolate

    def _slow_disk(self, node: Node, rng: random.Random) -> None:
        node.disk_s = rng.choice((0.01, 0.1, 0.6))

    def _rot(self, node: Node, rng: random.Random) -> None:
        """One disk at a time, and never the last good copy: no protocol brings that back."""
        world = self.world
        state = world.zookeeper.state
        others = [n for n in world.nodes if n is not node]
        if state is None or any(other.disk.rotten or other.disk.image.unclean for other in others):
            return
        if node.member not in state.in_sync or any(other.member in state.in_sync for other in others):
            world.stop(node, power=False)
            if node.core is None and not node.disk.rotten and node.disk.rot(rng):
                world.counts["rotten disks"] += 1
            self._restart_later(node, rng)

    def _drain(self, node: Node, rng: random.Random) -> None:
        if node.core is not None:
            self.world.deliver(node, node.start, ev.Drain())
            self.world.after(rng.uniform(0.5, 3.0), self.world.stop, node, False)
            self.world.after(rng.uniform(3.0, 6.0), self.world.start, node)


def heal(world: World) -> None:
    """No more faults, nothing new to write; every process is up again."""
    world.calm, world.clients, world.loss = True, False, 0.0
    world.cuts.clear()
    for node in world.nodes:
        node.reachable, node.disk_s, node.disk.full = True, 0.01, False
        if node.core is not None and (node.core.draining or node.core.state is State.HALTED):
            world.stop(node, power=False)
        world.start(node)


def say_so(world: World) -> None:
    """What an operator does when the only member is damaged: the replica with the longest log is to lead."""
    ends = [(node.log.last, node) for node in world.nodes if node.log is not None]
    node = max(ends, key=lambda end: end[0])[1]
    node.disk.rotten = False  # the operator knows what is missing
    world.deliver(node, node.start, ev.ForcePromotion("operator", "the only member in sync is damaged"))


def run(
    seed: int,
    core: type[Core] = Core,
    trust_damage: bool = False,
    files: Callable[[int], FileDisk] | None = None,
    trust_cache: bool = False,
    cut_at_seal: bool = False,
) -> Verdict:
    """Play one seed."""
    world = World(seed, core, trust_damage, files, trust_cache, cut_at_seal)
    Schedule(world).begin()
    world.run_until(FAULTS_S)
    heal(world)
    history = world.history
    outcome = "well"
    world.run_until(FAULTS_S + HEALING_S, history.well)
    if not history.well() and any(node.core is not None and node.core.state is State.DAMAGED for node in world.nodes):
        outcome = "well by an operator's word"
        say_so(world)
        world.run_until(FAULTS_S + 2 * HEALING_S, history.well)
    if history.well():
        history.check_end()
    else:
        outcome = "stuck"
        history.violation("stuck", ", ".join(f"{n.member} {n.core.state.value if n.core else 'down'}" for n in world.nodes))
    world.counts[outcome] += 1
    return Verdict(seed, history.violations, world.counts, world.trace, outcome)


if __name__ == "__main__":
    for number in sys.argv[1:] or ["0"]:
        verdict = run(int(number))
        print(number, verdict.violations[:10], dict(verdict.counts), verdict.outcome)
