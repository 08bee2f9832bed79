"""Production replicas of one partition of Pi or Xiu in one process: their shells, cores, logs and stores on real files.

Played are ZooKeeper (a register with versions, which outlives every power cut), the network between replicas, and the callers.
Time is the event loop's, also for whoever asks `time`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

from rocksdict import Rdict

import cluster.replication.peers.snapshots
import cluster.replication.replica
import cluster.replication.storage.disk
import cluster.replication.storage.log
import pi.options
import pi.service
import xiu.options
import xiu.service
from cluster.metrics.metrics import Metrics
from cluster.process.context import Context
from cluster.replication.core.events import CompareAndSetOutcome
from cluster.replication.core.messages import Appended, Message
from cluster.replication.model import MemberID, PartitionState, Position
from cluster.replication.peers.registry import LiveReplica
from cluster.replication.peers.wire import decode_message
from cluster.settings.options import ClusterOptions
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.view import Layout, RoleLayout, View
from pixiu.errors import Unavailable
from pixiu.ids import EndpointID
from tests.sim.power_cut.threads import Loop
from tests.sim.replication.zookeeper import Register
from xiu.store.store import Store

BEGIN_S: Final = 1_790_000_000.0
"""Unix s at the loop's time 0."""
SESSION_S: Final = 2.0
ZOOKEEPER_S: Final = 0.05
LOST: Final = 0.01
"""Of messages between replicas."""
SEGMENT_BYTES: Final = (1500, 4000, 12_000)
FLUSH_S: Final = (0.1, 0.3, 1.2)
WAIT_S: Final = 60.0
WATCH_S: Final = 0.002
REST_S: Final = 0.0002
REST_TRIES: Final = 50_000
BACKGROUND: Final = ("num-running-flushes", "num-running-compactions", "compaction-pending", "mem-table-flush-pending")


_sleep = time.sleep


def opening(call: Callable[[Store], Rdict], opened: list[Rdict]) -> Callable[[Store], Rdict]:
    """In the place of `Store._open`: what is opened is known."""

    def calling(store: Store) -> Rdict:
        opened.append(call(store))
        return opened[-1]

    return calling


_listdir, _scandir = os.listdir, os.scandir


def in_order(folder: Any = ".") -> list[Any]:
    """In the place of `os.listdir`: in no file system's own order."""
    return sorted(_listdir(folder))


class ScanInOrder:
    """In the place of `os.scandir`."""

    def __init__(self, folder: Any = ".") -> None:
        with _scandir(folder) as entries:
            self._entries = iter(sorted(entries, key=lambda entry: str(entry.name)))

    def __iter__(self) -> Iterator[Any]:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> ScanInOrder:
        return self

    def __exit__(self, *_: object) -> None:
        """Everything was read."""

    close = __exit__


class Anything:
    """Takes every call and does nothing: a log, a server."""

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_a, **_k: None


class Methods(dict[str, Callable[[Any], Awaitable[None]]]):
    """The streams that a service serves, by method: a listener without a socket."""

    def serve(self, method: str, _parse: object, serve: Callable[[Any], Awaitable[None]]) -> None:
        """As of `cluster.rpc.framed_listener.FramedListener`."""
        self[method] = serve


