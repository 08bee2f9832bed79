"""Acknowledged offsets of a channel in one part: a floor, and above it bitmaps of 4,096 offsets each. Pure.

A million holes cost 500 bitmaps of 512 bytes at worst; there is no cap, so nothing acknowledged is ever forgotten.

Source: docs/topics.md, "Channels".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import Final

CHUNK_BITS: Final = 12
CHUNK: Final = 1 << CHUNK_BITS
MANY: Final = 4
SHORT: Final = 32
"""Ranges and offsets in one from which on other ways are faster."""
_NONE: Final = frozenset[int]()


class Acks:
    """A set of offsets that grows from below.

    Args:
        floor: every offset below it is acknowledged.
    """

    __slots__ = ("chunks", "floor")

    def __init__(self, floor: int = 0) -> None:
        self.floor = floor
        self.chunks: dict[int, int] = {}
        """Number of a chunk, offset >> 12, → bitmap. The one with the floor may have bits below it."""

    def __contains__(self, offset: int) -> bool:
        return offset < self.floor or bool(self.chunks.get(offset >> CHUNK_BITS, 0) >> (offset & CHUNK - 1) & 1)

    def add(self, low: int, high: int) -> Set[int]:
        """Acknowledge [low, high). Returns the numbers of the bitmaps that changed or went."""
        if low <= self.floor:
            return self.raise_floor(high)
        touched, chunks = set[int](), self.chunks
        for chunk in range(low >> CHUNK_BITS, (high - 1 >> CHUNK_BITS) + 1):
            base = chunk << CHUNK_BITS
            begin, end = max(low - base, 0), min(high - base, CHUNK)
            if end > begin:
                chunks[chunk] = chunks.get(chunk, 0) | ((1 << end - begin) - 1) << begin
                touched.add(chunk)
        return touched

    def add_all(self, ranges: Sequence[tuple[int, int]]) -> Set[int]:
        """Acknowledge ranges; many short ones cost less than singly. Returns the numbers of the bitmaps that changed or went."""
        if len(ranges) < MANY:
            return {chunk for low, high in ranges if low < high for chunk in self.add(low, high)}
        touched, floor, short = set[int](), self.floor, dict[int, bytearray]()
        for low, high in ranges:
            chunk = low >> CHUNK_BITS
            if low >= high:
                continue
            if low <= self.floor:
                floor = max(floor, high)
            elif high - low > SHORT or high - 1 >> CHUNK_BITS != chunk:
                touched |= self.add(low, high)
            else:
                bits = short.get(chunk)
                if bits is None:
                    bits = short[chunk] = bytearray(CHUNK // 8)
                for at in range(low & CHUNK - 1, (low & CHUNK - 1) + high - low):
                    bits[at >> 3] |= 1 << (at & 7)
        for chunk, bits in short.items():
            self.chunks[chunk] = self.chunks.get(chunk, 0) | int.from_bytes(bits, "little")
            touched.add(chunk)
        return touched | self.raise_floor(floor)

    def raise_floor(self, to: int) -> Set[int]:
        """Acknowledge everything below an offset. Returns the numbers of the bitmaps that went."""
        if to <= self.floor:
            return _NONE
        if not self.chunks:
            self.floor = to
            return _NONE
        before, self.floor = self.floor >> CHUNK_BITS, self.next_missing(to)
        now = self.floor >> CHUNK_BITS
        if now - before < len(self.chunks):
            gone = {chunk for chunk in range(before, now) if chunk in self.chunks}
        else:
            gone = {chunk for chunk in self.chunks if chunk < now}
        for chunk in gone:
            del self.chunks[chunk]
        return gone

    def reset(self, floor: int) -> set[int]:
        """Become what has this floor and nothing above it. Returns the numbers of the bitmaps that went."""
        gone = set(self.chunks)
        self.chunks.clear()
        self.floor = floor
        return gone

    def next_missing(self, offset: int) -> int:
        """The first offset from this one on that is not acknowledged."""
        offset = max(offset, self.floor)
        while bits := self.chunks.get(offset >> CHUNK_BITS, 0) >> (offset & CHUNK - 1):
            if not bits & 1:
                break
            offset += (~bits & bits + 1).bit_length() - 1
        return offset

    def next_gap(self, offset: int, end: int, limit: int) -> tuple[int, int]:
        """The first offsets [low, high) from this one on, below `end` and at most `limit`, that are not acknowledged; without any,
        low >= high."""
        low = self.next_missing(offset)
        end = min(end, low + limit)
        if not self.chunks:
            return low, end
        high = low
        while high < end:
            chunk, at = high >> CHUNK_BITS, high & CHUNK - 1
            bits = self.chunks.get(chunk, 0) >> at
            if bits:
                high += (bits & -bits).bit_length() - 1
                break
            high = chunk + 1 << CHUNK_BITS
        return low, min(high, end)

    def gaps(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        """The offsets of [low, high) that are not acknowledged, as ranges, rising."""
        while low < high:
            begin, end = self.next_gap(low, high, high - low)
            if begin >= end:
                return
            yield begin, end
            low = end

    def missing_in(self, low: int, high: int) -> int:
        """Number of offsets of [low, high) that are not acknowledged."""
        low = max(low, self.floor)
        if low >= high:
            return 0
        found = high - low
        for chunk, bits in self.chunks.items():
            base = chunk << CHUNK_BITS
            begin, end = max(low - base, 0), min(high - base, CHUNK)
            if end > begin:
                found -= (bits >> begin & (1 << end - begin) - 1).bit_count()
        return found
