"""The slots of a topic and the parts that hold them, through splits, merges and moves. Pure.

    part 1 [0, 65536)  ──split──▶  part 2 [0, 32768)      ──merge──▶  part 4 [0, 65536)
         sealed                    part 3 [32768, 65536)
                                        sealed                            open

A part is ended by a seal and followed by its children; nothing is copied. A slot is in order for whoever reads it in a part after
having finished it in the parent of that part.

Source: docs/topics.md, "Slots, parts and their lineage".
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple

import xxhash

from pixiu.errors import InvalidArgument

SLOTS: Final = 65_536
"""Slots of every topic."""
MAX_PARTS: Final = 20_000
"""Parts of a topic, sealed ones included. Policy: a change that would make more is refused."""


def slot_of(key: bytes) -> int:
    """The slot of a key: xxh3_64(key) % 65536."""
    return xxhash.xxh3_64_intdigest(key) % SLOTS


class Part(NamedTuple):
    """A contiguous range of slots of one topic, stored together under offsets of its own."""

    number: int
    """From 1; a topic's numbers rise and are never given again."""
    low: int
    high: int
    """The slots [low, high)."""
    group: int
    """The group of replicas that holds it."""
    parents: tuple[int, ...] = ()
    """Numbers of the sealed parts that held its slots before; some may be gone since."""
    sealed: bool = False

    def overlaps(self, other: Part) -> bool:
        """True if both have a slot in common."""
        return self.low < other.high and other.low < self.high


class Range(NamedTuple):
    """A part to be: the slots [low, high), in a group."""

    low: int
    high: int
    group: int


class Lineage:
    """The parts of one topic: those that are open, which hold every slot once, and the sealed ones that are still kept.

    Raises InvalidArgument if the parts do not fit together; the text names the part.
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        self.parts = {part.number: part for part in sorted(parts)}
        """By number, rising."""
        self._open = sorted((part.low, part) for part in self.parts.values() if not part.sealed)
        self._lows = [low for low, _ in self._open]
        self._children: dict[int, list[Part]] = {number: [] for number in self.parts}
        for part in self.parts.values():
            for parent in part.parents:
                if parent in self._children:
                    self._children[parent].append(part)
        self._check()

    def _check(self) -> None:
        if len(self.parts) > MAX_PARTS:
            raise InvalidArgument(f"a topic has at most {MAX_PARTS} parts, these are {len(self.parts)}")
        for part in self.parts.values():
            if not 0 <= part.low < part.high <= SLOTS or part.number < 1:
                raise InvalidArgument(f"part {part.number} has the slots [{part.low}, {part.high}), which do not exist")
            known = [self.parts[parent] for parent in part.parents if parent in self.parts]
            if (
                any(not parent.sealed or not parent.overlaps(part) for parent in known)
                or max(part.parents, default=0) >= part.number
            ):
                raise InvalidArgument(f"part {part.number} cannot follow the parts {part.parents}")
            if part.parents and len(known) == len(part.parents) and not _tile(known, part.low, part.high, exact=False):
                raise InvalidArgument(f"the parents of part {part.number} did not hold all of its slots once")
            if part.sealed and not _tile(self._children[part.number], part.low, part.high, exact=False):
                raise InvalidArgument(f"the children of the sealed part {part.number} do not hold all of its slots once")
        if not _tile([part for _, part in self._open], 0, SLOTS, exact=True):
            raise InvalidArgument(f"the open parts do not hold each of the {SLOTS} slots once")

    @classmethod
    def new(cls, ranges: Sequence[Range]) -> Lineage:
        """The parts of a new topic, numbered from 1."""
        return cls(Part(number, *each) for number, each in enumerate(ranges, 1))

    @property
    def next_number(self) -> int:
        """The number of the next part. The newest part is open or has newer children, so a number is never given again."""
        return max(self.parts, default=0) + 1

    def open_part(self, slot: int) -> Part:
        """The part that takes what is written to a slot."""
        return self._open[bisect_right(self._lows, slot) - 1][1]

    def open_parts(self) -> tuple[Part, ...]:
        """The parts that take writes, by their slots."""
        return tuple(part for _, part in self._open)

    def children(self, number: int) -> tuple[Part, ...]:
        """The parts that took over the slots of a sealed part."""
        return tuple(self._children[number])

    def parent(self, number: int, slot: int) -> Part | None:
        """The part that held a slot before this one; None if there was none, or it is gone."""
        known = (self.parts.get(parent) for parent in self.parts[number].parents)
        return next((part for part in known if part is not None and part.low <= slot < part.high), None)

    def resized(self, sealed: Collection[int], ranges: Sequence[Range]) -> Lineage:
        """The lineage after these open parts were sealed and followed by children with these ranges: a split, a merge, a move, or
        several of them. Raises InvalidArgument."""
        if not sealed or any(number not in self.parts or self.parts[number].sealed for number in sealed):
            raise InvalidArgument(f"only open parts can be followed by others; {sorted(sealed)} are not all open")
        parents = [self.parts[number]._replace(sealed=True) for number in sorted(sealed)]
        first = self.next_number
        children = [Part(first + at, *each) for at, each in enumerate(ranges)]
        children = [
            child._replace(parents=tuple(parent.number for parent in parents if parent.overlaps(child))) for child in children
        ]
        rest = [part for part in self.parts.values() if part.number not in sealed]
        return Lineage([*rest, *parents, *children])

    def without(self, number: int) -> Lineage:
        """The lineage after all of a sealed part was dropped by retention. Raises InvalidArgument while a parent of it is kept."""
        part = self.parts[number]
        if not part.sealed or any(parent in self.parts for parent in part.parents):
            raise InvalidArgument(f"part {number} is open, or follows a part that is kept; drop that one first")
        return Lineage(each for each in self.parts.values() if each.number != number)


def _tile(parts: Iterable[Part], low: int, high: int, *, exact: bool) -> bool:
    """True if parts hold each slot of [low, high) once; if not `exact`, they may reach beyond it."""
    at = low
    for part in sorted(parts, key=lambda part: part.low):
        if (part.low if exact else max(part.low, low)) != at:
            return False
        at = part.high if exact else min(part.high, high)
    return at == high
