"""State of a peer according to heartbeats: a table of states and events.

Source: docs/links.md.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from cluster.links.api import PeerState


class Event(Enum):
    """Event in the life of a peer."""

    HEARD = "heard"
    """Any authentic datagram or frame from the peer."""
    MISSED_SOME = "missed_some"
    """`suspect_after` heartbeats in a row without a sign of life."""
    MISSED_ALL = "missed_all"
    """`dead_after` heartbeats in a row without a sign of life."""
    WINDOW_VOID = "window_void"
    """Nothing was heard for as long as data may be in flight (3 s)."""
    REPLACED = "replaced"
    """Another process answers at the peer's address."""


TABLE: Final[dict[tuple[PeerState, Event], PeerState]] = {
    (PeerState.UNKNOWN, Event.HEARD): PeerState.ALIVE,
    (PeerState.UNKNOWN, Event.MISSED_SOME): PeerState.SUSPECT,
    (PeerState.UNKNOWN, Event.MISSED_ALL): PeerState.DEAD,
    (PeerState.UNKNOWN, Event.WINDOW_VOID): PeerState.DEAD,
    (PeerState.UNKNOWN, Event.REPLACED): PeerState.DEAD,
    (PeerState.ALIVE, Event.HEARD): PeerState.ALIVE,
    (PeerState.ALIVE, Event.MISSED_SOME): PeerState.SUSPECT,
    (PeerState.ALIVE, Event.MISSED_ALL): PeerState.DEAD,
    (PeerState.ALIVE, Event.WINDOW_VOID): PeerState.DEAD,
    (PeerState.ALIVE, Event.REPLACED): PeerState.DEAD,
    (PeerState.SUSPECT, Event.HEARD): PeerState.ALIVE,
    (PeerState.SUSPECT, Event.MISSED_SOME): PeerState.SUSPECT,
    (PeerState.SUSPECT, Event.MISSED_ALL): PeerState.DEAD,
    (PeerState.SUSPECT, Event.WINDOW_VOID): PeerState.DEAD,
    (PeerState.SUSPECT, Event.REPLACED): PeerState.DEAD,
    (PeerState.DEAD, Event.HEARD): PeerState.ALIVE,
    (PeerState.DEAD, Event.MISSED_SOME): PeerState.DEAD,
    (PeerState.DEAD, Event.MISSED_ALL): PeerState.DEAD,
    (PeerState.DEAD, Event.WINDOW_VOID): PeerState.DEAD,
    (PeerState.DEAD, Event.REPLACED): PeerState.DEAD,
}


class Liveness:
    """The state of one peer. Time is measured in heartbeats sent, so that a pause of this process counts as one miss."""

    __slots__ = ("_dead_after", "_suspect_after", "missed", "state")

    def __init__(self, suspect_after: int, dead_after: int) -> None:
        self.state = PeerState.UNKNOWN
        self.missed = 0
        self._suspect_after = suspect_after
        self._dead_after = dead_after

    def step(self, event: Event) -> bool:
        """Apply an event. True if the state changed."""
        if event is Event.HEARD:
            self.missed = 0
        before = self.state
        self.state = TABLE[before, event]
        return self.state is not before

    def heartbeat_due(self, heard: bool) -> bool:
        """Note that a heartbeat is about to be sent; `heard`: a sign of life came since the previous one. True if the state
        changed.

        The sign itself was an event when it came, so a peer that was replaced since then does not become alive by it.
        """
        if heard:
            self.missed = 0
            return False
        self.missed += 1
        if self.missed >= self._dead_after:
            return self.step(Event.MISSED_ALL)
        if self.missed >= self._suspect_after:
            return self.step(Event.MISSED_SOME)
        return False
