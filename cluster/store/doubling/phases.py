"""The doubling of a partition: its phases, and the log entries that lead from one to the next. Pure.

    parent   NONE ──SPLIT──▶ SPLIT ──CLEAN──▶ CLEANING ──CLEAN … CLEAN──▶ NONE
    child    NONE ──BEGIN──▶ LEARNING ──OPEN──▶ OPEN ──END──▶ NONE

    entry of kind 32    step u8 | doubling u64 | partitions u16 | partition u16 | body       little-endian

    BEGIN, CLEAN, END   nothing
    SPLIT               fence u64: no effect unless it is the partition's
    TAKE_BACK           nothing: its counter is the partition's fence from now on
    OPEN                what the role's child opens with; the other steps are the role's

`partition` is the child's in all entries: a key moves if key % partitions == partition.

Source: docs/doubling.md.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final, NamedTuple, TypeVar

from cluster.replication.model import Entry
from pixiu.errors import MalformedData
from pixiu.ids import hex_id
from pixiu.placement.partition import is_partition_count

DOUBLING_KIND: Final = 32
"""Kind of log entries that hold a command of a doubling. A role's own kinds are below it."""
TAKEN_BACK: Final = "a doubling of this partition was taken back since it was looked at; look again"

_HEAD: Final = struct.Struct("<BQHH")
_FENCE: Final = struct.Struct("<Q")
_RECORD: Final = struct.Struct("<BQHHQQ")
RECORD_BYTES: Final = _RECORD.size


class Phase(IntEnum):
    """The phases of `proto/cluster/wire/v1/doubling.proto`."""

    NONE = 0
    LEARNING = 1
    SPLIT = 2
    OPEN = 3
    CLEANING = 4


PARENT: Final[tuple[Phase, ...]] = (Phase.SPLIT, Phase.CLEANING, Phase.NONE)
CHILD: Final[tuple[Phase, ...]] = (Phase.LEARNING, Phase.OPEN, Phase.NONE)
"""Their phases, in order."""


class Step(IntEnum):
    """The action of an entry."""

    BEGIN = 1
    RESET = 2
    DROP = 3
    ROWS = 4
    FOLLOW = 5
    OPEN = 6
    END = 7
    HOLD = 8
    SPLIT = 9
    CLEAN = 10
    NOTE = 11
    TAKE_BACK = 12


class Doubling(NamedTuple):
    """The ID of a doubling, and the keys that it moves."""

    number: int
    """Its ID."""
    partitions: int
    """Number of the role's partitions after it."""
    partition: int
    """The child's."""

    @property
    def parent(self) -> int:
        """The partition that is split."""
        return self.partition - self.partitions // 2

    def moves(self, key: int) -> bool:
        """True if a key belongs to the child from the cut on."""
        return key % self.partitions == self.partition


NO_DOUBLING: Final = Doubling(0, 0, 0)


class Command(NamedTuple):
    """An entry's payload."""

    step: Step
    doubling: Doubling
    body: bytes = b""

    def encode(self) -> bytes:
        """Encode as stored in the log."""
        return _HEAD.pack(self.step, *self.doubling) + self.body

    @classmethod
    def decode(cls, payload: bytes) -> Command:
        """Raises MalformedData."""
        try:
            step, *doubling = _HEAD.unpack_from(payload)
            found = cls(Step(step), Doubling(*doubling), payload[_HEAD.size :])
        except (struct.error, ValueError) as wrong:
            raise MalformedData(f"no command of a doubling: {wrong}") from wrong
        partitions, partition = found.doubling[1:]
        if not is_partition_count(partitions) or not partitions // 2 <= partition < partitions:
            raise MalformedData(f"partition {partition} of {partitions} has no parent")
        return found


def fence_body(fence: int) -> bytes:
    """The body of SPLIT."""
    return _FENCE.pack(fence)


def fence_of(body: bytes) -> int:
    """The fence in a body of SPLIT. Raises struct.error."""
    return int(_FENCE.unpack(body)[0])


