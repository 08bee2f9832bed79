"""A part as its group holds it: which offsets, which writers, what follows. Pure.

Source: docs/topics.md, "Writing".
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, NamedTuple

from cluster.topics.entries import Child, KnownWriter, number_of
from pixiu.objects.manifest import StoredObject
from pixiu.placement.slots import SLOTS
from pixiu.wire.block import MAX_OFFSET, Block

MAX_WRITERS: Final = 10_000
"""Writers that a part knows. Policy: those unseen for `WRITER_KEPT_US` are forgotten, and while there are none new ones are
refused."""
MAX_INHERITED: Final = 40_000
"""States of writers in parts before this one that its children inherit. Policy: those of the oldest parts are forgotten."""
WRITER_KEPT_US: Final = 30 * 24 * 3600 * 1_000_000


class Verdict(IntEnum):
    """Outcome of a block."""

    STORED = 0
    REPEATED = 1
    """All of its positions are stored already."""
    HOLE = 2
    """Positions before it are missing, or it repeats some and has new ones too."""
    SEALED = 3
    NOT_HERE = 4
    """This group does not hold the part, or not the message's slot."""
    TOO_MANY_WRITERS = 5
    FULL = 6
    """The part has no offsets left: it has to be sealed."""
    DELETED = 7
    """The topic is deleted."""


@dataclass(slots=True)
class Writer:
    """A writer in a part."""

    position: int
    """Of the last stored message."""
    progress: int
    seen_us: int
    first: int
    """Position of the first message of its last block."""
    base: int
    """Offset of that message."""


class Appended(NamedTuple):
    """Outcome of a block, with what its writer has to know in any case."""

    verdict: Verdict
    position: int
    """Last stored position of the writer in this part."""
    base: int = -1
    """Offset of its first message; -1: it is not stored, or a repetition whose offset is no longer known."""


@dataclass(slots=True)
class Part:
    """One part."""

    part: int
    low: int
    high: int
    parents: tuple[int, ...] = ()
    """Numbers of the parts before it."""
    first: int = 0
    """Offset of the oldest message that is kept."""
    end: int = 0
    """Offset of the next message."""
    sealed: bool = False
    children: tuple[Child, ...] = ()
    writers: dict[int, Writer] = field(default_factory=dict)
    inherited: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """(number of a part before this one, writer) → last position and progress there."""

    _by_writer: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict, repr=False, compare=False)
    """Writer → (part, position, progress) of what it has in `inherited`, of the first `_indexed` of these."""
    _indexed: int = field(default=0, repr=False, compare=False)

    flags: int = 0
    """Flags of all messages that were ever stored in it, joined by OR."""
    deleted: bool = False
    """Its topic is."""
    opening: bool = False
    """True while it does not know all of its parents' writers: to clients it is not here."""
    stored: int = 0
    """Offset below which everything that is kept is in the object store."""
    stores: tuple[str, ...] = ()
    """URLs of the stores in which it ever had objects."""
    objects: list[StoredObject] = field(default_factory=list)
    """Its objects in the store, rising. A change makes a new list: a thread may read the other."""

    def object_at(self, offset: int) -> StoredObject | None:
        """The object that has an offset."""
        number = bisect_right(self.objects, offset, key=lambda each: each.base) - 1
        return self.objects[number] if number >= 0 and offset < self.objects[number].end else None

    def uploaded(self, new: StoredObject) -> str | list[StoredObject]:
        """Take an object that is in the store. Returns those that it takes the place of, or why it is not taken."""
        kept = [each for each in self.objects if each.base < new.base]
        if not new.base < new.end <= self.end:
            return f"the part ends at {self.end}; [{new.base}, {new.end}) is not in it"
        if new.end <= self.stored or (kept and kept[-1].end > new.base):
            return f"the store has the part up to {self.stored}; [{new.base}, {new.end}) does not follow"
        replaced = self.objects[len(kept) :]
        self.objects, self.stored = [*kept, new], new.end
        if new.url not in self.stores:
            self.stores = (*self.stores, new.url)
        return replaced

    def expire(self) -> list[StoredObject]:
        """Forget the objects of which nothing is kept. Returns them."""
        gone = sum(each.end <= self.first for each in self.objects)
        expired, self.objects = self.objects[:gone], self.objects[gone:]
        return expired

    def judge(self, writer: int, first: int, count: int, at_us: int) -> Appended:
        """The outcome of a writer's messages; changes nothing."""
        known = self.writers.get(writer)
        position = known.position if known else 0
        if known and first + count - 1 <= position:
            base = known.base + first - known.first if first >= known.first else -1
            return Appended(Verdict.REPEATED, position, base)
        if self.sealed:
            return Appended(Verdict.SEALED, position)
        if self.deleted:
            return Appended(Verdict.DELETED, position)
        if first != position + 1:
            return Appended(Verdict.HOLE, position)
        if known is None and len(self.writers) >= MAX_WRITERS and next(self._forgettable(at_us), None) is None:
            return Appended(Verdict.TOO_MANY_WRITERS, 0)
        if self.end + count > MAX_OFFSET:
            return Appended(Verdict.FULL, position)
        return Appended(Verdict.STORED, position + count, self.end)

    def holds(self, block: Block) -> bool:
        """True if every message's slot belongs to the part."""
        if self.high - self.low == SLOTS:
            return True
        slots = block.slots()
        return self.low <= min(slots) and max(slots) < self.high

    def append(self, block: Block, at_us: int) -> tuple[Appended, list[int]]:
        """Take a block. Returns the outcome, and the writers that were forgotten to make place."""
        found, forgotten = self.judge(block.writer, block.first, block.count, at_us), list[int]()
        if found.verdict is Verdict.STORED:
            known = self.writers.get(block.writer)
            if known is None and len(self.writers) >= MAX_WRITERS:
                forgotten = list(self._forgettable(at_us))
                for writer in forgotten:
                    del self.writers[writer]
            progress = block.progress or (known.progress if known else self.inherited_progress(block.writer))
            self.writers[block.writer] = Writer(block.last, progress, at_us, block.first, self.end)
            self.end += block.count
            self.flags |= block.flags
        return found, forgotten

    def _forgettable(self, at_us: int) -> Iterator[int]:
        return (number for number, writer in self.writers.items() if writer.seen_us < at_us - WRITER_KEPT_US)

    def inherited_of(self, writer: int) -> list[tuple[int, int, int]]:
        """All that a writer has in the parts before this one: (number of the part, position, progress). A part inherits once, and
        may inherit much."""
        if self._indexed != len(self.inherited):
            self._by_writer, self._indexed = {}, len(self.inherited)
            for (part, each), state in self.inherited.items():
                self._by_writer.setdefault(each, []).append((part, *state))
        return self._by_writer.get(writer, [])

    def inherited_progress(self, writer: int) -> int:
        """A writer's progress in the parts before this one."""
        return max((progress for _, _, progress in self.inherited_of(writer)), default=0)

    def known_writers(self) -> list[KnownWriter]:
        """The writers' states that a child inherits, this part's and what it has inherited itself; equal on every replica. What
        is older than this part counts while it says more of a writer's progress: so it does not add up with each seal."""
        own = [KnownWriter(number_of(self.part), number, each.position, each.progress) for number, each in self.writers.items()]
        here = {number: each.progress for number, each in self.writers.items()}  # of all slots of this part
        before = [
            KnownWriter(part, writer, *state) for (part, writer), state in self.inherited.items() if state[1] > here.get(writer, 0)
        ]
        return sorted(own + sorted(before)[-MAX_INHERITED:])
