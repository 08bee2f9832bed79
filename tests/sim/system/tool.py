"""The operator's tool: `registry.doubling` decides what it does next, as in production; this is the twin of its shell.

It looks, acts, and is killed here and there, so that another run goes on some seconds later. In every phase a replica of the role
that doubles is killed here and there, or stopped for a while.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pi.doubling import Doubling, Step
from pixiu.discovery.view import RoleLayout
from pixiu.wire.v1 import doubling_pb2 as pb
from registry import doubling as plan
from registry.doubling import Phase, Seen
from tests.sim.system.pi import PiProcess
from tests.sim.system.xiu import XiuProcess
from xiu.doubling import Change
from xiu.doubling import Phase as XiuPhase

if TYPE_CHECKING:
    from tests.sim.system.world import SystemWorld

LOOK_S: Final = (0.05, 0.2)
STRIKE: Final = 0.3
"""Probability that a replica is struck behind the tool's first look in a phase; every phase comes once in a doubling."""
STOPPED: Final = 0.3
"""Of those that are struck: stopped for a while, and not killed."""
START_S: Final = (0.2, 2.0)
"""Until processes of the soft roles' new partitions have started. Those of Xiu and Pi are there at once, and have to learn."""
GONE: Final = 0.15
"""Probability that the tool is killed there."""
GONE_S: Final = (0.5, 5.0)
STEPS: Final = {pb.DOUBLING_LEARNING: Step.BEGIN, pb.DOUBLING_SPLIT: Step.SPLIT, pb.DOUBLING_CLEANING: Step.CLEAN}
"""Of Pi. Children open by themselves."""


class Tool:
    """Doubles a role, from whatever phase it is in.

    Args:
        world: whole.
        role: whose partitions double.
        number: the doubling's ID.
    """

    def __init__(self, world: SystemWorld, role: str, number: int) -> None:
        self._world, self.role, self._number = world, role, number
        count = world.registry.view.count(role)
        self.layout = RoleLayout(count, count, 2)
        self.over_at = float("inf")
        self._phase: Phase | None = None
        self._gone_until = 0.0
        self._turn()

    @property
    def over(self) -> bool:
        """Whether nothing is left to do."""
        return self.over_at < float("inf")

    @property
    def _doubling(self) -> str:
        return f"{self._number:016x}"

    def _turn(self) -> None:
        world = self._world
        if self.over:
            return
        world.wire.after(world.rng.uniform(*LOOK_S), self._turn)
        if world.now < self._gone_until:
            return
        phase, action = world.variant.decide(self._see())
        match action:
            case plan.Begin():
                self._begin()
            case plan.Advance(partitions, wanted):
                for partition in partitions:
                    self._advance(partition, wanted)
            case plan.Commit():
                self._commit()
            case plan.Finished():
                self.over_at = world.now
        if phase is not self._phase:
            self._phase = phase
            world.counts[f"{self.role} doubling {phase.value}"] += 1
            self._break_something()

    # --- looking

    def _see(self) -> Seen:
        world, layout = self._world, self.layout
        total = max(layout.n, layout.next)
        running = dict.fromkeys(range(total), 0)
        for node in world.registry.view.running(self.role):
            running[node.partition] = running.get(node.partition, 0) + 1
        statuses = {p: said for p in range(total) if (said := self._status(p)) is not None} if self.role in plan.STORED else {}
        behind: tuple[str, ...] = ()
        if self._doubling in layout.ended:
            version = world.registry.view.version
            behind = tuple(process.place.name for process in world.processes() if process.view.version < version)
        return Seen(self.role, layout, self._doubling, running, statuses, behind)

    def _status(self, partition: int) -> pb.DoublingStatus | None:
        """What the partition's leader says; None: nobody does, or may have been deposed."""
        leader = self._world.leader_of(self.role, partition)
        if leader is None or leader.paused or not leader.replica.may_read():
            return None
        if isinstance(leader, PiProcess):
            record, known = leader.doubler.record, leader.machine.position.counter
            return pb.DoublingStatus(
                doubling=record.doubling.number, phase=pb.DoublingPhase.ValueType(record.phase), committed=known,
                split_at=record.split_at, learned=record.learned.counter,
            )  # fmt: skip
        now = leader.doubler.doubling
        return pb.DoublingStatus(
            doubling=now.id, phase=pb.DoublingPhase.ValueType(now.phase), committed=leader.core.committed, split_at=now.split_at
        )

    # --- acting

    def _begin(self) -> None:
        world, count = self._world, self.layout.n
        self.layout = RoleLayout(count, 2 * count, 2, (self._doubling,))
        world.registry.layout(self.role, count, 2 * count)
        for partition in range(count, 2 * count):
            if self.role in plan.STORED:
                world.add_store(self.role, partition)
            else:
                start_s = world.rng.uniform(*START_S)
                world.wire.after(start_s, lambda partition=partition: world.add(self.role, partition, 2))

    def _advance(self, partition: int, wanted: pb.DoublingPhase.ValueType) -> None:
        leader, total = self._world.leader_of(self.role, partition), 2 * len(self._parents)
        if isinstance(leader, PiProcess) and wanted in STEPS:
            child = partition if partition >= total // 2 else partition + total // 2
            doubling, pi = Doubling(self._number, total, child), leader
            pi.do(lambda: pi.doubler.propose(STEPS[wanted], doubling=doubling))
        elif isinstance(leader, XiuProcess):
            change, xiu = Change(XiuPhase(wanted), self._number, total), leader
            xiu.do(lambda: xiu.doubler.advance(change))

    @property
    def _parents(self) -> range:
        return range(self.layout.n // 2 if self._doubling in self.layout.ended else self.layout.n)

    def _commit(self) -> None:
        world, total = self._world, self.layout.next
        self.layout = RoleLayout(total, total, 2, self.layout.doublings)
        world.registry.layout(self.role, total, total)

    # --- what breaks

    def _break_something(self) -> None:
        world = self._world
        if not world.wire.faults:
            return
        if world.wire.chance(STRIKE):
            world.wire.after(world.rng.uniform(0.0, 0.3), self._strike)
        if world.wire.chance(GONE):
            world.counts["tools killed"] += 1
            self._gone_until = world.now + world.rng.uniform(*GONE_S)

    def _strike(self) -> None:
        """A parent's or a child's replica; of Xiu and Pi the leader, if there is one."""
        world = self._world
        partition = world.rng.randrange(2 * len(self._parents))
        places = [place for place in world.places_of(self.role) if place.partition == partition]
        if not places or not world.wire.faults:
            return
        leader = world.leader_of(self.role, partition) if self.role in plan.STORED else None
        place = leader.place if leader is not None else world.rng.choice(places)
        if world.wire.chance(STOPPED):
            world.counts["stopped in a doubling"] += 1
            world.pause(place)
        else:
            world.counts["killed in a doubling"] += 1
            world.crash(place)
