"""ZooKeeper for the simulation: one register with versions, sessions, and clients whose requests and answers get lost or late."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.replication.model import PartitionState, Presence, Versioned


@dataclass
class Session:
    member: int
    presence: Presence
    seen_at: float


@dataclass
class Register:
    """What the servers hold."""

    session_timeout_s: float
    state: PartitionState | None = None
    version: int = -1
    sessions: dict[int, Session] = field(default_factory=dict)
    presence_version: int = 0
    _next: int = 0

    def read(self) -> Versioned:
        return Versioned(self.version, self.state)

    def compare_and_set(self, expected: int, state: PartitionState) -> bool:
        if expected != self.version:
            return False
        self.state, self.version = state, self.version + 1
        return True

    def open(self, member: int, incarnation: int, now: float) -> int:
        """A session with its node. Returns its number."""
        self._next += 1
        self.sessions[self._next] = Session(member, Presence(self._next, member, incarnation), now)  # type: ignore[arg-type]
        self.presence_version += 1
        return self._next

    def close(self, session: int) -> None:
        if self.sessions.pop(session, None) is not None:
            self.presence_version += 1

    def expire(self, now: float) -> None:
        for number in [n for n, s in self.sessions.items() if now > s.seen_at + self.session_timeout_s]:
            self.close(number)

    def live(self) -> tuple[Presence, ...]:
        return tuple(session.presence for session in self.sessions.values())
