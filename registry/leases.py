"""Numbers that only one process may use at a time: SnowflakeID workers and gateway instances.

A worker number is leased for a *range of time* and stored persistently, so that no failure of ZooKeeper or of the process
lets two processes make the same ID. A gateway instance is held by an ephemeral node, and its generation, which grows with
every start, distinguishes its uses.

Source: docs/identifiers.md.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

from pixiu.discovery import paths
from pixiu.discovery.node import integer, json_object, text
from pixiu.discovery.operations import Check, Create, Delete, NodeExists, NoNode, RegistryConflict, Set, Stat
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.errors import InvalidArgument, LeaseExpired, MalformedData, Overloaded, RemoteError, Unavailable
from pixiu.ids import KEPT_INSTANCE, LAST_GENERATION, MAX_ID, WORKERS, InstanceID, WorkerID
from pixiu.rpc.backoff import Backoff
from registry.restorer import Restorer

RANGE_MS: Final = 24 * 3_600_000
"""Time for which a worker number is leased."""
RENEW_INTERVAL_S: Final = 3_600.0
LOOK_S: Final = 1.0
"""Interval of reading the wall clock: leases end by it, and it may be set ahead at any moment."""
MAX_AHEAD_MS: Final = 1_000
"""A number whose lease ends this soon may be taken already: its successor starts at that end."""
MAX_LEASES: Final = 1_024
"""Worker numbers that one process may hold, its clients' included."""
MAX_LEASE_BYTES: Final = 1_024
BATCH: Final = 64
"""Numbers that are read at once in search of a free one."""
INSTANCE_ROUNDS: Final = 16
"""Rounds in which a gateway looks for a free instance before it gives up."""
FIRST_BACKOFF_S: Final = 0.2
MAX_BACKOFF_S: Final = 60.0
"""Longest back-off of failed renewals."""
RETRY_AFTER_MS: Final = 60_000

_log = logging.getLogger("registry.leases")


@dataclass(frozen=True, slots=True)
class WorkerLease:
    """A worker number for times in [from_ms, until_ms), Unix milliseconds: the argument of `SnowflakeGenerator.lease`."""

    worker: WorkerID
    from_ms: int
    until_ms: int


@dataclass(slots=True)
class _Held:
    lease: WorkerLease
    holder: str
    version: int


def wall_clock_ms() -> int:
    """Return the time of day, Unix milliseconds."""
    return time.time_ns() // 1_000_000


WORKERS_TO_LEND: Final = WORKERS - 1024
"""Proxies take numbers below this. The rest is for gateways, which could not start otherwise if publishers had used up all."""


