"""Acknowledged offsets of a channel in one part: a floor, and above it bitmaps of 4,096 offsets each. Pure.

A million holes cost 500 bitmaps of 512 bytes at worst; there is no cap, so nothing acknowledged is ever forgotten.

Source: docs/topics.md, "Channels".
"""

from __future__ import annotations

from typing import Final

CHUNK_BITS: Final = 12
CHUNK: Final = 1 << CHUNK_BITS


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

    def add(self, low: int, high: int) -> set[int]:
        """Acknowledge [low, high). Returns the numbers of the bitmaps that changed or went."""
        touched = set[int]()
        if low <= self.floor:
            touched |= self.raise_floor(high)
        else:
            for chunk in range(low >> CHUNK_BITS, (high - 1 >> CHUNK_BITS) + 1):
                base = chunk << CHUNK_BITS
                begin, end = max(low - base, 0), min(high - base, CHUNK)
                if end > begin:
                    self.chunks[chunk] = self.chunks.get(chunk, 0) | ((1 << end - begin) - 1) << begin
                    touched.add(chunk)
        return touched

    def raise_floor(self, to: int) -> set[int]:
        """Acknowledge everything below an offset. Returns the numbers of the bitmaps that went."""
        if to <= self.floor:
            return set()
        self.floor = self.next_missing(to)
        gone = {chunk for chunk in self.chunks if chunk < self.floor >> CHUNK_BITS}
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
