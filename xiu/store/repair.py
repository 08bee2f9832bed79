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


def verify(cursor: Cursor, end: int = -1) -> Checked:
    """Read every row and check every block; digest blocks that begin at or before `end`, if any."""
    checked = Checked()
    expected = 0
    row = _first_readable(cursor, b"", checked)
    while row is not None:
        key, value = row
        if key[:1] == BLOCKS:
            first: int = KEY.unpack(key)[1]
            block = blocks.decode(first, value)
            if block is None:
                checked.damaged += 1
                expected = 0
            else:
                checked.damaged += _is_hole(expected, first)
                expected = block.last + 1
                checked.blocks += 1
                checked.records += block.count
                if first <= end:
                    begin = first >> RANGE_BITS << RANGE_BITS
                    checked.ranges[begin] = xxhash.xxh64_intdigest(key + value, checked.ranges.get(begin, 0))
        before = checked.damaged
        try:
            row = cursor.next()
        except StoreDamaged:
            checked.damaged += 1
            row = _first_readable(cursor, key, checked)
        if checked.damaged > before:
            expected = 0  # a hole after damage was counted with it
        if checked.damaged >= MAX_DAMAGED:
            break
    return checked


def _is_hole(expected: int, first: int) -> bool:
    """True for a hole: sequences are dense within an epoch."""
    return bool(expected) and first != expected and first >> MSG_COUNTER_BITS == expected >> MSG_COUNTER_BITS


def _first_readable(cursor: Cursor, after: bytes, checked: Checked) -> Row | None:
    """Return the first readable row after a key, searched in doubling steps: the end of the damage is not known."""
    if not after:
        try:
            return cursor.seek(b"")
        except StoreDamaged:
            checked.damaged += 1
    number, step = int.from_bytes(after.ljust(DERIVED_KEY.size, b"\0"), "big"), 1
    limit = 1 << 8 * DERIVED_KEY.size
    while (number := number + step) < limit:
        try:
            return cursor.seek(number.to_bytes(DERIVED_KEY.size, "big"))
        except StoreDamaged:
            step *= 2
    return None


def rebuild(cursor: Cursor, head: Head, put: Callable[[Row], None], peer: Callable[[bytes], Iterator[Row]]) -> int:
    """Put all rows of the state at `head`, except the head itself: from the cursor, and from the peer where the cursor is damaged.

    Args:
        cursor: rows here, of the state at `head`.
        head: its head.
        put: called with each row.
        peer: returns another replica's rows from a key on; of the same state or a later one.

    Returns the number of rows from the peer. Raises StoreDamaged if the peer lacks missing rows; errors of `peer`.
    """
    taken, wanted, expected = 0, b"", 0
    row = _seek(cursor, b"")
    while row is not None:
        if isinstance(row, StoreDamaged):
            filled, found = 0, False
            for key, value in peer(wanted):
                wanted = key
                found = not isinstance(_seek(cursor, wanted), StoreDamaged)
                if found:
                    break
                if _belongs(key, value, head):
                    if key[:1] == BLOCKS:
                        expected = _following(expected, key, value)
                    put((key, value))
                    filled += 1
                wanted = key + b"\0"
            if not filled and not found:
                raise row
            taken += filled
            row = _seek(cursor, wanted) if found else None
        else:
            key = row[0]
            rows, expected = _fill(row, expected, head, peer)
            for each in rows:
                put(each)
            taken += sum(each != row for each in rows)
            wanted = key + b"\0"
            row = _next_row(cursor)
    if head.last >= head.floor and head.last and expected != head.last + 1:
        raise StoreDamaged(f"the other replica lacks the blocks up to {head.last:012x}")
    return taken


def _seek(cursor: Cursor, key: bytes) -> Row | StoreDamaged | None:
    """Return a row here, or its damage, to tell it from the other replica's."""
    try:
        return cursor.seek(key)
    except StoreDamaged as damage:
        return damage


def _next_row(cursor: Cursor) -> Row | StoreDamaged | None:
    try:
        return cursor.next()
    except StoreDamaged as damage:
        return damage


def _fill(row: Row, expected: int, head: Head, peer: Callable[[bytes], Iterator[Row]]) -> tuple[list[Row], int]:
    """Return the rows to put for a row here (itself, the blocks of a hole before it, or the whole block for a broken one), and the
    sequence that follows. The head is put separately."""
    key, value = row
    if key == HEAD_KEY:
        return [], expected
    if key[:1] != BLOCKS:
        return [row], expected
    first: int = KEY.unpack(key)[1]
    block = blocks.decode(first, value)
    hole = _is_hole(expected, first)
    if block is not None and not hole:
        return [row], block.last + 1
    begin = expected if hole else first
    found: list[Row] = []
    for there in peer(KEY.pack(BLOCKS, begin)):
        if there[0] > key or not _belongs(*there, head):
            break
        if there[0] < key or block is None:
            found.append(there)
    missing = [] if block is None else [row]
    found += missing
    expected = begin
    for each in found:
        if KEY.unpack(each[0])[1] != expected:
            break
        expected = _next(*each)
    if not found or expected != _next(*found[-1]) or found[-1][0] != key:
        raise StoreDamaged(f"the other replica lacks the blocks from sequence {begin:012x} to {first:012x}")
    return found, expected


def _next(key: bytes, value: bytes) -> int:
    """The sequence after an undamaged block."""
    first: int = KEY.unpack(key)[1]
    count: int = blocks.HEAD.unpack_from(value)[1]
    return first + count


def _following(expected: int, key: bytes, value: bytes) -> int:
    """The sequence after the other replica's next block. Raises StoreDamaged if one before it is missing there."""
    first: int = KEY.unpack(key)[1]
    if _is_hole(expected, first):
        raise StoreDamaged(f"the other replica lacks the blocks from sequence {expected:012x} to {first:012x}")
    return _next(key, value)


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
