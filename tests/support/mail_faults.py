"""What is broken while mail flows: a table of kinds, each with its beginning, its end and what says that it healed; and a mixer.

    for kind in rounds(KINDS, random):               # each round has every kind once, shuffled
        broken = await kind.begin(world)             # says what it broke, and how to heal it
        ...
        await broken.heal()
        await world.whole()

All choices, as which process, which replica and which way, follow from the seed.

Source: docs/promises.md, "Failure rules".
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, Final

from onebox.embedded import EmbeddedZooKeeper
from tests.history.record import Fault, History
from tests.support.cluster import LocalCluster, wait_for
from tests.support.cuts import CutNetwork
from tests.support.effort import portion
from tests.support.interposed import Interposed

STORES: Final = ("xiu", "pi")
SOFT: Final = ("proxy", "gateway", "relay", "router", "broker")
ROLES: Final = (*STORES, *SOFT)
PAIRED: Final = ("relay", "router", "proxy", "gateway")
"""Soft roles of which there are two."""
ZOOKEEPER: Final = "zookeeper"
PATHS: Final = (
    ("proxy", "xiu"), ("proxy", "pi"), ("relay", "pi"), ("relay", "xiu"), ("relay", "gateway"), ("proxy", "relay"),
    ("xiu", "xiu"), ("pi", "pi"),
)  # fmt: skip
"""Roles that have to do with each other on a mail's way."""
REPLICATION: Final = (("xiu", "xiu"), ("pi", "pi"))
"""The paths that always carry something."""
LINKS: Final = (("proxy", "relay"), ("relay", "gateway"))
"""Those on which datagrams go."""
SICK_S: Final = (7.0, 10.0)
"""How long what is stopped or cut stays so: longer than peers (4 s) and ZooKeeper (`SESSION_MS`) wait."""
SESSION_MS: Final = 5000
FULL_S: Final = (4.0, 8.0)
FILL_TRIES: Final = 100
DISK: Final = "512m"
SYNC_US: Final = (200_000, 2_000_000)
"""How much longer each sync of a slow disk takes; a replica leaves ZooKeeper when one takes half its session."""
CLOCK_S: Final = (-3600, -120, 120, 3600, 86_400, 10 * 365 * 86_400)
WHOLE_S: Final = 240.0
Process = dict[str, Any]


async def _nothing() -> None:
    """What heals a kill: whoever runs the processes starts another."""


@dataclass(slots=True)
class Broken:
    """What a fault did."""

    targets: tuple[str, ...]
    heal: Callable[[], Awaitable[None]] = _nothing
    lasts_s: tuple[float, float] = (0.0, 0.0)
    """The shortest and the longest time until it is healed."""


@dataclass(slots=True)
class World:
    """What can be broken.

    `disks`: role/partition/number's data folder of each store's replica that has a file system of its own, by its process's name.
    """

    cluster: LocalCluster
    server: EmbeddedZooKeeper
    network: CutNetwork
    history: History
    random: Random
    disks: dict[str, Path] = field(default_factory=dict)
    interposed: Interposed | None = None
    counts: Counter[str] = field(default_factory=Counter)
    """Faults by kind."""

    def all(self) -> list[Process]:
        """Every Running process, in an order that does not change between runs."""
        found = [process for process in self.cluster.status()["processes"] if process["state"] == "Running"]
        return sorted(found, key=lambda process: (process["role"], process["partition"], port_of(process)))

    def of(self, *roles: str) -> list[Process]:
        """Those of some roles."""
        return [process for process in self.all() if process["role"] in roles]

    def one(self, *roles: str) -> Process:
        """One of them."""
        return self.random.choice(self.of(*roles))

    def replica(self, role: str, *, leads: bool) -> Process:
        """A leader or a follower of a store, of one partition or another."""
        return self.random.choice([process for process in self.of(role) if is_leader(process) == leads])

    async def whole(self) -> None:
        """Until the cluster says that it is healthy, and every store has a leader with all its replicas in sync."""
        await asyncio.to_thread(wait_for, self._is_whole, "a whole cluster", WHOLE_S, 0.2)

    def _is_whole(self) -> bool:
        with contextlib.suppress(Exception):  # whatever a status that is half there lacks
            status = self.cluster.status()
            wanted = sum(one["n"] * one["replicas"] for one in status["layout"].values() if isinstance(one, dict))
            found = self.all()
            leaders = [process for process in found if process["role"] in STORES and is_leader(process)]
            partitions = {(process["role"], process["partition"]) for process in found if process["role"] in STORES}
            in_sync = all(len(leader["replication"]["in_sync"]) == 2 for leader in leaders)
            return bool(status["healthy"]) and len(found) == wanted and len(leaders) == len(partitions) and in_sync
        return False

    async def broken(self, kind: Kind) -> Broken:
        """Begin a fault, and note it."""
        found = await asyncio.to_thread(kind.begin, self)
        for target in found.targets:
            self.history.fault(Fault(kind.name, target))
        self.counts[kind.name] += 1
        return found

    async def healed(self, kind: Kind, broken: Broken) -> None:
        """End it, wait until all is whole, and note it."""
        await broken.heal()
        await self.whole()
        for target in broken.targets:
            self.history.fault(Fault(kind.name, target, heals=True))


