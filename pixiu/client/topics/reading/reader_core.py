"""The core of a reader: which parts it reads from where, and which it may begin. Pure.

    start ──▶ parts of the topic, each from an offset or a time
    part 1 ──sealed, read to its end──▶ finished ──▶ its children, once all of their parents are

A position is {part: next offset} of the parts that are read, and of those that are finished while a child of theirs has to wait.
It says everything: what came before the parts in it was read, and what comes after them was not.

Source: docs/topics.md, "Reading".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from pixiu.client.topics.drafts import list_of
from pixiu.client.topics.topic_map import TopicMap
from pixiu.errors import InvalidArgument
from pixiu.placement.slots import SLOTS, Part

MAX_READ: Final = 256
"""Parts that are read at a time. Policy: others wait until one of them is finished."""
Where = int | Literal["end"] | tuple[Literal["time"], int]
"""An offset, the end, or ("time", Unix µs)."""


@dataclass(slots=True)
class PartRead:
    """A part of a topic as a reader has it."""

    part: Part
    where: Where
    """From where to read next."""
    next: int | None = None
    """Offset of the next message that the application gets; None: not known yet."""
    first: bool = False
    """True if it begins with whatever is kept: what was dropped before is no gap."""
    finished: bool = False
    reading: bool = False


class ReaderCore:
    """Decides; see the module.

    Args:
        topic: as described last.
        start: where each part begins, or a position.
        slots: slots that are read; None: all.
    """

    def __init__(self, topic: TopicMap, start: Where | Mapping[int, int], slots: Iterable[int] | None = None) -> None:
        self.topic = topic
        self.slots = None if slots is None else frozenset(slots)
        self.parts: dict[int, PartRead] = {}
        self._before: set[int] = set()
        """Parts that were read before."""
        self._start: Where = 0
        if isinstance(start, Mapping):
            self._resume(start)
        else:
            self._begin(start)
        self.set_topic(topic)

    def _begin(self, start: Where) -> None:
        for part in self.topic.lineage.parts.values():
            if start == "end" and part.sealed:
                self._before.add(part.number)
            elif self._wanted(part):
                self.parts[part.number] = PartRead(part, start, first=start == 0)

    def _resume(self, start: Mapping[int, int]) -> None:
        parts = self.topic.lineage.parts
        unknown = sorted(start.keys() - parts.keys())
        if unknown and not any(number in parts for number in start):
            raise InvalidArgument(
                f"the topic {self.topic.name} has no part {unknown[0]}: the position is of another topic, or too old"
            )
        todo = [parent for number in start if number in parts for parent in parts[number].parents]
        while todo:
            number = todo.pop()
            if number in parts and number not in self._before and number not in start:
                self._before.add(number)
                todo += parts[number].parents
        for number, offset in start.items():
            if number in parts and self._wanted(parts[number]):
                self.parts[number] = PartRead(parts[number], offset, offset)

    def _wanted(self, part: Part) -> bool:
        return self.slots is None or any(part.low <= slot < part.high for slot in self.slots)

    def set_topic(self, topic: TopicMap) -> None:
        """Take a newer description of the topic: parts that were added are read from their beginning."""
        if topic.id != self.topic.id or topic.version < self.topic.version:
            return
        self.topic = topic
        for number, part in topic.lineage.parts.items():
            known = self.parts.get(number)
            if known is not None:
                known.part = part
            elif number not in self._before and self._wanted(part):
                self.parts[number] = PartRead(part, 0)

    def _is_done(self, number: int) -> bool:
        """True if a part was read, or is kept no more, or is not wanted."""
        known = self.parts.get(number)
        return known.finished if known is not None else True

    def ready(self) -> list[PartRead]:
        """Parts to begin reading now; they count as being read."""
        free = MAX_READ - sum(each.reading for each in self.parts.values())
        found = [
            each
            for each in self.parts.values()
            if not each.reading and not each.finished and all(self._is_done(parent) for parent in each.part.parents)
        ]
        for each in found[: max(0, free)]:
            each.reading = True
        return found[: max(0, free)]

    def finish(self, number: int) -> None:
        """A sealed part was read to its end, and the application has everything of it."""
        each = self.parts[number]
        each.finished, each.reading = True, False
        self._forget()

    def _forget(self) -> None:
        """Forget finished parts whose children are all being read, or were."""
        for number, each in list(self.parts.items()):
            children = self.topic.lineage.children(number) if number in self.topic.lineage.parts else ()
            if each.finished and children and all(self._has_begun(child) for child in children if self._wanted(child)):
                del self.parts[number]
                self._before.add(number)

    def _has_begun(self, child: Part) -> bool:
        return child.number in self._before or all(self._is_done(parent) for parent in child.parents)

    def position(self) -> dict[str, int]:
        """Place to go on from, as JSON can have it."""
        return {
            str(number): each.next or 0
            for number, each in self.parts.items()
            if each.next is not None or all(self._is_done(parent) for parent in each.part.parents)
        }


def slots_of(slots: Iterable[int] | None) -> frozenset[int] | None:
    """Check the slots of a reader. Raises `InvalidArgument`."""
    if slots is None:
        return None
    found = frozenset(list_of(slots, "slots"))
    if not found or any(not isinstance(slot, int) or not 0 <= slot < SLOTS for slot in found):
        raise InvalidArgument(f"slots are numbers from 0 to {SLOTS - 1}, at least one")
    return found
