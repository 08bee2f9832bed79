"""What happens to a Xiu's core, and what it asks its shell to do. What replication says and is asked for is in
`cluster.replication.events`. Pure.

Source: PiXiu §6.1.1; Swift (the triple V, S, C); docs/promises.md, docs/architecture.md, docs/stores.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.replication.events import Accepted, Deposed, Leading, Persisted, Propose, Rejected
from cluster.replication.model import Entry
from cluster.runtime.contract import Settle, Tick
from pixiu.ids import MAX_MSG_SEQUENCE
from pixiu.wire.levels import Level, Triple

# --- events


@dataclass(slots=True)
class StoreReceived:
    """`count` records lie in `data` end to end, from one writer's stream."""

    stream: int
    position: int
    """Of the first record in the stream."""
    level: Level
    epoch: int
    """S as the writer knows it; 0: it knows none yet."""
    data: bytes
    count: int
    at_us: int
    """The host's time, Unix µs."""


@dataclass(frozen=True, slots=True)
class LayoutChanged:
    """The layout has this version and Xiu so many partitions; 0: nothing says how many."""

    version: int
    partitions: int
    addresses: tuple[str, ...] = ()
    """Who serves each partition, also those that a doubling under way adds, as far as is known."""


@dataclass(frozen=True, slots=True)
class SpaceChanged:
    """How much of the disk is free and how much of it is kept in reserve, both in MiB."""

    free_mb: int
    reserve_mb: int

    @property
    def enough(self) -> bool:
        """Whether the reserve is whole."""
        return self.free_mb >= self.reserve_mb


@dataclass(frozen=True, slots=True)
class TrimDue:
    """It is time to look for what may be trimmed; the host's time, Unix µs."""

    at_us: int
    keep_from: int = MAX_MSG_SEQUENCE
    """A reader needs what lies at this sequence or behind."""


@dataclass(slots=True)
class EntriesCommitted:
    """These entries follow what is in the store, and are committed. Answered by `Settle`: TAKEN when they are all written;
    what is not comes again, with what follows it."""

    entries: Sequence[Entry]
    copies: int
    """On so many disks; 0: on fewer than `min_in_sync`, and no writer is told that they are replicated."""


@dataclass(frozen=True, slots=True)
class ParentAnswered:
    """What the parent has of a question's SnowflakeIDs: (MsgID, CRC) of each, None where it has none. None: it did not answer."""

    number: int
    known: Sequence[tuple[int, int] | None] | None
    copies: int
    """Disks that what it has is on; 0: fewer than `min_in_sync`."""


Event = (
    StoreReceived | LayoutChanged | SpaceChanged | TrimDue | EntriesCommitted | ParentAnswered
    | Accepted | Rejected | Persisted | Leading | Deposed | Tick
)  # fmt: skip


# --- effects, to be done in the order in which they stand


@dataclass(slots=True)
class Result:
    """What became of some records of a stream, one after the other."""

    position: int
    """Of the first one in its stream."""
    count: int
    code: str
    """Of `pixiu.errors`; empty: they are stored."""
    sequence: int = 0
    """Stored now: of the first one; the others follow."""
    msg_id: int = 0
    """Stored before under this SnowflakeID: its MsgID."""
    text: str = ""
    partitions: int = 0
    """With WRONG_PARTITION: by how many this partition counts."""


@dataclass(slots=True)
class Answer:
    """Tell a writer what became of its records, with the triple."""

    stream: int
    results: Sequence[Result]
    triple: Triple
    copies: int = 0
    """On so many disks."""


@dataclass(frozen=True, slots=True)
class EndStream:
    """End a writer's stream: what came is no batch."""

    stream: int
    text: str


@dataclass(frozen=True, slots=True)
class NeedEpoch:
    """The sequences of this epoch are used up: the replica must be promoted anew."""


@dataclass(frozen=True, slots=True)
class AskParent:
    """Ask the partition that this one came from for SnowflakeIDs. `ParentAnswered` comes in any case."""

    number: int
    wanted: Sequence[tuple[int, bool]]
    """SnowflakeID, and whether it is derived."""


Effect = Answer | EndStream | NeedEpoch | AskParent | Propose | Settle