class WorkerLeases:
    """Worker numbers of one process, and of the clients to which it lends some.

    Args:
        zookeeper: the process's session.
        root: the cluster's root.
        holder: names the process in the registry, for operators.
        on_renewed: called in the event loop with a lease that was extended automatically.
        on_lost: called in the event loop with a lease that another process has taken: no ID may be made from it any more.
        clock_ms: the wall clock, Unix milliseconds.
        range_ms: duration of a lease.
        renew_interval_s: interval of automatic renewals, seconds.
        workers: numbers are below this.

    Source: docs/identifiers.md.
    """

    def __init__(
        self,
        zookeeper: ZooKeeper,
        root: str,
        holder: str,
        *,
        on_renewed: Callable[[WorkerLease], None] | None = None,
        on_lost: Callable[[WorkerLease], None] | None = None,
        clock_ms: Callable[[], int] = wall_clock_ms,
        range_ms: int = RANGE_MS,
        renew_interval_s: float = RENEW_INTERVAL_S,
        workers: int = WORKERS,
    ) -> None:
        self._zookeeper = zookeeper
        self._root = paths.check_root(root)
        self._holder = holder[:128]
        self._on_renewed = on_renewed
        self._on_lost = on_lost
        self._clock_ms = clock_ms
        self._range_ms = range_ms
        self._renew_interval_s = renew_interval_s
        self._workers = workers
        self._held: dict[int, _Held] = {}
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    @property
    def leases(self) -> list[WorkerLease]:
        """All leases that are held."""
        return [held.lease for held in self._held.values()]

    def start(self) -> None:
        """Start renewing all leases automatically."""
        if self._task is None:
            self._task = asyncio.create_task(self._renew_for_ever())

    async def close(self) -> None:
        """Stop renewing. Leases that were not released end at their time."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def acquire(self) -> WorkerLease:
        """Take a number that was never used, or whose lease is over.

        Raises `Overloaded` when this process holds 1 024, or all numbers are in use; `RegistryUnavailable` (a number may then stay
        taken without a holder until its lease is over).
        """
        if len(self._held) >= MAX_LEASES:
            raise Overloaded(f"this process holds {MAX_LEASES} worker numbers, the most it may; release some", RETRY_AFTER_MS)
        await self._zookeeper.ensure_path(paths.workers(self._root))
        names = await self._zookeeper.children(paths.workers(self._root))
        used = {number for name in names if (number := paths.number_of(name, self._workers)) is not None}
        unused = [number for number in range(self._workers) if number not in used]
        # In random order: otherwise processes that start together would all try the same ones.
        random.shuffle(unused)
        for number in unused[:BATCH]:
            held = await self._create(number)
            if held is not None:
                return held
        for batch in _batches(sorted(used)):
            found = await asyncio.gather(*(self._read(number) for number in batch))
            now = self._clock_ms()
            free = [(until, version, n) for n, (until, version, _) in zip(batch, found, strict=True) if until <= now + MAX_AHEAD_MS]
            for until, version, number in sorted(free):
                held = await self._take(number, until, version)
                if held is not None:
                    return held
        raise Overloaded(
            f"all {self._workers} worker numbers below {paths.workers(self._root)} are leased; a process that crashed keeps its "
            f"number for up to {self._range_ms // 3_600_000} h",
            RETRY_AFTER_MS,
        )

    async def renew(self, worker: int) -> WorkerLease:
        """Extend a lease to `range_ms` from now. Raises `LeaseExpired` when another process has taken the number (it is no
        longer held), `InvalidArgument` when it was not held, `RegistryUnavailable` (it is still held, until its time)."""
        async with self._lock:
            held = self._own(worker)
            until = max(self._clock_ms() + self._range_ms, held.lease.until_ms)
            held.version = await self._write(worker, held, held.holder, until)
            held.lease = WorkerLease(held.lease.worker, held.lease.from_ms, until)
            return held.lease

    async def release(self, worker: int, last_used_ms: int) -> bool:
        """Give a number back. `last_used_ms` is the highest time for which an ID was made (0: none was); its next holder starts
        after that. Returns False when the registry cannot be reached; the number is then free at the end of its lease.

        Raises `InvalidArgument` when it was not held.
        """
        async with self._lock:
            held = self._own(worker)
            del self._held[worker]
            end = min(max(last_used_ms + 1, held.lease.from_ms), held.lease.until_ms)
            try:
                await self._write(worker, held, "", end)
            except LeaseExpired:
                return True
            except RemoteError as error:
                _log.debug("worker number %d is free only at the end of its time: %s", worker, error)
                return False
            return True

    async def _write(self, worker: int, held: _Held, holder: str, until_ms: int) -> int:
        """Write the end of a lease of ours. Returns the new version of its node. Raises `LeaseExpired` when another process has
        it."""
        data = _lease_json(holder, until_ms)
        try:
            return (await self._zookeeper.set(self._path(worker), data, held.version)).version
        except RegistryConflict:
            # Perhaps an earlier try of ours succeeded although its answer was lost: the holder's name is ours alone.
            _, version, found = await self._read(worker)
            if found != held.holder:
                self._held.pop(worker, None)
                raise LeaseExpired(f"worker number {worker} was taken by {found or 'nobody'}; acquire another") from None
            return (await self._zookeeper.set(self._path(worker), data, version)).version

    def _own(self, worker: int) -> _Held:
        held = self._held.get(worker)
        if held is None:
            raise InvalidArgument(f"worker number {worker} is not held by this process")
        return held

    def _path(self, worker: int) -> str:
        return paths.worker(self._root, worker)

    def _name(self) -> str:
        """Make a unique name for one lease, so that its holder recognizes it even when an answer was lost."""
        return f"{self._holder}/{secrets.token_hex(4)}"

    async def _create(self, number: int) -> WorkerLease | None:
        now = self._clock_ms()
        holder = self._name()
        try:
            await self._zookeeper.create(self._path(number), _lease_json(holder, now + self._range_ms))
        except NodeExists:
            return None
        return self._keep(number, holder, now, now + self._range_ms, 0)

    async def _take(self, number: int, free_from_ms: int, version: int) -> WorkerLease | None:
        now = self._clock_ms()
        start = max(now, free_from_ms)
        holder = self._name()
        try:
            stat = await self._zookeeper.set(self._path(number), _lease_json(holder, now + self._range_ms), version)
        except RegistryConflict:
            return None
        return self._keep(number, holder, start, now + self._range_ms, stat.version)

    def _keep(self, number: int, holder: str, from_ms: int, until_ms: int, version: int) -> WorkerLease:
        lease = WorkerLease(WorkerID(number), from_ms, until_ms)
        self._held[number] = _Held(lease, holder, version)
        return lease

    async def _read(self, number: int) -> tuple[int, int, str]:
        """Return the end of a number's lease, the version of its node, and its holder. An unreadable one is never free."""
        try:
            data, stat = await self._zookeeper.get(self._path(number))
            fields = json_object(data, MAX_LEASE_BYTES, f"worker {number}")
            return integer(fields, "until_ms", 0, MAX_ID), stat.version, text(fields, "holder")
        except (NoNode, MalformedData):
            return MAX_ID, -1, ""

    def _is_short(self) -> bool:
        """Return True if a lease has less than half of its time left: the wall clock was set ahead, or the registry was away."""
        soon = self._clock_ms() + self._range_ms // 2
        return any(held.lease.until_ms < soon for held in self._held.values())

    async def _due(self) -> None:
        """Wait for the next renewal: an interval by the monotonic clock, less if the wall clock makes it urgent."""
        loop = asyncio.get_running_loop()
        due = loop.time() + self._renew_interval_s * random.uniform(0.8, 1.0)
        while (left_s := due - loop.time()) > 0 and not self._is_short():
            await asyncio.sleep(min(left_s, LOOK_S))

    async def _renew_for_ever(self) -> None:
        backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S, random.random)
        failed = False
        while True:
            if failed:
                await asyncio.sleep(backoff.next_s())
            else:
                await self._due()
            failed = False
            for worker, held in list(self._held.items()):
                try:
                    lease = await self.renew(worker)
                except LeaseExpired:
                    if self._on_lost is not None:
                        self._on_lost(held.lease)
                except InvalidArgument:
                    continue  # released meanwhile
                except Exception as error:
                    _log.debug("worker number %d was not extended now: %r", worker, error)
                    failed = True
                else:
                    if self._on_renewed is not None:
                        self._on_renewed(lease)
            if not failed:
                backoff.reset()


