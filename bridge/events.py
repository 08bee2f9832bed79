"""Events and effects of a bridge to a target.

    shell    Begin, Opened, OpenFailed, MemberFailed     OpenTarget, CloseTarget, Join, Leave
    channel  Arrived                                     Acknowledge, Reject
    target   Written, WriteFailed                        Write
    operator Begin, End

Source: docs/bridges.md, "How a bridge works".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bridge.connector import Outcome
from cluster.core.contract import EndOfTurn, Tick


@dataclass(frozen=True, slots=True)
class Begin:
    """Run, from now on."""


@dataclass(frozen=True, slots=True)
class End:
    """Finish what is being written, and do nothing more: paused, or this process ends."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The target is open."""


@dataclass(frozen=True, slots=True)
class OpenFailed:
    """The target cannot be opened. `after_s`: the wait that it asked for, seconds."""

    why: str
    after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class MemberFailed:
    """The channel has ended the membership."""

    why: str


class Arrival(NamedTuple):
    """A message that the channel gave."""

    number: int
    """Given by the shell, rising."""
    lane: int
    """Its slot: the messages of one stay in order, if the channel is ordered."""
    size: int
    """Bytes of body, key and headers."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """The channel gave messages, in their order."""

    messages: Sequence[Arrival]


@dataclass(frozen=True, slots=True)
class Written:
    """A batch was written: an outcome for each of its messages, in their order."""

    batch: int
    outcomes: Sequence[Outcome]


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """Nothing is known of a batch, and the target is to be opened again."""

    batch: int
    why: str
    after_s: float = 0.0


Event = Begin | End | Opened | OpenFailed | MemberFailed | Arrived | Written | WriteFailed | EndOfTurn | Tick

# --- effects


@dataclass(frozen=True, slots=True)
class OpenTarget:
    """Connect to the target. Answered by `Opened` or `OpenFailed`."""


@dataclass(frozen=True, slots=True)
class CloseTarget:
    """Disconnect from the target."""


@dataclass(frozen=True, slots=True)
class Join:
    """Become a member of the channel."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Leave the channel: what is not acknowledged comes again, to another process or later."""


@dataclass(frozen=True, slots=True)
class Write:
    """Write messages. Answered by `Written` or `WriteFailed`."""

    batch: int
    numbers: Sequence[int]


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """The target has these messages."""

    numbers: Sequence[int]


@dataclass(frozen=True, slots=True)
class Reject:
    """Messages that can never be written, each with the reason."""

    letters: Sequence[tuple[int, str]]


@dataclass(frozen=True, slots=True)
class Forget:
    """Messages that are no longer this member's, and were not written."""

    numbers: Sequence[int]


Effect = OpenTarget | CloseTarget | Join | Leave | Write | Acknowledge | Reject | Forget
