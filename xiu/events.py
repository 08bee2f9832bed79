"""Events and effects of a Xiu's core. Those of every stored role are in `cluster.store.events`. Pure.

Source: PiXiu §6.1.1; Swift (the triple V, S, C); docs/promises.md, docs/architecture.md, docs/stores.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.core.contract import Settle, Tick
from cluster.replication.core.events import Accepted, Persisted
from cluster.store.events import Committed, LeaderChanged, Propose, Refused
from pixiu.errors import Refusal
from pixiu.ids import MAX_MSG_SEQUENCE
from pixiu.wire.levels import Level, Triple

# --- events


@dataclass(slots=True)
class StoreReceived:
    """`count` records from one writer's stream, end to end in `data`."""

    stream: int
    position: int
    """Position of the first record in the stream."""
    level: Level
    epoch: int
    """S as the writer knows it; 0: it knows none yet."""
    data: bytes
    count: int


@dataclass(frozen=True, slots=True)
class LayoutChanged:
    """The layout's version, and its number of Xiu partitions; 0: unknown."""

    version: int
    partitions: int
    addresses: tuple[str, ...] = ()
    """Server of each partition, if known, including partitions that a doubling in progress adds."""


@dataclass(frozen=True, slots=True)
class SpaceChanged:
    """Free space of the disk, and the reserve that must stay free, both in MiB."""

    free_mb: int
    reserve_mb: int

    @property
    def enough(self) -> bool:
        """True if the reserve is free."""
        return self.free_mb >= self.reserve_mb


@dataclass(frozen=True, slots=True)
class TrimDue:
    """Records may be due for trimming; the host's time, Unix µs."""

    at_us: int
    keep_from: int = MAX_MSG_SEQUENCE
    """A reader needs records from this sequence on."""


@dataclass(frozen=True, slots=True)
class ParentAnswered:
    """The parent's answer: (MsgID, CRC) of each SnowflakeID, None if it has none. `known` None: it did not answer."""

    number: int
    known: Sequence[tuple[int, int] | None] | None
    copies: int
    """Number of disks with the records that it has; 0: fewer than `min_in_sync`."""


Event = (
    StoreReceived | LayoutChanged | SpaceChanged | TrimDue | ParentAnswered
    | LeaderChanged | Accepted | Refused | Persisted | Committed | Tick
)  # fmt: skip


# --- effects, to be performed in order


@dataclass(slots=True)
class Result:
    """Outcome of consecutive records of a stream."""

    position: int
    """Position of the first one in its stream."""
    count: int
    code: str
    """Code of `pixiu.errors`; empty: they are stored."""
    sequence: int = 0
    """Stored now: sequence of the first one; the others follow."""
    msg_id: int = 0
    """Stored before under this SnowflakeID: its MsgID."""
    text: str = ""
    partitions: int = 0
    """With WRONG_PARTITION: number of partitions by which this one assigns users."""
    retry_after_ms: int = 0


def refused(position: int, count: int, why: Refusal, partitions: int = 0) -> Result:
    """Return the result of consecutive records that were refused."""
    return Result(position, count, why.code, text=why.text, partitions=partitions, retry_after_ms=why.retry_after_ms)


@dataclass(slots=True)
class Answer:
    """Report the outcome of records to their writer, with the triple."""

    stream: int
    results: Sequence[Result]
    triple: Triple
    copies: int = 0
    """Number of disks with them."""


@dataclass(frozen=True, slots=True)
class EndStream:
    """End a writer's stream after a malformed batch."""

    stream: int
    text: str


@dataclass(frozen=True, slots=True)
class NeedEpoch:
    """Request a new promotion: the sequences of this epoch are used up."""


@dataclass(frozen=True, slots=True)
class AskParent:
    """Ask the parent partition for SnowflakeIDs. `ParentAnswered` follows in any case."""

    number: int
    wanted: Sequence[tuple[int, bool]]
    """SnowflakeID, and True if it is derived."""


Effect = Answer | EndStream | NeedEpoch | AskParent | Propose | Settle
