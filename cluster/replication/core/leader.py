"""A leader in office: sends its log to every live replica and commits what the maximal in-sync set has synced. Pure.

    probing    one message without entries at a time, until a common entry is found
    streaming  entries leave as they come, up to `max_unacknowledged` messages ahead
    snapshot   the entries that the follower needs are trimmed: it gets the state, then the log

Source: docs/replication.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from cluster.replication.core.context import Context
from cluster.replication.core.events import (
    Accepted,
    CompareAndSet,
    Effect,
    Persisted,
    Propose,
    ReadState,
    Rejected,
    Rejection,
    ScanSegment,
    Send,
    SendSnapshot,
    SnapshotSent,
)
from cluster.replication.core.insync import InSync
from cluster.replication.core.messages import Append, Appended, Mismatch
from cluster.replication.model import Entry, MemberID, PartitionState, Position

MAX_PINS: Final = 64
"""Learners and snapshots that hold the log back. Policy: it is not held for further ones."""
NEVER: Final = float("-inf")
FORGIVENESS: Final = 0.1
"""Part of a member's time in sync and not late that is deducted from its waiting time before it is required again."""


class Mode(Enum):
    """Mode of sending to a follower."""

    PROBING = "probing"
    STREAMING = "streaming"
    SNAPSHOT = "snapshot"


@dataclass(slots=True)
class Progress:
    """The leader's knowledge of one follower."""

    incarnation: int
    sent: int
    """Entries up to here were sent, or are assumed to be there."""
    heard_at: float
    """Time of its last answer with which it held everything sent, or had advanced."""
    matched: int = 0
    """Last counter of our log that it has synced in this incarnation."""
    confirmed_at: float = NEVER
    """Our clock when we sent the message that it answered last: it took part in our epoch then."""
    moved_at: float = 0.0
    beat_at: float = 0.0
    mode: Mode = Mode.PROBING
    until: float = 0.0
    """In mode SNAPSHOT: time at which the snapshot is started again."""
    on_the_way: deque[tuple[int, float]] = field(default_factory=deque)
    """Last counter and sending time of each message with entries that is not acknowledged."""
    behind_since: float | None = None
    """First sending time of the oldest unacknowledged entry; sending it again does not reset this."""
    lowest: int | None = None
    """The lowest counter that was probed: a probe counts as progress only below it."""
    full: bool = False
    """It reports that its disk has no space."""
    space: bool = False
    """It reports that it has space to lead."""
    late: bool = False
    """Since the last tick it acknowledged an entry that was sent more than `slow_s` ago."""
    in_time: bool = False
    """Since the last tick it acknowledged an entry within `slow_s`."""
    late_s: float = 0.0
    """Seconds for which it has been late; falls as fast as it rose while it has everything or acknowledges in time."""
    unsure_s: float = 0.0
    """Seconds without any acknowledgement, late or in time; counts as late if the next one is."""
    steady_since: float | None = None
    """Time since when it is near our end and not late."""
    joined_at: float = 0.0
    clock: int | None = None
    """Its wall clock, in the form of `cluster.replication.core.clock`."""


