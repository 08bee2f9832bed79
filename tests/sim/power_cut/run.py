"""One run: a partition of Pi or Xiu lives, its machines lose their power, and what is left of their disks is started.

    life 1 ── trace ──▶ cuts at some of its syncs: of each what is left is started, and compared
                   └──▶ one of them: life 2 begins with it ── trace ──▶ …

python -m tests.sim.power_cut.run 17 [--fault NAME] [--every]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import gc
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog

from cluster.replication.model import EntryKind, PartitionState
from cluster.replication.storage.segment import SUFFIX
from pixiu.errors import PixiuError
from pixiu.wire.levels import Level
from tests.sim.power_cut import faults
from tests.sim.power_cut.callers import CALLERS, Confirmed, held
from tests.sim.power_cut.disk import SECTOR_BYTES, Disk, Left
from tests.sim.power_cut.recorder import Kind, Operation, Recorder, environment, library
from tests.sim.power_cut.shadow import Claims, Disks
from tests.sim.power_cut.threads import DELAY_S
from tests.sim.power_cut.world import FLUSH_S, SEGMENT_BYTES, Machine, Noted, Shape, World
from tests.sim.replication.zookeeper import Register
from xiu.store.manifest import HEADER

LIVES: Final = 3
CUTS: Final = 3
"""Of each life, besides the one that the next begins with."""
EARLY: Final = 25
"""One of them is at one of so many first syncs, while a start is under way."""
LATE_S: Final = 2.5
"""When the second replica comes, where it comes late."""
LONG_S: Final = 4.0
"""So long callers work where it does: they are still there then."""
ALONE_S: Final = 2.0
"""A leader that nobody hears waits for so long for something to write."""
AWAY_S: Final = (0.0, 0.3, 2.5)
"""So long a machine is away while another one leads: after the longest it needs a snapshot."""
FOLLOWING: Final = 10
RARE: Final = 2
"""At so many syncs of those behind the beginning of what happens seldom it is cut."""
TORN: Final = 1
"""So many syncs of a log for which much waits are cut at."""
LIFE_S: Final = 60.0
"""By then callers have their confirmations."""
MAX_FOUND: Final = 5
PAGE: Final = 1000
PAGE_BYTES: Final = 1 << 20
DIGITS: Final = re.compile(r"[0-9]+|[0-9a-f]{16}")
SYNCS: Final = (Kind.SYNCED, Kind.NAMES_SYNCED)


@dataclass
class Cut:
    """A moment of a life, and what it leaves."""

    disks: list[Disk]
    register: tuple[PartitionState | None, int]
    confirmed: list[Confirmed]
    left: list[Left]
    at_s: float
    where: str
    rng: random.Random | None = None
    """Of a cut that is made besides: what the others leave does not depend on it."""


@dataclass
class Run:
    """All of it."""

    seed: int
    fault: str = ""
    every: bool = False
    found: list[str] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)
    trace: str = ""


def shape_of(seed: int) -> Shape:
    """The shapes follow each other, so that a few seeds see them all."""
    rng = random.Random(f"shape {seed}")
    absent = 4 <= seed // 2 % 8 < 7
    replicas = 2 if absent else (1, 1, 2, 2)[seed // 2 % 4]
    late = seed // 2 % 4 == 3 and not absent
    return Shape(
        role=("pi", "xiu")[seed % 2],
        replicas=replicas,
        late=late,
        absent=absent,
        segment_bytes=rng.choice(SEGMENT_BYTES),
        flush_s=rng.choice(FLUSH_S),
        requests=rng.choice((30, 60)),
        every_s=rng.choice((0.005, 0.05)),
        kernel=rng.random() < 0.5,
    )


async def begin(world: World, confirmed: list[Confirmed]) -> None:
    """Start all machines, wait until they are equal, and look for what was confirmed. Raises AssertionError, PixiuError."""
    await asyncio.gather(*(start(machine) for machine in world.machines))
    await world.until(lambda: world.leader is not None, "a leader")
    await same(world)
    for machine in world.machines:
        compare(machine, confirmed)


async def start(machine: Machine) -> None:
    """Start one; nothing on its disk may be damaged."""
    await machine.start()
    log = machine.replica.log
    assert log.damage is None, f"machine {machine.number}: the log is damaged: {log.damage}"
    warning = getattr(machine.machine, "warning", "") or getattr(machine.machine, "damaged", "")
    assert not warning, f"machine {machine.number}: {warning}"
    assert not machine.log.errors, f"machine {machine.number}: {machine.log.errors}"


async def same(world: World) -> None:
    """Wait until all that run have applied the same, and all of it is committed."""

    def equal() -> bool:
        there = [each for each in world.machines if each.service is not None]
        ends = {
            (each.replica.log.last, each.machine.applied, each.replica.log.last.counter == each.machine.applied) for each in there
        }
        return len(ends) == 1 and next(iter(ends))[2] and world.leader is not None

    await world.until(equal, "an equal state")


def compare(machine: Machine, confirmed: list[Confirmed]) -> None:
    """Raises AssertionError when something is not there, or elsewhere."""
    has = held(machine)
    for told in confirmed:
        if told.level is Level.PERSISTED and len(machine.world.machines) > 1:
            continue  # another leader may not have had it
        assert told.key in has, f"machine {machine.number} has lost {told}"
        assert told.place in (0, has[told.key]), f"machine {machine.number} has {told} at {has[told.key]}"


async def begin_and_look(world: World, confirmed: list[Confirmed]) -> None:
    """The same, and the logs have only what was proposed once."""
    await begin(world, confirmed)
    for machine in world.machines:
        log = machine.replica.log
        after = log.first.counter
        while entries := log.read(after, PAGE, PAGE_BYTES):
            after = entries[-1].counter
            wrong = [entry.position for entry in entries if entry.kind > EntryKind.NOOP and entry.payload not in world.written]
            assert not wrong, f"machine {machine.number} has entries that nobody proposed: {wrong}"


async def live(world: World, confirmed: list[Confirmed]) -> None:
    """A life: what is there is compared, then callers work. Faults come of the disks alone."""
    first = not confirmed and world.shape.late and not world.now
    if first:
        late, world.machines = world.machines[1:], world.machines[:1]
        await begin(world, confirmed)
    else:
        late = []
        await begin(world, confirmed)
    callers = [CALLERS[world.shape.role](world, number) for number in range(world.shape.users)]
    every_s = LONG_S * world.shape.users / world.shape.requests if late or world.shape.absent else world.shape.every_s
    tasks = [asyncio.create_task(caller.run(every_s)) for caller in callers]
    if world.shape.absent:
        await absence(world)
    if late:
        await asyncio.sleep(LATE_S)
        for machine in late:
            world.machines.append(machine)
            await start(machine)
    async with asyncio.timeout(LIFE_S):
        await asyncio.gather(*tasks)
    await same(world)
    await asyncio.sleep(world.rng.uniform(0.0, 2.0))


async def absence(world: World) -> None:
    """A leader that the other does not hear writes what nobody else has, and comes back when the other leads: its log is cut, at
    once or after a start; or it was away for so long that what it needs is trimmed, and it takes a snapshot."""
    rng = world.rng
    await asyncio.sleep(rng.uniform(0.05, 0.5))
    await world.until(lambda: world.leader is not None and len(world.leader.replica.status()["in_sync"]) > 1, "a leader in sync")
    gone = world.leader
    assert gone is not None
    gone.cut_off, before = True, gone.replica.log.last.counter
    end = world.loop.now + ALONE_S
    while gone.replica.log.last.counter == before and world.loop.now < end:
        await asyncio.sleep(0.005)
    await asyncio.sleep(rng.choice((0.0, 0.005, 0.1)))
    if rng.random() < 0.5:
        await gone.stop()
        gone.cut_off = False
        await world.until(lambda: world.leader is not None, "another leader")
        await asyncio.sleep(rng.choice(AWAY_S))
        await start(gone)
        return
    world.register.close(gone.session)
    await world.until(lambda: world.leader not in (None, gone), "another leader")
    caller = CALLERS[world.shape.role](world, world.shape.users)
    gone.cut_off, world.loop.slow = False, max(DELAY_S)  # to the end: one who waits with no pause would not see a slow one go on
    await caller.send_while(gone, lambda: gone.replica.is_leader)
    await gone.register_again()


def kinds_of(trace: list[Operation], syncs: list[int]) -> list[list[int]]:
    """Syncs of one kind of file together, so that rare ones are cut at, too."""
    kinds: dict[tuple[int, str], list[int]] = {}
    for index in syncs:
        kinds.setdefault((trace[index].kind, DIGITS.sub("", trace[index].path)), []).append(index)
    return list(kinds.values())


def left_of(cut: Cut, rng: random.Random) -> list[Disk]:
    """The disks after a cut. However much is pending, what comes afterwards is decided alike."""
    return [disk.cut(left, random.Random(rng.getrandbits(64))) for disk, left in zip(cut.disks, cut.left, strict=True)]


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder that goes again."""
    folder = Path(tempfile.mkdtemp(prefix="pixiu-power-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """What a collection closes, and when, depends on what was played before."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def said(error: Exception) -> str:
    """What went wrong."""
    return str(error) if isinstance(error, AssertionError | PixiuError) else repr(error)


class Player:
    """Plays one run."""

    def __init__(self, run: Run, folder: Path, recorder: Recorder) -> None:
        self.run, self._folder, self._recorder = run, folder, recorder
        self.shape = shape_of(run.seed)
        self._written: set[bytes] = set()
        self._fault = faults.FAULTS[run.fault] if run.fault else None
        self._rng = random.Random(run.seed)
        self._count = 0
        self._hash = hashlib.blake2b(digest_size=16)

    def play(self) -> None:
        """All lives."""
        cut = Cut(
            [Disk() for _ in range(self.shape.replicas)], (None, -1), [], [Left.ALL] * self.shape.replicas, 0.0, "the beginning"
        )  # fmt: skip
        for life in range(LIVES):
            cuts = self._live(life, cut)
            if cuts is None or not self._all_well(cuts[:-1]):
                break
            cut = cuts[-1]
        self.run.trace = self._hash.hexdigest()

    def _world(self, cut: Cut, disks: list[Disk], seed: int) -> World:
        """A world over what a cut leaves."""
        self._count += 1
        folder, volatile = self._folder / f"{self._count}", self._folder / f"{self._count}.shm"
        volatile.mkdir()
        for number, disk in enumerate(disks):
            (folder / f"{number}").mkdir(parents=True)
            disk.write(folder / f"{number}")
        register = Register(2.0, *cut.register)
        return World(seed, self.shape, folder, volatile, register, cut.at_s, written=set(self._written))

    def _done(self, world: World) -> None:
        shutil.rmtree(world.folder, ignore_errors=True)
        shutil.rmtree(world.volatile, ignore_errors=True)
        self.run.happened.update(world.happened)

    def _live(self, life: int, cut: Cut) -> list[Cut] | None:
        """Play a life that begins with a cut; some cuts of its own. None: it found something."""
        rng = self._rng
        disks = left_of(cut, rng)
        world = self._world(cut, disks, rng.getrandbits(32))
        world.recorder = self._recorder
        self._recorder.begin(world.folder)
        problem = ""
        try:
            world.run(live(world, cut.confirmed), self._record)
        except Exception as error:
            problem = f"life {life + 1}, begun at {cut.where}: {said(error)}"
        self._done(world)
        self._written |= world.written
        if problem:
            self.run.found.append(problem)
            return None
        return self._replay(life, cut, disks, world)

    def _record(self) -> None:
        self._trace = self._recorder.end()

    def _replay(self, life: int, begun: Cut, disks: list[Disk], world: World) -> list[Cut] | None:
        """Look at every claim of a life, and take cuts of it."""
        trace, rng = self._trace, self._rng
        syncs = [index for index, operation in enumerate(trace) if operation.kind in SYNCS]
        kinds = kinds_of(trace, syncs)
        some = {rng.choice(syncs[:EARLY]), *(rng.choice(rng.choice(kinds)) for _ in range(CUTS - 1))}
        chosen = set(syncs) if self.run.every else some
        last, ends = rng.choice(rng.choice(kinds)), [Left.NOTHING, Left.SOME, Left.ALL, Left.ALL]
        if self._fault is not None:
            chosen |= self._behind(trace, syncs, self._fault.behind)
        if self._fault is not None and self._fault.killed:
            name, which = self._fault.killed
            if life == 0:
                last, ends = [index for index in syncs if trace[index].path.endswith(name)][which], [Left.ALL]
            elif life == 1:
                chosen |= set(syncs[:EARLY])
        shadow = Disks(disks)
        torn = self._torn(life, trace)
        more = (self._rare(life, trace, world.notes) | set(torn)) - chosen
        with scratch() as folder:
            claims = Claims(self.shape.role, shadow, folder)
            cuts: list[Cut] = []
            next_life: Cut | None = None
            confirmed, register, at_s = list(begun.confirmed), begun.register, begun.at_s
            for index, operation in enumerate(trace):
                self._hash.update(repr((operation.kind, operation.path, operation.other, len(operation.data))).encode())
                if index in chosen or index in more or index == last:
                    where = f"operation {index} of life {life + 1}"
                    now = copy.deepcopy(shadow.disks)
                if index in chosen:
                    left = [rng.choice((Left.NOTHING, Left.SOME)) for _ in disks]
                    cuts.append(Cut(now, register, list(confirmed), left, at_s, where))
                if index in more:
                    own = random.Random(f"{self.run.seed} {life} {index}")
                    left = [torn.get(index) or own.choice((Left.NOTHING, Left.SOME)) for _ in disks]
                    cuts.append(Cut(now, register, list(confirmed), left, at_s, where, own))
                if index == last:
                    left = [rng.choice(ends) for _ in disks]
                    next_life = Cut(now, register, list(confirmed), left, at_s, where)
                note = None
                if operation.kind is Kind.NOTED:
                    note = world.notes[operation.value]
                    at_s = note.at_s
                    problems = list(claims.problems(note))
                    for machine in range(len(disks)):
                        problems += claims.late_seals(machine, at_s)
                else:
                    shadow.do(operation)
                    problems = list(claims.done(operation))
                self.run.found += [f"operation {index} of life {life + 1}: {problem}" for problem in problems]
                if len(self.run.found) >= MAX_FOUND:
                    return None
                if note is None:
                    continue
                if note.what == "confirmed":
                    confirmed.append(note.value)
                elif note.what == "register":
                    register = note.value
            self.run.happened.update({f"checked {what}": number for what, number in claims.checked.items()})
            self.run.happened["syncs"] += len(syncs)
            self.run.happened["operations"] += len(trace)
        assert next_life is not None
        return None if self.run.found else [*cuts, next_life]

    def _rare(self, life: int, trace: list[Operation], notes: list[Noted]) -> set[int]:
        """Of each kind of moment some syncs of its machine behind one that there was."""
        rng = random.Random(f"rare {self.run.seed} {life}")
        moments: dict[str, list[int]] = {}
        for index, operation in enumerate(trace):
            if operation.kind is Kind.NOTED and (note := notes[operation.value]).what == "moment":
                moments.setdefault(note.value, []).append(index)
        found: set[int] = set()
        for each in moments.values():
            begin = rng.choice(each)
            mine = f"{notes[trace[begin].value].machine}/"
            behind = (at for at in range(begin, len(trace)) if trace[at].kind in SYNCS and trace[at].path.startswith(mine))
            if following := list(itertools.islice(behind, FOLLOWING)):
                found |= set(rng.sample(following, min(RARE, len(following))))
        return found

    def _torn(self, life: int, trace: list[Operation]) -> dict[int, Left]:
        """A sync of a log for which more than a sector waits: what is left of that is torn. One of a MANIFEST in which two sectors
        share the header of an edit: it is left with the second alone."""
        waits: Counter[int] = Counter()
        logs, edits, shared = list[int](), list[int](), set[int]()
        for index, operation in enumerate(trace):
            if operation.kind is Kind.WRITTEN:
                waits[operation.inode] += len(operation.data)
                if 0 < -operation.value % SECTOR_BYTES < HEADER.size:
                    shared.add(operation.inode)
            elif operation.kind is Kind.SYNCED:
                if operation.path.endswith(SUFFIX) and waits[operation.inode] > SECTOR_BYTES:
                    logs.append(index)
                elif "/MANIFEST-" in operation.path and operation.inode in shared:
                    edits.append(index)
                waits[operation.inode] = 0
                shared.discard(operation.inode)
        rng = random.Random(f"torn {self.run.seed} {life}")
        found = {rng.choice(logs): Left.SOME for _ in range(TORN) if logs}
        return found | ({rng.choice(edits): Left.ENDS} if edits else {})

    @staticmethod
    def _behind(trace: list[Operation], syncs: list[int], folder: str) -> set[int]:
        """The syncs that follow those of a folder's names."""
        pairs = ((one, two) for one, two in itertools.pairwise(syncs) if trace[one].kind is Kind.NAMES_SYNCED)
        return {two for one, two in pairs if folder and trace[one].path.endswith(folder)}

    def _all_well(self, cuts: list[Cut]) -> bool:
        """Start what each cut leaves."""
        for cut in cuts:
            rng = cut.rng or self._rng
            disks = left_of(cut, rng)
            world = self._world(cut, disks, rng.getrandbits(32))
            try:
                world.run(begin_and_look(world, cut.confirmed))
            except Exception as error:
                left = ", ".join(each.value for each in cut.left)
                self.run.found.append(f"cut before {cut.where} ({left}): {said(error)}")
            self._done(world)
            self.run.happened["cuts"] += 1
            if self.run.found:
                return False
        return True


def play(seed: int, recorder: Recorder, fault: str = "", *, every: bool = False) -> Run:
    """Play one seed."""
    run = Run(seed, fault, every)
    with scratch() as folder, faults.planted(fault), no_collector():
        Player(run, folder, recorder).play()
    return run


def with_recorder() -> None:
    """Start this program anew, with the library. Does not return."""
    with scratch() as folder:
        program = [sys.executable, "-m", "tests.sim.power_cut.run", *sys.argv[1:]]
        done = os.spawnve(os.P_WAIT, sys.executable, program, environment(library(folder)))
    sys.exit(done)


def serve(recorder: Recorder) -> int:
    """Play what standard input says, one `[seed, fault]` a line, and say what was found."""
    for line in sys.stdin:
        seed, fault = json.loads(line)
        run = play(seed, recorder, fault)
        print(json.dumps({"found": run.found, "trace": run.trace, "happened": run.happened}), flush=True)
    return 0


def main() -> int:
    """Play seeds, each alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", type=int, nargs="*")
    parser.add_argument("--served", action="store_true", help="play what standard input says")
    parser.add_argument("--fault", default="", choices=["", *faults.FAULTS])
    parser.add_argument("--every", action="store_true", help="cut at every sync of every life; takes minutes")
    parser.add_argument("--to", type=int, default=0, help="play all seeds from the first to this one")
    args = parser.parse_args()
    if "recorder.so" not in os.environ.get("LD_PRELOAD", ""):
        with_recorder()
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    recorder, failed = Recorder(), 0
    if args.served:
        return serve(recorder)
    for seed in range(args.seeds[0], args.to + 1) if args.to else args.seeds:
        began = time.process_time()
        run = play(seed, recorder, args.fault, every=args.every)
        failed += bool(run.found)
        happened = ", ".join(f"{name} {number}" for name, number in sorted(run.happened.items()))
        print(f"seed {seed}: {shape_of(seed)}, trace {run.trace}, {time.process_time() - began:.1f} s; {happened}", flush=True)
        print("\n".join(run.found) if run.found else "every promise kept", flush=True)
        if run.found and args.fault:
            break
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
