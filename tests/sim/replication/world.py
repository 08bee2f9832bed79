"""Replicas of one partition: production cores, each with a shell that is a few lines here, under random faults."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cluster.replication.core import events as ev
from cluster.replication.core.core import Core
from cluster.replication.core.messages import Append
from cluster.replication.core.states import State
from cluster.replication.model import EntryKind, MemberID
from cluster.replication.options import ReplicationOptions
from cluster.replication.storage.label import SEAL_LAG_S
from tests.sim.replication.disk import Disk, MemoryLog
from tests.sim.replication.files import FileDisk, FileLog
from tests.sim.replication.history import History
from tests.sim.replication.zookeeper import Register
from tests.support.simulation import Simulation

FAULTS_S = 22.0
HEALING_S = 40.0
"""After the last fault everything must be well within this (simulated) time."""
ZOOKEEPER_TURN_S = 0.25
SESSION_TIMEOUT_S = 2.0
BEGIN_US = 1_800_000_000_000_000
"""Unix time at the beginning of a run."""
OPTIONS = ReplicationOptions(
    heartbeat_s=0.25, lease_s=0.6, confirm_wait_s=0.9, silence_s=1.2, candidate_step_s=0.3, resend_s=0.5, poll_s=0.6,
    join_within=8, max_uncommitted=200, max_append_entries=8, max_unacknowledged=4, snapshot_timeout_s=3.0, max_kept=12,
    slow_s=0.4, slow_for_s=1.5, rejoin_s=0.3, max_rejoin_s=3.0, join_s=0.8, unregistered_s=2.5,
)  # fmt: skip
"""Shorter times and smaller limits than in service, so that more happens in a run."""


@dataclass
class Node:
    """A machine with its disk, and the process on it while it is up."""

    member: MemberID
    disk: Disk
    log: MemoryLog | None = None
    core: Core | None = None
    start: int = 0
    """Counts starts: what was meant for an earlier one is void."""
    paused_until: float = 0.0
    held: deque[Any] = field(default_factory=deque)
    """Events that wait for the end of a pause."""
    session: int | None = None
    seen_presence: int = -1
    seen_state: int = -1
    reachable: bool = True
    """By ZooKeeper."""
    syncing: bool = False
    sync_next: tuple[int, int] | None = None
    """What waits for the sync under way: (operations of the log, ticket)."""
    sealing: bool = False
    """The seal is about to be synced."""
    disk_s: float = 0.01
    """What a sync takes at most."""
    disk_least: float = 0.1
    """Of `disk_s`: what it takes at least."""
    deaf_to_entries: bool = False
    """It drops every message with entries, as one that it cannot read; heartbeats pass."""
    applied: int = 0
    writes: deque[tuple[int, int, int, tuple[int, int] | None, float]] = field(default_factory=deque)
    """What waits for level replicated: (epoch, first, last, the highest position acknowledged when it was sent, when)."""
    tick_at: float = 0.0
    wall_off_s: float = 0.0
    """By how much its wall clock is wrong."""


class World(Simulation):
    """One run.

    Args:
        seed: of everything random.
        core: the class of the replicas' cores; a test puts a broken one here.
        trust_damage: a start believes what is left of a damaged log.
        files: makes the disk of replica i, if the logs are real ones.
        trust_cache: a start takes what it reads for what is on the disk.
        cut_at_seal: a start takes what stands behind the seal for torn.
    """

    def __init__(
        self,
        seed: int,
        core: type[Core] = Core,
        trust_damage: bool = False,
        files: Callable[[int], FileDisk] | None = None,
        trust_cache: bool = False,
        cut_at_seal: bool = False,
    ) -> None:
        super().__init__(seed)
        self.core_class = core
        self.options = OPTIONS
        self.trust_damage = trust_damage
        self.zookeeper = Register(SESSION_TIMEOUT_S)
        replicas = self.rng.choice((2, 3, 3))
        disks = [files(i + 1) if files else Disk() for i in range(replicas)]
        for disk in disks:
            disk.trusts_cache, disk.cuts_at_seal = trust_cache, cut_at_seal
        self.nodes = [Node(MemberID(i + 1), disk) for i, disk in enumerate(disks)]
        self.history = History(self)
        self.counts: Counter[str] = Counter()
        self.cuts: dict[tuple[int, int], float] = {}
        """(from, to) → until when nothing passes."""
        self.calm = False
        """No more faults."""
        self.clients = True
        self.cold = False
        """What was flushed before a start is not at hand at once."""
        self.loss = self.rng.choice((0.0, 0.02, 0.1))
        self.unknown = self.rng.choice((0.02, 0.1, 0.4))
        """How often the answer of a compare-and-set is lost."""
        self._values = 0
        self.after(ZOOKEEPER_TURN_S, self._zookeeper_turn)

    def wall_us(self, node: Node) -> int:
        """What a machine's wall clock says."""
        return self.true_us + int(node.wall_off_s * 1_000_000)

    @property
    def true_us(self) -> int:
        """The time that it is."""
        return BEGIN_US + int(self.now * 1_000_000)

    # --- processes

    def start(self, node: Node) -> None:
        if node.core is not None:
            return
        damage = node.disk.open()
        if damage is not None:
            self.counts["damaged starts"] += 1
            if self.trust_damage:
                node.disk.image.unclean, damage = False, None
        node.start += 1
        node.disk.incarnation += 1
        node.log = FileLog(node.disk) if isinstance(node.disk, FileDisk) else MemoryLog(node.disk)
        node.applied = node.disk.flushed
        if node.log.last.counter < node.disk.flushed and not node.log.unclean and not node.disk.rotten:
            position = self.history.position(node.disk.flushed)  # a crash between a snapshot's two halves
            node.log.reset(position)
        node.log.cold_to = node.disk.flushed if self.cold else 0
        node.seen_presence = node.seen_state = -1
        node.writes.clear()
        node.core = self.core_class(
            member=node.member, incarnation=node.disk.incarnation, log=node.log, options=self.options,
            applied=node.disk.flushed, now=self.now, damage=damage,
        )  # fmt: skip
        self.counts["starts"] += 1
        self._tick(node, node.start)

    def stop(self, node: Node, power: bool) -> None:
        if power and node.disk.seals:
            self.counts["power cuts within the lag of a seal"] += 1
        if node.core is None or node.log is None:
            if power:
                node.disk.lose_power(self.rng)
            return
        self.counts["power cuts" if power else "kills"] += 1
        node.log.crash(self.rng, power)
        node.core, node.log = None, None
        node.start += 1
        node.paused_until = 0.0
        node.held.clear()
        node.syncing, node.sync_next, node.sealing = False, None, False
        node.session = None

    def deliver(self, node: Node, start: int, event: ev.Event) -> None:
        """An event reaches a process, unless it is another start; a paused one takes it later."""
        core = node.core
        if core is None or node.start != start:
            return
        if self.now < node.paused_until:
            if len(node.held) < 200:
                node.held.append(event)
            return
        self.note(b"%d %s" % (node.member, type(event).__name__.encode()))
        before = core.state
        self.perform(node, core.step(event, self.now))
        if core.state is not before:
            self.history.state_changed(node, before, core.state)
        if core.may_read(self.now):
            self.history.read_served(core.epoch)

    def _tick(self, node: Node, start: int) -> None:
        if node.start != start or node.core is None:
            return
        self.deliver(node, start, ev.Tick(self.wall_us(node), not node.disk.full))
        self.after(max(0.02, node.core.next_deadline() - self.now), self._tick, node, start)

    def pause(self, node: Node, seconds: float) -> None:
        if node.core is not None and self.now >= node.paused_until:
            self.counts["pauses"] += 1
            node.paused_until = self.now + seconds
            self.after(seconds, self._resume, node, node.start)

    def _resume(self, node: Node, start: int) -> None:
        if node.start != start or self.now < node.paused_until:
            return
        held = list(node.held)
        node.held.clear()
        for event in held:
            self.deliver(node, start, event)

    # --- effects

    def perform(self, node: Node, effects: list[ev.Effect]) -> None:
        for effect in effects:
            getattr(self, f"_do_{type(effect).__name__}")(node, effect)

    def _do_Sync(self, node: Node, effect: ev.Sync) -> None:
        assert node.log is not None
        node.sync_next = node.log.issued, effect.ticket  # one sync takes everything that gathered
        if not node.syncing:
            self._begin_sync(node)

    def _begin_sync(self, node: Node) -> None:
        assert node.sync_next is not None
        issued, ticket = node.sync_next
        node.syncing, node.sync_next = True, None
        self.after(self.rng.uniform(node.disk_least, 1.0) * node.disk_s, self._synced, node, node.start, issued, ticket)

    def _synced(self, node: Node, start: int, issued: int, ticket: int) -> None:
        if node.start != start or node.log is None:
            return
        node.log.sync(issued)
        self.history.check_repaired(node)
        node.syncing = False
        if node.log.seal_lags and not node.sealing:
            node.sealing = True
            self.after(SEAL_LAG_S, self._seal, node, start)
        if node.sync_next is not None:
            self._begin_sync(node)
        self.deliver(node, start, ev.Synced(ticket))

    def _seal(self, node: Node, start: int) -> None:
        if node.start == start and node.log is not None:
            node.sealing = False
            node.log.sync_seal()

    def _do_Send(self, node: Node, effect: ev.Send) -> None:
        rng = self.rng
        target = self.nodes[effect.to - 1]
        if isinstance(effect.message, Append) and effect.message.entries:
            self.counts["entries sent"] += len(effect.message.entries)
        if self.cut_off(node, target) or rng.random() < self.loss:
            return
        delay = rng.uniform(0.002, 0.03)
        if not self.calm:
            slow = rng.random()
            if slow < 0.03:
                delay += rng.uniform(0.0, 3.0)
            elif slow < 0.06:
                self.after(delay + rng.uniform(0.0, 2.0), self._arrive, node, target, effect.message)
        self.after(delay, self._arrive, node, target, effect.message)

    def _arrive(self, sender: Node, target: Node, message: Any) -> None:
        unreadable = target.deaf_to_entries and isinstance(message, Append) and message.entries
        if not unreadable and not self.cut_off(sender, target):
            self.deliver(target, target.start, ev.Received(message))

    def cut_off(self, sender: Node, target: Node) -> bool:
        return self.cuts.get((sender.member, target.member), 0.0) > self.now

    def _do_ReadState(self, node: Node, effect: ev.ReadState) -> None:
        if node.reachable:
            self.after(self.rng.uniform(0.002, 0.05), self._read_state, node, node.start)
        else:
            self.after(0.5, self.deliver, node, node.start, ev.StateUnread())

    def _read_state(self, node: Node, start: int) -> None:
        self.after(self.rng.uniform(0.002, 0.1), self.deliver, node, start, ev.StateRead(self.zookeeper.read()))

    def _do_CompareAndSet(self, node: Node, effect: ev.CompareAndSet) -> None:
        rng, start = self.rng, node.start
        lost = not self.calm and rng.random() < self.unknown
        if not node.reachable or lost:
            if lost and rng.random() < 0.7:
                self.counts["late proposals"] += 1
                self.after(rng.choice((0.01, rng.uniform(0.0, 4.0))), self._swap, node, -1, effect)
            self.after(rng.uniform(0.1, 0.6), self.deliver, node, start, ev.Swapped(effect.token, ev.CompareAndSetOutcome.UNKNOWN))
        else:
            self.after(rng.uniform(0.002, 0.05), self._swap, node, start, effect)

    def _swap(self, node: Node, start: int, effect: ev.CompareAndSet) -> None:
        before = self.zookeeper.state
        done = self.zookeeper.compare_and_set(effect.expected, effect.state)
        if done:
            self.history.state_written(node, before, effect.state)
        outcome = ev.CompareAndSetOutcome.OK if done else ev.CompareAndSetOutcome.CONFLICT
        self.after(self.rng.uniform(0.002, 0.05), self.deliver, node, start, ev.Swapped(effect.token, outcome))

    def _do_Accepted(self, node: Node, effect: ev.Accepted) -> None:
        node.writes.append((effect.epoch, effect.first, effect.last, self.history.highest, self.now))

    def _do_Rejected(self, node: Node, effect: ev.Rejected) -> None:
        self.counts["rejected"] += 1

    def _do_Persisted(self, node: Node, effect: ev.Persisted) -> None:
        if node.disk.image.last.counter < effect.counter:
            self.history.violation("persisted but not on the disk", f"{effect.counter} on {node.member}")

    def _do_Committed(self, node: Node, effect: ev.Committed) -> None:
        self.history.committed(node, effect.counter, effect.copies)

    def _do_Leading(self, node: Node, effect: ev.Leading) -> None:
        self.history.leading(node, effect.epoch)

    def _do_Deposed(self, node: Node, effect: ev.Deposed) -> None:
        self.counts["deposed"] += 1
        node.writes.clear()

    def _do_SendSnapshot(self, node: Node, effect: ev.SendSnapshot) -> None:
        target = self.nodes[effect.member - 1]
        assert node.log is not None
        position = self.history.position(node.applied)
        sent = not self.cut_off(node, target) and self.rng.random() > self.loss * 2
        delay = self.rng.uniform(0.05, 0.6)
        if sent:
            self.counts["snapshots"] += 1
            self.after(delay, self.deliver, target, target.start, ev.SnapshotReceived(effect.epoch, node.member, position))
        event = ev.SnapshotSent(effect.member, position if sent else None)
        self.after(delay + 0.05, self.deliver, node, node.start, event)

    def _do_ScanSegment(self, node: Node, effect: ev.ScanSegment) -> None:
        self.counts["scans"] += 1
        self.after(self.rng.uniform(0.01, 0.5), self._scanned, node, node.start)

    def _scanned(self, node: Node, start: int) -> None:
        if node.start == start and node.log is not None:
            node.log.cold_to = 0
            rotten = node.log.rotten
            self.deliver(node, start, ev.SegmentScanned() if rotten is None else ev.SegmentRotten(rotten[1]))

    def _do_LogDropped(self, node: Node, effect: ev.LogDropped) -> None:
        self.counts["logs dropped"] += 1

    def _do_InstallSnapshot(self, node: Node, effect: ev.InstallSnapshot) -> None:
        node.applied = node.disk.flushed = effect.position.counter

    def _do_ReportDamage(self, node: Node, effect: ev.ReportDamage) -> None:
        self.counts["sole damaged" if effect.sole else "damage reported"] += 1

    def _do_Audit(self, node: Node, effect: ev.Audit) -> None:
        self.counts["forced"] += 1

    def _do_HandedOver(self, node: Node, effect: ev.HandedOver) -> None:
        self.counts["hand-overs"] += 1
        if node.session is not None:
            self.zookeeper.close(node.session)
        self.stop(node, power=False)

    def _do_CloseSession(self, node: Node, effect: ev.CloseSession) -> None:
        if effect.reason == "the disk is full":  # it was to lead, and cannot: the supervisor starts it again
            self.counts["full at promotion"] += 1
            self.after(0.001, self.stop, node, False)
            self.after(1.0, self.start, node)
        elif "forced promotion" in effect.reason or "committed and trimmed here" in effect.reason:
            self.counts["given up by force"] += 1
        else:
            self.history.violation("halted", f"{node.member}: {effect.reason}")

    # --- ZooKeeper's side of the connections

    def _zookeeper_turn(self) -> None:
        register = self.zookeeper
        for node in self.nodes:
            if node.core is None or not node.reachable or self.now < node.paused_until:
                continue
            if node.session is not None and node.session not in register.sessions:
                node.session = None
                self.deliver(node, node.start, ev.SessionLost())
            elif node.session is None:
                if node.disk.incarnation and node.core.context.incarnation and node.seen_presence >= 0:
                    node.disk.incarnation += 1
                node.session = register.open(node.member, node.disk.incarnation, self.now)
                self.deliver(node, node.start, ev.SessionStarted(node.session, node.disk.incarnation))
            elif self.rng.random() < 0.9:
                register.sessions[node.session].seen_at = self.now
        register.expire(self.now)
        for node in self.nodes:
            if node.core is None or not node.reachable or self.rng.random() < 0.3:
                continue
            if node.seen_presence != register.presence_version:
                node.seen_presence = register.presence_version
                self.after(0.01, self.deliver, node, node.start, ev.PresenceChanged(register.live()))
            if node.seen_state != register.version:
                node.seen_state = register.version
                self.after(0.01, self.deliver, node, node.start, ev.StateRead(register.read()))
        self.after(ZOOKEEPER_TURN_S, self._zookeeper_turn)

    # --- clients

    def client_turn(self) -> None:
        if not self.clients:
            return
        rng = self.rng
        for node in self.nodes:
            if node.core is not None and node.core.state is State.LEADING and self.now >= node.paused_until:
                many = rng.choice((1, 1, 2, 3, 12)) if rng.random() < 0.8 else 0
                if many:
                    self._values += many
                    values = range(self._values - many + 1, self._values + 1)
                    payloads = [(int(EntryKind.DATA), value.to_bytes(4, "big")) for value in values]
                    self.deliver(node, node.start, ev.Propose(0, payloads, self.wall_us(node)))
                if rng.random() < 0.05 and node.applied > node.disk.flushed:
                    node.disk.flushed = node.applied
            if node.core is not None and rng.random() < 0.05:
                node.disk.flushed = max(node.disk.flushed, node.applied)
                self.deliver(node, node.start, ev.Flushed(node.disk.flushed))
        self.after(rng.uniform(0.05, 0.4), self.client_turn)
