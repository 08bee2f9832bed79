"""Blocks in memory: found by any of their offsets, and the least recently used go first."""

from __future__ import annotations

from pixiu.wire.block import Block, Stamp, parse
from tests.topic.builders import written
from topic.storage.cache import Blocks


def block(count: int = 2) -> Block:
    return parse(written(*range(count)))


def test_a_block_is_found_by_each_of_its_offsets() -> None:
    blocks = Blocks(1 << 20)
    for base in (10, 4, 20):
        blocks.put(1, Stamp(base, 0, 0), block())
    found = {offset: each[0].base for offset in range(30) if (each := blocks.find(1, offset)) is not None}
    assert found == {4: 4, 5: 4, 10: 10, 11: 10, 20: 20, 21: 20}
    assert blocks.find(2, 4) is None


def test_memory_is_bounded_and_what_was_used_stays() -> None:
    size = len(block().data)
    blocks = Blocks(3 * size)
    for base in (0, 2, 4):
        blocks.put(1, Stamp(base, 0, 0), block())
    assert blocks.find(1, 0) is not None
    blocks.put(2, Stamp(0, 0, 0), block())
    assert [blocks.find(1, base) is not None for base in (0, 2, 4)] == [True, False, True]
    assert blocks.size == 3 * size
    blocks.put(1, Stamp(4, 0, 0), block())
    assert blocks.size == 3 * size
    blocks.drop(1)
    assert (blocks.size, blocks.find(1, 0)) == (size, None)
    blocks.clear()
    assert (blocks.size, blocks.find(2, 0)) == (0, None)
