"""Blocks before they are in the log: checked, and held against what this leader has appended already. Pure.

Source: docs/topics.md, "Writing".
"""

from __future__ import annotations

from pixiu.errors import MalformedData
from pixiu.wire.block import MAX_OFFSET, Block, parse
from topic.entries import part_id
from topic.state.parts import MAX_WRITERS, Appended, Verdict
from topic.state.state import State


class Writes:
    """Positions that this leader has appended for writers, ahead of the state.

    Only what would certainly be refused is refused here. Everything else is for the state, which decides in the order of the log: a
    block after a lost one, for example, is not worth an entry.

    Args:
        state: of the group.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._ahead: dict[tuple[int, int], int] = {}
        """(part, writer) → last position in the log, while that is more than the state has."""
        self._ending = 0
        """Entries on their way that may end parts: what becomes of a block is then not certain."""

    def clear(self) -> None:
        """The leader has changed."""
        self._ahead.clear()
        self._ending = 0

    def ending(self, more: int) -> None:
        """An entry that may end parts is on its way, 1, or no longer, -1."""
        self._ending += more

    def check(self, data: bytes) -> tuple[Block, Appended | None, bool]:
        """Check a block, and whether it may go into the log; an outcome: it may not, for that reason. True: it will be stored, if
        the log keeps it. Raises MalformedData."""
        block = parse(data)
        part = self._state.parts.get(part_id(block.topic, block.part))
        if part is None:
            return block, Appended(Verdict.NOT_HERE, 0), False
        if not part.holds(block):
            raise MalformedData(f"the block has messages of slots that part {block.part} does not hold")
        ahead = self._ahead.get((part.part, block.writer))
        known = part.writers.get(block.writer)
        position = known.position if known else 0
        if ahead is not None and block.first > max(ahead, position) + 1:
            return block, Appended(Verdict.HOLE, position), False
        open_ = not (self._ending or part.sealed or part.deleted) and part.end + block.count <= MAX_OFFSET // 2
        follows = block.first == max(ahead or 0, position) + 1
        return block, None, open_ and follows and (known is not None or len(part.writers) + len(self._ahead) < MAX_WRITERS)

    def proposed(self, block: Block) -> None:
        """A block is on its way into the log."""
        key = part_id(block.topic, block.part), block.writer
        self._ahead[key] = max(self._ahead.get(key, 0), block.last)

    def refused(self, block: Block) -> None:
        """A block did not come into the log: those that follow it are holes."""
        key = part_id(block.topic, block.part), block.writer
        if key in self._ahead:
            self._ahead[key] = min(self._ahead[key], block.first - 1)

    def applied(self, block: Block, found: Appended) -> None:
        """A block was applied."""
        key = part_id(block.topic, block.part), block.writer
        if self._ahead.get(key, found.position + 1) <= found.position or found.verdict not in (Verdict.STORED, Verdict.REPEATED):
            self._ahead.pop(key, None)
