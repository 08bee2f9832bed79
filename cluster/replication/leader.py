"""A leader in office: sends its log to every live replica, commits what the maximal in-sync set has synced. Pure.

    probing    one message without entries at a time, until the follower has an entry that we have too
    streaming  entries leave as they come, up to `max_unacknowledged` messages ahead
    snapshot   what the follower needs is trimmed: it gets the state, then the log

Source: docs/replication.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from cluster.replication.context import Context
from cluster.replication.events import (
    Accepted,
    CompareAndSet,
    Effect,
    Persisted,
    Propose,
    ReadState,
    Rejected,
    Rejection,
    Send,
    SendSnapshot,
    SnapshotSent,
)
from cluster.replication.insync import InSync
from cluster.replication.messages import Append, Appended, Mismatch
from cluster.replication.model import Entry, MemberID, PartitionState, Position

MAX_PINS: Final = 64
"""Learners and snapshots that hold the log back. Policy: a further one is not held for."""


class Mode(Enum):
    """How a follower is sent to."""

    PROBING = "probing"
    STREAMING = "streaming"
    SNAPSHOT = "snapshot"


@dataclass(slots=True)
class Progress:
    """What the leader knows of one follower."""

    incarnation: int
    sent: int
    """Entries up to here left, or are believed to be there."""
    heard_at: float
    """When it last answered and either held everything that was sent or had moved on."""
    matched: int = 0
    """It has synced our log up to here, in this incarnation."""
    confirmed_at: float = float("-inf")
    """Our clock when we sent what it answered last: it took part in our epoch then."""
    moved_at: float = 0.0
    beat_at: float = 0.0
    mode: Mode = Mode.PROBING
    until: float = 0.0
    """In mode SNAPSHOT: when it is begun again."""
    on_the_way: deque[int] = field(default_factory=deque)
    """The last counter of each message with entries that is not acknowledged."""


class Leader:
    """One epoch in office.

    Args:
        context: the replica.
        version: of the state that promoted it.
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
        self._tickets: deque[tuple[int, int]] = deque()
        self._token: int | None = None
        self._reading = False
        self._read_at = 0.0
        self._now = now
        self.set_live(now)

    # --- who is there

    def set_live(self, now: float) -> None:
        """Send to whoever is live or required, and to nobody else."""
        wanted = (self.context.live.keys() | self.in_sync.maximal) - {self.context.member}
        for gone in [member for member in self.followers if member not in wanted]:
            del self.followers[gone]
        for member in sorted(wanted - self.followers.keys()):
            self.followers[member] = Progress(0, self.context.log.last.counter, now)

    def required(self) -> frozenset[MemberID]:
        """Whose disks a commit needs."""
        return self.in_sync.maximal

    def holds_lease(self, now: float) -> bool:
        """Whether no other replica can lead: every other required member confirmed this epoch lately enough."""
        oldest = now - self.context.options.lease_s
        return all(
            member in self.followers and self.followers[member].confirmed_at > oldest
            for member in self.required()
            if member != self.context.member
        )

    # --- writes

    def propose(self, event: Propose, now: float, out: list[Effect]) -> None:
        """Append a batch, or say why not."""
        log, options = self.context.log, self.context.options
        last = log.last.counter
        if self.draining:
            out.append(Rejected(event.token, Rejection.DRAINING))
        elif last + len(event.payloads) - self.context.committed > options.max_uncommitted:
            out.append(Rejected(event.token, Rejection.OVERLOADED))
        elif event.replicated and len(self.in_sync.state.in_sync) < options.min_in_sync:
            out.append(Rejected(event.token, Rejection.TOO_FEW_IN_SYNC))
        else:
            epoch, at_us = self.epoch, event.at_us
            log.append([Entry(epoch, last + i, kind, at_us, body) for i, (kind, body) in enumerate(event.payloads, 1)])
            end = last + len(event.payloads)
            out.append(Accepted(event.token, epoch, last + 1, end))
            self._tickets.append((self.context.sync(out), end))
            for member in self.followers:
                self._pump(member, now, out)

    def on_synced(self, now: float, out: list[Effect]) -> None:
        """More of the own log is durable."""
        while self._tickets and self._tickets[0][0] <= self.context.synced:
            self.synced = self._tickets.popleft()[1]
            if not self._tickets or self._tickets[0][0] > self.context.synced:
                out.append(Persisted(self.synced))
        self._commit(now, out)

    def _commit(self, now: float, out: list[Effect]) -> None:
        """Commit what every required member has synced, while the lease says that this is still the leader."""
        required = self.required()
        counter = self.synced
        for member in required:
            if member != self.context.member:
                counter = min(counter, self.followers[member].matched if member in self.followers else 0)
        if counter > self.context.committed and counter >= self.start and self.holds_lease(now):
            self.context.commit(counter, len(required), out)

    # --- followers

    def on_appended(self, reply: Appended, now: float, out: list[Effect]) -> None:
        """A follower acknowledged, or only said that it is there."""
        progress = self._answered(reply, now) if reply.matched <= self.context.log.last.counter else None
        if progress is None:
            return
        if reply.matched > progress.matched:
            progress.matched = reply.matched
            progress.moved_at = progress.heard_at = now
            while progress.on_the_way and progress.on_the_way[0] <= reply.matched:
                progress.on_the_way.popleft()
            if progress.mode is Mode.STREAMING:
                progress.sent = max(progress.sent, reply.matched)
            else:
                self._stream(progress, reply.matched)
        elif progress.mode is Mode.PROBING and reply.matched >= progress.sent:
            self._stream(progress, progress.sent)
        elif progress.matched >= progress.sent:
            progress.heard_at = now
        self._pump(reply.sender, now, out)
        self._let_join(reply.sender, progress)
        self._commit(now, out)

    @staticmethod
    def _stream(progress: Progress, sent: int) -> None:
        progress.mode, progress.sent = Mode.STREAMING, sent
        progress.on_the_way.clear()

    def on_mismatch(self, reply: Mismatch, now: float, out: list[Effect]) -> None:
        """A follower does not have what a message stood on: go back to where it says."""
        progress = self._answered(reply, now)
        if progress is None or progress.mode is Mode.SNAPSHOT:
            return
        back = max(progress.matched, reply.hint)
        first = self.context.log.first.counter
        if back < first < progress.sent:
            back = first  # before a snapshot, ask whether it has the oldest entry that is kept
        if back < progress.sent:
            progress.sent = back
            progress.mode = Mode.PROBING
            progress.on_the_way.clear()
            progress.moved_at = progress.heard_at = now
            self._probe(reply.sender, progress, now, out)

    def _answered(self, reply: Appended | Mismatch, now: float) -> Progress | None:
        progress = self.followers.get(reply.sender)
        if progress is None or reply.epoch != self.epoch or reply.incarnation < progress.incarnation:
            return None
        if reply.incarnation > progress.incarnation:  # what it had acknowledged before its start must be shown again
            fresh = Progress(reply.incarnation, self.context.log.last.counter, progress.heard_at, moved_at=now)
            self.followers[reply.sender] = progress = fresh
        progress.confirmed_at = max(progress.confirmed_at, min(reply.sent_at, now))
        return progress

    def _let_join(self, member: MemberID, progress: Progress) -> None:
        """A follower that has nearly caught up is required from here on; ZooKeeper hears of it when it has all of this."""
        if member in self.in_sync.maximal or progress.mode is not Mode.STREAMING or self.draining:
            return
        end = self.context.log.last.counter
        near = progress.matched >= max(self.start, end - self.context.options.join_within)
        if near and self.context.is_live(member, progress.incarnation):
            self.in_sync.join(member, end)

    def _pump(self, member: MemberID, now: float, out: list[Effect]) -> None:
        """Send a streaming follower what it may have more."""
        progress, options = self.followers[member], self.context.options
        end = self.context.log.last.counter
        while progress.mode is Mode.STREAMING and progress.sent < end and len(progress.on_the_way) < options.max_unacknowledged:
            if progress.sent < self.context.log.first.counter:
                self._send_snapshot(member, progress, now, out)
                return
            entries = self.context.log.read(progress.sent, options.max_append_entries, options.max_append_bytes)
            if not progress.on_the_way:
                progress.moved_at = now
            self._append(member, progress, entries, now, out)
            progress.sent += len(entries)
            progress.on_the_way.append(progress.sent)

    def _probe(self, member: MemberID, progress: Progress, now: float, out: list[Effect]) -> None:
        """A message without entries: is our entry at `sent` there?"""
        if progress.sent < self.context.log.first.counter:
            self._send_snapshot(member, progress, now, out)
        else:
            self._append(member, progress, (), now, out)

    def _append(self, member: MemberID, progress: Progress, entries: Sequence[Entry], now: float, out: list[Effect]) -> None:
        log = self.context.log
        previous: Position | None = None
        if progress.mode is not Mode.SNAPSHOT:
            epoch = log.epoch_at(progress.sent)
            assert epoch is not None, "sent lies in the log"
            previous = Position(epoch, progress.sent)
        progress.beat_at = now
        message = Append(self.epoch, self.context.member, previous, entries, self.context.committed, log.last.counter, now)
        out.append(Send(member, message))

    def _send_snapshot(self, member: MemberID, progress: Progress, now: float, out: list[Effect]) -> None:
        progress.mode = Mode.SNAPSHOT
        progress.until = now + self.context.options.snapshot_timeout_s
        progress.on_the_way.clear()
        out.append(SendSnapshot(member, self.epoch))
        self._append(member, progress, (), now, out)

    def on_snapshot_sent(self, event: SnapshotSent, now: float, out: list[Effect]) -> None:
        """A snapshot has arrived, or broke off: look where the follower is."""
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
        """Required members that have not answered, or not moved on, for too long."""
        oldest = now - self.context.options.silence_s
        others = sorted(self.in_sync.maximal - {self.context.member})
        return [member for member in others if member not in self.followers or self.followers[member].heard_at < oldest]

    def revise(self, token: int, now: float, out: list[Effect]) -> bool:
        """Ask ZooKeeper for another set if one is due. Returns whether the token was used."""
        if self._reading or self.in_sync.asking or self.draining:
            return False
        matched = {member: progress.matched for member, progress in self.followers.items()}
        target = self.in_sync.next_proposal(self.silent(now), matched)
        if target is None:
            return False
        self._token = token
        out.append(CompareAndSet(token, self.in_sync.version, target))
        return True

    def on_swapped(self, token: int, ok: bool, now: float, out: list[Effect]) -> None:
        """The answer to a change of the set."""
        if token != self._token:
            return
        self._token = None
        if ok:
            self.in_sync.succeeded()
            self.set_live(now)
            self._commit(now, out)
        else:
            self.in_sync.failed()
            self.read(now, out)

    def read(self, now: float, out: list[Effect]) -> None:
        """Read the state; until it is here no change is asked for."""
        self._reading = True
        self._read_at = now
        out.append(ReadState())

    def on_read(self, version: int, state: PartitionState, now: float, out: list[Effect]) -> None:
        """ZooKeeper still has this leader in this epoch; what it says of the set counts from now on."""
        if version < self.in_sync.version:
            return
        self._reading = False
        if version > self.in_sync.version:
            self._token = None
            self.in_sync.adopt(version, state)
            self.set_live(now)
            self._commit(now, out)

    # --- time

    def on_tick(self, now: float, out: list[Effect]) -> None:
        """Heartbeats, repeats, snapshots that take too long."""
        options = self.context.options
        asleep = now - self._now
        self._now = now
        for member, progress in self.followers.items():
            if asleep > options.lease_s:  # we were stopped: nobody else was silent for so long
                progress.heard_at += asleep
            if progress.mode is Mode.SNAPSHOT and now >= progress.until:
                progress.mode = Mode.PROBING
                progress.sent = self.context.log.last.counter
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
        """The log after this counter is needed by a live follower (within the limit)."""
        log = self.context.log
        live = [p.matched for m, p in self.followers.items() if m in self.context.live and p.mode is Mode.STREAMING]
        return max(min(live, default=log.last.counter), log.last.counter - self.context.options.max_kept)
