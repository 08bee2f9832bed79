"""Check of everything that a Xiu stores, and rebuilding of the store with another replica's rows in damaged places. Pure.

    rows here    ──▶ whole: taken
                 ──▶ unreadable, a block with a wrong CRC, a hole in an epoch: the other replica's rows of that place
    rows there   ──▶ only what the entries up to the position of the rows here made, blocks with a right CRC

RocksDB refuses whole pages of rows when one bit of them is wrong, and goes on refusing while the file is there: writing a row again
does not help reads in order, and the next compaction fails. Therefore the store is built anew.

Source: docs/stores.md, docs/promises.md, "Failure rules".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

import xxhash

from pixiu.errors import StoreDamaged
from pixiu.ids import MSG_COUNTER_BITS, msg_sequence
from xiu.records import block as blocks
from xiu.records.block import Block
from xiu.state.dedupe import run_of_row
from xiu.state.keys import BLOCKS, DEDUPE, DERIVED, DERIVED_KEY, HEAD_KEY, HELD, HOLDS, KEY, MARK, MARKS, RUNS, SNOWFLAKES
from xiu.state.state import Head

Row = tuple[bytes, bytes]
RANGE_BITS: Final = 16
"""Sequences in a range of digests: 2^16."""
MAX_DAMAGED: Final = 100_000
"""Limit of damaged places. Policy: the walk ends there; the store is lost as a whole."""


class Cursor(Protocol):
    """Interface to rows in order, as of one moment."""

    def seek(self, key: bytes) -> Row | None:
        """Return the first row at or after a key. Raises StoreDamaged."""

    def next(self) -> Row | None:
        """Return the row after the last one. Raises StoreDamaged."""


@dataclass(slots=True)
class Checked:
    """Result of a walk."""

    blocks: int = 0
    records: int = 0
    damaged: int = 0
    """Number of unreadable places: pages of rows, blocks, holes."""
    ranges: dict[int, int] = field(default_factory=dict)
    """First sequence of a range → digest of its blocks."""


def _is_hole(expected: int, first: int) -> bool:
    """True for a hole: sequences are dense within an epoch."""
    return bool(expected) and first != expected and first >> MSG_COUNTER_BITS == expected >> MSG_COUNTER_BITS


class Walk:
    """Rows in order, each checked: a block with a wrong CRC and a hole in an epoch are damage like rows that cannot be read.

    Its methods return the next undamaged row, None at the end, or raise StoreDamaged.
    """

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self.block: Block
        """The last row's, if that is a block."""
        self.expected = 0
        """Sequence after it; 0: not known."""
        self.at = b""
        """Key from which on rows are damaged, if the last call raised."""
        self.broken = set[bytes]()
        """Keys of blocks with a wrong CRC."""

    def seek(self, key: bytes) -> Row | None:
        """Return the first row at or after a key."""
        self.at = key
        return self._checked(self._cursor.seek(key))

    def next(self) -> Row | None:
        """Return the row after the last one."""
        return self._checked(self._cursor.next())

    def resume(self) -> Row | None:
        """Return the first row after damage, searched in doubling steps: its end is not known."""
        self.expected, step, size = 0, 1, DERIVED_KEY.size
        number = int.from_bytes(self.at[:size].ljust(size, b"\0"), "big") + (len(self.at) > size)
        while number < 1 << 8 * size:
            try:
                row = self._cursor.seek(number.to_bytes(size, "big"))
            except StoreDamaged:
                number, step = number + step, 2 * step
            else:
                return self._checked(row)
        return None

    def _checked(self, row: Row | None) -> Row | None:
        if row is None:
            return None
        key, value = row
        if key[:1] == BLOCKS:
            first: int = KEY.unpack(key)[1]
            if _is_hole(self.expected, first):
                self.at = KEY.pack(BLOCKS, self.expected)
                raise StoreDamaged(f"the blocks from sequence {self.expected:012x} to {first:012x} are missing")
            block = blocks.decode(first, value)
            if block is None:
                self.at = key
                self.broken.add(key)
                raise StoreDamaged(f"the block of sequence {first:012x} has a wrong CRC")
            self.block, self.expected = block, block.last + 1
        self.at = key + b"\0"
        return row


