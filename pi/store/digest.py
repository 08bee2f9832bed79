"""Digests of a state, one for each range of users, so that two replicas can be compared without transferring rows. Pure.

    range of a row    the top bits of its UIN times a constant: equally many users in each, whatever the UINs
    digest            the sum of a hash of every row, modulo 2^64: rows come in any order

A row is a key and its value with the value's CRC, as stored; for a chunk, its entries.

Source: docs/replication.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import xxhash

from pi.inboxes.chunk import content_of
from pi.keys import uin_of

RANGE_BITS: Final = 8
RANGES: Final = 1 << RANGE_BITS
NOBODY: Final = RANGES
"""Range of rows that belong to no user: the position, the clock, writers' generations."""
_SPREAD: Final = 0x9E37_79B9_7F4A_7C15
_SHIFT: Final = 64 - RANGE_BITS
_MASK: Final = (1 << 64) - 1


def range_of_user(uin: int) -> int:
    """The range of a user's rows."""
    return (uin * _SPREAD & _MASK) >> _SHIFT


def range_of(key: bytes) -> int:
    """The range of a row. A key that no version of this program wrote belongs to `NOBODY`."""
    uin = uin_of(key)
    return NOBODY if uin is None else range_of_user(uin)


class Digest:
    """Sums of row hashes, by range of users."""

    def __init__(self) -> None:
        self.rows = self.size = 0
        """Number of rows, and their bytes."""
        self.sums = [0] * (RANGES + 1)

    def add(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        """Add rows, each once."""
        sums, count, size, value_of = self.sums, 0, 0, xxhash.xxh3_64_intdigest
        for key, value in rows:
            place = range_of(key)
            # A key's first byte determines its length, so no other row has the same bytes.
            sums[place] = sums[place] + value_of(key + (content_of(value) if key[:1] == b"K" else value)) & _MASK
            count += 1
            size += len(key) + len(value)
        self.rows += count
        self.size += size

    @property
    def total(self) -> int:
        """One number for all rows."""
        return sum(self.sums) & _MASK
