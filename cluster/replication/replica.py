"""A replica of a partition inside a role's process: the shell around one `Core`.

    role ── propose ──▶ Replica ──▶ Core ──▶ log, synced by the kernel ┐
      ▲                   ▲  │                                         ├─▶ committed ──▶ StateMachine.apply ──▶ answers
      └──── answers ──────┘  └─▶ peers over gRPC, ZooKeeper ───────────┘

Source: docs/registry.md, docs/replication.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from cluster.metrics.histogram import SIZES, OneAtATime
from cluster.process.context import Context
from cluster.replication.applier import Applier
from cluster.replication.core import events as ev
from cluster.replication.core.clock import MAX_STEP_US
from cluster.replication.core.core import Core
from cluster.replication.core.fitness import hindrance, left_out
from cluster.replication.core.messages import Message
from cluster.replication.core.refusals import refusal_of
from cluster.replication.core.states import State
from cluster.replication.machine import StateMachine
from cluster.replication.model import CLOCK, EntryKind, MemberID, Versioned
from cluster.replication.options import ReplicationOptions
from cluster.replication.peers.peers import Peers
from cluster.replication.peers.registry import LiveReplica, PartitionRegistry
from cluster.replication.peers.snapshots import SnapshotReceiver, SnapshotSender
from cluster.replication.peers.wire import encode_message
from cluster.replication.proposals import Proposal, Proposals
from cluster.replication.storage.disk import Syncer
from cluster.replication.storage.folder import RESERVE_BYTES, DataFolder, free_bytes
from cluster.replication.storage.log import SegmentedLog
from cluster.replication.storage.scrub import Scrub
from pixiu.discovery.node import Node
from pixiu.discovery.operations import SessionEvent, SessionState
from pixiu.errors import DiskFailed, InvalidArgument, OutcomeUnknown, PixiuError, StorageError, Unavailable
from pixiu.ids import hex_id
from pixiu.rpc.deadline_timer import DeadlineTimer

MAX_ENTRY_BYTES: Final = 3 << 20
"""Size of one payload; with the rest of its message it fits into gRPC's smallest limit."""
FLUSHED_POLL_S: Final = 1.0

COMMIT: Final = "Time from a leader's writing an entry until it is committed; one entry at a time is timed."

LEADING: Final = "replica_leading"
DEPOSED: Final = "replica_deposed"
DAMAGED: Final = "replica_damaged"
HALTED: Final = "replica_halted"
PROMOTION_FORCED: Final = "replica_promotion_forced"
LOG_DROPPED: Final = "replica_log_dropped"
DISK_HANGS: Final = "replica_disk_hangs"


def _wall_us() -> int:
    return time.time_ns() // 1000