class Leader:
    """One epoch in office.

    Args:
        context: shared data of the replica.
        version: version of the state that promoted it.
        state: that state.
        start: the counter of the epoch's first entry, which is durable.
        now: monotonic seconds.
    """

    def __init__(self, context: Context, version: int, state: PartitionState, start: int, now: float) -> None:
        self.context = context
        self.epoch = state.epoch
        self.start = start
        self.in_sync = InSync(context.member, version, state)
        self.followers: dict[MemberID, Progress] = {}
        self.synced = start
        self.draining = False
        self.full_at = NEVER
        """Time when a write last found no space here."""
        self._tickets: deque[tuple[int, int, float]] = deque()
        """Own pending syncs: (ticket, last counter, start time)."""
        self._own_late_at = float("-inf")
        """Time when a sync of our own disk last took more than `slow_s`."""
        self._rest_s: dict[MemberID, float] = {}
        """Members that left the set → seconds that they must keep up before they are required again."""
        self._token: int | None = None
        self._reading = False
        self._read_at = 0.0
        self._now = now
        self.set_live(now)

    # --- members

    def set_live(self, now: float) -> None:
        """Send to all live and all required members, and to no others."""
        wanted = (self.context.live.keys() | self.in_sync.maximal) - {self.context.member}
        for gone in [member for member in self.followers if member not in wanted]:
            del self.followers[gone]
        for member in sorted(wanted - self.followers.keys()):
            self.followers[member] = Progress(0, self.context.log.last.counter, now)

    def required(self) -> frozenset[MemberID]:
        """Members whose disks a commit needs."""
        return self.in_sync.maximal

    def holds_lease(self, now: float) -> bool:
        """True if no other replica can lead: every other required member confirmed this epoch recently enough."""
        oldest = now - self.context.options.lease_s
        return all(
            member in self.followers and self.followers[member].confirmed_at > oldest
            for member in self.required()
            if member != self.context.member
        )

    def heirs(self, now: float) -> list[MemberID]:
        """Members in sync to which this leader hands over. While it drains these are all; for some seconds after a write found no
        space here, those with space. After that, writes are tried here again in case none of them gets everything."""
        options, members = self.context.options, self.in_sync.state.in_sync
        if not self.draining and (now >= self.full_at + options.silence_s or len(members) <= options.min_in_sync):
            return []  # the usual case, and evaluated at every write
        others = sorted(member for member in members if member in self.followers)
        if self.draining:
            return others
        return [
            member for member in others
            if self.followers[member].space and self.context.is_live(member, self.followers[member].incarnation)
        ]  # fmt: skip

    # --- writes

    def propose(self, event: Propose, now: float, out: list[Effect]) -> None:
        """Append a batch, or reject it with a reason."""
        log, options = self.context.log, self.context.options
        last = log.last.counter
        if self.draining or self.heirs(now):
            out.append(Rejected(event.token, Rejection.DRAINING))
        elif last + len(event.payloads) - self.context.committed > options.max_uncommitted:
            out.append(Rejected(event.token, Rejection.OVERLOADED))
        elif event.replicated and len(self.in_sync.state.in_sync) < options.min_in_sync:
            out.append(Rejected(event.token, Rejection.TOO_FEW_IN_SYNC))
        elif (at_us := self._time_us(event.at_us, now)) is None:
            out.append(Rejected(event.token, Rejection.NO_TIME))
        else:
            epoch = self.epoch
            log.append([Entry(epoch, last + i, kind, at_us, body) for i, (kind, body) in enumerate(event.payloads, 1)])
            end = last + len(event.payloads)
            out.append(Accepted(event.token, epoch, last + 1, end))
            self._tickets.append((self.context.sync(out), end, now))
            for member in self.followers:
                self._pump(member, now, out)

    def _time_us(self, wall_us: int, now: float) -> int | None:
        """The time of an entry written now. None until every required member has reported its clock, and every other follower that
        is not silent. Only a leader that has heard no agreed time from an earlier one needs to ask."""
        clock = self.context.clock
        if not wall_us:
            return 0
        clock.saw(wall_us, now)
        if clock.agreed is None:
            others = {*self.required(), *self.followers} - {self.context.member}
            if any(self._may_still_tell(member, now) for member in others):
                return None
            self._judge()
        return clock.time_us(now)

    def _may_still_tell(self, member: MemberID, now: float) -> bool:
        """True if a member's clock is unknown and worth waiting for. That includes a member that is not in sync, which may be the
        only one with the right time."""
        progress = self.followers.get(member)
        if progress is not None and progress.confirmed_at != NEVER:
            return False
        return progress is None or member in self.required() or now < progress.heard_at + self.context.options.silence_s

    def _judge(self) -> None:
        self.context.clock.judge([progress.clock for progress in self.followers.values() if progress.clock is not None])

    def on_synced(self, now: float, out: list[Effect]) -> None:
        """Note that more of our own log is durable."""
        while self._tickets and self._tickets[0][0] <= self.context.synced:
            _, self.synced, since = self._tickets.popleft()
            if since < now - self.context.options.slow_s:
                self._own_late_at = now
            if not self._tickets or self._tickets[0][0] > self.context.synced:
                out.append(Persisted(self.synced))
        self._commit(now, out)

    def _commit(self, now: float, out: list[Effect]) -> None:
        """Commit what every required member has synced, while the lease shows that this is still the leader. With fewer disks than
        `min_in_sync`, no writer is informed that its write is replicated."""
        required = self.required()
        counter = self.synced
        for member in required:
            if member != self.context.member:
                counter = min(counter, self.followers[member].matched if member in self.followers else 0)
        if counter > self.context.committed and counter >= self.start and self.holds_lease(now):
            enough = len(required) >= self.context.options.min_in_sync
            self.context.commit(counter, len(required) if enough else 0, out)

    # --- followers

    def on_appended(self, reply: Appended, now: float, out: list[Effect]) -> None:
        """Handle a follower's acknowledgement, which may be a mere sign of life."""
        progress = self._answered(reply, now) if reply.matched <= self.context.log.last.counter else None
        if progress is None:
            return
        progress.space = reply.space
        if reply.matched > progress.matched:
            progress.matched = reply.matched
            progress.moved_at = progress.heard_at = now
            while progress.on_the_way and progress.on_the_way[0][0] <= reply.matched:
                late = progress.on_the_way.popleft()[1] < now - self.context.options.slow_s
                progress.late, progress.in_time = progress.late or late, not late
            progress.behind_since = progress.on_the_way[0][1] if progress.on_the_way else None
            if progress.mode is Mode.STREAMING:
                progress.sent = max(progress.sent, reply.matched)
            else:
                self._stream(progress, reply.matched)
        elif progress.mode is Mode.PROBING and reply.matched >= progress.sent:
            self._stream(progress, progress.sent)
        elif progress.matched >= progress.sent:
            progress.heard_at = now
        if progress.full:
            progress.mode, progress.sent, progress.behind_since = Mode.PROBING, progress.matched, None
            progress.on_the_way.clear()
        else:
            self._pump(reply.sender, now, out)
        self._let_join(reply.sender, progress, now)
        self._commit(now, out)

    @staticmethod
    def _stream(progress: Progress, sent: int) -> None:
        progress.mode, progress.sent = Mode.STREAMING, sent
        progress.on_the_way.clear()

    def on_mismatch(self, reply: Mismatch, now: float, out: list[Effect]) -> None:
        """Go back to a follower's hint, because it does not have the entry before a message's."""
        progress = self._answered(reply, now)
        if progress is None or progress.mode is Mode.SNAPSHOT:
            return
        back = max(progress.matched, reply.hint)
        first = self.context.log.first.counter
        if back < first < progress.sent:
            back = first  # before sending a snapshot, ask whether it has the oldest entry that is kept
        if back < progress.sent:
            progress.sent = back
            progress.mode = Mode.PROBING
            progress.on_the_way.clear()
            progress.moved_at = now
            if progress.lowest is None or back < progress.lowest:  # otherwise it was asked there before and has not moved
                progress.lowest, progress.heard_at = back, now
            self._probe(reply.sender, progress, now, out)

    def _answered(self, reply: Appended | Mismatch, now: float) -> Progress | None:
        progress = self.followers.get(reply.sender)
        if progress is None or reply.epoch != self.epoch or reply.incarnation < progress.incarnation:
            return None
        if reply.incarnation > progress.incarnation:  # it must show again what it had acknowledged before its start
            fresh = Progress(reply.incarnation, self.context.log.last.counter, progress.heard_at, moved_at=now)
            # A disk that hangs causes a new incarnation at each sync: the member is still as late.
            fresh.behind_since, fresh.late, fresh.late_s = progress.behind_since, progress.late, progress.late_s
            fresh.unsure_s = progress.unsure_s
            self.followers[reply.sender] = progress = fresh
        progress.confirmed_at = max(progress.confirmed_at, min(reply.sent_at, now))
        progress.full = reply.full
        if reply.wall_us:
            progress.clock = reply.wall_us - round(now * 1_000_000)
        return progress

    def _let_join(self, member: MemberID, progress: Progress, now: float) -> None:
        """Require a follower that has nearly caught up; ZooKeeper is asked when it has everything up to the present end."""
        if member in self.in_sync.maximal or self.draining or not self._is_steady(progress):
            return
        rest = self._rest_s.get(member, 0.0)
        steady = rest == 0.0 or (progress.steady_since is not None and now >= progress.steady_since + rest)
        if steady and self.context.is_live(member, progress.incarnation):
            progress.joined_at = now
            self.in_sync.join(member, self.context.log.last.counter)

    def _is_steady(self, progress: Progress) -> bool:
        """True if a follower stays near our end and is not late."""
        near = max(self.start, self.context.log.last.counter - self.context.options.join_within)
        return progress.mode is Mode.STREAMING and progress.matched >= near and not progress.full and progress.late_s == 0.0

    def _pump(self, member: MemberID, now: float, out: list[Effect]) -> None:
        """Send a streaming follower the entries that it may have next."""
        progress, options = self.followers[member], self.context.options
        end = self.context.log.last.counter
        while progress.mode is Mode.STREAMING and progress.sent < end and len(progress.on_the_way) < options.max_unacknowledged:
            if progress.sent < self.context.log.first.counter:
                self._send_snapshot(member, progress, now, out)
                return
            if not self._is_ready(progress.sent, out):
                return
            entries = self.context.log.read(progress.sent, options.max_append_entries, options.max_append_bytes)
            left_at = now
            if not progress.on_the_way:
                progress.moved_at = now
                progress.behind_since = left_at = now if progress.behind_since is None else progress.behind_since
            self._append(member, progress, entries, now, out)
            progress.sent += len(entries)
            progress.on_the_way.append((progress.sent, left_at))

    def _try_again(self, member: MemberID, progress: Progress, now: float, out: list[Effect]) -> None:
        """Send one message to a follower without space, to see whether it has some again."""
        log, options = self.context.log, self.context.options
        progress.moved_at = now
        if progress.mode is not Mode.PROBING or not log.first.counter <= progress.matched < log.last.counter:
            return
        if self._is_ready(progress.matched, out):
            progress.sent = progress.matched
            entries = log.read(progress.matched, options.max_append_entries, options.max_append_bytes)
            self._append(member, progress, entries, now, out)

    def _probe(self, member: MemberID, progress: Progress, now: float, out: list[Effect]) -> None:
        """Send a message without entries, to ask whether the follower has our entry at `sent`."""
        if progress.sent < self.context.log.first.counter:
            self._send_snapshot(member, progress, now, out)
        else:
            self._append(member, progress, (), now, out)

    def _is_ready(self, counter: int, out: list[Effect]) -> bool:
        """True if the log can be read after a counter at once. Otherwise a scan is requested, after which followers are served
        again."""
        if self.context.log.is_ready(counter):
            return True
        out.append(ScanSegment(counter))
        return False

    def on_scanned(self, now: float, out: list[Effect]) -> None:
        """Serve the followers that waited for an old part of the log."""
        for member, progress in self.followers.items():
            if progress.mode is Mode.PROBING:
                self._probe(member, progress, now, out)
            else:
                self._pump(member, now, out)

    def _append(self, member: MemberID, progress: Progress, entries: Sequence[Entry], now: float, out: list[Effect]) -> None:
        log = self.context.log
        previous: Position | None = None
        if progress.mode is not Mode.SNAPSHOT and self._is_ready(progress.sent, out):
            epoch = log.epoch_at(progress.sent)
            assert epoch is not None, "sent lies in the log"
            previous = Position(epoch, progress.sent)
        progress.beat_at = now
        context = self.context
        time_us = context.clock.time_us(now)
        message = Append(
            self.epoch, context.member, previous, entries, context.committed, log.last.counter, now, time_us,
            self.in_sync.state.forced,
        )  # fmt: skip
        out.append(Send(member, message))

    def _send_snapshot(self, member: MemberID, progress: Progress, now: float, out: list[Effect]) -> None:
        progress.mode, progress.behind_since = Mode.SNAPSHOT, None
        progress.until = now + self.context.options.snapshot_timeout_s
        progress.on_the_way.clear()
        out.append(SendSnapshot(member, self.epoch))
        self._append(member, progress, (), now, out)

    def on_snapshot_sent(self, event: SnapshotSent, now: float, out: list[Effect]) -> None:
        """Find out where the follower is, after a snapshot has arrived or failed."""
        progress = self.followers.get(event.member)
        if progress is None or progress.mode is not Mode.SNAPSHOT:
            return
        progress.mode = Mode.PROBING
        log = self.context.log
        if event.position is None:
            progress.sent = log.last.counter
        else:
            progress.sent = min(max(event.position.counter, log.first.counter), log.last.counter)
            progress.heard_at = progress.moved_at = now
        self._append(event.member, progress, (), now, out)

    # --- the in-sync set

    def silent(self, now: float) -> list[MemberID]:
        """Required members that have not answered, or not advanced, for too long."""
        oldest = now - self.context.options.silence_s
        others = sorted(self.in_sync.maximal - {self.context.member})
        return [member for member in others if member not in self.followers or self.followers[member].heard_at < oldest]

    def unfit(self, now: float) -> list[MemberID]:
        """Required members that a commit must not wait for: silent, without space, or slow while enough others remain."""
        options = self.context.options
        required = self.in_sync.maximal - {self.context.member}
        out = set(self.silent(now)) | {member for member in required if member in self.followers and self.followers[member].full}
        slow = sorted(member for member in required - out if self.followers[member].late_s >= options.slow_for_s)
        left = len(self.in_sync.state.in_sync - out) - options.min_in_sync
        return sorted(out | set(slow[: max(0, left)]))

    def revise(self, token: int, now: float, out: list[Effect]) -> bool:
        """Ask ZooKeeper for another set if a change is due. Returns whether the token was used."""
        if self._reading or self.in_sync.asking or self.draining:
            return False
        matched = {member: progress.matched for member, progress in self.followers.items()}
        target = self.in_sync.next_proposal(self.unfit(now), matched)
        if target is None:
            return False
        self._token = token
        out.append(CompareAndSet(token, self.in_sync.version, target))
        return True

    def on_swapped(self, token: int, ok: bool, now: float, out: list[Effect]) -> None:
        """Handle the outcome of a change of the set."""
        if token != self._token:
            return
        self._token = None
        if ok:
            before = self.in_sync.state.in_sync
            self.in_sync.succeeded()
            self._rest(before - self.in_sync.state.in_sync)
            self.set_live(now)
            self._commit(now, out)
        else:
            self.in_sync.failed()
            self.read(now, out)

    def read(self, now: float, out: list[Effect]) -> None:
        """Read the state; no change is requested until it has arrived."""
        self._reading = True
        self._read_at = now
        out.append(ReadState())

    def on_read(self, version: int, state: PartitionState, now: float, out: list[Effect]) -> None:
        """Adopt ZooKeeper's set. It still names this leader in this epoch."""
        if version < self.in_sync.version:
            return
        self._reading = False
        if version > self.in_sync.version:
            self._token = None
            self._rest(self.in_sync.state.in_sync - state.in_sync)
            self.in_sync.adopt(version, state)
            self.set_live(now)
            self._commit(now, out)

    def _rest(self, left: Collection[MemberID]) -> None:
        """Set the time that members which left must keep up before they are required again; it doubles each time."""
        options = self.context.options
        for member in left:
            self._rest_s[member] = min(options.max_rejoin_s, max(options.rejoin_s, 2 * self._rest_s.get(member, 0.0)))

    # --- time

    def _watch(self, elapsed: float, now: float) -> None:
        """Update which members are late, since when each has kept up, and which are forgiven."""
        options = self.context.options
        oldest = now - options.slow_s
        if self._tickets and self._tickets[0][2] < oldest:
            self._own_late_at = now
        own_late = now < self._own_late_at + options.slow_for_s
        for member, progress in self.followers.items():
            late = progress.late or (progress.behind_since is not None and progress.behind_since < oldest)
            well = progress.in_time or progress.behind_since is None  # a message on its way that is not late yet proves nothing
            progress.late = progress.in_time = False
            if late and not own_late:
                progress.late_s = min(options.slow_for_s, progress.late_s + progress.unsure_s + elapsed)
            elif well:
                progress.late_s = max(0.0, progress.late_s - elapsed)
            progress.unsure_s = 0.0 if late or well or own_late else progress.unsure_s + elapsed
            if not self._is_steady(progress):
                progress.steady_since = None
            elif progress.steady_since is None:
                progress.steady_since = now
            if member in self.in_sync.state.in_sync and member in self._rest_s and progress.late_s == 0.0:
                self._rest_s[member] -= elapsed * FORGIVENESS
                if self._rest_s[member] <= 0:
                    del self._rest_s[member]
            if member in self.in_sync.joining and now >= progress.joined_at + options.join_s and self.in_sync.give_up(member):
                self._rest({member})

    def on_tick(self, now: float, out: list[Effect]) -> None:
        """Send heartbeats, repeat entries, and restart snapshots that take too long."""
        options = self.context.options
        asleep = now - self._now
        self._now = now
        self._watch(min(asleep, options.lease_s), now)
        if self.context.clock.agreed is not None:
            self._judge()
        for member, progress in self.followers.items():
            if asleep > options.lease_s:  # this process was stopped: the others were not silent during that time
                progress.heard_at += asleep
            if progress.mode is Mode.SNAPSHOT and now >= progress.until:
                progress.mode = Mode.PROBING
                progress.sent = self.context.log.last.counter
            if progress.full and now >= progress.moved_at + options.resend_s:
                self._try_again(member, progress, now, out)
            if progress.mode is Mode.STREAMING and progress.matched < progress.sent and now >= progress.moved_at + options.resend_s:
                progress.sent, progress.moved_at = progress.matched, now
                progress.on_the_way.clear()
                self._pump(member, now, out)
            if now >= progress.beat_at + options.heartbeat_s / 2:
                if progress.mode is Mode.SNAPSHOT:
                    self._append(member, progress, (), now, out)
                else:
                    self._probe(member, progress, now, out)
        if self._reading and now >= self._read_at + options.poll_s:
            self.read(now, out)
        self._commit(now, out)

    def keep_after(self) -> int:
        """Counter after which a live follower needs the log, within the limits."""
        log = self.context.log
        live = [p.matched for m, p in self.followers.items() if m in self.context.live and p.mode is Mode.STREAMING]
        options, needed = self.context.options, min(live, default=log.last.counter)
        if needed == log.last.counter:
            return needed
        return max(needed, log.last.counter - options.max_kept, log.kept_within(options.max_kept_bytes))
