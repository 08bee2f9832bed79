"""Feeds: the router replicas from which a broker gets each router partition's membership. Pure.

A feed is one router partition that shares rooms with the broker's:

    SEEKING ── a Running router ──▶ SNAPSHOT ── merged ──▶ LIVE
       ▲                               │                     │
       ├──── it failed, or it died ────┘      "subscribed: false" ──▶ SNAPSHOT
       └──── it died or vanished ────────────────────────────┘

Source: PiXiu §5.3 steps 6 and 10; docs/architecture.md, docs/memberships.md.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from cluster.membership.map.isolation import OUT_OF_CONTACT_S
from cluster.membership.map.lww_map import Key
from cluster.membership.map.updates import Update
from cluster.membership.member.state import retry_pause_s
from pixiu.ids import EndpointID

MAX_QUEUED_MESSAGES: Final = 200_000
"""Gateway messages that wait for one feed's snapshot. Policy: further ones are taken at once."""


class FeedState(Enum):
    """State of a subscription to one router partition."""

    SEEKING = "Seeking"
    SNAPSHOT = "Snapshot"
    LIVE = "Live"


@dataclass(slots=True)
class Feed:
    """Membership of one router partition."""

    partition: int
    state: FeedState = FeedState.SEEKING
    source: EndpointID | None = None
    complete: bool = False
    """True once a snapshot was merged."""
    attempts: int = 0
    retry_at: float = 0.0
    finished_at: float = -1e9
    """Time when the last snapshot was merged."""
    lost_at: float | None = None
    """Time since which no router is known to send us everything; None before the first snapshot, and while LIVE."""
    queue: deque[list[Update]] = field(default_factory=deque)
    queued: int = 0
    seen: set[Key] | None = None
    """Keys of the present snapshot and of live messages since, if all others will be dropped."""

    def begin(self, source: EndpointID, now: float) -> None:
        """Take a snapshot from a router. After a long time without one, entries not in it are dropped: tombstones may be gone."""
        self.state, self.source = FeedState.SNAPSHOT, source
        out = self.lost_at is not None and now - self.lost_at > OUT_OF_CONTACT_S
        self.seen = set() if out else None

    def lose(self, now: float) -> None:
        """Look for another router: this one is gone, or has not sent everything."""
        if self.state is FeedState.LIVE:
            self.lost_at = now
        self.state, self.source, self.seen = FeedState.SEEKING, None, None

    def fail(self, endpoint: EndpointID, now: float) -> None:
        """Note that the snapshot failed: try again after a pause."""
        self.lose(now)
        self.attempts += 1
        self.retry_at = now + retry_pause_s(endpoint, self.attempts)

    def succeed(self, now: float) -> None:
        """Note that the snapshot is merged."""
        self.state, self.complete, self.attempts = FeedState.LIVE, True, 0
        self.finished_at, self.lost_at, self.seen = now, None, None

    def enqueue(self, messages: list[Update]) -> bool:
        """Keep messages for the end of the snapshot. Returns False if there is no space for them."""
        if self.queued + len(messages) > MAX_QUEUED_MESSAGES:
            return False
        self.queue.append(messages)
        self.queued += len(messages)
        return True

    def replay(self) -> list[Update]:
        """Take the kept messages, in order."""
        found = [change for messages in self.queue for change in messages]
        self.queue.clear()
        self.queued = 0
        return found
