"""Parts that follow sealed ones as leaders name them, before a description of the topic has them. Pure.

A leader that refuses a block since its part is sealed says which parts follow. They are final from then on: a resize that has begun
is never taken back. So a writer goes on there at once, and the child's leader lets it wait until the part is open.

Source: docs/topics.md, "Writing".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pixiu.client.topics.topic_map import TopicMap
from pixiu.errors import InvalidArgument
from pixiu.placement.slots import Lineage, Part


class Ahead:
    """A topic as described last, and what is known beyond that.

    Args:
        described: the topic.
    """

    def __init__(self, described: TopicMap) -> None:
        self.topic = self._described = described
        """The topic with everything that is known."""
        self._resizes: list[tuple[Part, ...]] = []
        """Children of each resize, in the order in which they were heard of."""

    def describe(self, topic: TopicMap) -> bool:
        """Take a description; False: it is older than the one before. What it has is no longer known beyond it."""
        if topic.version < self._described.version:
            return False
        self._described = topic
        self._apply()
        return True

    def note(self, children: Sequence[Part]) -> None:
        """Note the children that a leader names."""
        found = tuple(children)
        if found and found not in self._resizes:
            self._resizes.append(found)
            self._apply()

    def _apply(self) -> None:
        described = found = self._described.lineage
        kept = list[tuple[Part, ...]]()
        for children in self._resizes:
            if any(child.number in described.parts for child in children):
                continue
            after = _followed(found, children)
            if after is not None:
                found = after
                kept.append(children)
        self._resizes = kept
        self.topic = replace(self._described, lineage=found)


def _followed(lineage: Lineage, children: Sequence[Part]) -> Lineage | None:
    """The lineage after parts were followed by these; None: they do not fit, since it is too old, or newer than they are."""
    parents = [part for part in lineage.open_parts() if any(part.overlaps(child) for child in children)]
    if max((part.number for part in parents), default=0) >= min(child.number for child in children):
        return None
    ended = {part.number: part._replace(sealed=True) for part in parents}
    made = [
        Part(child.number, child.low, child.high, child.group, tuple(part.number for part in parents if part.overlaps(child)))
        for child in children
    ]
    try:
        return Lineage([*(ended.get(part.number, part) for part in lineage.parts.values()), *made])
    except InvalidArgument:
        return None
