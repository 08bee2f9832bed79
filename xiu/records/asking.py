"""A child's batches that wait for the parent's answers about their SnowflakeIDs. Those of one stream leave in order. Pure.

Source: docs/doubling.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from pixiu.wire.record import SIZE_FIELD
from xiu.records.batch import RecordRun

BatchT = TypeVar("BatchT")


@dataclass(frozen=True, slots=True)
class Asked:
    """A SnowflakeID in a question to the parent."""

    index: int
    """Index of its record in the batch."""
    snowflake: int
    derived: bool
    crc: int


class Held(Generic[BatchT]):
    """A waiting batch."""

    __slots__ = ("answered", "asked", "batch", "copies", "known", "runs", "stream")

    def __init__(self, stream: int, batch: BatchT, runs: Sequence[RecordRun], asked: Sequence[Asked] = ()) -> None:
        self.stream = stream
        self.batch = batch
        self.runs = runs
        self.asked = asked
        """Empty for a batch that only waits for others of its stream."""
        self.answered = True
        self.known: Mapping[int, tuple[int, int]] | None = {}
        """Index of a record → (MsgID, CRC) in the parent; None: it does not answer."""
        self.copies = 0
        """Number of disks with these; 0: fewer than `min_in_sync`."""


class Asking(Generic[BatchT]):
    """All waiting batches. Bounded by the streams' windows."""

    def __init__(self) -> None:
        self._streams: dict[int, deque[Held[BatchT]]] = {}
        self._asked: dict[int, Held[BatchT]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._streams.values()))

    def waits(self, stream: int) -> bool:
        """True if a batch of a stream waits: later ones must wait, too."""
        return stream in self._streams

    def add(self, number: int, held: Held[BatchT]) -> None:
        """Add a batch that waits, for the answer to its question if it has one."""
        self._streams.setdefault(held.stream, deque()).append(held)
        if held.asked:
            held.answered = False
            self._asked[number] = held

    def answer(self, number: int, known: Sequence[tuple[int, int] | None] | None, copies: int) -> Iterator[Held[BatchT]]:
        """Take the parent's answer: for each SnowflakeID (MsgID, CRC) or None, and the number of disks with them; `known` None: no
        answer. Yields batches that no longer need to wait."""
        held = self._asked.pop(number, None)
        if held is None:
            return
        held.answered, held.copies = True, copies
        if known is None:
            held.known = None
        else:
            pairs = zip(held.asked, known, strict=True)
            held.known = {asked.index: found for asked, found in pairs if found is not None}
        waiting = self._streams[held.stream]
        while waiting and waiting[0].answered:
            yield waiting.popleft()
        if not waiting:
            del self._streams[held.stream]

    def drop(self) -> list[BatchT]:
        """Drop all waiting batches; return them."""
        lost = [held.batch for waiting in self._streams.values() for held in waiting]
        self._streams, self._asked = {}, {}
        return lost


def without(runs: Sequence[RecordRun], left_out: frozenset[int]) -> list[RecordRun]:
    """Remove records, by their indexes in a batch, from its runs."""
    kept: list[RecordRun] = []
    for run in runs:
        if left_out.isdisjoint(range(run.index, run.index + run.count)):
            kept.append(run)
            continue
        at = begin = 0
        first = run.index
        for index in range(run.index, run.index + run.count):
            after = at + SIZE_FIELD + int.from_bytes(run.records[at : at + SIZE_FIELD], "little")
            if index in left_out:
                if index > first:
                    kept.append(RecordRun(first, index - first, run.records[begin:at]))
                begin, first = after, index + 1
            at = after
        if run.index + run.count > first:
            kept.append(RecordRun(first, run.index + run.count - first, run.records[begin:]))
    return kept