class Log(Anything):
    """Keeps what is an error: in an opening there is none."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def error(self, event: str, **what: object) -> None:
        """As of structlog."""
        self.errors.append(f"{event} {what}")


@dataclass
class Noted:
    """What the world knows at one moment; `World.notes` has one for each number in the trace."""

    what: str
    at_s: float
    machine: int = 0
    """Whose it is."""
    value: Any = None


class Submitted(NamedTuple):
    """An entry that a role proposed, and what is in it."""

    machine: int
    epoch: int
    counter: int
    payload: bytes


@dataclass
class Shape:
    """What the seed decides of a run."""

    role: str
    replicas: int
    late: bool
    """The second replica comes later, and needs a snapshot."""
    absent: bool
    """A leader is cut off from the other, goes on for a moment, is stopped, and comes back."""
    segment_bytes: int
    flush_s: float
    kernel: bool
    """Logs are synced by the kernel; otherwise in a thread."""
    users: int = 3
    requests: int = 40
    every_s: float = 0.05
    levels: tuple[int, ...] = (0,)


class FakeKernel:
    """In the place of `cluster.replication.storage.kernel_sync.KernelSync`: syncs a file some time after it is asked to, and
    reports it some time later."""

    def __init__(self, there: bool) -> None:
        self._there, self._over = there, False

    def begin(self, fd: int, done: Callable[[int], None]) -> bool:
        if self._there:
            synced = asyncio.get_running_loop().run_in_executor(None, os.fdatasync, fd)
            synced.add_done_callback(lambda _synced: done(0) if not self._over else None)
        return self._there

    async def close(self) -> None:
        self._over = True


class FakePeers:
    """In the place of `cluster.replication.peers.peers.Peers`."""

    def __init__(self, context: Any, _options: object, on_message: Callable[[Message], None], own: Callable[[], MemberID]) -> None:
        self._machine: Machine = context.links
        self._on_message, self._own = on_message, own
        self._machine.peers = self
        self._receive: Any = None
        self._held: Any = None
        self.counts: dict[str, int] = {}

    def serve(self, receive: Any, held: Any, _promote: object, _set_clock: object) -> None:
        self._receive, self._held = receive, held

    def set_live(self, live: object) -> None:
        pass

    def send(self, to: MemberID, data: bytes) -> None:
        machine = self._machine
        message = decode_message(data)
        if isinstance(message, Appended):
            machine.world.note("matched", machine.number, (message.epoch, message.matched))
        if machine.world.rng.random() >= LOST and not machine.cut_off:
            machine.world.later(lambda: self._arrive(to, message))

    def _arrive(self, to: MemberID, message: Message) -> None:
        target = self._machine.world.member(to)
        if target is not None and target.peers is not None and not target.cut_off:
            target.peers._on_message(message)

    def _peer(self, to: MemberID) -> FakePeers:
        target = self._machine.world.member(to)
        if target is None or target.peers is None:
            raise Unavailable("nobody is there")
        return target.peers

    async def ask_held(self, to: MemberID, begin: Any) -> Any:
        return await self._peer(to)._held(self._own(), begin)

    async def send_snapshot(self, to: MemberID, parts: AsyncIterator[bytes]) -> None:
        self._machine.world.happened["snapshots"] = self._machine.world.happened.get("snapshots", 0) + 1
        await self._peer(to)._receive(self._own(), parts)

    async def close(self) -> None:
        self._machine.peers = None


class FakeRegistry:
    """In the place of `cluster.replication.peers.registry.PartitionRegistry`."""

    def __init__(self, context: Any, on_state: Any, on_swapped: Any, on_presence: Any) -> None:
        self._machine: Machine = context.links
        self._world = self._machine.world
        self._on_state, self._on_swapped, self._on_presence = on_state, on_swapped, on_presence
        self._seen = (-2, -2)
        self.counts: dict[str, int] = {}
        self._closed = False

    async def start(self) -> None:
        self._look()

    def _look(self) -> None:
        if self._closed:
            return
        self._world.loop.call_later(ZOOKEEPER_S, self._look)
        if self._machine.cut_off:
            return
        register = self._world.register
        seen, self._seen = self._seen, (register.presence_version, register.version)
        if seen[0] != self._seen[0]:
            live = {each.member: LiveReplica(each, self._world.nodes[int(each.member)]) for each in register.live()}
            self._on_presence(live)
        if seen[1] != self._seen[1]:
            self._on_state(register.read())

    def read(self) -> None:
        self._later(lambda: self._on_state(self._world.register.read()))

    def _later(self, call: Callable[[], object]) -> None:
        self._world.later(lambda: self._closed or self._machine.cut_off or call())

    def swap(self, token: int, expected: int, state: PartitionState) -> None:
        def swap() -> None:
            register = self._world.register
            done = register.compare_and_set(expected, state)
            if done:
                self._world.note("register", 0, (register.state, register.version))
            self._later(lambda: self._on_swapped(token, CompareAndSetOutcome.OK if done else CompareAndSetOutcome.CONFLICT))

        if not self._machine.cut_off:
            self._world.later(swap)

    async def close(self) -> None:
        self._closed = True


class Machine:
    """One machine: its number, and what runs on it. A service's `Context.links` is this."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.folder = world.folder / f"{number}"
        self.peers: FakePeers | None = None
        self.service: Any = None
        self.session = 0
        self.member = 0
        self.cut_off = False
        """Nothing that it sends arrives, nor what others and ZooKeeper send."""
        self.crashed: BaseException | None = None
        self.log, self.methods = Log(), Methods()
        self.membership = SimpleNamespace(node=None, before_registering_again=self._register_again_by)
        self._renew: Any = None

    async def start(self) -> None:
        """Start what its folder holds. Raises PixiuError, AssertionError."""
        world, shape, role = self.world, self.world.shape, self.world.shape.role
        common: dict[str, Any] = {"data_dir": str(self.folder), "flush_interval_s": shape.flush_s, "segment_mb": 1}
        options: Any
        if role == "pi":
            options = pi.options.Options(**common, store_mb=64, history_s=3600, scrub_keys_per_s=0, clock_interval_s=1.0)
        else:
            tables = world.volatile / f"{self.number}"
            shutil.rmtree(tables, ignore_errors=True)
            tables.mkdir()
            options = xiu.options.Options(
                **common, table_dir=str(tables), table_mb=8, memtable_mb=1, cache_mb=1, reserve_mb=0, trim_interval_s=1.0
            )
        context: Context[Any] = Context(
            role=role, options=options, cluster=ClusterOptions(), endpoint_id=EndpointID(self.number + 1), log=self.log,  # type: ignore[arg-type]
            links=self, server=Anything(), framed=Anything(), membership=self.membership, zookeeper=Anything(), root="/pixiu",  # type: ignore[arg-type]
            streams=self.methods,  # type: ignore[arg-type]
            metrics=Metrics(role, 0), current_view=lambda: world.view, crash=self._crash,
        )  # fmt: skip
        made = pi.service.Service(context) if role == "pi" else xiu.service.Service(context)
        self.service = made
        replica = self.replica
        replica._segment_bytes = replica._folder._segment_bytes = shape.segment_bytes
        node = Node(
            role, 0, -1, NodeState.INIT, "127.0.0.1", 1000 + self.number, 0, context.endpoint_id, 1, "test", "", 0
        )  # fmt: skip
        node = await made.prepare(node)
        if self.replica.log.damage is None:
            world.note("opened", self.number, self.replica.log.last.counter)
        self.member = node.member
        self._register(node)
        made.on_view(world.view)
        self._note_dips()
        self._note_moments()
        self._watch(-1, -1)
        self._production_append, replica.append = replica.append, self._append
        await made.start()

    def _register_again_by(self, renew: Any) -> None:
        self._renew = renew

    def _register(self, node: Node) -> None:
        world = self.world
        self.session = world.register.open(node.member, node.member_incarnation, world.loop.now)
        self.membership.node = world.nodes[node.member] = replace(node, replica=self.session, state=NodeState.RUNNING)

    async def register_again(self) -> None:
        """The session was lost."""
        self._register(await self._renew(self.membership.node))

    @property
    def replica(self) -> Any:
        """The replica in the service."""
        return self.service._replica

    @property
    def machine(self) -> Any:
        """The state machine in the service."""
        return self.service._machine

    def _watch(self, flushed: int, seal: int) -> None:
        """Note what is claimed to be durable."""
        if self.service is None:
            return
        world = self.world
        if self.machine.flushed != flushed:
            flushed = self.machine.flushed
            world.note("flushed", self.number, flushed)
        if self.replica.log.seal.counter != seal:
            seal = self.replica.log.seal.counter
            world.note("seal", self.number, seal)
        world.loop.call_later(WATCH_S, self._watch, flushed, seal)

    def _note_dips(self) -> None:
        """A log that is cut seals less, if only for a moment."""
        log = self.replica.log
        cut, reset = log.cut, log.reset

        def cutting(after: int) -> None:
            self.world.moment("cut", self.number)
            self.world.note("seal", self.number, min(after, log.seal.counter))
            cut(after)

        def resetting(position: Position) -> None:
            self.world.moment("reset", self.number)
            self.world.note("seal", self.number, 0)
            reset(position)

        log.cut, log.reset = cutting, resetting

    def _note_moments(self) -> None:
        """What happens seldom."""
        folder, machine = self.replica._folder, self.machine
        accept, load = folder.accept_incoming, machine.load

        def accepting(position: Position) -> None:
            self.world.moment("accept", self.number)
            accept(position)

        async def loading(received: Path) -> None:
            self.world.moment("load", self.number)
            await load(received)

        folder.accept_incoming, machine.load = accepting, loading

    def _append(self, payloads: Any, **how: Any) -> Any:
        self.world.written.update(payload for _, payload in payloads)
        accepted = self._production_append(payloads, **how)
        self.world.submitted.append(Submitted(self.number, accepted.epoch, accepted.first, payloads[0][1]))
        return accepted

    def _crash(self, error: BaseException) -> None:
        self.crashed = self.crashed or error

    async def stop(self) -> None:
        """End, with everything written: what is recorded is over."""
        service, self.service = self.service, None
        if service is not None:
            with contextlib.suppress(Exception):
                await service.stop()
        self.world.register.close(self.session)


