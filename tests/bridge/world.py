"""A channel, processes that run a bridge, and a target, in simulated time: everything fails by a seed.

    python -m tests.bridge.world SEED

The channel gives messages to the members, in mode `ordered` a lane to one of them at a time, and gives again what
a killed or departing one had. The target takes a batch, and confirms it late, in part, or never; it is killed and comes back.
At some messages it ends the link each time.
"""

from __future__ import annotations

import heapq
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bridge import events as ev
from bridge.connector import DONE, Outcome, Verdict
from bridge.core import Core, Limits
from cluster.core.contract import END_OF_TURN, NEVER, TICK

LANES = 5
MESSAGES = 120
PROCESSES = 2
CREDIT = 12
END_S = 5_000.0
WRONG = 7
"""Every message whose number is divisible by it can never be written."""
POISON = frozenset((16, 17, 51))
"""At these the target ends the link."""
AT_ONCE = 3
"""Messages of a lane that a member has at a time, if the channel is ordered."""
FREE_LANE = 3
"""A lane without such a message, whose traffic never ends."""


@dataclass
class Verdicts:
    """What a run showed."""

    violations: list[str] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    """Messages in the order in which the target has them, repeats included."""
    letters: list[int] = field(default_factory=list)
    repeats: int = 0
    kills: int = 0
    breaks: int = 0