@dataclass(slots=True, frozen=True)
class Kind:
    """One kind of fault. `begin` is called in a thread, when the cluster is whole."""

    name: str
    begin: Callable[[World], Broken]


def port_of(process: Process) -> int:
    """By which the network knows it."""
    return int(str(process["address"]).rpartition(":")[2])


def name_of(process: Process) -> str:
    """In the history."""
    return f"{process['role']}/{process['partition']}/{process['address']}"


def is_leader(process: Process) -> bool:
    """Of a store."""
    return bool(process["replication"]["state"] == "Leading")


def rounds(kinds: Sequence[Kind], random: Random) -> Iterator[Kind]:
    """All kinds in an order of chance, again and again."""
    while True:
        yield from random.sample(kinds, len(kinds))


# --- what can be done


def _names(world: World, *processes: Process) -> tuple[str, ...]:
    """Of all that a fault of these hits, each once."""
    return tuple(dict.fromkeys(name_of(each) for process in processes for each in (process, *world.cluster.together(process))))


def _ports(world: World, process: Process) -> set[int]:
    """By which the network knows a process: of each of its roles."""
    return {port_of(process), *map(port_of, world.cluster.together(process))}


def _kill(world: World, *processes: Process) -> Broken:
    names = _names(world, *processes)
    for pid in dict.fromkeys(int(process["pid"]) for process in processes):
        os.kill(pid, signal.SIGKILL)
    return Broken(names)


def _stop(world: World, process: Process) -> Broken:
    pid, names = int(process["pid"]), _names(world, process)
    os.kill(pid, signal.SIGSTOP)

    async def go_on() -> None:
        os.kill(pid, signal.SIGCONT)

    return Broken(names, go_on, SICK_S)


def _kill_pair(world: World) -> Broken:
    first, second = world.random.sample(ROLES, 2)
    return _kill(world, world.one(first), world.one(second))


def _kill_all_of_a_soft_role(world: World) -> Broken:
    return _kill(world, *world.of(world.random.choice(PAIRED)))


def _kill_a_store(world: World) -> Broken:
    """Both replicas of one partition."""
    leader = world.replica(world.random.choice(STORES), leads=True)
    return _kill(world, *(each for each in world.of(leader["role"]) if each["partition"] == leader["partition"]))


def _kill_everything(world: World) -> Broken:
    return _kill(world, *world.all())


def _kill_zookeeper(world: World) -> Broken:
    world.server.kill()

    async def again() -> None:
        await asyncio.to_thread(world.server.start)

    return Broken((ZOOKEEPER,), again, (0.0, 6.0))


def _cut(world: World, *, one_way: bool, paths: Sequence[tuple[str, str]] = PATHS) -> Broken:
    roles = world.random.choice(paths)
    first = world.one(roles[0])
    others = [each for each in world.of(roles[1]) if each["pid"] != first["pid"]]
    if roles[0] == roles[1]:
        others = [each for each in others if each["partition"] == first["partition"]]
    elif roles[1] in STORES:
        others = [each for each in others if is_leader(each)]  # followers hear only of their leader
    second = world.random.choice(others)
    pair = [first, second]
    world.random.shuffle(pair)
    here, there = (_ports(world, process) for process in pair)
    return _apart(world, here, there, one_way=one_way, names=_names(world, first, second))


def _cut_from_zookeeper(world: World, role: str) -> Broken:
    process = world.replica(role, leads=True) if role in STORES else world.one(role)
    ends = [_ports(world, process), {world.server.port}]
    world.random.shuffle(ends)
    return _apart(world, *ends, one_way=world.random.random() < 0.3, names=_names(world, process))


def _apart(world: World, here: set[int], there: set[int], *, one_way: bool, names: tuple[str, ...]) -> Broken:
    """Nothing from any of the ports here reaches those there; nor the other way, unless it is cut one way."""
    ways = set(product(here, there))
    world.network.cut(ways if one_way else ways | set(product(there, here)))

    async def join() -> None:
        world.network.cut(())

    return Broken(names, join, SICK_S)


