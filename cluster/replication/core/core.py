"""A replica of a partition of Xiu or Pi: who leads, who follows, and what is committed. Pure.

ZooKeeper holds {epoch, leader, incarnation, in_sync} and changes it by compare-and-set only; the leader's log is the
truth of its epoch. `TABLE` says which state follows which, and docs/replication_states.md draws it.

Source: docs/replication.md; PiXiu §6.1.3 and §6.2.3. docs/sources.md lists where it departs from them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cluster.replication.core.context import Context
from cluster.replication.core.events import (
    Audit,
    CloseSession,
    CompareAndSet,
    CompareAndSetOutcome,
    Deposed,
    Drain,
    Effect,
    Event,
    Flushed,
    ForcePromotion,
    HandedOver,
    Leading,
    LogDropped,
    LogFailed,
    OutOfSpace,
    Pinned,
    PresenceChanged,
    Propose,
    ReadState,
    Received,
    Rejected,
    Rejection,
    ReportDamage,
    SegmentRotten,
    SegmentScanned,
    Send,
    SessionLost,
    SessionStarted,
    SnapshotReceived,
    SnapshotSent,
    StateRead,
    StateUnread,
    Swapped,
    Synced,
    Tick,
)
from cluster.replication.core.follower import Contradiction, Follower
from cluster.replication.core.leader import MAX_PINS, Leader
from cluster.replication.core.messages import Append, Appended, Message, Mismatch, Refused
from cluster.replication.core.states import Cause, State
from cluster.replication.model import (
    MAX_FORCED,
    NOBODY,
    Damage,
    Entry,
    EntryKind,
    Forced,
    Log,
    MemberID,
    PartitionState,
    Position,
    Versioned,
)
from cluster.replication.options import ReplicationOptions
from pixiu.errors import DiskFull, LogDamaged, StorageError


class Core:
    """Decides what a replica does. `step` never raises because of input from the network or the disk.

    Args:
        member: ID of the data directory.
        incarnation: number of this start, higher than all before.
        log: opened; broken entries are already cut off, and `unclean` is set if `damage` is given.
        options: validated.
        applied: last counter that the state holds.
        now: monotonic seconds.
        damage: damage found when the log was opened.
    """

    def __init__(
        self,
        *,
        member: MemberID,
        incarnation: int,
        log: Log,
        options: ReplicationOptions,
        applied: int,
        now: float,
        damage: Damage | None = None,
    ) -> None:
        self.context = Context(member, incarnation, log, options, applied)
        self.state = State.LEAVING if log.unclean else State.FOLLOWING
        self.leader: Leader | None = None
        self.follower = self.make_follower(now)
        self.leader_id: MemberID | None = None
        """The leader that this replica follows."""
        self.damage = damage
        self._ticked_at = now
        self._token = 0
        self._swap: tuple[int, int, PartitionState] | None = None
        """Pending compare-and-set of a replica that does not lead: (token, expected version, state)."""
        self._office: tuple[int, int, PartitionState, int] | None = None
        """Office that was won and not taken yet: (ticket, version, state, counter of the first entry)."""
        self._vacant_since: float | None = None
        self._read_at = float("-inf")
        self._told_at = float("-inf")
        """Time of ZooKeeper's last answer."""
        self.draining = False
        self._force: ForcePromotion | None = None
        self._pins: dict[str, int] = {}
        self._flushed = applied
        self._session = False
        self._refused_epoch = 0
        """An epoch that some replica has promised, maybe to a leader that ZooKeeper has lost: nobody leads in it again."""
        self._halted_by = ""
        self._handlers: dict[type[Any], Callable[[Any, float, list[Effect]], None]] = {
            SessionStarted: self._on_session_started,
            SessionLost: self._on_session_lost,
            StateRead: self._on_state_read,
            StateUnread: self._on_state_unread,
            Swapped: self._on_swapped,
            PresenceChanged: self._on_presence,
            Received: self._on_received,
            Synced: self._on_synced,
            LogFailed: self._on_log_failed,
            SegmentRotten: self._on_segment_rotten,
            SegmentScanned: self._on_segment_scanned,
            Propose: self._on_propose,
            Flushed: self._on_flushed,
            Pinned: self._on_pinned,
            SnapshotSent: self._on_snapshot_sent,
            SnapshotReceived: self._on_snapshot_received,
            Drain: self._on_drain,
            ForcePromotion: self._on_force,
            Tick: self._on_tick,
            OutOfSpace: self._on_out_of_space,
        }

    # --- parts, made here so that tests can replace them

    def make_follower(self, now: float) -> Follower:
        """Make the part that follows."""
        return Follower(self.context, now)

    def make_leader(self, version: int, state: PartitionState, start: int, now: float) -> Leader:
        """Make the part that leads for one epoch."""
        return Leader(self.context, version, state, start, now)

    # --- interface

    def step(self, event: Event, now: float) -> list[Effect]:
        """Handle one event; `now` is monotonic seconds. Returns the effects, to be performed in order."""
        out: list[Effect] = []
        if self.state is State.HALTED:
            if isinstance(event, Propose):
                out.append(Rejected(event.token, Rejection.NOT_LEADER))
            return out
        try:
            self._handlers[type(event)](event, now, out)
        except DiskFull:
            if isinstance(event, Propose):
                out.append(Rejected(event.token, Rejection.DRAINING if self.leaves_for_space(now) else Rejection.DISK_FULL))
            elif self.state is State.TAKING_OFFICE:  # it cannot lead without its first entry: another replica may
                self._break("the disk is full", now, out)
            # A follower has not acknowledged: the leader sends the entries again.
        except LogDamaged as damage:
            if not self._drop_rotten(damage.last, str(damage), out):
                self._break(str(damage), now, out)
        except (Contradiction, StorageError) as problem:
            self._break(str(problem), now, out)
        return out

    def _break(self, reason: str, now: float, out: list[Effect]) -> None:
        self._halted_by = reason
        self._change(Cause.BROKEN, now, out)

    def next_deadline(self) -> float:
        """Time at which `Tick` is due, monotonic seconds."""
        options = self.context.options
        return self._ticked_at + (
            options.heartbeat_s if self.leader is not None or self._vacant_since is not None else options.poll_s
        )

    def may_read(self, now: float) -> bool:
        """True if no other replica can have committed more than is committed here."""
        leader = self.leader
        return (
            leader is not None
            and self.state is State.LEADING
            and self.context.committed >= leader.start
            and leader.holds_lease(now)
        )

    @property
    def epoch(self) -> int:
        """The highest epoch known to this replica."""
        return self.context.log.promised

    @property
    def halted_by(self) -> str:
        """Reason why the replica halted; empty if it has not."""
        return self._halted_by

    # --- the state table's actions

    def _change(self, cause: Cause, now: float, out: list[Effect]) -> None:
        self.state, action = TABLE[self.state, cause]
        action(self, now, out)

    def _seek(self, now: float, out: list[Effect]) -> None:
        """Ask ZooKeeper for the next epoch"""
        read = self.context.read
        assert read is not None
        before = read.state
        member = self.context.member
        in_sync = frozenset({member})
        if before is not None and self._force is None:
            in_sync |= {other for other in before.in_sync if other in self.context.live}
        epoch = max(before.epoch if before is not None else 0, self.epoch if self._force else 0, self._refused_epoch) + 1
        forced = before.forced if before is not None else ()
        if self._force is not None:
            end = self.context.end
            forced = (*[each for each in forced if each.epoch <= end.epoch], Forced(epoch, end))[-MAX_FORCED:]
        self._ask(read.version, PartitionState(epoch, member, self.context.incarnation, in_sync, forced), out)

    def _win(self, now: float, out: list[Effect]) -> None:
        """Persist the promise and the epoch's first entry"""
        assert self._swap is not None
        _, version, state = self._swap
        self._swap = None
        log = self.context.log
        self.context.promise_epoch(state.epoch, out)
        if self._force is not None:
            self._force = None
            log.set_unclean(False)
            if self.context.committed > log.last.counter:  # the state has entries that the log lost: their counters are taken
                log.reset(Position(state.epoch, self.context.committed))
        self.open_epoch(state.epoch)
        self._office = (self.context.sync(out), version + 1, state, log.last.counter)

    def open_epoch(self, epoch: int) -> None:
        """Append the first entry of an epoch."""
        log = self.context.log
        log.append([Entry(epoch, log.last.counter + 1, EntryKind.NOOP, 0, b"")])

    def _take_office(self, now: float, out: list[Effect]) -> None:
        """Serve"""
        assert self._office is not None
        _, version, state, start = self._office
        self._office = None
        self.leader_id = self.context.member
        self.leader = self.make_leader(version, state, start, now)
        out.append(Leading(state.epoch))
        self.leader.on_synced(now, out)
        self.leader.on_tick(now, out)

    def _step_down(self, now: float, out: list[Effect]) -> None:
        """Stop serving, read the state"""
        if self.leader is not None:
            out.append(Deposed(self.leader.epoch))
        self.leader, self._office, self._swap = None, None, None
        self.leader_id = None
        confirmed_at = self.follower.confirmed_at
        self.follower = self.make_follower(now)
        self.follower.confirmed_at = confirmed_at
        self._read(now, out)

    def _release(self, now: float, out: list[Effect]) -> None:
        """Stop serving, ask ZooKeeper to write that nobody leads, and to require this replica no longer"""
        assert self.leader is not None
        before, version = self.leader.in_sync.state, self.leader.in_sync.version
        state = replace(before, leader=NOBODY, incarnation=0, in_sync=before.in_sync - {self.context.member})
        self._step_down(now, out)
        self._ask(version, state, out)

    def _withdraw(self, now: float, out: list[Effect]) -> None:
        """Ask ZooKeeper to require this replica no longer, so that nobody waits for its silence"""
        read = self.context.read
        assert read is not None
        assert read.state is not None
        left = replace(read.state, in_sync=read.state.in_sync - {self.context.member})
        self._ask(read.version, left, out)

    def _released(self, now: float, out: list[Effect]) -> None:
        """Say that a drain is over, follow after a full disk"""
        self._swap = None
        if self.draining:
            out.append(HandedOver())
        else:
            self._read(now, out)

    def _lose(self, now: float, out: list[Effect]) -> None:
        """Read the state"""
        self._swap, self._force = None, None
        if self.context.log.unclean:
            self._change(Cause.UNCLEAN, now, out)
        else:
            self._read(now, out)

    def _halt(self, now: float, out: list[Effect]) -> None:
        """Leave the registry, promise nothing more"""
        if self.leader is not None:
            out.append(Deposed(self.leader.epoch))
        self.leader, self._office, self._swap = None, None, None
        out.append(CloseSession(self._halted_by))

    def _report(self, now: float, out: list[Effect]) -> None:
        """Say what is missing, wait for an operator"""
        if self.damage is not None:
            out.append(ReportDamage(self.damage, sole=True))

    def _begin_repair(self, now: float, out: list[Effect]) -> None:
        """Take the log from a leader"""
        if self.damage is not None:
            out.append(ReportDamage(self.damage, sole=False))

    def _reconsider(self, now: float, out: list[Effect]) -> None:
        """Read the state"""
        self._read(now, out)

    def _repaired(self, now: float, out: list[Effect]) -> None:
        """May join and lead again"""
        self.damage = None

    # --- the registry

    def _on_session_started(self, event: SessionStarted, now: float, out: list[Effect]) -> None:
        self._session = True
        self.context.incarnation = event.incarnation
        if self.leader is not None or self._office is not None:  # the state names the previous incarnation
            self._change(Cause.FENCED, now, out)
        else:
            self._read(now, out)

    def _on_session_lost(self, event: SessionLost, now: float, out: list[Effect]) -> None:
        self._session = False
        if self.leader is not None or self._office is not None:
            self._change(Cause.FENCED, now, out)

    def _on_presence(self, event: PresenceChanged, now: float, out: list[Effect]) -> None:
        self.context.live = {presence.member: presence for presence in event.live}
        if self.leader is not None:
            self.leader.set_live(now)
        self._look(now, out)

    def _on_state_unread(self, event: StateUnread, now: float, out: list[Effect]) -> None:
        """Do nothing: the next tick reads again."""

    def _on_state_read(self, event: StateRead, now: float, out: list[Effect]) -> None:
        read, context = event.read, self.context
        self._told_at = now
        if context.read is not None and read.version < context.read.version:
            return
        context.read = read
        state = read.state
        leader = self.leader
        if leader is not None and state is not None:
            if state.epoch == leader.epoch and state.leader == context.member:
                leader.on_read(read.version, state, now, out)
            elif state.epoch >= leader.epoch:
                self._change(Cause.FENCED, now, out)
            return
        if self._office is not None and state is not None and state.epoch > self._office[2].epoch:
            self._change(Cause.FENCED, now, out)
        if state is not None and state.epoch > context.log.promised and self.state is not State.SEEKING:
            context.promise_epoch(state.epoch, out)
        if self._force is not None:
            self._seek_by_force(out, now)
        elif self.state is State.FOLLOWING and state is not None and self._went_back(state, out):
            self._change(Cause.UNCLEAN, now, out)
        elif self.state is State.LEAVING:
            self._leave(read, now, out)
        elif self.state is State.REPAIRING and state is not None and context.member in state.in_sync:
            self._change(Cause.UNCLEAN, now, out)  # the leader's proposal from before the damage was applied late
        elif self.state is State.DAMAGED and (state is None or state.in_sync != {context.member}):
            self._change(Cause.OTHERS_IN_SYNC, now, out)
        self._look(now, out)

    def _went_back(self, state: PartitionState, out: list[Effect]) -> bool:
        """True if this replica led in an incarnation that its folder does not know. The folder is then an older copy, and entries
        that were acknowledged since are missing."""
        context, last = self.context, self.context.log.last
        if state.leader != context.member or state.incarnation <= context.incarnation:
            return False
        reason = f"it led as incarnation {state.incarnation} and is {context.incarnation}: its folder was replaced by an older copy"
        self.damage = Damage(last, last, reason)
        context.log.set_unclean(True)
        context.sync(out)
        return True

    def _leave(self, read: Versioned, now: float, out: list[Effect]) -> None:
        """Leave the in-sync set, which an unclean replica does before anything else."""
        state, member = read.state, self.context.member
        if state is None or member not in state.in_sync:
            self._change(Cause.NOT_A_MEMBER, now, out)
        elif state.in_sync == {member}:
            self._change(Cause.SOLE_MEMBER, now, out)
        elif self._swap is None:
            left = replace(state, in_sync=state.in_sync - {member})
            if state.leader == member:
                left = replace(left, leader=NOBODY, incarnation=0)
            self._ask(read.version, left, out)

    def _read(self, now: float, out: list[Effect]) -> None:
        self._read_at = now
        out.append(ReadState())

    def _ask(self, version: int, state: PartitionState, out: list[Effect]) -> None:
        self._token += 1
        self._swap = (self._token, version, state)
        out.append(CompareAndSet(self._token, version, state))

    def _on_swapped(self, event: Swapped, now: float, out: list[Effect]) -> None:
        ok = event.outcome is CompareAndSetOutcome.OK
        if self._swap is None or self._swap[0] != event.token:
            if self.leader is not None:
                self.leader.on_swapped(event.token, ok, now, out)
            return
        if self.state is State.SEEKING:
            self._change(Cause.WON if ok else Cause.NOT_WON, now, out)
        elif self.state is State.HANDING_OVER:
            if ok:  # otherwise it would take itself for a leader that is gone
                self.context.read = Versioned(self._swap[1] + 1, self._swap[2])
            self._change(Cause.RELEASED, now, out)
        else:
            self._swap = None
            self._read(now, out)

    # --- promotion

    def _look(self, now: float, out: list[Effect]) -> None:
        """Seek promotion if there is no leader and it is this replica's turn."""
        if self.state is not State.FOLLOWING or self.draining or not self._session or self.context.read is None:
            self._vacant_since = None
            return
        read, context, options = self.context.read, self.context, self.context.options
        state = read.state
        if not context.is_live(context.member, context.incarnation):
            self._vacant_since = None
            return
        if state is None:
            if not self.waits_for_data:
                self._change(Cause.VACANT, now, out)
            return
        gone = state.leader in (NOBODY, context.member) or not context.is_live(state.leader, state.incarnation)
        if not gone or context.member not in state.in_sync or not self.is_clean():
            self._vacant_since = None
            return
        if self._vacant_since is None:
            self._vacant_since = now
        mine = context.live[context.member].node
        # A replica without space for a first entry comes after all others.
        others = [context.live[m] for m in state.in_sync if m in context.live and m != context.member]
        before = sum(1 for other in others if other.node < mine or not context.space)
        if now < self._vacant_since + before * options.candidate_step_s:
            return
        if state.leader != NOBODY and now < self.follower.confirmed_at + options.confirm_wait_s:
            return
        self._vacant_since = None
        self._change(Cause.VACANT, now, out)

    @property
    def waits_for_data(self) -> bool:
        """True if ZooKeeper has no state although a live replica has data: it was lost, and no replica may start anew by itself."""
        context = self.context
        if context.read is None or context.read.state is not None:
            return False
        return bool(context.log.last.counter or any(each.end for each in context.live.values() if each.member != context.member))

    def is_clean(self) -> bool:
        """True if no acknowledged entry is missing here."""
        return not self.context.log.unclean

    def _on_force(self, event: ForcePromotion, now: float, out: list[Effect]) -> None:
        if self.state in (State.FOLLOWING, State.LEAVING, State.REPAIRING, State.DAMAGED):
            self._force = event
            self._read(now, out)

    def _seek_by_force(self, out: list[Effect], now: float) -> None:
        force, read = self._force, self.context.read
        assert force is not None
        assert read is not None
        if self.state in (State.FOLLOWING, State.LEAVING, State.REPAIRING, State.DAMAGED) and self._session:
            out.append(Audit(force.operator, force.reason, self.context.log.last, read.state))
            self._change(Cause.FORCED, now, out)

    # --- messages

    def _on_received(self, event: Received, now: float, out: list[Effect]) -> None:
        message: Message = event.message
        if isinstance(message, Append):
            self._on_append(message, now, out)
            return
        leader = self.leader
        if leader is None:
            return
        if message.epoch > leader.epoch:
            if isinstance(message, Refused):
                self._refused_epoch = message.epoch
            self._change(Cause.FENCED, now, out)
        elif isinstance(message, Appended):
            leader.on_appended(message, now, out)
        elif isinstance(message, Mismatch):
            leader.on_mismatch(message, now, out)

    def _on_append(self, message: Append, now: float, out: list[Effect]) -> None:
        promised = self.context.log.promised
        if message.epoch < promised:
            out.append(Send(message.sender, Refused(promised, self.context.member)))
            return
        if self.leader is not None or self._office is not None:
            mine = self.leader.epoch if self.leader is not None else promised
            if message.epoch <= mine:
                return
            self._change(Cause.FENCED, now, out)
        # A replica that may be promoted at any moment, or may lack acknowledged entries, confirms nothing to a leader.
        if self.state in (State.FOLLOWING, State.REPAIRING) and not self._forsakes(message.epoch, now):
            self.leader_id = message.sender
            self.follower.on_append(message, now, out)
            self._check_repair(now, out)

    def _forsakes(self, epoch: int, now: float) -> bool:
        """True if the leader has been out of the registry so long that another must lead: no new client finds it, and it cannot
        remove members from the set. Always false while this replica itself cannot reach ZooKeeper, because its absence would stop
        all writes."""
        options = self.context.options
        return (
            epoch == self.context.log.promised
            and self._vacant_since is not None
            and now >= self._vacant_since + options.unregistered_s
            and now < self._told_at + 3 * options.poll_s
        )

    def hears_leader(self, now: float) -> bool:
        """True if the leader that ZooKeeper names answers, whatever the registry shows."""
        read = self.context.read
        known = read is not None and read.state is not None and read.state.leader == self.leader_id
        return known and self.state is State.FOLLOWING and now < self.follower.confirmed_at + self.context.options.lease_s

    def _check_repair(self, now: float, out: list[Effect]) -> None:
        if self.state is State.REPAIRING and self.is_clean():
            self._change(Cause.WHOLE, now, out)

    def _on_synced(self, event: Synced, now: float, out: list[Effect]) -> None:
        self.context.synced = max(self.context.synced, event.ticket)
        if self._office is not None and self._office[0] <= self.context.synced:
            self._change(Cause.FIRST_ENTRY_SYNCED, now, out)
        elif self.leader is not None:
            self.leader.on_synced(now, out)
        elif self.state in (State.FOLLOWING, State.REPAIRING):
            self.follower.on_synced(self.leader_id, now, out)
            self._check_repair(now, out)

    def _on_log_failed(self, event: LogFailed, now: float, out: list[Effect]) -> None:
        self._break(event.reason, now, out)

    def _on_propose(self, event: Propose, now: float, out: list[Effect]) -> None:
        if self.leader is None or self.state is not State.LEADING:
            out.append(Rejected(event.token, Rejection.DRAINING if self.draining else Rejection.NOT_LEADER))
        else:
            self.leader.propose(event, now, out)

    # --- snapshots and trimming

    def _on_snapshot_sent(self, event: SnapshotSent, now: float, out: list[Effect]) -> None:
        if self.leader is not None:
            self.leader.on_snapshot_sent(event, now, out)

    def _on_snapshot_received(self, event: SnapshotReceived, now: float, out: list[Effect]) -> None:
        if self.state in (State.FOLLOWING, State.REPAIRING):
            self.follower.on_snapshot(event, now, out)

    def _on_flushed(self, event: Flushed, now: float, out: list[Effect]) -> None:
        self._flushed = max(self._flushed, min(event.counter, self.context.committed))
        self._trim()

    def _on_pinned(self, event: Pinned, now: float, out: list[Effect]) -> None:
        if event.counter is None:
            self._pins.pop(event.name, None)
        elif event.name in self._pins or len(self._pins) < MAX_PINS:
            self._pins[event.name] = event.counter
        self._trim()

    def _on_segment_rotten(self, event: SegmentRotten, now: float, out: list[Effect]) -> None:
        """Drop a rotten segment if possible. One that the state does not hold durably yet is checked again later, or when it is
        read."""
        if self._drop_rotten(event.last, "a segment was read again and is broken", out) and self.leader is not None:
            self.leader.on_scanned(now, out)

    def _on_segment_scanned(self, event: SegmentScanned, now: float, out: list[Effect]) -> None:
        if self.leader is not None:
            self.leader.on_scanned(now, out)

    def _drop_rotten(self, last: int, reason: str, out: list[Effect]) -> bool:
        """Drop a broken segment and everything before it if the state holds these entries durably. A follower that needs them gets
        a snapshot. Returns whether the segment was dropped."""
        log = self.context.log
        if not log.first.counter < last <= min(self._flushed, self.context.committed) or last >= log.last.counter:
            return False
        log.trim(last)
        out.append(LogDropped(last, reason))
        return log.first.counter >= last

    def _trim(self) -> None:
        keep = min([self._flushed, *self._pins.values()])
        if self.leader is not None:
            keep = min(keep, self.leader.keep_after())
        if keep > self.context.log.first.counter:
            self.context.log.trim(keep)

    # --- leaving office

    def _on_drain(self, event: Drain, now: float, out: list[Effect]) -> None:
        self.draining = True
        if self.leader is not None:
            self.leader.draining = True
            self._hand_over(now, out)
            return
        state = self.context.read.state if self.context.read is not None else None
        member = self.context.member
        required = state is not None and member in state.in_sync and state.leader not in (NOBODY, member)
        if self.state is State.FOLLOWING and required:
            self._change(Cause.DRAINING, now, out)
        elif self.state is not State.HANDING_OVER:
            out.append(HandedOver())

    def leaves_for_space(self, now: float) -> bool:
        """Note that there is no space for a write. Returns whether this leader is about to hand over because of that."""
        leader = self.leader
        if leader is None:
            return False
        if now < self._told_at + 6 * self.context.options.poll_s:  # without ZooKeeper the hand-over could not be recorded
            leader.full_at = now
        return bool(leader.heirs(now))

    def _on_out_of_space(self, event: OutOfSpace, now: float, out: list[Effect]) -> None:
        self.leaves_for_space(now)

    def _hand_over(self, now: float, out: list[Effect]) -> None:
        """Release the office when another member of ZooKeeper's set holds the whole log."""
        leader = self.leader
        if leader is None or leader.in_sync.asking:
            return
        end = self.context.log.last.counter
        if self.context.committed == end and any(leader.followers[member].matched == end for member in leader.heirs(now)):
            self._change(Cause.CAUGHT_UP, now, out)

    # --- time

    def _on_tick(self, event: Tick, now: float, out: list[Effect]) -> None:
        self._ticked_at = now
        if event.wall_us:
            self.context.clock.saw(event.wall_us, now)
        self.context.space = event.space
        leader = self.leader
        poll_s = self.context.options.poll_s
        if leader is not None:
            leader.on_tick(now, out)
            if now >= self._read_at + 5 * poll_s:  # a watch may be missed
                self._read(now, out)
            if leader.revise(self._token + 1, now, out):
                self._token += 1
            self._hand_over(now, out)
            return
        open_question = self.context.read is None or self._vacant_since is not None or self.state is not State.FOLLOWING
        if now >= self._read_at + (poll_s if open_question else 5 * poll_s):
            self._read(now, out)
        self._look(now, out)


