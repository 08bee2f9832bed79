"""Blocks before they are in the log: checked, and held against what this leader has appended already. Pure.

Source: docs/topics.md, "Writing".
"""

from __future__ import annotations

import math
from typing import Final

from cluster.core.token_bucket import Meter
from cluster.topics.entries import part_id
from pixiu.errors import MalformedData, Overloaded, StaleWriter
from pixiu.placement.slots import SLOTS
from pixiu.wire.block import MAX_OFFSET, Block, parse
from topic.parked import Parked
from topic.state.parts import MAX_WRITERS, Appended, Verdict
from topic.state.state import State

BURST_S: Final = 1.0
"""Burst of a topic's rates, seconds."""
MAX_WAIT_S: Final = 5.0
"""Longest time after which a writer is asked to try again: the rate may have been raised."""


class Writes:
    """Positions that this leader has appended for writers, ahead of the state.

    Only what would certainly be refused is refused here. Everything else is for the state, which decides in the order of the log: a
    block after a lost one, for example, is not worth an entry.

    Args:
        state: of the group.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self.parked = Parked()
        """Blocks of parts that are not open yet."""
        self._ahead: dict[tuple[int, int], int] = {}
        """(part, writer) → last position in the log, while that is more than the state has."""
        self._meters: dict[int, tuple[tuple[float, float], Meter]] = {}
        """Part → its rates, and what it has taken by them."""
        self._fences: dict[tuple[int, int], int] = {}
        """(topic, writer) → epoch of a fence that is on its way."""
        self._ending = 0
        """Entries on their way that may end parts: what becomes of a block is then not certain."""

    def clear(self) -> None:
        """The leader has changed."""
        self._ahead.clear()
        self._meters.clear()
        self._fences.clear()
        self._ending = 0

    def ending(self, more: int) -> None:
        """An entry that may end parts is on its way, 1, or no longer, -1."""
        self._ending += more

    def fence(self, topic: int, writer: int, epoch: int) -> None:
        """A fence is on its way: what comes after it into the log has at least this epoch."""
        self._fences[topic, writer] = max(epoch, self._fences.get((topic, writer), 0))

    def fenced(self, topic: int, writer: int) -> None:
        """A fence is in the state, or did not come into the log."""
        self._fences.pop((topic, writer), None)

    def check_epoch(self, block: Block, epoch: int) -> bool:
        """Check that no later process has the writer's name. Returns True if nobody with this epoch was seen before. Raises
        StaleWriter."""
        key = block.topic, block.writer
        known = max(self._state.fences.get(key, 0), self._fences.get(key, 0))
        if epoch < known:
            raise StaleWriter(
                "another process opened this writer's name later, so this one may write no more: end one of them; the one that is "
                "to go on opens the writer again, and continues after its `progress`"
            )
        return epoch > known

    def check(self, data: bytes) -> tuple[Block, Appended | None, bool]:
        """Check a block, and whether it may go into the log; an outcome: it may not, for that reason. True: it will be stored, if
        the log keeps it. Raises MalformedData."""
        block = parse(data)
        part = self._state.parts.get(part_id(block.topic, block.part))
        if part is None or part.opening:
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

    def charge(self, block: Block, size: int, now: float) -> None:
        """Charge a block to its topic's rates. A part has the share of them that it has of the slots, so that all open parts
        together have the whole, however the topic is resized. What is stored already is free. Raises Overloaded: nothing is
        charged."""
        number = part_id(block.topic, block.part)
        part, topic = self._state.parts.get(number), self._state.topics.get(block.topic)
        if part is None or topic is None or part.sealed or not (topic.messages_per_s or topic.bytes_per_s):
            return
        known = part.writers.get(block.writer)
        if known is not None and block.last <= known.position:
            return
        share = (part.high - part.low) / SLOTS
        rates = topic.messages_per_s * share, topic.bytes_per_s * share
        found = self._meters.get(number)
        if found is None or found[0] != rates:
            self._meters = {each: meter for each, meter in self._meters.items() if each in self._state.parts}
            found = self._meters[number] = rates, Meter(*rates, BURST_S, now)
        if wait_s := found[1].take(block.count, size, now):
            text = f"part {block.part} of topic {topic.name} takes {_rates_text(*rates)}, a share of the topic's rate; "
            raise Overloaded(
                f"{text}try again in {wait_s:.3f} s, or raise it: `pixiu topic alter {topic.name} --rate`", _ms(wait_s)
            )

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


def _rates_text(messages: float, size: float) -> str:
    found = [f"{messages:,.6g} messages"] if messages else []
    return " and ".join([*found, *([f"{size:,.6g} bytes"] if size else [])]) + " a second"


def _ms(wait_s: float) -> int:
    return math.ceil(min(wait_s, MAX_WAIT_S) * 1000)
