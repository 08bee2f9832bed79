"""What a history can be found guilty of.

Source: docs/promises.md, docs/architecture.md, docs/stores.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from tests.history.record import Event


class Rule(StrEnum):
    """What must hold. Each violation is of one of them."""

    HISTORY = "the history makes sense: every end has its call, a retry is the same message"
    TOO_LITTLE = "enough happened to say anything"
    LOST = "what was sent reaches every device of every receiver, or is listed for it"
    KEPT = "what a device has not acknowledged stays listed"
    EXPIRED_SILENTLY = "a device is told of the gap that expired mail leaves"
    GAP = "only expired mail, and mail over the inbox's cap, leaves a gap"
    REFUSED = "what certainly failed never appears"
    ALIEN = "nobody gets another's mail, or what nobody has sent yet"
    CONTENT = "what arrives is what was sent: body, sender's lane"
    ONCE = "an application gets a message once"
    ACKNOWLEDGED_AGAIN = "what a device acknowledged does not come again on a later connection"
    ORDER = "one sender's messages, and those sent one after the other's end, are in order, in the inbox and to a device"
    ONE_TO_ONE = "a message has one MsgID, and a MsgID one message"
    ENTRY = "a message has one InboxSeq in an inbox, and an InboxSeq one message"
    DENSE = "InboxSeqs have no holes"
    CURSOR = "a cursor never goes back"
    STALE = "a list shows what was there before it was asked for"
    UNLISTED = "a list leaves out nothing that was not acknowledged"
    DUP = "a first copy on the wire is not marked as sent again, and a repeated one is"
    WINDOW = "a connection repeats at most a window"


@dataclass(slots=True, frozen=True)
class Violation:
    """A rule that does not hold, and where to look."""

    rule: Rule
    text: str
    lines: tuple[int, ...]
    """Lines of the history, from 1: the events that contradict each other."""

    def shown(self, events: Sequence[Event]) -> str:
        """For a person: the text, and the events with their lines."""
        there = "".join(f"\n    line {line}: {events[line - 1].line()}" for line in self.lines)
        return f"{self.rule.name} ({self.rule}): {self.text}{there}"


@dataclass(slots=True, frozen=True)
class Limits:
    """How much must have happened, and what was configured."""

    sends: int = 1
    """Messages sent with a good end, at least."""
    deliveries: int = 1
    """To applications."""
    acknowledgements: int = 1
    """Begun, at least: they need no answer."""
    faults: int = 1
    """Things broken, at least."""
    window: int = 64
    """Unacknowledged messages of a lane in flight to a device: as many may be repeated on each connection."""
    inbox_cap: int = 100_000
    """Entries of an inbox; older ones go with a gap."""
    settle_us: int = 30_000_000
    """So long after a fault of a store, or its end, a leader may change: levels below `replicated` promise nothing then."""
    handover_us: int = 3_000_000
    """So long after the end of a fault of a relay or of ZooKeeper users may get another relay."""
