"""The twin of `cluster.replication.replica.Replica`: the production core of replication, a log and a disk of the simulation of
replication, and a model of ZooKeeper's register for each partition.

    role ── submit ──▶ Replica ── accepted: counters at once; persisted, applied: called
                          └──── committed ──▶ Machine.apply, in order, at every replica
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from cluster.replication.core import events as ev
from cluster.replication.core.refusals import refusal_of
from cluster.replication.core.states import State
from cluster.replication.model import Entry, MemberID, Position
from cluster.replication.options import ReplicationOptions
from tests.sim.replication.disk import Disk, MemoryLog
from tests.sim.replication.zookeeper import Register

if TYPE_CHECKING:
    from tests.sim.system.base import Served

SESSION_S: Final = 2.0
ZOOKEEPER_TURN_S: Final = 0.25
BATCH_ENTRIES: Final = 4096
OPTIONS: Final = ReplicationOptions(
    heartbeat_s=0.25, lease_s=0.6, confirm_wait_s=0.9, silence_s=1.2, candidate_step_s=0.3, resend_s=0.5, poll_s=0.6,
    join_within=8, max_uncommitted=500, max_append_entries=16, max_unacknowledged=4, snapshot_timeout_s=3.0, max_kept=60,
)  # fmt: skip
"""Shorter times and smaller limits than in service, so that more happens in a run."""
FLUSH_S: Final = 0.7
DRAIN_S: Final = 3.0
LOSS: Final = 0.01
"""Of messages between replicas: their streams lose what they hold when they break."""


class Machine(Protocol):
    """The state behind the log, as `cluster.replication.machine.StateMachine` has it, in memory."""

    @property
    def position(self) -> Position:
        """The last entry in the state."""

    def apply(self, entries: Sequence[Entry]) -> Sequence[object]:
        """The entries that follow."""

    def flush(self) -> int:
        """Everything is durable; up to which counter."""

    def snapshot(self) -> object:
        """The state, as something that stays as it is."""

    def load(self, snapshot: Any) -> None:
        """Take a snapshot's place, durably."""


@dataclass
class Partition:
    """One replicated partition: its register, and what its replicas have applied."""

    role: str
    number: int
    register: Register = field(default_factory=lambda: Register(SESSION_S))
    replicas: dict[int, Replica] = field(default_factory=dict)
    """MemberID → the replica that runs there."""
    log: list[Entry] = field(default_factory=list)
    """Every entry that a replica applied, by counter - 1."""
    leaders: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Epoch → (member, incarnation)."""
    accepted: set[tuple[int, int]] = field(default_factory=set)
    """(epoch, counter) of what was acknowledged as replicated."""


@dataclass
class _Write:
    first: int
    last: int
    persisted: Callable[[], None]
    applied: Callable[[list[Any], int], None]
    answers: list[Any] = field(default_factory=list)
    on_disk: bool = False


@dataclass
class Kept:
    """What is on a replica's disk."""

    disk: Disk
    state: Any
    """Of the role."""


