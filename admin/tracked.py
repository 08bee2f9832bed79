"""Topics and groups as the leading admin knows them; all of it is forgotten with the leadership. Pure.

Source: docs/topics.md, "Administration".
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from admin import events as ev
from admin.steps import Done, Key, Step
from pixiu.discovery.topics import PartState, TopicNode

MAX_ASKED: Final = 16
"""Entries that one group is asked for at a time. Policy: further ones wait."""
FIRST_BACKOFF_S: Final = 0.25
MAX_BACKOFF_S: Final = 5.0
"""Longest pause after a group that did not answer."""


@dataclass(slots=True)
class Asked:
    """A change that a client asks for."""

    request: int
    change: ev.Change
    since: float
    tries: int = 0


@dataclass(slots=True)
class Waiting:
    """A client that waits for a version to be in effect."""

    request: int
    version: int
    until: float


@dataclass(slots=True)
class Topic:
    """A topic: its node, and what its groups have of it."""

    name: str
    version: int = -1
    """Of its node in the registry; -1: there is none."""
    node: TopicNode | None = None
    done: dict[Key, Done] = field(default_factory=dict)
    asked: set[Key] = field(default_factory=set)
    steps: dict[int, deque[Step]] = field(default_factory=dict)
    """Group → entries that may be appended now."""
    stale: bool = True
    """True if `steps` has to be made again."""
    writing: int = 0
    """Token of the write under way; 0: none."""
    intended: TopicNode | None = None
    """The node that is being written; None: it is being deleted."""
    writes_change: bool = False
    """True if the write is of the first of `changes`."""
    changes: deque[Asked] = field(default_factory=deque)
    waiting: list[Waiting] = field(default_factory=list)
    problem: str = ""
    """An entry that a group refused, in words."""

    @property
    def settled(self) -> bool:
        """True if nothing is left to be done."""
        node = self.node
        return (
            node is not None
            and node.settled == node.version
            and not node.purging
            and not any(part.state is PartState.DROPPING for part in node.parts)
        )

    @property
    def idle(self) -> bool:
        """True if there is no topic, and nobody waits for one."""
        return self.node is None and not (self.writing or self.changes or self.waiting)


@dataclass(slots=True)
class Group:
    """A group: what it is asked for, and its load."""

    asked: int = 0
    retry_at: float = 0.0
    backoff_s: float = FIRST_BACKOFF_S
    waiting: dict[str, None] = field(default_factory=dict)
    """Topics that have entries for it."""
    problem: str = ""
    loads: dict[int, ev.Load] = field(default_factory=dict)
    """ID of a part → its load."""
    load_at: float = float("-inf")
    """Time of the last answer with loads."""
    load_failed_at: float = float("-inf")
    cpu: float = 0.0
    """Share of a core that its leader used lately."""

    def loaded(self, event: ev.LoadRead, now: float) -> None:
        """Note its answer to a question for its load."""
        if event.parts is None:
            self.load_failed_at = now
            return
        self.load_at, self.loads, self.cpu = now, dict(event.parts), event.cpu

    def may_ask(self, now: float) -> bool:
        """True if it can be asked for another entry."""
        return self.asked < MAX_ASKED and now >= self.retry_at

    def answered(self) -> None:
        """Note that it answers."""
        self.problem, self.retry_at, self.backoff_s = "", 0.0, FIRST_BACKOFF_S

    def failed(self, why: str, now: float) -> None:
        """Note that it did not answer: it is asked again after a pause."""
        self.problem, self.retry_at = why, now + self.backoff_s
        self.backoff_s = min(2 * self.backoff_s, MAX_BACKOFF_S)

    def forget(self) -> None:
        """Forget what it is asked for."""
        self.asked = 0
        self.answered()
        self.waiting.clear()
