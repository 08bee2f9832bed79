"""What a child of Pi writes of what it hears, and what its parent tells it. Pure; the shell is `pi.learner`.

    parent   refusal ─▶ HOLD ─▶ a snapshot, if the log does not go on from what the child has ─▶ Lesson: the log, as it is applied
    child    request ─▶ Learning.take: RESET, DROP …, ROWS …, FOLLOW …, OPEN, each once the one before it is replicated

Source: docs/doubling.md.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Sequence
from typing import Final, Protocol

from cluster.replication.model import START, Entry, Position
from pi.doubling import HOLD_S, Command, Doubling, Phase, Record, Step, cut_in, follow_body, followed, hold_body, position_body
from pi.doubling_state import DoublingState
from pixiu.discovery.view import RoleLayout
from pixiu.errors import InvalidArgument, MalformedData, Unavailable
from pixiu.ids import hex_id
from pixiu.wire.v1 import pi_replicas_pb2 as pb

FOLLOW_ENTRIES: Final = 1024
FOLLOW_BYTES: Final = 1 << 20
"""Of one message, or one entry."""


class Log(Protocol):
    """What is needed of a parent's log."""

    @property
    def first(self) -> Position:
        """What it goes on from."""

    @property
    def last(self) -> Position:
        """Its last entry, committed or not."""

    def read(self, after: int, max_entries: int, max_bytes: int) -> Sequence[Entry]:
        """Entries from `after` + 1 on."""

    def epoch_at(self, counter: int) -> int | None:
        """The epoch of an entry."""


def request_of(record: Record) -> pb.PiLearnRequest:
    """What a child asks its parent for."""
    number, partitions, partition = record.doubling
    epoch, counter = record.learned
    return pb.PiLearnRequest(doubling=number, partitions=partitions, partition=partition, epoch=epoch, counter=counter)


class Learning:
    """One try of a child's leader.

    Args:
        doubled: of its state.
    """

    def __init__(self, doubled: DoublingState) -> None:
        self._doubled, self._doubling = doubled, doubled.record.doubling

    @property
    def over(self) -> bool:
        """Whether this child learns no more."""
        return self._doubled.record.phase is not Phase.LEARNING

    def take(self, reply: pb.PiLearnReply) -> Generator[list[Command], bool, None]:
        """The writes that follow from what the parent says, one after the other: each is answered with whether its first command
        did something. Raises Unavailable where the child has to ask again."""
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
        """A step, and in the same write others that need it; what becomes of those the state says."""
        done = yield [Command(step, self._doubling, body), *(Command(each, self._doubling) for each in then)]
        if not done:
            raise Unavailable(f"{step.name} came too late: it is learned from where the log stands")

    def _opens(self, entries: bytes) -> tuple[Step, ...]:
        """What ends with the cut opens this child in the same write: moved users wait for it."""
        try:
            cut = cut_in(followed(entries))
        except (struct.error, MalformedData) as wrong:
            raise Unavailable(f"the parent's entries cannot be read: {wrong}") from wrong
        return (Step.OPEN,) if cut is not None and cut.doubling == self._doubling else ()


def check_pupil(partition: int, record: Record, layout: RoleLayout, doubling: Doubling) -> None:
    """Whether a parent teaches this child. Raises InvalidArgument, Unavailable.

    A child whose doubling was taken back is told nothing: it would hold the parent's sweeps for ever."""
    if doubling.partitions < 2 or doubling.parent != partition:
        raise InvalidArgument(f"partition {partition} is not the parent of {doubling.partition} of {doubling.partitions}")
    if record.phase is Phase.CLEANING or (record.phase is Phase.SPLIT and record.doubling != doubling):
        raise Unavailable(f"partition {partition} is {record.phase.name} in another doubling")
    if record.phase is Phase.NONE and record.partitions >= doubling.partitions:
        raise InvalidArgument(f"partition {partition} was split among {record.partitions} already")
    if hex_id(doubling.number) not in layout.doublings:
        raise Unavailable(f"the layout as it is known here does not name doubling {doubling.number:016x} of pi; retry")


def hold_of_sweeps(doubling: Doubling, now_s: int) -> Command:
    """The sweeps of what moves wait, from an entry on that the child learns, or that is in the view it takes."""
    return Command(Step.HOLD, doubling, hold_body(now_s + HOLD_S))


class Lesson:
    """A parent's log, as a child is told it.

    Args:
        doubling: which one, and whose child.
        log: of the parent.
        learned: what the child has.
    """

    def __init__(self, doubling: Doubling, log: Log, learned: Position) -> None:
        self.doubling, self._log, self._learned = doubling, log, learned
        self.after = learned.counter
        """What the child was told up to."""

    def goes_on(self, applied: int) -> bool:
        """Whether the log goes on from what the child has. A child of another history begins again."""
        learned = self._learned
        kept = self._log.first.counter <= learned.counter <= applied
        return learned != START and kept and self._log.epoch_at(learned.counter) == learned.epoch

    def may_tell(self, applied: int) -> int:
        """The last entry that may be told: of what is not committed nobody knows what becomes."""
        return applied

    def next(self, applied: int, committed: int, max_entries: int = FOLLOW_ENTRIES) -> pb.PiLearnReply:
        """Some more of the log. Raises Unavailable when that was trimmed."""
        reply, end = pb.PiLearnReply(committed=committed), self.may_tell(applied)
        if self.after < end:
            if self.after < self._log.first.counter:
                raise Unavailable(f"the log no longer has what follows {self.after}; ask again")
            entries = self._log.read(self.after, min(max_entries, end - self.after), FOLLOW_BYTES)
            self.after = entries[-1].counter
            reply.entries = follow_body(entries, self.doubling)
        return reply
