"""Writers of level stored: blocks that are committed, and not in the object store yet. Pure.

Source: docs/topics.md, "Storage apart from compute".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Final

from cluster.topics.entries import TopicSettings, topic_of
from pixiu.errors import InvalidArgument, Overloaded
from pixiu.wire.levels import Level
from topic.events import WriteReply
from topic.state.parts import Verdict
from topic.state.state import State

HOLD_RETRY_MS: Final = 1000
"""Time after which a writer that is held for the object store tries again, milliseconds."""


class Stored:
    """Answers that wait for the object store. A writer has as many as its window allows.

    Args:
        state: of the group.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self.hold = ""
        """Why blocks of topics with a store are refused now; empty: they are not."""
        self.unusable: dict[str, str] = {}
        """Stores that cannot be opened here, and why."""
        self._waiting: dict[int, deque[tuple[int, WriteReply]]] = {}
        """Part → (end, answer), in the order of commits."""

    @property
    def parts(self) -> Collection[int]:
        """Parts for which somebody waits."""
        return self._waiting.keys()

    def check(self, level: Level, topic: TopicSettings, store: str) -> None:
        """Check a block of a topic with a store, empty: without one. Raises InvalidArgument, Overloaded."""
        if level is Level.STORED and not store:
            raise InvalidArgument(f"the topic {topic.name} has no object store, which level stored needs: {_instead(topic)}")
        if level is Level.STORED and (why := self.unusable.get(store)):
            raise InvalidArgument(
                f"{why}; level stored needs it: mend that on the machines of topics, `pixiu topic alter {topic.name} --store URL` "
                "names another store, and level replicated does without"
            )
        if self.hold and store:
            raise Overloaded(self.hold, HOLD_RETRY_MS)

    def keep(self, number: int, count: int, reply: WriteReply) -> bool:
        """Keep the answer to so many messages in a part, unless the store has them. Returns whether it is kept."""
        part = self._state.parts.get(number)
        if part is None or reply.verdict not in (Verdict.STORED, Verdict.REPEATED):
            return False
        end = reply.base + count if reply.base >= 0 else part.end
        if end <= max(part.stored, part.first):
            return False
        self._waiting.setdefault(number, deque()).append((end, reply))
        return True

    def reached(self, number: int) -> list[WriteReply]:
        """Take the answers that need not wait any more: a part has more in the store, or keeps less, or is gone."""
        waiting, part = self._waiting.get(number, ()), self._state.parts.get(number)
        end = max(part.stored, part.first) if part is not None else None
        found = [reply for each, reply in waiting if end is None or each <= end]
        left = deque((each, reply) for each, reply in waiting if end is not None and each > end)
        if left:
            self._waiting[number] = left
        else:
            self._waiting.pop(number, None)
        return found

    def leave(self, topic: int = -1, part: int = -1) -> list[WriteReply]:
        """Take all answers, or those of a topic or a part: nobody is to wait any more."""
        numbers = [number for number in self._waiting if topic in (-1, topic_of(number)) and part in (-1, number)]
        return [reply for number in numbers for _, reply in self._waiting.pop(number)]


def _instead(topic: TopicSettings) -> str:
    if topic.compact:
        return "it is compacted, and objects never change; level replicated is the highest here"
    return f"`pixiu topic alter {topic.name} --store URL`"
