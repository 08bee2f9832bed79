"""Protocol between a parent and the child that copies it: the parent's replies, the child's writes, and a leader's work that takes
long. Pure; the shells are `leader` and `learner`.

    parent   refusal ─▶ HOLD ─▶ a snapshot, unless the log continues from the child's position ─▶ Lesson: the log, as it is applied
    child    request ─▶ Learning.take: RESET, DROP …, ROWS …, FOLLOW …, OPEN, each once the one before it is replicated

Source: docs/doubling.md.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Sequence
from enum import Enum
from typing import Final, Protocol

from cluster.replication.model import START, Entry, Position
from cluster.store.doubling.copied import HOLD_S, OfChild, Record, follow_body, followed, hold_body, position_body
from cluster.store.doubling.copying import Copying
from cluster.store.doubling.phases import Command, Doubling, Phase, Step, cut_in
from cluster.store.doubling.steps import check_named, is_home
from cluster.wire.v1 import doubling_pb2 as pb
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


def request_of(record: Record) -> pb.LearnRequest:
    """Make a child's request to its parent."""
    number, partitions, partition = record.doubling
    epoch, counter = record.learned
    return pb.LearnRequest(doubling=number, partitions=partitions, partition=partition, epoch=epoch, counter=counter)


class Learning:
    """One attempt of a child's leader to learn.

    Args:
        doubled: of its state.
    """

    def __init__(self, doubled: Copying) -> None:
        self._doubled, self._doubling = doubled, doubled.record.doubling

    @property
    def over(self) -> bool:
        """True if this child has finished learning."""
        return self._doubled.record.phase is not Phase.LEARNING

    def take(self, reply: pb.LearnReply) -> Generator[list[Command], bool, None]:
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


def check_pupil(role: str, partition: int, record: Record, layout: RoleLayout, doubling: Doubling) -> None:
    """Check that a parent may teach this child. Raises InvalidArgument, Unavailable.

    A child whose doubling was taken back is refused: it would hold the parent's sweeps for ever."""
    if doubling.partitions < 2 or doubling.parent != partition:
        raise InvalidArgument(f"partition {partition} is not the parent of {doubling.partition} of {doubling.partitions}")
    if record.phase is Phase.CLEANING or (record.phase is Phase.SPLIT and record.doubling != doubling):
        raise Unavailable(f"partition {partition} is {record.phase.name} in another doubling")
    if record.phase is Phase.NONE and record.partitions >= doubling.partitions:
        raise InvalidArgument(f"partition {partition} was split among {record.partitions} already")
    check_named(role, layout, doubling)


def hold_of_sweeps(doubling: Doubling, now_s: int) -> Command:
    """Make the command that holds the sweeps of moving values, from an entry on that the child learns or finds in its snapshot."""
    return Command(Step.HOLD, doubling, hold_body(now_s + HOLD_S))


class Lesson:
    """A parent's log, as sent to a child.

    Args:
        doubling: its ID, and the child.
        log: of the parent.
        learned: the child's position.
        of_child: returns what of an entry concerns it.
    """

    def __init__(self, doubling: Doubling, log: Log, learned: Position, of_child: OfChild) -> None:
        self.doubling, self._log, self._learned, self._of_child = doubling, log, learned, of_child
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

    def next(self, applied: int, committed: int, max_entries: int = FOLLOW_ENTRIES) -> pb.LearnReply:
        """The next part of the log. Raises Unavailable if it was trimmed."""
        reply, end = pb.LearnReply(committed=committed), self.may_tell(applied)
        if self.after < end:
            if self.after < self._log.first.counter:
                raise Unavailable(f"the log no longer has what follows {self.after}; ask again")
            entries = self._log.read(self.after, min(max_entries, end - self.after), FOLLOW_BYTES)
            self.after = entries[-1].counter
            reply.entries = follow_body(entries, self.doubling, self._of_child)
        return reply


class Work(Enum):
    """Work that takes long."""

    LEARN = 1
    DIGEST_HERE = 2
    """Any view will do: moved values no longer change in a split parent."""
    DIGEST_CUT = 3
    """For a child: on the view of the moment at which it opened."""
    END = 4
    """The layout includes this child: its doubling is over."""
    CLEAN = 5
    SETTLE = 6
    """A SPLIT without effect changes no record, so moved users are accepted again once it is applied."""


def work_of(record: Record, layout: RoleLayout, has_view: bool, unsettled: bool) -> Work | None:
    """Return the work pending in a phase.

    layout: of the role. has_view: there is a view of the moment at which a child opened. unsettled: a SPLIT was in the log, and the
      core does not know its outcome yet.
    """
    match record.phase:
        case Phase.LEARNING:
            return Work.LEARN
        case Phase.SPLIT if not record.digest:
            return Work.DIGEST_HERE
        case Phase.OPEN | Phase.NONE if has_view and not record.digest:
            return Work.DIGEST_CUT
        case Phase.OPEN if is_home(record, layout):
            return Work.END
        case Phase.CLEANING:
            return Work.CLEAN
        case _:
            return Work.SETTLE if unsettled else None


def progress_of(record: Record, stored: tuple[int, int]) -> pb.DoublingStatus:
    """Return the copying's fields of the status. stored: keys and bytes of the whole state, which a child would have to learn."""
    keys, size = stored if record.phase is Phase.NONE else (record.keys, record.size)
    return pb.DoublingStatus(learned=record.learned.counter, keys=keys, bytes=size, digest=record.digest)
