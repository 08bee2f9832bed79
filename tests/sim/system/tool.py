"""The operator's tool: `ops.doubling.doubling` decides what it does next, as in production; this is the twin of its shell.

It looks, acts, and is killed here and there, so that another run goes on some seconds later. In every phase a replica of the role
that doubles is killed here and there, or stopped for a while.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from cluster.store.doubling.steps import steps_back
from cluster.wire.v1 import doubling_pb2 as pb
from ops.doubling import doubling as plan
from ops.doubling.doubling import Phase, Seen
from pixiu.discovery.view import RoleLayout
from pixiu.errors import InvalidArgument
from tests.sim.system.pi import PiProcess
from tests.sim.system.xiu import XiuProcess

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
BACK: Final = 0.25
"""Probability that the operator takes a doubling of Xiu or Pi back, in each phase up to the cut; a new one follows."""
BEFORE: Final = (Phase.START, Phase.LEARN, Phase.SPLIT)
LATE: Final = 0.15
"""Probability that what the tool sends is on its way for long: it may outlive the tool."""
LATE_S: Final = (0.1, 4.0)
AGAIN_S: Final = (0.5, 3.0)
SEVERED: Final = 0.3
"""Probability that a parent's leader is severed when it is told to split: it appends SPLIT, and cannot commit it."""
SEVERED_S: Final = (3.0, 5.0)
HASTY: Final = 0.3
"""Probability that somebody asks a parent to delete what moved right behind its SPLIT."""
HASTY_S: Final = 0.5


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
        self._rare = random.Random(f"{world.seed} {role}")
        """Of a harsh run's own troubles."""
        self._fences: dict[int, int] | None = None
        """Of parents, as they were when they were first asked to stay whole; None: nothing is taken back."""
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
        seen = self._see()
        assert not plan.unnamed(seen.statuses, self.layout), f"{self.role} was split, and the layout does not say so"
        if self._fences is not None:
            self._take_back(seen)
            return
        phase, action = world.variant.decide(seen)
        match action:
            case plan.Begin():
                self._begin()
            case plan.Advance(partitions, wanted):
                for partition in partitions:
                    self._advance(partition, wanted, seen.statuses[partition].fence)
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
        return leader.doubler.status()

    # --- acting

    def _begin(self) -> None:
        world, count = self._world, self.layout.n
        self.layout = RoleLayout(count, 2 * count, 2, (self._doubling,))
        world.registry.layout(self.role, count, 2 * count, self.layout.doublings)
        for partition in range(count, 2 * count):
            if (self.role, partition) in world.partitions:
                continue  # they were not stopped when the last one was taken back
            if self.role in plan.STORED:
                world.add_store(self.role, partition)
            else:
                start_s = world.rng.uniform(*START_S)
                world.wire.after(start_s, lambda partition=partition: world.add(self.role, partition, 2))

    def _advance(self, partition: int, wanted: pb.DoublingPhase.ValueType, fence: int) -> None:
        total = 2 * len(self._parents)
        request = pb.DoublingAdvanceRequest(doubling=self._number, partitions=total, phase=wanted, operator="tool", fence=fence)
        leader = self._world.leader_of(self.role, partition)
        if isinstance(leader, PiProcess) and wanted != pb.DOUBLING_OPEN:  # children open by themselves
            pi = leader.doubler

            def take(request: pb.DoublingAdvanceRequest = request) -> None:
                pi.take(lambda now: self._world.variant.steps(now, request))

            if wanted == pb.DOUBLING_SPLIT and self._world.wire.faults and self._world.shape.harsh:
                hasty = pb.DoublingAdvanceRequest(doubling=self._number, partitions=total, phase=pb.DOUBLING_CLEANING)
                self._trouble(leader, lambda: take(hasty))
            self._send(leader, lambda: pi.together(take) if wanted == pb.DOUBLING_SPLIT else take())
        elif isinstance(leader, XiuProcess):
            xiu = leader.doubler
            self._send(leader, lambda: xiu.advance(request))

    def _send(self, leader: PiProcess | XiuProcess, action: Callable[[], None]) -> None:
        wire = self._world.wire
        late = wire.faults and wire.chance(LATE)
        wire.after(self._world.rng.uniform(*LATE_S) if late else wire.hop(), lambda: leader.do(action))

    def _take_back(self, seen: Seen) -> None:
        """As `ops.doubling.tool` does it: entries of parents' logs first, then the layout; or it finds that it is too late."""
        world, fences = self._world, self._fences
        assert fences is not None
        try:
            plan.check_take_back(seen)
        except InvalidArgument:
            self._fences = None
            return
        if any(parent not in seen.statuses for parent in seen.parents):
            return
        for parent in seen.parents:
            fences.setdefault(parent, seen.statuses[parent].fence)
        open_ = [parent for parent in seen.parents if seen.statuses[parent].fence == fences[parent]]
        if open_:
            for parent in open_:
                self._keep_whole(parent)
            return
        world.counts["doublings taken back"] += 1
        self._fences, self._phase, count = None, None, self.layout.n
        self.layout = RoleLayout(count, count, 2)
        world.registry.layout(self.role, count, count)
        self._number += 1000
        self._gone_until = world.now + world.rng.uniform(*AGAIN_S)

    def _keep_whole(self, parent: int) -> None:
        total, leader = 2 * len(self._parents), self._world.leader_of(self.role, parent)
        request = pb.DoublingTakeBackRequest(doubling=self._number, partitions=total, operator="tool")
        if isinstance(leader, PiProcess):
            pi = leader.doubler

            def take_back() -> None:
                pi.take(lambda now: steps_back(now, request))

            self._send(leader, take_back)
        elif isinstance(leader, XiuProcess):
            xiu = leader.doubler
            self._send(leader, lambda: xiu.take_back(request))

    @property
    def _parents(self) -> range:
        return range(self.layout.n // 2 if self._doubling in self.layout.ended else self.layout.n)

    def _commit(self) -> None:
        world, total = self._world, self.layout.next
        self.layout = RoleLayout(total, total, 2, self.layout.doublings)
        world.registry.layout(self.role, total, total, self.layout.doublings)

    # --- what breaks

    def _break_something(self) -> None:
        world = self._world
        if not world.wire.faults:
            return
        if world.wire.chance(STRIKE):
            world.wire.after(world.rng.uniform(0.0, 0.3), self._strike)
        if self.role in plan.STORED and self._phase in BEFORE and world.wire.chance(BACK):
            self._fences = {}
        if world.wire.chance(GONE):
            world.counts["tools killed"] += 1
            self._gone_until = world.now + world.rng.uniform(*GONE_S)

    def _trouble(self, parent: PiProcess, delete: Callable[[], None]) -> None:
        """Of a parent that is told to split."""
        world, rare, state = self._world, self._rare, parent.replica.partition.register.state
        if rare.random() < SEVERED and state is not None and len(state.in_sync) > 1:
            world.sever(parent, rare.uniform(*SEVERED_S))
        elif rare.random() < HASTY:
            world.counts["deletions before their time"] += 1
            world.wire.after(rare.uniform(0.0, HASTY_S), lambda: parent.do(delete))

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
