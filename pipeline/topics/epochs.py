"""Rows that a task of the sink has to write, without those that are stored because its epoch was written before. Pure.

    rows of a task ──▶ slot ──▶ open part ──▶ stored there, or in a part before it? ──▶ blocks with the next positions

A task is a writer of its own, by the query and Spark's partition, and its blocks carry a mark as their progress:

    bits  63 … 36    35 … 8                                      7 … 0
          epoch + 1  rows of the task up to the block's last     check: CRC of these rows

Rows go to a part in the order of the task. So a mark in a part says: every row up to it that belongs there is stored. A repeated
epoch skips these rows, and goes on behind them. What a part before had counts only for the slots of that part: with two parents,
one may have more than the other.

Spark must compute the same rows in the same order again. The check finds 255 of 256 cases in which it does not, for each mark.

Source: docs/pipeline.md, "Topics".
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple
from zlib import crc32

import xxhash

from pixiu.errors import Gone, InvalidArgument
from pixiu.placement.slots import SLOTS, Part, slot_of
from pixiu.wire.block import HEAD_BYTES, INDEX_BYTES, MAX_BLOCK_BYTES, Message, encode

ROW_BITS: Final = 28
CHECK_BITS: Final = 8
MAX_EPOCH: Final = (1 << 64 - ROW_BITS - CHECK_BITS) - 2
MAX_ROWS: Final = (1 << ROW_BITS) - 1
"""Rows of a task. Policy: a task with more fails, and says what to do."""
BLOCK_BYTES: Final = 256 << 10
"""Size at which a block is sent; a larger message has its own."""
ROWS_A_SLOT: Final = 1000
"""Rows without a key and a slot that have the same slot, one block after the other."""


class Mark(NamedTuple):
    """The progress of a block."""

    epoch: int
    rows: int
    check: int

    @property
    def number(self) -> int:
        """The mark as a block carries it."""
        return (self.epoch + 1) << ROW_BITS + CHECK_BITS | self.rows << CHECK_BITS | self.check

    @classmethod
    def of(cls, number: int) -> Mark:
        """Decode; epoch -1: nothing is stored."""
        return cls((number >> ROW_BITS + CHECK_BITS) - 1, number >> CHECK_BITS & MAX_ROWS, number & (1 << CHECK_BITS) - 1)


class Stored(NamedTuple):
    """State of a writer in a part."""

    position: int
    """Of its last message; 0: none."""
    progress: int
    """0: none; counts if `position` does."""
    inherited: Mapping[int, int]
    """Part before this one → the progress there."""


class Row(NamedTuple):
    """A row to write."""

    body: bytes
    key: bytes | None = None
    slot: int | None = None
    headers: Sequence[tuple[str, bytes]] = ()
    event_at_us: int | None = None
    tag: str | None = None
    load_test: bool = False


class Outgoing(NamedTuple):
    """A block to be sent."""

    part: int
    group: int
    block: bytes


def writer_of(query: str, partition: int) -> int:
    """The writer of one Spark partition of a query."""
    return xxhash.xxh3_64_intdigest(f"spark/{query}/{partition}".encode()) or 1


class Epoch:
    """One task: the rows of one Spark partition in one epoch.

    Args:
        topic: ID.
        writer: by `writer_of`.
        epoch: number of the micro-batch.
    """

    def __init__(self, topic: int, writer: int, epoch: int) -> None:
        if not 0 <= epoch <= MAX_EPOCH:
            raise InvalidArgument(f"epoch {epoch} is above {MAX_EPOCH}: begin with another checkpointLocation or query")
        self._topic, self._writer, self._epoch = topic, writer, epoch
        self._rows, self._crc = 0, 0
        """Of what is confirmed."""
        self._planned = 0, 0, dict[int, tuple[int, int]]()
        """The same after the rows of the last `blocks`, and part → last position and progress."""
        self._known: dict[int, Part] = {}
        self._lows: list[int] = []
        self._open: list[Part] = []
        self._stored: dict[int, Stored] = {}
        self._marks: dict[int, set[int]] = {}
        """Rows → checks, of this epoch's marks."""
        self._before = 0
        """Rows of this epoch that may be stored somewhere; above `MAX_ROWS`: a later epoch is stored."""

    def learn(self, parts: Iterable[Part], stored: Mapping[int, Stored]) -> bool:
        """Take the topic's parts as they are, and what this writer has stored in those that are open (not `sealed`). False: not
        every slot has an open part that is described, so ask again."""
        self._known = {part.number: part for part in parts}
        self._open = sorted((part for part in self._known.values() if not part.sealed), key=lambda part: part.low)
        self._lows, self._stored = [part.low for part in self._open], dict(stored)
        self._marks, self._before = {}, 0
        for each in stored.values():
            for progress in (each.progress if each.position else 0, *each.inherited.values()):
                mark = Mark.of(progress)
                if mark.epoch == self._epoch:
                    self._marks.setdefault(mark.rows, set()).add(mark.check)
                self._before = max(self._before, self._rows_of(progress))
        ends = [0, *(part.high for part in self._open)]
        return [*self._lows, SLOTS] == ends and all(part.number in stored for part in self._open)

    def _rows_of(self, progress: int) -> int:
        mark = Mark.of(progress)
        return 0 if mark.epoch < self._epoch else mark.rows if mark.epoch == self._epoch else MAX_ROWS + 1

    def blocks(self, rows: Sequence[Row]) -> list[Outgoing]:
        """The blocks of the rows that follow those confirmed, without what is stored. Raises InvalidArgument if the stored rows of
        this epoch were others; Gone, RecordTooLarge.
        """
        count, crc = self._rows, self._crc
        if count + len(rows) > MAX_ROWS:
            raise InvalidArgument(f"a Spark partition has more than {MAX_ROWS} rows: repartition, or set maxOffsetsPerTrigger")
        found, open_blocks = list[Outgoing](), dict[int, _Open]()
        last = {number: (each.position, each.progress) for number, each in self._stored.items()}
        for row in rows:
            slot = self.slot(row, count)
            count, crc = count + 1, _crc(row, slot, crc)
            if count <= self._before:
                self._check(count, crc)
                if count <= self._stored_rows(slot):
                    continue
            part = self._open[bisect_right(self._lows, slot) - 1]
            size = _size(row)
            current = open_blocks.get(part.number)
            if current is not None and current.size + size > BLOCK_BYTES:
                found.append(self._close(current, last))
                current = None
            if current is None:
                current = open_blocks[part.number] = _Open(part)
            current.messages.append(
                Message(row.body, slot, row.key, row.headers, row.event_at_us, None, None, row.tag, row.load_test)
            )
            current.size += size
            current.last = count, crc
        found += [self._close(each, last) for each in open_blocks.values()]
        self._planned = count, crc, last
        return found

    def _close(self, block: _Open, last: dict[int, tuple[int, int]]) -> Outgoing:
        number, (rows, crc) = block.part.number, block.last
        mark = Mark(self._epoch, rows, crc & (1 << CHECK_BITS) - 1).number
        position = last[number][0]
        last[number] = position + len(block.messages), mark
        data = encode(block.messages, topic=self._topic, part=number, writer=self._writer, first=position + 1, progress=mark)
        return Outgoing(number, block.part.group, data)

    def confirmed(self) -> None:
        """The blocks of the last rows are stored: what follows goes on behind them."""
        self._rows, self._crc, last = self._planned
        self._stored = {number: each._replace(position=last[number][0], progress=last[number][1]) for number, each in
                        self._stored.items() if number in last}  # fmt: skip

    def end(self) -> None:
        """The task has no more rows. Raises InvalidArgument if it had more when this epoch was written before."""
        if self._rows < self._before <= MAX_ROWS:
            raise _others(f"{self._before} rows were written, now it has {self._rows}")

    def slot(self, row: Row, number: int) -> int:
        """The slot of a row: its own, else its key's, else by its number in the task."""
        if row.slot is not None:
            return row.slot
        if row.key is not None:
            return slot_of(row.key)
        return xxhash.xxh3_64_intdigest(b"%d/%d" % (self._writer, number // ROWS_A_SLOT)) % SLOTS

    def _check(self, count: int, crc: int) -> None:
        checks = self._marks.get(count)
        if checks and checks != {crc & (1 << CHECK_BITS) - 1}:
            raise _others(f"its first {count} rows are not those that were written before")

    def _stored_rows(self, slot: int) -> int:
        """The rows of this epoch up to which those of a slot are stored: in its open part, or in those before."""
        part = self._open[bisect_right(self._lows, slot) - 1]
        stored = self._stored[part.number]
        found = self._rows_of(stored.progress) if stored.position else 0
        for number, progress in stored.inherited.items():
            rows, before = self._rows_of(progress), self._known.get(number)
            if not rows:
                continue
            if before is None:
                raise Gone(
                    f"part {number} was dropped by retention, and rows of epoch {self._epoch} are in it: which ones is not known; "
                    "use another checkpointLocation, or query"
                )
            if before.low <= slot < before.high:
                found = max(found, rows)
        return found


class _Open:
    """A block that is being filled."""

    __slots__ = ("last", "messages", "part", "size")

    def __init__(self, part: Part) -> None:
        self.part, self.messages = part, list[Message]()
        self.size = 0
        self.last = (0, 0)


def _size(row: Row) -> int:
    """About the bytes of a row in a block."""
    size = INDEX_BYTES + 16 + len(row.body) + len(row.key or b"") + len(row.tag or "")
    return size + sum(len(name) + len(value) + 3 for name, value in row.headers) if row.headers else size


def _crc(row: Row, slot: int, crc: int) -> int:
    crc = crc32(row.body, crc ^ slot)
    return crc if row.key is None else crc32(row.key, crc)


def _others(text: str) -> InvalidArgument:
    return InvalidArgument(
        f"a Spark partition of this epoch was written before, and {text}: the plan must give the same rows in the same order when "
        "it is computed again; sort within partitions before the sink, or write all again with another checkpointLocation or query"
    )


assert HEAD_BYTES + INDEX_BYTES + BLOCK_BYTES < MAX_BLOCK_BYTES