class Replica:
    """See the module.

    Args:
        process: the role's.
        partition: of it.
        member: of the disk.
        disk: of this member.
        machine: the role's state as it was durable.
        led: called with the epoch in which it leads; 0: it no longer does.
    """

    def __init__(
        self,
        process: Served,
        partition: Partition,
        member: int,
        disk: Disk,
        machine: Machine,
        led: Callable[[int], None],
    ) -> None:
        self.process, self.partition, self.member, self.disk = process, partition, MemberID(member), disk
        self.machine, self._led = machine, led
        damage = disk.open()
        assert damage is None, "no disk rots here"
        disk.incarnation += 1
        self.log = MemoryLog(disk)
        if self.log.last.counter < machine.position.counter:
            self.log.reset(machine.position)  # a crash between a snapshot's two halves
        disk.flushed = machine.position.counter
        now = process.world.now
        self.core = process.world.variant.replication(
            member=self.member, incarnation=disk.incarnation, log=self.log, options=OPTIONS,
            applied=machine.position.counter, now=now,
        )  # fmt: skip
        self.session: int | None = None
        self.reachable_from = 0.0
        """ZooKeeper does not hear from it before."""
        self._seen = (-1, -1)
        self._session_at_least_once = False
        self._events: deque[ev.Event] = deque()
        self._stepping = False
        self._verdict: ev.Accepted | ev.Rejected | None = None
        self._writes: deque[_Write] = deque()
        self._target = machine.position.counter
        self._copies = 0
        self._disk_free_at = 0.0
        self._flush_at = now + FLUSH_S
        self._applying = False
        partition.replicas[member] = self
        process.after(0.005, lambda: self.step(ev.Tick()))
        process.after(process.world.rng.uniform(0.0, ZOOKEEPER_TURN_S), self._zookeeper_turn)

    # --- what the role asks

    @property
    def copies(self) -> int:
        """Disks that the newest commit is on."""
        return self._copies

    def may_read(self) -> bool:
        """Whether what the state says is the newest there is."""
        return self.core.may_read(self.process.world.now) and self.machine.position.counter >= self.core.context.committed

    @property
    def leader_address(self) -> str:
        """host:port of the leader; empty when it is not known."""
        read = self.core.context.read
        if read is None or read.state is None or (read.state.leader == self.member and self.core.state is not State.LEADING):
            return ""
        found = self.partition.replicas.get(int(read.state.leader))
        if found is None or found.disk.incarnation != read.state.incarnation:
            return ""
        return "{}:{}".format(*found.process.address)

    def submit(
        self,
        payloads: Sequence[tuple[int, bytes]],
        replicated: bool,
        persisted: Callable[[], None],
        applied: Callable[[list[Any], int], None],
    ) -> ev.Accepted:
        """A write. `persisted()` and `applied(answers, copies)` follow while this replica leads. Raises the refusal."""
        self._verdict = None
        self.step(ev.Propose(0, payloads, self.process.world.unix_us(), replicated))
        verdict = self._verdict
        if not isinstance(verdict, ev.Accepted):
            reason = verdict.reason if verdict is not None else ev.Rejection.NOT_LEADER
            raise refusal_of(reason, OPTIONS, self.leader_address, "the log")
        self._writes.append(_Write(verdict.first, verdict.last, persisted, applied))
        return verdict

    def deadline(self) -> float:
        """When `tick` is due."""
        return min(self.core.next_deadline(), self._flush_at)

    def tick(self) -> None:
        """The time has come."""
        now = self.process.world.now
        if now >= self._flush_at:
            self._flush_at = now + FLUSH_S
            self.disk.flushed = self.machine.flush()
            self.step(ev.Flushed(self.disk.flushed))
        if now >= self.core.next_deadline():
            self.step(ev.Tick())

    def drain(self, done: Callable[[], None]) -> None:
        """Hand over, where there is somebody; `done` follows, after a while in any case."""
        self._done = done
        self.step(ev.Drain())
        self.process.after(DRAIN_S, self._drained)

    _done: Callable[[], None] | None = None

    def _drained(self) -> None:
        done, self._done = self._done, None
        if done is not None:
            if self.session is not None:
                self.partition.register.close(self.session)
            done()

    def _do_HandedOver(self, effect: ev.HandedOver) -> None:
        self.process.world.counts["handed over"] += 1
        self.process.after(0.0, self._drained)

    def crash(self) -> None:
        """The process ends."""
        self.log.crash(self.process.world.rng, power=False)
        self.partition.replicas.pop(int(self.member), None)

    def isolate(self, seconds: float) -> None:
        """ZooKeeper hears nothing from it for so long."""
        self.reachable_from = self.process.world.now + seconds

    # --- the core

    def step(self, event: ev.Event) -> None:
        """An event. What it leads to at once is taken behind it."""
        self._events.append(event)
        if self._stepping or not self.process.alive:
            return
        self._stepping = True
        try:
            while self._events:
                for effect in self.core.step(self._events.popleft(), self.process.world.now):
                    getattr(self, f"_do_{type(effect).__name__}")(effect)
        finally:
            self._stepping = False
        if not self._applying:
            if self.core.state is State.LEADING:
                self._apply()
            elif self._target > self.machine.position.counter:
                self.process.after(0.0, self._apply)

    def _apply(self) -> None:
        if self._applying:
            return
        self._applying = True
        try:
            while (after := self.machine.position.counter) < self._target:
                entries = self.log.read(after, min(BATCH_ENTRIES, self._target - after), 1 << 20)
                answers = self.machine.apply(entries)
                self._note(entries)
                self._answer(after + 1, answers)
        finally:
            self._applying = False

    def _note(self, entries: Sequence[Entry]) -> None:
        """Committed prefixes are equal."""
        log = self.partition.log
        for entry in entries:
            assert entry.counter <= len(log) + 1, f"{self.partition.role} applied entries with a gap"
            if entry.counter == len(log) + 1:
                log.append(entry)
            assert log[entry.counter - 1] == entry, f"two replicas of {self.partition.role} applied different entries"

    def _answer(self, first: int, answers: Sequence[object]) -> None:
        end = first + len(answers)
        while self._writes and self._writes[0].first < end:
            write = self._writes[0]
            begin = max(write.first, first)
            write.answers += answers[begin - first : write.last + 1 - first]
            if write.last >= end:
                return
            self._writes.popleft()
            if not write.on_disk:
                write.persisted()
            write.applied(write.answers, self._copies)

    def _do_Sync(self, effect: ev.Sync) -> None:
        world = self.process.world
        self._disk_free_at = max(world.now, self._disk_free_at) + world.rng.uniform(0.001, 0.01)
        issued = self.log.issued

        def synced() -> None:
            self.log.sync(issued)
            self.step(ev.Synced(effect.ticket))

        self.process.after(self._disk_free_at - world.now, synced)

    def _do_Send(self, effect: ev.Send) -> None:
        world = self.process.world
        target = self.partition.replicas.get(int(effect.to))
        if target is None or world.wire.chance(LOSS) or world.wire.is_cut(self.process.address, target.process.address):
            return

        def arrive() -> None:
            world.wire.note(b"%r%s%d" % (world.now, type(effect.message).__name__.encode(), effect.to))
            target.process.do(lambda: target.step(ev.Received(effect.message)))

        world.wire.after(world.wire.hop(), arrive)

    def _do_ReadState(self, effect: ev.ReadState) -> None:
        process, register = self.process, self.partition.register
        if self._reachable():
            process.after(0.02, lambda: self.step(ev.StateRead(register.read())))
        else:
            process.after(0.5, lambda: self.step(ev.StateUnread()))

    def _do_CompareAndSet(self, effect: ev.CompareAndSet) -> None:
        world, process, register = self.process.world, self.process, self.partition.register
        lost = world.wire.chance(0.05)

        def swap() -> None:
            done = register.compare_and_set(effect.expected, effect.state)
            outcome = ev.CompareAndSetOutcome.OK if done else ev.CompareAndSetOutcome.CONFLICT
            if not lost:
                process.after(0.01, lambda: self.step(ev.Swapped(effect.token, outcome)))

        if self._reachable():
            world.wire.after(0.01, swap)  # also when the process is gone by then
        if lost or not self._reachable():
            process.after(0.4, lambda: self.step(ev.Swapped(effect.token, ev.CompareAndSetOutcome.UNKNOWN)))

    def _do_Accepted(self, effect: ev.Accepted) -> None:
        self._verdict = effect

    def _do_Rejected(self, effect: ev.Rejected) -> None:
        self._verdict = effect

    def _do_Persisted(self, effect: ev.Persisted) -> None:
        for write in self._writes:
            if write.last > effect.counter:
                break
            if not write.on_disk:
                write.on_disk = True
                write.persisted()

    def _do_Committed(self, effect: ev.Committed) -> None:
        self._target, self._copies = max(self._target, effect.counter), effect.copies

    def _do_Leading(self, effect: ev.Leading) -> None:
        holder = (int(self.member), self.disk.incarnation)
        assert self.partition.leaders.setdefault(effect.epoch, holder) == holder, "two leaders in one epoch"
        self.process.world.counts[f"{self.partition.role} led"] += 1
        self._led(effect.epoch)

    def _do_Deposed(self, effect: ev.Deposed) -> None:
        self.process.world.counts["deposed"] += 1
        self._writes.clear()
        self._led(0)

    def _do_SendSnapshot(self, effect: ev.SendSnapshot) -> None:
        world, process = self.process.world, self.process
        target = self.partition.replicas.get(int(effect.member))
        if target is None or world.wire.chance(0.1):
            process.after(0.1, lambda: self.step(ev.SnapshotSent(effect.member, None)))
            return
        self.disk.flushed = self.machine.flush()
        position, state = self.machine.position, self.machine.snapshot()
        world.counts["snapshots of logs"] += 1

        def arrive() -> None:
            target._received = position, state
            target.step(ev.SnapshotReceived(effect.epoch, self.member, position))

        delay = world.rng.uniform(0.05, 0.3)
        world.wire.after(delay, lambda: target.process.do(arrive))
        process.after(delay + 0.05, lambda: self.step(ev.SnapshotSent(effect.member, position)))

    _received: tuple[Position, object] | None = None

    def _do_InstallSnapshot(self, effect: ev.InstallSnapshot) -> None:
        assert self._received is not None
        assert self._received[0] == effect.position
        self.machine.load(self._received[1])
        self.disk.flushed = effect.position.counter
        self._target = max(self._target, effect.position.counter)

    def _do_CloseSession(self, effect: ev.CloseSession) -> None:
        raise AssertionError(f"a replica halted: {effect.reason}")

    # --- ZooKeeper

    def _reachable(self) -> bool:
        return self.process.world.now >= self.reachable_from

    def _zookeeper_turn(self) -> None:
        """What a client of ZooKeeper does: keeps its session, hears of changes. Not while its process is stopped."""
        world, register, core = self.process.world, self.partition.register, self.core
        register.expire(world.now)
        if self._reachable():
            if self.session is not None and self.session not in register.sessions:
                self.session = None
                world.counts["sessions lost"] += 1
                self.step(ev.SessionLost())
            elif self.session is None:
                if self._session_at_least_once:
                    self.disk.incarnation += 1
                self._session_at_least_once = True
                self.session = register.open(int(self.member), self.disk.incarnation, world.now)
                self.step(ev.SessionStarted(self.session, self.disk.incarnation))
            else:
                register.sessions[self.session].seen_at = world.now
            presence, version = self._seen
            self._seen = (register.presence_version, register.version)
            if presence != register.presence_version:
                self.step(ev.PresenceChanged(register.live()))
            if version != register.version:
                self.step(ev.StateRead(register.read()))
        assert core is self.core
        self.process.after(ZOOKEEPER_TURN_S, self._zookeeper_turn)
