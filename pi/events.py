"""Events and effects of a Pi replica's core. Those of every stored role are in `cluster.store.events`. Pure.

Source: docs/architecture.md, "A mail is sent", docs/stores.md, docs/replication.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from cluster.core.contract import EndOfTurn, Tick
from cluster.replication.core.events import Accepted, Persisted
from cluster.store.doubling.copied import Record
from cluster.store.events import Committed, LeaderChanged, Propose, Refused
from pi.inboxes.notes import NoteFound
from pi.inboxes.reading import DeviceFound
from pixiu.wire.levels import Level, Triple

NO_DEVICE: Final = -1
"""Stands for a device in reads that belong to no session."""


class ReadRequest(NamedTuple):
    """One read of an inbox."""

    uin: int
    device: int
    lane: int
    session: int
    start: int | None
    num: int
    before: int = 0
    """Not 0: entries before this one, the newest first."""
    devices: bool = False
    """True if the user's devices are wanted, too."""
    notes: bool = False
    """True if the user's notes are wanted, too."""


@dataclass(frozen=True, slots=True)
class Requested:
    """A request on a stream."""

    stream: int
    request: int
    operations: bytes
    level: Level
    reads: Sequence[ReadRequest]


@dataclass(frozen=True, slots=True)
class StreamClosed:
    """A stream has ended: its requests need no answers."""

    stream: int


@dataclass(frozen=True, slots=True)
class LayoutChanged:
    """Number of partitions, and for each the address of a Running replica, if known. That replica knows its leader."""

    version: int
    partitions: int
    addresses: dict[int, str]


@dataclass(frozen=True, slots=True)
class DoublingChanged:
    """State of this partition's doubling. `appended`: number of partitions by a SPLIT that is in the leader's log but not in the
    state; 0: there is none."""

    record: Record
    appended: int = 0


@dataclass(frozen=True, slots=True)
class StoodStill:
    """An entry cannot be applied: later entries wait for a repair, or for an operator."""

    text: str


Event = (
    Requested | StreamClosed | EndOfTurn | LeaderChanged | Accepted | Refused | Persisted | Committed | StoodStill
    | LayoutChanged | DoublingChanged | Tick
)  # fmt: skip


@dataclass(slots=True)
class ReadFound:
    """The answer to one read."""

    entries: list[tuple[int, int]]
    floor: int = 0
    gap: int = 0
    last: int = 0
    dropped: int = 0
    up_to: int = 0
    unread: int = 0
    devices: Sequence[DeviceFound] = ()
    notes: Sequence[NoteFound] = ()
    generation: int = 0
    code: str = ""


@dataclass(slots=True)
class Reply:
    """Answer a request of a stream."""

    stream: int
    request: int
    triple: Triple
    results: Sequence[int] = ()
    reads: Sequence[ReadFound] = ()
    copies: int = 0
    code: str = ""
    text: str = ""
    retry_after_ms: int = 0
    server: tuple[int, int, str] | None = None
    """(partition, of how many, address) that serves the user."""


Effect = Propose | Reply
