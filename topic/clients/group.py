"""The replica as its listeners see it.

Source: docs/topics.md.
"""

from __future__ import annotations

from typing import Protocol

from cluster.access.login_guard import LoginSession
from cluster.topics.entries import TopicSettings
from pixiu.errors import NotServed, PixiuError, Refusal
from pixiu.wire.v1 import topic_pb2 as pb
from topic import events as ev
from topic.core import Core
from topic.state.state import State
from topic.storage.reader import Reader
from topic.storage.store import Store


class Group(Protocol):
    """One replica of a group."""

    @property
    def core(self) -> Core:
        """Decides."""

    @property
    def store(self) -> Store:
        """Has the state and the blocks."""

    @property
    def reader(self) -> Reader:
        """Reads blocks that are not in memory."""

    @property
    def leader(self) -> str:
        """Client address of the leader, as far as it is known; empty: this one leads, or nobody."""

    def step(self, event: ev.Event) -> None:
        """Pass an event to the core."""

    def check_reads(self) -> None:
        """Raise NotLeader, Unavailable unless what is read here is the newest there is."""

    async def request(self, kind: int, payload: bytes, force: bool = False) -> object:
        """Append an entry; returns the state's answer when it is applied. Raises PixiuError."""


def refusal_of(group: Group, error: PixiuError | Refusal) -> pb.TopicRefusal:
    """A refusal on the wire."""
    code, text, retry_after_ms = Refusal.of(error) if isinstance(error, PixiuError) else error
    leader = group.leader if code == "NOT_LEADER" else ""
    return pb.TopicRefusal(code=code, text=text, retry_after_ms=retry_after_ms, leader=leader)


def topic_named(state: State, name: str) -> TopicSettings:
    """A topic of this group. Raises NotServed."""
    found = state.topic_named(name)
    if found is None:
        raise NotServed(f"this group holds nothing of a topic {name[:128]!r}; ask a proxy where it is, or create it")
    return found


async def require(session: LoginSession | None, action: str, topic: str) -> None:
    """Raise NotAllowed, Unavailable unless the caller may do it; a callback is asked where the rules say so."""
    if session is None:
        return
    if session.asks:
        session.foresee(action, topic)
        await session.ask()
    session.require(action, topic)
