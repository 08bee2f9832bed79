"""A follower: takes the leader's log, cuts off entries that differ, acknowledges what is synced. Pure.

Source: docs/replication.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from cluster.replication.core.context import Context
from cluster.replication.core.events import Effect, InstallSnapshot, ScanSegment, Send, SnapshotReceived
from cluster.replication.core.messages import Append, Appended, Mismatch
from cluster.replication.model import Entry, MemberID, Position
from pixiu.errors import DiskFull

WAY_OUT: Final = "Move its folder away to have it follow, or promote it by force to keep them"


def _dense(previous: Position | None, entries: Sequence[Entry]) -> bool:
    """True if the entries are at the positions that their message states; otherwise the sender is broken."""
    if previous is None:
        return False
    return entries[0].counter == previous.counter + 1 and entries[-1].counter == previous.counter + len(entries)


class Contradiction(Exception):
    """The leader's log differs from what is committed here: a bug, a forced promotion, or another partition's data."""


class Follower:
    """A replica that does not lead.

    Args:
        context: shared data of the replica.
        now: monotonic seconds. The replica may have confirmed an epoch right before it was started.
    """

    def __init__(self, context: Context, now: float) -> None:
        self.context = context
        self.epoch = 0
        """Epoch of the leader that it follows."""
        self.matched = 0
        """Last counter of this leader's log that is synced here."""
        self.confirmed_at = now
        self._waiting: deque[tuple[int, int, float]] = deque()
        """Acknowledgements that wait for the disk: (ticket, counter, leader's clock)."""
        self._leader_committed = 0
        self.full = False
        """The disk had no space for the last entries received; every answer reports this until it takes some."""
        self._needed: int | None = None
        """Counter of the leader's log at which an unclean replica is complete again."""

    def on_append(self, message: Append, now: float, out: list[Effect]) -> None:
        """Handle a message of a leader whose epoch is not below the promise. Raises Contradiction."""
        context, log = self.context, self.context.log
        if message.entries and not _dense(message.previous, message.entries):
            return
        if message.end < context.committed and not self._is_ready(context.committed, out):
            return  # the leader sends it again
        self.check_history(message)
        if message.epoch > self.epoch:
            self.epoch, self.matched, self._needed, self._leader_committed = message.epoch, 0, None, 0
            self._waiting.clear()
        if message.epoch > log.promised:
            context.promise_epoch(message.epoch, out)
        self.confirmed_at = now
        if message.time_us:
            context.clock.heard(message.time_us, now)
        if self._needed is None and log.unclean:
            self._needed = message.end
        self._leader_committed = max(self._leader_committed, message.committed)
        previous, entries = message.previous, message.entries
        if previous is not None and not self._can_look(previous, entries, out):
            previous = None  # it is answered like a heartbeat meanwhile
        if previous is None:
            reached = self.matched
        elif not self._has(previous):
            if context.promise <= context.synced:  # otherwise the leader's next probe is answered
                hint = self._hint(previous)
                reply = Mismatch(
                    message.epoch, context.member, context.incarnation, hint, message.sent_at, self.full, context.clock.wall_us(now)
                )
                out.append(Send(message.sender, reply))
            return
        else:
            reached = previous.counter + len(entries)
            try:
                changed = self._take(entries)
            except DiskFull:
                self.full = True
                context.sync(out)  # entries may have been cut off
                if context.promise <= context.synced:
                    self._acknowledge(message.sender, message.sent_at, now, out)
                return
            self.full = self.full and not entries and reached < message.end
            if changed:
                context.sync(out)
        if context.issued == context.synced:
            self._reach(reached, out)
        else:
            if self._waiting and self._waiting[-1][0] == context.issued:
                reached = max(reached, self._waiting.pop()[1])
            self._waiting.append((context.issued, reached, message.sent_at))
        if context.issued == context.synced or (not message.entries and context.promise <= context.synced):
            self._acknowledge(message.sender, message.sent_at, now, out)

    def _can_look(self, previous: Position, entries: Sequence[Entry], out: list[Effect]) -> bool:
        """True if the previous entry of a message, and those of its entries that may be here, can be compared without reading a
        whole segment."""
        log = self.context.log
        if not log.first.counter <= previous.counter < log.last.counter:
            return True
        return self._is_ready(previous.counter, out) and self._is_ready(min(previous.counter + len(entries), log.last.counter), out)

    def _is_ready(self, counter: int, out: list[Effect]) -> bool:
        if self.context.log.is_ready(counter):
            return True
        out.append(ScanSegment(counter))
        return False

    def check_history(self, message: Append) -> None:
        """Check that the leader has what was acknowledged here. Every leader has the entries committed in lower epochs, unless an
        operator gave them up by force; a replica may not know which of those were committed, so all acknowledged ones count. Raises
        Contradiction, but not for a late message of this epoch."""
        context = self.context
        if message.epoch > self.epoch:
            end = context.end
            for forced in message.forced:
                if forced.gave_up(end):
                    raise Contradiction(
                        f"this replica ends at {end}: the forced promotion of epoch {forced.epoch}, whose replica ended at "
                        f"{forced.after}, gave up entries that it has. {WAY_OUT}"
                    )
        if message.end >= context.committed:
            return
        epoch = context.log.epoch_at(context.committed)
        if epoch is not None and epoch < message.epoch:
            raise Contradiction(
                f"the leader's log ends at {message.end}, {context.committed} are committed here: a forced promotion gave up some "
                f"that this replica has. {WAY_OUT}"
            )

    def _has(self, position: Position) -> bool:
        """True if the entry is here. Trimmed entries were committed, so every leader has them too."""
        log = self.context.log
        if position.counter < log.first.counter:
            return True
        if position.counter == log.first.counter and position != log.first:
            raise Contradiction(f"{position} is the leader's, {log.first} was committed and trimmed here")
        return log.epoch_at(position.counter) == position.epoch

    def _hint(self, previous: Position) -> int:
        log = self.context.log
        if previous.counter > log.last.counter:
            return log.last.counter
        return max(log.start_of_epoch(previous.counter) - 1, log.first.counter)

    def _take(self, entries: Sequence[Entry]) -> bool:
        """Append new entries after cutting off those that differ. Returns whether the log was changed."""
        log = self.context.log
        for index, entry in enumerate(entries):
            if entry.counter <= log.first.counter or log.epoch_at(entry.counter) == entry.epoch:
                continue
            if entry.counter <= log.last.counter:
                self.cut(entry.counter - 1)
            log.append(entries[index:])
            return True
        return False

    def cut(self, after: int) -> None:
        """Drop a former leader's entries after this counter. Raises Contradiction if they were committed."""
        if after < self.context.committed:
            raise Contradiction(f"the leader's log differs after {after}, {self.context.committed} are committed here")
        self.context.log.cut(after)

    def on_synced(self, leader: MemberID | None, now: float, out: list[Effect]) -> None:
        """Acknowledge the part of the log that has become durable."""
        sent_at: float | None = None
        while self._waiting and self._waiting[0][0] <= self.context.synced:
            _, reached, sent_at = self._waiting.popleft()
            self._reach(reached, out)
        if sent_at is not None and leader is not None:
            self._acknowledge(leader, sent_at, now, out)

    def _reach(self, counter: int, out: list[Effect]) -> None:
        context = self.context
        self.matched = max(self.matched, counter)
        if self._needed is not None and self.matched >= self._needed:
            self._needed = None
            context.log.set_unclean(False)
            context.sync(out)
        committed = min(self._leader_committed, self.matched)
        if committed > context.committed:
            context.commit(committed, 0, out)

    def _acknowledge(self, leader: MemberID, sent_at: float, now: float, out: list[Effect]) -> None:
        context = self.context
        reply = Appended(
            self.epoch, context.member, context.incarnation, self.matched, sent_at, self.full, context.clock.wall_us(now),
            context.space and not self.full,
        )  # fmt: skip
        out.append(Send(leader, reply))

    def on_snapshot(self, event: SnapshotReceived, now: float, out: list[Effect]) -> None:
        """Replace log and state by the leader's state at a committed position."""
        context = self.context
        if event.epoch != self.epoch or event.epoch < context.log.promised or event.position.counter <= self.matched:
            return
        if event.position.counter < context.committed:
            return
        if context.log.epoch_at(event.position.counter) != event.position.epoch:
            # Never if the entry is here: entries after it may have been acknowledged, and must stay.
            self._waiting.clear()
            context.log.reset(event.position)
            out.append(InstallSnapshot(event.position))
            context.sync(out)
            context.committed = event.position.counter
        self._waiting.append((context.issued, event.position.counter, float("-inf")))
        self.on_synced(event.sender, now, out)
