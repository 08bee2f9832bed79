"""Protocol between a parent of Pi and its child: the parent's replies, and the child's writes. Pure; the shell is
`pi.handover.learner`.

    parent   refusal ─▶ HOLD ─▶ a snapshot, unless the log continues from the child's position ─▶ Lesson: the log, as it is applied
    child    request ─▶ Learning.take: RESET, DROP …, ROWS …, FOLLOW …, OPEN, each once the one before it is replicated

Source: docs/doubling.md.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Sequence
from typing import Final, Protocol

from cluster.replication.model import START, Entry, Position
from cluster.store.doubling.phases import Command, Doubling, Phase, Step, cut_in
from cluster.store.doubling.steps import check_named
from cluster.wire.v1 import pi_replicas_pb2 as pb
from pi.doubling.phases import HOLD_S, Record, follow_body, followed, hold_body, position_body
from pi.doubling.state import DoublingState
from pixiu.discovery.view import RoleLayout
from pixiu.errors import InvalidArgument, MalformedData, Unavailable

FOLLOW_ENTRIES: Final = 1024
FOLLOW_BYTES: Final = 1 << 20
"""Limit of one message or entry."""


class Log(Protocol):
    """Interface to a parent's log."""

    @property
    def first(self) -> Position:
        """Position after which the log begins."""

    @property
    def last(self) -> Position:
        """Its last entry, committed or not."""

    def read(self, after: int, max_entries: int, max_bytes: int) -> Sequence[Entry]:
        """Return entries from `after` + 1 on."""

    def epoch_at(self, counter: int) -> int | None:
        """Return the epoch of an entry."""


def request_of(record: Record) -> pb.PiLearnRequest:
    """Make a child's request to its parent."""
    number, partitions, partition = record.doubling
    epoch, counter = record.learned
    return pb.PiLearnRequest(doubling=number, partitions=partitions, partition=partition, epoch=epoch, counter=counter)


class Learning:
    """One attempt of a child's leader to learn.

    Args:
        doubled: of its state.
    """

    def __init__(self, doubled: DoublingState) -> None:
        self._doubled, self._doubling = doubled, doubled.record.doubling

    @property
    def over(self) -> bool:
        """True if this child has finished learning."""
        return self._doubled.record.phase is not Phase.LEARNING

    def take(self, reply: pb.PiLearnReply) -> Generator[list[Command], bool, None]:
        """Generate the writes that follow from a reply, in order; send True if the first command of a write had an effect. Raises
        Unavailable if the child has to ask again."""
        doubled = self._doubled
        if reply.snapshot:
            yield from self._write(Step.RESET, position_body(Position(reply.epoch, reply.counter)))
            while not doubled.record.emptied:
                yield from self._write(Step.DROP)
        if reply.rows:
            yield from self._write(Step.ROWS, reply.rows)
        if reply.entries:
            yield from self._write(Step.FOLLOW, reply.entries, *self._opens(reply.entries))
            if doubled.record.learned == START:
                raise Unavailable("the parent went on without this child; it begins again")
        if doubled.whole:
            yield from self._write(Step.OPEN)

    def _write(self, step: Step, body: bytes = b"", *then: Step) -> Generator[list[Command], bool, None]:
        """Write a step, together with others that need it; the state shows the outcome of those."""
        done = yield [Command(step, self._doubling, body), *(Command(each, self._doubling) for each in then)]
        if not done:
            raise Unavailable(f"{step.name} came too late: it is learned from where the log stands")

    def _opens(self, entries: bytes) -> tuple[Step, ...]:
        """Return OPEN if the entries end with the cut, to open the child in the same write: moved users wait for it."""
        try:
            cut = cut_in(followed(entries))
        except (struct.error, MalformedData) as wrong:
            raise Unavailable(f"the parent's entries cannot be read: {wrong}") from wrong
        return (Step.OPEN,) if cut is not None and cut.doubling == self._doubling else ()


def check_pupil(partition: int, record: Record, layout: RoleLayout, doubling: Doubling) -> None:
    """Check that a parent may teach this child. Raises InvalidArgument, Unavailable.

    A child whose doubling was taken back is refused: it would hold the parent's sweeps for ever."""
    if doubling.partitions < 2 or doubling.parent != partition:
        raise InvalidArgument(f"partition {partition} is not the parent of {doubling.partition} of {doubling.partitions}")
    if record.phase is Phase.CLEANING or (record.phase is Phase.SPLIT and record.doubling != doubling):
        raise Unavailable(f"partition {partition} is {record.phase.name} in another doubling")
    if record.phase is Phase.NONE and record.partitions >= doubling.partitions:
        raise InvalidArgument(f"partition {partition} was split among {record.partitions} already")
    check_named("pi", layout, doubling)


def hold_of_sweeps(doubling: Doubling, now_s: int) -> Command:
    """Make the command that holds the sweeps of moving values, from an entry on that the child learns or finds in its snapshot."""
    return Command(Step.HOLD, doubling, hold_body(now_s + HOLD_S))


class Lesson:
    """A parent's log, as sent to a child.

    Args:
        doubling: its ID, and the child.
        log: of the parent.
        learned: the child's position.
    """

    def __init__(self, doubling: Doubling, log: Log, learned: Position) -> None:
        self.doubling, self._log, self._learned = doubling, log, learned
        self.after = learned.counter
        """Counter up to which the log was sent."""

    def goes_on(self, applied: int) -> bool:
        """True if the log continues from the child's position. A child with another history begins again."""
        learned = self._learned
        kept = self._log.first.counter <= learned.counter <= applied
        return learned != START and kept and self._log.epoch_at(learned.counter) == learned.epoch

    def may_tell(self, applied: int) -> int:
        """The last entry that may be sent: the outcome of uncommitted ones is unknown."""
        return applied

    def next(self, applied: int, committed: int, max_entries: int = FOLLOW_ENTRIES) -> pb.PiLearnReply:
        """The next part of the log. Raises Unavailable if it was trimmed."""
        reply, end = pb.PiLearnReply(committed=committed), self.may_tell(applied)
        if self.after < end:
            if self.after < self._log.first.counter:
                raise Unavailable(f"the log no longer has what follows {self.after}; ask again")
            entries = self._log.read(self.after, min(max_entries, end - self.after), FOLLOW_BYTES)
            self.after = entries[-1].counter
            reply.entries = follow_body(entries, self.doubling)
        return reply