def verify(cursor: Cursor, end: int = -1) -> Checked:
    """Read every row and check every block; digest blocks that begin at or before `end`, if any."""
    walk, checked = Walk(cursor), Checked()
    row = _tried(walk.seek, b"")
    while row is not None and checked.damaged < MAX_DAMAGED:
        if isinstance(row, StoreDamaged):
            checked.damaged += 1
            row = _tried(walk.resume)
            continue
        key, value = row
        if key[:1] == BLOCKS:
            checked.blocks += 1
            checked.records += walk.block.count
            if walk.block.first <= end:
                begin = walk.block.first >> RANGE_BITS << RANGE_BITS
                checked.ranges[begin] = xxhash.xxh64_intdigest(key + value, checked.ranges.get(begin, 0))
        row = _tried(walk.next)
    return checked


def rebuild(cursor: Cursor, head: Head, put: Callable[[Row], None], peer: Callable[[bytes], Iterator[Row]]) -> int:
    """Put all rows of the state at `head`, except the head itself: from the cursor, and from the peer where the cursor is damaged.

    Args:
        cursor: rows here, of the state at `head`.
        head: its head.
        put: called with each row.
        peer: returns another replica's rows from a key on; of the same state or a later one.

    Returns the number of rows from the peer. Raises StoreDamaged if the peer lacks missing rows; errors of `peer`.
    """
    walk, taken = Walk(cursor), 0
    row = _tried(walk.seek, b"")
    while row is not None:
        if isinstance(row, StoreDamaged):
            row, filled = _fill(row, walk, head, put, peer)
            taken += filled
        else:
            if row[0] != HEAD_KEY:
                put(row)
            row = _tried(walk.next)
    if head.last >= head.floor and head.last and walk.expected != head.last + 1:
        raise StoreDamaged(f"the other replica lacks the blocks up to {head.last:012x}")
    return taken


def _tried(move: Callable[..., Row | None], *to: bytes) -> Row | StoreDamaged | None:
    """Return a row here, or its damage, to tell it from the other replica's."""
    try:
        return move(*to)
    except StoreDamaged as damage:
        return damage


def _fill(
    damage: StoreDamaged, walk: Walk, head: Head, put: Callable[[Row], None], peer: Callable[[bytes], Iterator[Row]]
) -> tuple[Row | None, int]:
    """Put the other replica's rows from where the damage begins to the first undamaged row here; return that, and their number."""
    filled = 0
    row: Row | StoreDamaged | None = damage
    for key, value in peer(walk.at):
        if not isinstance(row := _tried(walk.seek, key), StoreDamaged):
            break
        if not _belongs(key, value, head):
            continue
        if key[:1] == BLOCKS:
            first: int = KEY.unpack(key)[1]
            if _is_hole(walk.expected, first):
                raise StoreDamaged(f"the other replica lacks the blocks from sequence {walk.expected:012x} to {first:012x}")
            walk.expected = first + blocks.HEAD.unpack_from(value)[1]
        put((key, value))
        filled += 1
        walk.broken.discard(key)
        if not isinstance(row := _tried(walk.seek, key + b"\0"), StoreDamaged):
            break
    if walk.broken:
        raise StoreDamaged(f"the other replica lacks the block of sequence {KEY.unpack(min(walk.broken))[1]:012x}") from damage
    if isinstance(row, StoreDamaged):  # the other replica has no more rows
        if not filled:
            raise damage
        row = None
    return row, filled


def _belongs(key: bytes, value: bytes, head: Head) -> bool:
    """True if a row of another replica belongs to the state at `head` and is undamaged; later rows do not."""
    space = key[:1]
    if space == DERIVED:
        return len(key) == DERIVED_KEY.size and len(value) == DEDUPE.size and _dedupe_sequence(value) <= head.last
    if space == HOLDS:
        return len(value) == HELD.size
    if len(key) != KEY.size:
        return False
    sequence: int = KEY.unpack(key)[1]
    if space == SNOWFLAKES:
        return len(value) == DEDUPE.size and _dedupe_sequence(value) <= head.last
    if space == RUNS:
        run = run_of_row(key, value)
        return run is not None and msg_sequence(run.msg_id) + len(run.lows) - 1 <= head.last
    if space == MARKS:
        return len(value) == MARK.size and sequence <= head.last
    return space == BLOCKS and head.floor <= sequence <= head.last and blocks.decode(sequence, value) is not None


def _dedupe_sequence(value: bytes) -> int:
    return msg_sequence(DEDUPE.unpack(value)[0])