_Row = tuple[State, Callable[[Core, float, list[Effect]], None]]
TABLE: dict[tuple[State, Cause], _Row] = {
    (State.FOLLOWING, Cause.VACANT): (State.SEEKING, Core._seek),
    (State.SEEKING, Cause.WON): (State.TAKING_OFFICE, Core._win),
    (State.SEEKING, Cause.NOT_WON): (State.FOLLOWING, Core._lose),
    (State.TAKING_OFFICE, Cause.FIRST_ENTRY_SYNCED): (State.LEADING, Core._take_office),
    (State.TAKING_OFFICE, Cause.FENCED): (State.FOLLOWING, Core._step_down),
    (State.LEADING, Cause.FENCED): (State.FOLLOWING, Core._step_down),
    (State.LEADING, Cause.CAUGHT_UP): (State.HANDING_OVER, Core._release),
    (State.FOLLOWING, Cause.DRAINING): (State.HANDING_OVER, Core._withdraw),
    (State.HANDING_OVER, Cause.RELEASED): (State.FOLLOWING, Core._released),
    (State.FOLLOWING, Cause.UNCLEAN): (State.LEAVING, Core._reconsider),
    (State.REPAIRING, Cause.UNCLEAN): (State.LEAVING, Core._reconsider),
    (State.LEAVING, Cause.NOT_A_MEMBER): (State.REPAIRING, Core._begin_repair),
    (State.LEAVING, Cause.SOLE_MEMBER): (State.DAMAGED, Core._report),
    (State.DAMAGED, Cause.OTHERS_IN_SYNC): (State.LEAVING, Core._reconsider),
    (State.REPAIRING, Cause.WHOLE): (State.FOLLOWING, Core._repaired),
    (State.FOLLOWING, Cause.FORCED): (State.SEEKING, Core._seek),
    (State.LEAVING, Cause.FORCED): (State.SEEKING, Core._seek),
    (State.REPAIRING, Cause.FORCED): (State.SEEKING, Core._seek),
    (State.DAMAGED, Cause.FORCED): (State.SEEKING, Core._seek),
    **{(state, Cause.BROKEN): (State.HALTED, Core._halt) for state in State if state is not State.HALTED},
}