def _lease_json(holder: str, until_ms: int) -> bytes:
    return json.dumps({"holder": holder, "until_ms": until_ms}, separators=(",", ":")).encode()


def _batches(numbers: list[int]) -> Iterator[list[int]]:
    """Yield all numbers in random order, `BATCH` at a time."""
    order = random.sample(numbers, len(numbers))
    for start in range(0, len(order), BATCH):
        yield order[start : start + BATCH]


class Instance(NamedTuple):
    """A gateway instance in one generation, which distinguishes the GatewayMsgIDs of two runs."""

    instance: InstanceID
    generation: int


async def lease_checks(zookeeper: ZooKeeper, root: str, instance: int, generation: int, holder: str) -> list[Check]:
    """Return operations that make a transaction fail when this holder no longer leases the instance in this generation.

    Raises `Unavailable` when it does not lease it now, `RegistryUnavailable`.
    """
    path, held = paths.instance(root, instance), paths.instance_holder(root, instance)
    try:
        data, stat = await zookeeper.get(path)
        leased = integer(json_object(data, MAX_LEASE_BYTES, path), "generation", 0, LAST_GENERATION)
        found, held_stat = await zookeeper.get(held)
    except (NoNode, MalformedData):
        raise Unavailable(f"instance {instance} is not leased to anybody: nobody may register with it") from None
    if found != holder.encode() or leased != generation:
        whose = found.decode(errors="replace")[:64]
        raise Unavailable(
            f"instance {instance} in generation {generation} is not leased to {holder} but to {whose} in generation {leased}: "
            "nobody else may register with it"
        )
    return [Check(path, stat.version), Check(held, held_stat.version)]


