"""Safety levels of writes, and the state of the partition that took them, with the same names in all roles and the SDK. Pure.

    ACCEPTED ──▶ PERSISTED ──▶ REPLICATED ──▶ STORED      a write rises; who waits for a level is answered when it is reached

Source: docs/protocol.md, "Levels"; docs/sources.md (the triple V, S, C of the write protocol).
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from pixiu.wire.v1 import level_pb2


class Level(Enum):
    """Safety of a write when it is answered. The values are those of `Level` on the wire.

    The safest that every role has is 0, so that a request that names none gets it. Compare with `at_least`; members have no order.
    """

    REPLICATED = level_pb2.REPLICATED
    """Synced on every replica in the maximal in-sync set, and applied by the leader."""
    PERSISTED = level_pb2.PERSISTED
    """Synced on the leader's disk."""
    ACCEPTED = level_pb2.ACCEPTED
    """In the leader's log: survives its process."""
    STORED = level_pb2.STORED
    """Replicated, and in the object store. For durable topics only."""

    def at_least(self, other: Level) -> bool:
        """True if this level is as safe as the other one, or safer."""
        return self is Level.STORED or (other is not Level.STORED and self.value <= other.value)

    @classmethod
    def from_wire(cls, number: int) -> Level | None:
        """The level of rooms' and mail's stores with this number in a message; None if there is none."""
        return _BY_NUMBER.get(number)


_BY_NUMBER: dict[int, Level] = {level.value: level for level in Level if level is not Level.STORED}


class Triple(NamedTuple):
    """State of a partition of Xiu or Pi: the triple of the write protocol."""

    layout_version: int
    """V, the version of the layout."""
    epoch: int
    """S, the epoch of the leader; 0 if the replica that reports it does not lead."""
    committed: int
    """C: the log is persisted and replicated up to here."""
