"""How safe a write is, and where the partition that took it stands: what all roles and the SDK call by the same names. Pure.

    ACCEPTED ──▶ PERSISTED ──▶ REPLICATED      a write rises; whoever waits for a level is answered when it has reached it

Source: docs/protocol.md, "Levels"; docs/sources.md (the triple V, S, C of the write protocol).
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Level(Enum):
    """How safe a write is when it is answered. The values are those of `MailLevel`, `StoreLevel` and `PiLevel` on the wire.

    The safest is 0, so that a request that names none gets it. Compare with `at_least`; members have no order.
    """

    REPLICATED = 0
    """Synced on every replica in the maximal in-sync set, and applied by the leader."""
    PERSISTED = 1
    """Synced on the leader's disk."""
    ACCEPTED = 2
    """In the leader's log: survives its process."""

    def at_least(self, other: Level) -> bool:
        """Whether this is as safe as the other one, or safer."""
        return self.value <= other.value

    @classmethod
    def from_wire(cls, number: int) -> Level | None:
        """The level with this number in a message; None: there is none."""
        return _BY_NUMBER.get(number)


_BY_NUMBER = {level.value: level for level in Level}


class Triple(NamedTuple):
    """Where a partition of Xiu or Pi stands: the triple of the write protocol."""

    layout_version: int
    """V."""
    epoch: int
    """S: of the leader; 0: the replica that says it does not lead."""
    committed: int
    """C: the log is persisted and replicated up to here."""