@dataclass
class World:
    """All of one life.

    Args:
        seed: of what happens in it.
        shape: of the run.
        folder: one folder a machine is made in it, or is there already.
        volatile: a folder for shared memory.
        register: ZooKeeper's.
        now: seconds since the run began.
        recorder: notes go there.
    """

    seed: int
    shape: Shape
    folder: Path
    volatile: Path
    register: Register
    now: float
    recorder: Any = None
    notes: list[Noted] = field(default_factory=list)
    happened: dict[str, int] = field(default_factory=dict)
    nodes: dict[int, Node] = field(default_factory=dict)
    submitted: list[Submitted] = field(default_factory=list)
    """Each entry that a role proposed."""
    written: set[bytes] = field(default_factory=set)
    """What is in each entry that a role has ever proposed."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.loop = Loop(self.rng.getrandbits(32), self.now)
        self._opened: list[Rdict] = []
        self.loop.before_switch, self.loop.after_flush = self._rest, self._flushed
        self.machines = [Machine(self, number) for number in range(self.shape.replicas)]
        for session in list(self.register.sessions):
            self.register.close(session)
        self.view = View(Layout(1, {self.shape.role: RoleLayout(1, self.shape.replicas, self.shape.replicas)}))

    def note(self, what: str, machine: int = 0, value: Any = None) -> None:
        """Put something into the trace, between two writes."""
        if self.recorder is not None:
            self.notes.append(Noted(what, self.loop.now, machine, value))
            self.recorder.note(len(self.notes) - 1)

    def moment(self, what: str, machine: int) -> None:
        """Something that happens seldom begins: cuts are made behind it, whatever else is."""
        self.happened[what] = self.happened.get(what, 0) + 1
        self.note("moment", machine, what)

    def later(self, call: Callable[[], object]) -> None:
        """After a hop of the network."""
        self.loop.call_later(self.rng.uniform(0.0002, 0.003), call)

    def member(self, member: int) -> Machine | None:
        """The machine that a member runs on."""
        return next((each for each in self.machines if each.member == member and each.service is not None), None)

    @property
    def leader(self) -> Machine | None:
        """Who takes writes."""
        return next(
            (each for each in self.machines if each.service is not None and each.replica.is_leader and each.replica.lease_valid()),
            None,
        )

    async def until(self, holds: Callable[[], object], what: str) -> None:
        """Wait for something. Raises AssertionError."""
        end = self.loop.now + WAIT_S
        while not holds():
            for each in self.machines:
                assert each.crashed is None, f"machine {each.number} ended itself: {each.crashed!r}"
            assert self.loop.now < end, f"{what} did not come: {[each.replica.status() for each in self.machines if each.service]}"
            await asyncio.sleep(0.02)
        for each in self.machines:
            assert each.crashed is None, f"machine {each.number} ended itself: {each.crashed!r}"

    def run(self, work: Any, over: Callable[[], None] = lambda: None) -> Any:
        """Run something to its end, by this world's time; `over` is called before what runs is ended."""
        with self._clocks():
            asyncio.set_event_loop(self.loop)
            try:
                return self.loop.run_until_complete(work)
            finally:
                over()
                self._end()

    def _rest(self) -> None:
        """Wait until RocksDB's own threads have nothing to do: what they write is in the same place of the trace each time."""
        for rows in list(self._opened):
            try:
                for _ in range(REST_TRIES):
                    if not any(rows.property_int_value(f"rocksdb.{name}") for name in BACKGROUND):
                        break
                    _sleep(REST_S)
                else:  # it never will: it failed
                    self._opened.remove(rows)
            except Exception:  # it was closed
                self._opened.remove(rows)

    def _flushed(self, rows: object) -> None:
        """Nothing that a flush was for is in memory alone when it returns: it is counted as durable from then on."""
        if isinstance(rows, Rdict) and (waits := rows.property_int_value("rocksdb.num-immutable-mem-table")):
            self.machines[0].crashed = AssertionError(f"a flush of RocksDB has returned, and {waits} tables are not written yet")

    def _end(self) -> None:
        self.recorder = None
        self.loop.turns = 0
        for each in self.machines:
            self.loop.run_until_complete(each.stop())
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        for job in list(self.loop.jobs):
            while job in self.loop.jobs:
                job.go_on()
        asyncio.set_event_loop(None)
        self.loop.close()

    @contextlib.contextmanager
    def _clocks(self) -> Iterator[None]:
        loop = self.loop
        played = SimpleNamespace(Lock=loop.lock, RLock=loop.rlock)
        changes: list[tuple[Any, str, Any]] = [
            (time, "monotonic", lambda: loop.now),
            (time, "time", lambda: BEGIN_S + loop.now),
            (time, "time_ns", lambda: int((BEGIN_S + loop.now) * 1_000_000) * 1000),
            (time, "sleep", lambda _s: None),
            (os, "listdir", in_order),
            (os, "scandir", ScanInOrder),
            (secrets, "randbits", self.rng.getrandbits),
            (secrets, "randbelow", self.rng.randrange),
            (cluster.replication.storage.log.SegmentedLog.__init__, "__kwdefaults__", {
                "segment_bytes": 64 << 20, "verify_from": 0, "clock": lambda: loop.now
            }),
            (cluster.replication.storage.log, "threading", played),
            (cluster.replication.storage.disk, "KernelSync", lambda: FakeKernel(self.shape.kernel)),
            (cluster.replication.peers.snapshots, "threading", played),
            (cluster.replication.replica, "Peers", FakePeers),
            (Store, "_open", opening(Store._open, self._opened)),
            (cluster.replication.replica, "PartitionRegistry", FakeRegistry),
        ]  # fmt: skip
        before = [(where, name, getattr(where, name)) for where, name, _ in changes]
        for where, name, new in changes:
            setattr(where, name, new)
        try:
            yield
        finally:
            for where, name, old in before:
                setattr(where, name, old)