class InstanceLease:
    """The gateway instance of one process; survives the loss of sessions.

    An instance that was never used has generation 0, and its first holder has generation 1; so numbers are reused only
    when all were used. An instance of generation 1 023 is retired. If all were used, the one with the lowest generation
    among 64 random ones is taken: reading all 32 768 would delay the start of every gateway by seconds.

    Args:
        zookeeper: the process's session.
        root: the cluster's root.
        holder: names the process in the registry; must be unique to it (its endpoint ID).
        on_lost: called in the event loop when, after the loss of a session, another process has the instance: this one must
            make no more GatewayMsgIDs with it, and may `acquire` another.
        instances: numbers are below this.

    Source: docs/identifiers.md; PiXiu §5.1.1. Departs from the seed, whose gateway numbers come from ZooKeeper's sequence,
    because that starts over when its parent is recreated.
    """

    def __init__(
        self,
        zookeeper: ZooKeeper,
        root: str,
        holder: str,
        *,
        on_lost: Callable[[Instance], None] | None = None,
        instances: int = KEPT_INSTANCE,
    ) -> None:
        self._zookeeper = zookeeper
        self._root = paths.check_root(root)
        self._holder = holder.encode()[:MAX_LEASE_BYTES]
        self._on_lost = on_lost
        self._instances = instances
        self._held: Instance | None = None
        self._lock = asyncio.Lock()
        self._restorer = Restorer(zookeeper, self._restore, "the gateway's instance", MAX_BACKOFF_S)

    @property
    def held(self) -> Instance | None:
        """The instance; None when none is held."""
        return self._held

    async def acquire(self) -> Instance:
        """Take the free instance with the lowest generation, and raise its generation.

        Raises `Overloaded` when none is free, `InvalidArgument` when one is held, `RegistryUnavailable` (an instance may then
        stay taken until the session ends).
        """
        async with self._lock:
            if self._held is not None:
                raise InvalidArgument(f"this process already holds instance {self._held.instance}")
            await self._zookeeper.ensure_path(paths.instances(self._root))
            for _ in range(INSTANCE_ROUNDS):
                found = await self._search()
                if found is not None:
                    self._held = found
                    self._restorer.start()
                    return found
        raise Overloaded(
            f"no gateway instance below {paths.instances(self._root)} is free: all {self._instances} are held or retired",
            RETRY_AFTER_MS,
        )

    async def release(self) -> bool:
        """Give the instance back. Returns False when the registry cannot be reached: it is free when the session has ended."""
        await self._restorer.stop()
        async with self._lock:
            held, self._held = self._held, None
            if held is None:
                return True
            try:
                await self._zookeeper.delete(paths.instance_holder(self._root, held.instance))
            except NoNode:
                return True
            except RemoteError as error:
                _log.debug("instance %d is free only when its session has ended: %s", held.instance, error)
                return False
            return True

    async def _search(self) -> Instance | None:
        names = await self._zookeeper.children(paths.instances(self._root))
        used = {number for name in names if (number := paths.number_of(name, self._instances)) is not None}
        unused = (number for number in range(self._instances) if number not in used)
        for number, _ in zip(unused, range(BATCH), strict=False):
            if await self._take(Instance(InstanceID(number), 1), None):
                return Instance(InstanceID(number), 1)
        sample = random.sample(sorted(used), min(BATCH, len(used)))
        found = await asyncio.gather(*(self._read(number) for number in sample))
        free = [
            (generation, number, stat)
            for number, (generation, stat) in zip(sample, found, strict=True)
            if stat is not None and stat.children == 0 and generation < LAST_GENERATION
        ]
        for generation, number, stat in sorted(free, key=lambda one: one[:2]):
            if await self._take(Instance(InstanceID(number), generation + 1), stat):
                return Instance(InstanceID(number), generation + 1)
        return None

    async def _take(self, wanted: Instance, stat: Stat | None) -> bool:
        """Write the generation and become the holder in one transaction. Returns False when another process was faster."""
        path, data = paths.instance(self._root, wanted.instance), b'{"generation":%d}' % wanted.generation
        holder = Create(paths.instance_holder(self._root, wanted.instance), self._holder, ephemeral=True)
        try:
            await self._zookeeper.transaction([Create(path, data) if stat is None else Set(path, data, stat.version), holder])
        except RegistryConflict:
            return False
        return True

    async def _read(self, number: int) -> tuple[int, Stat | None]:
        """Return the generation of an instance; without a stat if it is unreadable, so that nobody takes it."""
        try:
            data, stat = await self._zookeeper.get(paths.instance(self._root, number))
            fields = json_object(data, MAX_LEASE_BYTES, f"instance {number}")
            return integer(fields, "generation", 0, LAST_GENERATION), stat
        except (NoNode, MalformedData):
            return LAST_GENERATION, None

    async def _restore(self) -> None:
        async with self._lock:
            held = self._held
            if held is None:
                return
            path = paths.instance_holder(self._root, held.instance)
            stat = await self._zookeeper.exists(path, self._restorer.on_watch)
            if stat is not None and stat.ephemeral_owner == self._zookeeper.session_id:
                return
            generation, instance_stat = await self._read(held.instance)
            own = stat is None
            if stat is not None:
                # A node of an earlier session that is not removed yet: ours if it names us.
                with suppress(NoNode):
                    own = (await self._zookeeper.get(path))[0] == self._holder
            if own and instance_stat is not None and generation == held.generation:
                data = b'{"generation":%d}' % held.generation
                again = [Delete(path)] if stat is not None else []
                await self._zookeeper.transaction(
                    [
                        *again,
                        Set(paths.instance(self._root, held.instance), data, instance_stat.version),
                        Create(path, self._holder, ephemeral=True),
                    ]
                )
                await self._zookeeper.exists(path, self._restorer.on_watch)
                return
            self._held = None
            self._restorer.pause()
        if self._on_lost is not None:
            self._on_lost(held)
