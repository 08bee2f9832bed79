"""Blocks in memory, read or just appended: the least recently used goes first.

Source: docs/topics.md, "How it is stored".
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict

from pixiu.wire.block import Block, Stamp


class Blocks:
    """Blocks of all parts of a process.

    Args:
        limit_bytes: of all of them.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.size = 0
        """Bytes of blocks that are kept."""
        self._blocks: OrderedDict[tuple[int, int], tuple[Stamp, Block]] = OrderedDict()
        """(part, base) → stamp and block, in order of use."""
        self._bases: dict[int, list[int]] = {}
        """Part → bases, rising."""

    def put(self, part: int, stamp: Stamp, block: Block) -> None:
        """Keep a block."""
        key = part, stamp.base
        if key in self._blocks:
            return
        self._blocks[key] = stamp, block
        self.size += len(block.data)
        bases = self._bases.setdefault(part, [])
        if not bases or bases[-1] < stamp.base:
            bases.append(stamp.base)
        else:
            insort(bases, stamp.base)
        while self.size > self.limit_bytes:
            (gone, base), (_, old) = self._blocks.popitem(last=False)
            self._forget(gone, base, old)

    def find(self, part: int, offset: int) -> tuple[Stamp, Block] | None:
        """The block with an offset, if it is kept."""
        bases = self._bases.get(part)
        if bases is None:
            return None
        at = bisect_right(bases, offset) - 1
        if at < 0:
            return None
        key = part, bases[at]
        found = self._blocks[key]
        if offset >= found[0].base + found[1].count:
            return None
        self._blocks.move_to_end(key)
        return found

    def drop(self, part: int) -> None:
        """Forget the blocks of a part."""
        for base in self._bases.pop(part, ()):
            _, block = self._blocks.pop((part, base))
            self.size -= len(block.data)

    def clear(self) -> None:
        """Forget all blocks."""
        self._blocks.clear()
        self._bases.clear()
        self.size = 0

    def _forget(self, part: int, base: int, block: Block) -> None:
        self.size -= len(block.data)
        bases = self._bases[part]
        del bases[bisect_right(bases, base) - 1]
        if not bases:
            del self._bases[part]
