"""Decisions of a Pi leader about the doubling of its partition: the steps to a phase, in order, and its status. Pure.

    Advance(SPLIT) ─▶ EndTurn: this turn's requests go into the log ─▶ Write: SPLIT follows them, and moved keys are refused

Source: docs/doubling.md.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

from cluster.wire.v1 import doubling_pb2 as pb
from pi.doubling.phases import Command, Cut, Doubling, Phase, Record, Step, fence_body
from pixiu.discovery.view import RoleLayout
from pixiu.errors import InvalidArgument, NotYet, Unavailable
from pixiu.ids import hex_id

PARENT: Final = (Phase.SPLIT, Phase.CLEANING, Phase.NONE)
CHILD: Final = (Phase.LEARNING, Phase.OPEN, Phase.NONE)
"""Their phases, in order."""


class EndTurn(NamedTuple):
    """Put the callers' requests of this turn into the log."""


class Write(NamedTuple):
    """Write a command, and wait until it is replicated. Moved keys are refused from the append of a SPLIT on."""

    command: Command


Act = EndTurn | Write


class Standing(NamedTuple):
    """Input of a leader's decisions."""

    partition: int
    record: Record
    """As committed."""
    layout: RoleLayout
    """Of Pi, as known here."""
    cut: Cut | None = None
    """The last SPLIT in its log that is not in the record."""


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


def work_of(now: Standing, has_view: bool, unsettled: bool) -> Work | None:
    """Return the work pending in a phase.

    has_view: there is a view of the moment at which a child opened. unsettled: a SPLIT was in the log, and its outcome has not been
      reported to the core yet.
    """
    record = now.record
    match record.phase:
        case Phase.LEARNING:
            return Work.LEARN
        case Phase.SPLIT if not record.digest:
            return Work.DIGEST_HERE
        case Phase.OPEN | Phase.NONE if has_view and not record.digest:
            return Work.DIGEST_CUT
        case Phase.OPEN if now.layout.n >= record.partitions:
            return Work.END
        case Phase.CLEANING:
            return Work.CLEAN
        case _:
            return Work.SETTLE if unsettled else None


def status_of(now: Standing, committed: int, stored: tuple[int, int]) -> pb.DoublingStatus:
    """Status of the partition. A SPLIT counts from its append on: it may commit at any time.

    committed: counter up to which the log is committed. stored: keys and bytes of the whole state.
    """
    record = now.record
    if now.cut is not None:
        number, partitions, _ = now.cut.doubling
        return pb.DoublingStatus(
            doubling=number, partitions=partitions, phase=pb.DOUBLING_SPLIT, committed=committed, fence=record.fence
        )
    keys, size = stored if record.phase is Phase.NONE else (record.keys, record.size)  # stored: how much there is to learn from
    return pb.DoublingStatus(
        doubling=record.doubling.number,
        partitions=record.partitions // 2 if record.phase is Phase.LEARNING else record.partitions,
        phase=pb.DoublingPhase.ValueType(record.phase),
        committed=committed,
        split_at=record.split_at,
        learned=record.learned.counter,
        keys=keys,
        bytes=size,
        digest=record.digest,
        fence=record.fence,
    )


def steps_to(now: Standing, request: pb.DoublingAdvanceRequest) -> tuple[Act, ...]:
    """Steps to a phase; none if the partition is in it, or past it. Raises InvalidArgument, NotYet, Unavailable."""
    doubling, wanted = _doubling(now.partition, request.doubling, request.partitions), Phase(int(request.phase))
    is_child = now.partition == doubling.partition
    order = CHILD if is_child else PARENT
    if wanted not in order:
        raise InvalidArgument(f"{'a child' if is_child else 'a parent'} has no phase {wanted.name}")
    if now.record.doubling == doubling and order.index(wanted) <= order.index(now.record.phase):
        return ()
    _check_layout(now.layout, doubling, over=wanted is Phase.CLEANING)
    if wanted is Phase.LEARNING:
        return (Write(Command(Step.BEGIN, doubling)),)
    if wanted is Phase.OPEN:
        return _open(now, doubling)
    if wanted is Phase.SPLIT:
        return _split(now, doubling, request.fence)
    if now.record.doubling != doubling:
        raise InvalidArgument(f"partition {now.partition} is not split by this doubling: it cannot go on to {wanted.name}")
    return (Write(Command(Step.CLEAN, doubling)),)


def steps_back(now: Standing, request: pb.DoublingTakeBackRequest) -> tuple[Act, ...]:
    """Steps that keep a parent whole, whatever was sent to split it. Raises InvalidArgument, Unavailable."""
    doubling = _doubling(now.partition, request.doubling, request.partitions)
    if now.partition == doubling.partition:
        raise InvalidArgument(f"partition {now.partition} is new in doubling {request.doubling:016x}: its parent is asked")
    if now.cut is not None:
        raise Unavailable(f"partition {now.partition} is being split; look again in a moment")
    if not now.record.takes_back(doubling):
        raise InvalidArgument(f"partition {now.partition} was split by doubling {request.doubling:016x} already")
    return (Write(Command(Step.TAKE_BACK, doubling)),)


def problem_of(now: Standing) -> str:
    """A problem that an operator must solve; "" if there is none."""
    record, layout = now.record, now.layout
    if record.phase is Phase.SPLIT and layout.n < record.partitions and hex_id(record.doubling.number) not in layout.doublings:
        return (
            f"this partition was split by doubling {hex_id(record.doubling.number)}, which the layout does not name: its moved "
            "users are refused; `pixiu double pi` takes that doubling up again"
        )
    return ""


def _doubling(partition: int, number: int, partitions: int) -> Doubling:
    if partitions < 2 or partition >= partitions:
        raise InvalidArgument(f"partition {partition} has no part in doubling {number:016x} to {partitions}")
    return Doubling(number, partitions, partition if partition >= partitions // 2 else partition + partitions // 2)


def _check_layout(layout: RoleLayout, doubling: Doubling, *, over: bool) -> None:
    """The registry must name the doubling and, before anything is deleted, have ended it."""
    if hex_id(doubling.number) not in layout.doublings or doubling.partitions not in (layout.n, layout.next):
        raise Unavailable(f"the layout as it is known here does not name doubling {doubling.number:016x} of pi; retry")
    if over and layout.n < doubling.partitions:
        raise Unavailable(f"the layout as it is known here has {layout.n} partitions of pi, not {doubling.partitions}; retry")


def _open(now: Standing, doubling: Doubling) -> tuple[Act, ...]:
    record = now.record
    if record.doubling != doubling:
        raise InvalidArgument(f"partition {now.partition} has not begun to learn; advance it to LEARNING first")
    if not record.whole:
        cut = f"the cut at {record.split_at}" if record.split_at else "the cut, which is not made"
        raise NotYet(f"partition {now.partition} has learned up to {record.learned.counter} of {cut}")
    return (Write(Command(Step.OPEN, doubling)),)


def _split(now: Standing, doubling: Doubling, fence: int) -> tuple[Act, ...]:
    """The cut: requests of this turn precede it in the log, and no operation on moved keys follows it."""
    if now.cut is not None and now.cut.doubling == doubling:
        raise Unavailable(f"partition {now.partition} is being split; look again in a moment")
    if fence != now.record.fence:
        raise Unavailable(f"a doubling of partition {now.partition} was taken back since it was looked at; look again")
    return EndTurn(), Write(Command(Step.SPLIT, doubling, fence_body(fence)))
