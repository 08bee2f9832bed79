"""Cursors: {UpTo, 64-bit map of the next 64}, as in inboxes and acknowledgements. Pure.

Source: docs/delivery.md, docs/pi.md.
"""

from __future__ import annotations

from typing import Final

MAP_BITS: Final = 64
_MAP_MASK: Final = (1 << MAP_BITS) - 1


class Cursor:
    """Acknowledgements of a device in one lane: everything up to a number, and some of the next 64."""

    __slots__ = ("bits", "up_to")

    def __init__(self, up_to: int = 0, bits: int = 0) -> None:
        self.up_to = up_to
        """Everything up to here is acknowledged."""
        self.bits = bits
        """Bit i: `up_to` + 1 + i is acknowledged too."""

    def acknowledge(self, up_to: int, bits: int) -> bool:
        """Take an acknowledgement; the cursor never goes back. True if something changed."""
        mine, mine_bits = self.up_to, self.bits
        if up_to < mine:
            up_to, bits = mine, mine_bits | bits >> (mine - up_to)
        else:
            bits |= mine_bits >> (up_to - mine)
        while bits & 1:
            run = (~bits & bits + 1).bit_length() - 1
            up_to, bits = up_to + run, bits >> run
        bits &= _MAP_MASK
        self.up_to, self.bits = up_to, bits
        return up_to != mine or bits != mine_bits

    def has(self, seq: int) -> bool:
        """True if an entry was acknowledged."""
        return seq <= self.up_to or bool(self.bits >> (seq - self.up_to - 1) & 1)