@dataclass(frozen=True, slots=True)
class Record:
    """State of a partition's doubling: a value of its state. A role adds fields. It stays when a doubling is over."""

    phase: Phase = Phase.NONE
    doubling: Doubling = NO_DOUBLING
    """The last one."""
    split_at: int = 0
    """The parent's counter of SPLIT."""
    fence: int = 0
    """Counter of the last entry that took a doubling back; in a child that learns: its parent's, if it follows that."""

    @property
    def partitions(self) -> int:
        """Number of the role's partitions by this log; 0: it does not contain it."""
        return self.doubling.partitions

    @property
    def lacks(self) -> str:
        """Description of what a child lacks to open; "" if nothing."""
        return ""

    def _packed(self) -> bytes:
        return _RECORD.pack(self.phase, *self.doubling, self.split_at, self.fence)


def unpacked(body: bytes) -> tuple[Phase, Doubling, int, int]:
    """Decode the fields of every record, which a stored value begins with."""
    phase, number, partitions, partition, split_at, fence = _RECORD.unpack_from(body)
    return Phase(phase), Doubling(number, partitions, partition), split_at, fence


R = TypeVar("R", bound=Record)


def reached(record: Record, doubling: Doubling, wanted: Phase) -> bool:
    """True if a partition has come to this phase of a doubling, or past it."""
    order = CHILD if wanted in (Phase.LEARNING, Phase.OPEN) else PARENT
    return record.doubling == doubling and record.phase in order and order.index(wanted) <= order.index(record.phase)


def why_not(record: Record, command: Command) -> str:
    """Reason why a step has no effect on a partition; "" if it has. Raises struct.error."""
    phase, same = record.phase, record.doubling == command.doubling
    under_way = f"doubling {hex_id(record.doubling.number)} of this partition is in phase {phase.name}"
    fits = True
    match command.step:
        case Step.SPLIT if phase in (Phase.NONE, Phase.OPEN):  # it may have come from the doubling before
            if record.partitions not in (0, command.doubling.partitions // 2):
                return f"this partition is one of {record.partitions} already"
            return "" if fence_of(command.body) == record.fence else TAKEN_BACK
        case Step.TAKE_BACK:
            return f"{under_way}: it was split by it already" if same else ""
        case Step.BEGIN:
            fits = record.doubling.number != command.doubling.number and (phase is Phase.LEARNING or not record.partitions)
        case Step.OPEN:
            fits = same and phase is Phase.LEARNING
        case Step.CLEAN:
            fits = same and phase in (Phase.SPLIT, Phase.CLEANING)
        case Step.END:
            fits = same and phase is Phase.OPEN
        case _:
            fits = False
    return "" if fits else under_way


def taken(record: R, command: Command, counter: int) -> R | None:
    """Take a step at a counter of the log; None: it has no effect. Raises struct.error."""
    if why_not(record, command):
        return None
    match command.step:
        case Step.BEGIN:
            return type(record)(Phase.LEARNING, command.doubling)
        case Step.SPLIT:
            return replace(record, phase=Phase.SPLIT, doubling=command.doubling, split_at=counter)
        case Step.TAKE_BACK:
            return replace(record, fence=counter)
        case Step.OPEN:
            return replace(record, phase=Phase.OPEN, fence=0)
        case Step.CLEAN:
            return replace(record, phase=Phase.CLEANING)
        case _:
            return replace(record, phase=Phase.NONE)


def counted(record: Record, layout: int, appended: int = 0) -> int:
    """Number of partitions by which a partition assigns keys; 0: not known. One whose own number is not below it is a child that is
    not open, and serves nobody.

    Args:
        record: of its state.
        layout: partitions by the layout; 0: not known.
        appended: partitions by a SPLIT that is in the leader's log but not in the state; 0: there is none.
    """
    return record.partitions // 2 if record.phase is Phase.LEARNING else max(layout, record.partitions, appended)


class Cut(NamedTuple):
    """A SPLIT in a log, whatever its outcome."""

    counter: int
    doubling: Doubling


def cut_in(entries: Iterable[Entry]) -> Cut | None:
    """The last SPLIT among entries. Raises MalformedData."""
    found: Cut | None = None
    for entry in entries:
        if entry.kind == DOUBLING_KIND and entry.payload[:1] == bytes((Step.SPLIT,)):
            found = Cut(entry.counter, Command.decode(entry.payload).doubling)
    return found