def _fill(world: World, role: str) -> Broken:
    """Not a byte is left on the disk of a replica of either kind."""
    process = world.replica(role, leads=world.random.random() < 0.5)
    mount = next(path for name, path in world.disks.items() if _runs_in(process, path) and name.startswith(role))
    for _ in range(FILL_TRIES):
        used = os.statvfs(mount)
        with contextlib.suppress(subprocess.CalledProcessError):  # more was written meanwhile
            _resize(mount, str((used.f_blocks - used.f_bfree) * used.f_frsize))
            break
    else:
        raise RuntimeError(f"{mount} was never found to be as large as what it holds")

    async def space() -> None:
        await asyncio.to_thread(_resize, mount, DISK)

    return Broken((name_of(process),), space, FULL_S)


def _slow(world: World, role: str) -> Broken:
    """The disk of a replica of either kind takes long to sync."""
    return _interposed(world, role, sync_us=world.random.randint(*SYNC_US))


def _wrong_clock(world: World, role: str) -> Broken:
    """A replica of either kind has its wall clock set."""
    return _interposed(world, role, ahead_s=world.random.choice(CLOCK_S))


def _interposed(world: World, role: str, *, sync_us: int = 0, ahead_s: int = 0) -> Broken:
    process, interposed = world.replica(role, leads=world.random.random() < 0.5), world.interposed
    assert interposed is not None, "its processes were started without the library"
    interposed.begin(process["pid"], sync_us=sync_us, ahead_s=ahead_s)

    async def well() -> None:
        interposed.end()

    return Broken((name_of(process),), well, SICK_S)


def _runs_in(process: Process, folder: Path) -> bool:
    """Whether a process has its data there: one of its open files lies in it."""
    files = f"/proc/{process['pid']}/fd"
    for entry in os.listdir(files):
        with contextlib.suppress(OSError):
            if os.readlink(f"{files}/{entry}").startswith(f"{folder}/"):
                return True
    return False


def _resize(mount: Path, size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(mount)], check=True, capture_output=True)


def _kinds() -> Iterator[Kind]:
    for role in SOFT:
        yield Kind(f"kill {role}", lambda world, role=role: _kill(world, world.one(role)))  # type: ignore[misc]
    for role in STORES:
        for leads in (True, False):
            name = f"kill {role} {'leader' if leads else 'follower'}"
            yield Kind(name, lambda world, role=role, leads=leads: _kill(world, world.replica(role, leads=leads)))  # type: ignore[misc]
        yield Kind(f"stop {role}", lambda world, role=role: _stop(world, world.one(role)))  # type: ignore[misc]
        yield Kind(f"stop {role} leader", lambda world, role=role: _stop(world, world.replica(role, leads=True)))  # type: ignore[misc]
        yield Kind(f"full disk of {role}", lambda world, role=role: _fill(world, role))  # type: ignore[misc]
        yield Kind(f"slow disk of {role}", lambda world, role=role: _slow(world, role))  # type: ignore[misc]
        yield Kind(f"wrong clock of {role}", lambda world, role=role: _wrong_clock(world, role))  # type: ignore[misc]
    for role in ("relay", "proxy", "gateway"):
        yield Kind(f"stop {role}", lambda world, role=role: _stop(world, world.one(role)))  # type: ignore[misc]
    for role in ("xiu", "pi", "relay", "proxy", "gateway"):
        yield Kind(f"cut {role} from ZooKeeper", lambda world, role=role: _cut_from_zookeeper(world, role))  # type: ignore[misc]
    for number in (1, 2):
        yield Kind(f"cut both ways {number}", lambda world: _cut(world, one_way=False))
        yield Kind(f"cut one way {number}", lambda world: _cut(world, one_way=True))
    yield Kind("cut links", lambda world: _cut(world, one_way=False, paths=LINKS))
    yield Kind("cut replicas", lambda world: _cut(world, one_way=False, paths=REPLICATION))
    yield Kind("kill a pair", _kill_pair)
    yield Kind("kill all of a soft role", _kill_all_of_a_soft_role)
    yield Kind("kill all of a store's partition", _kill_a_store)
    yield Kind("kill everything", _kill_everything)
    yield Kind("kill ZooKeeper", _kill_zookeeper)


KINDS: Final = tuple(_kinds())
_BRIEF: Final = {"cut replicas", *portion(("kill a pair", "kill ZooKeeper"))}
BRIEF: Final = tuple(kind for kind in KINDS if kind.name in _BRIEF)
"""A few, for the suite: what no other test with mail breaks; and fewer locally."""