class Process:
    """One run of a bridge, until it is killed."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.alive, self.member = True, False
        self.held: dict[int, int] = {}
        """Number of the delivery → message."""
        self.numbers = 0
        self.core = world.make(Limits(8, 1 << 20, 0.05, world.rng.choice((1, 3)), 0, 5.0, world.ordered), lambda n: n in self.held,
                               world.rng.random)  # fmt: skip
        self.writing = 0
        self.due = NEVER

    def step(self, event: ev.Event) -> None:
        """Take an event, and perform what follows."""
        if not self.alive:
            return
        self.perform(self.core.step(event, self.world.now))
        due = self.core.next_deadline()
        if due < NEVER and due != self.due:
            self.due = due
            self.world.at(max(due, self.world.now + 1e-6), lambda: self.tick(due))

    def tick(self, due: float) -> None:
        """The deadline has come, unless there is another one."""
        if due == self.due:
            self.due = NEVER
            self.step(TICK)

    def perform(self, effects: Sequence[ev.Effect]) -> None:
        """Perform effects, in their order."""
        world, rng = self.world, self.world.rng
        for effect in effects:
            if isinstance(effect, ev.OpenTarget):
                answer = ev.Opened() if world.target_up else ev.OpenFailed("away")
                world.after(rng.random(), partial(self.step, answer))
            elif isinstance(effect, ev.Join):
                self.member = True
            elif isinstance(effect, ev.Leave):
                self.member = False
                world.give_back(self, list(self.held))
            elif isinstance(effect, ev.Write):
                self.writing += 1
                world.write(self, effect)
            elif isinstance(effect, ev.Acknowledge):
                world.settle(self, effect.numbers, dead=False)
            elif isinstance(effect, ev.Reject):
                world.settle(self, [number for number, _ in effect.letters], dead=True)


class World:
    """Everything around the cores. `make` makes a core, so that a faulty one may be played."""

    def __init__(self, seed: int, make: Callable[..., Core] = Core, *, ordered: bool = True) -> None:
        self.rng = random.Random(seed)
        self.make, self.ordered = make, ordered
        self.now, self.target_up = 0.0, True
        self.found = Verdicts()
        self.open = list(range(MESSAGES))
        self.total = MESSAGES + FREE_LANE - LANES
        """Messages that are to be given."""
        self.with_member: dict[int, Process] = {}
        self.done = set[int]()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.processes = [Process(self) for _ in range(PROCESSES)]

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Do something at a time."""
        self._count += 1
        heapq.heappush(self._events, (when, self._count, what))

    def after(self, seconds: float, what: Callable[[], Any]) -> None:
        """Do something later."""
        self.at(self.now + seconds, what)

    def run(self) -> Verdicts:
        """Play until all is settled."""
        for process in self.processes:
            process.step(ev.Begin())
        self.at(0.1, self.give)
        self.at(self.rng.random() * 5, self.fault)
        self.at(0.2, self.more)
        while self._events and not self.done >= set(range(MESSAGES)) and self.now < END_S:
            self.now, _, what = heapq.heappop(self._events)
            what()
        self.judge()
        return self.found

    def fault(self) -> None:
        """Kill or pause a process, or the target."""
        kind = self.rng.randrange(3)
        at = self.rng.randrange(PROCESSES)
        process = self.processes[at]
        if kind == 0:
            self.found.kills += 1
            process.alive = process.member = False
            self.give_back(process, list(process.held))
            self.processes[at] = Process(self)
            self.after(1.0, partial(self.processes[at].step, ev.Begin()))
        elif kind == 1:
            process.step(ev.End())
            self.after(2.0, lambda: process.step(ev.Begin()))
        elif self.target_up:
            self.found.breaks += 1
            self.target_up = False
            self.after(self.rng.choice((0.5, 3.0, 90.0)), self.back)
        if self.now < 300.0:
            self.after(self.rng.random() * 10, self.fault)

    def more(self) -> None:
        """A message more: traffic never ends, and shows that the target is there."""
        if sum(each % LANES == FREE_LANE for each in self.open) < PROCESSES:
            self.total += LANES + LANES * ((self.total + LANES) % WRONG == 0)  # none that is wrong
            self.open.append(self.total)
        self.after(1.0, self.more)

    def back(self) -> None:
        """The target is there again."""
        self.target_up = True

    def give(self) -> None:
        """Give members what they may have."""
        for process in self.rng.sample(self.processes, PROCESSES):
            if not (process.alive and process.member):
                continue
            arrivals = list[ev.Arrival]()
            for message in list(self.open):
                lane = message % LANES
                busy = {each % LANES: owner for each, owner in self.with_member.items()}
                if len(process.held) >= CREDIT or (self.ordered and busy.get(lane, process) is not process):
                    continue
                if self.ordered and any(each % LANES == lane for each in self.open if each < message):
                    continue
                if self.ordered and sum(each % LANES == lane for each in process.held.values()) >= AT_ONCE:
                    continue
                self.open.remove(message)
                self.with_member[message] = process
                process.numbers += 1
                process.held[process.numbers] = message
                arrivals.append(ev.Arrival(process.numbers, lane, 10))
            if arrivals:
                process.step(ev.Arrived(arrivals))
                process.step(END_OF_TURN)
        self.after(0.1, self.give)

    def give_back(self, process: Process, numbers: Sequence[int]) -> None:
        """What a process had is to be given again."""
        for number in numbers:
            message = process.held.pop(number)
            del self.with_member[message]
            self.open.append(message)
        self.open.sort()

    def settle(self, process: Process, numbers: Sequence[int], *, dead: bool) -> None:
        """A process reports messages; it counts if it has them still."""
        for number in numbers:
            message = process.held.pop(number, None)
            if message is None:
                continue
            del self.with_member[message]
            self.done.add(message)
            if dead:
                self.found.letters.append(message)
            elif message not in self.found.written:
                self.found.violations.append(f"{message} was acknowledged, and the target does not have it")

    def write(self, process: Process, effect: ev.Write) -> None:
        """The target gets a batch: all of it, a beginning, or nothing; and confirms, or not."""
        messages = [process.held.get(number) for number in effect.numbers]
        if self.ordered:
            lanes = [message % LANES for message in messages if message is not None]
            busy = {lane for lanes in process.__dict__.setdefault("lanes", {}).values() for lane in lanes}
            if busy & set(lanes):
                self.found.violations.append(f"lanes {busy & set(lanes)} are in two batches")
            process.__dict__["lanes"][effect.batch] = lanes
        self.after(self.rng.random() * 2, lambda: self.arrives(process, effect, messages))

    def arrives(self, process: Process, effect: ev.Write, messages: Sequence[int | None]) -> None:
        """A batch is at the target."""
        chance, outcomes = self.rng.random(), list[Outcome]()
        stops = self.rng.randrange(len(messages)) if chance < 0.2 else len(messages)
        for at, message in enumerate(messages):
            stops = at if message in POISON else stops
            if not self.target_up or at >= stops:
                outcomes.append(Outcome(Verdict.AGAIN, "busy"))
            elif message is not None and message % WRONG == 0:
                outcomes.append(Outcome(Verdict.NEVER, "wrong"))
            else:
                outcomes.append(DONE)
                # A process that lost a message to another may still write it: what comes after its successor's is no order.
                if message is not None and process.alive and self.with_member.get(message) is process:
                    self.found.written.append(message)
        failed = not self.target_up or self.rng.random() < 0.1 or bool(POISON.intersection(messages))
        answer: ev.Event = ev.WriteFailed(effect.batch, "cut") if failed else ev.Written(effect.batch, outcomes)

        def confirm() -> None:
            process.__dict__.get("lanes", {}).pop(effect.batch, None)
            process.step(answer)

        self.after(self.rng.random() * self.rng.choice((0.1, 5.0)), confirm)

    def judge(self) -> None:
        """At least once, each; in order, if that is promised; letters for what is wrong, and for nothing else."""
        found, wrong = self.found, {message for message in range(MESSAGES) if message % WRONG == 0} | POISON
        if missing := set(range(MESSAGES)) - self.done:
            found.violations.append(f"not settled at {self.now:.0f}: {sorted(missing)[:5]}")
        if set(found.letters) != wrong & self.done or len(found.letters) != len(set(found.letters)):
            found.violations.append(f"dead letters {sorted(found.letters)}")
        found.repeats = len(found.written) - len(set(found.written))
        if self.ordered:
            first = defaultdict[int, list[int]](list)
            for message in dict.fromkeys(found.written):
                first[message % LANES].append(message)
            found.violations += [f"lane {lane}: {each}" for lane, each in sorted(first.items()) if each != sorted(each)]


if __name__ == "__main__":
    print(World(int(sys.argv[1])).run())
