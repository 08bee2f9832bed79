"""Decisions of a leader about the doubling of its partition: the steps to a phase, in order, and its status. Pure.

    Advance(SPLIT) ─▶ EndTurn: this turn's requests go into the log ─▶ Write: SPLIT follows them, and moved keys are refused

Source: docs/doubling.md.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from cluster.store.doubling.phases import (
    CHILD,
    PARENT,
    TAKEN_BACK,
    Command,
    Cut,
    Doubling,
    Phase,
    Record,
    Step,
    fence_body,
    reached,
    why_not,
)
from cluster.wire.v1 import doubling_pb2 as pb
from pixiu.discovery.view import RoleLayout
from pixiu.errors import InvalidArgument, NotYet, Unavailable
from pixiu.ids import hex_id

STEPS: Final = {
    Phase.LEARNING: Step.BEGIN, Phase.SPLIT: Step.SPLIT, Phase.OPEN: Step.OPEN, Phase.CLEANING: Step.CLEAN,
}  # fmt: skip
"""The step that leads to a phase."""


class EndTurn(NamedTuple):
    """Put the callers' requests of this turn into the log."""


class Write(NamedTuple):
    """Write a command, and wait until it is replicated. Moved keys are refused from the append of a SPLIT on."""

    command: Command


Act = EndTurn | Write


class Standing(NamedTuple):
    """Input of a leader's decisions."""

    role: str
    partition: int
    record: Record
    """As committed."""
    layout: RoleLayout
    """Of the role, as known here."""
    cut: Cut | None = None
    """The last SPLIT in its log that is not in the record."""

    def doubling(self, number: int, partitions: int) -> Doubling:
        """The doubling in which an operator's request says that this partition has a part. Raises InvalidArgument."""
        if partitions < 2 or self.partition >= partitions:
            raise InvalidArgument(f"partition {self.partition} has no part in doubling {hex_id(number)} to {partitions}")
        half = partitions // 2
        return Doubling(number, partitions, self.partition if self.partition >= half else self.partition + half)


def steps_to(now: Standing, request: pb.DoublingAdvanceRequest, opening: bytes = b"") -> tuple[Act, ...]:
    """Steps to a phase; none if the partition is in it, or past it. Raises InvalidArgument, NotYet, Unavailable.

    opening: body of OPEN.
    """
    doubling, wanted = now.doubling(request.doubling, request.partitions), Phase(int(request.phase))
    is_child = now.partition == doubling.partition
    if wanted not in (CHILD if is_child else PARENT):
        raise InvalidArgument(f"{'a child' if is_child else 'a parent'} has no phase {wanted.name}")
    if reached(now.record, doubling, wanted):
        return ()
    if wanted is not Phase.OPEN:  # it follows from the parent's SPLIT, whatever the layout is by now
        _check_layout(now, doubling, over=wanted is Phase.CLEANING)
    _check_cut(now)
    command = Command(STEPS[wanted], doubling, fence_body(request.fence) if wanted is Phase.SPLIT else opening)
    if reason := why_not(now.record, command):
        refused = Unavailable if reason == TAKEN_BACK else InvalidArgument
        raise refused(f"partition {now.partition} cannot go on to {wanted.name}: {reason}")
    if wanted is Phase.OPEN and now.record.lacks:
        raise NotYet(f"partition {now.partition} {now.record.lacks}")
    return (EndTurn(), Write(command)) if wanted is Phase.SPLIT else (Write(command),)


def steps_back(now: Standing, request: pb.DoublingTakeBackRequest) -> tuple[Act, ...]:
    """Steps that keep a parent whole, whatever was sent to split it. Raises InvalidArgument, Unavailable."""
    doubling = now.doubling(request.doubling, request.partitions)
    if now.partition == doubling.partition:
        raise InvalidArgument(f"partition {now.partition} is new in doubling {hex_id(doubling.number)}: its parent is asked")
    _check_cut(now)
    command = Command(Step.TAKE_BACK, doubling)
    if reason := why_not(now.record, command):
        raise InvalidArgument(f"partition {now.partition} cannot be kept whole: {reason}")
    return (Write(command),)


def is_home(record: Record, layout: RoleLayout) -> bool:
    """True if a partition is a child that the layout includes: its doubling is over, and END follows."""
    return record.phase is Phase.OPEN and layout.n >= record.partitions


def status_of(now: Standing, committed: int, progress: pb.DoublingStatus) -> pb.DoublingStatus:
    """Status of the partition. A SPLIT counts from its append on: it may commit at any time.

    committed: counter up to which the log is committed. progress: the role's own fields.
    """
    record = now.record
    if now.cut is not None:
        number, partitions, _ = now.cut.doubling
        return pb.DoublingStatus(
            doubling=number, partitions=partitions, phase=pb.DOUBLING_SPLIT, committed=committed, fence=record.fence
        )
    status = pb.DoublingStatus(
        doubling=record.doubling.number,
        partitions=record.partitions // 2 if record.phase is Phase.LEARNING else record.partitions,
        phase=pb.DoublingPhase.ValueType(record.phase),
        committed=committed,
        split_at=record.split_at,
        fence=record.fence,
    )
    status.MergeFrom(progress)
    return status


def problem_of(role: str, record: Record, layout: RoleLayout) -> str:
    """A problem that an operator must solve; "" if there is none."""
    if record.phase is Phase.SPLIT and layout.n < record.partitions and hex_id(record.doubling.number) not in layout.doublings:
        return (
            f"this partition was split by doubling {hex_id(record.doubling.number)}, which the layout does not name: its moved "
            f"users are refused; `pixiu double {role}` takes that doubling up again"
        )
    return ""


def check_named(role: str, layout: RoleLayout, doubling: Doubling) -> None:
    """Check that the registry names a doubling: it has begun, and was not taken back. Raises Unavailable."""
    if hex_id(doubling.number) not in layout.doublings or doubling.partitions not in (layout.n, layout.next):
        raise Unavailable(f"the layout as it is known here does not name doubling {hex_id(doubling.number)} of {role}; retry")


def _check_layout(now: Standing, doubling: Doubling, *, over: bool) -> None:
    """The registry must name the doubling and, before anything is deleted, have ended it."""
    check_named(now.role, now.layout, doubling)
    if over and now.layout.n < doubling.partitions:
        raise Unavailable(
            f"the layout as it is known here has {now.layout.n} partitions of {now.role}, not {doubling.partitions}; retry"
        )


def _check_cut(now: Standing) -> None:
    if now.cut is not None:
        raise Unavailable(f"partition {now.partition} is being split; look again in a moment")