class Replica:
    """One replica of a partition: log, peers, ZooKeeper and state machine around one core.

    Constructed in the role's constructor (it adds its gRPC service to the process's server), then called from the
    service's own methods: `prepare` with an open state machine, `start`, `drain`, `stop`, and `health` for its fields.

    Args:
        context: context of the role's process.
        machine: the role's state. Need not be open before `prepare` is called.
        folder: the replica's own folder: log, snapshots in transfer, audit. The state machine keeps its files elsewhere on
            the same file system (`folder.parent / "state"`, say).
        options: settings of replication.
        on_leader: called with the epoch when this replica takes office; it takes writes from then on. Called with 0 when it stops
            leading.
        on_persisted: called with the counter up to which this leader's entries are on its disk. It must not propose.
        on_applied: called with the counter of the first entry applied, the state machine's answers, and the number of copies.
        has_space: returns whether the role has space to lead; called once a second, also on followers.
        segment_bytes: size beyond which the log starts another segment.
    """

    def __init__(
        self,
        context: Context[Any],
        machine: StateMachine,
        folder: Path,
        options: ReplicationOptions,
        *,
        on_leader: Callable[[int], None] = lambda _epoch: None,
        on_persisted: Callable[[int], None] = lambda _counter: None,
        on_applied: Callable[[int, Sequence[object], int], None] = lambda _first, _answers, _copies: None,
        has_space: Callable[[], bool] = lambda: True,
        segment_bytes: int = 64 << 20,
    ) -> None:
        options.validate()
        self._context, self._machine, self._options = context, machine, options
        self._folder = DataFolder(folder, segment_bytes)
        self._on_leader, self._on_persisted, self._on_applied, self._has_space = on_leader, on_persisted, on_applied, has_space
        self._proposals = Proposals()
        self._verdict: ev.Accepted | ev.Rejected | None = None
        self._core: Core | None = None
        self._log: SegmentedLog | None = None
        self._stepping = False
        self._events: list[ev.Event] = []
        self._scanning: asyncio.Task[None] | None = None
        self._alarm = DeadlineTimer(self._tick)
        self._polled_at = 0.0
        self._no_space = ""
        """Reason why there is not enough space to lead; empty if there is."""
        self._segment_bytes = segment_bytes
        self.log_full = ""
        """Reason why the log had no space for the last write; empty again when a write is taken, or two segments are free."""
        self._leader_node: LiveReplica | None = None
        """Node of the leader as last seen: it may be gone although the leader is alive."""
        self._told = 0
        """Incarnation of the last registration reported to the core."""
        self._handed_over = asyncio.Event()
        self._stopped = False
        self._damage = ""
        self._live: dict[MemberID, LiveReplica] = {}
        self._counts = {
            "elections_total": 0,
            "depositions_total": 0,
            "snapshots_installed_total": 0,
            "log_segments_dropped_total": 0,
        }
        self._peers = Peers(context, options, self._received, lambda: self.member)
        self._registry = PartitionRegistry(context, self._state_read, self._swapped, self._presence)
        histogram = context.metrics.histogram
        self._batch_entries = histogram("pixiu_log_batch_entries", "Entries that a leader writes to its log together.", SIZES)
        self._committing = OneAtATime(histogram("pixiu_commit_seconds", COMMIT))
        self._syncer = Syncer(self._synced, histogram("pixiu_log_sync_seconds", "Time that the disk took to sync the log.").add)
        self._scrub = Scrub(lambda last: self._step(ev.SegmentRotten(last)))
        self._applier = Applier(machine, self._applied, self._log_failed, context.crash)
        self._office = 0
        """Epoch in which this replica leads; 0: it does not."""
        self._sender = SnapshotSender(machine, self._folder, self._peers, self.pin, self._snapshot_sent)
        self._receiver = SnapshotReceiver(machine, self._folder, lambda: self._applier.installing, self._snapshot_received)
        self._peers.serve(self._receiver.receive, self._receiver.held, self._promote, self.set_clock)
        context.metrics.collect_from(self._samples)

    # --- life cycle, driven by the role's service

    async def prepare(self, node: Node) -> Node:
        """Open the log, and finish the installation of a snapshot if an earlier start was interrupted in it. Returns what to
        register.

        Raises StorageError (also if another process has the folder open).
        """
        opened = await asyncio.to_thread(self._folder.open, self._machine.flushed)
        await self._folder.finish_install(opened, self._machine)
        self._log = opened
        self._context.membership.before_registering_again(self._renewed)
        incarnation = await asyncio.to_thread(opened.next_incarnation)
        return replace(node, member=int(opened.member), member_incarnation=incarnation, member_end=opened.last.counter)

    async def start(self) -> None:
        """Take part; the process is registered. Returns at once, before a leader is known."""
        log = self._log
        assert log is not None, "prepare was called"
        self._core = Core(
            member=log.member,
            incarnation=log.incarnation,
            log=log,
            options=self._options,
            applied=self._machine.applied,
            now=time.monotonic(),
            damage=log.damage,
        )
        self._syncer.start(log)
        self._applier.start(log)
        self._sender.start(log)
        self._scrub.start(log)
        if log.damage is not None:
            self._damage = f"the log is damaged: {log.damage.reason}"
        self._context.zookeeper.add_listener(self._session)
        await self._registry.start()
        self._check_registration()
        self._step(ev.Tick(_wall_us()))

    async def drain(self) -> None:
        """Hand over: as a leader when another member has everything, as a follower by leaving the in-sync set. It never leads
        again. Returns when that is done, or if there is no replica to hand over to."""
        if self._core is None:
            return
        self._step(ev.Drain())
        while not self._handed_over.is_set():
            if self._alone():
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._options.heartbeat_s):
                    await self._handed_over.wait()

    def _alone(self) -> bool:
        """True if no replica could take over from this leader: none joins the set while it drains."""
        core = self._core
        assert core is not None
        leader = core.leader
        if leader is None:
            return core.state is not State.HANDING_OVER
        return not leader.in_sync.state.in_sync - {self.member}

    async def stop(self) -> None:
        """Release everything. Pending writes fail with OutcomeUnknown."""
        self._stopped = True
        self._alarm.cancel()
        self._context.zookeeper.remove_listener(self._session)
        self._proposals.fail(OutcomeUnknown("the process ends"))
        for part in (self._scrub, self._registry, self._sender, self._receiver, self._peers, self._applier, self._syncer):
            await part.close()
        if self._scanning is not None:
            await asyncio.wait([self._scanning])
        if self._log is not None:
            await asyncio.to_thread(self._log.close)
        self._folder.close()

    # --- for the role's calls

    @property
    def member(self) -> MemberID:
        """The data folder's ID; 0 before `prepare`."""
        return self._log.member if self._log is not None else MemberID(0)

    @property
    def log(self) -> SegmentedLog:
        """The log, open from `prepare` to `stop`, for a role that decides before the commit and reads appended entries."""
        assert self._log is not None, "prepare was called"
        return self._log

    @property
    def copies(self) -> int:
        """Replicas that have the applied entries; 0 if another replica leads or with fewer than `min_in_sync`: nothing is confirmed
        then."""
        return self._applier.copies

    @property
    def others_in_sync(self) -> frozenset[MemberID]:
        """Other members that have everything committed, as far as this replica knows."""
        read = self._core.context.read if self._core is not None else None
        return frozenset(read.state.in_sync) - {self.member} if read is not None and read.state is not None else frozenset()

    @property
    def is_leader(self) -> bool:
        """True if this replica takes writes."""
        core = self._core
        return core is not None and core.state is State.LEADING and not core.draining and not self._applier.installing

    @property
    def epoch(self) -> int:
        """The highest epoch known to this replica; its own while it leads."""
        return self._core.epoch if self._core is not None else 0

    @property
    def committed(self) -> int:
        """Last committed counter. The state may lag slightly (`StateMachine.applied`)."""
        return self._core.context.committed if self._core is not None else 0

    def holds_lease(self) -> bool:
        """True if no other replica can lead. The state machine may still lag the committed entries."""
        core = self._core
        return core is not None and core.may_read(time.monotonic())

    def lease_valid(self) -> bool:
        """True if the state machine is up to date: no other replica can lead, and everything committed is applied. Call it in the
        turn of the event loop in which the state is read; for a longer read, before and after."""
        core = self._core
        return core is not None and self.holds_lease() and self._machine.applied >= core.context.committed

    @property
    def leader_address(self) -> str:
        """Address (host:port) of the leader's process as far as known; otherwise empty."""
        node = self.leader_node
        return node.address if node is not None else ""

    @property
    def leader_node(self) -> Node | None:
        """Node of the leader's process as far as known; otherwise None."""
        core = self._core
        read = core.context.read if core is not None else None
        if read is None or read.state is None or (read.state.leader == self.member and not self.is_leader):
            return None
        found = self._live.get(read.state.leader)
        if found is None and core is not None and core.hears_leader(time.monotonic()):
            found = self._leader_node
        named = (read.state.leader, read.state.incarnation)
        return found.node if found is not None and (found.presence.member, found.presence.incarnation) == named else None

    def check_leader(self) -> None:
        """Raise `NotLeader`, which names the leader, or `Draining`, if this replica takes no writes."""
        if not self.is_leader:
            raise self._refusal(
                ev.Rejection.DRAINING if self._core is not None and self._core.draining else ev.Rejection.NOT_LEADER
            )

    async def propose(self, payloads: Sequence[tuple[int, bytes]]) -> Sequence[object]:
        """Write payloads, each (kind, bytes), and wait until they are replicated; return the state machine's answers.

        A cancelled caller leaves its write in the log. Raises as `append`, and OutcomeUnknown: the write may be kept or not, or is
        on fewer disks than `min_in_sync`.
        """
        return await self.submit(payloads).replicated()

    def submit(self, payloads: Sequence[tuple[int, bytes]], *, unblocks: bool = False) -> Proposal:
        """Write like `propose`: the counters are known at once, and `Proposal.replicated` waits. Raises as `append`."""
        proposal = Proposal(self.append(payloads, unblocks=unblocks).first, len(payloads))
        self._proposals.add(proposal)
        return proposal

    def append(
        self, payloads: Sequence[tuple[int, bytes]], *, token: int = 0, replicated: bool = True, unblocks: bool = False
    ) -> ev.Accepted:
        """Append payloads, each (kind, bytes), to the log. Not to be called by `StateMachine.apply`.

        token: of the result. replicated: somebody waits until they are. unblocks: take them although earlier entries cannot be
        applied, because they resolve them.

        Raises NotLeader, Draining, Overloaded (more than `max_uncommitted` entries wait), TooFewInSync, DiskFull, InvalidArgument:
        nothing was written.
        """
        if not payloads:
            raise InvalidArgument("a write has at least one payload")
        for kind, payload in payloads:
            if len(payload) > MAX_ENTRY_BYTES or not EntryKind.NOOP < kind < 256:
                raise InvalidArgument(
                    f"a payload of kind {kind} and {len(payload)} bytes: at most {MAX_ENTRY_BYTES}, kinds 2 to 255"
                )
        if (blocked := self._applier.blocked) is not None and not unblocks:
            raise self._refusal(ev.Rejection.DRAINING) if self.leave_for_space() else type(blocked)(str(blocked))
        if self._applier.behind > self._options.max_uncommitted:
            raise self._refusal(ev.Rejection.OVERLOADED)
        self._verdict = None
        began = time.monotonic()
        self._step(ev.Propose(token, payloads, _wall_us(), replicated))
        verdict = self._verdict
        if not isinstance(verdict, ev.Accepted):
            raise self._refusal(verdict.reason if verdict is not None else ev.Rejection.NOT_LEADER)
        self.log_full = ""
        self._batch_entries.add(len(payloads))
        if verdict.first > self.committed:
            self._committing.begin((verdict.epoch, verdict.first), began)
        return verdict

    def leave_for_space(self) -> bool:
        """Note that the role has no space for a write. Returns whether this leader is about to hand over to a replica with space:
        then the write is refused with `Draining`, otherwise with `DiskFull`."""
        self._step(ev.OutOfSpace())
        core = self._core
        return core is not None and core.leader is not None and bool(core.leader.heirs(time.monotonic()))

    @property
    def may_leave(self) -> bool:
        """True if this leader had no space for a write recently and hands over as soon as a replica with space is available."""
        core = self._core
        return core is not None and core.leader is not None and time.monotonic() < core.leader.full_at + self._options.silence_s

    def force_promotion(self, operator: str, reason: str) -> None:
        """Lead with the data of this replica, whatever is missing; ordered by an operator. Recorded in the audit log first. Returns
        at once; `status` shows the result. Raises Unavailable if the replica leads already or cannot be asked now."""
        if self._core is None or self._core.state not in (State.FOLLOWING, State.LEAVING, State.REPAIRING, State.DAMAGED):
            raise Unavailable(f"this replica is {self.status()['state']}: it cannot be promoted by force now")
        self._context.log.error(PROMOTION_FORCED, operator=operator, reason=reason)
        self._step(ev.ForcePromotion(operator, reason))

    async def _promote(self, operator: str, reason: str) -> None:
        self.force_promotion(operator, reason)

    async def set_clock(self, operator: str, reason: str) -> None:
        """Set the time of the state back to the agreed one; ordered by an operator, on a leader. Recorded in the audit log first.
        Raises as `propose`, and InvalidArgument if the time of the state is not ahead."""
        self.check_leader()
        agreed_us, before_us = self.now_us(), self._machine.clock_us
        if not agreed_us or before_us <= agreed_us:
            raise InvalidArgument("the time of the state is not ahead of the time that the partition agrees on")
        await asyncio.to_thread(self.audit, operator, reason, {"clock_us_before": before_us, "clock_us": agreed_us})
        await self.propose([(int(EntryKind.SET_CLOCK), CLOCK.pack(agreed_us))])

    def audit(self, operator: str, reason: str, what: Mapping[str, object]) -> None:
        """Record an operator's action on the state, durably. Blocking. Raises DiskFailed."""
        self._folder.audit_line(operator, reason, self.member, what)

    def status(self) -> dict[str, object]:
        """Status of the replica for `/health` and `pixiu status`. `degraded`: a text while an operator is needed."""
        core = self._core
        if core is None:
            return {"state": "Starting", "degraded": None}
        context = core.context
        state = context.read.state if context.read is not None else None
        followers = core.leader.followers if core.leader is not None else {}
        end = context.log.last
        return {
            "state": (State.TAKING_OFFICE if core.state is State.LEADING and self._applier.installing else core.state).value,
            "member": hex_id(context.member),
            "incarnation": context.incarnation,
            "leader": hex_id(state.leader) if state is not None else "",
            "leader_address": self.leader_address,
            "epoch": core.epoch,
            "in_sync": [hex_id(member) for member in sorted(state.in_sync)] if state is not None else [],
            "first": context.log.first.counter,
            "end": end.counter,
            "end_epoch": end.epoch,
            "committed": context.committed,
            "applied": self._machine.applied,
            "flushed": self._machine.flushed,
            "lease": core.may_read(time.monotonic()),
            "may_not_lead": hindrance(core),
            "no_space": self._no_space,
            "left_out": {hex_id(m): why for m, why in left_out(core.leader, time.monotonic()).items()} if core.leader else {},
            "lag": {hex_id(member): end.counter - progress.matched for member, progress in sorted(followers.items())},
            "degraded": self._degraded(core),
        }

    def _degraded(self, core: Core) -> str | None:
        if core.halted_by:
            return f"the replica halted: {core.halted_by}"
        if hung_s := self._hung_s():
            return f"the disk has not answered for {hung_s:.0f} s: {self._folder.path}"
        if core.state in (State.DAMAGED, State.LEAVING, State.REPAIRING) and self._damage:
            return self._damage
        if core.waits_for_data:
            return (
                "ZooKeeper has no state of this partition, and a replica has data: if ZooKeeper's data is lost, promote the one "
                "with the most entries by force (`pixiu promote`)"
            )
        if off_s := core.context.clock.off_s:
            return f"the wall clock is {off_s:+.0f} s off the time that the partition agreed on, and is ignored: correct it"
        ahead_s = (self._machine.clock_us - self.now_us()) / 1e6 if self.now_us() else 0.0
        if ahead_s > MAX_STEP_US / 1e6:
            return (
                f"the partition's time is {ahead_s:.0f} s ahead, from a clock that was wrong: once the clocks are right, "
                "`pixiu repair --role ROLE --partition P --set-clock --reason TEXT` sets it back"
            )
        return str(self._applier.blocked) if self._applier.blocked is not None else None

    def now_us(self) -> int:
        """The agreed time of the partition, Unix µs; 0: none yet."""
        return self._core.context.clock.time_us(time.monotonic()) if self._core is not None else 0

    def _refusal(self, reason: ev.Rejection) -> PixiuError:
        error = refusal_of(reason, self._options, self.leader_address, self._folder.path)
        if reason is ev.Rejection.DISK_FULL:
            self.log_full = str(error)
        return error

    # --- running the core

    def _step(self, event: ev.Event) -> None:
        """Step the core and perform its effects in order. Events that arise meanwhile wait for their turn."""
        core = self._core
        if core is None or self._stopped:
            return
        self._events.append(event)
        if self._stepping:
            return
        self._stepping = True
        try:
            while self._events:
                now = time.monotonic()
                for effect in core.step(self._events.pop(0), now):
                    self._do(effect)
        except Exception as error:  # a bug, or a disk that cannot keep what must be kept: nothing may follow
            self._stopped = True
            self._proposals.fail(OutcomeUnknown("this replica failed"))
            self._context.crash(error)
        finally:
            self._stepping = False
        if core.state is State.LEADING:
            self._applier.run()  # writers wait for the state machine's answers
        else:
            self._applier.run_soon()
        if not self._stopped:
            deadline = core.next_deadline()
            if deadline < self._alarm.when:
                self._alarm.set(deadline)

    def _do(self, effect: ev.Effect) -> None:
        match effect:
            case ev.Send(to, message):
                self._peers.send(to, encode_message(message))
            case ev.Sync(ticket):
                self._syncer.want(ticket)
            case ev.Accepted() | ev.Rejected():
                self._verdict = effect
            case ev.Persisted(counter):
                self._on_persisted(counter)
            case ev.Committed(counter, copies):
                mark = self._committing.mark
                if mark is not None and mark[1] <= counter:
                    self._committing.end(time.monotonic())
                self._applier.commit(counter, copies)
            case ev.ReadState():
                self._registry.read()
            case ev.CompareAndSet(token, expected, state):
                self._registry.swap(token, expected, state)
            case ev.SendSnapshot(member, epoch):
                self._sender.send(member, epoch)
            case ev.ScanSegment(counter):
                if self._scanning is None or self._scanning.done():
                    self._scanning = asyncio.create_task(self._scan(counter))
            case ev.InstallSnapshot(position):
                self._counts["snapshots_installed_total"] += 1
                self._applier.install(position, self._folder)
            case _:
                self._announce(effect)

    def _take_office(self, epoch: int) -> None:
        """Inform the role that it leads. The state has caught up with the log, so the role can use both."""
        if self._office == epoch:
            self._on_leader(epoch)

    def _announce(self, effect: ev.Effect) -> None:
        """Report effects that matter to the process and its operators."""
        log = self._context.log
        match effect:
            case ev.Leading(epoch):
                self._counts["elections_total"] += 1
                log.info(LEADING, epoch=epoch)
                self._office = epoch
                self._applier.when_loaded(lambda: self._take_office(epoch))
            case ev.Deposed(epoch):
                self._counts["depositions_total"] += 1
                self._office = 0
                self._committing.drop()
                log.warning(DEPOSED, epoch=epoch)
                self._proposals.fail(OutcomeUnknown("no longer the leader; send the write again, with the same IDs"))
                self._on_leader(0)
            case ev.ReportDamage(damage, sole):
                self._damage = f"the log is damaged after {damage.position}: {damage.reason}; " + (
                    "no other replica is in sync: an operator must promote this one by force, which loses what is missing, or "
                    "bring another back"
                    if sole
                    else "it is taken from the leader"
                )
                log.error(DAMAGED, text=self._damage, last=str(damage.position), sealed=str(damage.sealed), sole=sole)
            case ev.LogDropped(last, reason):
                self._counts["log_segments_dropped_total"] += 1
                log.error(LOG_DROPPED, up_to=last, text=reason)
            case ev.Audit(operator, reason, last, before):
                self._folder.audit(operator, reason, self.member, last, before)
            case ev.HandedOver():
                self._handed_over.set()
            case ev.CloseSession(reason):
                log.error(HALTED, text=reason)
                self._context.crash(StorageError(f"the replica halted: {reason}"))

    async def _scan(self, counter: int) -> None:
        """Read an old part of the log for a follower that needs it."""
        try:
            rotten = await asyncio.to_thread(self.log.scan, counter)
        except DiskFailed as problem:
            self._step(ev.LogFailed(str(problem)))
        else:
            self._step(ev.SegmentScanned() if rotten is None else ev.SegmentRotten(rotten))

    def _hung_s(self) -> float:
        """Seconds for which the disk has hung; 0 if that is not long."""
        hung_s = self._syncer.hung_s(time.monotonic())
        return hung_s if hung_s > self._context.options.session_timeout_ms / 2000 else 0.0

    def _tick(self) -> None:
        self._check_registration()
        hung_s = self._hung_s()
        if hung_s and self._syncer.report_once():
            # Other replicas must be able to lead. When the disk answers, the session returns by itself with a new incarnation.
            self._context.log.error(DISK_HANGS, seconds=round(hung_s, 1))
            self._context.end_session()
        now = time.monotonic()
        if now >= self._polled_at + FLUSHED_POLL_S:
            self._polled_at = now
            self._step(ev.Flushed(self._machine.flushed))
            self._no_space = self._look_for_space()
        self._step(ev.Tick(_wall_us(), not self._no_space))

    def _look_for_space(self) -> str:
        """Reason why there is not enough space here to lead; empty if there is."""
        try:
            free = free_bytes(self._folder.path)
            if free >= 2 * self._segment_bytes:
                self.log_full = ""
            if free < RESERVE_BYTES:
                return f"{free >> 20} MiB are free on the disk of {self._folder.path}, a leader needs {RESERVE_BYTES >> 20}"
            if self._applier.blocked is not None:
                return str(self._applier.blocked)
            return "" if self._has_space() else "the store has no space for more"
        except DiskFailed as problem:
            return str(problem)

    # --- incoming events

    def _received(self, message: Message) -> None:
        self._step(ev.Received(message))

    def _synced(self, ticket: int, failure: str) -> None:
        self._step(ev.LogFailed(failure) if failure else ev.Synced(ticket))

    def _log_failed(self, reason: str) -> None:
        self._step(ev.LogFailed(reason))

    def _state_read(self, read: Versioned | None) -> None:
        self._step(ev.StateUnread() if read is None else ev.StateRead(read))

    def _swapped(self, token: int, outcome: ev.CompareAndSetOutcome) -> None:
        self._step(ev.Swapped(token, outcome))

    def _presence(self, live: dict[MemberID, LiveReplica]) -> None:
        read = self._core.context.read if self._core is not None else None
        if read is not None and read.state is not None:
            leader = read.state.leader
            self._leader_node = live.get(leader) or self._live.get(leader) or self._leader_node
        self._live = live
        self._peers.set_live(live)
        self._check_registration()
        self._step(ev.PresenceChanged(tuple(found.presence for found in live.values())))

    def _session(self, event: SessionEvent) -> None:
        if event.state is SessionState.LOST or (event.state is SessionState.CONNECTED and event.new_session):
            self._step(ev.SessionLost())

    async def _renewed(self, node: Node) -> Node:
        """The node to register after the session was lost: with a new incarnation, which is durable before others see it. While the
        disk hangs the replica stays out, because it would be elected and could not take office. Raises Unavailable then, and is
        called again."""
        assert self._log is not None
        if self._hung_s():
            raise Unavailable(f"the disk does not answer: {self._folder.path}")
        incarnation = await asyncio.to_thread(self._log.next_incarnation)
        return replace(node, member_incarnation=incarnation, member_end=self._log.last.counter)

    def _check_registration(self) -> None:
        """Report a registration to the core that it does not know."""
        node = self._context.membership.node
        if node is not None and node.member_incarnation > self._told:
            self._told = node.member_incarnation
            self._step(ev.SessionStarted(node.replica, node.member_incarnation))

    def _applied(self, first: int, answers: Sequence[object], copies: int) -> None:
        if len(self._proposals):
            self._proposals.applied(first, answers, copies)
        self._on_applied(first, answers, copies)

    def pin(self, name: str, counter: int | None) -> None:
        """Keep the log after a counter, under a name; None: no longer. At most `MAX_PINS` names are kept."""
        self._step(ev.Pinned(name, counter))

    def _snapshot_sent(self, event: ev.SnapshotSent) -> None:
        self._step(event)

    def _snapshot_received(self, event: ev.SnapshotReceived) -> None:
        self._step(event)

    def _samples(self) -> dict[str, object]:
        core = self._core
        samples: dict[str, object] = {f"replica_{name}": value for name, value in self._counts.items()}
        samples |= {f"replica_{name}": value for part in (self._peers, self._registry) for name, value in part.counts.items()}
        samples |= {f"replica_{name}": value for part in (self._sender, self._receiver) for name, value in part.counts.items()}
        samples |= {"replica_syncs_total": self._syncer.syncs}
        if core is not None:
            context = core.context
            in_sync = len(context.read.state.in_sync) if context.read and context.read.state else 0
            layout = self._context.view.layout.roles.get(self._context.role)
            samples |= {
                "replica_leading": int(core.state is State.LEADING),
                "replica_epoch": core.epoch,
                "replica_end": context.log.last.counter,
                "replica_committed": context.committed,
                "replica_applied": self._machine.applied,
                "replica_in_sync": in_sync,
                "replica_missing": max(layout.replicas - in_sync, 0) if layout is not None else 0,
                "replica_clock_off_seconds": context.clock.off_s,
                "replica_needs_operator": int(core.state is State.DAMAGED),
            }
        return samples
